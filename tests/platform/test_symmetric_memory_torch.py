"""What is PyTorch's own about symmetric memory: the example of the page, dtypes that are no bytes, its groups."""

from __future__ import annotations

import inspect
import textwrap

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.platform.shared import symmetric_memory
from hyper_parallel.platform.torch.communication.symmetric_memory import get_symmetric_memory_handler
from tests.world import run_on_ranks


@run_on_ranks(2, 4)
def test_example_of_the_module_docstring():
    example = inspect.getdoc(symmetric_memory).split("::\n", 1)[1].split("\nPeers")[0]
    assert "buffer.put(" in example
    exec(compile(textwrap.dedent(example), "example", "exec"), {})


@run_on_ranks(2)
def test_what_cannot_be_allocated():
    allocate, rank = get_symmetric_memory_handler().allocate, dist.get_rank()
    with pytest.raises(TypeError, match=r"torch.qint8 is more than its bytes"):
        allocate(3, torch.qint8)
    others = [dist.new_group([0]), dist.new_group([1])][1 - rank]
    with pytest.raises(ValueError, match=f"world rank {rank} is not in the group"):
        allocate(2, torch.float32, group=others)
