"""The command that records audits writes what notebook 15 reads, and the committed recording is whole."""

import json
import sys

import pytest
import record_audits as command

from flakit.instruments import checks
from flakit.instruments.probes import PROBES
from flakit.numerics import recorded
from tests.commands import ROOT


@pytest.mark.full
def test_it_writes_a_row_for_each_operator_and_probe(record, monkeypatch):
    """The first operator is audited in a process of its own, as all are; the others in this one, which takes less."""
    in_a_process = command._in_a_process

    def audited(subject, options, folder):
        if subject == command.SUBJECTS["flakit"][0]:
            return in_a_process(subject, options, folder)
        command.audit_one(subject, options.only, options.seconds, folder / "audit.json")
        return json.loads((folder / "audit.json").read_text())

    monkeypatch.setattr(command, "_in_a_process", audited)
    monkeypatch.setattr(checks, "REPEATING", 0.1)  # seconds of calls
    found = record("record_audits", "--only", "repeat")
    assert [(row["subject"], row["probe"]) for row in found.rows] == [(x, "repeat") for x in command.SUBJECTS["flakit"]]
    assert {row["verdict"] for row in found.rows} == {"pass"}
    assert "scale" in found.rows[0]["setting"] and found.meta["unfinished"] == "none"


def test_an_autotuner_is_left_its_first_configuration(monkeypatch):
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    seen = []

    def build(self, fn, arg_names, configs, key):
        seen.append(configs)

    monkeypatch.setattr(autotuner, "__init__", build)
    command.pin_autotuners()
    object.__new__(autotuner).__init__(None, [], ["first", "second"], key=[])
    assert seen == [["first"]]


@pytest.mark.full
def test_an_operator_that_cannot_be_audited_is_named_with_the_reason(tmp_path, monkeypatch, capsys):
    """Of one operator: that every one has its turn is shown above."""
    monkeypatch.setattr(command, "SUBJECTS", {"flakit": command.SUBJECTS["flakit"][:1]})
    options = ["record_audits.py", "--only", "no-such-probe", "--out", str(tmp_path / "audits.json")]
    monkeypatch.setattr(sys, "argv", options)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 1
    assert "chunk_rwkv6\n        ValueError: only: expected one of truth" in capsys.readouterr().out


@pytest.mark.full
def test_the_family_s_kernels_are_there_and_each_takes_the_arguments_of_its_reference():
    pytest.importorskip("fla")
    from flakit.instruments.subject import load

    for subject in command.SUBJECTS["family"]:
        name, _, like = subject.partition(" as ")
        found = load(name, like, command.ADAPTERS.get(name))
        assert found.by_name and {"scale", "initial_state", "output_final_state"} <= found.named, subject
        assert set(found.op.constants) <= found.taken, subject
    assert len(command.SUBJECTS["family"]) == 20


RECORDED = ("gpu", "flakit"), ("gpu", "fla"), ("gpu_family", "family"), ("cpu", "flakit")


@pytest.mark.parametrize("where, whose", RECORDED)
def test_the_recordings_have_every_operator_and_probe(where, whose):
    found = recorded.read(f"{where}_audits")
    assert found.meta["unfinished"] == "none"
    for subject in command.SUBJECTS[whose]:
        rows = found.select(subject=subject)
        assert [row["probe"] for row in rows] == list(PROBES)
        if whose == "flakit":
            others = {(row["probe"], row["verdict"]) for row in rows if row["verdict"] != "pass"}
            assert others == {("other-device", "not supported") if where == "cpu" else ("ranks", "not run")}


def test_the_documents_have_what_was_recorded_of_the_family():
    found, lines = recorded.read("gpu_family_audits"), []
    for subject in command.SUBJECTS["family"]:
        name, _, like = subject.rpartition(":")[2].partition(" as ")
        of = {verdict: found.select(subject=subject, verdict=verdict) for verdict in ("pass", "not supported", "fail")}
        failed = ", ".join(f"`{row['probe']}`" for row in of["fail"])
        lines.append(f"| `{name}` | {like} | {len(of['pass'])} | {len(of['not supported'])} | {failed} |")
    assert "\n".join(lines) in (ROOT / "docs" / "instruments.md").read_text(encoding="utf-8")
