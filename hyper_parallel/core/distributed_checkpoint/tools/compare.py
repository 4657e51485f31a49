"""What differs between two checkpoints of any kind: names, shapes, dtypes, values. Few MiB are read at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.metadata import dtype_size
from hyper_parallel.core.distributed_checkpoint.tools.rewrite import split_box
from hyper_parallel.platform.shared.region import Region

_STEP = 16 << 20
_FLOATS = {"float64": "f8", "float32": "f4", "float16": "f2"}
_INTEGERS = {f"{sign}int{bits}": f"{sign[:1] or 'i'}{bits // 8}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


class Difference(NamedTuple):
    """One name that is not the same in both."""

    name: str
    what: str


def compare(one: Any, other: Any, progress: Callable[[int, int], None] | None = None) -> Iterator[Difference]:
    """Every difference between two sources (see ``tensor_source.py``), by name."""
    mine, theirs = one.known(), other.known()
    my_objects, their_objects = one.objects(), other.objects()
    total = sum(_num_bytes(*mine[name]) for name in mine if mine[name] == theirs.get(name))
    done = 0
    for name in sorted({*mine, *theirs, *my_objects, *their_objects}):
        here, there = name in mine or name in my_objects, name in theirs or name in their_objects
        if not (here and there):
            yield Difference(name, "only in the first" if here else "only in the second")
        elif (name in mine) != (name in theirs):
            kinds = ["a tensor" if name in names else "an object" for names in (mine, theirs)]
            yield Difference(name, f"{kinds[0]} in the first, {kinds[1]} in the second")
        elif name in my_objects:
            if what := _compare_objects(one, other, name):
                yield Difference(name, what)
        elif mine[name] != theirs[name]:
            yield Difference(name, f"{_described(*mine[name])} in the first, {_described(*theirs[name])} in the second")
        else:
            if what := _compare_values(one, other, name, *mine[name]):
                yield Difference(name, what)
            done += _num_bytes(*mine[name])
            if progress is not None:
                progress(done, total)


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype_size(dtype)


def _described(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}{list(shape)}"


def _compare_values(one: Any, other: Any, name: str, shape: tuple[int, ...], dtype: str) -> str:
    if 0 in shape:
        return ""
    num_different, largest = 0, 0.0
    for box in split_box(Region.whole(shape), dtype_size(dtype), _STEP):
        mine, theirs = one.view(name, *box), other.view(name, *box)
        different = mine != theirs
        count = int(np.count_nonzero(different))
        if count:
            num_different += count
            numbers = [_numbers(np.ascontiguousarray(bits[different]), dtype) for bits in (mine, theirs)]
            if numbers[0] is not None:
                with np.errstate(invalid="ignore", over="ignore"):
                    gaps = np.abs(numbers[0] - numbers[1])
                largest = max(largest, float(np.max(gaps, initial=0.0, where=~np.isnan(gaps))))
    if not num_different:
        return ""
    of_all = f"{num_different} of {int(np.prod(shape, dtype=np.int64))} elements differ"
    return f"{of_all}, by up to {largest:g}" if largest else of_all


def _numbers(bits: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any] | None:
    """The values as float64, None for dtypes that numpy cannot count with."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    name = _FLOATS.get(dtype) or _INTEGERS.get(dtype)
    return None if name is None else bits.view(name).astype(np.float64)


def _compare_objects(one: Any, other: Any, name: str) -> str:
    if hasattr(one, "object_bytes") and hasattr(other, "object_bytes"):
        lengths = [source.objects()[name][1] for source in (one, other)]
        if max(lengths) > _STEP and lengths[0] != lengths[1]:
            return f"the object has {lengths[0]} bytes in the first, {lengths[1]} bytes in the second"
        mine, theirs = one.object_bytes(name), other.object_bytes(name)
        if mine == theirs:
            return ""
        shown = [_shown(source, name, data) for source, data in ((one, mine), (other, theirs))]
        return f"the object is {shown[0]} in the first, {shown[1]} in the second"
    try:
        equal = one.object_value(name) == other.object_value(name)
    except ValueError as error:
        return f"the object cannot be compared: {error}"
    return "" if equal else "the object is another one"


def _shown(source: Any, name: str, data: bytes) -> str:
    if source.objects()[name][0] != "json":
        return f"a pickle of {len(data)} bytes"
    text = data.partition(b"\0")[0].decode(errors="replace")
    return text if len(text) <= 60 else f"{text[:60]}..."
