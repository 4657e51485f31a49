"""Plans: paths with wildcards, what is matched and what is refused, meshes, where values come from."""

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.tensor_parallel.parallelize import match_plan
from hyper_parallel.platform import get_platform
from tests.frameworks import dist, equal, ours, theirs
from tests.frameworks.models import fill
from tests.tensor_parallel.small_modules import Decoder, Mlp, same_as_one_device, tp_plan
from tests.world import run_on_ranks

COL, ROW = hp.ColwiseParallel(), hp.RowwiseParallel()


def _paths(model: Any) -> dict[str, Any]:
    return dict(get_platform().get_cells_and_names(model))


def test_paths_with_wildcards() -> None:
    paths = _paths(Decoder(6))
    chosen = match_plan(paths, {"blocks.*.mlp.up": COL})
    assert list(chosen) == ["blocks.0.mlp.up", "blocks.1.mlp.up"]
    assert list(match_plan(paths, {"**.down": COL})) == ["blocks.0.mlp.down", "blocks.1.mlp.down"]
    assert list(match_plan(paths, {"": COL})) == [""]
    assert list(match_plan(paths, {"blocks.0.attention.[qk]": COL})) == ["blocks.0.attention.q", "blocks.0.attention.k"]
    chosen = match_plan(paths, {"blocks.1.mlp.up": ROW, "blocks.*.mlp.up": COL})  # the exact path goes first
    assert chosen == {"blocks.0.mlp.up": [COL], "blocks.1.mlp.up": [ROW]}
    assert match_plan(paths, {"head": [COL, ROW]}) == {"head": [COL, ROW]}


def test_paths_that_match_nothing_or_twice() -> None:
    paths = _paths(Decoder(6))
    with pytest.raises(ValueError, match=r"'blocks.\*.mlp.upp'.*did you mean 'blocks.[01].mlp.up'"):
        match_plan(paths, {"blocks.*.mlp.upp": COL})
    with pytest.raises(ValueError, match=r"no module matches the path 'layers.0.w1'; the module has blocks, embed"):
        match_plan(paths, {"layers.0.w1": COL})
    with pytest.raises(ValueError, match=r"'blocks.0.mlp' has down, up inside"):
        match_plan(paths, {"blocks.0.mlp.w1": COL})
    with pytest.raises(ValueError, match=r"'blocks.0.mlp.up' matches '\*\*.up' and 'blocks.\*.mlp.up'"):
        match_plan(paths, {"**.up": COL, "blocks.*.mlp.up": COL})
    with pytest.raises(TypeError, match=r"did you mean ColwiseParallel\(\)"):
        match_plan(paths, {"head": hp.ColwiseParallel})
    with pytest.raises(TypeError, match="paths of modules, got 3"):
        match_plan(paths, {3: COL})


@run_on_ranks(4)
def test_sub_mesh_and_current_mesh() -> None:
    """Two data-parallel copies, each cut over its own pair of ranks."""
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ids = torch.randint(9, (2, 4), generator=torch.Generator().manual_seed(mesh.get_local_rank("dp"))).int()
    cut = same_as_one_device(lambda: Decoder(9), lambda m: hp.parallelize_module(m, mesh["tp"], tp_plan()), ids)
    assert cut.head.weight.device_mesh == mesh["tp"]
    with mesh["tp"]:
        mlp = hp.parallelize_module(Mlp(4, 6), parallelize_plan={"up": hp.ColwiseParallel()})
    assert mlp.up.weight.device_mesh == mesh["tp"]


@run_on_ranks(4)
def test_all_axes_of_a_mesh_and_2d() -> None:
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    whole, last = hp.Replicate(), hp.Shard(-1)
    merged = {"up": hp.ColwiseParallel(), "down": hp.RowwiseParallel()}
    # Each weight is cut on both dims; an activation is cut on one axis and whole on the other.
    both = {
        "up": hp.ColwiseParallel(
            weight_layouts=(hp.Shard(0), hp.Shard(1)), input_layouts=whole, output_layouts=(last, whole)
        ),
        "down": hp.RowwiseParallel(
            weight_layouts=(hp.Shard(1), hp.Shard(0)), input_layouts=(last, whole), output_layouts=whole
        ),
    }
    for plan in (merged, both):
        for hidden in (8, 7, 3):
            cut = same_as_one_device(
                lambda hidden=hidden: Mlp(8, hidden), lambda m, p=plan: hp.parallelize_module(m, mesh, p), x
            )
            with hp.CommRecorder() as recorder:
                cut(ours(x))
            wanted = {"all_reduce": 1} if plan is merged else {"all_reduce": 2, "all_gather_into_tensor": 1}
            assert recorder.counts == wanted, recorder.table()


@run_on_ranks(2, 4)
def test_where_values_come_from() -> None:
    mesh = hp.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    rank = mesh.get_local_rank()
    parameters_of = get_platform().parameters_dict

    def built() -> Mlp:
        return fill(Mlp(4, 6), seed=rank)

    plan = {"up": hp.ColwiseParallel(), "down": hp.RowwiseParallel()}
    sent = parameters_of(hp.parallelize_module(built(), mesh, plan, src_data_rank=1))
    for name, parameter in parameters_of(fill(Mlp(4, 6), seed=1)).items():
        assert equal(sent[name].full_tensor(), parameter), name
    own = built()
    with hp.CommRecorder() as recorder:
        kept = hp.parallelize_module(own, mesh, plan, src_data_rank=None)
    assert not recorder.records
    (start, _), _ = kept.up.weight.layout.local_region((6, 4))
    height = kept.up.weight.local_shape[0]
    assert equal(kept.up.weight.to_local(), theirs(built().up.weight)[start : start + height])
    with pytest.raises(ValueError, match=r"src_data_rank=9 is not a position in DeviceMesh"):
        hp.parallelize_module(built(), mesh, plan, src_data_rank=9)


@run_on_ranks(2)
def test_refusals() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ValueError, match="parallelize_module needs a plan"):
        hp.parallelize_module(Mlp(2, 2), mesh)
    with pytest.raises(ValueError, match="parallelize_module needs a mesh"):
        hp.parallelize_module(Mlp(2, 2), None, COL)
    with pytest.raises(ValueError, match=r"'weight' is shared with RowwiseParallel on Embedding.*choose styles"):
        hp.parallelize_module(Decoder(6, tied=True), mesh, {"embed": ROW, "head": ROW})
    mlp = hp.parallelize_module(Mlp(2, 2), mesh, {"up": COL})
    with pytest.raises(ValueError, match="a module can be parallelized once"):
        hp.parallelize_module(mlp, mesh, {"up": ROW})
