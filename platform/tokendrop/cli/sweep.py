"""`tokendrop sweep`: many runs of one job with some of its keys varied, and which of them is best."""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tokendrop.cli.arguments import path
from tokendrop.cli.command import Command, Outcome
from tokendrop.errors import UserError
from tokendrop.output import table

if TYPE_CHECKING:
    from tokendrop.study.progress import Progress
    from tokendrop.study.sweep import SweepConfig
    from tokendrop.study.trials import Trial, TrialMaker

_EXPLAIN = "explain"


def arguments(parser: argparse.ArgumentParser) -> None:
    """SWEEP and its overrides; or two trials to explain."""
    parser.add_argument("sweep", type=path, help="sweep file (YAML); or `explain`, before two trials")
    help = "key=value overrides of the base job; after `explain`, two run folders of trials, or job files"
    parser.add_argument("overrides", nargs="*", default=[], help=help)
    parser.add_argument("--dry-run", action="store_true", help="print the trials and what they cost; start nothing")
    parser.add_argument("--retry-failed", action="store_true", help="try those again that failed in an earlier start")
    parser.add_argument("--yes", action="store_true", help="start more than a thousand trials")


def run(options: argparse.Namespace) -> Outcome:
    """Train the trials of a sweep that are not trained yet; or plan them; or explain two of them.

    Raises:
        UserError: something is wrong with the sweep, or with a job of it.
    """
    if str(options.sweep) == _EXPLAIN:
        return explain(options.overrides)
    for text in options.overrides:
        if "=" not in text:
            raise UserError(f"sweep: want key=value after the sweep file, got {text!r}")
    from tokendrop.study.sweep import load_sweep
    from tokendrop.study.trials import expand

    sweep = load_sweep(options.sweep)
    require_libraries(sweep)
    if sweep.searcher is None:
        maker, trials = None, expand(sweep, options.sweep, options.overrides, many=options.yes)
    else:
        maker, trials = searched(sweep, options), []
    if options.dry_run:
        return planned(sweep, trials if maker is None else [maker.base_trial()])
    return ended(trained(sweep, trials, maker, file=options.sweep, retry_failed=options.retry_failed))


def require_libraries(sweep: "SweepConfig") -> None:
    """Raises UserError where a library that the sweep needs is not installed."""
    for library in sweep.libraries:
        if find_spec(library) is None:
            raise UserError(f"sweep: {library} is not installed; pip install 'tokendrop[study]'")


def planned(sweep: "SweepConfig", trials: Sequence["Trial"]) -> Outcome:
    """The trials of a sweep that is not started."""
    from tokendrop.study.tables import dry_result, dry_text

    return Outcome(dry_result(sweep, trials), dry_text(sweep, trials))


def ended(progress: "Progress") -> Outcome:
    """What a sweep came to."""
    from tokendrop.study.arms import arms_of
    from tokendrop.study.tables import result_of, result_text

    sweep, trials = progress.sweep, [*progress.trials.values()]
    arms = arms_of(sweep, trials, progress.summaries)
    return Outcome(
        result_of(sweep, trials, arms, progress),
        result_text(sweep, arms, progress),
        exit_code=1 if progress.failures else 0,
    )


def searched(sweep: "SweepConfig", options: argparse.Namespace) -> "TrialMaker":
    """What makes the trials that a searcher chooses.

    Raises:
        UserError: the base job is wrong, or there are too many trials.
    """
    from tokendrop.study.trials import TrialMaker, check_count

    check_count(sweep, options.sweep, many=options.yes)
    return TrialMaker(sweep, options.sweep, options.overrides)


def trained(
    sweep: "SweepConfig", trials: Sequence["Trial"], maker: "TrialMaker | None", *, file: Path, retry_failed: bool
) -> "Progress":
    """What has become of the trials."""
    import ray

    from tokendrop.launch.stopping import stopping_in_time
    from tokendrop.study.run import run_sweep

    try:
        with stopping_in_time():
            return run_sweep(sweep, trials, maker, path=file, retry_failed=retry_failed)
    except KeyboardInterrupt:
        ray.shutdown()
        raise


def explain(places: Sequence[str]) -> Outcome:
    """Which keys make two trials different runs.

    Raises:
        UserError: they are not two, or one of them is no trial.
    """
    if len(places) != 2:
        raise UserError(f"sweep explain: want two trials, such as runs/trial-1 runs/trial-2; got {len(places)}")
    from tokendrop.study.identity import differences, run_name
    from tokendrop.study.record import settings_at

    one, other = (settings_at(path(place)) for place in places)
    found = differences(one, other)
    result = {"runs": [run_name(one), run_name(other)], "differences": {key: [*both] for key, both in found.items()}}
    if not found:
        return Outcome(result, "the same run: every key that decides what is trained has the same value in both")
    rows = [[key, *("-" if value is None else value for value in both)] for key, both in found.items()]
    return Outcome(result, table(["key", *(Path(place).name for place in places)], rows))


COMMAND = Command(
    "sweep",
    run,
    arguments,
    about="Train many runs of a job with some of its keys varied, by Ray Tune, and print which are best.",
    more="A trial is a run, named by what it trains: a sweep that is started again goes on, and trains nothing twice.",
    example="tokendrop sweep jobs/sweeps/start_length.yaml --dry-run",
    extra="study",
)
