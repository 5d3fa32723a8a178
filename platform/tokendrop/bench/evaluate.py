"""`tokendrop bench evaluate`: our adapter to lm-eval beside lm-eval's own for Hugging Face, on the same model."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from tokendrop.bench.figures import bench_result, figure, interleave, ratios
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import build
from tokendrop.data.tokenizer import load_tokenizer
from tokendrop.errors import UserError
from tokendrop.evaluate.export import as_fast_tokenizer
from tokendrop.evaluate.harness import LmEvalAdapter
from tokendrop.evaluate.tasks import find_tasks
from tokendrop.train.device import pick_device, tune_cpu

Adapter = Any
"""An adapter of lm-eval, ours or its own."""
Answers = Sequence[tuple[float, bool]]

_UNITS = {"ours": "tokens", "theirs": "requests"}
_SIZES: Mapping[str, Sequence[int]] = {"ours": [2**11, 2**13, 2**15], "theirs": [1, 4, 16, 64]}
"""Batch sizes that are tried."""


def bench_evaluate(
    task_data: Path,
    tokenizer: Path,
    *,
    preset: str,
    tasks: Sequence[str],
    limit: int,
    rounds: int,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Time the requests of each task through both adapters, each at its best batch size for the task.

    Args:
        task_data: as of `tokendrop evaluate`.
        tokenizer: a tokenizer.json.
        preset: of a GPT, with random weights.
        tasks: all that have a folder in `task_data` when left out.
    Raises:
        UserError: there is no such task, folder or tokenizer.
    """
    tune_cpu()
    named = list(tasks) or sorted(path.name for path in task_data.glob("*") if path.is_dir())
    requests = requests_of(named, task_data, limit)
    make = adapters(preset, tokenizer)
    cases: dict[str, Callable[[], float]] = {}
    figures: dict[str, Any] = {}
    for task, asked in requests.items():
        for who, unit in _UNITS.items():
            size = best_size(make[who], _SIZES[who], asked)
            figures[f"{task}_best_size_{who}"] = figure([size], unit)
            cases[f"{task} {who}"] = partial(seconds_of, make[who](size), asked)
        log(
            f"sizes    {task}: "
            + ", ".join(f"{figures[f'{task}_best_size_{who}']['median']} {_UNITS[who]}" for who in make)
        )
    seconds = interleave(cases, rounds=rounds, log=log)
    figures |= speeds(seconds, {task: len(asked) for task, asked in requests.items()})
    everything = [one for asked in requests.values() for one in asked]
    figures |= differences(*(ask(make[who](_SIZES[who][1]), everything) for who in _UNITS))
    command = f"tokendrop bench evaluate --task-data {task_data} --tokenizer {tokenizer} --preset {preset}"
    return bench_result("evaluate", figures, f"{command} --tasks {','.join(named)} --limit {limit} --rounds {rounds}")


def requests_of(tasks: Sequence[str], task_data: Path, limit: int) -> dict[str, list[Instance]]:
    """What each task asks about its first documents.

    Raises:
        UserError: a task asks for something else than log-likelihoods.
    """
    manager, specs = find_tasks(tasks, None, task_data)
    found: dict[str, list[Instance]] = {}
    for name, task in manager.load(specs)["tasks"].items():
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        if {one.request_type for one in task.instances} != {"loglikelihood"}:
            raise UserError(f"--tasks: {name} does not ask for log-likelihoods alone; want tasks that do")
        found[name] = task.instances
    return found


def adapters(preset: str, tokenizer: Path) -> dict[str, Callable[[int], Adapter]]:
    """By whose it is, what makes an adapter of a batch size; both of the same weights."""
    sizes = {"kind": "gpt", "preset": preset, "vocab_size": 50304}
    tree = {
        "name": "bench-evaluate",
        "model": sizes,
        "data": {"corpus": ["random"]},
        "train": {"length": "1 steps", "global_batch": 1, "micro_batch": 1, "peak_lr": 1e-4},
    }
    config, bpe = build(ExperimentConfig, tree, ""), load_tokenizer(tokenizer)
    task, device = config.task.build(config), pick_device()
    model = task.build_model(seed=0).eval()
    with tempfile.TemporaryDirectory(prefix="tokendrop-bench-") as folder:
        task.export(model, bpe, Path(folder))
        exported = AutoModelForCausalLM.from_pretrained(folder)
    exported.to(device)  # pyright: ignore[reportArgumentType]
    ours = task.language_model(model.to(device))
    fast = as_fast_tokenizer(bpe, config.model.sequence_length)
    hugging_face: Any = HFLM  # whose registration hides its arguments from type checkers
    return {
        "ours": lambda size: LmEvalAdapter(ours, bpe, batch_tokens=size),
        "theirs": lambda size: hugging_face(pretrained=exported, tokenizer=fast, batch_size=size, device=str(device)),
    }


def best_size(make: Callable[[int], Adapter], sizes: Sequence[int], asked: list[Instance]) -> int:
    """The fastest of rising batch sizes; after one that is slower than the one before, none is tried."""
    ask(make(sizes[0]), asked[:1])
    best, least = sizes[0], seconds_of(make(sizes[0]), asked)
    for size in sizes[1:]:
        seconds = seconds_of(make(size), asked)
        if seconds > least:
            break
        best, least = size, seconds
    return best


def seconds_of(adapter: Adapter, asked: list[Instance]) -> float:
    """Seconds until all requests are answered, text and tokens included; the answers are on the host by then."""
    started = time.perf_counter()
    ask(adapter, asked)
    return time.perf_counter() - started


def ask(adapter: Adapter, asked: list[Instance]) -> Answers:
    """The log-likelihood of each request, and whether greedy decoding would write it."""
    return adapter.loglikelihood(asked, disable_tqdm=True)


def speeds(seconds: Mapping[str, Sequence[float]], counts: Mapping[str, int]) -> dict[str, Any]:
    """Requests per second of our adapter over those of lm-eval's, by task and over all tasks."""
    found: dict[str, Any] = {}
    for task, count in counts.items():
        found[f"{task}_requests_per_s"] = figure([count / s for s in seconds[f"{task} ours"]], "requests/s")
        found[f"{task}_over_lm_eval"] = figure(ratios(seconds[f"{task} theirs"], seconds[f"{task} ours"]), "x speed")
    ours, theirs = (
        [sum(turn) for turn in zip(*(seconds[f"{task} {who}"] for task in counts), strict=True)] for who in _UNITS
    )
    return found | {"over_lm_eval": figure(ratios(theirs, ours), "x speed")}


def differences(ours: Answers, theirs: Answers) -> dict[str, Any]:
    """How far the answers of both are apart."""
    pairs = [*zip(ours, theirs, strict=True)]
    unlike = sum(one[1] != other[1] for one, other in pairs)
    return {
        "largest_difference": figure([max(abs(one[0] - other[0]) for one, other in pairs)], "nats"),
        "unlike_greedy_answers": figure([unlike], f"of {len(pairs)}"),
    }
