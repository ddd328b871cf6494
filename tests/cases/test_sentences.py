"""The sentence under a case's picture, at presets and other settings: what works, what breaks, what repairs it."""

import pytest

from flakit.cases.backstepping import STRONGEST
from flakit.cases.registry import CASES

COLUMN = {"layout": "column of (begin, end)"}

SAYS: dict[str, list[tuple]] = {  # by case: (a preset, or knobs beside the defaults), and a part of the sentence
    "backstepping": [
        ({"w": -STRONGEST}, "less than bfloat16's rounding, 0.0039. dr is off by"),
        ({}, "and bfloat16 would round by 0.0039. Nothing is NaN."),
        ({"w": -1.5}, "not one digit is right"),
        (
            {"w": -7.0, "op": "rwkv6"},
            "leaves float32 on the way. dr and dw are not finite; o and the others are right.",
        ),
        ({"rebuilt": "forward again"}, "Its states are those of the forward pass, to the bit."),
    ],
    "gate_gradient": [
        ({"x": 1.0}, "a number as it should be"),
        ({"x": 88.0}, "forgets everything, dw is 0, and dx = 0 · -1.652e+38 = 0."),
        ({}, "x = 89 at token 9: e^x is above 3.4e+38, where float32 ends, so w = -inf."),
        ({"x": 11.2, "dtype": "float16"}, "above 6.55e+04, where float16 ends"),
        ({"gate": "log_decay"}, "The limit of dx is 0, and log_decay returns it."),
        ({"gate": "logsigmoid"}, "is finite for every number x"),
    ],
    "over_ranks": [
        ("the gate of head 0", "enters head 3 from behind is off by 35%, and dv of its first token still by 10%"),
        ("heads alike", "nothing shows, in any gradient"),
        ("the first rank's", "that gradient is zero, 100% of it is lost"),
        ("repaired", "Over 4 ranks every output and every gradient is what one process gives"),
    ],
    "rounded_chain": [
        ("a long chain in TF32", "4 times what storing the result in bfloat16 costs"),
        ("a short one", "That is reached after 33 chunks"),
        ("repaired", "three products are added up"),
    ],
    "rounded_state": [
        ("it counts", "counts to 128"),
        ("it stops", "From token 256 on the state stands still at 256"),
        ("random writes", "Writes of both signs"),
        ("repaired", "rounded to bfloat16 once, at the end: 1024, of 1024"),
    ],
    "shared_store": [
        ("one block", "All 32 columns are one block"),
        ("two blocks", "2 programs store their shares at one place"),
        ("repaired", "they are added: the whole sum"),
    ],
    "strided_offsets": [
        (COLUMN | {"sequences": 1}, "right by chance"),
        (COLUMN, "Of 35 tokens 13 come out wrong: none because its program begins elsewhere, and 13 are never"),
    ],
    "transposed_mask": [
        ({"K": 64, "V": 96}, "multiples of the tile"),
        ({"K": 20, "V": 20}, "fits into one tile"),
    ],
    "unscaled_term": [
        ("no scale", "It has its full size, whether it looks"),
        ("in 8 parts", "it is 8 times as large as it should be"),
        ("a loss scaler", "The loss is multiplied by 65,536"),
        ("repaired", "multiplied along with it, and has its full size"),
    ],
    "unwritten_rows": [
        ({"memory": "NaN"}, "every number of it is NaN"),
        ({"memory": "an earlier tensor"}, "is off by 0.5"),
    ],
    "zero_key": [
        ("a usual key", "Its gradient grows by 1, and is at most"),
        ("a short key", "A step of that length turns it round"),
        ("nearly zero", "grows by 1e+12 = 1 / 1e-12, and by no more at length 0"),
        ("repaired", "at most a hundred times the largest other"),
    ],
}


@pytest.mark.parametrize(
    ("name", "setting", "says"), [(name, *row) for name, rows in SAYS.items() for row in rows], ids=str
)
def test_the_picture_says_what_happens(name, setting, says):
    case = CASES[name]
    knobs = {knob: each.default for knob, each in case.knobs.items()}
    knobs |= case.picture.PRESETS[setting] if isinstance(setting, str) else setting
    shown = case.module.show(**knobs)
    picture = case.picture.Picture(8)
    picture.update(shown)
    assert says in picture.say(shown)
