"""Random values of a region: the bits follow from the definition and do not depend on how a tensor is cut, ranges hold
in every dtype, and the distributions are the right ones."""

import ast
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.dtensor.random import normal_quantile, philox, random_state, random_stream, random_values
from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.normal_quantile import normal_cdf
from hyper_parallel.core.dtensor.random.philox import philox4x32
from hyper_parallel.core.dtensor.random.random_stream import GlobalRegion, words_of_region
from hyper_parallel.core.dtensor.random.random_values import (
    bernoulli,
    normal,
    randint,
    random_bits,
    trunc_normal,
    uniform,
)
from tests.frameworks import torch

only_on = "torch"  # once is enough: no framework takes part

FLOATS = ("float64", "float32", "float16", "bfloat16")
KINDS = {
    "bits 32": lambda draw, region: random_bits(draw, region),
    "bits 64": lambda draw, region: random_bits(draw, region, bits=64),
    "bernoulli": lambda draw, region: bernoulli(draw, region, 0.3),
    "randint": lambda draw, region: randint(draw, region, -7, 100, dtype="int32"),
    **{f"uniform {name}": lambda draw, region, name=name: uniform(draw, region, -0.3, 2.0, name) for name in FLOATS},
    **{f"normal {name}": lambda draw, region, name=name: normal(draw, region, 0.5, 2.0, name) for name in FLOATS},
    **{f"trunc {name}": lambda draw, region, name=name: trunc_normal(draw, region, dtype=name) for name in FLOATS},
}
DRAW = Draw(seed=2024, number=3)


def word_of_element(draw: Draw, index: int, bits: int) -> int:
    """The definition, in Python integers."""
    words_per_block = 128 // bits
    block, position = divmod(index, words_per_block)
    mask = 2**32 - 1
    counter = (block & mask, block >> 32, draw.number & mask, draw.number >> 32)
    word0, word1, word2, word3 = philox4x32(counter, (draw.seed & mask, draw.seed >> 32))
    numbers = [word0 << 32 | word1, word2 << 32 | word3]
    if bits == 64:
        return numbers[position]
    return numbers[position // 2] >> (32 * (position % 2)) & mask


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def regions_of_cuts(shape: tuple[int, ...], cuts: list[list[int]]) -> list[GlobalRegion]:
    edges = [[0, *sorted(min(cut, size) for cut in dim_cuts), size] for size, dim_cuts in zip(shape, cuts, strict=True)]
    boxes = itertools.product(*(itertools.pairwise(dim_edges) for dim_edges in edges))
    return [GlobalRegion(shape, [start for start, _ in box], [stop - start for start, stop in box]) for box in boxes]


def inside(region: GlobalRegion) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(region.offsets, region.sizes, strict=True))


def assembled(kind: str, draw: Draw, shape: tuple[int, ...], regions: list[GlobalRegion]) -> np.ndarray:
    result = np.empty_like(KINDS[kind](draw, GlobalRegion(shape)))
    for region in regions:
        result[inside(region)] = KINDS[kind](draw, region)
    return result


@st.composite
def cut_tensors(draw):
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 11, 13]), max_size=3).map(tuple))
    cuts = [draw(st.lists(st.integers(0, size), max_size=3)) for size in shape]
    return shape, cuts


@settings(max_examples=120, deadline=None)
@given(cut_tensors(), st.sampled_from(sorted(KINDS)), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_any_cut_assembles_to_the_bits_of_the_whole(cut_tensor, kind, seed, number):
    shape, cuts = cut_tensor
    draw = Draw(seed, number)
    whole = KINDS[kind](draw, GlobalRegion(shape))
    assert same_bits(assembled(kind, draw, shape, regions_of_cuts(shape, cuts)), whole)


@settings(max_examples=120, deadline=None)
@given(cut_tensors(), st.sampled_from([32, 64]), st.sampled_from([1, 2, 3, 5, 16, 100, 10_000]))
def test_words_are_those_of_the_definition_in_pieces_of_any_size(cut_tensor, bits, max_elements):
    shape, cuts = cut_tensor
    indices = np.arange(math.prod(shape)).reshape(shape)
    for region in regions_of_cuts(shape, cuts):
        pieces = [piece.copy() for piece in words_of_region(DRAW, region, bits, max_elements)]
        assert all(0 < len(piece) <= max_elements for piece in pieces)
        expected = [word_of_element(DRAW, int(index), bits) for index in indices[inside(region)].reshape(-1)]
        assert [word for piece in pieces for word in piece.tolist()] == expected


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_single_elements_are_those_of_the_whole(kind):
    shape = (3, 7, 5)
    whole = KINDS[kind](DRAW, GlobalRegion(shape))
    for index in itertools.product(*map(range, shape)):
        assert same_bits(KINDS[kind](DRAW, GlobalRegion(shape, index, (1, 1, 1))), whole[index].reshape(1, 1, 1))


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((150_001,), [[1, 50_000, 50_001, 120_007]]),
        ((301, 503), [[100, 101], [126, 252, 378]]),
        ((50_003, 3), [[], [1]]),
    ],
    ids=["one dim", "columns", "short rows"],
)
def test_large_tensors_in_many_pieces(kind, shape, cuts):
    whole = KINDS[kind](DRAW, GlobalRegion(shape))
    assert same_bits(assembled(kind, DRAW, shape, regions_of_cuts(shape, cuts)), whole)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize(
    ("shape", "offsets", "local_shape"),
    [
        ((2**63,), (2**63 - 9,), (9,)),
        ((2**40, 1000), (2**40 - 3, 17), (3, 5)),
        ((2**34 + 50,), (2**34 - 21,), (42,)),  # 32-bit words: the block number crosses 2**32
        ((2**20, 2**20), (2**13 - 2, 2**20 - 3), (5, 3)),  # so do these rows, for both widths
    ],
)
def test_far_regions_of_huge_tensors(bits, shape, offsets, local_shape):
    values = random_bits(DRAW, GlobalRegion(shape, offsets, local_shape), bits)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for local_index in itertools.product(*map(range, local_shape)):
        index = sum((i + start) * stride for i, start, stride in zip(local_index, offsets, strides, strict=True))
        assert int(values[local_index]) == word_of_element(DRAW, index, bits)


def test_scalars_and_empty_tensors():
    assert normal(DRAW, GlobalRegion(())).shape == ()
    assert float(normal(DRAW, GlobalRegion(()))) == float(normal(DRAW, GlobalRegion((5,)))[0])
    for shape in [(0,), (3, 0), (0, 4)]:
        assert normal(DRAW, GlobalRegion(shape)).shape == shape
    assert uniform(DRAW, GlobalRegion((4, 4), (4, 0), (0, 4))).shape == (0, 4)


def test_shape_matters_only_through_the_row_major_index():
    assert same_bits(normal(DRAW, GlobalRegion((6, 4))).reshape(-1), normal(DRAW, GlobalRegion((24,))))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_other_seeds_and_draws_give_other_values(kind):
    region = GlobalRegion((500,))
    draws = [Draw(1, 0), Draw(2, 0), Draw(1, 1), Draw(1 + 2**32, 0), Draw(1, 2**32), Draw(0, 1)]
    results = {KINDS[kind](draw, region).tobytes() for draw in draws}
    assert len(results) == len(draws)


# Values follow from the words by formulas that a reader can check.


def test_uniform_is_the_top_bits():
    region = GlobalRegion((1000,))
    assert np.array_equal(uniform(DRAW, region), (random_bits(DRAW, region) >> np.uint32(8)) / 2**24)
    numbers = random_bits(DRAW, region, 64)
    assert np.array_equal(uniform(DRAW, region, dtype="float64"), (numbers >> np.uint64(11)) / 2**53)


def test_bernoulli_compares_the_word():
    words = random_bits(DRAW, GlobalRegion((1000,)))
    assert np.array_equal(bernoulli(DRAW, GlobalRegion((1000,)), 0.25), words < 2**30)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-5, 5), (0, 2**32), (-3, 2**40 + 1), (-(2**63), 2**63)])
def test_randint_multiplies_and_takes_the_high_half(low, high):
    numbers = random_bits(DRAW, GlobalRegion((500,)), 64).tolist()
    assert randint(DRAW, GlobalRegion((500,)), low, high).tolist() == [low + (n * (high - low) >> 64) for n in numbers]


def test_randint_unsigned_and_narrow():
    region = GlobalRegion((500,))
    assert randint(DRAW, region, 0, 2**64, "uint64").tolist() == random_bits(DRAW, region, 64).tolist()
    assert randint(DRAW, region, 2**63, 2**63 + 9, "uint64").min() >= 2**63
    assert np.array_equal(randint(DRAW, region, -128, 128, "int8"), randint(DRAW, region, -128, 128))


def test_lower_precisions_are_the_rounded_float32():
    region = GlobalRegion((20_000,))
    for make in (normal, trunc_normal):
        single = torch.from_numpy(make(DRAW, region))
        assert torch.equal(torch.from_numpy(make(DRAW, region, dtype="float16")), single.half())
        assert torch.equal(torch.from_numpy(make(DRAW, region, dtype="bfloat16")).bfloat16(), single.bfloat16())


@pytest.mark.parametrize("kind", [f"{kind} bfloat16" for kind in ("uniform", "normal", "trunc")])
def test_bfloat16_results_convert_without_loss(kind):
    values = torch.from_numpy(KINDS[kind](DRAW, GlobalRegion((5000,))))
    assert values.dtype == torch.float32
    assert torch.equal(values.bfloat16().float(), values)


def test_dtypes_may_be_numpy_types():
    assert normal(DRAW, GlobalRegion((3,)), dtype=np.float64).dtype == np.float64
    assert normal(DRAW, GlobalRegion((3,)), dtype=np.dtype("float16")).dtype == np.float16


# Ranges


def extreme_words(monkeypatch, words):
    """Let every region of len(words) elements have these words."""
    monkeypatch.setattr(
        random_values,
        "words_of_region",
        lambda draw, region, bits, max_elements: iter([np.array(words, dtype=f"uint{bits}")]),
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 0), (-0.1, 0.1), (1, 1.1), (100, 101), (-3, 1e4), (0, 1e-3)])
def test_uniform_stays_below_high_with_the_largest_word(monkeypatch, dtype, low, high):
    top = 2**64 - 1 if dtype == "float64" else 2**32 - 1
    extreme_words(monkeypatch, [0, top, top // 2])
    values = uniform(DRAW, GlobalRegion((3,)), low, high, dtype).astype(np.float64)
    assert low <= values[0] < values[2] <= values[1] < high
    assert values[0] == pytest.approx(low, abs=0.01 * max(abs(low), high - low))
    assert values[1] == pytest.approx(high, abs=0.01 * max(abs(high), high - low))


def test_uniform_uses_all_values_near_its_ends(monkeypatch):
    extreme_words(monkeypatch, [0, 2**32 - 1])
    assert uniform(DRAW, GlobalRegion((2,)), dtype="float16").tolist() == [0, 1 - 2**-11]
    assert uniform(DRAW, GlobalRegion((2,)), dtype="bfloat16").tolist() == [0, 1 - 2**-8]
    assert uniform(DRAW, GlobalRegion((2,)), -2, 65504, dtype="float16").tolist() == [-2, 65472]
    assert uniform(DRAW, GlobalRegion((2,)), -1, 0, dtype="float16").tolist() == [-1, -(2**-24)]
    assert uniform(DRAW, GlobalRegion((2,)), -1, 0, dtype="float32").tolist() == [-1, -(2**-24)]


def test_uniform_of_one_value():
    assert uniform(DRAW, GlobalRegion((2,)), 0.1, 0.1).tolist() == [np.float32(0.1)] * 2
    assert uniform(DRAW, GlobalRegion((2,)), 0.1, 0.1, "bfloat16").tolist() == [torch.tensor(0.1).bfloat16().item()] * 2


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_is_finite_and_symmetric_with_extreme_words(monkeypatch, dtype):
    bits = 64 if dtype == "float64" else 32
    half = 2 ** (bits - 1)
    words = [0, half - 1, half, 2 * half - 1, 12345, 2 * half - 1 - 12345]
    if bits == 64:
        words[5] = half + 12345
    extreme_words(monkeypatch, words)
    values = normal(DRAW, GlobalRegion((6,)), dtype=dtype).astype(np.float64)
    assert np.isfinite(values).all()
    assert values[4] == -values[5]
    assert np.abs(values).max() == pytest.approx(9.1 if bits == 64 else 6.34, abs=0.1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("mean", "std", "a", "b"),
    [
        (0, 1, -2, 2),
        (0, 0.02, -0.04, 0.1),
        (1, 1, 3.3, 4.7),
        (0, 1, 5, math.inf),
        (0, 1, -math.inf, -20.1),
        (2, 3, -math.inf, math.inf),
        (0, 1, -40, 40),
        (0, 1, 30, 31),
    ],
)
def test_trunc_normal_stays_inside_with_extreme_words(monkeypatch, dtype, mean, std, a, b):
    top = 2**64 - 1 if dtype == "float64" else 2**32 - 1
    plain = trunc_normal(DRAW, GlobalRegion((1000,)), mean, std, a, b, dtype).astype(np.float64)
    extreme_words(monkeypatch, [0, top])
    ends = trunc_normal(DRAW, GlobalRegion((2,)), mean, std, a, b, dtype).astype(np.float64)
    for values in (plain, ends):
        assert np.isfinite(values).all()
        assert (values >= a).all()
        assert (values <= b).all()
    assert len(np.unique(plain)) > 2
    assert plain.min() >= ends.min()
    assert plain.max() <= ends.max()


def test_bernoulli_of_0_and_1_is_exact(monkeypatch):
    extreme_words(monkeypatch, [0, 2**32 - 1])
    assert bernoulli(DRAW, GlobalRegion((2,)), 0).tolist() == [False, False]
    assert bernoulli(DRAW, GlobalRegion((2,)), 1).tolist() == [True, True]
    assert bernoulli(DRAW, GlobalRegion((2,)), 0.5).tolist() == [True, False]


def test_normal_beyond_the_largest_value_is_infinite_like_any_rounding():
    values = normal(DRAW, GlobalRegion((100,)), std=1e6, dtype="float16")
    assert set(np.abs(values[~np.isfinite(values)]).tolist()) == {math.inf}
    assert np.isfinite(normal(DRAW, GlobalRegion((100,)), std=0.0, mean=3.0)).all()


# Distributions. The seeds are fixed, so these cannot fail by chance; the limits are those of a 1e-4 test.

NUM_SAMPLES = 200_000


def kolmogorov_smirnov(values: np.ndarray, cdf) -> float:
    """sqrt(n) times the largest distance between the empirical and the exact distribution function."""
    sorted_values = np.sort(values.astype(np.float64))
    exact = np.array([cdf(x) for x in sorted_values.tolist()])
    steps = np.arange(len(values) + 1) / len(values)
    return math.sqrt(len(values)) * max(np.max(steps[1:] - exact), np.max(exact - steps[:-1]))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("seed", [0, 77])
def test_distribution_functions(dtype, seed):
    draw, region = Draw(seed, 0), GlobalRegion((NUM_SAMPLES,))
    below, between = normal_cdf(-1.5), normal_cdf(0.5) - normal_cdf(-1.5)
    limit = 2.23  # exceeded with probability 1e-4
    assert kolmogorov_smirnov(uniform(draw, region, -2, 3, dtype), lambda x: (x + 2) / 5) < limit
    assert kolmogorov_smirnov(normal(draw, region, 1, 2, dtype), lambda x: normal_cdf((x - 1) / 2)) < limit
    truncated = trunc_normal(draw, region, 1, 2, -2, 2, dtype)
    assert kolmogorov_smirnov(truncated, lambda x: (normal_cdf((x - 1) / 2) - below) / between) < limit
    mirrored = trunc_normal(draw, region, -1, 2, -2, 2, dtype)
    assert kolmogorov_smirnov(-mirrored, lambda x: (normal_cdf((x - 1) / 2) - below) / between) < limit


@pytest.mark.parametrize("dtype", FLOATS)
def test_moments(dtype):
    region = GlobalRegion((NUM_SAMPLES,))
    z = normal(DRAW, region, dtype=dtype).astype(np.float64)
    error = 4 / math.sqrt(NUM_SAMPLES)
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)]:
        rounding = 0.002 * moment if dtype == "bfloat16" else 0
        assert abs((z**power).mean() - moment) < error * math.sqrt(variance) + rounding
    u = uniform(DRAW, region, dtype=dtype).astype(np.float64)
    for power in (1, 2, 3):
        variance = 1 / (2 * power + 1) - 1 / (power + 1) ** 2
        rounding = 0.001 if dtype == "bfloat16" else 0
        assert abs((u**power).mean() - 1 / (power + 1)) < error * math.sqrt(variance) + rounding


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.5, 0.9])
def test_bernoulli_frequency(p):
    assert abs(bernoulli(DRAW, GlobalRegion((NUM_SAMPLES,)), p).mean() - p) < 4 * math.sqrt(p * (1 - p) / NUM_SAMPLES)


def test_randint_frequencies():
    counts = np.bincount(randint(DRAW, GlobalRegion((NUM_SAMPLES,)), 0, 50), minlength=50)
    chi_square = ((counts - NUM_SAMPLES / 50) ** 2 / (NUM_SAMPLES / 50)).sum()
    assert abs(chi_square - 49) < 4 * math.sqrt(2 * 49)


@pytest.mark.parametrize("bits", [32, 64])
def test_every_bit_is_set_half_of_the_time_and_independent_of_its_neighbour(bits):
    words = random_bits(DRAW, GlobalRegion((100_000,)), bits)
    limit = 5 * 0.5 / math.sqrt(len(words))
    for bit in range(bits):
        ones = (words >> words.dtype.type(bit)) & words.dtype.type(1)
        assert abs(ones.mean() - 0.5) < limit
        assert abs((ones[1:] ^ ones[:-1]).mean() - 0.5) < limit


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1]) * math.sqrt(a.size)


@pytest.mark.parametrize("make", [uniform, normal], ids=["uniform", "normal"])
def test_draws_seeds_and_neighbours_are_uncorrelated(make):
    region = GlobalRegion((NUM_SAMPLES,))
    base = make(Draw(10, 10), region)
    others = [make(draw, region) for draw in (Draw(10, 11), Draw(11, 10), Draw(11, 11), Draw(10 + 2**32, 10))]
    assert all(abs(correlation(base, other)) < 4.5 for other in others)
    assert all(abs(correlation(base[lag:], base[:-lag])) < 4.5 for lag in (1, 2, 3, 4, 8, 1024))
    rows = GlobalRegion((400, 500), (0, 0), (200, 500)), GlobalRegion((400, 500), (200, 0), (200, 500))
    assert abs(correlation(*(make(DRAW, region) for region in rows))) < 4.5


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 4), (0, 2), (4, 3)), r"\[2, 5\) is not inside \[0, 4\) in dim 1"),
        (((4,), (-1,), (1,)), r"\[-1, 0\) is not inside \[0, 4\) in dim 0"),
        (((4, 4), (0,), (4, 4)), "one entry per dim of the global tensor"),
        (((4, 4), (0, 0)), "give sizes together with offsets"),
        (((2**32, 2**32), (0, 0), (1, 1)), r"at most 2\*\*63 elements"),
    ],
)
def test_wrong_regions(arguments, message):
    with pytest.raises(ValueError, match=message):
        GlobalRegion(*arguments)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: random_bits(DRAW, r, 16), ValueError, "bits must be 32 or 64, got 16"),
        (lambda r: uniform(DRAW, r, 2, 1), ValueError, r"need low <= high.*got \[2.0, 1.0\)"),
        (lambda r: uniform(DRAW, r, 0, 1e5, "float16"), ValueError, "within float16"),
        (lambda r: uniform(DRAW, r, -3e38, 3e38), ValueError, "high - low within float32"),
        (lambda r: uniform(DRAW, r, 0, math.inf), ValueError, "high must be finite, got inf"),
        (lambda r: uniform(DRAW, r, "a", 1), TypeError, "low must be a number, got 'a'"),
        (lambda r: uniform(DRAW, r, 1.0001, 1.0002, "bfloat16"), ValueError, "no bfloat16 value lies in"),
        (
            lambda r: uniform(DRAW, r, dtype="int64"),
            ValueError,
            "dtype must be one of float64, .*bfloat16, got 'int64'",
        ),
        (lambda r: normal(DRAW, r, std=-1), ValueError, "std must not be negative, got -1.0"),
        (lambda r: normal(DRAW, r, mean=math.nan), ValueError, "mean must be finite, got nan"),
        (lambda r: trunc_normal(DRAW, r, a=2, b=-2), ValueError, "need std > 0 and a < b, got std=1.0, a=2.0, b=-2.0"),
        (lambda r: trunc_normal(DRAW, r, std=0), ValueError, "need std > 0 and a < b"),
        (lambda r: trunc_normal(DRAW, r, a=100, b=200), ValueError, "has no probability in float64"),
        (lambda r: trunc_normal(DRAW, r, a=0, b=1e-12), ValueError, "too narrow.*use uniform"),
        (lambda r: trunc_normal(DRAW, r, a=1.0001, b=1.0002, dtype="float16"), ValueError, "no float16 value lies in"),
        (lambda r: bernoulli(DRAW, r, 1.5), ValueError, r"p must be in \[0, 1\], got 1.5"),
        (lambda r: randint(DRAW, r, 3, 3), ValueError, r"need low < high.*got \[3, 3\)"),
        (lambda r: randint(DRAW, r, 0, 300, "uint8"), ValueError, "within uint8"),
        (lambda r: randint(DRAW, r, 0.5, 3), TypeError, "low must be an int, got 0.5"),
        (lambda r: randint(DRAW, r, 0, 3, "float32"), TypeError, "must be an integer dtype"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(GlobalRegion((3,)))


def test_the_generator_needs_numpy_and_nothing_else():
    for module in (philox, normal_quantile, random_state, random_stream, random_values):
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        own = ("hyper_parallel.core.dtensor.", "hyper_parallel.platform.checks.taps")  # the second needs nothing either
        roots = {name.partition(".")[0] for name in imported if not name.startswith(own)}
        assert roots <= {"numpy"} | sys.stdlib_module_names
