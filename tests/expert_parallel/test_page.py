"""The examples of docs/experts.md run."""

import re
from pathlib import Path

import pytest

from tests.frameworks import on_mindspore

PAGE = Path(__file__).parents[2] / "docs" / "experts.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(on_mindspore, reason="ranks of one process are PyTorch's")
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_runs(number):
    exec(compile(BLOCKS[number], f"experts.md, example {number + 1}", "exec"), {})


def test_there_are_examples():
    assert len(BLOCKS) == 2
