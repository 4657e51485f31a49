"""Proof, on the model itself, that packed documents do not see each other and that the loss is over what is trained.

Note [Why proven and not known]
Which way of saying where documents begin a model obeys depends on the model, and a wrong one is silent: the loss looks
fine. Positions that restart, without a mask, isolate in Llama, Qwen3, Gemma 3, Phi-3, GPT-2 and GPT-NeoX and leak in
OPT, Falcon and Bloom; a mask of all pairs is right for OPT and Falcon and loses Gemma 3's sliding window; for Bloom
and Mamba there is none. So each is tried on the model at hand, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.data.sample import IGNORED
from hyper_parallel.data.spelling import SPELLINGS, spell

__all__ = ["PackingProof", "prove_loss_mask", "prove_packing"]

_EXACT, _SLACK = 1e-7, 4.0  # what counts as not moving at all; how far rounding may exceed what was seen of it
RunModel = Callable[[dict[str, Any]], np.ndarray]


@dataclass(frozen=True)
class PackingProof:
    """The spelling that isolates documents in a model, and what was found of each that was tried."""

    spelling: str
    found: dict[str, str]

    def __str__(self) -> str:
        return f"packed documents are isolated by {self.spelling}: {self.found[self.spelling]}"


def prove_packing(
    run_model: RunModel,
    *,
    vocab_size: int,
    length: int = 32,
    tolerance: float = 1e-3,
    spellings: tuple[str, ...] = SPELLINGS,
    seed: int = 0,
    final: tuple[type[Exception], ...] = (),
) -> PackingProof:
    """Find the spelling of packed rows under which a model treats the second of two documents as if it were alone.

    ``run_model(batch) -> logits`` takes a batch of numpy arrays and gives (rows, tokens, vocabulary), without dropout.
    ``length`` should be that of training: a sliding window that is lost shows only in a document longer than it. A
    spelling is right if the second document's logits are those it has alone, up to ``tolerance`` of the largest (for
    rounding: another shape may run another kernel), and do not move at all when the first document is another one, or
    no more than they do when another row of the batch is. If none is right, that is an error which says what to do.
    Behind an error of ``final`` the model cannot be run again, and no other spelling is tried.
    """
    if length < 4:
        raise ValueError(f"prove_packing: length={length} must be at least 4, for two documents")
    numbers = np.random.default_rng(seed)
    first = length // 3
    ids = numbers.integers(0, vocab_size, (2, length))  # the second row is company: batches have several
    other = ids.copy()
    other[0, :first] = (ids[0, :first] + numbers.integers(1, max(2, vocab_size), first)) % vocab_size
    positions = np.stack([np.r_[np.arange(cut), np.arange(length - cut)] for cut in (first, length // 2)])
    second, one, two = ids[:1, first:], ids[1:, first:], other[:1, : length - first]
    alone = np.asarray(run_model({"input_ids": second}))
    if alone.ndim != 3 or alone.shape[:2] != second.shape:
        raise ValueError(
            f"prove_packing: the model gave logits of shape {alone.shape} for 1 row of {length - first} tokens; it "
            "must give (rows, tokens, vocabulary)"
        )
    if not np.isfinite(alone).all():
        raise ValueError(
            "prove_packing: the model's logits of one document alone are not finite, so there is nothing to compare; "
            "look at the model's weights"
        )
    scale = float(np.abs(alone).max()) or 1.0
    in_company = [np.asarray(run_model({"input_ids": np.r_[second, row]}))[0] for row in (one, two)]
    unavoidable = _SLACK * float(np.abs(in_company[0] - in_company[1]).max()) / scale + _EXACT

    def found_of(spelling: str) -> tuple[bool | None, str]:
        packed = [spell({"input_ids": rows, "position_ids": positions}, spelling) for rows in (ids, other)]
        try:
            logits, moved = (np.asarray(run_model(batch)).reshape(2, length, -1)[0, first:] for batch in packed)
        except Exception as error:  # whatever a model says to arguments that it does not know
            said = f"refused, {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
            return None if isinstance(error, final) else False, said
        away, leak = (float(np.abs(logits - wanted).max()) / scale for wanted in (alone[0], moved))
        if not np.isfinite([away, leak]).all():
            return False, "the logits are not finite"
        if leak > unavoidable:
            return False, f"leaks, another first document moves the second one's logits by {leak:.1e} of the largest"
        if away > tolerance:
            return False, f"isolates, but the logits are {away:.1e} of the largest away from those alone"
        return True, f"the logits are those alone, within {away:.1e} of the largest"

    found = {}
    for spelling in spellings:
        is_right, found[spelling] = found_of(spelling)
        if is_right:
            return PackingProof(spelling, found)
        if is_right is None:
            break
    tried = "; ".join(f"{name}: {what}" for name, what in found.items())
    raise ValueError(
        f"in this model packed documents see each other, whichever way it is told where they begin ({tried}). Write "
        "data.packing = false for conversations, one to a row, or data.isolate = false for text that may be read as one"
    )


def prove_loss_mask(
    run_model: RunModel,
    run_loss: Callable[[dict[str, Any]], float],
    batch: Mapping[str, Any],
    *,
    tolerance: float = 1e-3,
) -> float:
    """Check that a model's own loss is the mean over the trained tokens of a batch; that mean.

    ``run_loss(batch) -> loss`` gets the same batch as ``run_model``, which is given it without ``labels``. The error
    names the usual mistakes: labels that the model shifts once more, and tokens that should not have been trained.
    """
    labels = np.asarray(batch["labels"])
    trained = labels != IGNORED
    if not trained.any():
        raise ValueError("prove_loss_mask: no token of this batch is trained; give a batch that has some")
    logits = np.asarray(run_model({name: array for name, array in batch.items() if name != "labels"}), np.float64)
    shifted = np.full_like(labels, IGNORED)
    shifted[:, :-1] = labels[:, 1:]
    following = np.full_like(labels, IGNORED)
    following[:, :-1] = np.asarray(batch["input_ids"])[:, 1:]
    wanted = _mean_loss(logits, labels)
    got = float(run_loss(dict(batch)))
    if abs(got - wanted) <= tolerance * max(1.0, abs(wanted)):
        return wanted
    mistakes = {
        "the labels are shifted already, and the model shifts them once more; give them as shift_labels too": shifted,
        "it is over all tokens instead of the trained ones": following,
    }
    hint = next(
        (hint for hint, wrong in mistakes.items() if abs(got - _mean_loss(logits, wrong)) <= tolerance * abs(got)),
        "it is neither that over all tokens nor that of labels shifted once more",
    )
    raise ValueError(
        f"the model's loss is {got:.6g}, but the mean over the {int(trained.sum())} trained tokens is {wanted:.6g}: "
        f"{hint}"
    )


def _mean_loss(logits: np.ndarray, labels: np.ndarray) -> float:
    rows, tokens = np.nonzero(labels != IGNORED)
    if not len(rows):
        return float("nan")
    chosen = logits[rows, tokens]
    top = chosen.max(-1, keepdims=True)
    log_sums = top[:, 0] + np.log(np.exp(chosen - top).sum(-1))
    return float((log_sums - chosen[np.arange(len(rows)), labels[rows, tokens]]).mean())
