"""Broken data is refused with file, line and what is wrong, and never by an exception of a library."""

from __future__ import annotations

import io
import json

import numpy
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from hyper_parallel.data import open_data
from hyper_parallel.data.config import DataConfig

only_on = "torch"  # reads files, no framework takes part

ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
CHAT = {"kind": "chat", "path": "rows.jsonl"}


def _tokenizer(vocabulary):
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made.to_str()


def _archive():
    file = io.BytesIO()
    numpy.savez(file, ends=[400])
    return file.getvalue()


GOOD = {
    "rows.jsonl": json.dumps(ROW),
    "text.jsonl": json.dumps({"text": "some words " * 20}),
    "tok/tokenizer.json": _tokenizer({"some": 0, "?": 1}),
    "ids.bin": numpy.arange(400, dtype=numpy.uint16).tobytes(),
}
TEXT = {"kind": "text", "path": "text.jsonl"}
TOKENIZER = TEXT | {"tokenizer": "tok"}
SETTINGS = "tok/tokenizer_config.json"

CASES = {
    "half a character": (
        {"text.jsonl": '{"text": "a"}\n{"text": "\\ud83d\\ude00 \\ud800"}'},
        TEXT,
        r"^text\.jsonl:2: \\ud800 is half a character",
    ),
    "half a character in a message": (
        {"rows.jsonl": json.dumps({"prompt": "\udc00", "completion": "a"})},
        CHAT,
        r"^rows\.jsonl:1: \\udc00 is half a character",
    ),
    "a template that divides by zero": (
        {"t.jinja": "{{ 1 // 0 }}"},
        CHAT | {"chat_template": "t.jinja"},
        r"^rows\.jsonl:1: the chat template 't\.jinja' cannot render these messages: integer division",
    ),
    "a template that calls itself": (
        {"t.jinja": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"},
        CHAT | {"chat_template": "t.jinja"},
        r"^rows\.jsonl:1: the chat template 't\.jinja' cannot render these messages: maximum recursion",
    ),
    "a template that is none": (
        {"t.jinja": "{% for %}"},
        CHAT | {"chat_template": "t.jinja"},
        r"^the chat template 't\.jinja' is no Jinja template: line 1: ",
    ),
    "a template of the tokenizer that is no text": (
        {"tok/chat_template.jinja": b"\xff"},
        CHAT | {"tokenizer": "tok"},
        r"^cannot read the chat template 'tok/chat_template\.jinja': 'utf-8' codec",
    ),
    "a template that is a number": (
        {SETTINGS: '{"chat_template": 3}'},
        CHAT | {"tokenizer": "tok"},
        r"^tok/tokenizer_config\.json: chat_template must be a text or a list of named templates, but is 3$",
    ),
    "templates without names": (
        {SETTINGS: '{"chat_template": [3, {"name": "default"}]}'},
        CHAT | {"tokenizer": "tok"},
        r"^the tokenizer in 'tok' has no chat template",
    ),
    "no tokens": (
        {"tok/tokenizer.json": _tokenizer({})},
        TOKENIZER,
        r"^tok/tokenizer\.json: this tokenizer has no tokens$",
    ),
    "lists without end": ({SETTINGS: "[" * 100_000}, TOKENIZER, r"^tok/tokenizer_config\.json: this is no JSON: "),
    "a list for a table": ({SETTINGS: "[]"}, TOKENIZER, r"^tok/tokenizer_config\.json: this is no table of values, bu"),
    "a number for a token": (
        {SETTINGS: '{"eos_token": 3}'},
        TOKENIZER,
        r"^tok/tokenizer_config\.json: eos_token must be a text, or a table with the text 'content', but is 3$",
    ),
    "an end that is no token": (
        {SETTINGS: '{"eos_token": {"content": "<end>"}}'},
        TOKENIZER,
        r"^tok/tokenizer_config\.json: eos_token '<end>' is no token of 'tok/tokenizer\.json'",
    ),
    "ends with a bracket left open": (
        {"ids.ends.npy": b"\x93NUMPY\x01\x00" + bytes([118, 0]) + b"{'descr': '<i8', (".ljust(117) + b"\n" + bytes(8)},
        {"kind": "tokens", "path": "ids.bin"},
        r"^cannot read the ends of documents in 'ids\.ends\.npy': ",
    ),
    "ends in an archive": (
        {"ids.ends.npy": _archive()},
        {"kind": "tokens", "path": "ids.bin"},
        r"^ids\.ends\.npy: the ends of documents must be one array, as numpy\.save writes it, not several$",
    ),
    "empty ends": (
        {"ids.ends.npy": ""},
        {"kind": "tokens", "path": "ids.bin"},
        r"^cannot read the ends of documents in 'ids\.ends\.npy': No data left",
    ),
}


def _open(files, config):
    for name, content in (GOOD | files).items():
        with open(name, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
    return open_data(DataConfig(length=64, cache="cache", **config), seed=0)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok").mkdir()


@pytest.mark.parametrize("case", CASES)
def test_broken_data_is_refused(case):
    files, config, said = CASES[case]
    with pytest.raises(ValueError, match=said):
        _open(files, config)


def test_strings_of_parquet_that_are_no_text_are_refused():
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    bad = arrow.Array.from_buffers(arrow.string(), 1, arrow.array([b"\xff"]).buffers())
    parquet.write_table(arrow.table({"text": bad}), "bad.parquet")
    with pytest.raises(ValueError, match=r"^cannot read 'bad\.parquet' as parquet, after 0 rows: 'utf-8' codec"):
        _open({}, {"kind": "text", "path": "bad.parquet"})


def test_a_flipped_bit_in_a_page_of_parquet_is_found_by_its_checksum():
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": ["some words " * 20]})
    parquet.write_table(table, "a.parquet", write_page_checksum=True, compression="none", use_dictionary=False)
    with open("a.parquet", "rb") as file:
        content = bytearray(file.read())
    assert _open({"a.parquet": bytes(content)}, {"kind": "text", "path": "a.parquet"}).num_samples == 3
    content[len(content) // 3] ^= 1  # in the page, behind its header
    with pytest.raises(ValueError, match=r"^cannot read 'a\.parquet' as parquet"):
        _open({"a.parquet": bytes(content)}, {"kind": "text", "path": "a.parquet"})


def test_json_lines_of_windows_are_read():
    rows = b"\xef\xbb\xbf" + (GOOD["text.jsonl"] + "\r\n").encode() * 2
    assert _open({"text.jsonl": rows}, TEXT).num_samples == 6
