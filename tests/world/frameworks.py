"""What differs between the frameworks a world can run on: what to load, how to start, what state a test may leave."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Framework:
    """How a world runs on one framework.

    With `may_fork` (importing the framework starts no threads) the nursery imports the `preloaded` modules once and
    ranks are forked from it; else each rank is a new interpreter.
    """

    name: str
    backend: str
    preloaded: tuple[str, ...]
    may_fork: bool
    reset: Callable[[int], None]

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.name) is not None

    def join_world(self, rank: int, world_size: int, port: int) -> None:
        """Make this process rank `rank` of a new default process group."""
        from hyper_parallel.platform import get_platform

        address = f"tcp://127.0.0.1:{port}"
        get_platform().init_process_group(self.backend, init_method=address, world_size=world_size, rank=rank)


def _reset_torch(seed: int) -> None:
    import torch

    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    if (
        torch.are_deterministic_algorithms_enabled()
    ):  # Asked first, since the call below loads a compiler and takes a second.
        torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)


def _reset_mindspore(seed: int) -> None:
    import mindspore

    from hyper_parallel.platform.mindspore import private_api

    mindspore.set_seed(seed)
    private_api.start_recording()  # A test before may have let an operator fail, where MindSpore stops.


FRAMEWORKS = {
    framework.name: framework
    for framework in (
        Framework(
            name="torch",
            backend="gloo",
            preloaded=(
                "torch",
                "torch.distributed",
                "torch.testing",
                "torch._dynamo",  # which torch loads when it first asks for the shape of a sum without computing it
                "hyper_parallel.core.dtensor.dtensor",
            ),
            may_fork=True,
            reset=_reset_torch,
        ),
        Framework(
            name="mindspore",
            backend="mccl",
            preloaded=("mindspore", "hyper_parallel.platform"),
            may_fork=False,
            reset=_reset_mindspore,
        ),
    )
}
