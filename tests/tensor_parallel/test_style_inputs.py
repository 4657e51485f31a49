"""What styles take and refuse, on every framework: odd inputs, layouts that do not fit, parameters that stay plain."""

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.frameworks import on_mindspore, ours, parameter, theirs
from tests.frameworks.models import Module, Norm, fill, linear
from tests.tensor_parallel.small_modules import Mlp, same_as_one_device, whole
from tests.world import run_on_ranks


def _mesh() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Identity(Module):
    def forward(self, x: Any) -> Any:
        return x


@run_on_ranks(2)
def test_refusals_of_prepared_values() -> None:
    mesh = _mesh()
    whole, cut = hp.Replicate(), hp.Shard(0)
    with pytest.raises(ValueError, match="input_layouts has 2 entries and desired_input_layouts 1"):
        hp.PrepareModuleInput(input_layouts=(cut, cut), desired_input_layouts=whole)
    with pytest.raises(ValueError, match="input_layouts needs desired_input_layouts"):
        hp.PrepareModuleInput(input_layouts=cut)
    with pytest.raises(ValueError, match=r"input_kwarg_layouts names \['x'\] and desired_input_kwarg_layouts \[\]"):
        hp.PrepareModuleInput(input_kwarg_layouts={"x": cut})
    with pytest.raises(ValueError, match="output_layouts has 1 entries and desired_output_layouts 2"):
        hp.PrepareModuleOutput(output_layouts=cut, desired_output_layouts=(cut, cut))
    with pytest.raises(TypeError, match="'tp' is no layout"):
        hp.PrepareModuleOutput(output_layouts=("tp",), desired_output_layouts=(cut,))
    with pytest.raises(TypeError, match="ColwiseParallel: 0 is no layout"):
        hp.ColwiseParallel(input_layouts=0)
    two = hp.PrepareModuleInput(input_layouts=(cut, None), desired_input_layouts=(whole, None))
    with pytest.raises(ValueError, match="the module got 1 positional inputs, but input_layouts has 2"):
        hp.parallelize_module(Identity(), mesh, two)(ours(torch.ones(2, 2)))
    out = hp.PrepareModuleOutput(output_layouts=(whole, whole), desired_output_layouts=(cut, cut))
    with pytest.raises(ValueError, match="one output, but output_layouts has 2"):
        hp.parallelize_module(Identity(), mesh, out)(ours(torch.ones(2, 2)))
    layer = hp.parallelize_module(linear(4, 4), mesh, hp.RowwiseParallel())
    with pytest.raises(ValueError, match=r"has a local tensor of shape \(2, 2\) on rank [01], got"):
        layer(ours(torch.ones(2, 3)))
    deep = hp.parallelize_module(linear(4, 4), mesh, hp.ColwiseParallel(output_layouts=hp.Shard(3)))
    with pytest.raises(ValueError, match=r"ColwiseParallel on .*: Shard\(3\) on axis .tp.: the tensor has 2 dims"):
        deep(ours(torch.ones(2, 4)))


@run_on_ranks(2)
def test_inputs_without_rows_and_of_one_row() -> None:
    mesh = _mesh()
    plan = {"up": hp.ColwiseParallel(), "down": hp.RowwiseParallel()}
    for hidden in (6, 1):
        for shape in ((1, 4), *(() if on_mindspore else ((4,),))):  # a Dense wants two dims
            same_as_one_device(
                lambda hidden=hidden: Mlp(4, hidden), lambda m: hp.parallelize_module(m, mesh, plan), _x(*shape)
            )
        for shape in ((0, 4), (2, 0, 4)):  # of a plain Dense the gradients are then whatever was in memory
            cut = hp.parallelize_module(fill(Mlp(4, hidden)), mesh, plan)
            parameters = list(get_platform().parameters_dict(cut).values())
            out, gradients = hp.value_and_grad(lambda cut=cut, shape=shape: cut(ours(_x(*shape))).sum(), parameters)()
            assert theirs(out) == 0 and not any(theirs(whole(one)).any() for one in gradients), (hidden, shape)


class Scaled(Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.up, self.down = linear(4, 6), linear(6, 4)
        self.scale = parameter(torch.tensor([2.0]))

    def forward(self, x: Any) -> Any:
        x = self.up(x * self.scale if self.place == "before" else x)
        x = self.down(x * self.scale if self.place == "between" else x)
        return x * self.scale if self.place == "behind" else x


@run_on_ranks(2)
def test_other_parameters_between_cut_projections() -> None:
    """A plain scale before the cut is whole and allowed; one behind it is refused, also on the sequence."""
    mesh = _mesh()
    plan = {"up": hp.ColwiseParallel(), "down": hp.RowwiseParallel()}
    for place in ("before", "behind"):
        same_as_one_device(
            lambda place=place: Scaled(place),
            lambda m: hp.parallelize_module(m, mesh, plan, src_data_rank=None),
            _x(2, 3, 4),
        )
    with pytest.raises(RuntimeError, match="the plain parameter 'scale' of shape"):
        hp.parallelize_module(Scaled("between"), mesh, plan)(ours(_x(2, 3, 4)))


@run_on_ranks(2)
def test_uneven_plain_blocks_are_an_error_on_every_rank() -> None:
    mesh = _mesh()
    norm = hp.parallelize_module(Norm(8), mesh, hp.SequenceParallel())
    out = norm(ours(torch.randn(2, 3 - mesh.get_local_rank(), 8)))
    with pytest.raises(
        RuntimeError, match=r"got local tensors of different sizes \(rank 0: \(2, 3, 8\), rank 1: \(2, 2, 8\)"
    ):
        out.full_tensor()
