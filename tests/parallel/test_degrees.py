"""Degrees: every spelling, what fits a world, and what to write where it does not."""

from __future__ import annotations

import pytest

from hyper_parallel.parallel.degrees import Degrees, as_degrees

only_on = "torch"  # imports no framework: once is enough


@pytest.mark.parametrize(
    ("degrees", "world_size", "sizes"),
    [
        (as_degrees(), 1, (1, 1, 1, 1, 1)),
        (as_degrees(), 6, (1, 1, 6, 1, 1)),
        (as_degrees("tp=2"), 8, (1, 1, 4, 1, 2)),
        (as_degrees(" dp_shard = 2 ,tp=4, "), 8, (1, 1, 2, 1, 4)),
        (as_degrees("dp_replicate=rest, dp_shard=2"), 6, (1, 3, 2, 1, 1)),
        (as_degrees({"pp": 2, "cp": 3}), 12, (2, 1, 2, 3, 1)),
        (as_degrees(Degrees(tp=2), cp=2), 4, (1, 1, 1, 2, 2)),
        (as_degrees(dp_shard=1, dp_replicate=4), 4, (1, 4, 1, 1, 1)),
        (as_degrees("dp_shard=4, ep=2"), 4, (1, 1, 4, 1, 1)),
        (as_degrees("tp=rest"), 4, (1, 1, 1, 1, 4)),
    ],
)
def test_spellings(degrees, world_size, sizes):
    assert tuple(degrees.fit(world_size).sizes.values()) == sizes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: as_degrees("dp_shrad=2"), r"there is no axis 'dp_shrad'; did you mean 'dp_shard'\? The axes are pp,"),
        (lambda: as_degrees({"x": 2}), r"there is no axis 'x'\. The axes are pp"),
        (lambda: as_degrees("tp"), "'tp' is not of the form axis=number"),
        (lambda: as_degrees("tp=2, tp=2"), "tp is given twice"),
        (lambda: as_degrees("tp=2", tp=2), "tp is given twice, in 'tp=2' and as a keyword"),
        (lambda: as_degrees("tp=two"), "tp='two' must be a whole number from 1, or 'rest'"),
        (lambda: as_degrees(tp=0), "tp=0 must be a whole number"),
        (lambda: as_degrees(tp=True), "tp=True must be a whole number"),
        (lambda: as_degrees(tp=10**12), "tp=1000000000000 must be at most 1,000,000 ranks"),
        (lambda: as_degrees("tp=2").fit(10**12), '"tp=2": a world has at most 1,000,000 ranks, got 1000000000000'),
        (lambda: as_degrees(tp=2.0), "tp=2.0 must be a whole number"),
        (lambda: as_degrees("tp=rest, cp=rest"), "cp and tp are both 'rest'"),
        (lambda: as_degrees("ep=rest"), "ep='rest' must be a whole number from 1$"),
        (lambda: as_degrees(3), 'a text such as "dp_shard=4, tp=2", a dict or hp.Degrees, not a int'),
        (
            lambda: as_degrees("tp=3").fit(8),
            'a multiple of 3 ranks, but the world has 8; what fits is "dp_shard=2, tp=4" or "dp_shard=4, tp=2"',
        ),
        (lambda: as_degrees("dp_shard=2, tp=2").fit(8), 'tp=2": 4 ranks, but the world has 8; .*"dp_shard=4, tp=2"'),
        (lambda: as_degrees("dp_shard=3").fit(4), "what fits is .*dp_shard=4"),
        (lambda: as_degrees("tp=2, ep=3").fit(4), "ep=3 must divide dp_shard x cp x tp = 4"),
        (lambda: as_degrees("tp=2").sizes, r"call fit\(world_size\)"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_text_and_equality():
    assert str(Degrees(dp_shard=4, tp=2)) == '"dp_shard=4, tp=2"'
    assert repr(Degrees(dp_shard=1)) == 'Degrees("dp_shard=1")'
    assert as_degrees("tp=2") == Degrees(tp=2) == as_degrees(as_degrees("tp=2"))
