"""``torch.func`` on distributed tensors: right where gradients are asked for, clear errors elsewhere."""

import pytest
import torch
from torch import func, nn

import hyper_parallel as hp
from tests.shard.validator import layouts_of, tensor
from tests.world import run_on_ranks

only_on = "torch"  # torch.func


def _loss(x, params):
    return (x @ params["weight"] + params["bias"]).sin().square().mean()


def _whole(tree):
    return torch.utils._pytree.tree_map(lambda t: t.full_tensor() if isinstance(t, hp.DTensor) else t, tree)


@run_on_ranks(2)
def test_gradients_of_functions() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    x, params = tensor(5, 4), {"weight": tensor(4, 3, seed=1), "bias": tensor(3, seed=2)}
    programs = {
        "grad": lambda x, p: func.grad(_loss)(x, p),
        "of all": lambda x, p: func.grad(_loss, argnums=(0, 1))(x, p),
        "value": lambda x, p: func.grad_and_value(_loss, argnums=1)(x, p),
        "aux": lambda x, p: func.grad(lambda x: (_loss(x, p), x.exp()), has_aux=True)(x),
        "of a gradient": lambda x, p: func.grad(lambda x: func.grad(_loss)(x, p).square().sum())(x),
        "vjp": lambda x, p: func.vjp(_loss, x, p)[1](torch.ones_like(_loss(x, p))),
        "vjp of a vector": lambda x, p: func.vjp(lambda x: (x @ p["weight"]).sum(1), x)[1](
            (x @ p["weight"]).cos().sum(1)
        ),
    }
    for layout in layouts_of(mesh, x, True):
        for name, program in programs.items():
            expected = program(x, params)
            ours = program(
                hp.distribute_tensor(x, mesh, layout),
                {
                    "weight": hp.distribute_tensor(params["weight"], mesh, [hp.Shard(1)]),
                    "bias": hp.distribute_tensor(params["bias"], mesh, [hp.Replicate()]),
                },
            )
            found = torch.utils._pytree.tree_leaves(ours)
            assert all(isinstance(one, hp.DTensor) and not one.requires_grad for one in found), name
            torch.testing.assert_close(_whole(ours), expected, msg=lambda text, n=name: f"{n}: {text}")


@run_on_ranks(2)
def test_functional_call_with_gradients() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    module = nn.Linear(4, 3, dtype=torch.float64)
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.5)
    x = tensor(6, 4)

    def loss(params, x):
        return func.functional_call(module, params, (x,)).tanh().sum()

    expected = func.grad(loss)(dict(module.named_parameters()), x)
    params = {name: hp.distribute_tensor(p.detach(), mesh, [hp.Shard(0)]) for name, p in module.named_parameters()}
    ours = func.grad(loss)(params, hp.distribute_tensor(x, mesh, [hp.Shard(0)]))
    torch.testing.assert_close(_whole(ours), {name: value.detach() for name, value in expected.items()})


@run_on_ranks(2)
def test_what_cannot_be_transformed_says_what_to_write() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    x = hp.distribute_tensor(tensor(4, 3), mesh, [hp.Shard(0)])
    with pytest.raises(
        RuntimeError, match=r"vmap cannot map over a distributed tensor of shape \(4, 3\).*custom_shard"
    ):
        func.vmap(torch.sin)(x)
    with pytest.raises(RuntimeError, match=r"forward-mode derivatives .*torch\.autograd\.functional\.jvp"):
        func.jvp(torch.sin, (x,), (x,))
    with pytest.raises(RuntimeError, match=r"jacfwd and hessian map too: use torch\.autograd\.functional\.jacobian"):
        func.jacfwd(torch.sin)(x)
    with pytest.raises(RuntimeError, match=r"torch\.func\.jacrev .*torch\.autograd\.functional\.jacobian"):
        func.jacrev(torch.sin)(x)
    with pytest.raises(RuntimeError, match="functionalize cannot trace distributed tensors"):
        func.functionalize(torch.sin)(x)
    with pytest.raises(RuntimeError, match=r"torch\.func\.linearize .*torch\.autograd\.functional\.jvp"):
        func.linearize(torch.sin, x)
    with pytest.raises(RuntimeError, match=r"must return a tensor without dims, got one of shape \(4, 3\)"):
        func.grad(torch.sin)(x)
    # What the messages recommend works.
    plain = tensor(4, 3)
    rows = torch.autograd.functional.jacobian(lambda x: x.sin().sum(1), x)
    torch.testing.assert_close(rows.full_tensor(), torch.autograd.functional.jacobian(lambda x: x.sin().sum(1), plain))
    _, tangent = torch.autograd.functional.jvp(torch.sin, x, x)
    torch.testing.assert_close(tangent.full_tensor(), plain.cos() * plain)
    # Plain tensors go on as ever.
    torch.testing.assert_close(func.vmap(func.grad(torch.sin))(plain[0]), plain[0].cos())
