"""`tokendrop data`: token shards, and the audit of what runs trained on."""

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokendrop.cli.arguments import add_run, path, run_here, whole
from tokendrop.cli.command import Command, Group, Outcome
from tokendrop.errors import UserError
from tokendrop.output import count, progress_line, table

_SAYS = {
    "missing": "step {step} lacks sample {sample_id}",
    "repeated": "step {step} has sample {sample_id} more than once",
    "wrong": "step {step} has sample {sample_id}, which is out of place there",
}
_WIDTH, _MOST_SAID = 100, 5


def audit(options: argparse.Namespace) -> Outcome:
    """Audit a run; exit code 1 where a sample is missing or repeated.

    Raises:
        UserError: it is no run folder, or its record is damaged.
    """
    from tokendrop.track.audit import audit

    with progress_line("audit", "steps") as progress:
        found = audit(run_here(options.run_folder), progress=progress)
    result = asdict(found)
    return Outcome(result, audit_text(result), exit_code=0 if found.is_clean else 1)


def add_shards(parser: argparse.ArgumentParser) -> None:
    """PATH, that of token shards."""
    parser.add_argument("path", type=path, metavar="PATH", help="folder of token shards, its manifest, or a run folder")


def show_arguments(parser: argparse.ArgumentParser) -> None:
    """PATH, and which sample of it."""
    add_shards(parser)
    parser.add_argument(
        "--sample", type=whole(0, 2**63 - 1), required=True, metavar="ID", help="sample id, as ledgers have it"
    )
    parser.add_argument(
        "--split", choices=["train", "validation", "test"], default="train", help="where it is from (default train)"
    )


def show(options: argparse.Namespace) -> Outcome:
    """Show a sample.

    Raises:
        UserError: there are no token shards, or none of them has the sample.
    """
    from tokendrop.data.read.inspection import find_sample

    result = asdict(find_sample(shards_folder(options.path), options.sample, options.split))
    return Outcome(result, sample_text(result), is_corpus=True)


def stats(options: argparse.Namespace) -> Outcome:
    """Count tokens.

    Raises:
        UserError: there are no token shards.
    """
    from tokendrop.data.read.inspection import count_tokens

    result = asdict(count_tokens(shards_folder(options.path)))
    return Outcome(result, stats_text(result))


def verify(options: argparse.Namespace) -> Outcome:
    """Check the bytes of all token shards; exit code 1 where some are damaged.

    Raises:
        UserError: there are no token shards.
    """
    from tokendrop.data.shards.verify import verify

    folder = shards_folder(options.path)
    with progress_line("verify", "bytes") as progress:
        found = verify(folder, progress=progress)
    result = asdict(found)
    return Outcome(result, verify_text(result), exit_code=1 if found.damaged else 0)


def shards_folder(path: Path) -> Path:
    """The folder of token shards that a path names: itself, that of a manifest, or that of a run.

    Raises:
        UserError: it is none of these.
    """
    from tokendrop.data.shards.format import MANIFEST

    folder = path.parent if path.name == MANIFEST else path
    if (folder / MANIFEST).is_file():
        return folder
    from tokendrop.track.run_folder import JOB, shards_of  # which import torch

    if not (path / JOB).is_file():
        raise UserError(f"{path}: want a folder of token shards, its {MANIFEST}, or a run folder")
    return shards_of(path)


def audit_text(result: Mapping[str, Any]) -> str:
    """The stretches of one world size, and the verdict."""
    rows = [
        [f"{one['from_step']:,}-{one['to_step']:,}", str(one["world_size"] or "none")] for one in result["world_sizes"]
    ]
    missing, repeated = result["missing"], result["repeated"]
    if missing or repeated:
        first, steps = result["where"][0]["step"], result["faulty_steps"]
        which = f"step {first:,}" if steps == 1 else f"{steps:,} steps from {first:,} to {result['last_faulty_step']:,}"
        said = [_SAYS[fault["what"]].format_map(fault) for fault in result["where"][:_MOST_SAID]]
        more = "; and more" if missing + repeated > _MOST_SAID else ""
        verdict = f"Not exact: {missing:,} missing, {repeated:,} repeated, in {which}: {'; '.join(said)}{more}."
    else:
        verdict = f"Exact: steps 1 to {result['steps']:,} have each of their {result['samples']:,} samples once."
    return f"{table(['steps', 'world size'], rows)}\n\n{verdict}"


def sample_text(result: Mapping[str, Any]) -> str:
    """A sample's place, documents, text and token ids."""
    tokens = result["tokens"]
    starts = [max(0, one["start"]) for one in result["documents"]]
    rows = [
        [f"{one['file']}:{one['record']}", one["subset"] or "-", f"{start}-{end - 1}"]
        for one, start, end in zip(result["documents"], starts, [*starts[1:], len(tokens)], strict=True)
    ]
    lines = [
        f"sample {result['sample']}: {result['split']} row {result['row']} of source '{result['source']}',"
        f" epoch {result['epoch']}; row {result['row_in_shard']} of {result['shard']}",
        "",
        table(["document", "subset", "tokens"], rows),
    ]
    if result["begins_inside"]:
        lines.append(
            f"The row begins inside its first document, {-result['documents'][0]['start']} tokens after its start."
        )
    lines += ["", printable(result["text"]), ""]
    lines.append(textwrap.fill(" ".join(map(str, tokens)), _WIDTH, initial_indent=f"{len(tokens)} token ids: "))
    return "\n".join(lines)


def stats_text(result: Mapping[str, Any]) -> str:
    """Tables by subset and, where there are several, by source; what there is in all."""
    parts = [_lines_table("subset", [*result["subsets"], result["total"]])]
    if len(result["sources"]) > 1:
        parts.append(_lines_table("source", result["sources"]))
    state = "complete" if result["is_complete"] else "being prepared, or stopped on the way: counts are those so far"
    rows = ", ".join(f"{rows:,} {split}" for split, rows in result["rows"].items())
    parts.append(f"rows: {rows}; rejected records: {result['rejected']:,}\n{result['folder']}: {state}")
    return "\n\n".join(parts)


def _lines_table(kind: str, lines: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            line["name"] or "(not named)",
            f"{line['documents']:,}",
            f"{line['tokens']:,}",
            f"{line['share']:.1%}",
            f"{line['bytes']:,}",
            "-" if line["tokens_per_byte"] is None else f"{line['tokens_per_byte']:.3f}",
        ]
        for line in lines
    ]
    return table([kind, "documents", "tokens", "share", "bytes", "tokens/byte"], rows)


def verify_text(result: Mapping[str, Any]) -> str:
    """The damaged files, and the verdict."""
    folder, damaged = result["folder"], result["damaged"]
    read = f"{result['shards']:,} shards, {result['rows']:,} rows, {count(result['bytes'])}B"
    if not damaged:
        return f"{folder}: {read}: all as they were written"
    named = [f"{folder}/{one['file']}: {one['what']}" for one in damaged]
    verdict = "; ".join(filter(None, [f"{len(damaged)} damaged, of {read}", result["remedy"]]))
    return "\n".join([*named, verdict])


def printable(text: str) -> str:
    """Text that moves no cursor: control characters are spelled out, but for line ends and tabs."""
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)


GROUP = Group(
    "data",
    "Look at token shards, and audit what runs trained on.",
    (
        Command(
            "data audit",
            audit,
            add_run,
            about="Prove from a run's ledger that each sample of each committed step was trained on, once.",
            more="Exit code 1 where not, with counts and the first places. A sample in a step that is not its own"
            " counts as missing from the one and repeated in the other. The order of samples needs the manifest of the"
            " run's token shards, not the shards.",
            example="tokendrop data audit runs/quickstart-random-ltd-20260101-120000",
        ),
        Command(
            "data show",
            show,
            show_arguments,
            about="Print a sample: its text, its token ids, and the documents that it is made of.",
            example="tokendrop data show runs/data/0123456789abcdef --sample 17",
        ),
        Command(
            "data stats",
            stats,
            add_shards,
            about="Count documents, tokens and bytes by subset and by source, also while they are being prepared.",
            example="tokendrop data stats runs/data/0123456789abcdef",
        ),
        Command(
            "data verify",
            verify,
            add_shards,
            about="Read all token shards, compare them with their checksums, and name those that are damaged.",
            more="Exit code 1 where some are.",
            example="tokendrop data verify runs/data/0123456789abcdef",
        ),
    ),
)
