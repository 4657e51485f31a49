"""Folders of safetensors files as the Hugging Face hub has them, into and out of tensors cut over ranks."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hyper_parallel as hp
from hyper_parallel.core.distributed_checkpoint.base.errors import CheckpointError, CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.foreign import hugging_face
from hyper_parallel.core.distributed_checkpoint.foreign.hugging_face import load_hugging_face, save_hugging_face
from hyper_parallel.core.distributed_checkpoint.foreign.safetensors_folder import SafetensorsFolder
from tests.world import run_on_ranks

only_on = "torch"  # folders and models of transformers, which are PyTorch's

HEADS, KV_HEADS, HEAD, HIDDEN, INNER, EXPERTS, VOCAB, LAYERS = 4, 2, 3, 10, 7, 3, 11, 2

# Ours: one matrix for queries, keys and values; expert weights stacked and transposed; no "model." in front.
RULES = [
    {"files": "**.inv_freq", "drop": True},
    {
        "files": [f"model.layers.*.self_attn.{n}_proj.weight" for n in "qkv"],
        "ours": "layers.*.qkv",
        "join": 0,
        "sizes": [HEADS, KV_HEADS, KV_HEADS],
    },
    {
        "files": [f"model.layers.*.mlp.experts.{{n}}.{n}_proj.weight" for n in ("gate", "up")],
        "ours": "layers.*.gate_up",
        "stack": 0,
        "join": 2,
        "transpose": [1, 0],
    },
    {"files": "model.layers.*.mlp.down.weight", "ours": "layers.*.down", "transpose": [1, 0]},
    {"files": "lm_head.weight", "ours": "lm_head.weight"},
    {"files": "model.**", "ours": "**"},
]


def _files(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A small model of the usual names."""
    generator = torch.Generator().manual_seed(1)

    def make(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    tensors = {"model.embed_tokens.weight": make(VOCAB, HIDDEN), "model.norm.weight": make(HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors[f"{name}.self_attn.q_proj.weight"] = make(HEADS * HEAD, HIDDEN)
        tensors[f"{name}.self_attn.k_proj.weight"] = make(KV_HEADS * HEAD, HIDDEN)
        tensors[f"{name}.self_attn.v_proj.weight"] = make(KV_HEADS * HEAD, HIDDEN)
        for expert in range(EXPERTS):
            tensors[f"{name}.mlp.experts.{expert}.gate_proj.weight"] = make(INNER, HIDDEN)
            tensors[f"{name}.mlp.experts.{expert}.up_proj.weight"] = make(INNER, HIDDEN)
        tensors[f"{name}.mlp.down.weight"] = make(HIDDEN, INNER)
        tensors[f"{name}.self_attn.rotary.inv_freq"] = make(HEAD)
    return tensors


def _ours(files: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the files mean, computed plainly."""
    ours = {"embed_tokens.weight": files["model.embed_tokens.weight"], "norm.weight": files["model.norm.weight"]}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        ours[f"layers.{layer}.qkv"] = torch.cat([files[f"{name}.self_attn.{n}_proj.weight"] for n in "qkv"])
        experts = [
            torch.cat([files[f"{name}.mlp.experts.{e}.{n}_proj.weight"].T for n in ("gate", "up")], dim=1)
            for e in range(EXPERTS)
        ]
        ours[f"layers.{layer}.gate_up"] = torch.stack(experts)
        ours[f"layers.{layer}.down"] = files[f"{name}.mlp.down.weight"].T
    return ours


def _write_folder(folder: Path, tensors: dict[str, torch.Tensor], num_files: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    names = list(tensors)
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        mine = names[number::num_files]
        save_file({name: tensors[name].contiguous() for name in mine}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _blank(ours, mesh, shift, dtype=torch.bfloat16):
    """DTensors without values, each under another layout."""
    state = {}
    for number, (name, value) in enumerate(ours.items()):
        choices = [[hp.Replicate()] * mesh.ndim]
        for dim in range(value.ndim):
            choices.append([hp.Shard(dim)] + [hp.Replicate()] * (mesh.ndim - 1))
            choices.append([hp.Shard(dim)] * mesh.ndim)
        layout = choices[(number + shift) % len(choices)]
        state[name] = hp.distribute_tensor(torch.zeros(value.shape, dtype=dtype), mesh, layout)
    return state


def _read(folder) -> dict[str, torch.Tensor]:
    """All tensors, with the library that everybody reads such folders with."""
    index = Path(folder) / "model.safetensors.index.json"
    if not index.exists():
        return load_file(Path(folder) / "model.safetensors")
    found = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        with safe_open(Path(folder) / file, framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


@run_on_ranks(4)
def test_into_cut_tensors_and_back(tmp_path: Path) -> None:
    meshes = [hp.init_device_mesh("cpu", (4,)), hp.init_device_mesh("cpu", (2, 2))]
    files = _files()
    ours = _ours(files)
    rank = torch.distributed.get_rank()
    if rank == 0:
        _write_folder(tmp_path / "hub", files)
    torch.distributed.barrier()
    for shift in range(6):
        mesh = meshes[shift % 2]
        state = _blank(ours, mesh, shift)
        source = SafetensorsFolder(tmp_path / "hub")
        load_hugging_face(state, source, mapping=RULES)
        needed = sum(value.to_local().numel() * 2 for value in state.values())
        assert source.bytes_read == needed, "each rank reads its own blocks and nothing else"
        for name, value in state.items():
            assert torch.equal(value.full_tensor(), ours[name]), name

        # A few small files, one file for each tensor, one file.
        for max_bytes in (500, 1, 1 << 20):
            save_hugging_face(state, tmp_path / "out", mapping=RULES, max_shard_bytes=max_bytes)
            if rank == 0:
                found = _read(tmp_path / "out")
                assert found.keys() == {name for name in files if "inv_freq" not in name}
                for name, value in found.items():
                    assert torch.equal(value, files[name]), name
                sizes = [os.path.getsize(path) for path in (tmp_path / "out").glob("*.safetensors")]
                assert (len(sizes) == 1) == (max_bytes > 1 << 19)
                assert not list(tmp_path.glob(".*")), "leftovers"
            torch.distributed.barrier()


@run_on_ranks(2)
def test_plain_tensors_ties_and_casts(tmp_path: Path) -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    files = {name: value for name, value in _files(torch.float32).items() if "inv_freq" not in name}
    ours = _ours(files)
    rank = torch.distributed.get_rank()
    if rank == 0:
        _write_folder(tmp_path / "hub", files)
    torch.distributed.barrier()

    state = _blank(ours, mesh, 1, torch.float32)
    state["lm_head.weight"] = state["embed_tokens.weight"]  # tied: the files have it once
    state["norm.weight"] = torch.nn.Parameter(torch.zeros(HIDDEN))  # not distributed
    load_hugging_face(state, tmp_path / "hub", mapping=RULES)
    for name, value in ours.items():
        mine = state[name]
        assert torch.equal(mine.full_tensor() if isinstance(mine, hp.DTensor) else mine, value), name
    save_hugging_face(state, tmp_path / "out", mapping=RULES)
    if rank == 0:
        assert _read(tmp_path / "out").keys() == files.keys()

    wide = _blank(ours, mesh, 2, torch.float64)
    with pytest.raises(CheckpointError, match=r"'embed_tokens.weight' is float32 in the files and float64 here; pass"):
        load_hugging_face(wide, tmp_path / "hub", mapping=RULES)
    load_hugging_face(wide, tmp_path / "hub", mapping=RULES, cast=True)
    for name, value in wide.items():
        assert torch.equal(value.full_tensor(), ours[name].double()), name

    # Files by rank: what only one rank lacks is an error on both, and nobody waits for ever.
    if rank == 1:
        state["mine alone"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"rank 1: .*not in the files: mine alone \(allow_missing=True"):
        load_hugging_face(state, tmp_path / "hub", mapping=RULES)
    with pytest.raises(CheckpointError, match=r"the ranks have different shapes or dtypes for 'mine alone'"):
        save_hugging_face({**state, "mine alone": torch.zeros(1 + rank)}, tmp_path / "never", mapping=RULES)
    if rank == 1:
        state["mine alone"] = 3
    with pytest.raises(CheckpointError, match="rank 1: TypeError: 'mine alone' is a int"):
        save_hugging_face(state, tmp_path / "never", mapping=RULES)
    del state["norm.weight"]
    state.pop("mine alone", None)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # It still gathers with the others.
            patch.setattr(hugging_face, "write_at", _full_disk)
        with pytest.raises(CheckpointError, match=r"failed on rank 1: OSError: .*No space left"):
            save_hugging_face(state, tmp_path / "never", max_shard_bytes=500)
    assert not (tmp_path / "never").exists()


def _full_disk(*_args):
    raise OSError(28, "No space left on device")


DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def test_dtypes_shapes_and_older_weights(tmp_path):
    tensors = {str(dtype): (torch.arange(6).reshape(2, 3) % 2).to(dtype) for dtype in DTYPES}
    tensors |= {"none": torch.zeros(0, 3), "one": torch.ones(1), "scalar": torch.tensor(3.0)}
    blank = {name: torch.zeros_like(value) for name, value in tensors.items()}
    other = {"else": torch.zeros(3)}

    def check(found, expected):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
            assert torch.equal(_bits(found[name]), _bits(value)), name

    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    for value, max_bytes in ((other, 9), (tensors, 10), (tensors, 10), (other, 99), (other, 99), (tensors, 50)):
        save_hugging_face(value, tmp_path / "m", max_shard_bytes=max_bytes, no_dist=True)
        check(_read(tmp_path / "m"), value)
        weights = {"model.safetensors"}
        index = tmp_path / "m" / "model.safetensors.index.json"
        if index.exists():
            weights = {index.name, *json.loads(index.read_text())["weight_map"].values()}
        left = {path.name for path in (tmp_path / "m").iterdir()} - weights
        assert left == {"config.json"}, "nothing of the older weights is left"
    load_hugging_face(blank, tmp_path / "m", no_dist=True)
    check(blank, tensors)

    with pytest.raises(TypeError, match="'x' has dtype complex128, which safetensors files cannot hold"):
        save_hugging_face({"x": torch.zeros(1, dtype=torch.complex128)}, tmp_path / "m", no_dist=True)
    with pytest.raises(TypeError, match="'x' is a int; safetensors files hold tensors only"):
        save_hugging_face({"x": 3}, tmp_path / "m", no_dist=True)
    check(_read(tmp_path / "m"), tensors)


def _cut_short(folder):
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def _damaged_header(folder):
    path = folder / "model-00001-of-00003.safetensors"
    data = bytearray(path.read_bytes())
    data[20] ^= 0x80
    path.write_bytes(data)


def _header(text):
    """Replaces the header of the first file."""

    def damage(folder):
        data = text.encode() + b" " * (-len(text) % 8)
        content = len(data).to_bytes(8, "little") + data + bytes(8)
        (folder / "model-00001-of-00003.safetensors").write_bytes(content)

    return damage


_F32 = '{"dtype": "F32", "shape": %s, "data_offsets": %s}'


@pytest.mark.parametrize(
    ("damage", "kind", "said"),
    [
        (_header('{"a": %s}' % (_F32 % ("[-1, -2]", "[0, 8]"))), CorruptCheckpointError, r"'a' has shape \[-1, -2\]"),
        (_header('{"a": %s}' % (_F32 % ("[2.0]", "[0, 8]"))), CorruptCheckpointError, r"'a' has shape \[2.0\]"),
        (_header('{"a": %s}' % (_F32 % ("[2]", "[-8, 0]"))), CorruptCheckpointError, r"lies at \[-8, 0\]"),
        (_header('{"a": %s}' % (_F32 % ("[2]", "[8, 16]"))), CorruptCheckpointError, "the header and 'a' have a gap"),
        (_header('{"a": %s}' % (_F32 % ("[3]", "[0, 8]"))), CorruptCheckpointError, "'a' is not whole"),
        (
            _header('{"a": %s, "a": %s}' % ((_F32 % ("[1]", "[0, 4]"),) * 2)),
            CorruptCheckpointError,
            "'a' is named twice",
        ),
        (
            _header('{"a": %s, "b": %s}' % ((_F32 % ("[1]", "[0, 4]"),) * 2)),
            CorruptCheckpointError,
            "'a' and 'b' overlap",
        ),
        (_header("[" * 100000), CorruptCheckpointError, "is not a whole safetensors file"),
        (_cut_short, CorruptCheckpointError, "model-00002-of-00003.safetensors' .* is not a whole safetensors file"),
        (_damaged_header, CorruptCheckpointError, "model-00001-of-00003.safetensors' .* is not a whole"),
        (
            lambda f: (f / "model-00003-of-00003.safetensors").unlink(),
            FileNotFoundError,
            r"model-00003-of-00003.safetensors' is named in 'model.safetensors.index.json' but is not there",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("{"),
            CorruptCheckpointError,
            "is not an index of safetensors files",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}'),
            CorruptCheckpointError,
            "names what are no files of its folder: 5",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../x.safetensors"}}'),
            CorruptCheckpointError,
            "names what are no files of its folder: '../../x.safetensors'",
        ),
        (lambda f: (f / "model.safetensors.index.json").unlink(), FileNotFoundError, "3 safetensors files but no"),
        (
            lambda f: shutil.copy(f / "model-00001-of-00003.safetensors", f / "model-00002-of-00003.safetensors"),
            CorruptCheckpointError,
            "names tensors that are not in their files: .*a mix of several saves",
        ),
        (lambda f: shutil.rmtree(f), FileNotFoundError, "there is no folder"),
    ],
)
def test_damaged_folders(tmp_path, damage, kind, said):
    folder = _write_folder(tmp_path / "hub", _files())
    damage(folder)
    with pytest.raises(kind, match=said):
        load_hugging_face({}, folder, mapping=RULES, no_dist=True)


def test_a_file_that_is_cut_short_while_it_is_read(tmp_path):
    save_file({"w": torch.ones(5000)}, tmp_path / "model.safetensors")
    source = SafetensorsFolder(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 4096)
    with pytest.raises(CorruptCheckpointError, match=r"model.safetensors' ends at byte 4096 where"):
        load_hugging_face({"w": torch.zeros(5000)}, source, no_dist=True)


def test_names_and_shapes_that_do_not_fit(tmp_path):
    folder = _write_folder(tmp_path / "hub", {"a": torch.zeros(2, 3), "b": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"not in the files: c \(.*in the files but not wanted: b \(allow_unused"):
        load_hugging_face({"a": torch.zeros(2, 3), "c": torch.zeros(1)}, folder, no_dist=True)
    state = {"a": torch.ones(2, 3), "c": torch.ones(1)}
    names = load_hugging_face(state, folder, no_dist=True, allow_missing=True, allow_unused=True)
    assert names == (["c"], ["b"]) and state["a"].sum() == 0 and state["c"] == 1
    with pytest.raises(ValueError, match=r"'a' has shape \(2, 3\) in the files and \(3, 2\) here"):
        load_hugging_face({"a": torch.zeros(3, 2), "b": torch.zeros(1)}, folder, no_dist=True)
    load_hugging_face({"a": torch.zeros(2, 3)}, folder, mapping=[{"files": "b", "drop": True}], no_dist=True)


def test_a_real_model_of_transformers(tmp_path):
    """`save_pretrained` to us and back to `from_pretrained`."""
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "hub", max_shard_size="4KB")
    other = transformers.LlamaForCausalLM(config)
    load_hugging_face(dict(other.state_dict()), tmp_path / "hub", no_dist=True)
    tokens = torch.arange(8).reshape(2, 4)
    assert torch.equal(model(tokens).logits, other(tokens).logits)
    shutil.rmtree(tmp_path / "hub")
    other.config.save_pretrained(tmp_path / "hub")
    save_hugging_face(dict(other.state_dict()), tmp_path / "hub", max_shard_bytes=4096, no_dist=True)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hub")
    assert torch.equal(model(tokens).logits, again(tokens).logits)


def test_quantized_weights_are_not_taken_for_numbers(tmp_path):
    folder = _write_folder(tmp_path, {"a": torch.ones(2, dtype=torch.int8), "b": torch.ones(2)}, 1)
    state = {"a": torch.zeros(2, dtype=torch.int32), "b": torch.zeros(2)}
    load_hugging_face(state, folder, cast=True, no_dist=True)
    assert state["a"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="'a' is int8 in the files and float32 here; quantized weights mean nothing"):
        load_hugging_face({**state, "a": torch.zeros(2)}, folder, cast=True, no_dist=True)
