"""The proof of isolation and of the loss, on small models in numpy that are right or wrong on purpose."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.data import Sample, collate, prove_loss_mask, prove_packing, spell
from hyper_parallel.data.spelling import may_see

only_on = "torch"  # imports no framework: once is enough

_VOCAB = 23
_rng = np.random.default_rng(0)
_EMBEDDING, _PLACES, _HEAD = _rng.normal(size=(_VOCAB, 8)), _rng.normal(size=(64, 8)), _rng.normal(size=(8, _VOCAB))


def _model(obeys, window=None, casts=np.float64):
    """One layer of attention that obeys some of the ways of being told where documents begin."""

    def run(batch):
        unknown = set(batch) - {"input_ids", "position_ids", "labels", *obeys}
        if unknown:
            raise TypeError(f"unexpected keyword {sorted(unknown)[0]!r}\nand more")
        ids = batch["input_ids"]
        tokens = ids.shape[1]
        places = batch.get("position_ids", np.arange(tokens)[None])
        x = _EMBEDDING[ids] + _PLACES[places]
        seen = np.tri(tokens, dtype=bool)[None]
        if window:
            seen = seen & ~np.tri(tokens, k=-window, dtype=bool)
        if "position_ids" in batch and "position_ids" in obeys:
            seen = seen & may_see(places)
        if "attention_mask" in batch:
            seen = batch["attention_mask"][:, 0]  # whatever else there was is lost, as in Gemma 3
        if "cu_seq_lens_q" in batch:
            document = np.searchsorted(batch["cu_seq_lens_q"], np.arange(tokens), side="right")
            seen = seen & (document[:, None] == document)
        scores = np.where(seen, x @ x.swapaxes(1, 2), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = weights / weights.sum(-1, keepdims=True) @ x
        return (out @ _HEAD).astype(casts)

    return run


_CU = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@pytest.mark.parametrize(
    ("obeys", "window", "spelling"),
    [
        (("position_ids",), None, "position_ids"),
        (("position_ids", "attention_mask"), 4, "position_ids"),
        (("attention_mask",), None, "attention_mask"),
        (_CU, 4, "cu_seqlens"),
        (("attention_mask", *_CU), 4, "cu_seqlens"),  # the mask isolates, but loses the window
    ],
)
def test_the_spelling_that_isolates_is_found(obeys, window, spelling):
    proof = prove_packing(_model(obeys, window), vocab_size=_VOCAB)
    assert proof.spelling == spelling
    assert f"isolated by {spelling}: the logits are those alone, within" in str(proof)


def test_half_precision_is_no_leak():
    assert prove_packing(_model(("position_ids",), casts=np.float16), vocab_size=_VOCAB).spelling == "position_ids"


def test_rows_that_move_each_other_by_rounding_are_no_leak():
    """As in a mixture of experts, where how many tokens an expert has changes the order of sums."""
    model = _model(("position_ids",))

    def run(batch, amount=1e-6):
        rounding = np.random.default_rng(int(batch["input_ids"].sum())).normal(size=(1, 1, _VOCAB)) * amount
        return model(batch) + rounding

    assert prove_packing(run, vocab_size=_VOCAB).spelling == "position_ids"
    with pytest.raises(ValueError, match="position_ids: leaks"):
        prove_packing(lambda batch: run(batch, 1e-6 * ("position_ids" in batch)), vocab_size=_VOCAB)


def test_a_model_that_obeys_none_is_refused_in_words():
    with pytest.raises(ValueError, match="in this model packed documents see each other") as refused:
        prove_packing(_model(("attention_mask",), window=4), vocab_size=_VOCAB)
    said = str(refused.value)
    assert "position_ids: leaks, another first document moves the second one's logits by" in said
    assert "attention_mask: isolates, but the logits are" in said
    assert "cu_seqlens: refused, TypeError: unexpected keyword 'cu_seq_lens_k'" in said
    assert said.endswith("data.isolate = false for text that may be read as one")


def test_a_window_that_is_lost_shows_only_in_documents_longer_than_it():
    model = _model(("attention_mask",), window=16)
    assert prove_packing(model, vocab_size=_VOCAB, length=12).spelling == "attention_mask"
    with pytest.raises(ValueError, match="attention_mask: isolates, but the logits are"):
        prove_packing(model, vocab_size=_VOCAB, length=60)


def test_logits_that_are_no_logits():
    with pytest.raises(
        ValueError, match=r"gave logits of shape \(1, 22\) for 1 row of 22 tokens; it must give \(rows, t"
    ):
        prove_packing(lambda batch: batch["input_ids"], vocab_size=_VOCAB)
    with pytest.raises(ValueError, match="logits of one document alone are not finite"):
        prove_packing(lambda batch: np.full((*batch["input_ids"].shape, 2), np.nan), vocab_size=_VOCAB)
    with pytest.raises(ValueError, match="length=3 must be at least 4"):
        prove_packing(lambda batch: batch["input_ids"], vocab_size=_VOCAB, length=3)


def test_spellings():
    packed = [Sample.of_documents([Sample.of_tokens([1, 2, 3]), Sample.of_tokens([4, 5])]), Sample.of_tokens([6, 7])]
    batch = collate(packed)
    assert spell(batch, "position_ids") == dict(batch)
    mask = spell(batch, "attention_mask")["attention_mask"]
    assert mask.shape == (2, 1, 3, 3)
    assert mask[0, 0].tolist() == [[True, False, False], [True, True, False], [False, False, True]]
    flat = spell(batch, "cu_seqlens")
    assert flat["input_ids"].tolist() == [[1, 2, 4, 6, 0, 0]]
    assert flat["cu_seq_lens_q"].tolist() == [0, 2, 3, 4, 6]
    assert flat["max_length_k"] == 2
    plain = collate([Sample.of_tokens([1, 2])])
    assert spell(plain, "cu_seqlens") == dict(plain)
    with pytest.raises(ValueError, match="there is no spelling 'varlen' of packed rows; known are position_ids, att"):
        spell(plain, "varlen")


# ---------------------------------------------------------------- the loss


def _loss(run, batch, labels):
    logits = run({name: array for name, array in batch.items() if name != "labels"})
    losses = [
        np.log(np.exp(logits[place]).sum()) - logits[place][label]
        for place, label in np.ndenumerate(labels)
        if label != -100
    ]
    return float(np.mean(losses))


@pytest.fixture
def masked():
    rng = np.random.default_rng(1)
    return collate([Sample.of_tokens(rng.integers(0, _VOCAB, 9), rng.random(9) < 0.5) for _ in range(2)])


def test_a_loss_over_the_trained_tokens_passes(masked):
    run = _model(())
    mean = prove_loss_mask(run, lambda batch: _loss(run, batch, batch["labels"]), masked)
    assert mean == pytest.approx(_loss(run, masked, masked["labels"]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda b: np.pad(b["labels"][:, 1:], ((0, 0), (0, 1)), constant_values=-100),
            "shifts them once more; give them as",
        ),
        (
            lambda b: np.pad(b["input_ids"][:, 1:], ((0, 0), (0, 1)), constant_values=-100),
            "it is over all tokens instead",
        ),
        (lambda b: np.where(np.arange(8) < 2, 3, -100) + 0 * b["labels"], "it is neither that over all tokens nor"),
    ],
)
def test_a_loss_over_something_else_is_told(masked, wrong, message):
    run = _model(())
    with pytest.raises(
        ValueError, match=rf"the model's loss is .*, but the mean over the \d+ trained tokens is .*{message}"
    ):
        prove_loss_mask(run, lambda batch: _loss(run, batch, wrong(batch)), masked)


def test_a_batch_without_trained_tokens_proves_nothing():
    with pytest.raises(ValueError, match="no token of this batch is trained"):
        prove_loss_mask(_model(()), lambda batch: 0.0, collate([Sample.of_tokens([1, 2], [False, False])]))
