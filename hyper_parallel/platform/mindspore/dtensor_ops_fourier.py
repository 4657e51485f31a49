"""Fourier transforms of a signal with a real spectrum, by those of a real signal.

MindSpore's own are right at every second call only.
"""

from __future__ import annotations

from typing import Any

from mindspore import ops

from hyper_parallel.platform.mindspore.dtensor_neutral import neutral

_REVERSED = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


def _hermitian(dims: str) -> None:
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
        neutral(transform)


for _dims_name in ("", "2", "n"):
    _hermitian(_dims_name)
