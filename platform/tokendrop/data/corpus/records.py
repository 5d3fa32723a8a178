"""The documents in the files of a corpus, and what keeps some of them from being read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import pyarrow as pa

from tokendrop.config.data import DataConfig, SourceConfig
from tokendrop.data.corpus.byte_streams import DamageError, read_lines
from tokendrop.data.corpus.image_records import read_images
from tokendrop.data.corpus.sources import SourceFile, check_unchanged
from tokendrop.data.corpus.table_reader import check_columns, read_rows
from tokendrop.errors import first_line

# A text file has no documents of its own. It is cut at the first blank line after so many bytes, or, where there
# is none for long, at the end of a line.
_TEXT_DOCUMENT, _LONGEST_TEXT_DOCUMENT = 16_384, 262_144

# A line of JSON may be longer than its text: by other fields, and by escapes, which double text beyond Latin letters.
_OTHER_FIELDS, _ESCAPES = 2**20, 2


class Record(NamedTuple):
    """One document of a file, or what is in its place."""

    number: int
    """Line of a text file, row of a table, piece of a .txt; counted from 1."""
    text: str
    """Empty where the document is rejected."""
    subset: str
    """What `subset_key` holds; empty where there is nothing."""
    reason: str = ""
    """Why the document is rejected."""
    content: bytes = b""
    """Of an image, its file; then the text is its label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordForm:
    """How documents lie in the files of a corpus; keys as in DataConfig."""

    text_key: str
    subset_key: str
    only: frozenset[str]
    max_document_bytes: int
    text_unit: str = "piece"
    tsv_header: bool = True
    columns: tuple[str, ...] = ()
    """Of labelled examples: a record's text is a JSON list of the values in these."""
    images: bool = False
    """Whether the first of these holds an image: then that is a record's content, and its text is the label."""

    @classmethod
    def of(cls, data: DataConfig, source: SourceConfig, *, columns: tuple[str, ...] = (), images: bool = False) -> Self:
        """The form of one source of a mixture."""
        return cls(
            text_key=data.text_key,
            subset_key=data.subset_key,
            only=frozenset(source.only),
            max_document_bytes=data.max_document_bytes,
            text_unit=data.text_unit,
            tsv_header=data.tsv_header,
            columns=columns,
            images=images,
        )


def read_records(file: SourceFile, form: RecordForm, *, after: int = 0) -> Iterator[Record]:
    """Records numbered over `after`, in order, in bounded memory.

    A document that can't be read is a record with a reason, and so is the place from which a file is damaged;
    documents of other subsets than `only` are left out, and keep their numbers.

    Args:
        after: 0, or the number of any record of this file.
    Raises:
        UserError: the file is out of reach, or not the one that was listed, or a table without the text column.
    """
    if form.images:
        for one in read_images(file, form.columns, after):
            longest = form.max_document_bytes
            reason = one.reason or (_too_long(form) if len(one.content) > longest else "")
            yield Record(one.number, one.label, "", reason, b"" if reason else one.content)
        return
    check_unchanged(file)
    if file.size == 0:
        # of no text there is nothing to pack; tables and what is compressed begin with some bytes in any case
        if after == 0 and not file.name.endswith((".jsonl", ".txt")):
            yield _rejected(1, str(DamageError(1, ValueError("it is empty"))))
        return
    damage = None
    try:
        if file.name.endswith((".parquet", ".arrow")):
            for number, values, name in read_rows(file, form.columns or (form.text_key,), form.subset_key, after):
                yield from (
                    _example(number, values, name, form) if form.columns else _record(number, values[0], name, form)
                )
        elif file.name.endswith(".tsv"):
            yield from _tsv(file, form, after)
        elif file.name.endswith(".txt"):
            yield from _text(file, form, after)
        else:
            yield from _json(file, form, after)
    except DamageError as error:
        damage = Record(error.number, "", "", str(error))
    check_unchanged(file)
    if damage and damage.number > after:
        yield damage


def _json(file: SourceFile, form: RecordForm, after: int) -> Iterator[Record]:
    for number, line in read_lines(file, _ESCAPES * form.max_document_bytes + _OTHER_FIELDS):
        if number <= after:
            continue
        if line is None:
            yield _rejected(number, _too_long(form))
        elif line and not line.isspace():
            yield from _parsed(number, line, form)


def _parsed(number: int, line: bytes, form: RecordForm) -> tuple[Record, ...]:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return (_rejected(number, f"not valid UTF-8 at byte {error.start + 1}"),)
    except json.JSONDecodeError as error:
        return (_rejected(number, f"not valid JSON ({error.msg} at column {error.pos + 1})"),)
    except RecursionError:
        return (_rejected(number, "nested too deep"),)
    except ValueError:
        return (_rejected(number, "a number of too many digits"),)
    if not isinstance(fields, dict):
        return (_rejected(number, f"want a JSON object, got {_kind(fields)}"),)
    return _of_fields(number, fields, form)


def _of_fields(number: int, fields: dict[str, Any], form: RecordForm) -> tuple[Record, ...]:
    name = _field(fields, form.subset_key)
    if form.columns:
        return _example(number, [_field(fields, column) for column in form.columns], name, form)
    return _record(number, _field(fields, form.text_key), name, form)


def _example(number: int, values: list[Any], name: Any, form: RecordForm) -> tuple[Record, ...]:
    """The record of an example: its values as JSON."""
    for column, value in zip(form.columns, values, strict=True):
        if value is None or isinstance(value, bytes | pa.DataType):
            return (_rejected(number, f"want a value in {column!r}, got {_kind(value)}"),)
    try:
        return _record(number, json.dumps(values, ensure_ascii=False), name, form)
    except TypeError as error:  # of a table: a decimal, a date, bytes in a list
        return (_rejected(number, f"want text and numbers in {', '.join(form.columns)} ({first_line(error)})"),)


def _tsv(file: SourceFile, form: RecordForm, after: int) -> Iterator[Record]:
    """Lines of values between tabs, without quotes."""
    names: list[str] = []
    for number, line in read_lines(file, _ESCAPES * form.max_document_bytes + _OTHER_FIELDS):
        if line is None:
            yield from [_rejected(number, _too_long(form))] * (number > after)
            continue
        try:
            values = line.decode().rstrip("\r\n").split("\t")
        except UnicodeDecodeError as error:
            yield from [_rejected(number, f"not valid UTF-8 at byte {error.start + 1}")] * (number > after)
            continue
        if not names:
            names = values if form.tsv_header else [str(place) for place in range(len(values))]
            if form.tsv_header:
                check_columns(file, names, form.columns or (form.text_key,))
                continue
        if number > after and values != [""]:
            if len(values) != len(names):
                yield _rejected(number, f"want {len(names)} values between tabs, got {len(values)}")
            else:
                yield from _of_fields(number, dict(zip(names, values, strict=True)), form)


def _field(fields: dict[str, Any], key: str) -> Any:
    if key in fields:
        return fields[key]
    value: Any = fields
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text(file: SourceFile, form: RecordForm, after: int) -> Iterator[Record]:
    if form.only and "" not in form.only:
        return
    longest = form.max_document_bytes
    is_piece = form.text_unit == "piece"
    pieces = enumerate(_pieces(file, longest), start=1) if is_piece else read_lines(file, longest)
    for number, piece in pieces:
        if number <= after:
            continue
        try:
            text = "" if piece is None else piece.decode()
            text = text.strip() if form.text_unit == "stripped_line" else text
            yield _rejected(number, _too_long(form)) if piece is None else Record(number, text, "")
        except UnicodeDecodeError as error:
            yield _rejected(number, f"not valid UTF-8 at byte {error.start + 1}")


def _pieces(file: SourceFile, longest: int) -> Iterator[bytes | None]:
    """None for a line that is too long for a document."""
    lines: list[bytes] = []
    length = 0
    for _, line in read_lines(file, longest):
        if lines and (line is None or length + len(line) > longest):
            yield b"".join(lines)
            lines, length = [], 0
        if line is None:
            yield None
            continue
        lines.append(line)
        length += len(line)
        if length >= _TEXT_DOCUMENT and (line.isspace() or length >= _LONGEST_TEXT_DOCUMENT):
            yield b"".join(lines)
            lines, length = [], 0
    if length:
        yield b"".join(lines)


def _record(number: int, text: Any, set_name: Any, form: RecordForm) -> tuple[Record, ...]:
    """The record of what the keys hold; nothing where it belongs to a subset that is left out."""
    name = "" if set_name is None else set_name
    if not isinstance(name, str):
        return (_rejected(number, f"want text in {form.subset_key!r}, got {_kind(name)}"),)
    if half := _half_character(name):
        return (_rejected(number, half),)
    if form.only and name not in form.only:
        return ()
    if not isinstance(text, str):
        return (_rejected(number, f"want text in {form.text_key!r}, got {_kind(text)}", name),)
    if half := _half_character(text):
        return (_rejected(number, half, name),)
    limit = form.max_document_bytes
    if 4 * len(text) > limit and (len(text) if text.isascii() else len(text.encode())) > limit:
        return (_rejected(number, _too_long(form), name),)
    return (Record(number, text, name),)


def _rejected(number: int, reason: str, name: str = "") -> Record:
    return Record(number, "", name, reason)


def _half_character(text: str) -> str:
    """JSON can spell half of a character, which no tokenizer takes."""
    try:
        _ = text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x} is half of a surrogate pair"
    return ""


def _too_long(form: RecordForm) -> str:
    return f"longer than {form.max_document_bytes} bytes"


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, pa.DataType):
        return str(value)[:40]
    kinds = {bool: "true or false", list: "a list", dict: "an object", bytes: "bytes that are not UTF-8", str: "text"}
    return kinds.get(type(value), "a number")
