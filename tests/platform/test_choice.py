"""Which framework a process gets: the variable decides, and what is installed where it is not set."""

import importlib.util

import pytest

from hyper_parallel.platform import get_platform, platform


@pytest.fixture
def machine(monkeypatch):
    """``machine("torch", ...)``: a fresh process in which these are installed; their platforms are their names."""

    def install(*installed, broken=(), variable=None):
        def make(name):
            if name not in installed or name in broken:
                raise ImportError(f"{name} misses a library")
            return f"the platform of {name}"

        monkeypatch.setattr(platform, "_current", None)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in installed else None)
        monkeypatch.setattr(platform, "_mindspore_is_there", lambda: "mindspore" in installed)
        monkeypatch.setattr(platform, "get_torch_platform", lambda: make("torch"))
        monkeypatch.setattr(platform, "get_mindspore_platform", lambda: make("mindspore"))
        monkeypatch.delenv("HYPER_PARALLEL_PLATFORM", raising=False)
        if variable is not None:
            monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", variable)

    return install


@pytest.mark.parametrize("variable", ["torch", "TORCH", " MindSpore "])
def test_the_variable_decides_in_any_case(machine, variable):
    machine("torch", "mindspore", variable=variable)
    assert get_platform() == f"the platform of {variable.strip().lower()}"


def test_without_it_mindspore_comes_first(machine):
    machine("torch", "mindspore")
    assert get_platform() == "the platform of mindspore"
    machine("torch")
    assert get_platform() == "the platform of torch"


def test_a_mindspore_that_cannot_be_imported_is_named_and_left_out(machine):
    machine("torch", "mindspore", broken=["mindspore"])
    with pytest.warns(RuntimeWarning, match="cannot be imported, so .* runs on PyTorch: mindspore misses a library"):
        assert get_platform() == "the platform of torch"
    machine("mindspore", broken=["mindspore"])
    with pytest.raises(ImportError, match="mindspore misses a library"):
        get_platform()
    machine("torch", "mindspore", broken=["mindspore"], variable="mindspore")
    with pytest.raises(ImportError, match="mindspore misses a library"):
        get_platform()


def test_mistakes_say_what_to_write(machine):
    machine()
    with pytest.raises(ImportError, match=r"pip install 'hyper-parallel\[torch\]' or 'hyper-parallel\[mindspore\]'"):
        get_platform()
    for variable in ("jax", ""):
        machine("torch", "mindspore", variable=variable)
        with pytest.raises(ValueError, match=f"HYPER_PARALLEL_PLATFORM='{variable}' .* 'torch' or 'mindspore'"):
            get_platform()
