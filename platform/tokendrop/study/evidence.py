"""What a study came to: its verdict with the values that it follows from, one JSON file, and a row for each trial."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import chain
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from tokendrop.atomic import atomic_write
from tokendrop.config.files import shown
from tokendrop.config.load import build
from tokendrop.errors import UserError
from tokendrop.output import count
from tokendrop.study.claim import Claim
from tokendrop.study.progress import Progress
from tokendrop.study.studies import SCALES, Scale, Study
from tokendrop.study.trials import Trial, trials_with
from tokendrop.study.verdict import Verdict, metric_of, verdict

VERDICTS, ROWS = "verdicts", "rows.parquet"
_COSTS = ("layer_tokens", "flops", "wall_clock_s")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The two arms of a claim at one scale, seed by seed."""

    study: str
    scale: Scale
    command: str
    metric: str
    lower_is_better: bool
    margin: float
    seeds: tuple[int, ...]
    arm: tuple[float, ...]
    """The metric of the arm that the claim is about, by seed."""
    against: tuple[float, ...]
    """The metric of the other arm."""
    layer_tokens: tuple[float, ...]
    """Of a run of both arms."""
    loss_slope: float | None = None
    """Nats by which the training loss of the other arm changes in a step at the end, the mean over seeds; below 0 while
    it still learns. None where that was not measured."""
    hours: float
    """Training time of all trials of the sweep together, on one worker each."""
    date: str
    packages: Mapping[str, str]

    def __post_init__(self) -> None:
        if not len(self.seeds) == len(self.arm) == len(self.against):
            raise ValueError("seeds, arm, against: want a value for each seed")

    @property
    def verdict(self) -> Verdict:
        """By the same test as at the sweep's end."""
        sign = 1 if self.lower_is_better else -1
        return verdict([(one - other) * sign for one, other in zip(self.arm, self.against, strict=True)], self.margin)


def evidence_of(study: str, scale: Scale, command: str, progress: Progress) -> Evidence | None:
    """What a sweep that has ended shows; None where one of its arms diverged, or has fewer than two seeds in common."""
    from tokendrop.track.environment import environment

    sweep, trials, done = progress.sweep, [*progress.trials.values()], progress.summaries
    assert sweep.claim is not None
    arm, against = (_by_seed(trials, sweep.claim, name, done) for name in ("arm", "against"))
    seeds = tuple(sorted(arm.keys() & against.keys()))
    values = [tuple(metric_of(one[seed], sweep.metric) for seed in seeds) for one in (arm, against)]
    if len(seeds) < 2 or not all(map(isfinite, chain(*values))):
        return None
    versions = {name: version for name, version in environment()["packages"].items() if version}
    return Evidence(
        study=study,
        scale=scale,
        command=command,
        metric=sweep.metric,
        lower_is_better=sweep.lower_is_better,
        margin=sweep.claim.margin,
        seeds=seeds,
        arm=values[0],
        against=values[1],
        layer_tokens=(arm[seeds[0]]["layer_tokens"], against[seeds[0]]["layer_tokens"]),
        loss_slope=mean_slope([against[seed] for seed in seeds]),
        hours=round(sum(one["wall_clock_s"] for one in done.values()) / 3600, 3),
        date=datetime.now(UTC).date().isoformat(),
        packages={name: versions[name] for name in ("torch", "ray") if name in versions},
    )


def is_whole(progress: Progress) -> bool:
    """Whether every seed of both arms of a sweep's claim has ended well."""
    claim, trials = progress.sweep.claim, [*progress.trials.values()]
    assert claim is not None
    arms = (trials_with(trials, claim.arm, "arm"), trials_with(trials, claim.against, "against"))
    return all(trial.run in progress.summaries for trial in chain(*arms))


def _by_seed(
    trials: Sequence[Trial], claim: Claim, name: str, done: Mapping[str, Mapping[str, Any]]
) -> dict[int, Mapping[str, Any]]:
    """The summaries of one arm's trials that have ended well."""
    keys = claim.arm if name == "arm" else claim.against
    return {one.config.seed: done[one.run] for one in trials_with(trials, keys, name) if one.run in done}


def mean_slope(summaries: Iterable[Mapping[str, Any]]) -> float | None:
    """`loss_slope` of runs, the mean of those that have one."""
    slopes = [slope for one in summaries if (slope := one.get("loss_slope")) is not None]
    return fmean(slopes) if slopes else None


def noise_text(one: Evidence) -> str:
    """How far seeds lie apart, and whether runs still learn at their end: what a study of this size can see."""
    said = one.verdict
    text = f"pairs of seeds differ by {said.spread:.2g} (std), their mean by {said.spread / said.seeds**0.5:.2g}"
    if one.loss_slope is None:
        return text
    return f"{text}; at the end the training loss changes by {100 * one.loss_slope:.2g} in 100 steps"


def size_text(one: Evidence, study: Study) -> str:
    """What a study of this size can see, and where it can't decide, the job that can, or why there is none."""
    text = f"noise: {noise_text(one)}"
    if one.verdict.answer != "undecided" or one.scale != "small":
        return text
    full = f"on GPUs 'tokendrop reproduce {one.study} --scale full' can decide"
    return f"{text}\nundecided here; {full if study.full else study.note}"


def write_rows(path: Path, progress: Progress) -> None:
    """Write a row for each trial that has ended well, as Parquet: its run, values and seed, and what it came to."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "run": run,
            "values": json.dumps(dict(progress.trials[run].point), default=str),
            "seed": progress.trials[run].config.seed,
            progress.sweep.metric: metric_of(summary, progress.sweep.metric),
            **{key: float(summary[key]) for key in _COSTS if key != progress.sweep.metric},
        }
        for run, summary in progress.summaries.items()
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    atomic_write(path, sink.getvalue().to_pybytes())


def write_evidence(path: Path, evidence: Evidence) -> None:
    """Write it as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, (json.dumps(asdict(evidence), indent=1) + "\n").encode())


def read_evidence(folder: Path) -> dict[tuple[str, Scale], Evidence]:
    """The verdicts that are kept beside study files, by study and scale.

    Raises:
        UserError: one of them is damaged.
    """
    found: dict[tuple[str, Scale], Evidence] = {}
    for path in sorted((folder / VERDICTS).glob("*.json")):
        try:
            one = build(Evidence, json.loads(path.read_text()), "")
        except (ValueError, UserError) as error:
            raise UserError(f"{shown(path)}: no verdict of a study: {error}") from None
        found[one.study, one.scale] = one
    return found


def markdown(studies: Mapping[str, Study], known: Mapping[tuple[str, Scale], Evidence]) -> str:
    """The table of all verdicts, for jobs/README.md."""
    lines = ["| study | paper | claim | paper's values | here | verdict |", "|---|---|---|---|---|---|"]
    for name, study in studies.items():
        texts = [_here(known[name, scale]) for scale in SCALES if (name, scale) in known]
        here, said = (" <br> ".join(cells) for cells in zip(*texts, strict=True)) if texts else (study.note, "open")
        lines.append(f"| `{name}` | {study.paper} | {study.claim} | {study.printed} | {here or 'not run'} | {said} |")
    return "\n".join(lines)


def _here(one: Evidence) -> tuple[str, str]:
    """Values, and the verdict, as a table has them."""
    said, mean = one.verdict, [sum(values) / len(values) for values in (one.arm, one.against)]
    takes = " against ".join(count(tokens) for tokens in one.layer_tokens)
    values = f"{one.scale}: {one.metric} {mean[0]:.4g} against {mean[1]:.4g}, {takes} layer tokens;"
    values += f" {len(one.seeds)} seeds, {one.hours:.2f} h, {one.date}; {noise_text(one)}"
    answer = f"{said.answer}: worse by {said.mean:.3g} ({said.low:.3g} to {said.high:.3g}), margin {one.margin:g}"
    if said.seeds_to_decide:
        answer += f"; some {said.seeds_to_decide:,} seeds would decide"
    return values, answer
