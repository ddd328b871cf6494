import pytest
from typer.testing import CliRunner

import flakit
from flakit import cli, doctor


def run(*args):
    return CliRunner().invoke(cli.app, args)


def test_version():
    assert run("--version").output.strip() == flakit.__version__


def test_without_arguments_it_shows_the_commands():
    assert "doctor" in run().output


def test_unknown_command_is_refused():
    done = run("docter")
    assert (done.exit_code, "docter" in done.output) == (2, True)


@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
@pytest.mark.parametrize("level", [doctor.OK, doctor.WARNING, doctor.BROKEN])
def test_doctor_exits_with_1_only_if_something_is_broken(monkeypatch, level, as_json):
    diagnosis = doctor.Diagnosis((doctor.Finding("torch", level, "as it is"),))
    monkeypatch.setattr(doctor, "examine", lambda: diagnosis)
    done = run("doctor", *["--json"] * as_json)
    assert done.exit_code == (level == doctor.BROKEN)
    assert level in done.output
