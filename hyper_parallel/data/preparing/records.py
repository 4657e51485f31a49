"""Reading what users have: files of text, JSON lines, parquet; every mistake with file and line."""

from __future__ import annotations

import codecs
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hyper_parallel.data.preparing.chat import Message

__all__ = ["Record", "conversation", "corpus_files", "find_files", "read_bytes", "read_records", "text_of"]

_RECORD_SUFFIXES = (".jsonl", ".ndjson", ".parquet")


class Record(NamedTuple):
    """One record and where it is, as in ``chats.jsonl:3``."""

    where: str
    fields: dict[str, Any]


def corpus_files() -> list[Path]:
    """The sources of Python's own library: some text that every machine has."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def find_files(paths: Iterable[str], pattern: str = "*") -> list[Path]:
    """Files as they are given, of folders those below that match the pattern; hidden ones are left out."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob(pattern) if file.is_file() and not _is_hidden(file, path))
            if not inside:
                raise ValueError(f"the folder '{path}' has no file that matches '{pattern}'; the data is empty")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise FileNotFoundError(f"there is no file or folder '{path}' to read data from")
    return found


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def is_records(file: Path) -> bool:
    """Whether a file holds records, and not one text."""
    return file.suffix.lower() in _RECORD_SUFFIXES


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """A file to read from; what goes wrong while it is open is an error that names it."""
    try:
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise type(error)(f"cannot read '{file}': {error.strerror or error}") from error


def read_bytes(file: Path) -> bytes:
    """The content of a file."""
    with opened(file) as stream:
        return stream.read()


def read_text(file: Path) -> str:
    """The text of a file; an error with the place where it is not UTF-8."""
    content = read_bytes(file)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file}:{line}: byte 0x{content[error.start]:02x} at place {error.start} is no UTF-8; convert the file, "
            'or take the bytes as they are with tokenizer = "bytes"'
        ) from error


def read_records(file: Path) -> Iterator[Record]:
    """The records of a JSON-lines or parquet file."""
    if file.suffix.lower() == ".parquet":
        return _parquet(file)
    if not is_records(file):
        raise ValueError(f"'{file}' is none of {', '.join(_RECORD_SUFFIXES)}; records are read from these")
    return _json_lines(file)


def _json_lines(file: Path) -> Iterator[Record]:
    with opened(file) as stream:
        for number, line in enumerate(stream, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield Record(f"{file}:{number}", _parsed(line, f"{file}:{number}"))


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode())
        if b"\\u" in line:
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: byte 0x{line[error.start]:02x} at column {error.start + 1} is no UTF-8, so this is no "
            "line of JSON"
        ) from error
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(
            f"{where}: {half} is half a character; its other half, of a pair like \\ud83d\\ude00, is missing"
        ) from error
    except (ValueError, RecursionError) as error:
        at = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{where}: this line is no JSON{at}: {getattr(error, 'msg', error)}") from error
    if not isinstance(fields, dict):
        raise ValueError(f'{where}: this line is no JSON object such as {{"text": "..."}}, but {_shown(fields)}')
    return fields


def _parquet(file: Path) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise RuntimeError(f"'{file}' needs the library pyarrow; run: pip install 'hyper-parallel[data]'") from None
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file, page_checksum_verification=True).iter_batches():
            for fields in batch.to_pylist():
                number += 1
                yield Record(f"{file}, row {number}", fields)
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise ValueError(f"cannot read '{file}' as parquet, after {number} rows: {error}") from error


def text_of(record: Record, field: str) -> str:
    """The text of a record."""
    value = record.fields.get(field)
    if not isinstance(value, str):
        has = (
            f"it has {', '.join(map(repr, record.fields)) or 'no fields'}"
            if field not in record.fields
            else _shown(value)
        )
        raise ValueError(
            f"{record.where}: the field {field!r} must be a text, but {has}; name the field that has it as text_field"
        )
    return value


def conversation(record: Record) -> list[Message]:
    """The messages of a record: ``messages``, or ``prompt`` and ``completion`` as two turns."""
    fields = record.fields
    if "messages" in fields:
        found = fields["messages"]
    elif "prompt" in fields and "completion" in fields:
        found = [*_turn(fields["prompt"], "user"), *_turn(fields["completion"], "assistant")]
    else:
        raise ValueError(
            f"{record.where}: a row of a conversation has 'messages', or 'prompt' and 'completion'; this one has "
            f"{', '.join(map(repr, fields)) or 'no fields'}"
        )
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise ValueError(f"{record.where}: the messages must be a list that is not empty, but are {_shown(found)}")
    for number, message in enumerate(found):
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise ValueError(
                f"{record.where}: message {number} must have texts for 'role' and 'content', but is {_shown(message)}"
            )
    return list(found)


def _turn(value: Any, role: str) -> list[Any]:
    return list(value) if isinstance(value, list) else [{"role": role, "content": value}]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
