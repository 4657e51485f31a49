"""Styles of experts with HyperParallel 1.0's names, ways to travel, and limits."""

import pytest
import torch
import torch.nn.functional as F

import hyper_parallel as hp
from hyper_parallel.core.expert_parallel.capacity import limited
from hyper_parallel.core.expert_parallel.dispatch_options import dispatching
from hyper_parallel.core.expert_parallel.row_counts import host_reads
from hyper_parallel.models import GroupedExperts
from hyper_parallel.platform import get_platform
from hyper_parallel.testing import threads
from tests.expert_parallel.test_experts_op import routing
from tests.expert_parallel.test_layouts import CASES_2, CASES_4, check
from tests.frameworks import on_mindspore, ours, theirs
from tests.world import run_on_ranks, small_or_sweep

TOLERANCE = 1e-5 if on_mindspore else 1e-11
DTYPE = torch.float32 if on_mindspore else torch.float64
CASES = {
    "ExpertParallel": (hp.ExpertParallel, 2, (2,), "ep"),
    "deredundency": (lambda: hp.ExpertParallel("deredundency"), 2, (2,), "ep"),
    "TensorParallel": (hp.TensorParallel, 1, (2,), "tp"),
    "ExpertTensorParallel": (hp.ExpertTensorParallel, 2, (2, 2), "ep tp"),
}


def _module(dtype):
    generator = torch.Generator().manual_seed(3)
    module = GroupedExperts(8, 12, 5)
    platform = get_platform()
    values = {}
    for name, parameter in platform.own_parameters(module).items():
        values[name] = torch.randn(tuple(parameter.shape), generator=generator, dtype=torch.float64).to(dtype)
    if not on_mindspore:
        module = module.to(dtype)
    for name, parameter in platform.own_parameters(module).items():
        platform.load_into_param(parameter, ours(values[name]))
    return module, values


def _on_one_device(tokens, index, weights, values):
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    out = torch.zeros_like(tokens)
    for token in range(len(tokens)):
        for choice, expert in enumerate(index[token].tolist()):
            inner = F.silu(leaves["gate"][expert] @ tokens[token]) * (leaves["up"][expert] @ tokens[token])
            out = out + F.one_hot(torch.tensor(token), len(tokens))[:, None] * (
                weights[token, choice] * (leaves["down"][expert] @ inner)
            )
    (out * out).sum().backward()
    return out.detach(), leaves


@pytest.mark.parametrize("case", small_or_sweep(CASES, ["ExpertParallel"] if on_mindspore else CASES))
@run_on_ranks(2, 4)
def test_a_style_gives_one_device(case):
    make, num_parts, shape, axes = CASES[case]
    platform = get_platform()
    rank, world = platform.get_rank(), platform.get_world_size()
    if world != torch.Size(shape).numel():
        return
    module, values = _module(DTYPE)
    generator = torch.Generator().manual_seed(1)
    tokens, weights = (torch.randn(9, size, generator=generator, dtype=torch.float64).to(DTYPE) for size in (8, 2))
    index = torch.tensor(routing("balanced", tokens=9, num_experts=5))
    in_double = {name: value.double() for name, value in values.items()}
    want, leaves = _on_one_device(tokens.double(), index, weights.double(), in_double)
    mesh = hp.init_device_mesh("cpu", shape, mesh_dim_names=tuple(axes.split()))
    hp.parallelize_module(module, mesh, make())
    place = 0 if num_parts == 1 else mesh.get_local_rank(0)
    mine = slice(0, 9) if num_parts == 1 else slice(0, 6) if place == 0 else slice(6, 9)
    got = module(*(ours(one[mine]) for one in (tokens, index, weights)))
    assert torch.allclose(theirs(got).double(), want[mine], rtol=TOLERANCE, atol=TOLERANCE * float(want.abs().max())), (
        rank
    )
    platform.backward((got * got).sum())
    for name, parameter in platform.own_parameters(module).items():
        gradient, expected = theirs(platform.get_grad(parameter).full_tensor()), leaves[name].grad
        rounding = TOLERANCE * expected.abs().max()  # of sums whose terms are as large as the largest
        assert torch.allclose(gradient.double(), expected, rtol=0.0, atol=float(rounding)), name


@pytest.mark.parametrize("name", small_or_sweep(("balanced", "all to one", "few"), [] if on_mindspore else ["few"]))
@run_on_ranks(4)
def test_once_for_each_rank(name):
    with dispatching(once_per_rank=True):
        for case in ("ep 4", "edp 2 x ep 2", "ep over both, tokens replicated over tp"):
            before = host_reads.number
            check(*CASES_4[case], name=name, num_experts=6)
            assert host_reads.number == before + 1, "one look at values in a layer"
        check(*CASES_4["ep 4"], form="weights first", name=name)


@pytest.mark.skipif(on_mindspore, reason="ranks of one process are PyTorch's")
def test_a_token_travels_once_to_a_rank():
    def work():
        mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        weight = hp.distribute_tensor(torch.randn(4, 8, 8), mesh, [hp.Shard(0)])
        tokens = torch.randn(5, 8)
        index = torch.tensor([[2, 3], [3, 2], [2, 3], [0, 1], [1, 0]])  # 3 tokens go to rank 1, each to both experts
        sizes = []
        for once in (False, True):
            with hp.CommRecorder() as recorder, dispatching(once_per_rank=once):
                hp.experts(tokens, index, torch.rand(5, 2), weight, weight, activation=F.silu)
            there = next(one for one in recorder.records if one.asked_by == "dispatch to experts")
            sizes.append(there.shape)
        return sizes

    for each, once in threads(2).run(work):
        assert each == (10, 8) and once == (5, 8)


def test_limits():
    keys = ours(torch.tensor([1, 0, 1, 1, 0, 1]))
    assert theirs(limited(keys, 2, 2)).tolist() == [1, 0, 1, 2, 0, 2]
    tokens, weights = ours(torch.eye(4)), ours(torch.ones(4, 1))
    weight = ours(torch.stack([torch.eye(4), 10 * torch.eye(4)]))
    index = ours(torch.tensor([[0], [0], [0], [1]]))
    got = hp.experts(tokens, index, weights, weight, weight, activation=lambda x: x, capacity_factor=1.0)
    assert torch.equal(theirs(got).diagonal(), torch.tensor([1.0, 1.0, 0.0, 100.0])), "two rows for each of two experts"


@pytest.mark.skipif(on_mindspore, reason="ranks of one process are PyTorch's")
def test_limits_are_those_of_each_rank():
    def work():
        mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        weight = hp.distribute_tensor(torch.stack([torch.eye(4), 10 * torch.eye(4)]), mesh, [hp.Shard(0)])
        index = torch.tensor([[0], [0], [0], [1]])
        got = []
        for once in (False, True):
            with dispatching(once_per_rank=once):
                got.append(
                    hp.experts(
                        torch.eye(4), index, torch.ones(4, 1), weight, weight, activation=abs, capacity_factor=1.0
                    )
                )
        return [one.diagonal().tolist() for one in got]

    assert threads(2).run(work) == [[[1.0, 1.0, 0.0, 100.0]] * 2] * 2


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="token_dispatcher='ring' is none of 'all_to_all', 'deredundency'"):
        hp.ExpertParallel("ring")


@run_on_ranks(2)
def test_what_a_style_cannot_do():
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    with pytest.raises(ValueError, match="it is for modules of experts"):
        hp.parallelize_module(hp.models.FeedForward(4, 4), mesh, hp.ExpertParallel())
    with pytest.raises(ValueError, match=r"takes a mesh of two axes, as mesh\['ep', 'tp'\]"):
        hp.parallelize_module(GroupedExperts(4, 4, 2), mesh, hp.ExpertTensorParallel())
    with pytest.raises(ValueError, match="way='some' is none of 'auto', 'dispatch', 'partial'"):
        check(*CASES_2["tokens and experts sharded"], "some")
    with pytest.raises(ValueError, match=r"up \(4, 24, 8\) has gate and up in one tensor.*give two tensors"):
        check(*CASES_2["features"], form="concatenated")
    weight, tokens = ours(torch.ones(2, 4, 4)), ours(torch.ones(2, 4))
    index = hp.distribute_tensor(ours(torch.tensor([[0], [1]])), mesh, [hp.Replicate()])
    with pytest.raises(ValueError, match="hidden is a plain tensor and top_k_index distributed"):
        hp.experts(tokens, index, ours(torch.ones(2, 1)), weight, weight, activation=abs)


@pytest.mark.skipif(on_mindspore, reason="modules of PyTorch")
def test_gate_and_up_in_one_tensor_are_not_sharded_by_features():
    def work():
        module = torch.nn.Module()
        module.gate_up_proj, module.runs_experts_operator = torch.nn.Parameter(torch.ones(2, 8, 4)), True
        with pytest.raises(ValueError, match="Module has gate and up in one tensor, 'gate_up_proj', whose parts"):
            hp.TensorParallel().apply(module, hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))

    threads(2).run(work)


@pytest.mark.skipif(on_mindspore, reason="models of transformers are PyTorch's")
def test_tokens_of_another_dtype_than_the_weights_of_hugging_face():
    transformers = pytest.importorskip("transformers")

    def work():
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_local_experts": 4}
        config = transformers.MixtralConfig(**sizes, experts_implementation="grouped_mm")
        torch.manual_seed(0)
        module = transformers.models.mixtral.modeling_mixtral.MixtralExperts(config).bfloat16()
        for weight in module.parameters():
            torch.nn.init.normal_(weight)
        given = torch.randn(3, 8), torch.tensor([[0, 1]] * 3), torch.rand(3, 2)
        want = module(*given)
        hp.ExpertParallel().apply(module, hp.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
        got = module(*given)
        assert got.dtype == want.dtype == torch.float32 and torch.allclose(got, want, rtol=0.05, atol=0.05)

    threads(2).run(work)
