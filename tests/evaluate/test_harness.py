"""lm-eval on our models: its own adapter on the exported model is the oracle."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokendrop.data.tokenizer import load_tokenizer
from tokendrop.errors import UserError
from tokendrop.evaluate import tasks
from tokendrop.evaluate.export import export_checkpoint
from tokendrop.evaluate.harness import LmEvalAdapter, plain_metrics, run_tasks
from tokendrop.evaluate.load import load_run
from tokendrop.evaluate.suites import SUITES
from tokendrop.evaluate.tasks import Evaluation, Tasks, find_tasks
from tokendrop.method import attach

TASKS = Path(__file__).parent / "tasks"
TINY = ["tiny_choices", "tiny_last_word", "tiny_text", "tiny_writing"]
TOLERANCE = 1e-3  # nats, of one log-likelihood


@pytest.fixture(scope="module")
def own_tasks() -> Tasks:
    """lm-eval's own tasks, which take seconds to read."""
    return Tasks()


@pytest.fixture
def _own_tasks_read_once(own_tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    class Known(Tasks):
        def __init__(self, include_path: list[Path], include_defaults: bool = True) -> None:
            super().__init__(include_path=include_path, include_defaults=False)
            if include_defaults:
                self._index = own_tasks.task_index | self._index
                self._all_tasks = sorted(self._index)

    monkeypatch.setattr(tasks, "Tasks", Known)


def test_our_adapter_is_lm_evals_own_on_the_exported_model(tiny_run: Path, documents: Path):
    ours, theirs = evaluated_by_both(tiny_run, TINY, TASKS)

    assert_equal_results(ours, theirs)
    # the oracle would agree on a broken model too: some answers are right, some wrong, and text was written
    assert 0 < ours["results"]["tiny_choices"]["acc,none"] < 1
    assert len({sample["resps"][0][0] for sample in ours["samples"]["tiny_writing"]}) > 3


@pytest.mark.long
def test_our_adapter_is_lm_evals_own_on_real_tasks(real_data: Path, make_run, tmp_path: Path):
    if not (real_data / "eval").is_dir():
        pytest.skip(f"no evaluation data below {real_data}")
    run = make_run(tmp_path, load_tokenizer(real_data / "gpt2_bpe/tokenizer.json"), width=32)
    names = sorted(path.name for path in (real_data / "eval").iterdir())

    ours, theirs = evaluated_by_both(run, names, None, real_data / "eval")

    assert_equal_results(ours, theirs)
    assert {name: count["effective"] for name, count in ours["n-samples"].items()} == dict.fromkeys(names, 20)
    assert len(names) >= 10


def evaluate_tasks(run: Path, tasks: list[str], include: Path | None, limit: int | None = None) -> dict[str, Any]:
    model, tokenizer, task = load_run(run)
    return run_tasks(task.language_model(model), tokenizer, Evaluation(tasks=tasks, include=include, limit=limit))[0]


def test_results_are_plain_numbers_by_task_and_metric(tiny_run: Path, documents: Path, capfd):
    result = evaluate_tasks(tiny_run, [str(TASKS / "tiny_choices.yaml"), "tiny_last_word"], TASKS, limit=8)

    assert capfd.readouterr().out == ""
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert set(result["results"]) == {"tiny_choices", "tiny_last_word"}
    assert set(result["results"]["tiny_choices"]) == {"acc", "acc_stderr", "acc_norm", "acc_norm_stderr"}
    assert result["results"]["tiny_last_word"]["perplexity"] > 1
    assert result["results"]["tiny_last_word"]["perplexity_stderr"] > 0
    assert result["n_samples"] == {"tiny_choices": 8, "tiny_last_word": 8}
    assert result["versions"] == {"tiny_choices": 1.0, "tiny_last_word": 1.0}


def test_a_task_that_does_not_say_how_much_to_write_leaves_a_short_model_room_for_its_context(
    tiny_run: Path, documents: Path, tmp_path: Path
):
    """The paper's suite has such tasks, and the small jobs have models of 128 tokens."""
    writing = (TASKS / "tiny_writing.yaml").read_text()
    short = tmp_path / "short.yaml"
    short.write_text(writing.replace("max_gen_toks: 24, ", "").replace("tiny_writing", "tiny_short"))
    assert evaluate_tasks(tiny_run, [str(short)], None, limit=2)["n_samples"] == {"tiny_short": 2}


def test_evaluation_never_drops_tokens(tiny_run: Path, make_run, documents: Path, tmp_path: Path):
    run = make_run(tmp_path, load_run(tiny_run)[1], layers=4)
    model, tokenizer, _ = load_run(run)
    plain = run_tiny(LmEvalAdapter(model, tokenizer))

    dropping = attach(model.train(), seed=1)
    for batch in (1, 64):
        dropping.draw(kept_length=16, step=3, sample_ids=torch.arange(batch), sequence_length=128)
        dropped = run_tiny(LmEvalAdapter(model.train(), tokenizer))
        assert dropped["results"] == plain["results"]
        assert responses(dropped) == responses(plain)

    # and the draw was one that shows: in training the same model answers otherwise
    ids_BS = torch.arange(64 * 128).remainder(500).view(64, 128)
    with torch.no_grad():
        assert not torch.equal(model.train().logits(ids_BS), model.eval().logits(ids_BS))


@pytest.mark.usefixtures("_own_tasks_read_once")
@pytest.mark.parametrize(
    ("names", "include", "message"),
    [
        ([], None, "want at least one"),
        (["tiny_choises"], TASKS, "unknown task 'tiny_choises'; did you mean 'tiny_choices'"),
        (["nowhere/copa.yaml"], None, "there is no task file nowhere/copa.yaml"),
        (["tiny_text"], Path("nowhere"), "include: nowhere is not a folder"),
        (["no_data.yaml"], None, "can't load .*no_data.yaml .*nowhere.jsonl"),
        (["bad.yaml"], None, "can't load .*bad.yaml"),
        (["hub.yaml"], None, "can't load .*hub.yaml .*HF_HUB_OFFLINE=0"),
        (["samples.yaml"], None, "do_sample: false"),
        (["long.yaml"], None, "max_gen_toks=128 leaves no room"),
        (["glued.yaml"], None, "want choices of 1 to 128 tokens, found one of 0"),
        (["blank.yaml"], None, "want a context of at least one token, or none at all, found ' ' before"),
    ],
)
def test_what_the_user_got_wrong_is_said_in_one_sentence(names, include, message, tiny_run: Path, documents: Path):
    writing = (TASKS / "tiny_writing.yaml").read_text()
    choices = (TASKS / "tiny_choices.yaml").read_text()
    files = {
        "no_data.yaml": writing.replace("documents.jsonl", "nowhere.jsonl"),
        "bad.yaml": "task: [\n",
        "hub.yaml": "task: hub\ndataset_path: someone/something\noutput_type: multiple_choice\n",
        "samples.yaml": writing.replace("do_sample: false", "do_sample: true, temperature: 1.0"),
        "long.yaml": writing.replace("max_gen_toks: 24", "max_gen_toks: 128"),
        "glued.yaml": choices.replace("{{text}}", "a gre").replace("{{choices}}", "{{['y', 'e', 'y', 'e']}}")
        + 'target_delimiter: ""\n',
        "blank.yaml": choices.replace("{{text}}", "{{' '}}"),
    }
    for name, text in files.items():
        (documents / name).write_text(text)

    with pytest.raises(UserError, match=message) as caught:
        evaluate_tasks(tiny_run, names, include)
    assert "\n" not in str(caught.value)


def test_a_limit_below_one_document_is_refused(tiny_run: Path):
    with pytest.raises(UserError, match="limit: want at least 1"):
        evaluate_tasks(tiny_run, ["tiny_text"], TASKS, limit=0)


@pytest.mark.usefixtures("_own_tasks_read_once")
def test_a_name_that_only_lm_eval_knows_is_found_beside_ours():
    manager, specs = find_tasks(["tiny_text", "lambada_openai"], TASKS)

    assert {"tiny_text", "lambada_openai"} <= set(manager.all_tasks)
    assert specs == ["tiny_text", "lambada_openai"]


def test_lm_eval_knows_the_papers_tasks_by_these_names(own_tasks: Tasks):
    assert set(SUITES["paper"]) <= set(own_tasks.all_tasks)


@pytest.mark.usefixtures("_own_tasks_read_once")
@pytest.mark.parametrize("group", ["both", '"both"'])
def test_a_group_of_task_files_is_averaged(tiny_run: Path, documents: Path, group: str):
    (documents / "both.yaml").write_text(
        f"group: {group}\ntask: [tiny_choices, tiny_last_word]\n"
        "aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]\n"
    )

    results = evaluate_tasks(tiny_run, ["both.yaml"], TASKS)["results"]

    mean = (results["tiny_choices"]["acc"] + results["tiny_last_word"]["acc"]) / 2
    assert results["both"]["acc"] == pytest.approx(mean)


def evaluated_by_both(
    run: Path, names: list[str], include: Path | None, task_data: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """lm-eval's results with every answer, by our adapter and by its own; 20 documents a task."""
    exported, _ = export_checkpoint(run, run.parent / "exported")
    own = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(exported),
        tokenizer=AutoTokenizer.from_pretrained(exported),
        batch_size=4,
        device="cpu",
    )
    ours, theirs = (
        simple_evaluate(
            model=adapter,
            tasks=list(names),
            task_manager=find_tasks(names, include, task_data)[0],
            limit=20,
            bootstrap_iters=100,
        )
        for adapter in (LmEvalAdapter(*load_run(run)[:2]), own)
    )
    assert ours is not None
    assert theirs is not None
    return ours, theirs


def run_tiny(adapter: LmEvalAdapter) -> dict[str, Any]:
    manager, names = find_tasks(TINY, TASKS)
    return simple_evaluate(model=adapter, tasks=names, task_manager=manager, bootstrap_iters=0)


def responses(results: dict[str, Any]) -> dict[str, list[Any]]:
    """Every answer of the model, and the hash of what was asked, by task."""
    return {
        task: [(sample["prompt_hash"], sample["resps"]) for sample in samples]
        for task, samples in results["samples"].items()
    }


def assert_equal_results(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["results"].keys() == theirs["results"].keys()
    for task, metrics in theirs["results"].items():
        assert plain_metrics(ours["results"][task]) == pytest.approx(plain_metrics(metrics), rel=1e-4), task
    ours, theirs = responses(ours), responses(theirs)
    for task in theirs:
        for (asked, answers), (other_asked, other_answers) in zip(ours[task], theirs[task], strict=True):
            assert asked == other_asked
            for [answer], [other] in zip(answers, other_answers, strict=True):
                assert same_answer(answer, other), (task, answer, other)


def same_answer(ours: Any, theirs: Any) -> bool:
    """Equal texts and greedy flags; log-likelihoods within the tolerance."""
    if isinstance(theirs, tuple):
        return ours[1] == theirs[1] and abs(ours[0] - theirs[0]) < TOLERANCE
    return abs(ours - theirs) < TOLERANCE if isinstance(theirs, float) else ours == theirs
