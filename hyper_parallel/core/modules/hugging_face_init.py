"""The initial values of Hugging Face's models: the distribution that the model's class defines.

Note [What Hugging Face's models are filled with]
Their constructors fill parameters as PyTorch's modules do and ``_init_weights`` overwrites that, for each module from
the inside out: normal values of ``config.initializer_range``, for instance, where ``nn.Embedding`` alone would be a
normal distribution of width 1. ``init_weights()`` skips modules that it has seen, and it has seen all of them when the
model was built without memory. So each model's ``_init_weights`` is called here, also of models inside of models.

Note [Tied weights]
A model with memory fills its head apart and ties it behind that: it has the embedding's values, with a row of zeros for
padding. Here they are one from the beginning, whose last values are those of the first module that has it: also on the
last stage of a pipeline, where that module is empty.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.modules.initial_values import draws_of_module, first_owner_of
from hyper_parallel.platform import get_platform


def has_own_distribution(module: Any) -> bool:
    """Whether ``module``, or a module inside, is a model of Hugging Face."""
    return any(_is_model(inner) for _, inner in get_platform().get_cells_and_names(module))


def hugging_face_init(module: Any) -> Any:
    """Fill the parameters of Hugging Face's models as their classes define; the module.

    :func:`materialize` does so by itself; as ``init=`` it says that nothing else is meant to fill them. Buffers, such
    as the frequencies of rotary embeddings, get their values again. Parameters that no ``_init_weights`` fills stay.

    >>> import hyper_parallel as hp, transformers
    >>> config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=1000, num_attention_heads=4)
    >>> with hp.deferred_init():
    ...     model = transformers.LlamaForCausalLM(config)
    >>> f"{hp.materialize(model, init=hp.hugging_face_init).lm_head.weight.std().item():.2f}"
    '0.02'
    """
    with get_platform().no_grad():
        _fill(module, None, set())
    return module


def _fill(module: Any, model: Any, seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    model = module if _is_model(module) else model
    for child in module.children():
        _fill(child, model, seen)
    if model is None:
        return
    with draws_of_module(module):
        model._init_weights(module)
    for parameter in get_platform().own_parameters(module).values():
        owner, name = first_owner_of(parameter) or (module, "")
        if owner is not module:
            _fill_as(model, owner, name, parameter)


def _fill_as(model: Any, owner: Any, name: str, parameter: Any) -> None:
    """Fill a tied parameter as that of its first module. See Note [Tied weights]."""
    held = getattr(owner, name)
    is_empty = held is not parameter
    if is_empty:
        delattr(owner, name)
        get_platform().install_parameter(owner, name, parameter)
    with draws_of_module(owner):
        model._init_weights(owner)
    if is_empty:
        delattr(owner, name)
        setattr(owner, name, held)


def _is_model(module: Any) -> bool:
    return any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__)
