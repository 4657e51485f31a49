"""Text and conversations into token files, once: named by the hash of what they are made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.data.config import DataConfig, SourceConfig
from hyper_parallel.data.preparing.cache import default_cache, prepare_folder, remembered_digest
from hyper_parallel.data.preparing.chat import ChatTemplate, load_chat_template, trained_tokens
from hyper_parallel.data.preparing.packing import first_fit_decreasing
from hyper_parallel.data.preparing.records import (
    Record,
    conversation,
    corpus_files,
    find_files,
    is_records,
    opened,
    read_bytes,
    read_records,
    read_text,
    text_of,
)
from hyper_parallel.data.preparing.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from hyper_parallel.data.row_file import ENDS, TOKENS, TRAINED, write_table
from hyper_parallel.data.token_file import dtype_for

__all__ = ["Prepared", "prepare", "prepare_source"]

Progress = Callable[[str, int, int], None]
_TOGETHER = 256  # texts that are tokenised at a time
_VERSION = 1  # of what is written; another one is another folder


@dataclass(frozen=True)
class Prepared:
    """A prepared folder, what is in it, and the tokenizer it was made with."""

    folder: Path
    facts: dict[str, Any]
    tokenizer: Tokenizer


def prepare(config: DataConfig, *, progress: Progress | None = None) -> list[Path]:
    """Make the token files of a run, where they are not there yet; the folders, one for each source that needs one.

    ``progress(what, done, total)`` is called on the way, also while another process prepares, and may raise to stop.
    """
    sources: list[SourceConfig] = list(config.sources) or [config]
    return [prepare_source(source, config, progress=progress).folder for source in sources if source.kind in _BUILDERS]


def prepare_source(
    source: SourceConfig, config: DataConfig, *, paths: tuple[str, ...] | None = None, progress: Progress | None = None
) -> Prepared:
    """The prepared folder of one source."""
    tokenizer = load_tokenizer(config.tokenizer)
    root = Path(config.cache) if config.cache else default_cache()
    paths = source.paths if paths is None else paths
    files = corpus_files() if source.kind == "corpus" else find_files(paths, source.pattern)
    report = progress or (lambda what, done, total: None)
    options: dict[str, Any] = {"version": _VERSION, "tokenizer": tokenizer.identity}
    if source.kind == "chat":
        template = load_chat_template(source.chat_template, tokenizer)
        options |= {
            "chat_template": template and template.source,
            "length": config.length,
            "packing": config.packing,
            "too_long": source.too_long,
        }
    elif any(map(is_records, files)):
        options["text_field"] = source.text_field
    digests = []
    for number, file in enumerate(files):
        report("reading", number, len(files))
        digests.append(remembered_digest(root, file, _digest))
    key = _hashed([source.kind, options, digests])
    builder = _BUILDERS[source.kind]

    def build(folder: Path) -> dict[str, Any]:
        facts = builder(folder, files, tokenizer, source, config, report)
        return {**facts, "kind": source.kind, "options": options, "fingerprint": key, "names": _names(source, paths)}

    folder, facts = prepare_folder(
        root, f"{source.kind}-{key}", build, lambda: report("waiting for another process", 0, 1)
    )
    return Prepared(folder, facts, tokenizer)


def _names(source: SourceConfig, paths: tuple[str, ...]) -> str:
    return "Python's library" if source.kind == "corpus" else ", ".join(paths)


def _digest(file: Path) -> str:
    state = hashlib.blake2b(digest_size=16)
    with opened(file) as stream:
        while block := stream.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def _hashed(facts: Any) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=10).hexdigest()


# ---------------------------------------------------------------- documents


def _build_documents(
    folder: Path, files: list[Path], tokenizer: Tokenizer, source: SourceConfig, config: DataConfig, report: Progress
) -> dict[str, Any]:
    ends: list[int] = []
    num_tokens = num_empty = 0
    dtype = dtype_for(tokenizer.vocab_size)
    with (folder / TOKENS).open("wb") as stream:
        for tokens in _documents(files, tokenizer, source.text_field, report):
            if not len(tokens):
                num_empty += 1
                continue
            stream.write(tokens.astype(dtype).tobytes())
            num_tokens += len(tokens)
            ends.append(num_tokens)
    if not ends:
        raise ValueError(f"the data is empty: {_listed(files)} hold no text")
    np.save(folder / ENDS, np.array(ends, np.int64))
    return {"dtype": dtype, "vocab_size": tokenizer.vocab_size, "num_tokens": num_tokens, "num_empty": num_empty}


def _documents(files: list[Path], tokenizer: Tokenizer, field: str, report: Progress) -> Iterator[np.ndarray]:
    for number, file in enumerate(files):
        report("tokenising", number, len(files))
        if is_records(file):
            texts = (text_of(record, field) for record in read_records(file))
            while together := list(islice(texts, _TOGETHER)):
                yield from tokenizer.documents(together)
                report("tokenising", number, len(files))
        elif isinstance(tokenizer, ByteTokenizer):
            yield np.frombuffer(read_bytes(file), np.uint8)
        elif text := read_text(file):
            yield from tokenizer.documents([text])


# ---------------------------------------------------------------- conversations


def _build_rows(
    folder: Path, files: list[Path], tokenizer: Tokenizer, source: SourceConfig, config: DataConfig, report: Progress
) -> dict[str, Any]:
    template = load_chat_template(source.chat_template, tokenizer)
    dtype = dtype_for(tokenizer.vocab_size)
    lengths: list[int] = []
    bits: list[np.ndarray] = []
    num_truncated = num_straddling = 0
    with (folder / TOKENS).open("wb") as stream:
        for record in _all_records(files, report):
            ids, trained, straddling = _row(record, template, tokenizer)
            if len(ids) > config.length + 1:
                if source.too_long == "error":
                    raise ValueError(
                        f"{record.where}: this row has {len(ids)} tokens, but a sample of length {config.length} has "
                        f"at most {config.length + 1}; give a longer length, or "
                        'too_long = "truncate" to drop what is behind'
                    )
                ids, trained = ids[: config.length + 1], trained[: config.length + 1]
                num_truncated += 1
            if not trained[1:].any():
                cut = f" within the first {config.length + 1} tokens" if len(ids) == config.length + 1 else ""
                raise ValueError(
                    f"{record.where}: no token of this row is trained{cut}: it would add nothing but a mean over no "
                    "tokens. A row needs a message of the assistant that is not empty"
                )
            stream.write(ids.astype(dtype).tobytes())
            lengths.append(len(ids))
            bits.append(trained)
            num_straddling += bool(straddling)
    if not lengths:
        raise ValueError(f"the data is empty: {_listed(files)} hold no rows")
    report("packing", 0, 1)
    np.save(folder / ENDS, np.cumsum(lengths))
    np.save(folder / TRAINED, np.packbits(np.concatenate(bits)))
    places = np.array(lengths) - 1
    if config.packing:
        table = first_fit_decreasing(places, config.length)
    else:
        table = np.arange(len(places)), np.arange(1, len(places) + 1)
    write_table(folder, *table)
    return {
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "num_tokens": int(sum(lengths)),
        "num_truncated": num_truncated,
        "num_straddling": num_straddling,
    }


def _all_records(files: Iterable[Path], report: Progress) -> Iterator[Record]:
    files = list(files)
    for number, file in enumerate(files):
        for count, record in enumerate(read_records(file)):
            if count % _TOGETHER == 0:
                report("tokenising", number, len(files))
            yield record


def _row(record: Record, template: ChatTemplate | None, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, int]:
    """(tokens, which are trained, how many stand for something before and something inside an answer)."""
    messages = conversation(record)
    if template is None:
        if "messages" in record.fields or len(messages) != 2:
            raise ValueError(
                f"{record.where}: without a chat template (chat_template = \"none\") a row has the texts 'prompt' and "
                "'completion', not messages"
            )
        prompt, completion = (message["content"] for message in messages)
        text = prompt + completion + tokenizer.eos
        return trained_tokens(tokenizer, text, [(len(prompt), len(text))] if completion else [])
    try:
        text, spans = template.render_trained(messages, tools=record.fields.get("tools"))
    except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from error
    return trained_tokens(tokenizer, text, spans)


def _listed(files: list[Path]) -> str:
    shown = ", ".join(f"'{file}'" for file in files[:3])
    return shown if len(files) <= 3 else f"{shown} and {len(files) - 3} more"


_BUILDERS = {"corpus": _build_documents, "text": _build_documents, "chat": _build_rows}
