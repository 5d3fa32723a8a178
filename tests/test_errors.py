"""What ends a command with one sentence, and with which exit code."""

from pathlib import Path

import pytest

from tokendrop.cli import plan
from tokendrop.cli.main import main
from tokendrop.errors import DamagedDataError, UserError


@pytest.mark.parametrize(("kind", "code"), [(UserError, 2), (DamagedDataError, 1)])
def test_damage_and_mistakes_are_one_sentence_each_with_an_exit_code_of_its_own(monkeypatch, capsys, kind, code):
    def fails(*_: object) -> Path:
        raise kind("this is what is wrong")

    monkeypatch.setattr(plan, "load_job", fails)
    with pytest.raises(SystemExit) as ended:
        main(["plan", "job.yaml"])
    assert ended.value.code == code
    assert capsys.readouterr().err == "tokendrop: this is what is wrong\n"
