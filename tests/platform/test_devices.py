"""Tests of the accelerator look-up, CPU streams and events, profiler marks and `init_on_device`."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hyper_parallel.platform.torch import devices
from hyper_parallel.platform.torch.devices import (
    CpuEvent,
    CpuStream,
    get_current_stream,
    get_stream_context,
    init_on_device,
    meta_device,
    new_event,
    new_stream,
    profiler_record,
    record_stream,
)

# ---------------------------------------------------------------------------------------------------------------------
# The accelerator
# ---------------------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------------------
# Streams, events and profiling on a CPU
# ---------------------------------------------------------------------------------------------------------------------


def test_streams_keep_order_and_are_current_inside_their_context():
    context = get_stream_context()
    outside, one, two = get_current_stream(), new_stream(), new_stream()
    x = torch.zeros(3)
    with context(one) as entered:
        assert entered is one
        assert get_current_stream() is one
        x += 1
        done = one.record_event()
        with context(two):
            assert get_current_stream() is two
            two.wait_event(done)
            two.wait_stream(one)
            x *= 5
        assert get_current_stream() is one
        with context(None):
            assert get_current_stream() is one
    assert get_current_stream() is outside
    two.synchronize()
    assert two.query()
    assert x.tolist() == [5.0, 5.0, 5.0]


def test_the_stream_is_restored_after_an_error_and_belongs_to_its_thread():
    outside, stream, seen = get_current_stream(), new_stream(), []
    with get_stream_context()(stream):
        thread = threading.Thread(target=lambda: seen.append(get_current_stream()))
        thread.start()
        thread.join()
    with pytest.raises(KeyError), get_stream_context()(stream):
        raise KeyError
    assert seen == [outside]
    assert get_current_stream() is outside


def test_events_measure_time():
    start, end = new_event(enable_timing=True), new_event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    assert new_stream().record_event(end) is end
    assert 19.0 < start.elapsed_time(end) < 60_000.0
    start.wait()
    end.synchronize()
    assert end.query()


def test_events_that_cannot_measure_say_why():
    timed = new_event(enable_timing=True)
    with pytest.raises(RuntimeError, match="the start event was never recorded; call its record"):
        timed.elapsed_time(timed)
    timed.record()
    with pytest.raises(RuntimeError, match=r"the end event does not measure time.*enable_timing=True"):
        timed.elapsed_time(new_event())


def test_a_stream_on_a_device_that_is_not_there():
    assert isinstance(new_stream("cpu"), CpuStream)
    with pytest.raises(ValueError, match="a stream on cuda:1 was asked for, but this process has no accelerator"):
        new_stream("cuda:1")


def test_recording_a_stream_on_a_tensor_is_free_on_a_cpu():
    record_stream(torch.zeros(2), new_stream())
    assert isinstance(new_stream().record_event(), CpuEvent)


def test_profiler_record_names_its_operations():
    # The plain CPU profiler: the one of torch.profiler takes seconds to start.
    with torch.autograd.profiler.profile(use_kineto=False) as profile, profiler_record("here"):
        torch.ones(2).add(1)
    assert {"here", "aten::add"} <= {event.name for event in profile.function_events}


# ---------------------------------------------------------------------------------------------------------------------
# init_on_device
# ---------------------------------------------------------------------------------------------------------------------


def devices_of(tensors):
    return {tensor.device.type for tensor in tensors}


def test_only_parameters_move_unless_buffers_are_asked_for():
    with init_on_device(meta_device):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert devices_of(model.parameters()) == {"meta"}
    assert devices_of(model.buffers()) == {"cpu"}
    with init_on_device("meta", include_buffers=True):
        model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3))
        model.register_buffer("none", None)
        model[1].running_mean = torch.ones(3)
    assert devices_of(model.parameters()) | devices_of(model.buffers()) == {"meta"}
    assert list(model.state_dict()) == list(nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3)).state_dict())


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


def test_contexts_nest_and_the_innermost_decides():
    with init_on_device("meta", include_buffers=True):
        outer = nn.BatchNorm1d(2)
        with init_on_device("cpu"):
            inner = nn.BatchNorm1d(2)
        again = nn.Linear(2, 2)
    after = nn.Linear(2, 2)
    assert devices_of([*outer.parameters(), *outer.buffers(), *again.parameters()]) == {"meta"}
    assert devices_of([*inner.parameters(), *inner.buffers(), *after.parameters()]) == {"cpu"}


def test_an_error_inside_ends_the_context():
    with pytest.raises(ZeroDivisionError), init_on_device("meta"):
        raise ZeroDivisionError
    assert not nn.Linear(1, 1).weight.is_meta


def test_other_threads_build_as_usual():
    built = []
    with init_on_device("meta"):
        thread = threading.Thread(target=lambda: built.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()
    assert devices_of(built[0].parameters()) == {"cpu"}


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
