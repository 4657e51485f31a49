"""The distribution around the code: one version, honest metadata, pins that fit the ranges, a wheel that is whole."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import hyper_parallel

ROOT = Path(__file__).parent.parent
NAME = "hyper-parallel"


def _pins():
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line]
    pins = {}
    for requirement in requirements:
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", f"constraints.txt: {requirement} is not an exact pin"
        pins[canonicalize_name(requirement.name)] = specifier.version
    assert len(pins) == len(requirements), "a package is pinned twice"
    return pins


def _declared():
    return [Requirement(line) for line in importlib.metadata.requires(NAME)]


def _applies(requirement, extra):
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def test_version_has_one_home():
    assert importlib.metadata.version(NAME) == hyper_parallel.__version__
    files = [ROOT / "pyproject.toml", *ROOT.glob("hyper_parallel/**/*.py")]
    quoted = f'"{hyper_parallel.__version__}"'
    assert [path for path in files if quoted in path.read_text()] == [ROOT / "hyper_parallel" / "__init__.py"]


def test_metadata():
    metadata = importlib.metadata.metadata(NAME)
    assert metadata["Name"] == NAME
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra")) == {"torch", "mindspore", "transformers", "train", "data", "dev"}


def test_a_framework_comes_only_with_its_extra():
    def names(extra):
        return {requirement.name for requirement in _declared() if _applies(requirement, extra)}

    assert names("") == {"numpy", "safetensors", "crc32c", "fsspec", "rich", "typer", "pydantic"}
    assert names("torch") - names("") == {"torch"}
    assert names("mindspore") - names("") == {"mindspore"}


def test_console_script():
    (script,) = [entry for entry in importlib.metadata.entry_points(group="console_scripts") if entry.name == NAME]
    assert script.value == "hyper_parallel.cli.main:run"
    assert callable(script.load())


def test_licence_is_whole_and_installed():
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert len(re.findall(r"^   \d\. ", licence, re.MULTILINE)) == 9
    installed = [file for file in importlib.metadata.files(NAME) if file.name == "LICENSE"]
    assert [file.read_text() for file in installed] == [licence]


def test_pins_fit_the_ranges():
    pins = _pins()
    for requirement in _declared():
        name = canonicalize_name(requirement.name)
        assert name in pins, f"constraints.txt does not pin {name}"
        assert requirement.specifier.contains(pins[name]), f"{name}=={pins[name]} is outside {requirement}"


def test_pins_cover_what_is_installed():
    """Every package that hyper-parallel[torch,dev] brings in, directly or not, has the pinned version."""
    pins, todo, seen = _pins(), [(NAME, {"torch", "dev"})], set()
    wrong = []
    while todo:
        name, extras = todo.pop()
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            found = canonicalize_name(requirement.name)
            if found in seen or not any(_applies(requirement, extra) for extra in extras or {""}):
                continue
            seen.add(found)
            installed = importlib.metadata.version(found).partition("+")[0]
            if pins.get(found) != installed:
                wrong.append(f"{found} {installed} is installed, constraints.txt has {pins.get(found)}")
            todo.append((found, requirement.extras))
    assert "torch" in seen
    assert wrong == []


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy, so that the build leaves nothing in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("hyper_parallel", "tests", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--wheel-dir", folder, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive, folder


def test_wheel_has_the_package_and_nothing_else(wheel):
    archive, copy = wheel
    inside = set(archive.namelist())
    information = f"hyper_parallel-{hyper_parallel.__version__}.dist-info"
    assert {name.split("/")[0] for name in inside} == {"hyper_parallel", information}
    sources = {str(path.relative_to(copy)) for path in copy.glob("hyper_parallel/**/*.py")}
    assert sources <= inside, "a folder of the package has no __init__.py"
    assert "hyper_parallel/py.typed" in inside
    assert archive.read(f"{information}/licenses/LICENSE").decode() == (ROOT / "LICENSE").read_text()
    assert "hyper-parallel = hyper_parallel.cli.main:run" in archive.read(f"{information}/entry_points.txt").decode()


def test_package_imports_without_a_framework():
    code = "import sys, hyper_parallel; print(sorted({'torch', 'mindspore', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "[]\n", done.stderr


def test_make_help_lists_every_command():
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    listed = set(re.findall(r"^  make (\w+)", done.stdout, re.MULTILINE))
    assert {"setup", "demo", "test", "bench", "lint", "clean"} <= listed
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == set(phony.split())
