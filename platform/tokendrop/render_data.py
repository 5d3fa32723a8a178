"""What the `data` commands found, as people read it."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from tokendrop.render import count, table

_SAYS = {
    "missing": "step {step} lacks sample {sample_id}",
    "repeated": "step {step} has sample {sample_id} more than once",
    "wrong": "step {step} has sample {sample_id}, which is out of place there",
}
_WIDTH, _MOST_SAID = 100, 5


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
        [f"{one['file']}:{one['record']}", one["set"] or "-", f"{start}-{end - 1}"]
        for one, start, end in zip(result["documents"], starts, [*starts[1:], len(tokens)], strict=True)
    ]
    lines = [
        f"sample {result['sample']}: {result['split']} row {result['row']} of source '{result['source']}',"
        f" epoch {result['epoch']}; row {result['row_in_shard']} of {result['shard']}",
        "",
        table(["document", "set", "tokens"], rows),
    ]
    if result["begins_inside"]:
        lines.append(
            f"The row begins inside its first document, {-result['documents'][0]['start']} tokens after its start."
        )
    lines += ["", printable(result["text"]), ""]
    lines.append(textwrap.fill(" ".join(map(str, tokens)), _WIDTH, initial_indent=f"{len(tokens)} token ids: "))
    return "\n".join(lines)


def stats_text(result: Mapping[str, Any]) -> str:
    """Tables by set and, where there are several, by source; what there is in all."""
    parts = [_lines_table("set", [*result["sets"], result["total"]])]
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
