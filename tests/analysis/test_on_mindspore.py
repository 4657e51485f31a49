"""The dry run of a job for MindSpore: the PyTorch twin of the model, run by another process."""

from __future__ import annotations

import importlib

import pytest

import hyper_parallel as hp

only_on = "mindspore"  # PyTorch needs no twin


def test_the_twin_answers():
    report = hp.dry_run("llama-demo", "tp=3", rank=2, length=64, device_memory="1GB")
    assert (report.rank, report.world_size, report.dtype) == (2, 3, "bfloat16")
    assert report.fits and report.num_collectives > 0
    (note,) = report.notes
    assert "PyTorch twin" in note and note in str(report)


@pytest.mark.sweep("mindspore")
def test_classes_and_mistakes_cross_over():
    assert [one.ranks for one in hp.dry_run_classes("llama-demo", "tp=3", length=64)] == [(0, 1), (2,)]
    with pytest.raises(ValueError, match="no model is called 'lama'"):
        hp.dry_run("lama")
    with pytest.raises(TypeError, match="model cannot be sent there: name a model"):
        hp.dry_run(lambda: None)


def test_without_pytorch_it_says_what_to_install(monkeypatch):
    room = importlib.import_module("hyper_parallel.analysis.dry_run")
    monkeypatch.setattr(room, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"PyTorch is not installed; run: pip install 'hyper-parallel\[torch\]'"):
        hp.dry_run("llama-demo")
