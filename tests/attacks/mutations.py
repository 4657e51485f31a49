"""Damaged and hostile variants of bytes and of plain data, the same for the same seed; and the loop that tries them."""

from __future__ import annotations

import copy
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.attacks.confined import forget_peak, peak

_NUMBERS = (0, 1, 2, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**80, 1.5, float("inf"), "", "a", "..", "../x", "a\nb", "\0", "/etc/passwd",
    "x" * 5000, [], {}, [[]], [0], [0] * 50, {"a": 1},
)  # fmt: skip
_SECONDS_EACH = 10.0


def damaged_bytes(samples: Sequence[bytes], num: int, seed: int = 0) -> Iterator[bytes]:
    """Samples with bits flipped, parts cut, repeated, mixed or overwritten by telling numbers."""
    draw = random.Random(seed)
    for _ in range(num):
        data = bytearray(draw.choice(samples))
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            _damage(data, draw, samples)
        yield bytes(data)


def _damage(data: bytearray, draw: random.Random, samples: Sequence[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    length = draw.choice((1, 2, 4, 8, 16, 64, 1000))
    kind = draw.randrange(7)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        del data[at : at + length]
    elif kind == 3:
        data[at:at] = data[at : at + length] * draw.choice((1, 1, 3, 100))
    elif kind == 4:
        width = draw.choice((1, 2, 4, 8))
        number = draw.choice(_NUMBERS) % (1 << 8 * width)
        data[at : at + width] = number.to_bytes(width, draw.choice(("little", "big")))
    elif kind == 5:
        other = draw.choice(samples)
        start = draw.randrange(len(other) + 1)
        data[at : at + length] = other[start : start + length]
    else:
        data[at : at + length] = draw.randbytes(length)


def damaged_data(samples: Sequence[Any], num: int, seed: int = 0) -> Iterator[Any]:
    """Plain data (as of JSON) with values replaced, removed, repeated or moved to where others were."""
    draw = random.Random(seed)
    for _ in range(num):
        data = copy.deepcopy(draw.choice(samples))
        for _ in range(draw.choice((1, 1, 2, 3))):
            data = _damage_value(data, draw)
        yield data


def _damage_value(data: Any, draw: random.Random) -> Any:
    places = list(_places(data))
    if not places:
        return draw.choice(_VALUES)
    container, key = draw.choice(places)
    kind = draw.randrange(5)
    if kind == 0:
        del container[key]
    elif kind == 1 and type(container[key]) is int:
        container[key] = draw.choice((container[key] + 1, container[key] - 1, -container[key], draw.choice(_NUMBERS)))
    elif kind == 2:
        other, other_key = draw.choice(places)
        container[key] = copy.deepcopy(other[other_key])
    elif kind == 3 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    elif kind == 3:
        container[draw.choice(("x", "", "..", "a\nb"))] = copy.deepcopy(container[key])
    else:
        container[key] = copy.deepcopy(draw.choice(_VALUES))
    return data


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in pairs:
        yield data, key
        yield from _places(value)


def try_all(
    inputs: Iterator[Any], read: Callable[[Any], Any], refusals: tuple[type[Exception], ...], folder: str, limit: int
) -> dict[str, int]:
    """Read every input: it may be taken or refused. Everything else, time and memory too, is an error of ours.

    ``folder`` is where the process works; what is in its parent folder besides must not change. ``limit``: bytes of
    memory that one input may take.
    """
    os.chdir(folder)
    around = Path(folder).parent
    before = _snapshot(around)
    counts = {"taken": 0, "refused": 0}
    for number, data in enumerate(inputs):
        signal.setitimer(signal.ITIMER_REAL, _SECONDS_EACH)  # Its signal ends the process, where nothing handles it.
        start, memory = time.monotonic(), forget_peak()
        try:
            read(data)
            counts["taken"] += 1
        except refusals:
            counts["refused"] += 1
        except BaseException as error:
            raise AssertionError(
                f"input {number} of the seed: {type(error).__name__}: {error}: {_shown(data)}"
            ) from error
        grown, took = peak() - memory, time.monotonic() - start
        assert grown <= limit, f"input {number} took {grown / 2**20:.0f} MiB: {_shown(data)}"
        assert took <= _SECONDS_EACH / 2, f"input {number} took {took:.1f} s: {_shown(data)}"
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert _snapshot(around) == before, "something was written outside of the folder"
    return counts


def _snapshot(around: Path) -> dict[str, int]:
    """Files beside the working folder, and their sizes."""
    inside = os.getcwd() + os.sep
    files = (path for path in around.rglob("*") if not f"{path}{os.sep}".startswith(inside))
    return {str(path): path.lstat().st_size for path in files}


def _shown(data: Any) -> str:
    text = data[:300].hex() if isinstance(data, bytes) else json.dumps(data, default=repr)[:600]
    return f"({len(data)} bytes) {text}" if isinstance(data, bytes) else text
