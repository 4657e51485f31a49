"""`hyper-parallel doctor`: what this environment has, which framework is used and why, and what to install or set."""

import json
import re
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hyper_parallel.cli.environment import (
    FRAMEWORKS,
    PLATFORM_VARIABLE,
    gather,
    pip_install,
    requirements_of,
)

_SMALL_SHARED_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True)
class Problem:
    """One thing that is missing. An `error` leaves no usable platform; a `note` only takes something away."""

    severity: str
    problem: str
    fix: str


def find_problems(facts: dict[str, Any]) -> list[Problem]:
    """Compare the facts with what the library needs; the worst first."""
    problems = [*_platform_problems(facts), *_collective_problems(facts), *_accelerator_problems(facts)]
    problems += [*_shared_memory_problems(facts), *_replacement_problems(facts)]
    return sorted(problems, key=lambda problem: problem.severity != "error")


def _platform_problems(facts: dict[str, Any]) -> list[Problem]:
    platform, versions = facts["platform"], facts["versions"]
    found = []
    if versions["mindspore"] and _release(versions["numpy"] or "") >= (2,):
        severity = "error" if platform["chosen"] == "mindspore" and not platform["usable"] else "note"
        problem = f"MindSpore {versions['mindspore']} fails at its first operator under numpy {versions['numpy']}"
        found.append(Problem(severity, problem, pip_install("numpy<2")))
    if platform["usable"]:
        return found
    chosen, supported = platform["chosen"], platform["supported"]
    other = next((name for name in supported if name != chosen and versions[name]), None)
    if chosen is None and platform["variable"] is not None:
        choices = " or ".join(f"export {PLATFORM_VARIABLE}={name}" for name in supported)
        found.append(Problem("error", platform["reason"], f"{choices}, or unset {PLATFORM_VARIABLE}"))
    elif chosen is None:
        problem = "neither PyTorch nor MindSpore is installed"
        fix = "\nor: ".join(pip_install(*requirements_of(name)) for name in supported)
        found.append(Problem("error", problem, fix))
    elif versions[chosen] is None:
        fix = pip_install(*requirements_of(chosen))
        if other:
            fix += f"\nor use {FRAMEWORKS[other]}, which is installed: export {PLATFORM_VARIABLE}={other}"
        problem = f"{FRAMEWORKS[chosen]} was asked for ({platform['reason']}) and is not installed"
        found.append(Problem("error", problem, fix))
    elif chosen in facts["framework_errors"]:
        problem = f"{FRAMEWORKS[chosen]} is installed but cannot be imported: {facts['framework_errors'][chosen]}"
        found.append(Problem("error", problem, f"{pip_install(*requirements_of(chosen))} --force-reinstall"))
    else:
        fix = f"export {PLATFORM_VARIABLE}={other}" if other else pip_install(*requirements_of(chosen)) + " --upgrade"
        problem = f"the platform of {FRAMEWORKS[chosen]} cannot be used: {platform['error']}"
        found.append(Problem("error", problem, fix))
    return found


def _collective_problems(facts: dict[str, Any]) -> list[Problem]:
    found = []
    backends = facts["backends"].get("torch", {})
    if backends and not any(backends.values()):
        problem = "this build of PyTorch has no communication backend, so it can only use one process"
        found.append(Problem("note", problem, f"{pip_install(*requirements_of('torch'))} --force-reinstall"))
    collective = facts.get("collective")
    if collective and facts["platform"]["usable"] and not collective["worked"]:
        problem = f"two local processes could not sum a number: {collective['error']}"
        fix = "name the loopback interface, export GLOO_SOCKET_IFNAME=lo, and allow connections to 127.0.0.1"
        found.append(Problem("error", problem, fix))
    return found


def _accelerator_problems(facts: dict[str, Any]) -> list[Problem]:
    versions, devices = facts["versions"], facts["devices"]
    driven = {accelerator["kind"] for accelerator in devices["accelerators"]}
    torch_version = versions["torch"]
    if torch_version is None:
        return []
    found = []
    release = _release(torch_version)
    matching_npu = f"torch-npu=={release[0]}.{release[1]}.*" if len(release) >= 2 else "torch-npu"
    if facts["npu_error"]:
        problem = f"torch_npu {versions['torch_npu']} does not load with torch {torch_version}: {facts['npu_error']}"
        found.append(Problem("note", problem, pip_install(matching_npu)))
    elif devices["device_files"]["npu"] and versions["torch_npu"] is None:
        found.append(Problem("note", "Ascend devices are there but torch_npu is not", pip_install(matching_npu)))
    if devices["device_files"]["cuda"] and "cuda" not in driven:
        problem = f"NVIDIA devices are there but torch {torch_version} cannot use them"
        fix = "install the build of torch for your CUDA driver, then run nvidia-smi and hyper-parallel doctor again"
        found.append(Problem("note", problem, fix))
    return found


def _shared_memory_problems(facts: dict[str, Any]) -> list[Problem]:
    memory = facts["shared_memory"]
    if memory is None:
        problem = "there is no /dev/shm, so the ranks of one host cannot share memory"
        return [Problem("note", problem, "mount -t tmpfs tmpfs /dev/shm")]
    if memory["total_bytes"] < _SMALL_SHARED_MEMORY_BYTES:
        problem = f"shared memory is small: {_size(memory['total_bytes'])} in {memory['path']}"
        return [Problem("note", problem, "start the container with --shm-size=8g")]
    return []


def _replacement_problems(facts: dict[str, Any]) -> list[Problem]:
    """Functions of the framework that this library replaces, and that this version does not have."""
    return [
        Problem("warning", f"{name} is {state}: {why}", pip_install(*requirements_of(facts["platform"]["chosen"])))
        for name, state, why in facts["replaced"]
        if state != "ours"
    ]


def _release(version: str) -> tuple[int, ...]:
    """The numbers a version starts with: (2, 13, 0) for "2.13.0+cpu", () for "unknown"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in match[0].split(".")) if match else ()


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "unknown"
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.1f} GiB"
    return f"{num_bytes / (1 << 20):.0f} MiB"


def _framework_version(facts: dict[str, Any], name: str) -> str:
    version = facts["versions"][name]
    if version is None:
        return "not installed"
    return f"{version} (cannot be imported)" if name in facts["framework_errors"] else str(version)


def _rows(facts: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The report as sections of (label, value) lines."""
    platform, versions, devices = facts["platform"], facts["versions"], facts["devices"]
    chosen = FRAMEWORKS[platform["chosen"]] if platform["chosen"] else "none"
    state = chosen if platform["usable"] else f"{chosen} (not usable)" if platform["chosen"] else chosen
    accelerators = [
        (
            accelerator["kind"],
            f"{accelerator['name']}, {_size(accelerator['memory_bytes'])}, {accelerator['framework']}",
        )
        for accelerator in devices["accelerators"]
    ]
    memory = facts["shared_memory"]
    shared = "none"
    if memory:
        shared = f"{_size(memory['total_bytes'])}, {_size(memory['free_bytes'])} free ({memory['path']})"
    backends = [
        (name, ", ".join(f"{backend}: {'yes' if there else 'no'}" for backend, there in table.items()) or "unknown")
        for name, table in facts["backends"].items()
    ] or [("none", "no framework is installed")]
    replaces = bool(facts["replaced"])
    collective = facts.get("collective")
    if collective and collective["worked"]:
        backends.append(("tried", f"{collective['world_size']} processes summed a number over {collective['backend']}"))
    elif collective:
        backends.append(("tried", f"failed: {collective['error']}"))
    return [
        ("Platform", [("chosen", state), ("why", platform["reason"])]),
        (
            "Versions",
            [
                ("python", f"{versions['python']} ({facts['python_executable']})"),
                ("hyper_parallel", versions["hyper_parallel"]),
                ("torch", _framework_version(facts, "torch")),
                ("torch_npu", versions["torch_npu"] or "not installed"),
                ("mindspore", _framework_version(facts, "mindspore")),
                ("numpy", versions["numpy"] or "not installed"),
            ],
        ),
        (
            "Devices",
            [
                ("cpu", f"{devices['usable_cores']} of {devices['cores']} cores, {_size(devices['memory_bytes'])}"),
                *(accelerators or [("accelerators", "none, the CPU is used")]),
                ("shared memory", shared),
            ],
        ),
        ("Backends", backends),
        *([("Replaced functions", [(state, f"{name}: {why}") for name, state, why in facts["replaced"]])] * replaces),
    ]


def print_report(console: Console, facts: dict[str, Any], problems: list[Problem]) -> None:
    """The report for people. Lines are never wrapped: the commands in it are there to be copied."""
    for title, rows in _rows(facts):
        console.print(Text(title, style="bold"), soft_wrap=True)
        for label, value in rows:
            console.print(Text.assemble(("  " + label.ljust(16), "cyan"), value), soft_wrap=True)
    console.print(Text("What is missing", style="bold"), soft_wrap=True)
    for problem in problems:
        style = "bold red" if problem.severity == "error" else "yellow"
        console.print(Text.assemble(("  " + problem.severity.ljust(7), style), problem.problem), soft_wrap=True)
        for number, line in enumerate(problem.fix.splitlines()):
            label = "    fix: " if number == 0 else " " * 9
            console.print(Text.assemble((label, "green"), line), soft_wrap=True)
    if not problems:
        console.print(Text("  nothing", style="green"), soft_wrap=True)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts and problems as JSON.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="Also start 2 local processes that sum a number.")] = False,
) -> None:
    """Show platform, versions, devices and backends, and what is missing with its fix.

    The exit status is 0 when there is a usable platform and 1 when there is none.
    """
    facts = gather(probe=probe)
    problems = find_problems(facts)
    if as_json:
        typer.echo(json.dumps({**facts, "problems": [asdict(problem) for problem in problems]}, indent=2))
    else:
        print_report(Console(highlight=False), facts, problems)
    raise typer.Exit(1 if any(problem.severity == "error" for problem in problems) else 0)
