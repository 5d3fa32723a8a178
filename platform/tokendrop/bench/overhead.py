"""`tokendrop bench overhead`: tokens per second through the platform beside a bare loop on the same model."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch

from tokendrop.bench.figures import bench_result, figure, interleave, ratios
from tokendrop.config.experiment import ExperimentConfig
from tokendrop.config.load import load_job
from tokendrop.track.journal import METRICS
from tokendrop.train.device import autocast, pick_device, pick_dtype, tune_cpu
from tokendrop.train.optimizer import build_optimizers

_WARM_UP = 12  # steps; until then Ray starts processes of its own
_TURN_S, _POLL_S, _END_S = 10.0, 0.5, 30.0


def bench_overhead(job: Path, *, rounds: int, log: Callable[[str], None]) -> dict[str, Any]:
    """Train with everything on (Ray Train, data, checkpoints, MLflow), and in a bare loop, in turns of seconds.

    Whose turn it is not is stopped, with all of its processes: a machine's own speed changes within minutes by more
    than is to be measured. Half of the turns are of processes that were started in the other order: of two equal ones
    on a virtual machine the first was slower by a tenth. Start-up and the first steps are left out; checkpoints are
    saved as the job says.
    """
    config = load_job(job)
    whole: list[float] = []
    speeds: dict[str, list[float]] = {"platform": [], "bare": []}
    with tempfile.TemporaryDirectory(prefix="tokendrop-bench-") as folder:
        for order in (("platform", "bare"), ("bare", "platform")):
            scratch = Path(folder, order[0])
            commands = _commands(config, job, scratch, data=Path(folder, "data"))
            with ExitStack() as both:
                trainers = {name: both.enter_context(_trainer(*commands[name])) for name in order}
                turns = {name: trainers[name].turn for name in speeds}
                for name, found in interleave(turns, rounds=-(-rounds // 2), log=log).items():
                    speeds[name] += found
                whole.append(trainers["bare"].mean_step_s() / trainers["platform"].mean_step_s())
    tokens = config.tokens_per_step
    figures = {
        "platform_over_bare": figure(whole, "x tokens/s"),
        "platform_over_bare_by_turn": figure(ratios(speeds["platform"], speeds["bare"]), "x tokens/s"),
        "platform_tokens_per_s": figure([tokens * speed for speed in speeds["platform"]], "tokens/s"),
        "bare_tokens_per_s": figure([tokens * speed for speed in speeds["bare"]], "tokens/s"),
    }
    return bench_result("overhead", figures, f"tokendrop bench overhead --job {job} --rounds {rounds}")


def _commands(config: ExperimentConfig, job: Path, scratch: Path, *, data: Path) -> dict[str, tuple[list[str], Path]]:
    """Of each trainer, what starts it, and the folder in which it says what its steps took."""
    scratch.mkdir()
    overrides = [
        "train.length=100000 steps",
        f"checkpoint.every={config.in_steps(config.checkpoint.every)} steps",
        "evaluate.every=100%",
        f"runs_folder={scratch}/runs",
        f"data.folder={data}",
        f"track.uri=sqlite:///{scratch}/mlflow.db",
    ]
    bare = scratch / "bare"
    return {
        "platform": ([sys.executable, "-m", "tokendrop", "train", str(job), *overrides], scratch / "runs"),
        "bare": ([sys.executable, "-m", "tokendrop.bench.overhead", str(bare), str(job)], bare),
    }


class _Trainer:
    """A process that trains, with all that it starts; it goes on in its turns alone."""

    def __init__(self, process: psutil.Popen, folder: Path) -> None:
        self.process, self.folder = process, folder
        self.turns: list[float] = []
        """Seconds of each step that began and ended in a turn."""

    def warm_up(self) -> None:
        while len(self._steps()) < _WARM_UP:
            if self.process.poll() is not None:
                raise subprocess.CalledProcessError(self.process.returncode, self.process.args)
            time.sleep(_POLL_S)
        self.each(psutil.Process.suspend)

    def turn(self) -> float:
        """Steps per second."""
        begun = time.time()
        took: list[float] = []
        self.each(psutil.Process.resume)
        while not took and self.process.poll() is None:  # a step may take longer than a turn
            time.sleep(_TURN_S)
            took = [seconds for ended, seconds in self._steps() if ended - seconds > begun]
        self.each(psutil.Process.suspend)
        self.turns += took
        return len(took) / sum(took)

    def mean_step_s(self) -> float:
        return sum(self.turns) / len(self.turns)

    def each(self, act: Callable[[psutil.Process], None]) -> None:
        below = self.process.children(recursive=True) if self.process.poll() is None else []
        for one in [self.process, *below]:
            with suppress(psutil.NoSuchProcess):
                act(one)

    def _steps(self) -> Sequence[tuple[float, float]]:
        """When each ended, and the seconds that it took."""
        lines = [line for path in self.folder.glob(f"**/{METRICS}") for line in path.read_text().split("\n")[:-1]]
        found = [json.loads(line) for line in lines if line]
        return [(line["time"], line["step_time_s"]) for line in found if "step" in line]


@contextmanager
def _trainer(command: list[str], folder: Path) -> Iterator[_Trainer]:
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    trainer = _Trainer(process, folder)
    try:
        trainer.warm_up()
        yield trainer
    finally:
        trainer.each(psutil.Process.resume)
        with suppress(psutil.TimeoutExpired, psutil.NoSuchProcess):
            process.terminate()
            process.wait(_END_S)
        if process.poll() is None:
            trainer.each(psutil.Process.kill)


def bare_loop(config: ExperimentConfig, metrics: Path) -> None:
    """The loop that one would write for one model on one device, on random tokens, without end."""
    train, device = config.train, pick_device()
    tune_cpu(config.scaling.cpus_per_worker)
    dtype = pick_dtype(train.precision, device)
    task = config.task.build(config)
    model = task.build_model(seed=config.seed).to(device)
    optimizers = build_optimizers(model, train)
    batch = task.random_batch(train.micro_batch, device)
    accumulation = train.global_batch // train.micro_batch
    with metrics.open("w") as out:
        for step in count(1):
            started = time.perf_counter()
            loss = torch.zeros((), device=device)
            for _ in range(accumulation):
                with autocast(device, dtype):
                    loss = task.loss(model, batch).mean
                (loss / accumulation).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            loss.item()
            line = {"step": step, "step_time_s": time.perf_counter() - started, "time": time.time()}
            print(json.dumps(line), file=out, flush=True)


def main(folder: Path, job: str) -> None:
    """Run the bare loop of a job, and write its steps into a folder of its own."""
    folder.mkdir()
    bare_loop(load_job(job), folder / METRICS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
