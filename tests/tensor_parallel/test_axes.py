"""Styles on named axes of a wider mesh: what a layout says about other axes stays as it is."""

import copy

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_axes import axes_within, on_axes, replicated_elsewhere, replicated_on, widened
from hyper_parallel.platform.shared.membership import Member, as_member
from tests.tensor_parallel.toy import Attention, Block, Decoder, Mlp
from tests.world import run_on_ranks

only_on = "torch"  # PyTorch's modules; on MindSpore: test_axes_of_llama.py


def _mesh(cp=2, names=("cp", "tp")):
    ranks = hp.get_platform().get_world_size()
    return hp.init_device_mesh("cpu", (cp, ranks // cp), mesh_dim_names=names)


def _whole(value):
    return value.full_tensor() if isinstance(value, hp.DTensor) else value


def _values(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _compare(plain, cut, x, placed):
    """Outputs, the gradient of the input and of every parameter."""
    x, placed = x.requires_grad_(), placed.detach().requires_grad_()
    want, got = plain(x), cut(placed)
    torch.testing.assert_close(_whole(got), want, rtol=1e-9, atol=1e-9)
    want.sin().sum().backward()
    got.sin().sum().backward()
    torch.testing.assert_close(_whole(placed.grad), x.grad, rtol=1e-9, atol=1e-9)
    theirs = dict(plain.named_parameters())
    for name, parameter in cut.named_parameters():
        torch.testing.assert_close(_whole(parameter.grad), theirs[name].grad, rtol=1e-9, atol=1e-9, msg=name)


LOCAL = {"use_local_output": False}


def _block_plan(sequence):
    between = hp.Shard(1) if sequence else hp.Replicate()
    norm = hp.SequenceParallel() if sequence else hp.NoParallel(use_local_output=False)
    gather = hp.PrepareModuleInput(input_layouts=between, desired_input_layouts=hp.Replicate())
    return {
        "norm?": norm,
        "attention": gather,
        "mlp": gather,
        "attention.[qkv]": hp.ColwiseParallel(**LOCAL),
        "attention.o": hp.RowwiseParallel(output_layouts=between, **LOCAL),
        "mlp.up": hp.ColwiseParallel(**LOCAL),
        "mlp.down": hp.RowwiseParallel(output_layouts=between, **LOCAL),
    }


@run_on_ranks(4)
@pytest.mark.parametrize("placements", [[0], [1], [None]], ids=["batch", "sequence", "replicated"])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_on_one_axis(sequence, placements):
    on_cp = hp.Replicate() if placements == [None] else hp.Shard(placements[0])
    torch.manual_seed(0)
    plain = Block(8, 4, 12, num_kv_heads=2).double()
    x = _values(3, 13, 8)
    for names in (("cp", "tp"), ("tp", "cp")):  # the acted-on axis may come first
        mesh = _mesh(names=names)
        at = {"cp": on_cp, "tp": hp.Replicate()}
        for spelling in ("axes", "part"):
            cut = copy.deepcopy(plain)
            if spelling == "axes":
                hp.parallelize_module(cut, mesh, _block_plan(sequence), axes="tp")
                assert cut.mlp.up.weight.device_mesh == mesh
            else:
                hp.parallelize_module(cut, mesh["tp"], _block_plan(sequence))
                assert cut.mlp.up.weight.device_mesh == mesh["tp"]
            placed = hp.distribute_tensor(x.detach(), mesh, [at[name] for name in names])
            with hp.CommRecorder() as recorder, hp.attention_scheme("gather"):
                out = cut(placed)
            if not sequence:
                assert {record.op for record in recorder.records} <= {"all_reduce", "all_gather_into_tensor"}
                assert out.placements[names.index("cp")] == on_cp
            _compare(plain, cut, x.detach(), placed)
            plain.zero_grad()


@run_on_ranks(4)
def test_what_lies_where():
    mesh = _mesh()
    linear = hp.parallelize_module(nn.Linear(4, 6), mesh, hp.ColwiseParallel(**LOCAL), axes="tp")
    assert linear.weight.placements == (hp.Replicate(), hp.Shard(0))
    assert linear.bias.placements == (hp.Replicate(), hp.Shard(0))
    assert linear.weight.to_local().shape == (3, 4)
    out = linear(hp.distribute_tensor(torch.ones(2, 5, 4), mesh, [hp.Shard(1), hp.Shard(1)]))
    assert out.placements == (hp.Shard(1), hp.Shard(2))
    assert linear(torch.ones(2, 5, 4)).placements == (hp.Replicate(), hp.Shard(2))  # plain: replicated on the others
    norm = hp.parallelize_module(nn.LayerNorm(4), mesh, hp.SequenceParallel(), axes="tp")
    assert norm.weight.placements == (hp.Replicate(), hp.Replicate())
    out = norm(hp.distribute_tensor(torch.ones(2, 13, 4), mesh, [hp.Shard(1), hp.Replicate()]))
    assert out.placements == (hp.Shard(1), hp.Shard(1))
    embedding = hp.parallelize_module(nn.Embedding(7, 4), mesh, hp.RowwiseParallel(**LOCAL), axes=("tp",))
    ids = hp.distribute_tensor(torch.arange(12).reshape(2, 6) % 7, mesh, [hp.Shard(0), hp.Replicate()])
    assert embedding(ids).placements == (hp.Shard(0), hp.Replicate())
    values = [linear.weight.full_tensor(), norm.bias.full_tensor()]
    assert [value.shape for value in values] == [(6, 4), (4,)]


@run_on_ranks(4)
def test_every_rank_gets_the_values_of_one():
    mesh = _mesh()
    torch.manual_seed(hp.get_platform().get_rank())
    linear = hp.parallelize_module(nn.Linear(4, 6), mesh, hp.ColwiseParallel(**LOCAL), axes="tp")
    torch.manual_seed(0)
    torch.testing.assert_close(linear.weight.full_tensor(), nn.Linear(4, 6).weight.detach())


@run_on_ranks(4)
@pytest.mark.parametrize("on_cp", [hp.Shard(0), hp.Shard(1), hp.Shard(2), hp.Replicate(), hp.Partial()], ids=str)
def test_a_fused_projection_on_one_axis(on_cp):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 12), _Gated(), nn.Linear(6, 8)).double()
    mesh, x = _mesh(), _values(3, 5, 8)
    for spelling in ("axes", "part"):
        cut = copy.deepcopy(plain)
        plan = {"0": hp.FusedColwiseParallel({"gate": 6, "up": 6}, **LOCAL), "2": hp.RowwiseParallel(**LOCAL)}
        if spelling == "axes":
            hp.parallelize_module(cut, mesh, plan, axes="tp")
        else:
            hp.parallelize_module(cut, mesh["tp"], plan)
        placed = hp.distribute_tensor(x.detach(), mesh, [hp.Replicate(), hp.Replicate()])
        moved = placed.requires_grad_().redistribute(mesh, [on_cp, hp.Replicate()])
        want = plain(x.requires_grad_())
        got = cut(moved)
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-9, atol=1e-9)
        want.sin().sum().backward()
        got.sin().sum().backward()
        torch.testing.assert_close(placed.grad.full_tensor(), x.grad, rtol=1e-9, atol=1e-9)
        first, last = cut[0], cut[2]
        for name in ("weight", "bias"):
            parts = [getattr(first, f"{name}_{part}").grad.full_tensor() for part in ("gate", "up")]
            torch.testing.assert_close(torch.cat(parts), getattr(plain[0], name).grad, rtol=1e-9, atol=1e-9)
            theirs = getattr(plain[2], name).grad
            torch.testing.assert_close(getattr(last, name).grad.full_tensor(), theirs, rtol=1e-9, atol=1e-9)
        plain.zero_grad()
        x.grad = None


class _Gated(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return gate.sigmoid() * up


@run_on_ranks(4)
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_heads_on_one_axis(num_kv_heads):
    """Plain local tensors between the projections: every rank along the other axis has the same."""
    torch.manual_seed(0)
    plain = Attention(6, 3, num_kv_heads=num_kv_heads).double()
    mesh, x, cut = _mesh(), _values(2, 5, 6), copy.deepcopy(plain)
    heads = {"num_heads": 3, "num_kv_heads": num_kv_heads}
    plan = {
        "q": hp.HeadParallel("query", **heads),
        "[kv]": hp.HeadParallel("key_value", **heads),
        "o": hp.HeadParallel("output", **heads),
    }
    hp.parallelize_module(cut, mesh, plan, axes="tp")
    assert cut.q.weight.placements == (hp.Replicate(), hp.Replicate())
    _compare(plain, cut, x, hp.distribute_tensor(x.detach(), mesh, [hp.Replicate(), hp.Replicate()]))
    placed = hp.distribute_tensor(x.detach(), mesh, [hp.Shard(1), hp.Replicate()])
    with pytest.raises(
        ValueError, match=r"leaves as a plain local tensor, but the input lies under .*would be lost; use"
    ):
        cut(placed)


@run_on_ranks(4)
def test_a_plain_output_may_not_forget_an_axis():
    mesh = _mesh()
    mlp = hp.parallelize_module(Mlp(8, 12), mesh, {"up": hp.ColwiseParallel(), "down": hp.RowwiseParallel()}, axes="tp")
    assert mlp(torch.ones(2, 8)).shape == (2, 8)  # replicated on the others: nothing is lost
    assert mlp(hp.distribute_tensor(torch.ones(2, 8), mesh)).shape == (2, 8)
    with pytest.raises(ValueError, match=r"ColwiseParallel on Linear: its output lies under .* use_local_output=False"):
        mlp(hp.distribute_tensor(torch.ones(2, 8), mesh, [hp.Shard(0), hp.Replicate()]))


@run_on_ranks(4)
def test_meshes_that_have_nothing_to_do_with_each_other():
    mesh, other = _mesh(), _mesh(names=("a", "b"))
    mlp = hp.parallelize_module(Mlp(8, 12), mesh, {"up": hp.ColwiseParallel()}, axes="tp")
    with pytest.raises(ValueError, match=r"the input is on .*but the module was parallelized on"):
        mlp(hp.distribute_tensor(torch.ones(2, 8), other, [hp.Shard(0), hp.Replicate()]))
    with pytest.raises(ValueError, match="ep"):
        hp.parallelize_module(Mlp(8, 12), mesh, {"up": hp.ColwiseParallel()}, axes="ep")


@run_on_ranks(4)
def test_tensors_on_a_part_of_a_mesh():
    """A parameter meets tensors on the whole mesh; other tensors do where the program promises that they are equal."""
    mesh, x = _mesh(), _values(4, 6)
    narrow = hp.distribute_tensor(x, mesh["tp"], [hp.Shard(1)])
    wide = hp.distribute_tensor(x, mesh, [hp.Shard(0), hp.Shard(1)])
    with pytest.raises(ValueError, match=r"different meshes.*; redistribute one of them; or, where it is replicated"):
        wide * narrow
    with pytest.raises(ValueError, match=r"different meshes"):
        wide * hp.distribute_tensor(x, _mesh(names=("a", "b")))
    parameter = nn.Parameter(narrow)
    (wide * parameter).sin().sum().backward()
    want = x.clone().requires_grad_()
    (x * want).sin().sum().backward()
    assert parameter.grad.device_mesh == mesh["tp"]
    torch.testing.assert_close(parameter.grad.full_tensor(), want.grad)
    with hp.implicit_replication():
        got = wide * narrow + x  # a plain tensor too
        assert got.device_mesh == mesh
    torch.testing.assert_close(got.full_tensor(), x * x + x)


@run_on_ranks(4)
def test_axes_of_a_mesh():
    mesh = _mesh()
    assert axes_within(mesh["cp"], mesh) == (0,)
    assert axes_within(mesh["tp", "cp"], mesh) == (1, 0)
    assert axes_within(mesh, mesh["tp"]) is None
    assert axes_within(_mesh(names=("a", "tp"))["a"], mesh) is None
    layout = Layout.of(mesh, ((1, 0), ()))
    same = Layout.of(mesh["tp"], ((0,), ()))
    assert on_axes(layout, same) is layout  # nothing moves where the axis lies as it should
    assert on_axes(layout, Layout.of(mesh["tp"], ((), (0,)))) is Layout.of(mesh, ((0,), (1,)))
    assert replicated_on(layout, mesh["tp"]) is Layout.of(mesh, ((0,), ()))
    assert widened(same, mesh) is Layout.of(mesh, ((1,), ()))
    partial = Layout.of(mesh, ((), ()), ("sum", None))
    assert on_axes(partial, same) is Layout.of(mesh, ((1,), ()), ("sum", None))
    assert not replicated_elsewhere(partial, mesh["tp"])
    assert replicated_elsewhere(partial, mesh["cp"])
    with pytest.raises(ValueError, match="is not made of axes of"):
        on_axes(same, layout)


@pytest.mark.parametrize("rank", [0, 5])
def test_a_rank_of_a_silent_world_without_memory(rank):
    """(cp, tp) = (4, 2): 13 tokens are 4, 4, 4 and 1, and each block is sharded over tp between the halves."""
    with as_member(Member(rank, 8, hp.get_platform().silent_group)):
        mesh = hp.init_device_mesh("cpu", (4, 2), mesh_dim_names=("cp", "tp"))
        with torch.device("meta"):
            block = Block(8, 4, 12)
        hp.parallelize_module(block, mesh, _block_plan(True), axes="tp", src_data_rank=None)
        for module in block.modules():
            for name, parameter in list(module._parameters.items()):
                value = hp.reduce_later(parameter.detach(), "cp")
                module._parameters[name] = nn.Parameter(value)
        local = torch.empty(2, 4, 8, device="meta")
        x = hp.DTensor.from_local(local, mesh, [hp.Shard(1), hp.Replicate()], shape=(2, 13, 8))
        with hp.CommRecorder() as recorder, hp.attention_scheme("gather"):
            out = block(x)
            assert out.placements == (hp.Shard(1), hp.Shard(1)) and out.to_local().shape == (2, 2, 8)
            out.sin().sum().backward()
        gradient = block.mlp.up.weight.grad
        assert gradient.placements == (hp.Partial(), hp.Shard(0)) and gradient.to_local().shape == (6, 8)
        over_cp = [record for record in recorder.records if list(record.ranks) == list(mesh.line("cp"))]
        assert all(len(record.shape) > 2 for record in over_cp)  # keys and values: no parameter


@run_on_ranks(4)
def test_a_decoder_with_a_tied_head():
    torch.manual_seed(0)
    plain = Decoder(num_blocks=1, tied=True).double()
    mesh, ids = _mesh(), torch.arange(26).reshape(2, 13) * 5 % 12
    plan = {f"blocks.*.{path}": style for path, style in _block_plan(True).items()}
    plan |= {
        "embed": hp.RowwiseParallel(output_layouts=hp.Shard(1), **LOCAL),
        "norm": hp.SequenceParallel(),
        "head": hp.ColwiseParallel(**LOCAL),
    }
    cut = hp.parallelize_module(copy.deepcopy(plain), mesh, plan, axes="tp")
    assert cut.head.weight is cut.embed.weight
    want = plain(ids)
    got = cut(hp.distribute_tensor(ids, mesh, [hp.Shard(1), hp.Replicate()]))
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-9, atol=1e-9)
    want.logsumexp(-1).sum().backward()
    got.logsumexp(-1).sum().backward()
    for (name, ours), theirs in zip(cut.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-9, atol=1e-9, msg=name)
