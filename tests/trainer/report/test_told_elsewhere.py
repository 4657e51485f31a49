"""TensorBoard, Weights & Biases, and the line of a terminal."""

from __future__ import annotations

import io
import sys
import types

import pytest
from rich.console import Console

from hyper_parallel.trainer.config.sections.log import LogConfig
from hyper_parallel.trainer.loggers import open_loggers
from hyper_parallel.trainer.report.live import LiveLine

only_on = "torch"  # imports no framework: once is enough


def test_tensorboard(tmp_path, monkeypatch):
    told = []

    class SummaryWriter:
        def __init__(self, folder):
            told.append(("open", folder))

        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def close(self):
            told.append("close")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    (logger,) = open_loggers(LogConfig(tensorboard=True), tmp_path)
    logger.log(3, {"loss": 1.5, "lr": 0.1})
    logger.close()
    assert told == [("open", str(tmp_path / "tensorboard")), ("loss", 1.5, 3), ("lr", 0.1, 3), "close"]


def test_weights_and_biases(tmp_path, monkeypatch):
    told = []

    class Run:
        def log(self, values, step):
            told.append((values, step))

        def finish(self):
            told.append("finish")

    module = types.ModuleType("wandb")
    module.init = lambda project, dir: told.append((project, dir)) or Run()
    monkeypatch.setitem(sys.modules, "wandb", module)
    (logger,) = open_loggers(LogConfig(wandb="mine"), tmp_path)
    logger.log(3, {"loss": 1.5})
    logger.close()
    assert told == [("mine", str(tmp_path)), ({"loss": 1.5}, 3), "finish"]


@pytest.mark.parametrize(
    ("options", "module", "said"),
    [
        ({"wandb": "mine"}, "wandb", "log.wandb: wandb is not installed"),
        ({"tensorboard": True}, "torch.utils.tensorboard", "log.tensorboard: tensorboard is not installed"),
    ],
)
def test_what_is_not_installed_is_named(tmp_path, monkeypatch, options, module, said):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=said):
        open_loggers(LogConfig(**options), tmp_path)


def test_the_line_of_a_terminal():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None, highlight=False)
    with LiveLine(0, console) as line:
        line(0, "Llama on 2 ranks, [steps] 1 to 20")
        line(1, "of another rank")
        line(0, "step      1/20  loss 5.5000  norm 1.0  1,000 tokens/s  0.34 GiB  0:19 left")
        line(0, "step      2/20  loss 5.2500  norm 1.0  1,000 tokens/s  0.34 GiB  0:18 left")
        line(0, "saved step 2")
    text = out.getvalue()
    assert "Llama on 2 ranks, [steps] 1 to 20\n" in text.replace("\r", "")
    assert "of another rank" not in text
    assert text.rindex("loss 5.2500") > text.index("saved step 2")  # the line stays below all others
    assert text.count("saved step 2") == 1
    assert "step 2/20  loss 5.2500  1,000 tokens/s  0.34 GiB  0:18 left" in text
