"""The facts about this machine and this environment that `hyper-parallel doctor` reports, gathered without a framework.

Versions come from the installed packages' metadata, the rest of a framework's facts from another process
(`hyper_parallel.cli.probe`).
"""

import importlib.metadata
import importlib.util
import json
import os
import platform as python_platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel import __version__

PLATFORM_VARIABLE = "HYPER_PARALLEL_PLATFORM"
FRAMEWORKS = {"torch": "PyTorch", "mindspore": "MindSpore"}
PROBE_SECONDS = 120
_PLATFORM_OF_TYPE = {"PYTORCH": "torch", "MINDSPORE": "mindspore"}
_PACKAGES = {"torch": "torch", "torch_npu": "torch-npu", "mindspore": "mindspore", "numpy": "numpy"}


@dataclass(frozen=True)
class ProbeResult:
    """What a probe process said: its facts, or why there are none."""

    facts: dict[str, Any] | None
    error: str | None


def run_probes(names: Sequence[str], extra_environment: Mapping[str, str] | None = None) -> dict[str, ProbeResult]:
    """Run probes of `hyper_parallel.cli.probe` in another process; after a crash, the rest in a new one."""
    results: dict[str, ProbeResult] = {}
    environment = {**os.environ, **(extra_environment or {})}
    while remaining := [name for name in names if name not in results]:
        process = subprocess.Popen(
            [sys.executable, "-m", "hyper_parallel.cli.probe", *remaining],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            output, errors = process.communicate(timeout=PROBE_SECONDS)
            ending = _describe_end(process.returncode, errors)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            ending = f"no answer in {PROBE_SECONDS} s"
        for line in output.splitlines():
            if line.startswith('{"probe":'):
                answer = json.loads(line)
                results[answer["probe"]] = ProbeResult(answer["facts"], answer["error"])
        unanswered = [name for name in remaining if name not in results]
        if unanswered:
            results[unanswered[0]] = ProbeResult(None, ending)
    return results


def _describe_end(status: int, errors: str) -> str:
    if status < 0:
        return f"the process was ended by signal {-status}"
    return (errors.strip().splitlines() or [f"the process ended with status {status}"])[-1]


def probe_collective(num_processes: int = 2) -> ProbeResult:
    """Start `num_processes` local processes that sum their ranks + 1 with the platform's all-reduce, over loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {"WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if "GLOO_SOCKET_IFNAME" not in os.environ and sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    with ThreadPoolExecutor(num_processes) as pool:
        ranks = [
            pool.submit(run_probes, ["collective"], {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(num_processes)
        ]
        results = [rank.result()["collective"] for rank in ranks]
    for rank, result in enumerate(results):
        if result.facts is None:
            return ProbeResult(None, f"rank {rank}: {result.error}")
    expected = num_processes * (num_processes + 1) // 2
    for rank, result in enumerate(results):
        if result.facts is not None and result.facts["sum"] != expected:
            return ProbeResult(None, f"rank {rank}: the sum is {result.facts['sum']} instead of {expected}")
    return results[0]


def is_installed(module: str) -> bool:
    """Whether `import module` would find something; nothing is imported."""
    return importlib.util.find_spec(module) is not None


def version_of(module: str) -> str | None:
    """The installed version of a package, from its metadata."""
    try:
        return importlib.metadata.version(_PACKAGES[module])
    except importlib.metadata.PackageNotFoundError:
        return "unknown" if is_installed(module) else None


def requirements_of(extra: str) -> list[str]:
    """What the package's own metadata asks for under an extra: `["torch>=2.13"]`."""
    try:
        declared = importlib.metadata.requires("hyper-parallel") or []
    except importlib.metadata.PackageNotFoundError:
        return [extra]
    wanted = []
    for line in declared:
        requirement, _, marker = line.partition(";")
        if "".join(marker.split()).replace("'", '"') == f'extra=="{extra}"':
            wanted.append(requirement.strip())
    return wanted or [extra]


def pip_install(*requirements: str) -> str:
    """The command that installs these into the environment that runs now."""
    return f"{sys.executable} -m pip install " + " ".join(f"'{requirement}'" for requirement in requirements)


def cpu_facts() -> dict[str, int | None]:
    """Cores this process may use, cores of the machine, and bytes of memory it may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"usable_cores": usable, "cores": os.cpu_count(), "memory_bytes": _memory_bytes()}


def _memory_bytes() -> int | None:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        text = limit.read_text().strip()
    except OSError:
        return memory
    return min(memory, int(text)) if text.isdigit() else memory


def shared_memory_facts(path: str = "/dev/shm") -> dict[str, Any] | None:
    """Size of POSIX shared memory, or None where it is not a file system."""
    if not os.path.isdir(path):
        return None
    usage = shutil.disk_usage(path)
    return {"path": path, "total_bytes": usage.total, "free_bytes": usage.free}


def device_files() -> dict[str, bool]:
    """Accelerators the machine has, whether or not a framework can drive them."""
    device = Path("/dev")
    return {"cuda": any(device.glob("nvidia[0-9]*")), "npu": any(device.glob("davinci[0-9]*"))}


def _choose(variable: str | None, installed: Mapping[str, bool], actual: ProbeResult) -> tuple[str | None, str]:
    """The chosen framework and why; what `get_platform()` really gave decides where it gave something."""
    if variable is not None:
        name = variable.strip().lower()
        if name in FRAMEWORKS:
            return name, f"{PLATFORM_VARIABLE}={variable}"
        return None, f"{PLATFORM_VARIABLE}={variable!r} is neither 'torch' nor 'mindspore'"
    unset = f"{PLATFORM_VARIABLE} is not set"
    if not any(installed.values()):
        return None, f"{unset}, and neither PyTorch nor MindSpore is installed"
    expected = "mindspore" if installed["mindspore"] else "torch"
    chosen = _PLATFORM_OF_TYPE.get(actual.facts["type"], expected) if actual.facts else expected
    if chosen == "mindspore":
        return chosen, f"{unset}, and MindSpore, which is preferred, is installed"
    if installed["mindspore"]:
        return chosen, f"{unset}, and MindSpore is installed but cannot be used"
    return chosen, f"{unset}, and MindSpore is not installed"


def gather(probe: bool = False) -> dict[str, Any]:
    """Every fact of the report except the list of problems. With `probe`, two processes really exchange a number."""
    variable = os.environ.get(PLATFORM_VARIABLE)
    installed = {name: is_installed(name) for name in FRAMEWORKS}
    names = [name for name in FRAMEWORKS if installed[name]]
    results = run_probes([*names, "platform"])
    actual = results["platform"]
    chosen, reason = _choose(variable, installed, actual)
    frameworks = {name: results[name] for name in names}
    accelerators = [
        {"framework": name, **accelerator}
        for name, result in frameworks.items()
        for accelerator in (result.facts or {}).get("accelerators", [])
    ]
    facts: dict[str, Any] = {
        "hyper_parallel": __version__,
        "platform": {
            "chosen": chosen,
            "reason": reason,
            "variable": variable,
            "usable": actual.facts is not None,
            "error": actual.error,
            "supported": list(FRAMEWORKS),
        },
        "versions": {
            "python": python_platform.python_version(),
            "hyper_parallel": __version__,
            **{module: version_of(module) for module in _PACKAGES},
        },
        "python_executable": sys.executable,
        "devices": {**cpu_facts(), "accelerators": accelerators, "device_files": device_files()},
        "backends": {name: (result.facts or {}).get("backends", {}) for name, result in frameworks.items()},
        "framework_errors": {name: result.error for name, result in frameworks.items() if result.error},
        "npu_error": ((frameworks["torch"].facts or {}).get("npu_error") if "torch" in frameworks else None),
        "shared_memory": shared_memory_facts(),
        "replaced": (actual.facts or {}).get("replaced", []),
    }
    if probe:
        result = probe_collective() if actual.facts else ProbeResult(None, "there is no platform to try")
        facts["collective"] = {"worked": result.facts is not None, "error": result.error, **(result.facts or {})}
    return facts
