"""`tokendrop reproduce`: the paper's tables and figures as studies, each with a claim, and what they came to."""

import argparse
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tokendrop.cli.arguments import path
from tokendrop.cli.command import Command, Group, Outcome
from tokendrop.cli.sweep import ended, planned, require_libraries, trained
from tokendrop.output import log
from tokendrop.secrets import redact

if TYPE_CHECKING:
    from tokendrop.study.evidence import Evidence
    from tokendrop.study.progress import Progress

_FOLDER = Path("jobs", "studies")


def _studies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--studies", type=path, default=_FOLDER, metavar="FOLDER", help=f"(default {_FOLDER})")


def arguments(parser: argparse.ArgumentParser) -> None:
    """NAME, its scale, and overrides of its base job."""
    parser.add_argument("name", help="a study, as `tokendrop reproduce list` shows them")
    parser.add_argument("overrides", nargs="*", default=[], help="key=value overrides of the base job")
    scale = "small, for two cores (default), or full, the paper's own settings"
    parser.add_argument("--scale", choices=["small", "full"], default="small", help=scale)
    parser.add_argument("--smoke", action="store_true", help="50 steps of two seeds, to see that it works")
    parser.add_argument("--dry-run", action="store_true", help="print the trials and what they cost; start nothing")
    parser.add_argument("--retry-failed", action="store_true", help="try those again that failed in an earlier start")
    parser.add_argument("--record", action="store_true", help="keep the verdict beside the study file as well")
    _studies(parser)


def run(options: argparse.Namespace) -> Outcome:
    """Run a study that has not been run yet, as far as it has not, and judge its claim.

    Raises:
        UserError: there is no such study, or something is wrong with its sweep or a job of it.
    """
    from tokendrop.study.evidence import size_text
    from tokendrop.study.studies import load_study, sweep_of
    from tokendrop.study.trials import expand

    study, file = load_study(options.name, options.studies)
    sweep, sweep_file = sweep_of(study, file, options.scale, smoke=options.smoke)
    require_libraries(sweep)
    trials = expand(sweep, sweep_file, options.overrides)
    if options.dry_run:
        return planned(sweep, trials)
    progress = trained(sweep, trials, None, file=sweep_file, retry_failed=options.retry_failed)
    outcome = ended(progress)
    found = _kept(options, progress)
    size = "" if found is None else f"\n{size_text(found, study)}"
    return Outcome(
        {**outcome.result, "study": options.name, "evidence": found and asdict(found)},
        f"{options.name}: {study.paper}\npaper:  {study.printed}\n\n{outcome.text}{size}",
        exit_code=outcome.exit_code,
    )


def _kept(options: argparse.Namespace, progress: "Progress") -> "Evidence | None":
    """The evidence, written down in the sweep's folder, and with --record beside the study file."""
    from tokendrop.study.evidence import ROWS, VERDICTS, evidence_of, is_whole, write_evidence, write_rows

    found = evidence_of(options.name, options.scale, command_text(options), progress)
    write_rows(progress.record.folder / ROWS, progress)
    if found is not None:
        name = f"{options.name}.{options.scale}.json"
        write_evidence(progress.record.folder / name, found)
        if options.record and not options.smoke and is_whole(progress):
            write_evidence(options.studies / VERDICTS / name, found)
        elif options.record:
            what = "this was a smoke run" if options.smoke else "not all of its seeds have ended well"
            log(f"record   not kept beside the study: {what}")
    return found


def command_text(options: argparse.Namespace) -> str:
    """The command that gives the evidence, for a shell, without secrets."""
    words = ["tokendrop", "reproduce", options.name, "--scale", options.scale, *(["--smoke"] if options.smoke else [])]
    return redact(shlex.join([*words, *options.overrides]))


def run_list(options: argparse.Namespace) -> Outcome:
    """Every study with its claim, and its verdict where one is kept.

    Raises:
        UserError: there are none, or one of them is wrong.
    """
    from tokendrop.study.evidence import read_evidence
    from tokendrop.study.studies import SCALES, load_studies

    studies, known = load_studies(options.studies), read_evidence(options.studies)
    lines, result = list[str](), dict[str, object]()
    for name, study in studies.items():
        answers = {scale: known[name, scale].verdict.answer if (name, scale) in known else None for scale in SCALES}
        said = [f"{scale}: {answers[scale] or 'not run'}" for scale in SCALES if study.file_at(scale)]
        lines += [f"{name}  ({study.paper})  {', '.join(said)}", f"    {study.claim}"]
        result[name] = {**asdict(study), "verdicts": answers}
    return Outcome(result, "\n".join(lines))


def run_table(options: argparse.Namespace) -> Outcome:
    """All verdicts that are kept, as the Markdown table of jobs/README.md.

    Raises:
        UserError: there are no studies, or one of them, or a verdict, is damaged.
    """
    from tokendrop.study.evidence import markdown, read_evidence
    from tokendrop.study.studies import load_studies

    text = markdown(load_studies(options.studies), read_evidence(options.studies))
    return Outcome({"markdown": text}, text)


GROUP = Group(
    "reproduce",
    about="Test a claim of the paper by its study: `tokendrop reproduce NAME`.",
    default="run",
    commands=(
        Command(
            "reproduce run",
            run,
            arguments,
            about="Run a study of the paper, over its seeds, and judge its claim.",
            more="A study is a sweep with a claim: a run that is there is not trained again, in this study or another.",
            example="tokendrop reproduce growth --dry-run",
            extra="study",
        ),
        Command(
            "reproduce list",
            run_list,
            _studies,
            about="List the paper's tables and figures with their claims, and what became of them.",
            example="tokendrop reproduce list",
            extra="study",
        ),
        Command(
            "reproduce table",
            run_table,
            _studies,
            about="Print all verdicts that are kept beside the study files as a Markdown table.",
            example="tokendrop reproduce table",
            extra="study",
        ),
    ),
)
