"""Which random words belong to which elements: `GlobalRegion` names a box of a tensor, `words_of_region` gives the
random words of its elements, in the box's row-major order and in pieces that fit a cache."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.philox import PhiloxBlocks
from hyper_parallel.core.dtensor.random.sample_rows import SAMPLE_STRIDE, SampleRows

# Note [From elements to words]
# A block of Philox is two 64-bit numbers, so a draw is one endless row of 64-bit numbers: number m is number m % 2 of
# block m // 2. A distribution that needs 64 bits gives number i to the element with global index i. One that needs 32
# bits reads the same row as 32-bit numbers, the low half of each 64-bit number first, and gives 32-bit number i to
# element i. Neighbours share blocks, so no bit of a contiguous run is thrown away.
#
# Note [Indices of samples]
# In a draw by sample the index of an element is (number of its sample in the global batch) * 2**40 + its row-major
# index within the sample. So it depends on neither the size of the batch nor which other samples are there, and for an
# element of a token not on how many tokens follow, either.

_MAX_ELEMENTS = 2**63


class GlobalRegion:
    """A box of a global tensor: the elements `offsets[d] <= index[d] < offsets[d] + sizes[d]`.

    `GlobalRegion(shape)` is the whole tensor.
    """

    __slots__ = ("global_shape", "offsets", "sizes")

    def __init__(
        self,
        global_shape: Sequence[int],
        offsets: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.global_shape = tuple(map(operator.index, global_shape))
        self.offsets = (0,) * len(self.global_shape) if offsets is None else tuple(map(operator.index, offsets))
        if sizes is None:
            if offsets is not None:
                raise ValueError(f"{self._described(sizes)}: give sizes together with offsets")
            sizes = self.global_shape
        self.sizes = tuple(map(operator.index, sizes))
        if not len(self.global_shape) == len(self.offsets) == len(self.sizes):
            raise ValueError(f"{self!r}: the three must have one entry per dim of the global tensor")
        boxes = zip(self.global_shape, self.offsets, self.sizes, strict=True)
        for dim, (size, start, length) in enumerate(boxes):
            if size < 0 or start < 0 or length < 0 or start + length > size:
                raise ValueError(f"{self!r}: [{start}, {start + length}) is not inside [0, {size}) in dim {dim}")
        if math.prod(self.global_shape) > _MAX_ELEMENTS:
            raise ValueError(f"{self!r}: a random tensor has at most 2**63 elements")

    @property
    def num_elements(self) -> int:
        """Elements in the region."""
        return math.prod(self.sizes)

    def __repr__(self) -> str:
        return self._described(self.sizes)

    def _described(self, sizes: Any) -> str:
        return f"GlobalRegion(global_shape={self.global_shape}, offsets={self.offsets}, sizes={sizes})"

    def spans(self, max_elements: int, rows: SampleRows | None = None) -> Iterator[tuple[np.ndarray, int]]:
        """The region in row-major order as pieces (starts, length): a run of `length` consecutive global indices from
        each of `starts` (uint64, ascending without `rows`), at most `max_elements` elements together. No piece is
        empty. See Note [Indices of samples] for `rows`."""
        if not self.num_elements:
            return
        shape, dim_of_samples = self.global_shape, None
        places: dict[int, np.ndarray] = {}
        per_sample = None if rows is None else rows.rows_per_sample(shape)
        if rows is not None and per_sample is not None:
            dim_of_samples, places = rows.dim, rows.places_of_tokens(shape)
            shape = (*shape[: rows.dim], per_sample, *shape[rows.dim + 1 :])
            if math.prod(shape) > SAMPLE_STRIDE:
                raise ValueError(f"{self!r}: a random tensor has at most 2**40 elements per sample")
        outer, run_length = self._runs(0 if dim_of_samples is None else dim_of_samples + 1, places)
        strides = _row_major_strides(shape)
        num_runs = math.prod(map(len, outer))
        runs_per_piece = max(1, max_elements // run_length)
        for run in range(0, num_runs, runs_per_piece):
            run_numbers = np.arange(run, min(run + runs_per_piece, num_runs))
            starts = np.zeros(len(run_numbers), dtype=np.uint64)
            if outer:
                for dim, numbers in enumerate(np.unravel_index(run_numbers, tuple(map(len, outer)))):
                    indices = outer[dim][numbers]
                    if rows is not None and dim == dim_of_samples:
                        samples, indices = np.divmod(indices, np.uint64(shape[dim]))
                        starts += (samples + np.uint64(rows.first)) * np.uint64(SAMPLE_STRIDE)
                    starts += indices * np.uint64(strides[dim])
            for begin in range(0, run_length, max_elements):
                yield starts + np.uint64(begin), min(max_elements, run_length - begin)

    def _runs(self, least_outer: int, places: dict[int, np.ndarray]) -> tuple[list[np.ndarray], int]:
        """The indices, in each of the leading dims, at which runs of consecutive elements begin, and a run's length; at
        least so many dims. The entries of a dim in ``places`` lie there, and not one behind the other."""

        def indices(dim: int, step: int = 1) -> np.ndarray:
            start, size = self.offsets[dim], self.sizes[dim]
            if dim in places:
                return places[dim][start : start + size : step].astype(np.uint64)
            return np.arange(0, size, step).astype(np.uint64) + np.uint64(start)

        dim, length, begins = len(self.global_shape), 1, []
        while dim > least_outer:
            dim -= 1
            stretch = _common_stretch(indices(dim)) if dim in places else self.sizes[dim]
            length, begins = length * stretch, [indices(dim, stretch)]
            if stretch != self.global_shape[dim]:
                break
        return [*map(indices, range(dim)), *begins], length


def _common_stretch(indices: np.ndarray) -> int:
    """The largest length of which all stretches of consecutive indices are multiples."""
    ends = np.flatnonzero(np.diff(indices) != 1) + 1
    return math.gcd(len(indices), *ends.tolist())


def words_of_region(draw: Draw, region: GlobalRegion, bits: int, max_elements: int) -> Iterator[np.ndarray]:
    """One random word of `bits` bits (32 or 64, unsigned) per element of `region`, in row-major order, as
    one-dimensional pieces of at most `max_elements`. A piece is writable, and valid until the next is asked for."""
    words_per_block = 128 // bits
    word_type = f"<u{bits // 8}"
    # A run of n words touches n / words_per_block blocks and up to two more that it shares with its neighbours, so for
    # very short runs a piece is limited by its blocks.
    capacity = max_elements // words_per_block + 2
    generator: PhiloxBlocks | None = None
    is_ordered = draw.rows is None or (draw.rows.dim == 0 and draw.rows.tokens is None)
    for starts, length in region.spans(max_elements, draw.rows):
        blocks_per_run = (length + words_per_block - 2) // words_per_block + 1
        runs_per_call = max(1, capacity // blocks_per_run)
        generator = generator or PhiloxBlocks(draw.seed, draw.number, min(capacity, blocks_per_run * len(starts)))
        for run in range(0, len(starts), runs_per_call):
            part = starts[run : run + runs_per_call]
            yield _words_of_runs(generator, part, length, words_per_block, word_type, is_ordered)


def _words_of_runs(
    generator: PhiloxBlocks, starts: np.ndarray, length: int, words_per_block: int, word_type: str, is_ordered: bool
) -> np.ndarray:
    phases = starts % np.uint64(words_per_block)
    first_phase = int(phases[0])
    same_phase = bool((phases == phases[0]).all())
    words_per_run = length + (first_phase if same_phase else words_per_block - 1)
    blocks_per_run = -(-words_per_run // words_per_block)
    first_blocks = starts // np.uint64(words_per_block)
    blocks = (first_blocks[:, None] + np.arange(blocks_per_run, dtype=np.uint64)).reshape(-1)
    numbers = generator.numbers(blocks, is_ordered)
    words = numbers.astype("<u8", copy=False).view(word_type).reshape(len(starts), -1)
    if same_phase:
        return words[:, first_phase : first_phase + length].reshape(-1)
    aligned = np.empty((len(starts), length), dtype=word_type)
    for phase in range(words_per_block):
        runs = np.flatnonzero(phases == phase)
        aligned[runs] = words[runs, phase : phase + length]
    return aligned.reshape(-1)


def _row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
