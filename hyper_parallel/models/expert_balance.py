"""How evenly experts are used, and the bias that evens it out; the same for every framework."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hyper_parallel.platform import get_platform

__all__ = ["expert_load", "load_imbalance", "mixtures_of", "update_expert_bias"]

_platform = get_platform()


def mixtures_of(model: Any) -> Iterator[tuple[str, Any]]:
    """The mixtures of experts in a model, or in what ``hp.parallelize`` returned, with their paths.

    Of a model in stages those of this rank: the others have lost their parameters.
    """
    for part in getattr(model, "parts", [model]):
        for path, module in _platform.get_cells_and_names(part):
            if getattr(module, "tokens_per_expert", None) is not None and _platform.parameters_dict(module):
                yield path, module


def expert_load(model: Any) -> dict[str, Any]:
    """The choices that fell on each expert since the last :func:`update_expert_bias`, (experts,) by path of mixture."""
    return {path: _platform.copied(module.tokens_per_expert) for path, module in mixtures_of(model)}


def load_imbalance(model: Any) -> float | None:
    """The most that an expert was chosen, over the mean of its mixture; the worst mixture's, None if there is none.

    1 is balance. All counts are read on the host at once.
    """
    counts = list(expert_load(model).values())
    if not counts:
        return None
    each = _platform.tensor_to_numpy(_platform.cat(counts, 0))
    begins = [sum(len(one) for one in counts[:number]) for number in range(len(counts))]
    loads = [each[begin : begin + len(one)] for begin, one in zip(begins, counts, strict=True)]
    return max(float(load.max() / load.mean()) if load.any() else 1.0 for load in loads)


def update_expert_bias(model: Any, lr: float | None = None) -> None:
    """Make experts that were chosen more than the mean less likely to be, and the others more; call it after each step.

    The bias of each expert moves by ``lr`` (the mixture's ``load_balance_coeff``), its mean stays, and counting begins
    anew. It is in the state of the model. ``model`` is a model, an :class:`MoE` or what ``hp.parallelize`` returned:
    then the counts are those of all ranks and micro-batches, and so is the bias. No communication.

    >>> import torch
    >>> from hyper_parallel.models import MoE
    >>> moe = MoE(4, 4, num_experts=4, top_k=1)
    >>> moe.tokens_per_expert += torch.tensor([9, 1, 1, 1])
    >>> update_expert_bias(moe, 0.5)
    >>> moe.expert_bias
    tensor([-0.7500,  0.2500,  0.2500,  0.2500])
    """
    with _platform.no_grad():
        for _, module in mixtures_of(model):
            counts, bias = module.tokens_per_expert, module.expert_bias
            if bias is not None:
                rate = module.config.load_balance_coeff if lr is None else lr
                # Whole numbers: all ranks and frameworks find the same sign.
                step = _platform.tensor_type_cast((counts.sum() - counts * len(counts)).sign(), bias.dtype) * rate
                _platform.load_into_param(bias, bias + step - step.mean())
            _platform.load_into_param(counts, counts * 0)
