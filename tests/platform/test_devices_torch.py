"""What is PyTorch's own about devices: looking up the accelerator, its profiler, moving parameters of its modules."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hyper_parallel.platform.torch.base import devices
from hyper_parallel.platform.torch.base.devices import (
    get_current_stream,
    get_stream_context,
    init_on_device,
    new_event,
    new_stream,
    profiler_record,
    record_stream,
)


class FakeHandle(SimpleNamespace):
    """Stands for a module such as torch.cuda; every object it makes remembers how it was asked for."""

    def __init__(self):
        self.used = []
        super().__init__(
            Stream=lambda **kwargs: ("stream", kwargs),
            Event=lambda **kwargs: ("event", kwargs),
            stream=lambda stream: ("context", stream),
            current_stream=lambda: "the current stream",
            current_device=lambda: 3,
            device_count=lambda: 8,
            synchronize=lambda: self.used.append("synchronize"),
        )


@pytest.fixture
def forget_device_type():
    devices.get_device_type.cache_clear()
    yield
    devices.get_device_type.cache_clear()


@pytest.fixture
def fake_accelerator(monkeypatch, forget_device_type):
    """An accelerator of type xpu: a type that every build of torch can name."""
    handle = FakeHandle()
    monkeypatch.setattr(torch, "xpu", handle)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    return handle


def test_without_an_accelerator_it_is_the_cpu():
    assert devices.get_device_type() == "cpu"
    assert devices.get_device_handle() is torch.cpu
    assert devices.current_device() == torch.device("cpu")
    devices.synchronize()


def test_everything_comes_from_the_accelerator_that_is_there(fake_accelerator):
    assert devices.get_device_type() == "xpu"
    assert devices.get_device_handle() is fake_accelerator
    assert devices.current_device() == torch.device("xpu", 3)
    assert new_stream(priority=-1) == ("stream", {"device": None, "priority": -1})
    assert new_event(enable_timing=True) == ("event", {"enable_timing": True})
    assert get_stream_context()("s") == ("context", "s")
    assert get_current_stream() == "the current stream"
    devices.synchronize()
    assert fake_accelerator.used == ["synchronize"]


def test_an_accelerator_without_streams_is_not_used(fake_accelerator, monkeypatch):
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(synchronize=None))
    assert devices.get_device_type() == "cpu"


def test_torch_npu_is_imported_when_nothing_else_is_there(monkeypatch, tmp_path, forget_device_type):
    (tmp_path / "torch_npu.py").write_text("loaded = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch, "xpu", FakeHandle())

    def current_accelerator(check_available=False):
        return torch.device("xpu") if "torch_npu" in sys.modules else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    try:
        assert devices.get_device_type() == "xpu"
    finally:
        sys.modules.pop("torch_npu", None)


def test_a_torch_npu_that_cannot_be_imported_is_named(monkeypatch, tmp_path, forget_device_type):
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libascendcl.so not found')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.warns(RuntimeWarning, match=r"torch_npu .*libascendcl.so not found.*set_env.sh"):
        assert devices.get_device_type() == "cpu"


def test_recording_a_stream_on_a_tensor_is_free_on_a_cpu():
    record_stream(torch.zeros(2), new_stream())
    assert isinstance(new_stream().record_event(), devices.CpuEvent)


def test_profiler_record_names_its_operations():
    # The plain CPU profiler: the one of torch.profiler takes seconds to start.
    with torch.autograd.profiler.profile(use_kineto=False) as profile, profiler_record("here"):
        torch.ones(2).add(1)
    assert {"here", "aten::add"} <= {event.name for event in profile.function_events}


def test_values_are_kept_on_a_real_device():
    torch.manual_seed(0)
    expected = nn.Linear(4, 4).weight
    torch.manual_seed(0)
    with init_on_device("cpu", include_buffers=True):
        assert torch.equal(nn.Linear(4, 4).weight, expected)


def test_tied_parameters_and_buffers_stay_tied():
    with init_on_device("meta", include_buffers=True):
        embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        head.weight = embedding.weight
        shared, first, second = nn.Parameter(torch.zeros(2)), nn.Module(), nn.Module()
        first.weight = second.weight = shared
        buffer = torch.zeros(2)
        first.register_buffer("state", buffer)
        second.register_buffer("state", buffer)
    assert head.weight is embedding.weight
    assert first.weight is second.weight
    assert first.weight.is_meta
    assert first.state is second.state
    assert first.state.is_meta
    assert shared.device.type == "cpu", "the tensor of the caller is left as it was"


class MarkedParameter(nn.Parameter):
    pass


def test_class_attributes_and_requires_grad_of_parameters_are_kept():
    with init_on_device("meta"):
        module = nn.Module()
        parameter = MarkedParameter(torch.zeros(2), requires_grad=False)
        parameter.mark = "kept"
        module.marked = parameter
        module.plain = nn.Parameter(torch.zeros(2))
        module.register_parameter("none", None)
    assert type(module.marked) is MarkedParameter
    assert module.marked.mark == "kept"
    assert not module.marked.requires_grad
    assert type(module.plain) is nn.Parameter
    assert module.plain.requires_grad
    assert module.plain.is_leaf


def test_lazy_parameters_materialise_where_they_were_registered():
    with init_on_device("meta"):
        lazy = nn.LazyLinear(3)
    lazy(torch.zeros(1, 7, device="meta"))
    assert lazy.weight.is_meta
    assert lazy.weight.shape == (3, 7)


def test_the_memory_left_behind_is_freed():
    released = []

    class Watched(nn.Parameter):
        def __del__(self):
            released.append(self.device.type)

    with init_on_device("meta"):
        module = nn.Module()
        module.weight = Watched(torch.zeros(2))
        assert released == ["cpu"]
    assert module.weight.is_meta
