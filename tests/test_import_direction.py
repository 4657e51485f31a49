"""The arrows of the house: who imports whom, read from the source, so that a lazy or a type-only import counts too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]

# From the ground up. A package imports what stands on its own floor or below. A module is on the floor of the longest
# prefix that is listed; one that is nowhere must be given a place here first.
_FLOORS = [
    ["platform"],
    ["core.dtensor", "core.utils"],
    ["core.context_parallel.blocks"],  # The attention rule calls it.
    ["core.shard"],
    ["core.modules"],
    [
        "core",  # Only its front door, `core/__init__.py`.
        "core.tensor_parallel",
        "core.fully_shard",
        "core.pipeline_parallel",
        "core.context_parallel",
        "core.expert_parallel",
        "core.activation_memory",
        "core.lowering",
        "core.distributed_checkpoint",
    ],
    ["plans", "drawing"],
    ["models", "testing", "launch", "data"],
    ["parallel"],
    ["analysis"],
    ["", "checkpoint"],  # `hyper_parallel/__init__.py`, the public API, and the short names for checkpoints.
    ["trainer"],
    ["cli"],
]
_FLOOR_OF = {name: floor for floor, names in enumerate(_FLOORS) for name in names}
_FRONT_DOORS = ("", "core")

# Who may import a framework: its platform, and its reference models, which are single-device framework code.
_FRAMEWORK_OF = {"torch": "torch", "torch_npu": "torch", "mindspore": "mindspore"}
# `hyper-parallel doctor` runs this file in a process of its own to ask a framework what it is. It may load one by name
# (`importlib.import_module`), as long as nothing imports the file.
_PROBE = "cli.probe"


@dataclass(frozen=True)
class _Import:
    """`target` is the full name of what is imported: a module, or a name in a module."""

    target: str
    line: int
    by_name: bool = False


@dataclass
class _Module:
    name: str  # Relative to the package: "core.shard.dispatch"; "" for the package's own __init__.
    path: Path
    is_package: bool
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.path.read_text(), str(self.path))

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]


class _Source:
    """All modules of a package, read but not run."""

    def __init__(self, folder: Path) -> None:
        self.root = folder.name
        self.modules: dict[str, _Module] = {}
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            self.modules[name] = _Module(name, path, is_package)

    def imports(self, module: _Module) -> Iterator[_Import]:
        """Every import of the module: at the top, in functions, under TYPE_CHECKING, by a name given as a string."""
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield _Import(alias.name, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(module, "." * node.level + (node.module or ""))
                for alias in node.names:
                    yield _Import(f"{base}.{alias.name}", node.lineno)
            elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
                name = node.args[0]
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield _Import(self._absolute(module, name.value), node.lineno, by_name=True)

    def private_uses(self, module: _Module) -> Iterator[tuple[str, int]]:
        """`dispatch._table` where `dispatch` is an imported module of this package: (full name, line)."""
        names = {}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom):
                base = self._absolute(module, "." * node.level + (node.module or ""))
                names |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.asname: alias.name for alias in node.names if alias.asname}
                if any(self.inside(alias.name) is not None and not alias.asname for alias in node.names):
                    names[self.root] = self.root
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and (chain := _chain(node.value)) and chain[0] in names:
                target = ".".join([names[chain[0]], *chain[1:]])
                if self.inside(target) in self.modules:
                    yield f"{target}.{node.attr}", node.lineno

    def inside(self, target: str) -> str | None:
        """The name relative to the package; None for what belongs to another one."""
        if target == self.root:
            return ""
        return target.removeprefix(f"{self.root}.") if target.startswith(f"{self.root}.") else None

    def module_of(self, inside: str) -> str:
        """The module that a name is in: itself if it is one."""
        while inside and inside not in self.modules:
            inside = inside.rpartition(".")[0]
        return inside

    def _absolute(self, module: _Module, name: str) -> str:
        level = len(name) - len(name.lstrip("."))
        if not level:
            return name
        package = f"{self.root}.{module.package}".rstrip(".").split(".")
        return ".".join(filter(None, [*package[: len(package) - level + 1], name.lstrip(".")]))


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _chain(node: ast.expr) -> list[str]:
    """["a", "b"] for `a.b`, nothing for what is not a chain of names."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (chain := _chain(node.value)):
        return [*chain, node.attr]
    return []


def _room(module: str) -> str | None:
    """The listed package that a module belongs to."""
    room = module
    while room not in _FLOOR_OF and room:
        room = room.rpartition(".")[0]
    # A front door is the room of its own __init__ only, not of all that lies behind it.
    return None if room in _FRONT_DOORS and room != module else room


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def _violations(folder: Path) -> list[str]:
    """Every import below the folder that goes against the arrows, as `file:line: what is wrong`."""
    source = _Source(folder)
    found: list[str] = []
    arrows: dict[tuple[str, str], str] = {}
    for module in source.modules.values():

        def wrong(line: int, what: str, path: Path = module.path) -> str:
            return f"{path.relative_to(folder.parent)}:{line}: {what}"

        room = _room(module.name)
        if room is None:
            found.append(wrong(1, f"{module.name} has no floor: give it a place in _FLOORS"))
            continue
        for imported in source.imports(module):
            inside = source.inside(imported.target)
            if inside is None:
                found += [wrong(imported.line, what) for what in _wrong_framework(module.name, imported)]
                continue
            if inside == "__version__":
                continue
            target = source.module_of(inside)
            target_room = _room(target)
            if target_room is None:
                continue  # Reported where it is defined.
            if _FLOOR_OF[target_room] > _FLOOR_OF[room]:
                found.append(wrong(imported.line, f"{room} imports {target or source.root}, which stands above it"))
            elif target_room != room:
                arrows.setdefault((room, target_room), wrong(imported.line, f"{room} imports {target}"))
            if room != "platform" and target.startswith(("platform.torch", "platform.mindspore")):
                found.append(wrong(imported.line, f"imports {target}: only `get_platform()` knows the framework"))
            if target == _PROBE:
                found.append(wrong(imported.line, f"imports {target}, which is only for a process of its own"))
            if source.modules[target].package != module.package and _is_private(inside):
                found.append(wrong(imported.line, f"imports {inside}, a private name of another package"))
        for name, line in source.private_uses(module):
            inside = source.inside(name)
            if source.modules[source.module_of(inside)].package != module.package and _is_private(inside):
                found.append(wrong(line, f"uses {inside}, a private name of another package"))
    found += [f"{arrows[a, b]}, and {arrows[b, a]}" for a, b in arrows if a < b and (b, a) in arrows]
    return sorted(set(found))


def _wrong_framework(module: str, imported: _Import) -> Iterator[str]:
    framework = _FRAMEWORK_OF.get(imported.target.split(".")[0])
    homes = (f"platform.{framework}", f"models.{framework}")
    if framework is None or module in homes or module.startswith(tuple(f"{home}." for home in homes)):
        return
    if module == _PROBE and imported.by_name:
        return
    yield f"imports {imported.target}: only platform/{framework} imports {framework}, and models/{framework}"


def test_arrows_point_one_way():
    violations = _violations(_ROOT / "hyper_parallel")
    assert not violations, "\n" + "\n".join(violations)


# ---- The guard itself: a house in which all is well, and what it says to one wrong line ----

_HOUSE = {
    "__init__.py": "from hyper_parallel.core.dtensor.layout import Layout\n",
    "platform/__init__.py": "from hyper_parallel.platform.platform import get_platform\n",
    "platform/platform.py": "def f():\n    from hyper_parallel.platform.torch.platform import TorchPlatform\n",
    "platform/torch/__init__.py": "",
    "platform/torch/platform.py": "import torch\nfrom hyper_parallel.platform.torch.groups import _cache\n",
    "platform/torch/groups.py": "import importlib\nimport torch.distributed\nimportlib.import_module('torch_npu')\n",
    "platform/mindspore/__init__.py": "from mindspore import mint\n",
    "core/__init__.py": "from hyper_parallel.core.shard import dispatch\n",
    "core/utils.py": "import hyper_parallel.core.dtensor.layout\n",
    "core/dtensor/__init__.py": "",
    "core/dtensor/layout.py": "from hyper_parallel.platform import get_platform\n_table = {}\n",
    "core/dtensor/dtensor.py": "from . import layout\nfrom .layout import _table\nprint(layout._table, __name__)\n",
    "core/shard/__init__.py": "",
    "core/shard/dispatch.py": "from ..dtensor import layout\nfrom hyper_parallel import __version__\n",
    "core/fully_shard/__init__.py": "from hyper_parallel.core.shard import dispatch\n",
    "core/tensor_parallel/__init__.py": "from hyper_parallel.core import fully_shard\n",
    "models/__init__.py": "from hyper_parallel.core.dtensor import dtensor\n",
    "models/torch/__init__.py": "import torch\nfrom hyper_parallel.models import config\n",
    "models/mindspore/__init__.py": "import mindspore\n",
    "models/config.py": "",
    "trainer/__init__.py": "import hyper_parallel.models\nimport torchmetrics\n",
    "cli/__init__.py": "from hyper_parallel import Layout, trainer\n",
    "cli/probe.py": "import importlib\nimportlib.import_module('torch')\n",
}


@pytest.fixture
def house(tmp_path):
    folder = tmp_path / "hyper_parallel"
    for name, text in _HOUSE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_guard_is_content_with_a_good_house(house):
    assert _violations(house) == []


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("core/dtensor/layout.py", "import torch", "imports torch: only platform/torch imports torch"),
        ("core/dtensor/layout.py", "from torch.nn import Module", "imports torch.nn.Module: only platform/torch"),
        ("core/shard/dispatch.py", "import numpy, torch_npu", "imports torch_npu: only platform/torch"),
        ("platform/platform.py", "import torch", "imports torch: only platform/torch imports torch"),
        ("platform/torch/groups.py", "import mindspore", "imports mindspore: only platform/mindspore"),
        ("platform/mindspore/__init__.py", "import torch", "imports torch: only platform/torch imports torch"),
        ("models/__init__.py", "import torch", "imports torch: only platform/torch imports torch, and models/torch"),
        ("models/torch/__init__.py", "import mindspore", "imports mindspore: only platform/mindspore"),
        ("models/mindspore/__init__.py", "from torch import nn", "imports torch.nn: only platform/torch"),
        ("core/utils.py", "def f():\n    import torch as t", "imports torch: only platform/torch imports torch"),
        (
            "core/utils.py",
            "if TYPE_CHECKING:\n    from torch import Tensor",
            "imports torch.Tensor: only platform/torch",
        ),
        ("trainer/__init__.py", "importlib.import_module('torch')", "imports torch: only platform/torch"),
        ("trainer/__init__.py", "import_module('torch.nn')", "imports torch.nn: only platform/torch"),
        ("trainer/__init__.py", "__import__('mindspore')", "imports mindspore: only platform/mindspore"),
        ("cli/probe.py", "import torch", "imports torch: only platform/torch imports torch"),
        ("cli/__init__.py", "from . import probe", "imports cli.probe, which is only for a process of its own"),
        ("__init__.py", "import torch", "imports torch: only platform/torch imports torch"),
        ("platform/platform.py", "import hyper_parallel.core.utils", "platform imports core.utils, which stands above"),
        (
            "platform/torch/groups.py",
            "from ...core import dtensor",
            "platform imports core.dtensor, which stands above",
        ),
        ("core/dtensor/layout.py", "from ..shard import dispatch", "core.dtensor imports core.shard.dispatch, which"),
        ("core/dtensor/layout.py", "from .. import shard", "core.dtensor imports core.shard, which stands above it"),
        ("core/dtensor/layout.py", "import_module('..shard', __package__)", "core.dtensor imports core.shard, which"),
        (
            "core/shard/dispatch.py",
            "from hyper_parallel.core import fully_shard",
            "core.shard imports core.fully_shard",
        ),
        (
            "core/shard/dispatch.py",
            "import hyper_parallel",
            "core.shard imports hyper_parallel, which stands above it",
        ),
        ("core/fully_shard/__init__.py", "import hyper_parallel.models", "core.fully_shard imports models, which"),
        ("core/fully_shard/__init__.py", "from ...trainer import x", "core.fully_shard imports trainer, which stands"),
        ("models/__init__.py", "from hyper_parallel import trainer", "models imports trainer, which stands above it"),
        ("trainer/__init__.py", "from hyper_parallel import cli", "trainer imports cli, which stands above it"),
        ("core/fully_shard/__init__.py", "from .. import tensor_parallel", "and hyper_parallel/core/tensor_parallel/"),
        ("core/utils.py", "import hyper_parallel.platform.torch.groups", "only `get_platform()` knows the framework"),
        ("models/__init__.py", "from ..platform import torch", "only `get_platform()` knows the framework"),
        (
            "core/shard/dispatch.py",
            "from ..dtensor.layout import _table",
            "imports core.dtensor.layout._table, a private",
        ),
        (
            "core/shard/dispatch.py",
            "layout._table",
            "uses core.dtensor.layout._table, a private name of another package",
        ),
        (
            "core/utils.py",
            "hyper_parallel.core.dtensor.layout._table",
            "uses core.dtensor.layout._table, a private name",
        ),
        (
            "platform/torch/groups.py",
            "from ..platform import _current",
            "imports platform.platform._current, a private",
        ),
        ("core/novelty.py", "", "core.novelty has no floor: give it a place in _FLOORS"),
        ("novelty.py", "", "novelty has no floor: give it a place in _FLOORS"),
    ],
)
def test_guard_finds_a_wrong_line(house, file, line, said):
    with (house / file).open("a") as stream:
        stream.write(f"\n{line}\n")
    violations = _violations(house)
    assert len(violations) == 1, violations
    assert said in violations[0]
    assert f"hyper_parallel/{file}:" in violations[0]
