"""Drawings show what is there: the layouts of a run, the collectives between, as text and as well-formed SVG."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import models
from tests.world import run_on_ranks

only_on = "torch"  # draws models of PyTorch

PICTURE = Path(__file__).parents[2] / "docs" / "llama_block.svg"

# Two key heads on four ranks: their gather is seen, and why.
_TEXT = """\
Llama on tp=4
module parameters in out
embedding weight 30/tp x 16 2 x 8 2 x 8 x 16, partial sum over tp
~ reduce-scatter, 768 B sent 2 x 8/tp x 16
blocks.0 to blocks.1, all alike
attention_norm weight 16 2 x 8/tp x 16 2 x 8/tp x 16
~ all-gather, 768 B sent 2 x 8 x 16
attention.query weight 16/tp x 16 2 x 8 x 16 2 x 8 x 16/tp
attention.key weight 8/tp x 16 2 x 8 x 16 2 x 8 x 8/tp
~ all-gather, 384 B sent implicit for view
attention.value weight 8/tp x 16 2 x 8 x 16 2 x 8 x 8/tp
~ all-gather, 384 B sent implicit for view
attention.output weight 16 x 16/tp 2 x 8 x 16/tp
~ reduce-scatter, 768 B sent 2 x 8/tp x 16
feed_forward_norm weight 16 2 x 8/tp x 16 2 x 8/tp x 16
"""


def picture() -> str:
    """The picture of docs/tensor_parallel.md; call it on each of 4 ranks."""
    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = models.Llama(models.LlamaConfig(max_length=64))
    hp.parallelize_module(model, mesh, models.llama_plan(plain_outputs=False))
    return hp.draw(model, torch.zeros(4, 64, dtype=torch.long)).svg


@run_on_ranks(4)
def test_the_picture_in_the_docs_is_what_the_library_draws_now():
    assert picture() == PICTURE.read_text(), "run: python -m tests.tensor_parallel.make_picture"


@run_on_ranks(4)
def test_a_run_as_text():
    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = models.Llama(models.LlamaConfig(30, 16, 2, 4, 2, 24, 8))
    hp.parallelize_module(model, mesh, models.llama_plan(plain_outputs=False))
    with hp.CommRecorder() as recorder:
        drawing = hp.draw(model, torch.zeros(2, 8, dtype=torch.long))
    told = [" ".join(line.split()) for line in str(drawing).splitlines()]
    assert [line for line in told if line and "─" not in line][:15] == _TEXT.splitlines(), f"\n{drawing}"
    lines = [line for line in drawing.scene.lines if hasattr(line, "op")]
    assert [line.op for line in lines] == [record.op for record in recorder.records]
    assert all(len(module._forward_hooks) <= 2 for module in model.modules()), "hooks are left behind"
    root = ElementTree.fromstring(drawing.svg)
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "blocks.0 to blocks.1, all alike" in words
    assert words.count("reduce-scatter, 768 B") == 3


@run_on_ranks(2)
def test_a_model_that_fails_leaves_no_hooks():
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = hp.parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": hp.ColwiseParallel()})
    before = len(model[0]._forward_hooks), len(model[0]._forward_pre_hooks)
    with pytest.raises(RuntimeError):
        hp.draw(model, torch.zeros(2, 3))
    assert (len(model[0]._forward_hooks), len(model[0]._forward_pre_hooks)) == before


def _mesh():
    return hp.Layout((2, 2), ("dp", "tp"), init_backend=False)


def test_layouts_and_tensors_without_a_world():
    mesh = _mesh()
    pending = hp.Layout.from_placements(mesh.mesh, [hp.Partial(), hp.Shard(1)], 2)
    text = str(hp.draw({"x": mesh("dp", "None"), "both": mesh(("tp", "dp"), "None"), "y": pending}))
    for part in ("layouts on dp=2 x tp=2", "8/dp x 8", "8/tp/dp x 8", "8 x 8/tp, partial sum over dp"):
        assert part in text, text
    assert "5/dp x 3" in str(hp.draw(mesh("dp", "None"), (5, 3)))
    assert "scalar" in str(hp.draw(torch.tensor(1.0)))
    assert "weight 3 x 4" in str(hp.draw(nn.Linear(4, 3)))


def test_tiles_have_the_sizes_of_the_parts():
    """Five rows over two ranks: three and two fifths of the tile, and nothing for a rank without rows."""
    drawing = hp.draw(_mesh()("dp", "None"), (5, 3))
    parts = [rect for rect in ElementTree.fromstring(drawing.svg).iter() if rect.get("stroke-width") == "0.6"]
    assert [float(rect.get("height")) for rect in parts] == [18.0, 12.0]
    alone = hp.draw(_mesh()(("dp", "tp"), "None"), (2, 3))
    parts = [rect for rect in ElementTree.fromstring(alone.svg).iter() if rect.get("stroke-width") == "0.6"]
    assert [float(rect.get("height")) for rect in parts] == [15.0, 15.0]


def test_names_are_escaped_and_a_drawing_is_saved(tmp_path):
    drawing = hp.draw({"<a & b>": _mesh()("None", "tp")})
    drawing.save(tmp_path / "x.svg")
    words = [element.text for element in ElementTree.parse(tmp_path / "x.svg").iter() if element.text]
    assert "<a & b>" in words
    assert drawing._repr_svg_() == (tmp_path / "x.svg").read_text()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hp.draw("model"), "'value' is a str; give a model, a tensor, a layout"),
        (lambda: hp.draw({"x": 3}), "'x' is a int; give a model"),
        (lambda: hp.draw({}), "the dict is empty"),
        (lambda: hp.draw(_mesh()), "describes a mesh and no tensor yet"),
        (lambda: hp.draw(_mesh()("dp", "None"), (5,)), r"shape \(5,\) has 1 dims, but .* is for 2"),
        (lambda: hp.draw(torch.ones(2), torch.ones(2)), r"inputs are for a model, but Tensor is none; draw\(model"),
    ],
)
def test_what_cannot_be_drawn(call, said):
    with pytest.raises((TypeError, ValueError), match=said):
        call()
