"""Samples of token files and rows, and batches of samples, against the same by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data import IGNORED, Sample, Subset, Synthetic, TokenFile, collate

only_on = "torch"  # imports no framework: once is enough


def _token_file(folder, documents, dtype="uint16", **options):
    tokens = np.concatenate([np.asarray(document) for document in documents]).astype(dtype)
    tokens.tofile(folder / "t.bin")
    np.save(folder / "t.ends.npy", np.cumsum([len(document) for document in documents]))
    return TokenFile(folder / "t.bin", **{"ends": folder / "t.ends.npy", "dtype": dtype, **options})


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_samples_of_a_token_file_are_stretches_with_documents_apart(tmp_path_factory, sizes, length):
    documents = [[100 * number + place for place in range(size)] for number, size in enumerate(sizes)]
    tokens = [token for document in documents for token in document]
    if len(tokens) <= length:
        return
    data = _token_file(tmp_path_factory.mktemp("tokens"), documents, length=length)
    assert data.num_samples == (len(tokens) - 1) // length
    for number in range(data.num_samples):
        sample = data.sample(number)
        inside = tokens[number * length : number * length + length + 1]
        assert sample.input_ids.tolist() == inside[:-1]
        following = [b if a // 100 == b // 100 else IGNORED for a, b in itertools.pairwise(inside)]
        assert sample.labels.tolist() == following
        begin = [next(i for i, t in enumerate(inside) if t // 100 == token // 100) for token in inside[:-1]]
        assert sample.position_ids.tolist() == [place - first for place, first in enumerate(begin)]


def test_joined_documents_are_one_stretch(tmp_path):
    data = _token_file(tmp_path, [[1, 2, 3], [4, 5, 6, 7]], length=3, isolate=False)
    sample = data.sample(1)
    assert sample.input_ids.tolist() == [4, 5, 6]
    assert sample.labels.tolist() == [5, 6, 7]
    assert sample.position_ids is None
    assert set(data.collate([0, 1])) == {"input_ids", "labels"}


def test_large_ids_and_facts(tmp_path):
    data = _token_file(tmp_path, [[70_000, 1], [2, 3, 4]], "uint32", length=2)
    assert data.vocab_size == 70_001
    assert data.sample(0).input_ids.tolist() == [70_000, 1]
    assert data.decode([1, 2]) == "1 2"
    assert "5 tokens of 2 documents, kept apart; 2 samples of 2, vocabulary 70,001" in data.describe()


def test_the_fingerprint_tells_other_data(tmp_path):
    def made(documents, **options):
        return _token_file(tmp_path, documents, **{"length": 2, **options}).fingerprint

    same = made([[1, 2], [3, 4, 5]])
    assert made([[1, 2], [3, 4, 5]]) == same
    others = [
        made([[1, 2], [3, 4, 6]]),
        made([[1, 2, 3], [4, 5]]),
        made([[1, 2], [3, 4, 5]], length=1),
        made([[1, 2], [3, 4, 5]], isolate=False),
    ]
    assert len({same, *others}) == 5
    large = np.zeros(5_000_000, np.uint16)
    large.tofile(tmp_path / "l.bin")
    first = TokenFile(tmp_path / "l.bin", length=8, isolate=False).fingerprint
    large[-1] = 1
    large.tofile(tmp_path / "l.bin")
    assert TokenFile(tmp_path / "l.bin", length=8, isolate=False).fingerprint != first


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: TokenFile(p / "no.bin", length=2), "cannot read the tokens in '.*no.bin': No such file"),
        (
            lambda p: TokenFile(p / "odd.bin", length=1),
            "odd.bin: 3 bytes are no whole number of uint16 tokens; it is cut",
        ),
        (
            lambda p: TokenFile(p / "empty.bin", length=1),
            "empty.bin: 0 tokens are less than one sample of length 1, whi",
        ),
        (lambda p: _token_file(p, [[1, 2]], length=2), "2 tokens are less than one sample of length 2, which takes 3"),
        (lambda p: _token_file(p, [[1, 2]], length=1, ends=None), "their ends must be known; give the .npy file"),
        (
            lambda p: _token_file(p, [[1, 2]], length=1, ends=p / "short.npy"),
            "must rise and end at the number of tokens, 2",
        ),
        (lambda p: _token_file(p, [[1, 2]], length=1, ends=p / "odd.bin"), "cannot read the ends of documents in"),
        (
            lambda p: _token_file(p, [[1, 2]], length=1, ends=p / "float.npy"),
            "must be a list of whole numbers, not float",
        ),
        (
            lambda p: _token_file(p, [[1, 2, 9, 3]], length=1, vocab_size=5).sample(1),
            "sample 1, from token 1 on: token 1 has the id 9, but the vocabulary has 5; the data was made with another",
        ),
        (lambda p: Synthetic(num_samples=0, length=1, vocab_size=1), "num_samples=0, length=1, vocab_size=1 must be"),
        (lambda p: collate([Sample.of_tokens([1, 2, 3])], length=1), "a sample has 2 tokens, more than length=1"),
        (
            lambda p: Subset(_token_file(p, [[1, 2]], length=1), 1, 1, "training"),
            "the training part of 1 samples is empty",
        ),
    ],
)
def test_mistakes(tmp_path, make, message):
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty.bin").write_bytes(b"")
    np.save(tmp_path / "short.npy", np.array([1]))
    np.save(tmp_path / "float.npy", np.array([1.0]))
    with pytest.raises((ValueError, OSError), match=message):
        make(tmp_path)


def test_a_number_outside_is_an_error(tmp_path):
    data = _token_file(tmp_path, [[1, 2, 3]], length=1)
    with pytest.raises(IndexError, match="sample 2 of data that has 2: 0 to 1"):
        data.sample(2)
    with pytest.raises(IndexError, match="sample -1"):
        data.sample(-1)


def test_synthetic_tokens_depend_on_their_place_only():
    data, more = (Synthetic(num_samples=num, length=64, vocab_size=11) for num in (3, 9))
    assert data.sample(2).input_ids.tolist() == more.sample(2).input_ids.tolist()
    assert data.sample(1).labels.tolist()[:-1] == data.sample(1).input_ids.tolist()[1:]
    assert set(np.concatenate([more.sample(n).input_ids for n in range(9)]).tolist()) == set(range(11))
    assert data.sample(0).input_ids.tolist() != data.sample(1).input_ids.tolist()


def test_a_packed_batch_has_no_mask_and_its_padding_is_a_document():
    packed = Sample.of_documents([Sample.of_tokens([1, 2, 3]), Sample.of_tokens([4, 5], [False, True])])
    batch = collate([packed, Sample.of_tokens([7, 8])], length=5)
    assert batch["input_ids"].tolist() == [[1, 2, 4, 0, 0], [7, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[2, 3, 5, -100, -100], [8, -100, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1], [0, 0, 1, 2, 3]]
    assert "attention_mask" not in batch
    assert (batch.num_tokens, batch.num_padding, batch.num_trained) == (4, 6, 4)


def test_a_mask_is_there_only_where_padding_is():
    alike = collate([Sample.of_tokens([1, 2]), Sample.of_tokens([3, 4])])
    assert set(alike) == {"input_ids", "labels"}
    assert alike.num_padding == 0
    uneven = collate([Sample.of_tokens([1, 2]), Sample.of_tokens([3, 4, 5], [0, 0, 1])], pad_id=9)
    assert uneven["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert uneven["input_ids"].tolist() == [[1, 9], [3, 4]]
    assert uneven["labels"].tolist() == [[2, -100], [-100, 5]]
    assert {array.dtype for array in uneven.values()} == {np.dtype(np.int64)}


def test_a_rank_without_samples_gets_arrays_without_rows(tmp_path):
    data = _token_file(tmp_path, [[1, 2, 3, 4]], length=3)
    batch = data.collate([])
    assert {name: array.shape for name, array in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), (0, 3)
    )
    assert (batch.num_tokens, batch.num_trained) == (0, 0)


def test_a_model_that_does_not_know_all_ids_is_refused():
    data = Synthetic(num_samples=2, length=4, vocab_size=100)
    data.require_vocabulary(100)
    with pytest.raises(
        ValueError, match="the data has 100 token ids, but the model only 99; give the tokenizer that bel"
    ):
        data.require_vocabulary(99)


def test_documents_of_a_sample_come_back():
    sample = Sample.of_documents([Sample.of_tokens([1, 2, 3]), Sample.of_tokens([4, 5, 6], [False, True, False])])
    assert [(tokens.tolist(), trained.tolist()) for tokens, trained in sample.documents()] == [
        ([1, 2, 3], [False, True, True]),
        ([4, 5], [False, True]),
    ]


def test_a_split_is_fixed_and_loses_nothing():
    whole = Synthetic(num_samples=10, length=4, vocab_size=100)
    parts = [Subset(whole, 0, 3, "validation"), Subset(whole, 3, 10, "training")]
    rows = sorted(tuple(part.sample(n).input_ids.tolist()) for part in parts for n in range(part.num_samples))
    assert rows == sorted(tuple(whole.sample(n).input_ids.tolist()) for n in range(10))
    assert parts[0].fingerprint != parts[1].fingerprint
    assert parts[0].describe().endswith("; of these 3 for validation")
