"""`tokendrop completion bash`, in a real bash."""

import json
import subprocess
from pathlib import Path

import pytest

from tokendrop.cli.main import main

COMPLETE = r"""
eval "$(cat script)"
[[ "$(complete -p tokendrop)" =~ -F\ ([^ ]+) ]]
COMP_WORDS=(tokendrop "$@")
COMP_CWORD=$#
"${BASH_REMATCH[1]}" tokendrop "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
printf '%s\n' "${COMPREPLY[@]}"
"""
"""What bash does when the Tab key is pressed after some words."""

WORDS = {
    ("pl",): {"plan"},
    ("data", "s"): {"show", "stats"},
    ("bench", "step", "--pre"): {"--preset", "--precision"},
    ("bench", "step", "--precision", ""): {"auto", "bf16", "fp32"},
    ("plan", "job.yaml", "--"): {"--help", "--json", "--seed", "--simulate"},
    ("train", "job.yaml", "--res"): {"--resume"},
    ("plan", "jo"): {"job.yaml", "jobs"},
    ("submit", "job."): {"job.yaml"},
    ("compare", "job.yaml", "jobs/t"): {"jobs/tiny.yaml"},
    ("train", "--resume", "jo"): {"job.yaml", "jobs"},
    ("data", "stats", "jobs/"): {"jobs/tiny.yaml"},
}


@pytest.fixture
def folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder of jobs, and the script in it."""
    (tmp_path / "jobs").mkdir()
    for job in ("job.yaml", "jobs/tiny.yaml"):
        (tmp_path / job).touch()
    main(["completion", "bash"])
    (tmp_path / "script").write_text(capsys.readouterr().out)
    return tmp_path


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_bash_completes_commands_options_and_files(folder: Path, words: tuple[str, ...]) -> None:
    command = ["bash", "--norc", "-c", COMPLETE, "bash", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert (set(done.stdout.split()), done.stderr) == (WORDS[words], "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_each_shell_has_a_script_with_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", shell])
    script = capsys.readouterr().out
    assert all(word in script for word in ("prepare", "cluster", "verify", "working-dir"))
    main(["completion", shell, "--json"])
    assert json.loads(capsys.readouterr().out) == {"shell": shell, "script": script.removesuffix("\n")}


def test_its_help_says_in_one_line_how_to_install_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line is run: it appends another to ~/.bashrc, which a new bash reads."""
    with pytest.raises(SystemExit):
        main(["completion", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    line = said.partition("example: ")[2]
    subprocess.run(["bash", "--norc", "-c", line], env={"HOME": str(tmp_path)}, check=True)
    assert (tmp_path / ".bashrc").read_text() == 'eval "$(tokendrop completion bash)"\n'
    assert "For zsh" in said
    assert "for tcsh" in said
