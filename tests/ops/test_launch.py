"""Which rows of the launch table a device gets, and how other rows take their place."""

import threading

import pytest
import torch

from flakit.numerics import recorded
from flakit.numerics.operators import OPERATORS
from flakit.ops.common import launch
from flakit.ops.common.dispatch import has_triton
from flakit.ops.common.launch import TABLE, Chip, Launch, read_rows, rows_for

KEY = "rwkv6.stream", "16-bit"
OTHER = Launch(32, 32, 2, 2, 128)
ADA = Chip("NVIDIA RTX 4090", 89, 101376)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLAKIT_ROWS", str(tmp_path))
    return tmp_path


def write(folder, **changed):
    row = {"kernel": KEY[0], "width": KEY[1], **OTHER._asdict(), "ms": 0.5} | changed
    return recorded.write(folder / "sm_89.json", recorded.provenance("flakit tune", ADA.name), [row])


def test_without_a_file_a_device_gets_the_rows_built_in(folder):
    assert rows_for(ADA) == {} and TABLE[KEY] == launch.ROWS[KEY]


def test_a_file_has_its_rows_and_says_where_they_were_found(folder):
    path = write(folder)
    meta, rows = read_rows(path)
    assert rows == rows_for(ADA) == {KEY: OTHER} and meta["device"] == ADA.name
    assert rows_for(ADA._replace(capability=86)) == {}


@pytest.fixture
def devices(monkeypatch):
    """A process that uses CUDA devices which are not there."""

    def there(*found):
        monkeypatch.setattr(launch.torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(launch, "chips", lambda: list(found))
        launch._rows_here.cache_clear()

    yield there
    launch._rows_here.cache_clear()
    TABLE._known.clear()


def test_a_device_gets_its_rows(folder, devices):
    write(folder)
    assert TABLE[KEY] == launch.ROWS[KEY]
    devices(ADA)
    for _ in range(2):  # found, and known from then on
        assert TABLE[KEY] == OTHER and TABLE["scan", "16-bit"] == launch.ROWS["scan", "16-bit"]
    with TABLE.using({KEY: OTHER._replace(num_warps=8)}):
        assert TABLE[KEY].num_warps == 8
    assert TABLE[KEY] == OTHER and dict(TABLE.items()) == launch.ROWS


def test_devices_of_two_kinds_get_the_rows_built_in(folder, devices):
    write(folder)
    devices(ADA, ADA._replace(name="NVIDIA H200", capability=90))
    assert TABLE[KEY] == launch.ROWS[KEY]


def test_a_row_that_is_set_is_the_row(devices, folder, monkeypatch):
    devices(ADA)
    assert TABLE[KEY] == launch.ROWS[KEY]
    with monkeypatch.context() as patched:
        patched.setitem(TABLE, KEY, OTHER)
        assert TABLE[KEY] == OTHER
    assert TABLE[KEY] == launch.ROWS[KEY]


@pytest.mark.gpu
def test_this_gpu_says_what_it_has():
    (found,) = launch.chips()
    assert found.name == torch.cuda.get_device_name() and found.capability >= 70
    assert found.shared >= 48 * 1024 and found.registers == 65536
    assert TABLE[KEY] == rows_for(found).get(KEY, launch.ROWS[KEY])


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_how_many_tokens_a_chunk_has():
    from flakit.ops.common.plan_triton import cut_into_chunks

    def taken(asked, K=64, dtype=torch.bfloat16):
        return {op: cut_into_chunks(op, torch.empty(1, 8, 2, K, dtype=dtype), 64, asked)[1] for op in OPERATORS}

    assert taken(0) == taken(64) == taken(256) == {"rwkv6": 64, "rwkv7": 32, "gsa": 64}
    assert taken(32) == taken(64, K=32) == taken(0, K=32) == dict.fromkeys(OPERATORS, 32)
    assert taken(0, dtype=torch.float32) == {"rwkv6": 32, "rwkv7": 16, "gsa": 64}


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
def test_fused_chunks_are_taken_of_heads_that_fit():
    from flakit.ops.common.dispatch import fits_fused

    def taken(K=64, V=64, dtype=torch.bfloat16):
        return fits_fused(torch.empty(1, 8, 2, K, dtype=dtype), torch.empty(1, 8, 2, V, dtype=dtype))

    assert taken() and taken(dtype=torch.float16) and taken(dtype=torch.float32) and taken(K=33, V=33)
    assert not any(taken(**other) for other in (dict(K=32), dict(V=65)))


@pytest.mark.skipif(not has_triton(), reason="needs Triton")
@pytest.mark.parametrize(
    ("B", "T", "H", "packed", "parts"),
    [(8, 4096, 32, 0, 1), (4, 4096, 32, 0, 2), (3, 4096, 32, 0, 5), (1, 32768, 32, 0, 8), (1, 300, 1, 0, 3),
     (1, 32768, 32, 8, 23), (1, 100, 1, 3, 3)],
)  # fmt: skip
def test_sequences_are_cut_into_parts_that_fill_a_gpu(B, T, H, packed, parts):
    from flakit.ops.common.bands_triton import CHUNK, Parts
    from flakit.ops.common.kernel_triton import Memory
    from flakit.ops.common.packed_triton import Packing

    x = torch.empty(B, T, H, 64, dtype=torch.bfloat16, device="meta")
    offsets = torch.zeros(packed + 1, dtype=torch.int32)
    plan = Parts(Memory(), x, x, Packing(offsets, x.shape[1]) if packed else None)
    assert plan.parts == parts * (1 if packed else B) and plan.several == (parts > max(1, packed))
    assert plan.L * CHUNK % 64 == 0 and plan.L * CHUNK * plan.parts >= T


def test_rows_tried_are_seen_by_every_thread_and_leave_no_trace():
    seen = []
    with TABLE.using({KEY: OTHER}):
        thread = threading.Thread(target=lambda: seen.append(TABLE[KEY]))  # as autograd's backward
        thread.start()
        thread.join()
        with TABLE.using({("scan", "16-bit"): OTHER}):
            assert TABLE[KEY] == TABLE["scan", "16-bit"] == OTHER
        assert TABLE["scan", "16-bit"] == launch.ROWS["scan", "16-bit"]
    assert seen == [OTHER] and TABLE[KEY] == launch.ROWS[KEY]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_warps": 0}, r"sm_89\.json: rwkv6\.stream 16-bit: expected whole numbers above 0, got num_warps = 0"),
        ({"BK": 12.5}, "got BK = 12.5"),
        ({"maxnreg": "many"}, "got maxnreg = 'many'"),
    ],
    ids=["zero", "fraction", "word"],
)
def test_a_wrong_row_is_named(folder, changed, says):
    with pytest.raises(ValueError, match=says):
        read_rows(write(folder, **changed))


@pytest.mark.parametrize("text", ["[]", "{", '{"meta": {}, "columns": ["kernel"], "rows": [["scan"]]}'])
def test_a_file_that_is_no_table_of_rows_is_named(folder, text):
    (folder / "sm_89.json").write_text(text)
    with pytest.raises(ValueError, match=r"sm_89\.json: expected meta, columns"):
        rows_for(ADA)


def test_files_that_come_along_are_of_kernels_that_there_are():
    for path in launch.rows_file(89).parent.glob("sm_*.json"):
        _, rows = read_rows(path)
        assert rows and set(rows) <= set(TABLE), path
