"""Precision, host memory, parts kept between forward and backward, divisors, and means over unequal counts."""

import copy

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.fully_shard.parity import (
    Mlp,
    assert_all_sharded,
    assert_same_gradients,
    batch,
    double,
    loss_of,
    mesh_of,
    my_part,
    pair,
    shard_blocks,
    trains_as_one_device,
    units,
    whole,
)
from tests.tensor_parallel.toy import Attention
from tests.world import run_on_ranks

only_on = "torch"  # modules of PyTorch


@run_on_ranks(2, 4)
def test_mixed_precision() -> None:
    """bfloat16 inside, float32 for sums, parameters and optimizer; cast inputs and outputs."""
    mesh = mesh_of()
    policy = hp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    torch.manual_seed(1)
    model = Mlp(width=16, hidden=32)
    ours = copy.deepcopy(model)
    for block in ours.blocks:
        hp.fully_shard(block, mesh=mesh, mp_policy=hp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    hp.fully_shard(ours, mesh=mesh, mp_policy=policy)
    seen = []
    ours.blocks[0].up.register_forward_hook(lambda m, args, out: seen.extend((m.weight.dtype, args[0].dtype)))
    model16 = copy.deepcopy(model).bfloat16()
    x = batch(8, 3).float()
    for number in range(2):
        out = ours(my_part(x, mesh))
        assert out.dtype == torch.float32
        loss_of(out).backward()
        loss_of(model16(x.bfloat16()).float()).backward()
        if number == 0:
            assert seen == [torch.bfloat16, torch.bfloat16]
    for (name, parameter), mine in zip(model16.named_parameters(), ours.parameters(), strict=True):
        assert mine.dtype == mine.grad.dtype == torch.float32
        error = (whole(mine.grad) - parameter.grad.float()).norm() / parameter.grad.float().norm()
        assert error < 0.03, f"{name}: {error}"
    assert_all_sharded(ours)


@run_on_ranks(2)
@pytest.mark.parametrize("mode", ["reduce", "keep"])
def test_main_gradients(mode) -> None:
    """Gradients of bfloat16 parameters are added up in float32 beside them.

    torch's fully_shard fails on a parameter that is first used in the last micro-batch.
    """
    mesh = mesh_of()
    policy = hp.MixedPrecisionPolicy(reduce_dtype=torch.float32, apply_grad_on_fp32_main_grad=True)
    torch.manual_seed(1)
    model = Mlp(width=16, hidden=32).bfloat16()
    ours = copy.deepcopy(model)
    shard_blocks(mesh, mp_policy=policy)(ours)
    sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for number in range(3):
        x = batch(8, 3, seed=number).bfloat16()
        if mode == "keep":
            ours.set_requires_gradient_sync(number == 2)
        model.zero_grad()
        loss_of(model(x)).backward()
        for name, parameter in model.named_parameters():
            sums[name] += parameter.grad.float()
        loss_of(ours(my_part(x, mesh))).backward()
    for name, mine in ours.named_parameters():
        assert mine.grad is None
        assert mine.main_grad.dtype == torch.float32
        assert mine.main_grad.placements == mine.placements
        error = (whole(mine.main_grad) - sums[name]).norm() / sums[name].norm()
        assert error < 0.03, f"{name}: {error}"
    ours.zero_grad()
    assert all(parameter.main_grad is None for parameter in ours.parameters())


@run_on_ranks(2)
def test_offload() -> None:
    """Sharded parameters, gradients and moments in host memory."""
    mesh = mesh_of()
    shard = shard_blocks(mesh, offload_policy=hp.CPUOffloadPolicy())
    ours = trains_as_one_device(double(Mlp), shard, batch(8, 3), mesh)
    assert ours.first.weight.device.type == "cpu"
    assert_all_sharded(ours)


@run_on_ranks(4)
@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_a_part_is_kept(shape) -> None:
    """reshard_after_forward=2: gathered again among two neighbours; torch's has none for distributed parameters."""
    mesh = mesh_of(*shape)
    shard = shard_blocks(mesh, reshard_after_forward=2)
    ours = trains_as_one_device(double(Mlp), shard, batch(8, 3), mesh)
    assert_all_sharded(ours)
    with hp.CommRecorder() as recorder:
        loss_of(ours(my_part(batch(8, 3), mesh))).backward()
    gathered = [len(record.ranks) for record in recorder.records if record.op == "all_gather_into_tensor"]
    assert sorted(gathered) == [2, 2, 4, 4, 4, 4]
    with pytest.raises(ValueError, match=r"reshard_after_forward=3 does not divide the 4 ranks"):
        hp.fully_shard(nn.Linear(3, 3), mesh=mesh, reshard_after_forward=3)
    out = ours(my_part(batch(8, 3), mesh))
    with torch.no_grad():
        ours.blocks[0].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        loss_of(out).backward()
    ours.zero_grad()
    loss_of(ours(my_part(batch(8, 3), mesh))).backward()


@run_on_ranks(2)
def test_divisors() -> None:
    mesh = mesh_of()
    model = double(Mlp)
    x = batch(8, 3)
    loss_of(model(x)).backward()
    for setting, factor in (
        (lambda m: m.set_reduce_op_type("sum"), 2.0),
        (lambda m: m.set_gradient_scaling_factor(0.25), 0.5),
        (lambda m: m.set_gradient_divide_factor(8), 0.25),
        (lambda m: m.set_reduce_op_type("avg"), 1.0),
    ):
        ours = double(Mlp)
        shard_blocks(mesh)(ours)
        setting(ours)
        loss_of(ours(my_part(x, mesh))).backward()
        for parameter, mine in zip(model.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), parameter.grad * factor)
    with pytest.raises(ValueError, match='takes "avg" or "sum"'):
        ours.set_reduce_op_type("max")


@run_on_ranks(2, 4)
def test_share_of_mean() -> None:
    """Ranks with different numbers of elements: the mean over all, and its gradients; a mean of means is another."""
    mesh = mesh_of()
    model, ours = pair(mesh)
    rank, size = get_platform().get_rank(), mesh.size()
    rows = [batch(3 * r + 1, 3, seed=r) for r in range(size)]
    want = model(torch.cat(rows)).square().mean()
    want.backward()
    out = ours(rows[rank])
    for count in (out.numel(), torch.tensor(out.numel()), float(out.numel())):
        share = hp.share_of_mean(out.square().sum(), count, mesh)
    share.backward()
    assert_same_gradients(model, ours)
    mean = get_platform().all_reduce(share.detach(), None, op="avg")
    torch.testing.assert_close(mean, want.detach())


@run_on_ranks(2)
def test_prefetch_and_collectives_of_a_step() -> None:
    """15 gathers and 8 reductions for 8 units: the last is not given back between forward and backward."""
    mesh = mesh_of()
    model = double(Mlp, num_blocks=8)
    for block in model.blocks:
        hp.fully_shard(block, mesh=mesh)
    model.first, model.last = nn.Identity(), nn.Identity()
    del model.scale
    model.forward = lambda x: nn.Sequential(*model.blocks)(x)
    hp.fully_shard(model, mesh=mesh)
    x = my_part(batch(8, 5), mesh)
    model(x).mean().backward()
    with hp.CommRecorder() as recorder:
        model(x).mean().backward()
    assert recorder.counts == {"all_gather_into_tensor": 15, "reduce_scatter_tensor": 8}
    order = [record.asked_by.removeprefix("gather unit ") for record in recorder.records[:8]]
    assert order == [f"'blocks.{number}'" for number in range(8)]
    backward = [record.asked_by for record in recorder.records[8:12]]
    assert backward == [
        "gather unit 'blocks.6'",  # while the backward of 7, which is still there, runs
        "reduce unit 'blocks.7'",
        "gather unit 'blocks.5'",
        "reduce unit 'blocks.6'",
    ]


class _Uneven(nn.Module):
    """A large block and small ones: 4 KiB, and 0.5 KiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, size, bias=False) for size in (64, 8, 8, 8, 8))

    def forward(self, x):
        first, *others = self.blocks
        x = first(x).reshape(-1, 8, 8).mean(1)
        for block in others:
            x = torch.tanh(block(x))
        return x


def _ahead(model: nn.Module) -> list[str]:
    """For each block, in forward and then in backward, which others are on their way when it begins."""
    seen, own = [], units(model)

    def look(module, *given):
        seen.append("".join(str(number) for number, unit in enumerate(own[1:]) if unit.state == "launched"))

    hooks = [block.register_forward_pre_hook(look) for block in model.blocks]
    hooks += [block.register_full_backward_pre_hook(look) for block in model.blocks]
    return seen, hooks


@run_on_ranks(2)
@pytest.mark.parametrize(
    ("gathers", "forward", "backward"),
    [
        # As many bytes as the largest unit has: all small ones at once, or the large one.
        (None, ["1234", "234", "34", "4", ""], ["123", "12", "1", "0", ""]),
        (1024, ["12", "23", "34", "4", ""], ["23", "12", "1", "", ""]),
        (0, ["", "", "", "", ""], ["", "", "", "", ""]),
    ],
)
def test_bytes_that_are_gathered_ahead(gathers, forward, backward) -> None:
    mesh = mesh_of()
    model, ours = pair(mesh, _Uneven)
    ours.set_bytes_in_flight(gathers=gathers)
    x = batch(8, 8)
    loss_of(model(x)).backward()
    loss_of(ours(my_part(x, mesh))).backward()  # the order is known after the first pass
    model.zero_grad()
    ours.zero_grad()
    seen, hooks = _ahead(ours)
    loss_of(model(x)).backward()
    loss_of(ours(my_part(x, mesh))).backward()
    assert seen == forward + backward
    for hook in hooks:
        hook.remove()
    assert_same_gradients(model, ours)
    assert_all_sharded(ours)


@run_on_ranks(2)
@pytest.mark.parametrize(("reductions", "most"), [(None, 2), (0, 0), (3 * 8 * 260, 3)])
def test_bytes_of_gradients_in_flight(reductions, most) -> None:
    """By default two of the largest units; gradients are finished in the order in which they were started."""
    mesh = mesh_of()
    model = double(nn.Sequential, *(nn.Linear(16, 16, bias=False) for _ in range(6)))
    ours = copy.deepcopy(model)
    for layer in ours:
        hp.fully_shard(layer, mesh=mesh)
    hp.fully_shard(ours, mesh=mesh)
    ours.set_bytes_in_flight(reductions=reductions)
    x, missing = batch(8, 16), []

    def look(module, *given):
        place = list(ours).index(module)
        missing.append(sum(layer.weight.grad is None for layer in ours[place + 1 :]))

    for layer in ours:
        layer.register_full_backward_pre_hook(look)
    model(x).sin().mean().backward()
    ours(my_part(x, mesh).requires_grad_()).sin().mean().backward()
    assert missing == [min(number, most) for number in range(6)]
    assert_same_gradients(model, ours)


@run_on_ranks(2)
def test_bytes_in_flight_that_are_no_bytes() -> None:
    _, ours = pair(mesh_of())
    for what, wrong in (("gathers", -1), ("reductions", 1.5), ("gathers", True)):
        with pytest.raises(ValueError, match=f"{what} is a number of bytes, 0 or more, or None .*got {wrong}"):
            ours.set_bytes_in_flight(**{what: wrong})


@run_on_ranks(2)
def test_prefetch_that_is_asked_for() -> None:
    mesh = mesh_of()
    model = double(Mlp, num_blocks=4)
    ours = copy.deepcopy(model)
    shard_blocks(mesh)(ours)
    ours.set_modules_to_forward_prefetch([ours.blocks[0], ours.blocks[1], ours.blocks[2]])
    for block in ours.blocks:
        block.set_modules_to_forward_prefetch([])
    ours.blocks[3].set_modules_to_backward_prefetch([ours.blocks[1], ours.blocks[0]])
    x = batch(8, 3)
    with hp.CommRecorder() as recorder:
        for _ in range(2):
            loss_of(model(x)).backward()
            loss_of(ours(my_part(x, mesh))).backward()
    assert_same_gradients(model, ours)
    gathers = [record.asked_by for record in recorder.records if record.asked_by.startswith("gather")]
    assert gathers[:5] == [
        "gather the unit of Mlp",
        *(f"gather unit 'blocks.{number}'" for number in range(4)),
    ]
    with pytest.raises(ValueError, match="a Linear was not sharded"):
        ours.set_modules_to_forward_prefetch([ours.first])


@run_on_ranks(2)
def test_plain_parameters_between_cut_projections_are_still_found() -> None:
    """A norm over each head, plain and gathered by fully_shard, between projections that tensor parallelism has cut."""
    alike = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))  # an equal mesh with another root, used before
    kept = hp.distribute_tensor(batch(8, 8), alike, [hp.Shard(0)])
    assert kept.device_mesh == alike
    mesh = hp.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = double(Attention, 8, 4, qk_norm=True)
    plan = {name: hp.ColwiseParallel() for name in "qkv"} | {"o": hp.RowwiseParallel()}
    hp.parallelize_module(model, mesh["tp"], plan)
    hp.fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(RuntimeError, match=r"computed with the plain parameter .*'q_norm\.weight' of shape \(2,\)"):
        model(batch(2, 3, 8))
