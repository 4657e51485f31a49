"""Checkpoints whose every value tells their version, and what else lies in a folder of them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from hyper_parallel import checkpoint
from tests.frameworks import equal, ours


def state_of(version, size=1000):
    """A state whose every value tells its version."""
    return {
        "weights": {f"w{i}": ours(torch.full((size + i,), float(version * 10 + i))) for i in range(4)},
        "step": version,
    }


def version_of(path):
    """The version of a checkpoint, after it was seen to be whole."""
    assert checkpoint.verify(path) == []
    state = state_of(0)
    checkpoint.load(state, checkpoint_id=path)
    for name, tensor in state["weights"].items():
        assert equal(tensor, state_of(state["step"])["weights"][name])
    return state["step"]


def stray_files(directory):
    """Files of checkpoints that no metadata names."""
    return [
        path
        for path in Path(directory).rglob("*")
        if path.is_file() and path.name != "metadata.json" and path.name not in _named(path.parent)
    ]


def _named(directory):
    with contextlib.suppress(FileNotFoundError):
        return (directory / "metadata.json").read_text()
    return ""


def save_version(directory, name, version):
    checkpoint.save(state_of(version), checkpoint_id=f"{directory}/{name}", no_dist=True)
