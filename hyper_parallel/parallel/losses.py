"""What a model's loss is, and how much of the mean over the whole batch a part of it gives.

Three ways, in this order:

* ``loss=fn``: the model is called without labels, and ``fn(outputs, batch)`` gives a sum and a count. A function with
  ``fn.count(batch)`` says beforehand how many there are.
* a Hugging Face model, which computes its loss from ``labels``: its loss function gets the number of targets of the
  whole batch (``num_items_in_batch``), whichever of its numbers it divides by.
* any other model that returns its loss when it is given ``labels``: the mean over those that are not -100. What is no
  such mean is an error, as far as the framework's loss functions tell (:class:`LossMeans`).

Auxiliary losses (of routers) are means over the rows of a part: each part counts by its share of the rows, so they
count once, whatever the number of parts. A model tells them apart as ``auxiliary`` beside its ``loss``
(``models.MixtureLoss``), a Hugging Face model by its config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

from hyper_parallel.core.context_parallel.batch import current_order
from hyper_parallel.core.shard.dispatching.mixing import implicit_replication
from hyper_parallel.parallel.counts import IGNORED, Counts, LossMeans, num_targets, plain
from hyper_parallel.platform import get_platform

__all__ = [
    "GivenLoss",
    "LabelledLoss",
    "configs_of_caches",
    "inside_adapters",
    "is_hugging_face",
    "loss_for",
    "next_token_loss",
    "without_caches",
]

_platform = get_platform()

# Loss functions of transformers that divide a sum by num_items_in_batch; others average over what they are given.
_DIVIDES = ("ForCausalLMLoss", "ForMaskedLMLoss", "ForTokenClassification")
_AUXILIARY_FACTORS = ("router_aux_loss_coef", "aux_loss_coef")


def is_hugging_face(model: Any) -> bool:
    """Whether the model is one of transformers'."""
    return hasattr(model, "base_model_prefix") and hasattr(model, "config") and hasattr(model, "save_pretrained")


def inside_adapters(model: Any) -> Any:
    """The model of transformers where peft's adapters are around it, which give its attributes for their own."""
    modules = (module for _, module in _platform.get_cells_and_names(model))
    return next((module for module in modules if hasattr(type(module), "base_model_prefix")), model)


def configs_of_caches(parts: Iterable[Any]) -> list[Any]:
    """The configs that say whether models of transformers keep keys and values for tokens to come."""
    configs = [getattr(module, "config", None) for part in parts for _, module in _platform.get_cells_and_names(part)]
    return list({id(one): one for one in configs if hasattr(one, "use_cache")}.values())


@contextmanager
def without_caches(configs: Iterable[Any]) -> Iterator[None]:
    """Context: no cache is kept. Recomputed blocks would add to it once more, and where there is one transformers does
    not look for packed documents."""
    caching = [config for config in configs if config.use_cache]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def loss_for(model: Any, loss: Callable[..., Any] | None, *, in_parts: bool = True) -> GivenLoss | LabelledLoss:
    """How the loss of ``model`` is found; ``in_parts`` says whether a batch is cut, over ranks or micro-batches."""
    if loss is not None:
        if not callable(loss):
            raise TypeError(f"parallelize: loss is a function of (outputs, batch) to (sum, count), got {loss!r}")
        home = getattr(loss, "__module__", None) or ""
        if home.split(".")[0] in ("torch", "mindspore"):
            raise TypeError(
                f"parallelize: loss is a function of (outputs, batch) to (sum, count), and {_name(loss)} of {home} "
                "takes outputs and labels; write loss=lambda outputs, batch: (its sum, how many it is of)"
            )
        return GivenLoss(loss)
    is_ours = type(model).__module__.startswith("hyper_parallel.")
    means = LossMeans(type(model).__name__, in_parts and not is_ours)
    return HuggingFaceLoss(model, means) if is_hugging_face(model) else LabelledLoss(means)


class GivenLoss:
    """A loss that a function computes from the model's outputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.count_of = getattr(function, "count", None)
        #: Whether the outputs at a token are compared with the label of the next one; None: not known.
        self.shifts_labels: bool | None = getattr(function, "shifts_labels", None)

    def counts(self, batch: Mapping[str, Any], rows: int, like: Any) -> Counts:
        known = Counts.of({}, rows, like)
        if self.count_of is not None and rows:
            known.targets = self.count_of(batch)
        return known

    @property
    def is_counted_before(self) -> bool:
        """Whether the number of targets is known before the model runs."""
        return self.count_of is not None

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What the model is given of a batch."""
        return {name: value for name, value in batch.items() if name not in ("labels", "shift_labels")}

    def sum_and_count(self, model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        with implicit_replication():
            outputs = model(**self.inputs(batch))
            found = self.function(outputs, batch)
            self._check(found)
            return plain(found[0]), plain(found[1])

    def _check(self, found: Any) -> None:
        if not isinstance(found, tuple) or len(found) != 2:
            what = type(found).__name__
        elif not _platform.is_tensor(found[0]) or tuple(found[0].shape) not in ((), (1,)):
            what = f"{_described(found[0])} as the sum, which is a tensor of one element"
        elif not isinstance(found[1], Real) and not (_platform.is_tensor(found[1]) and found[1].numel() == 1):
            what = f"{_described(found[1])} as the number"
        else:
            return
        raise TypeError(
            f"parallelize: the loss function {_name(self.function)} must give (sum of losses, their number), got {what}"
        )

    def share(self, model: Any, batch: Mapping[str, Any], part: Counts, total: Counts) -> Any:
        return self.sum_and_count(model, batch)[0] / total.targets

    @staticmethod
    def share_of_auxiliary(parts: Sequence[Counts], total: Counts, number: int, losses: Sequence[Any]) -> Any:
        """What auxiliary losses of blocks add to the loss: nothing, for the function knows the outputs alone."""
        return plain(losses[0]) * 0

    @staticmethod
    def checked(found: Sequence[Any]) -> Sequence[Any]:
        """What a step has given."""
        return found


class LabelledLoss:
    """A model that returns the mean over its labels that are not -100."""

    is_counted_before = True
    shifts_labels: bool | None = None

    def __init__(self, means: LossMeans) -> None:
        self.means = means
        self.checked = means.checked

    def counts(self, batch: Mapping[str, Any], rows: int, like: Any) -> Counts:
        if "labels" not in batch:
            raise ValueError(
                f"forward_backward: the batch has {', '.join(batch)} and no labels; give labels=, or tell parallelize "
                "how the loss is computed: loss=fn(outputs, batch) -> (sum, count), for instance hp.next_token_loss"
            )
        return Counts.of(batch, rows, like)

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What the model is given of a batch."""
        return dict(batch)

    def share(self, model: Any, batch: Mapping[str, Any], part: Counts, total: Counts) -> Any:
        with self.means.watch() as seen:
            outputs = model(**batch)
        loss, auxiliary = plain(_loss_in(model, outputs)), self._auxiliary(outputs)
        return _with_auxiliary(
            loss, auxiliary, part, total, lambda one: self.means.share(one, seen, part, total, batch)
        )

    @staticmethod
    def share_of_auxiliary(parts: Sequence[Counts], total: Counts, number: int, losses: Sequence[Any]) -> Any:
        """What auxiliary losses of blocks, which the model adds up, add to the loss, in the part with that number."""
        added = plain(losses[0])
        for loss in losses[1:]:
            added = added + plain(loss)
        return _share_by_rows(added, parts[number], total)

    def _auxiliary(self, outputs: Any) -> Any:
        """What the model has added to its loss beside the mean over its labels."""
        value = getattr(outputs, "auxiliary", None)
        return plain(value) if _platform.is_tensor(value) else None


class HuggingFaceLoss(LabelledLoss):
    """A model of transformers. Its loss function is replaced by one that says which number it was to divide by."""

    def __init__(self, model: Any, means: LossMeans) -> None:
        super().__init__(means)
        model = inside_adapters(model)
        self._model, self._name = model, type(model).__name__
        self._total: Counts | None = None
        self._divided = self._has_others = False
        self._shape: tuple[int, ...] = ()  # of the batch's labels
        self._has_shifted = False  # whether the batch has shift_labels
        original = getattr(model, "loss_function", None)
        if original is not None:
            model.loss_function = self._told(original)
            name = getattr(original, "__name__", "")
            self.shifts_labels = name == "ForCausalLMLoss" if name in _DIVIDES else None

    def _told(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def loss_function(*args: Any, **kwargs: Any) -> Any:
            name = getattr(original, "__name__", "")
            if self._total is not None and name in _DIVIDES and not self._are_of_batch(args, kwargs):
                self._has_others = True
            elif self._total is not None and name in _DIVIDES:
                is_shifted = name == "ForCausalLMLoss" and kwargs.get("shift_labels") is None
                if name == "ForCausalLMLoss" and current_order() is not None:  # shifted before they were permuted
                    kwargs["shift_labels"] = kwargs["labels"] if "labels" in kwargs else args[1]
                    is_shifted = not self._has_shifted
                kwargs["num_items_in_batch"] = self._total.shifted if is_shifted else self._total.targets
                self._divided = True
            return original(*args, **kwargs)

        return loss_function

    def _are_of_batch(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether a loss function is given labels of the batch, and not what a model has cut out of them (GIT)."""
        found = [kwargs.get("shift_labels"), kwargs["labels"] if "labels" in kwargs else args[1]]
        labels = next((one for one in found if one is not None), None)
        return labels is None or self._shape in (tuple(labels.shape), ()) or labels.ndim != len(self._shape)

    def share(self, model: Any, batch: Mapping[str, Any], part: Counts, total: Counts) -> Any:
        self._total, self._divided, self._has_others = total, False, False
        self._shape = tuple(batch["labels"].shape) if _platform.is_tensor(batch.get("labels")) else ()
        order, self._has_shifted = current_order(), batch.get("shift_labels") is not None
        try:
            with self.means.watch() as seen:
                outputs = model(**batch)
        finally:
            self._total = None
        loss, auxiliary = plain(_loss_in(model, outputs)), self._auxiliary(outputs)
        if order is not None and not self._divided:
            raise ValueError(
                f"{self._name} computes its loss by itself, in the order of tokens, and these lie in {order.name} "
                "order; write order='contiguous', or tell parallelize how it is computed, by loss="
            )
        if self._divided and not self._has_others:
            self.means.known()
            return _with_auxiliary(loss, auxiliary, part, total, lambda one: one)
        return _with_auxiliary(
            loss, auxiliary, part, total, lambda one: self.means.share(one, seen, part, total, batch)
        )

    def _auxiliary(self, outputs: Any) -> Any:
        """What the model has added to its loss for its routers."""
        value = outputs.get("aux_loss") if isinstance(outputs, Mapping) else None
        if value is None or not _platform.is_tensor(value):
            return None
        config = self._model.config
        for holder in (self._model, config, getattr(config, "text_config", None)):
            for name in _AUXILIARY_FACTORS:
                factor = getattr(holder, name, None)
                if factor is not None:
                    return plain(value) * factor
        raise ValueError(
            f"{type(self._model).__name__} returns aux_loss, and no config value says what it is multiplied by "
            f"({', '.join(_AUXILIARY_FACTORS)}); give parallelize loss=fn(outputs, batch) -> (sum, count)"
        )


class _NextTokenLoss:
    """``hp.next_token_loss``: cross entropy of each position's logits with the token behind it, for ``loss=``.

    ``next_token_loss(outputs, batch)`` gives (sum, count) of logits (samples, sequence, vocabulary), or of what has
    them as ``logits``, and ``batch["labels"]``, the tokens themselves with -100 where there is none to be learned; or
    ``batch["shift_labels"]``, the token behind each position.
    """

    shifts_labels = True

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        logits = getattr(outputs, "logits", outputs)
        targets = self._targets(batch)
        if logits.shape[:2] != targets.shape:
            logits = logits[:, : targets.shape[1]]
        total = _platform.cross_entropy_sum(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), IGNORED)
        return total, num_targets(targets)

    def count(self, batch: Mapping[str, Any]) -> Any:
        return num_targets(self._targets(batch))

    @staticmethod
    def _targets(batch: Mapping[str, Any]) -> Any:
        if batch.get("shift_labels") is not None:
            return batch["shift_labels"]
        if batch.get("labels") is None:
            raise ValueError(f"next_token_loss needs labels in the batch, which has {', '.join(batch)}")
        return batch["labels"][:, 1:]

    def __repr__(self) -> str:
        return "next_token_loss"


next_token_loss = _NextTokenLoss()


def _with_auxiliary(loss: Any, auxiliary: Any, part: Counts, total: Counts, share: Callable[[Any], Any]) -> Any:
    """The share of a part's loss, which has ``auxiliary`` in it: that by rows, the rest by ``share``."""
    if auxiliary is None:
        return share(loss)
    return share(loss - auxiliary) + _share_by_rows(auxiliary, part, total)


def _share_by_rows(auxiliary: Any, part: Counts, total: Counts) -> Any:
    return auxiliary * part.rows / total.rows


def _loss_in(model: Any, outputs: Any) -> Any:
    if _platform.is_tensor(outputs):
        found = outputs
    else:
        found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if found is None and isinstance(outputs, (list, tuple)) and outputs:
            found = outputs[0]
    if found is None or not _platform.is_tensor(found) or tuple(found.shape) not in ((), (1,)):
        what = f"a tensor of shape {tuple(found.shape)}" if _platform.is_tensor(found) else type(outputs).__name__
        raise ValueError(
            f"{type(model).__name__} was given labels and returned {what}, not its loss; tell parallelize how it is "
            "computed: loss=fn(outputs, batch) -> (sum, count), for instance hp.next_token_loss"
        )
    return found.reshape(())


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if _platform.is_tensor(value) else repr(value)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))
