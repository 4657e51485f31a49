"""The reference Llama over a sharded sequence, by every scheme of attention, on both frameworks."""

import pytest

from tests.parallel.test_llama import _check, _dtype, _on_one_device, _train
from tests.world import run_on_ranks


@pytest.mark.sweep("mindspore")
@run_on_ranks(2, timeout=300)
def test_every_scheme_trains_as_one_device():
    want = _on_one_device(_dtype())
    for scheme in ("ring", "ulysses", "gather"):
        _check(_train("cp=2", 2, attention=scheme), want)
