"""Record data/gpu_audits.json or data/cpu_audits.json: the verdicts of `flakit audit` on several operators.

python data/record_audits.py flakit [fla] [family] [--out FILE] [--only PROBE] [--workers 6] [--limit 480]

family: flash-linear-attention's kernels of the operators that flakit has references of (`flakit.ops.family`); the file
is data/gpu_family_audits.json unless --out names another.

Each operator is audited in a process of its own. flash-linear-attention's kernels choose among many configurations by
timing them at every new shape, which takes minutes per operator; here each kernel has only the first of its
configurations.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

import torch

from flakit.numerics import recorded
from flakit.numerics.family import FAMILY
from flakit.numerics.operators import OPERATORS

SUBJECTS = {
    whose: [f"{whose}.ops.{op}:{form}_{op}" for op in OPERATORS for form in ("chunk", "fused_recurrent")]
    for whose in ("flakit", "fla")
}
PACKAGES = {"hgrn2": "gla", "dplr_delta_rule": "generalized_delta_rule"}
"""The packages of flash-linear-attention whose name differs from the operator's, by operator."""
SUBJECTS["family"] = [
    f"fla.ops.{PACKAGES.get(op, op)}:{form}_{PACKAGES[op] if op == 'hgrn2' else op} as {op}"
    for op in FAMILY
    for form in ("chunk", "fused_recurrent")
]
"""With the operator that each is held to: HGRN2's kernels are GLA's."""
FLA = {"autotuners": "every kernel with the first of its configurations"}
VALUES = ("worst", "budget", "words", "case", "tried", "settings")


ADAPTERS = {"fla.ops.gla:fused_recurrent_gla": f"{Path(__file__).resolve()}:gate_of_keys"}


def gate_of_keys(function, q, k, v, g, **options):
    """Call `fused_recurrent_gla` with the gate of the keys g under its own name for it, gk."""
    return function(q, k, v, gk=g, **options)


def pin_autotuners() -> None:
    """Restrict every Triton kernel that is defined from now on to the first of its autotuning configurations."""
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.__init__

    def pinned(self, fn, arg_names, configs, *args, **kwargs):
        whole(self, fn, arg_names, configs[:1], *args, **kwargs)

    Autotuner.__init__ = pinned


def audit_one(subject: str, only: list[str] | None, seconds: float, out: Path) -> None:
    from flakit.instruments.audit import audit
    from flakit.instruments.subject import load

    if subject.startswith("fla."):
        pin_autotuners()
    name, _, like = subject.partition(" as ")
    audit(load(name, like or None, ADAPTERS.get(name)), only=only, seconds=seconds).write_json(out)


def rows_of(subject: str, report: dict) -> list[dict]:
    """Return a row per probe of an audit's report, with its setting as text."""
    rows = []
    for probe in report["probes"]:
        setting = probe["setting"]
        words = None if setting is None else ", ".join(f"{name} {value}" for name, value in setting.items())
        row = {"subject": subject, "probe": probe["probe"], "verdict": probe["verdict"]}
        rows.append(row | {name: probe[name] for name in VALUES} | {"setting": words})
    return rows


def main() -> None:
    parser = recorded.script(__doc__)
    parser.add_argument("whose", nargs="*", default=["flakit"], help="some of flakit (the default), fla and family")
    parser.add_argument("--only", action="append", help="a probe; may be repeated")
    parser.add_argument("--workers", type=int, default=1, help="operators audited at a time")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which an audit counts as unfinished")
    parser.add_argument("--seconds", type=float, default=60.0, help="of an audit's probes, as in flakit.audit")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return audit_one(options.one, options.only, options.seconds, options.out)
    if unknown := set(options.whose) - set(SUBJECTS):
        parser.error(f"whose: expected some of {', '.join(SUBJECTS)}, got {' '.join(unknown)}")

    on_gpu = torch.cuda.is_available()
    name = "family_audits.json" if options.whose == ["family"] else "audits.json"
    out = options.out or Path(__file__).parent / f"{'gpu' if on_gpu else 'cpu'}_{name}"
    subjects = [subject for name in options.whose for subject in SUBJECTS[name]]
    meta = recorded.provenance(
        f"python data/record_audits.py {' '.join(options.whose)} --seconds {options.seconds:g}",
        None if on_gpu else "two cores of an x86-64 CPU",
        unfinished="none",
        **(FLA | {"fla": version("fla-core")} if {"fla", "family"} & {*options.whose} else {}),
    )
    rows, unfinished, start = {}, [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        running = {pool.submit(_in_a_process, subject, options, Path(folder)): subject for subject in subjects}
        for done in as_completed(running):
            subject, report = running[done], done.result()
            if isinstance(report, str):
                unfinished.append(f"{subject} ({report})")
                meta["unfinished"], lines = ", ".join(unfinished), [report]
            else:
                rows[subject] = rows_of(subject, report)
                failed = [row for row in rows[subject] if row["verdict"] == "fail"]
                lines = [f"{row['probe']}: {row['words']}" for row in failed] or ["no failure"]
            print(f"{time.monotonic() - start:4.0f} s  {subject}", *lines, sep="\n        ", flush=True)
            if rows:  # after every operator: a table cut short is still a table
                recorded.write(out, meta, [row for name in subjects for row in rows.get(name, [])])
    if not rows:
        parser.exit(1, "no audit was finished\n")
    print("wrote", out)


def _in_a_process(subject: str, options: argparse.Namespace, folder: Path) -> dict | str:
    """Audit an operator in a separate process; return the report, or as text why there is none."""
    out = folder / f"{subject.replace(':', '.').replace(' ', '_')}.json"
    command = [sys.executable, __file__, "--one", subject, "--out", str(out), "--seconds", str(options.seconds)]
    command += [word for probe in options.only or () for word in ("--only", probe)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=options.limit)
    except subprocess.TimeoutExpired:
        return f"not within {options.limit:g} s"
    if ended.returncode:
        return ended.stderr.strip().splitlines()[-1]
    return json.loads(out.read_text())


if __name__ == "__main__":
    main()
