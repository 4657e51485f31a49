"""Models whose parameters a wrapper reduces once a step: context parallelism sends nothing for them in between."""

import pytest

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.frameworks import assert_close, distribute_tensor, on_mindspore, ours
from tests.tensor_parallel.test_axes_of_llama import TOLERANCE, _built, _tokens
from tests.world import run_on_ranks

_platform = get_platform()


def hand_over(model, axes):
    """What a wrapper does before forward: leaves of its own in the place of the parameters; tied ones stay one."""
    made = {}
    for _, module in _platform.get_cells_and_names(model):
        for name, parameter in _platform.own_parameters(module).items():
            if id(parameter) not in made:
                value = hp.reduce_later(parameter.detach(), axes)
                made[id(parameter)] = (parameter, _platform.as_parameter(value, parameter.requires_grad))
            _platform.install_parameter(module, name, made[id(parameter)][1])
    return model


def _inputs(mesh):
    tokens = _tokens()[:1]  # of several rows MindSpore's embedding makes one, for which it gathers the sequence
    plain = [tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()]
    return plain, [distribute_tensor(part, mesh, [hp.Shard(1), hp.Replicate()]) for part in plain]


def _gradients(model, *inputs):
    """The loss, gradients by name as they lie, and what was sent over cp for them alone."""
    parameters = {name: one for name, one in _platform.parameters_dict(model).items() if one.requires_grad}
    with hp.CommRecorder() as recorder:
        loss, gradients = hp.value_and_grad(lambda: model(*inputs), list(parameters.values()))()
    return loss, dict(zip(parameters, gradients, strict=True)), recorder


def _whole(value):
    return value.full_tensor() if isinstance(value, hp.DTensor) else value


def _sums(recorder, mesh):
    """All-reduces over cp of what has the dims of a parameter."""
    line = list(mesh.line("cp"))
    found = [one for one in recorder.records if one.op == "all_reduce" and list(one.ranks) == line]
    return sum(len(one.shape) in (1, 2) and "float" in str(one.dtype).lower() for one in found)


@pytest.mark.sweep("mindspore")
@run_on_ranks(4, timeout=300)
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_nothing_is_sent_for_parameters_until_they_are_reduced(cp, sweep):
    mesh = hp.init_device_mesh("cpu", (cp, 4 // cp), mesh_dim_names=("cp", "tp"))
    plain, on_sequence = _inputs(mesh)
    for tied in (False, True):
        want_loss, want, _ = _gradients(_built(tied=tied), *ours(plain))
        for sequence_parallel in (False, True) if sweep else (not tied,):
            options = {"tied": tied, "sequence_parallel": sequence_parallel}
            by_law = _gradients(_built(mesh, "by hand", **options), *on_sequence)
            later = _gradients(hand_over(_built(mesh, "by hand", **options), "cp"), *on_sequence)
            num_weights = 2 * 7 + 2  # of two blocks, the embedding and the head; the norms sum over tp as well
            assert _sums(by_law[2], mesh) >= num_weights, by_law[2].table()
            assert _sums(later[2], mesh) == 0, later[2].table()
            assert len(by_law[2].records) - len(later[2].records) >= num_weights
            assert_close(_whole(later[0]), want_loss, **TOLERANCE)
            assert later[1].keys() == want.keys()
            for name, gradient in later[1].items():
                assert gradient.placements[0] == hp.Partial(), name
                assert_close(_whole(gradient), want[name], **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


@run_on_ranks(2, timeout=300)
def test_frozen_and_recomputed():
    mesh = hp.init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    plain, on_sequence = _inputs(mesh)

    def frozen(model):
        for name, parameter in _platform.parameters_dict(model).items():
            parameter.requires_grad = "attention" not in name
        return model

    _, want, _ = _gradients(frozen(_built()), *ours(plain))
    model = hand_over(frozen(_built(mesh, "by hand", sequence_parallel=False)), "cp")
    for place, block in enumerate(model.blocks):
        wrapped = _platform.ckpt_wrapper(block)
        if wrapped is not block:
            model.blocks[place] = wrapped
    _, got, recorder = _gradients(model, *on_sequence)
    assert _sums(recorder, mesh) == 0, recorder.table()
    assert len(got) == len(want) and not any("attention." in name for name in got)
    for gradient, wanted in zip(got.values(), want.values(), strict=True):
        assert_close(_whole(gradient), wanted, **TOLERANCE)


@pytest.mark.skipif(on_mindspore, reason="optimizers of PyTorch")
@run_on_ranks(2, timeout=300)
def test_an_optimizer_that_finds_them_unreduced_reduces_them():
    from importlib import import_module

    torch = import_module("torch")
    mesh = hp.init_device_mesh("cpu", (2, 1), mesh_dim_names=("cp", "tp"))
    plain, on_sequence = _inputs(mesh)
    models = [_built(), hand_over(_built(mesh, "by hand", sequence_parallel=False), "cp")]
    for model, inputs in zip(models, (plain, on_sequence), strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
        for _ in range(2):
            optimizer.zero_grad()
            model(*inputs).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert_close(_whole(other.detach()), one.detach(), **TOLERANCE)
