"""Tests of CPU streams and events, profiler marks and `init_on_device`."""

import threading
import time

import pytest
import torch

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.host.host_streams import CpuEvent, CpuStream
from tests.frameworks import equal, is_leaf, ours, parameter, platform_module, requires_grad, theirs
from tests.frameworks.models import TABLE, Module, Norm, TiedModel, linear, sequential

devices = platform_module("devices")
get_current_stream, get_stream_context = devices.get_current_stream, devices.get_stream_context
new_event, new_stream, profiler_record = devices.new_event, devices.new_stream, devices.profiler_record
init_on_device, meta_device = devices.init_on_device, devices.meta_device
is_meta = get_platform().has_no_memory

# ---------------------------------------------------------------------------------------------------------------------
# Streams, events and profiling on a CPU
# ---------------------------------------------------------------------------------------------------------------------


def test_streams_keep_order_and_are_current_inside_their_context():
    context = get_stream_context()
    outside, one, two = get_current_stream(), new_stream(), new_stream()
    x = ours(torch.zeros(3))
    with context(one) as entered:
        assert entered is one
        assert get_current_stream() is one
        x = x + 1
        done = one.record_event()
        with context(two):
            assert get_current_stream() is two
            two.wait_event(done)
            two.wait_stream(one)
            x = x * 5
        assert get_current_stream() is one
        with context(None):
            assert get_current_stream() is one
    assert get_current_stream() is outside
    two.synchronize()
    assert two.query()
    assert equal(x, torch.full((3,), 5.0))


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
    assert isinstance(new_stream().record_event(), CpuEvent)
    with pytest.raises(ValueError, match="a stream on cuda:1 was asked for, but this process has no accelerator"):
        new_stream("cuda:1")


def test_profiler_marks_change_nothing():
    with profiler_record("here"):
        assert equal(ours(torch.ones(2)) + 1, torch.full((2,), 2.0))
    with pytest.raises(KeyError), profiler_record("here"):
        raise KeyError


# ---------------------------------------------------------------------------------------------------------------------
# init_on_device
# ---------------------------------------------------------------------------------------------------------------------


def tensors_inside(module):
    """(parameters, buffers)."""
    platform = get_platform()
    buffers = [buffer for name, buffer in platform.get_model_state_dict(module).items() if name.endswith("seen")]
    return list(platform.parameters_dict(module).values()), buffers


def are_meta(module):
    parameters, buffers = tensors_inside(module)
    return {is_meta(one) for one in parameters}, {is_meta(one) for one in buffers}


def test_only_parameters_move_unless_buffers_are_asked_for():
    for device in (meta_device, "meta"):
        with init_on_device(device):
            model = sequential(linear(2, 3), Norm(3))
        assert are_meta(model) == ({True}, {False})
    names = list(get_platform().get_model_state_dict(model))
    with init_on_device("meta", include_buffers=True):
        model = sequential(linear(2, 3), Norm(3))
    assert are_meta(model) == ({True}, {True})
    assert list(get_platform().get_model_state_dict(model)) == names


def test_values_are_kept_on_a_real_device():
    with init_on_device("cpu", include_buffers=True):
        norm = Norm(4)
    assert equal(norm.weight, torch.ones(4))
    assert equal(norm.seen, torch.zeros(4))


def test_tied_parameters_stay_tied():
    with init_on_device("meta"):
        model = TiedModel()
    assert model.head.weight is getattr(model.embedding, TABLE)
    assert is_meta(model.head.weight)


def test_kind_and_requires_grad_of_parameters_are_kept():
    class Holder(Module):
        def __init__(self):
            super().__init__()
            self.frozen = parameter(torch.zeros(2), requires_grad=False)
            self.plain = parameter(torch.zeros(2))

    with init_on_device("meta"):
        holder = Holder()
    assert isinstance(holder.plain, get_platform().Parameter)
    assert is_meta(holder.plain) and requires_grad(holder.plain) and is_leaf(holder.plain)
    assert is_meta(holder.frozen) and not requires_grad(holder.frozen)


def test_contexts_nest_and_the_innermost_decides():
    with init_on_device("meta", include_buffers=True):
        outer = Norm(2)
        with init_on_device("cpu"):
            inner = linear(2, 2)
        again = linear(2, 2)
    after = linear(2, 2)
    assert are_meta(outer) == ({True}, {True})
    assert are_meta(again)[0] == {True}
    assert are_meta(inner)[0] == are_meta(after)[0] == {False}
    assert torch.isfinite(theirs(inner.weight)).all()


def test_an_error_inside_ends_the_context():
    with pytest.raises(ZeroDivisionError), init_on_device("meta"):
        raise ZeroDivisionError
    assert not is_meta(linear(1, 1).weight)


def test_other_threads_build_as_usual():
    built = []
    with init_on_device("meta"):
        thread = threading.Thread(target=lambda: built.append(linear(1, 1)))
        thread.start()
        thread.join()
    assert are_meta(built[0])[0] == {False}
