"""What only an imported framework can tell: its devices, its backends, and whether a collective really works.

`hyper-parallel doctor` runs this file in another process (`python -m hyper_parallel.cli.probe torch platform`), so a
framework that crashes or hangs while it is imported is a line of the report and not the end of it. Each probe answers
with one line of JSON. Frameworks are imported by name because the command line must not depend on any.
"""

import importlib
import importlib.util
import json
import sys
from typing import Any


def probe_torch() -> dict[str, Any]:
    """PyTorch's version, backends and accelerators; torch_npu is loaded when it is installed."""
    torch = importlib.import_module("torch")
    npu_error = None
    if importlib.util.find_spec("torch_npu") is not None:
        try:
            importlib.import_module("torch_npu")
        except Exception as error:
            npu_error = f"{type(error).__name__}: {error}"
    distributed = torch.distributed
    backends = {
        name: distributed.is_available() and bool(distributed.is_backend_available(name))
        for name in ("gloo", "nccl", "hccl", "mpi")
    }
    return {
        "version": str(torch.__version__),
        "backends": backends,
        "accelerators": _torch_accelerators(torch),
        "npu_error": npu_error,
    }


def _torch_accelerators(torch: Any) -> list[dict[str, Any]]:
    found = []
    for kind in ("cuda", "npu"):
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        for index in range(module.device_count()):
            memory_bytes = int(module.get_device_properties(index).total_memory)
            found.append({"kind": kind, "name": str(module.get_device_name(index)), "memory_bytes": memory_bytes})
    return found


def probe_mindspore() -> dict[str, Any]:
    """MindSpore's version, backends and accelerators."""
    mindspore = importlib.import_module("mindspore")
    num_devices = {}
    for kind, context in (("npu", "ascend"), ("cuda", "gpu")):
        module = importlib.import_module(f"mindspore.device_context.{context}")
        num_devices[kind] = int(module.device_count()) if module.is_available() else 0
    backends = {"mccl": True, "nccl": num_devices["cuda"] > 0, "hccl": num_devices["npu"] > 0}
    accelerators = [
        {"kind": kind, "name": f"{kind}:{index}", "memory_bytes": None}
        for kind, count in num_devices.items()
        for index in range(count)
    ]
    return {
        "version": str(mindspore.__version__),
        "backends": backends,
        "accelerators": accelerators,
        "npu_error": None,
    }


def probe_platform() -> dict[str, Any]:
    """The platform that `get_platform()` gives in this environment."""
    platform = importlib.import_module("hyper_parallel.platform").get_platform()
    importlib.import_module("hyper_parallel.core.dtensor.dtensor")  # With operators, all that is replaced is.
    return {"type": platform.platform_type.name, "replaced": platform.replaced_functions()}


def probe_collective() -> dict[str, Any]:
    """Sum one number over the processes that RANK and WORLD_SIZE describe, with the platform's own all-reduce."""
    platform = importlib.import_module("hyper_parallel.platform").get_platform()
    platform.init_process_group()
    world_size = platform.get_world_size()
    group = platform.create_group(list(range(world_size)))
    total = platform.all_reduce(platform.full((1,), platform.get_rank() + 1), group)
    answer = {"backend": str(platform.get_backend(group)), "sum": int(total[0]), "world_size": world_size}
    platform.destroy_process_group()
    return answer


_PROBES = {
    "torch": probe_torch,
    "mindspore": probe_mindspore,
    "platform": probe_platform,
    "collective": probe_collective,
}


def main(names: list[str]) -> None:
    """Run these probes in turn; one that raises does not keep the next from answering."""
    for name in names:
        answer: dict[str, Any] = {"probe": name, "facts": None, "error": None}
        try:
            answer["facts"] = _PROBES[name]()
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
