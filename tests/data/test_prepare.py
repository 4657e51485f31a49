"""Preparation: once, whole or absent, by content; what becomes of text and conversations; mistakes by their line."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from hyper_parallel.data import DataConfig, SourceConfig, open_data, open_validation, prepare
from hyper_parallel.data.preparing.cache import check_folder, prepare_folder, remembered_digest
from tests.data.test_chat import make_tokenizer

only_on = "torch"  # imports no framework: once is enough


@pytest.fixture
def config(tmp_path):
    """A config whose prepared data goes into the test's folder."""
    return lambda **fields: DataConfig(cache=str(tmp_path / "cache"), **fields)


def _lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def _talk(*texts):
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]}


# ---------------------------------------------------------------- text


def test_bytes_of_a_folder(tmp_path, config):
    folder = tmp_path / "books"
    (folder / "more").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"abc\xff")
    (folder / "more" / "a.txt").write_bytes(b"de")
    (folder / "empty.txt").write_bytes(b"")
    (folder / ".hidden").write_bytes(b"no")
    data = open_data(config(kind="text", path=str(folder), length=5), seed=0)
    sample = data.sample(0)
    assert bytes(sample.input_ids.astype(np.uint8)) == b"abc\xffd"
    assert sample.labels.tolist() == [*b"bc\xff", -100, *b"e"]
    assert sample.position_ids.tolist() == [0, 1, 2, 3, 0]
    assert data.vocab_size == 256
    assert data.decode(sample.input_ids[:3]) == "abc"


def test_the_corpus_needs_no_files(config):
    data = open_data(config(length=128), seed=0)
    assert data.num_samples > 1000
    assert "Python's library" in data.describe()
    text = "".join(data.decode(data.sample(number).input_ids) for number in range(200))
    assert "import" in text


def test_text_of_records_with_a_tokenizer(tmp_path, config):
    make_tokenizer(tmp_path)
    path = _lines(tmp_path / "t.jsonl", {"body": "Hello there"}, {"body": "the answer"})
    data = open_data(config(kind="text", path=path, tokenizer=str(tmp_path), text_field="body", length=4), seed=0)
    shown = "".join(data.decode(data.sample(number).input_ids) for number in range(data.num_samples))
    assert shown.startswith("Hello there<|im_end|>the")
    assert np.concatenate([data.sample(n).position_ids for n in range(data.num_samples)]).tolist().count(0) >= 2


def test_parquet_is_read_as_json_lines_are(tmp_path, config):
    pyarrow = pytest.importorskip("pyarrow", reason="parquet needs pyarrow (hyper-parallel[data])")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [_talk("Hi", "Hello"), _talk("Bye", "See you", "When?", "Soon")]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "c.parquet")
    paths = [str(tmp_path / "c.parquet"), _lines(tmp_path / "c.jsonl", *records)]
    one, two = (open_data(config(kind="chat", path=path, length=256), seed=0) for path in paths)
    assert one.num_samples == two.num_samples == 1
    assert one.sample(0).labels.tolist() == two.sample(0).labels.tolist()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"cannot read '.*bad.parquet' as parquet, after 0 rows"):
        open_data(config(kind="chat", path=str(tmp_path / "bad.parquet")), seed=0)
    parquet.write_table(pyarrow.Table.from_pylist([{"text": "a"}]), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t.parquet, row 1: a row of a conversation has 'messages'"):
        open_data(config(kind="chat", path=str(tmp_path / "t.parquet")), seed=0)


# ---------------------------------------------------------------- conversations


def test_conversations_are_packed_and_their_answers_trained(tmp_path, config):
    rows = [_talk(f"question {n}" * (n % 3 + 1), f"answer {n}") for n in range(20)]
    data = open_data(config(kind="chat", path=_lines(tmp_path / "c.jsonl", *rows), length=300), seed=0)
    assert data.num_samples < 20
    seen = []
    for number in range(data.num_samples):
        sample = data.sample(number)
        assert len(sample.input_ids) <= 300
        for tokens, trained in sample.documents():
            assert data.decode(tokens).startswith("<|im_start|>user\nquestion")
            seen.append(data.decode(tokens[trained]))
    assert sorted(seen) == sorted(f"answer {n}<|im_end|>\n" for n in range(20))
    batch = data.collate(range(data.num_samples))
    assert "attention_mask" not in batch
    assert batch.num_trained == sum(map(len, seen))
    assert (batch["position_ids"] == 0).sum() >= 20
    assert "20 rows, packed into" in data.describe()


def test_rows_that_are_not_packed_are_padded(tmp_path, config):
    path = _lines(tmp_path / "c.jsonl", _talk("Hi", "a"), _talk("Hi", "a longer answer"))
    options = {"kind": "chat", "path": path, "length": 200, "packing": False}
    data = open_data(config(**options), seed=0)
    assert data.num_samples == 2
    batch = data.collate([0, 1])
    assert batch["attention_mask"].sum(1).tolist() == [len(data.sample(n).input_ids) for n in (0, 1)]
    assert "position_ids" not in batch
    assert open_data(config(**options, pad="length"), seed=0).collate([0])["input_ids"].shape == (1, 200)


def test_a_token_across_prompt_and_answer_is_told(tmp_path, config):
    make_tokenizer(tmp_path)
    path = _lines(tmp_path / "p.jsonl", {"prompt": "The answer: ", "completion": "the answer"})
    data = open_data(config(kind="chat", path=path, tokenizer=str(tmp_path), chat_template="none", length=99), seed=0)
    assert "; in 1 rows a token holds the end of a prompt and the beginning of the answer" in data.describe()


def test_a_prompt_and_its_completion(tmp_path, config):
    make_tokenizer(tmp_path)
    path = _lines(tmp_path / "p.jsonl", {"prompt": "Q: 1?", "completion": " A: 1."})
    plain = open_data(config(kind="chat", path=path, tokenizer=str(tmp_path), chat_template="none", length=99), seed=0)
    ((tokens, trained),) = plain.sample(0).documents()
    assert plain.decode(tokens) == "Q: 1? A: 1.<|im_end|>"
    assert plain.decode(tokens[trained]) == " A: 1.<|im_end|>"
    turns = open_data(config(kind="chat", path=path, length=99), seed=0)
    ((tokens, trained),) = turns.sample(0).documents()
    assert turns.decode(tokens).startswith("<|im_start|>user\nQ: 1?<|im_end|>")


def test_rows_that_are_too_long(tmp_path, config):
    path = _lines(tmp_path / "c.jsonl", _talk("Hi", "short"), _talk("Hi", "long " * 50))
    with pytest.raises(
        ValueError, match=r"c.jsonl:2: this row has 3\d\d tokens, but a sample of length 80 has at most 81"
    ):
        open_data(config(kind="chat", path=path, length=80), seed=0)
    data = open_data(config(kind="chat", path=path, length=80, too_long="truncate", packing=False), seed=0)
    assert sorted(len(data.sample(n).input_ids) for n in (0, 1))[1] == 80
    assert data.describe().endswith("; 1 rows were longer than 80 and are cut short")
    with pytest.raises(ValueError, match=r"c.jsonl:1: no token of this row is trained within the first 11 tokens"):
        open_data(config(kind="chat", path=path, length=10, too_long="truncate"), seed=0)


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        (b"\x00\xff\x93junk", {}, r"c.jsonl:2: byte 0xff at column 2 is no UTF-8, so this is no line of JSON"),
        (b'{"messages": [', {}, r"c.jsonl:2: this line is no JSON at column \d+"),
        (b"[1, 2]", {}, r"c.jsonl:2: this line is no JSON object such as .*, but \[1, 2\]"),
        (b"[" * 100_000, {}, r"c.jsonl:2: this line is no JSON"),
        (b'{"text": "a"}', {}, r"c.jsonl:2: a row of a conversation has 'messages', or .* this one has 'text'"),
        (b'{"messages": []}', {}, r"c.jsonl:2: the messages must be a list that is not empty, but are \[\]"),
        (b'{"messages": "Hi"}', {}, r"c.jsonl:2: the messages must be a list that is not empty, but are 'Hi'"),
        (b'{"messages": [{"role": "user"}]}', {}, r"c.jsonl:2: message 0 must have texts for 'role' and 'content'"),
        (b'{"messages": [{"role": "user", "content": "Hi"}]}', {}, r"c.jsonl:2: no token of this row is trained"),
        (
            b'{"messages": [{"role": "user", "content": "Hi"}]}',
            {"chat_template": "none"},
            r"without a chat template .*'p",
        ),
        (
            b'{"prompt": "Hi", "completion": ""}',
            {"chat_template": "none"},
            r"c.jsonl:2: no token of this row is trained",
        ),
        (b'{"prompt": "Hi", "completion": 3}', {}, r"c.jsonl:2: message 1 must have texts for 'role' and 'content'"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path, config, line, options, message):
    good = {"prompt": "a", "completion": "b"}
    (tmp_path / "c.jsonl").write_bytes(json.dumps(good).encode() + b"\n" + line + b"\n")
    with pytest.raises(ValueError, match=message):
        open_data(config(kind="chat", path=str(tmp_path / "c.jsonl"), **options), seed=0)
    assert [path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] in (
        [],
        ["digests"],
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: {"path": str(p / "no")}, r"path: must be a file or folder of this machine; there is no '.*no'"),
        (
            lambda p: {"path": str(p / "folder")},
            r"the folder '.*folder' has no file that matches '\*'; the data is empty",
        ),
        (lambda p: {"path": str(p / "empty.txt")}, r"the data is empty: '.*empty.txt' hold no text"),
        (
            lambda p: {"path": str(p / "empty.jsonl"), "kind": "chat"},
            r"the data is empty: '.*empty.jsonl' hold no rows",
        ),
        (
            lambda p: {"path": str(p / "t.jsonl")},
            r"t.jsonl:1: the field 'text' must be a text, but it has 'a'; name the",
        ),
        (lambda p: {"path": str(p / "t.jsonl"), "text_field": "a"}, r"t.jsonl:1: the field 'a' must be a text, but 1"),
        (
            lambda p: {"path": str(p / "short.txt"), "length": 9},
            r"3 tokens are less than one sample of length 9, which",
        ),
        (lambda p: {"path": str(p / "short.txt"), "kind": "chat"}, r"short.txt' is none of .jsonl, .ndjson, .parquet"),
        (
            lambda p: {"path": str(p / "latin.txt"), "tokenizer": str(p)},
            r"latin.txt:2: byte 0xe9 at place 5 is no UTF-8;",
        ),
        (
            lambda p: {"path": str(p / "short.txt"), "tokenizer": str(p / "folder")},
            r"tokenizer: must be a folder with a tokenizer.json; '.*folder' has none",
        ),
    ],
)
def test_mistakes(tmp_path, config, make, message):
    make_tokenizer(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in {
        "empty.txt": b"",
        "empty.jsonl": b"\n\n",
        "t.jsonl": b'{"a": 1}\n',
        "short.txt": b"abc",
        "latin.txt": b"abc\nd\xe9f",
    }.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=message):
        open_data(config(**{"kind": "text", **make(tmp_path)}), seed=0)


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_file_that_may_not_be_read(tmp_path, config, monkeypatch, kind):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "t.jsonl").write_text("abc")
    monkeypatch.setattr(Path, "open", refuse)  # the superuser, who may be testing, may read everything
    with pytest.raises(PermissionError, match=r"cannot read '.*t.jsonl': Permission denied"):
        open_data(config(kind=kind, path=str(tmp_path / "t.jsonl")), seed=0)


# ---------------------------------------------------------------- once, whole or absent


def _counting(folder, content=b"abc"):
    def build(aside):
        with (folder / "count").open("a") as stream:
            stream.write("x")
        (aside / "tokens.bin").write_bytes(content)
        time.sleep(0.3)
        return {"fact": 1}

    return build


def _prepare_in_process(folder):
    return str(prepare_folder(folder / "cache", "a", _counting(folder))[0])


def test_many_processes_and_threads_prepare_once(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool, ThreadPoolExecutor(3) as threads:
        found = [*pool.map(_prepare_in_process, [tmp_path] * 3), *threads.map(_prepare_in_process, [tmp_path] * 3)]
    assert set(found) == {str(tmp_path / "cache" / "a")}
    assert (tmp_path / "count").read_text() == "x"


def test_who_waits_can_be_stopped(tmp_path):
    def stop():
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(_prepare_in_process, tmp_path)
        while not (tmp_path / "count").exists():
            time.sleep(0.01)
        with pytest.raises(KeyboardInterrupt):
            prepare_folder(tmp_path / "cache", "a", _counting(tmp_path), stop)
        first.result()


def test_an_interrupted_preparation_leaves_nothing_that_is_taken_for_whole(tmp_path):
    def interrupted(aside):
        (aside / "tokens.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_folder(tmp_path / "cache", "a", interrupted)
    killed = tmp_path / "cache" / ".a.xyz.partial"  # what a killed one leaves
    killed.mkdir()
    (killed / "tokens.bin").write_bytes(b"half")
    folder, facts = prepare_folder(tmp_path / "cache", "a", _counting(tmp_path))
    assert facts["fact"] == 1
    assert (folder / "tokens.bin").read_bytes() == b"abc"
    assert not killed.exists()


def _be_killed(folder):
    def build(aside):
        (aside / "tokens.bin").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    prepare_folder(folder / "cache", "a", build)


def test_a_killed_preparation_holds_nobody_up(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_be_killed, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert len(list((tmp_path / "cache").glob(".a.*.partial"))) == 1
    folder, _ = prepare_folder(tmp_path / "cache", "a", _counting(tmp_path))
    assert (folder / "tokens.bin").read_bytes() == b"abc"
    assert list((tmp_path / "cache").glob(".a.*.partial")) == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "tokens.bin").write_bytes(b"ab"), "tokens.bin has 2 bytes instead of 3"),
        (lambda f: (f / "tokens.bin").write_bytes(b"abd"), "the content of tokens.bin has changed"),
        (lambda f: (f / "tokens.bin").unlink(), "No such file"),
        (lambda f: (f / "meta.json").unlink(), "No such file"),
        (lambda f: (f / "meta.json").write_text('{"format": 99}'), "not of this version"),
        (lambda f: (f / "meta.json").write_text("{"), "JSONDecodeError"),
        (lambda f: (f / "meta.json").write_text("[]"), "not of this version"),
    ],
)
def test_a_damaged_folder_is_found_and_made_again(tmp_path, damage, message):
    folder, _ = prepare_folder(tmp_path / "cache", "a", _counting(tmp_path))
    damage(folder)
    with pytest.raises(ValueError, match=rf"holds no whole prepared data \(.*{message}.*\); remove it and run hyper"):
        check_folder(folder)
    with pytest.warns(UserWarning, match=rf"is damaged \(.*{message}.*\); it is made again"):
        prepare_folder(tmp_path / "cache", "a", _counting(tmp_path))
    assert (tmp_path / "count").read_text() == "xx"
    assert check_folder(folder)["fact"] == 1


def test_a_cache_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=r"cannot write prepared data to '.*cache': Not a directory; .*HYPER_PARALLEL_CACHE"
    ):
        prepare_folder(tmp_path / "file" / "cache", "a", _counting(tmp_path))


def test_folders_are_named_by_content_and_options(tmp_path, config):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    _lines(first, _talk("Hi", "Hello"))
    shutil.copy(first, second)
    (folder,) = prepare(config(kind="chat", path=str(first)))
    assert prepare(config(kind="chat", path=str(second))) == [folder]
    others = [
        prepare(config(kind="chat", path=str(first), length=99)),
        prepare(config(kind="chat", path=str(first), packing=False)),
        prepare(config(kind="chat", path=str(first), too_long="truncate")),
    ]
    _lines(first, _talk("Hi", "Hallo"))
    others.append(prepare(config(kind="chat", path=str(first))))
    assert len({folder, *(other for (other,) in others)}) == 5
    assert isinstance(folder, Path)


def test_other_data_at_a_resume_is_an_error(tmp_path, config):
    path = tmp_path / "t.txt"
    path.write_text("some text " * 100)
    order = open_data(config(kind="text", path=str(path), length=10), seed=0).order(batch=4, seed=0)
    next(order)
    path.write_text("same text " * 100)
    changed = open_data(config(kind="text", path=str(path), length=10), seed=0).order(batch=2, seed=0)
    with pytest.raises(ValueError, match="the data has changed: the run that was saved at sample 4 had data"):
        changed.load_state(order.state())
    path.write_text("some text " * 100)
    again = open_data(config(kind="text", path=str(path), length=10), seed=0).order(batch=2, seed=0)
    again.load_state(order.state())
    assert again.position == 4


def test_a_digest_is_remembered_until_the_file_changes(tmp_path):
    asked = []

    def digest(file):
        asked.append(file)
        return file.read_text()

    file = tmp_path / "a"
    file.write_text("one")
    assert remembered_digest(tmp_path / "cache", file, digest) == "one"
    assert remembered_digest(tmp_path / "cache", file, digest) == "one"
    assert len(asked) == 2  # a file this young may change unnoticed
    os.utime(file, (1e9, 1e9))
    assert [remembered_digest(tmp_path / "cache", file, digest) for _ in range(3)] == ["one"] * 3
    assert len(asked) == 3
    file.write_text("two")
    assert remembered_digest(tmp_path / "cache", file, digest) == "two"


def test_progress_is_told_and_may_stop(tmp_path, config):
    path = _lines(tmp_path / "c.jsonl", _talk("Hi", "Hello"))
    told = []
    prepare(config(kind="chat", path=path), progress=lambda *step: told.append(step[0]))
    assert told == ["reading", "tokenising", "packing"]

    def stop(what, done, total):
        if what == "tokenising":
            raise InterruptedError("stopped")

    with pytest.raises(InterruptedError):
        prepare(config(kind="chat", path=path, length=77), progress=stop)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.endswith(".partial")]


# ---------------------------------------------------------------- the section [data]


def test_a_mixture_and_its_validation_part(tmp_path, config):
    (tmp_path / "t.txt").write_text("some text " * 100)
    sources = (
        SourceConfig(kind="text", path=str(tmp_path / "t.txt"), weight=3),
        SourceConfig(kind="synthetic", num_samples=20, weight=1),
    )
    whole = config(kind="mixture", sources=sources, length=10, validation=0.2)
    train, apart = open_data(whole, seed=4), open_validation(whole, seed=4)
    assert "mixture of 2: t.txt 75.00%, synthetic 25.00%" in train.describe()
    assert [data.num_samples for data in train.datasets] == [79, 16]
    assert [data.num_samples for data in apart.datasets] == [20, 4]
    batch = train.collate(next(train.order(batch=8, seed=4)))
    assert batch["input_ids"].shape == (8, 10)
    assert batch["position_ids"].shape == (8, 10)
    alone = np.flatnonzero(train.places(range(20))[0] == 1)[:1]
    assert train.collate(alone)["position_ids"].tolist() == [list(range(10))]  # the same names in every batch
    assert len(prepare(whole)) == 1


def test_validation_from_files_of_its_own(tmp_path, config):
    for name in ("t", "v"):
        (tmp_path / f"{name}.txt").write_text(name * 100)
    both = config(kind="text", path=str(tmp_path / "t.txt"), validation_path=str(tmp_path / "v.txt"), length=10)
    assert set(open_data(both, seed=0).sample(0).input_ids.tolist()) == {ord("t")}
    assert set(open_validation(both, seed=0).sample(0).input_ids.tolist()) == {ord("v")}
    assert open_validation(config(), seed=0) is None


def test_token_files_of_ones_own(tmp_path, config):
    np.arange(100, dtype=np.uint32).tofile(tmp_path / "t.bin")
    np.save(tmp_path / "t.ends.npy", np.array([30, 100]))
    options = {"kind": "tokens", "path": str(tmp_path / "t.bin"), "dtype": "uint32", "length": 33}
    data = open_data(config(**options), seed=0)
    assert data.sample(0).position_ids.tolist() == [*range(30), 0, 1, 2]
    with pytest.raises(ValueError, match="has the id 50, but the vocabulary has 50"):
        open_data(config(**options, vocab_size=50), seed=0).sample(1)


def test_a_prepared_folder_can_be_named(tmp_path, config):
    (tmp_path / "t.txt").write_text("some text " * 100)
    text = config(kind="text", path=str(tmp_path / "t.txt"), length=10)
    (folder,) = prepare(text)
    named = open_data(config(kind="tokens", path=str(folder), length=10), seed=0)
    assert named.sample(3).input_ids.tolist() == open_data(text, seed=0).sample(3).input_ids.tolist()
    assert named.fingerprint == open_data(text, seed=0).fingerprint
    (folder / "tokens.bin").write_bytes(b"cut")
    with pytest.raises(ValueError, match="holds no whole prepared data"):
        open_data(config(kind="tokens", path=str(folder)), seed=0)


def test_a_prepared_folder_that_is_not_of_documents(tmp_path, config):
    rows = _lines(tmp_path / "rows.jsonl", _talk("hi", "yo"))
    (folder,) = prepare(config(kind="chat", path=rows, length=64))
    with pytest.raises(ValueError, match=r'has prepared conversations, of which not every .* with kind = "chat"'):
        open_data(config(kind="tokens", path=str(folder)), seed=0)
    (folder / "meta.json").write_text((folder / "meta.json").read_text().replace('"chat"', '"text"', 1))
    with pytest.raises(ValueError, match=r"no whole prepared data \(ValueError: the content of meta.json has changed"):
        open_data(config(kind="tokens", path=str(folder)), seed=0)


def test_every_field_says_what_it_means():
    schema = TypeAdapter(DataConfig).json_schema()
    for properties in (schema["properties"], schema["$defs"]["SourceConfig"]["properties"]):
        assert [name for name, facts in properties.items() if not facts.get("description")] == []
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "text"}, 'path: is missing: kind = "text" reads a file or folder'),
        (
            {"kind": "corpus", "path": "."},
            'path: must not be given: kind = "corpus" reads no file; for files of your own',
        ),
        ({"kind": "tokens", "path": (".", ".")}, 'path: must be one path for kind = "tokens"'),
        ({"kind": "text", "path": "nowhere"}, "path: must be a file or folder of this machine; there is no 'nowhere'"),
        ({"kind": "text", "path": (".", "nowhere")}, "there is no 'nowhere'"),
        (
            {"tokenizer": "byte"},
            "tokenizer: must be a file or folder of this machine that is a tokenizer.json or has one",
        ),
        (
            {"kind": "chat", "path": ".", "chat_template": "chatlm"},
            'chat_template: must be .* of Jinja, "chatml" or "none"',
        ),
        ({"kind": "tokens", "path": ".", "ends": "nowhere"}, "ends: must be a file"),
        ({"kind": "mixture"}, 'sources: is missing: kind = "mixture" is made of sources'),
        (
            {"sources": (SourceConfig(kind="corpus"),)},
            'sources: must not be given with kind = "corpus"; write kind = "m',
        ),
        (
            {"kind": "text", "path": ".", "validation": 0.1, "validation_path": "."},
            "validation_path: and validation say the same in two ways",
        ),
        ({"validation_path": "."}, 'validation_path: is read as path is, but kind = "corpus" reads none'),
        ({"kind": "text", "tokenizer": "byte"}, "path: is missing: .*; tokenizer: must be"),
        ({"lenght": 5}, "lenght"),
        ({"length": 0}, "greater than or equal to 1"),
        ({"length": "5"}, "valid integer"),
        ({"kind": "txt"}, "Input should be 'corpus', 'text', 'chat', 'tokens', 'synthetic' or 'mixture'"),
        ({"validation": 1.0}, "less than 1"),
    ],
)
def test_bad_configs(fields, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)
