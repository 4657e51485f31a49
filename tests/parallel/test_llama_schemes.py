"""The reference Llama over a sharded sequence, by every scheme of attention, on both frameworks."""

import pytest

from hyper_parallel.platform import get_platform
from tests.parallel.test_llama import _check, _dtype, _on_one_device, _train
from tests.world import run_on_ranks

DEGREES = {2: ("cp=2",), 4: ("cp=4", "cp=2, tp=2")}


@pytest.mark.sweep("mindspore")
@run_on_ranks(2, sweep=(4,), timeout=400)
@pytest.mark.parametrize("scheme", ["ring", "ulysses", "gather", "hybrid"])
def test_every_scheme_trains_as_one_device(scheme):
    want = _on_one_device(_dtype())
    for degrees in DEGREES[get_platform().get_world_size()]:
        if scheme != "hybrid" or degrees == "cp=4":
            _check(_train(degrees, 2, attention=scheme), want)
