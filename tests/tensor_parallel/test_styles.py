"""Every style against one device: values, all gradients, the step after; even, uneven and empty shards."""

import copy

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from tests.tensor_parallel.small_modules import tp_plan
from tests.tensor_parallel.toy import Decoder, Mlp, same_as_one_device, sp_plan
from tests.world import run_on_ranks

only_on = "torch"  # modules of PyTorch; cells: test_styles_on_mindspore.py


def _mesh() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (hp.get_platform().get_world_size(),), mesh_dim_names=("tp",))


def _x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _double(make, *args, **kwargs) -> nn.Module:
    torch.manual_seed(1)
    return make(*args, **kwargs).double()


@run_on_ranks(2, 4)
def test_linear_styles() -> None:
    """Sizes that divide, that do not, and that leave ranks without rows."""
    mesh = _mesh()
    outs = (hp.Replicate(), hp.Shard(-1), hp.Shard(0), hp.Shard(1))
    for features_in, features_out, bias in ((4, 8, True), (5, 7, True), (3, 2, False), (1, 1, True)):
        for style in (hp.ColwiseParallel, hp.RowwiseParallel):
            for out in outs:
                model = _double(nn.Linear, features_in, features_out, bias=bias)
                plan = style(input_layouts=hp.Replicate(), output_layouts=out, use_local_output=out == hp.Replicate())
                same_as_one_device(
                    model,
                    lambda m, plan=plan: hp.parallelize_module(m, mesh, plan),
                    (_x(2, 3, features_in),),
                    num_steps=1,
                )


@run_on_ranks(2, 4)
def test_pair_of_linears_on_plain_blocks() -> None:
    mesh = _mesh()
    for hidden in (8, 6, 3, 1):
        model = _double(Mlp, 4, hidden)
        plan = {"up": hp.ColwiseParallel(), "down": hp.RowwiseParallel()}
        ours = same_as_one_device(model, lambda m, p=plan: hp.parallelize_module(m, mesh, p), (_x(2, 3, 4),))
        assert ours.up.weight.placements == (hp.Shard(0),)
        assert ours.down.weight.placements == (hp.Shard(1),)


@run_on_ranks(2, 4)
def test_embedding_styles() -> None:
    mesh = _mesh()
    ids = torch.tensor([[0, 2, 2, 1], [1, 0, 4, 2]])
    for words, width in ((8, 4), (5, 3), (6, 1)):
        for padding in (None, 2):
            for plan in (
                hp.ColwiseParallel(output_layouts=hp.Replicate()),
                hp.ColwiseParallel(use_local_output=False),
                hp.RowwiseParallel(),
                hp.RowwiseParallel(output_layouts=hp.Shard(1), use_local_output=False),
            ):
                model = _double(nn.Embedding, words, width, padding_idx=padding)
                same_as_one_device(model, lambda m, p=plan: hp.parallelize_module(m, mesh, p), (ids,), num_steps=1)


@run_on_ranks(2, 4)
@pytest.mark.parametrize("plan", ["tp", "sp", "sp_local"])
def test_decoder(plan: str) -> None:
    mesh = _mesh()
    plans = {"tp": tp_plan, "sp": sp_plan, "sp_local": lambda: sp_plan(local=True)}
    for vocabulary, length, tied in ((12, 8, False), (9, 5 if plan != "sp_local" else 4, True)):
        model = _double(Decoder, vocabulary, tied=tied)
        ids = torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0))
        ours = same_as_one_device(model, lambda m: hp.parallelize_module(m, mesh, plans[plan]()), (ids,))
        assert (ours.head.weight is ours.embed.weight) == tied


class Pair(nn.Module):
    """Two inputs, one of them by keyword, a mask, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert type(mask) is torch.Tensor
        out = self.lin(x) + y
        return out, out.sum(-1)


@run_on_ranks(2, 4)
def test_prepared_inputs_and_outputs() -> None:
    mesh = _mesh()
    whole, cut = hp.Replicate(), hp.Shard(1)
    for length, local in ((8, True), (5, False)):
        x, y = _x(2, length, 4), _x(2, length, 4, seed=1)
        models = [_double(Pair), _double(Pair)]
        style = hp.PrepareModuleInputOutput(
            input_layouts=(cut, None),
            desired_input_layouts=(whole, None),
            input_kwarg_layouts={"y": whole},
            desired_input_kwarg_layouts={"y": whole},
            output_layouts=(whole, None),
            desired_output_layouts=(cut, None),
            use_local_output=local,
        )
        hp.parallelize_module(models[1], mesh, {"lin": hp.NoParallel(use_local_output=False), "": style})
        block = hp.distribute_tensor(x, mesh, [cut])
        want, want_sums = models[0](x, torch.ones(2), y=y)
        got, got_sums = models[1](block.to_local() if local else block, torch.ones(2), y=y)
        assert isinstance(got, hp.DTensor) != local
        expected = hp.distribute_tensor(want.detach(), mesh, [cut])
        torch.testing.assert_close(got if not local else hp.DTensor.from_local(got, mesh, [cut]), expected)
        torch.testing.assert_close(got_sums.to_local() if isinstance(got_sums, hp.DTensor) else got_sums, want_sums)
        want.square().sum().backward()
        got.square().sum().backward()  # of this rank's block when it is plain: the gradient of a cut value is cut
        torch.testing.assert_close(models[1].lin.weight.grad.full_tensor(), models[0].lin.weight.grad)


@run_on_ranks(2)
def test_half_precision_and_autocast() -> None:
    """Sums over ranks round otherwise, so by tolerance; dtypes are those of one device."""
    mesh = _mesh()
    plan = {"up": hp.ColwiseParallel(), "down": hp.RowwiseParallel()}
    x = _x(3, 4)
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True), (torch.float16, False)):
        models = [_double(Mlp, 4, 6).to(dtype) for _ in range(2)]
        hp.parallelize_module(models[1], mesh, plan)
        outs = []
        for model in models:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                outs.append(model(x.to(dtype)))
            outs[-1].float().sum().backward()
        assert outs[0].dtype == outs[1].dtype
        torch.testing.assert_close(outs[1], outs[0], rtol=2e-2, atol=2e-2)
        for want, mine in zip(*(model.parameters() for model in models), strict=True):
            assert mine.grad.dtype == want.grad.dtype
            torch.testing.assert_close(mine.grad.full_tensor(), want.grad, rtol=5e-2, atol=5e-2)


@run_on_ranks(2)
def test_copies_and_layers_with_a_forward_of_their_own() -> None:
    mesh = _mesh()

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    for style in (hp.ColwiseParallel(output_layouts=hp.Replicate()), hp.RowwiseParallel(input_layouts=hp.Replicate())):
        model = _double(Doubled, 4, 6)
        same_as_one_device(model, lambda m, s=style: hp.parallelize_module(m, mesh, s), (_x(2, 4),), num_steps=1)
    ours = hp.parallelize_module(_double(Mlp, 4, 6), mesh, {"up": hp.ColwiseParallel(), "down": hp.RowwiseParallel()})
    with hp.CommRecorder() as recorder:
        ours.float().double()
    assert not recorder.records, recorder.table()
    copied = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in ours.parameters():
            if isinstance(parameter, hp.DTensor):
                parameter.zero_()
    torch.testing.assert_close(copied(_x(2, 4)), _double(Mlp, 4, 6).float().double()(_x(2, 4)))
    assert not ours(_x(2, 4)).any()


@run_on_ranks(2)
def test_repr_and_contract() -> None:
    assert repr(hp.ColwiseParallel()) == (
        "ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=True)"
    )
    assert "RowwiseParallel(input_layouts=Shard(-1)" in repr(hp.RowwiseParallel())
    assert repr(hp.SequenceParallel()) == "SequenceParallel(sequence_dim=1, use_local_output=False)"
    both = hp.PrepareModuleInputOutput(
        input_layouts=hp.Shard(0),
        desired_input_layouts=hp.Replicate(),
        output_layouts=hp.Replicate(),
        desired_output_layouts=hp.Shard(0),
    )
    assert "desired_output_layouts=(Shard(0),)" in repr(both)
    with pytest.raises(NotImplementedError, match="not a Conv2d"):
        hp.parallelize_module(nn.Conv2d(2, 2, 1), _mesh(), hp.ColwiseParallel())
