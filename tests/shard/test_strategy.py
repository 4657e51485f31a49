"""Of the ways to run an operator the cheapest is chosen, and of those the one that holds the least."""

from __future__ import annotations

import itertools
import math

import pytest

from hyper_parallel import Layout, Replicate, Shard
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.core.dtensor.redistribution_plan import plan_redistribution
from hyper_parallel.core.shard.dispatching.strategy import choose
from hyper_parallel.core.shard.rule_kit.rule_table import parse_equation
from hyper_parallel.core.shard.rule_kit.signature import OpCall, TensorSpec


class _Tensors:
    """The tensors of a call: how its two inputs lie, and the sizes of the letters of its equation."""

    def __init__(self, equation, sizes, layouts):
        self.letters = equation.replace("->", ",").split(",")
        self.shapes = [tuple(sizes[letter] for letter in letters) for letters in self.letters]
        self.layouts = layouts

    def legal_cuts(self):
        """All ways to cut letters by the axes that cut them now, no axis twice."""
        cuts = {letter: {()} for letters in self.letters for letter in letters}
        for letters, layout in zip(self.letters, self.layouts, strict=False):
            for letter, axes in zip(letters, layout.shard_axes, strict=True):
                cuts[letter] |= {axes[:length] for length in range(len(axes) + 1)}
        for picked in itertools.product(*cuts.values()):
            axes = list(itertools.chain(*picked))
            if len(set(axes)) == len(axes):
                yield dict(zip(cuts, picked, strict=True))

    def price(self, cut):
        """(cost of moving the inputs, elements that a rank holds then)."""
        cost, held = 0.0, 0
        for letters, shape, source in zip(self.letters, self.shapes, (*self.layouts, None), strict=True):
            mesh = self.layouts[0].mesh
            target = Layout.of(mesh, [cut.get(letter, ()) for letter in letters])
            held += math.prod(target.local_shape(shape, (0,) * mesh.ndim))
            if source not in (None, target):
                cost += plan_redistribution(source, target, shape).cost
        return cost, held

    def choice(self, rule):
        tensors = tuple(map(TensorSpec, self.layouts, self.shapes[:2], ("float32",) * 2))
        call = OpCall("op", tensors, {}, tensors, tuple(self.shapes[2:]))
        return choose(call, rule(call))


@pytest.mark.parametrize(
    ("equation", "sizes", "reduces", "has_ties"),
    [
        ("mk,kn->mn", {"m": 16, "k": 6, "n": 40}, {"k": "sum"}, False),
        ("ij,ij->ij", {"i": 5, "j": 4}, {}, True),
    ],
)
def test_the_cheapest_way_and_the_smallest_of_those(equation, sizes, reduces, has_ties):
    mesh = init_device_mesh("cpu", (2, 2), rank_list=range(4), init_backend=False)
    placements = itertools.product((Shard(0), Shard(1), Replicate()), repeat=2)
    layouts = [Layout.from_placements(mesh, one, 2) for one in placements]
    rule = parse_equation(equation, reduces=reduces)
    decided_by_memory = 0
    for given in itertools.product(layouts, repeat=2):
        tensors = _Tensors(equation, sizes, given)
        prices = sorted(map(tensors.price, tensors.legal_cuts()))
        choice = tensors.choice(rule)
        assert tensors.price(choice.axes) == prices[0], (given, choice)
        assert choice.num_ways == len(prices)
        decided_by_memory += len({held for cost, held in prices if cost == prices[0][0]}) > 1
    assert bool(decided_by_memory) == has_ties
