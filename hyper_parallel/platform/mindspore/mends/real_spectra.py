"""Fourier transforms of a signal with a real spectrum, by those of a real signal.

MindSpore 2.10's own are conjugated at every second call::

    x = Tensor(np.array([1.0, 2.0, 4.0], np.float32))
    ops.ihfft(x), ops.ihfft(x)  # [2.33, -0.67 - 0.58j] and [2.33, -0.67 + 0.58j]

Plain tensors are mended too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import ops

__all__ = ["TRANSFORMS"]

_REVERSED = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


def _hermitian(dims: str) -> list[Callable[..., Any]]:
    """``hfft`` and ``ihfft`` along one dim, two or several, as ``dims`` says."""
    names = ("s" if dims else "n", "dim", "norm")
    irfft, rfft = getattr(ops, f"irfft{dims}"), getattr(ops, f"rfft{dims}")

    def reversed_norm(given: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
        settings = dict(zip(names, given, strict=False)) | more
        return settings | {"norm": _REVERSED[settings.get("norm")]}

    def hfft(input: Any, *given: Any, **more: Any) -> Any:
        return irfft(ops.conj(input) if input.is_complex() else input, **reversed_norm(given, more))

    def ihfft(input: Any, *given: Any, **more: Any) -> Any:
        return ops.conj(rfft(input, **reversed_norm(given, more)))

    for transform in (hfft, ihfft):
        transform.__name__ = f"fft_{transform.__name__}{dims}"
    return [hfft, ihfft]


TRANSFORMS = [transform for dims in ("", "2", "n") for transform in _hermitian(dims)]
