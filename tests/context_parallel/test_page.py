"""The page about long sequences: its code runs, and its figures of work are what the orders give."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason='its model is in an extra: pip install "hyper-parallel[transformers]"')

from hyper_parallel.core.context_parallel.batch import token_order
from hyper_parallel.testing import threads

only_on = "torch"  # the page's model is PyTorch's

PAGE = (Path(__file__).parents[2] / "docs" / "long_sequences.md").read_text()


def _run_page() -> float:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(block, names)
    return float(names["loss"])


def test_its_code_runs() -> None:
    losses = threads(2).run(_run_page)
    assert losses[0] == losses[1] > 0


def test_its_figures_of_work() -> None:
    told = dict(re.findall(r'\| `"(\w+)"` \| ([\d.]+) \|', PAGE))
    assert set(told) == {"contiguous", "zigzag", "striped"}
    for name, figure in told.items():
        work = (token_order(name, 64, 4) + 1).reshape(4, 16).sum(1)
        assert round(work.max() / work.mean(), 2) == float(figure), name
