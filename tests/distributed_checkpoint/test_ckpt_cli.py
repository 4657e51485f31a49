"""`hyper-parallel ckpt`: what it prints, its exit status, and checkpoints of all kinds turned into each other."""

import collections
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp
from typer.testing import CliRunner

import hyper_parallel as hp
from hyper_parallel import checkpoint as ckpt
from hyper_parallel.cli.main import app
from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.format.stored_files import StoredFiles
from hyper_parallel.core.distributed_checkpoint.tools.tensor_source import open_source

only_on = "torch"  # commands that read and write files; their checkpoints are made with PyTorch


def _run(*arguments, status=0):
    done = CliRunner().invoke(app, ["ckpt", *map(str, arguments)])
    assert done.exit_code == status, done.output + str(done.exception)
    return done.output


def _tensors():
    return {
        "model.layers.0.weight": torch.arange(35.0).reshape(7, 5),
        "model.layers.1.weight": torch.arange(35.0).reshape(7, 5).to(torch.bfloat16),
        "model.bias": torch.arange(5, dtype=torch.int64),
        "model.scalar": torch.tensor(3.0, dtype=torch.float64),
        "model.none": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
    }


OBJECTS = {"step": 7, "options": {"lr": 0.5, "betas": (0.9, 0.99), "names": ["a", "b"]}}


def _save_ours(folder) -> None:
    ckpt.save({**_tensors(), **OBJECTS}, checkpoint_id=folder, no_dist=True)


def _load_ours(folder) -> dict:
    """All tensors (blank ones filled) and objects of a checkpoint of ours."""
    source = open_source(folder)
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64, "float64": torch.float64}
    state = {
        name: torch.zeros(shape, dtype=names.get(dtype, torch.bool)) for name, (shape, dtype) in source.known().items()
    }
    state |= dict.fromkeys(source.objects())
    source.close()
    ckpt.load(state, checkpoint_id=folder, no_dist=True)
    return state


def _assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if torch.is_tensor(value):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def test_ls_and_show(tmp_path):
    for step in (9, 10):
        _save_ours(tmp_path / f"step-{step}")
    save_file({"w": torch.zeros(3)}, (tmp_path / "hub").mkdir() or tmp_path / "hub" / "model.safetensors")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metadata.json").write_text("{}")
    (tmp_path / "nothing").mkdir()
    lines = _run("ls", tmp_path).splitlines()
    assert lines[0].split() == ["checkpoint", "kind", "tensors", "objects", "size", "written"]
    listed = [Path(line.split()[0]).name for line in lines[1:]]
    assert sorted(listed) == ["broken", "hub", "step-10", "step-9"]
    assert listed.index("step-9") < listed.index("step-10")
    assert "unreadable: " in lines[1 + listed.index("broken")]
    (mine,) = [one for one in json.loads(_run("ls", tmp_path, "--json")) if one["path"].endswith("step-9")]
    assert (mine["kind"], mine["tensors"], mine["objects"], mine["bytes"]) == ("hyper-parallel", 6, 2, 260)
    assert "no checkpoints in" in _run("ls", tmp_path / "nothing")
    assert "there is no folder" in _run("ls", tmp_path / "absent", status=2)

    text = _run("show", tmp_path / "step-9")
    assert "hyper-parallel, 6 tensors (260 B), 2 objects" in text
    assert "model.layers.1.weight  bfloat16[7, 5]  70 B   1 chunk" in text
    assert '"lr":0.5' in text
    entries = json.loads(_run("show", tmp_path / "step-9", "model.layers.*", "--json"))["tensors"]
    assert [entry["name"] for entry in entries] == ["model.layers.0.weight", "model.layers.1.weight"]
    assert "no checkpoint at" in _run("show", tmp_path / "nothing", status=2)
    ckpt.save({"a\n\x1b[2J\ud800": torch.zeros(2)}, checkpoint_id=tmp_path / "odd")
    assert "\n  a\\n\\x1b[2J\\ud800  float32[2]" in _run("show", tmp_path / "odd")


def test_verify(tmp_path):
    _save_ours(tmp_path / "c")
    assert "every byte is sound" in _run("verify", tmp_path / "c")
    (data,) = (tmp_path / "c").glob("*.safetensors")
    content = data.read_bytes()
    for place in (3, len(content) // 2, len(content) - 1):
        data.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert f"{data.name}' is damaged" in _run("verify", tmp_path / "c", status=1)
    data.write_bytes(content[:-1])
    assert "cut short" in _run("verify", tmp_path / "c", status=1)
    data.unlink()
    assert "is missing" in _run("verify", tmp_path / "c", status=1)
    assert "no checkpoint at" in _run("verify", tmp_path / "absent", status=2)
    data.write_bytes(content)
    (tmp_path / "c" / "metadata.json").unlink()
    assert "files of a save, but no metadata.json" in " ".join(_run("verify", tmp_path / "c", status=2).split())

    (tmp_path / "hub").mkdir()
    save_file({"w": torch.zeros(30)}, tmp_path / "hub" / "model.safetensors")
    assert "hugging-face files have no checksums" in _run("verify", tmp_path / "hub")
    path = tmp_path / "hub" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "is not a whole safetensors file" in _run("verify", tmp_path / "hub", status=1)


def test_diff(tmp_path):
    _save_ours(tmp_path / "a")
    other = _tensors()
    other["model.layers.0.weight"][2, 3] += 0.25
    other["model.layers.1.weight"][0, 0] = float("nan")
    other["model.bias"] = other["model.bias"].to(torch.int32)
    del other["flags"]
    ckpt.save({**other, **OBJECTS, "step": 8, "more": 1}, checkpoint_id=tmp_path / "b", no_dist=True)
    assert _run("diff", tmp_path / "a", tmp_path / "a") == "no differences\n"
    found = {
        one["name"]: one["what"] for one in json.loads(_run("diff", tmp_path / "a", tmp_path / "b", "--json", status=1))
    }
    assert found == {
        "flags": "only in the first",
        "model.bias": "int64[5] in the first, int32[5] in the second",
        "model.layers.0.weight": "1 of 35 elements differ, by up to 0.25",
        "model.layers.1.weight": "1 of 35 elements differ",
        "more": "only in the second",
        "step": "the object is 7 in the first, 8 in the second",
    }
    assert "model.layers.0.weight  1 of 35 elements differ" in _run("diff", tmp_path / "a", tmp_path / "b", status=1)
    assert "error: there is no checkpoint" in _run("diff", tmp_path / "a", tmp_path / "absent", status=2)


RULES = [
    {"files": "hub.*.{n}", "ours": "*.weight", "stack": 0},
    {"files": "t", "ours": "model.bias"},
    {"files": "turned", "ours": "m", "transpose": [1, 0]},
]


def test_to_hugging_face_and_back(tmp_path):
    _save_ours(tmp_path / "c")
    output = _run("convert", tmp_path / "c", tmp_path / "hub", "--to", "hugging-face", "--max-file-size", "150")
    assert "left out 2 objects" in output and "6 tensors written" in output
    assert len(list((tmp_path / "hub").glob("*.safetensors"))) > 1
    _run("convert", tmp_path / "hub", tmp_path / "back", "--max-file-size", "64")
    _assert_same(_load_ours(tmp_path / "back"), _tensors())
    assert "every byte is sound" in _run("verify", tmp_path / "back")
    sizes = [file.data_bytes for file in StoredFiles(tmp_path / "back", ckpt.FileSystemReader()).index.files]
    assert max(sizes) <= 64, "tensors that are larger than a file are cut"
    assert json.loads(_run("diff", tmp_path / "c", tmp_path / "back", "--json", status=1)) == [
        {"name": name, "what": "only in the first"} for name in sorted(OBJECTS)
    ]
    assert "already; pass --overwrite" in _run("convert", tmp_path / "c", tmp_path / "back", status=2)
    _run("convert", tmp_path / "c", tmp_path / "back", "--overwrite")
    assert _run("diff", tmp_path / "c", tmp_path / "back") == "no differences\n"

    # A part, under other names.
    _run(
        "convert", tmp_path / "c", tmp_path / "part", "--to", "hugging-face", "--only", "model.**", "--strip", "model."
    )
    part = load_file(tmp_path / "part" / "model.safetensors")
    _assert_same(part, {n.removeprefix("model."): t for n, t in _tensors().items() if n.startswith("model.")})
    assert "nothing in" in _run("convert", tmp_path / "c", tmp_path / "x", "--only", "nobody", status=2)


def test_mappings_on_the_way(tmp_path):
    (tmp_path / "hub").mkdir()
    files = {f"hub.{layer}.{n}": torch.full((2, 3), 10.0 * layer + n) for layer in range(2) for n in range(3)}
    files |= {"t": torch.arange(4), "turned": torch.arange(6.0).reshape(2, 3), "same": torch.ones(1)}
    save_file(files, tmp_path / "hub" / "model.safetensors")
    (tmp_path / "rules.json").write_text(json.dumps(RULES))
    _run("convert", tmp_path / "hub", tmp_path / "c", "--mapping", tmp_path / "rules.json", "--max-file-size", "50")
    expected = {f"{n}.weight": torch.stack([files[f"hub.{n}.{i}"] for i in range(3)]) for n in range(2)}
    expected |= {"model.bias": files["t"], "m": files["turned"].T, "same": files["same"]}
    _assert_same(_load_ours(tmp_path / "c"), expected)
    _run("convert", tmp_path / "c", tmp_path / "again", "--to", "hugging-face", "--mapping", tmp_path / "rules.json")
    _assert_same(load_file(tmp_path / "again" / "model.safetensors"), files)
    for text, said in (("[", "is not JSON"), ('{"files": "a"}', "a mapping is a list of rules, got {'files'")):
        (tmp_path / "rules.json").write_text(text)
        assert said in _run("convert", tmp_path / "c", tmp_path / "x", "--mapping", tmp_path / "rules.json", status=2)
    (tmp_path / "rules.json").unlink()
    assert "there is no file" in _run(
        "convert", tmp_path / "c", tmp_path / "x", "--mapping", tmp_path / "rules.json", status=2
    )
    assert "is a URL" in _run("convert", tmp_path / "c", "memory://x", "--to", "hugging-face", status=2)
    assert not (tmp_path / "x").exists()

    # What is written is counted, not what is read; and a prefix must leave all names different.
    save_file({"qkv": torch.arange(12.0).reshape(6, 2)}, tmp_path / "hub" / "model.safetensors")
    (tmp_path / "rules.json").write_text('[{"files": "qkv", "ours": ["q", "k", "v"], "join": 0}]')
    mapping = ["--mapping", tmp_path / "rules.json"]
    assert "3 tensors written" in _run("convert", tmp_path / "hub", tmp_path / "split", *mapping)
    assert "1 tensor written" in _run(
        "convert", tmp_path / "split", tmp_path / "back", "--to", "hugging-face", *mapping
    )
    assert _run("diff", tmp_path / "hub", tmp_path / "back") == "no differences\n"
    ckpt.save({"a.x": torch.ones(1), "x": torch.zeros(1)}, checkpoint_id=tmp_path / "two", no_dist=True)
    refused = _run("convert", tmp_path / "two", tmp_path / "x", "--strip", "a.", status=2)
    assert "without 'a.' two names are the same: a.x and others" in refused


class _Anything:
    """Not plain data."""

    def __eq__(self, other):
        return isinstance(other, _Anything)

    __hash__ = None


def _save_torch(folder, with_object: bool) -> None:
    from torch.distributed import device_mesh, tensor

    mesh = device_mesh.init_device_mesh("cpu", (2,))
    state = {}
    for name, value in _tensors().items():
        state[name] = tensor.distribute_tensor(value, mesh, [tensor.Shard(0)]) if value.ndim == 2 else value
    state |= OBJECTS
    if with_object:
        state["thing"] = _Anything()
    dcp.save(state, checkpoint_id=folder)


def test_from_torch(tmp_path, worlds):
    world = worlds(2, 120)
    world.run(_save_torch, tmp_path / "torch", False)
    text = _run("show", tmp_path / "torch")
    assert "torch, 6 tensors" in text and "model.layers.0.weight  float32[7, 5]   140 B  2 chunks" in text
    _run("convert", tmp_path / "torch", tmp_path / "c")
    found = _load_ours(tmp_path / "c")
    objects = {name: value for name, value in found.items() if not torch.is_tensor(value)}
    _assert_same({name: value for name, value in found.items() if torch.is_tensor(value)}, _tensors())
    assert objects == {"step": 7, "options.lr": 0.5, "options.betas": (0.9, 0.99), "options.names": ["a", "b"]}
    assert _run("diff", tmp_path / "torch", tmp_path / "c") == "no differences\n"
    assert "no checksums" in _run("verify", tmp_path / "torch")
    _run("convert", tmp_path / "torch", tmp_path / "hub", "--to", "hugging-face")
    _assert_same(load_file(tmp_path / "hub" / "model.safetensors"), _tensors())

    # Directly into a state dict, nested and cut, without torch's own reader.
    ckpt.load_torch(
        state := {**{n: torch.zeros_like(t) for n, t in _tensors().items()}, "step": None}, tmp_path / "torch"
    )
    _assert_same(state, {**_tensors(), "step": 7})
    world.run(_load_torch_cut, tmp_path / "torch")

    data = tmp_path / "torch" / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-700])
    assert "cut short" in _run("verify", tmp_path / "torch", status=1)
    data.unlink()
    assert "is missing" in _run("verify", tmp_path / "torch", status=1)

    world.run(_save_torch, tmp_path / "unsafe", True)
    whole = {path: path.read_bytes() for path in (tmp_path / "unsafe").glob("*.distcp")}
    for path, content in whole.items():
        path.write_bytes(content.replace(b"PK", b"XX"))
    problems = _run("verify", tmp_path / "unsafe", status=1)
    for what in ("cannot be loaded", "is not a tensor that torch wrote"):
        assert f"{what}: it does not end like an archive of torch's" in problems
    for path, content in whole.items():
        path.write_bytes(content)
    assert "no checksums" in _run("verify", tmp_path / "unsafe")
    refused = _run("convert", tmp_path / "unsafe", tmp_path / "x", status=2)
    assert "objects that are more than plain data: 'thing'" in refused and "--allow-pickle" in refused
    assert not (tmp_path / "x").exists()
    _run("convert", tmp_path / "unsafe", tmp_path / "x", "--skip-objects")
    _run("convert", tmp_path / "unsafe", tmp_path / "y", "--allow-pickle")
    assert "pickle, not loaded" in _run("show", tmp_path / "y")
    state = {"thing": None}
    ckpt.load(state, checkpoint_id=tmp_path / "y", no_dist=True, planner=ckpt.StandardLoadPlanner(allow_pickle=True))
    assert state["thing"] == _Anything()


def _load_torch_cut(folder) -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    whole = _tensors()["model.layers.0.weight"]
    cut = hp.distribute_tensor(torch.zeros(7, 5), mesh, [hp.Shard(1)])
    ckpt.load_torch({"model": {"layers": {"0": {"weight": cut}}}}, folder)
    assert torch.equal(cut.full_tensor(), whole)
    if torch.distributed.get_rank() == 1:
        cut = torch.zeros(5, 7)
    with pytest.raises(ckpt.CheckpointError, match=r"rank 1: .*'model.layers.0.weight' has shape \(7, 5\) .*\(5, 7\)"):
        ckpt.load_torch({"model.layers.0.weight": cut}, folder)
    with pytest.raises(ckpt.CheckpointError, match=r"all ranks: .* lacks 'nothing'"):
        ckpt.load_torch({"nothing": torch.zeros(1)}, folder)


def test_a_pickle_runs_nothing(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    (tmp_path / "t").mkdir()
    for content in (Bomb(), collections.OrderedDict(a=Bomb())):
        (tmp_path / "t" / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(CorruptCheckpointError, match=r"names posix.mkdir, which does not belong"):
            open_source(tmp_path / "t")
    (tmp_path / "t" / ".metadata").write_bytes(b"no pickle")
    assert "is not the metadata of a torch checkpoint" in _run("show", tmp_path / "t", status=2)
    assert not (tmp_path / "boom").exists()


def _save_cut(folder: Path) -> None:
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    aliases = {"model.layers.0.weight": ("tp", "None"), "model.layers.1.weight": (("dp", "tp"), "None")}
    state = {
        name: hp.distribute_tensor(value, mesh, aliases[name]) if name in aliases else value
        for name, value in _tensors().items()
    }
    ckpt.save({**state, **OBJECTS}, checkpoint_id=folder)


def test_reshard(tmp_path, worlds):
    """The chunks are those that a job on that mesh would have written."""
    worlds(4, 120).run(_save_cut, tmp_path / "job")
    assert "model.layers.0.weight  float32[7, 5]   140 B  2 chunks  [tp, -] on (dp=2, tp=2)" in _run(
        "show", tmp_path / "job"
    )
    _save_ours(tmp_path / "c")
    cuts = ["--shard", "*.layers.0.weight=tp,None", "--shard", "model.layers.1.weight=dp+tp,None"]
    _run("reshard", tmp_path / "c", tmp_path / "again", "--mesh", "dp=2,tp=2", *cuts)
    assert _run("diff", tmp_path / "job", tmp_path / "again") == "no differences\n"
    job, mine = open_source(tmp_path / "job"), open_source(tmp_path / "again")
    for name in ("model.layers.0.weight", "model.layers.1.weight"):
        assert job.boxes(name) == mine.boxes(name)
        assert job.layout(name) == mine.layout(name)
    assert len(mine.index.files) == 4
    _run("reshard", tmp_path / "job", tmp_path / "whole", "--mesh", "x=1")
    assert _run("diff", tmp_path / "c", tmp_path / "whole") == "no differences\n"
    for arguments, said in (
        (["--mesh", "dp"], "is not of the form 'dp=2,tp=4'"),
        (["--mesh", "dp=2", "--shard", "tp,None"], "is not of the form 'name=axis,axis'"),
        (["--mesh", "dp=2", "--shard", "**=tp"], "names the axis 'tp'; the mesh has dp"),
        (["--mesh", "dp=2", "--shard", "model.bias=dp,None"], "gives 2 dims, and 'model.bias' has shape"),
        (["--mesh", "dp=2", "--shard", "**=dp,dp"], "uses an axis twice"),
        (
            ["--mesh", "dp=2", "--shard", "model.basi=dp"],
            "no tensor fits the sharding of 'model.basi'; there are model.",
        ),
        (["--mesh", "dp=0"], "of size 1 or more"),
        (["--mesh", "dp=2,dp=3"], "'dp' is given twice"),
        (["--mesh", "dp=2", "--shard", "a=dp", "--shard", "a=None"], "'a' is given twice"),
    ):
        assert said in _run("reshard", tmp_path / "c", tmp_path / "x", *arguments, status=2)
    assert not (tmp_path / "x").exists()


def test_the_commands_need_no_framework(tmp_path):
    _save_ours(tmp_path / "c")
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    code = """if True:
        import sys
        from hyper_parallel.cli.main import app
        for arguments in (["ls", "."], ["show", "c"], ["verify", "c"], ["diff", "c", "d"],
                          ["convert", "c", "hub", "--to", "hugging-face"], ["convert", "hub", "e"],
                          ["reshard", "c", "f", "--mesh", "dp=2", "--shard", "*.layers.*.weight=dp,None"]):
            app(["ckpt", *arguments], standalone_mode=False)
        assert not {"torch", "mindspore"} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
