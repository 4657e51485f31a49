"""The examples in the docstrings of everything public run. They are written with PyTorch's tensors and modules."""

import doctest
import importlib
import inspect
import pkgutil

import pytest
import torch

import hyper_parallel
import hyper_parallel.core.dtensor as dtensor_package

only_on = "torch"  # the examples are written with PyTorch's tensors and modules


def _home(public):
    return public.__name__ if inspect.ismodule(public) else public.__module__


MODULES = {
    *(module.name for module in pkgutil.iter_modules(dtensor_package.__path__, f"{dtensor_package.__name__}.")),
    *(_home(getattr(hyper_parallel, name)) for name in hyper_parallel.__all__ if name != "__version__"),
    "hyper_parallel.core.utils",
}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_examples_run(name):
    torch.manual_seed(0)
    try:
        assert doctest.testmod(importlib.import_module(name)).failed == 0
    finally:
        if torch.distributed.is_initialized():  # an example has joined a world of one
            hyper_parallel.destroy_process_group()
