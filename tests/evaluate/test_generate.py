"""What models write: greedily as Hugging Face's, at random by the probabilities of its own warpers."""

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from terminals import written_by
from tokendrop.cli.main import main
from tokendrop.evaluate.export import export_checkpoint
from tokendrop.evaluate.generate import Sampling, Writer, choose, probabilities, sample
from tokendrop.evaluate.load import load_run

PLATFORM = Path(__file__).parents[2] / "platform"
LIKELIEST = Sampling(temperature=0.0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Sampling]:
    """Logits (V), no two alike, and a way to choose."""
    size, seed = draw(st.integers(1, 40)), draw(st.integers(0, 10**6))
    logits_V = 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sampling = Sampling(
        temperature=draw(st.floats(0.1, 5)),
        top_k=draw(st.none() | st.integers(1, 50)),
        top_p=draw(st.just(1.0) | st.floats(0.05, 0.95)),
    )
    return logits_V, sampling


@given(cases())
def test_tokens_are_as_likely_as_hugging_faces_warpers_leave_them(case) -> None:
    logits_V, sampling = case
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    expected_V = warpers(torch.zeros(1, 1, dtype=torch.int64), logits_V[None])[0].softmax(0)
    torch.testing.assert_close(probabilities(logits_V, sampling), expected_V, rtol=1e-12, atol=1e-12)


@given(cases(), st.integers(0, 100))
def test_what_is_drawn_is_likely_and_the_same_for_a_seed(case, seed: int) -> None:
    logits_V, sampling = case
    first, again = (choose(logits_V, sampling, torch.Generator().manual_seed(seed)) for _ in range(2))
    assert first == again
    assert probabilities(logits_V, sampling)[first] > 0
    assert choose(logits_V, LIKELIEST, torch.Generator()) == int(logits_V.argmax())


@given(cases(), st.sampled_from([{"top_p": 0.0}, {"temperature": 1e-320}, {"top_p": 0.0, "temperature": 1e-9}]))
def test_at_its_limits_sampling_leaves_the_likeliest_token(case, limit: dict[str, float]) -> None:
    logits_V, sampling = case
    probabilities_V = probabilities(1e3 * logits_V, replace(sampling, **limit))
    assert probabilities_V.argmax() == logits_V.argmax()
    torch.testing.assert_close(probabilities_V.max().item(), 1.0)


def test_the_likeliest_tokens_are_those_that_hugging_face_writes(tiny_run: Path, tmp_path: Path) -> None:
    model, _, task = load_run(tiny_run)
    theirs = AutoModelForCausalLM.from_pretrained(export_checkpoint(tiny_run, tmp_path / "hf")[0])
    context = [5, 17, 40, 8]
    tokens = sample(task.language_model(model), context, LIKELIEST, seed=1)
    ours = [next(tokens) for _ in range(20)]
    theirs.generation_config.eos_token_id = None  # which would end a text
    written = theirs.generate(torch.tensor([context]), max_new_tokens=20, do_sample=False)
    assert written[0, len(context) :].tolist() == ours


def test_a_text_longer_than_the_models_goes_on_by_its_last_tokens(tiny_run: Path) -> None:
    model, _, task = load_run(tiny_run)
    long = [*range(3, 3 + 2 * model.config.sequence_length)]
    both = [sample(task.language_model(model), one, LIKELIEST, seed=1) for one in (long, long[model.sequence_length :])]
    assert next(both[0]) == next(both[1])


def test_a_document_ends_where_its_end_is_written(tiny_run: Path) -> None:
    writer = Writer(tiny_run)
    tokens = sample(writer.model, [writer.end, *writer.tokenizer.encode("the old").ids], LIKELIEST, seed=1)
    first = [next(tokens) for _ in range(5)]
    assert writer.write("the old", tokens=5, sampling=LIKELIEST, seed=1) == writer.tokenizer.decode(first)
    writer.end, ends = first[2], first.index(first[2])
    context = [first[2], *writer.tokenizer.encode("the old").ids]
    tokens = sample(writer.model, context, LIKELIEST, seed=1)
    expected: list[int] = []
    while len(expected) < 5 and (token := next(tokens)) != writer.end:
        expected.append(token)
    assert ends <= 2
    assert writer.write("the old", tokens=5, sampling=LIKELIEST, seed=1) == writer.tokenizer.decode(expected)


def test_the_command_goes_on_with_a_prompt_and_with_each_line(tiny_run: Path, capsys, monkeypatch) -> None:
    main(["generate", str(tiny_run), "--prompt", "the old bird", "--tokens", "6", "--seed", "3"])
    text = capsys.readouterr().out
    assert text.startswith("the old bird")
    assert len(text) > len("the old bird\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("the old bird\na river\n"))
    main(["generate", str(tiny_run), "--tokens", "6", "--seed", "3", "--json"])
    first, second = json.loads(capsys.readouterr().out)["texts"]
    assert first == text.removesuffix("\n")
    assert second.startswith("a river")


def test_on_a_terminal_each_line_is_gone_on_with_at_once_until_ctrl_d(tiny_run: Path, capsys) -> None:
    options = ["--tokens", "6", "--seed", "3"]
    expected: list[str] = []
    for prompt in ("the old bird", "a river"):
        main(["generate", str(tiny_run), "--prompt", prompt, *options])
        expected.append(capsys.readouterr().out.removesuffix("\n").replace("\n", "\r\n"))
    typed = [
        ("one text a line; Ctrl-D ends\r\n", "the old bird\n"),
        (f"the old bird\r\n{expected[0]}\r\n", "a river\n"),  # the echo, and the text
        (f"a river\r\n{expected[1]}\r\n", "\x04"),
    ]
    command = [sys.executable, "-m", "tokendrop", "generate", str(tiny_run), *options]
    environment = {**os.environ, "PYTHONPATH": str(PLATFORM), "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    code, written = written_by(command, columns=200, environment=environment, typed=typed)
    assert code == 0, written
    assert "Traceback" not in written
    assert written.endswith(f"a river\r\n{expected[1]}\r\n")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # by locale
def test_text_that_is_not_utf8_is_refused(tiny_run: Path, capsys, monkeypatch, errors: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors=errors))
    for arguments in ([], ["--prompt", "caf\udce9"]):
        with pytest.raises(SystemExit) as refused:
            main(["generate", str(tiny_run), "--tokens", "2", *arguments])
        assert refused.value.code == 2
        assert "in UTF-8" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_told(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["generate", str(tmp_path), "--prompt", "a"])
    assert refused.value.code == 2
    assert "want a run folder with a committed checkpoint" in capsys.readouterr().err
