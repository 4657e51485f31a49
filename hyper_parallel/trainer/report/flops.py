"""How many operations a token of training costs, and how many a device can do: what MFU is made of."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.parallel.parallel import Parallel

__all__ = ["flops_per_token", "peak_of_device"]

_CALIBRATION_SECONDS = 0.4
_CALIBRATION_SIZE = 768
# Dense products of 16-bit numbers, in operations per second, by what the device's name contains; longer names first.
_PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "V100": 125e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
    "910B": 376e12,
    "Ascend910": 256e12,
}


def flops_per_token(run: Parallel, length: int) -> float | None:
    """Operations of the whole model for one token of a causal sequence, forward and backward; None if unknown.

    6 for each parameter of a product (the embedding is none, unless the head uses it; of experts those that a token
    meets), 4 where it is frozen, and 12 x layers x heads x head_dim x length / 2 for attention. Recomputation is no
    useful work and does not count.
    """
    config = getattr(run.model, "config", None)
    config = getattr(config, "text_config", None) or config
    layers = _first(config, "num_hidden_layers", "num_blocks", "n_layer")
    heads = _first(config, "num_attention_heads", "num_heads", "n_head")
    if layers is None or heads is None:
        return None
    width = _first(config, "hidden_size", "dim", "n_embd")
    head_dim = _first(config, "head_dim") or (None if width is None else width // heads)
    if head_dim is None:
        return None
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    active = _first(config, "num_experts_per_tok", "top_k")
    share = active / experts if experts and active else 1.0
    return _flops_of_products(run, config, share) + 6.0 * layers * heads * head_dim * length


def _flops_of_products(run: Parallel, config: Any, share_of_experts: float) -> float:
    platform = get_platform()
    is_tied = bool(getattr(config, "tie_word_embeddings", False) or getattr(config, "tie_head", False))
    embeddings = {
        id(parameter)
        for part in run.parts
        for path, module in platform.get_cells_and_names(part)
        if _is_embedding(path, module) and not (is_tied and "position" not in path and not path.endswith("wpe"))
        for parameter in platform.own_parameters(module).values()
    }
    total = 0.0
    for name, parameter in run.named_parameters():
        if len(parameter.shape) < 2 or id(parameter) in embeddings:
            continue
        share = share_of_experts if ".experts." in name else 1.0
        total += (6.0 if platform.requires_grad(parameter) else 4.0) * share * float(np.prod(parameter.shape))
    return total


def _is_embedding(path: str, module: Any) -> bool:
    kinds = [kind.__name__ for kind in type(module).__mro__]
    return any(kind.endswith("Embedding") for kind in kinds) or path.rpartition(".")[2] in ("wte", "wpe")


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)


def peak_of_device(given: float | str, dtype: str) -> tuple[float | None, str]:
    """(operations per second of one rank's device, where the number is from); None if it is not known.

    On a CPU it is measured, so all ranks are to call it at the same time: they share the cores.
    """
    if not isinstance(given, str):
        return float(given), "log.peak_flops"
    name = device_name()
    if name == "cpu":
        return _measured(dtype), f"measured: products of {dtype} matrices on this CPU, all ranks at once"
    found = next((peak for part, peak in _PEAKS.items() if part.lower() in name.lower()), None)
    if found is None:
        return None, f"not known for {name}; set log.peak_flops"
    return found, f"known for {name}, 16-bit"


def device_name() -> str:
    """The name of this rank's device, as its maker calls it; "cpu" on a CPU."""
    platform = get_platform()
    kind = platform.get_device_type()
    if kind == "cpu":
        return "cpu"
    handle = getattr(platform, "get_device_handle", None)
    name = getattr(handle(), "get_device_name", None) if callable(handle) else None
    return str(name()) if callable(name) else str(kind)


def _measured(dtype: str) -> float:
    platform = get_platform()
    ones = np.ones((_CALIBRATION_SIZE, _CALIBRATION_SIZE), dtype=np.float32)
    matrix = platform.from_numpy(ones, platform.str_to_dtype(dtype), "cpu")
    platform.tensor_to_numpy((matrix @ matrix)[0, 0])  # The first one also loads and allocates.
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < _CALIBRATION_SECONDS:
        platform.tensor_to_numpy((matrix @ matrix)[0, 0])
        count += 1
    return 2.0 * _CALIBRATION_SIZE**3 * count / (time.perf_counter() - begin)
