"""The shape of a model, whatever its plan: its blocks in order, mixtures of experts, what comes before and behind.

Blocks are the members of module lists, or of sequential modules and dicts where there is no list. A Hugging Face model
may declare which list its stages are made of (``base_model_pp_plan``), and what runs before and behind; others are read
in the order in which modules were made, which is that of running them but for odd cases: who needs to be sure runs the
model once and looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.plans.adapters import without_adapters
from hyper_parallel.plans.declared import Declaration, read_declaration
from hyper_parallel.plans.layers import below, is_below, own_weights, sizes_of
from hyper_parallel.platform import get_platform

_LISTS = ("ModuleList", "CellList")
_ROWS = ("Sequential", "SequentialCell", "ModuleDict", "CellDict")
# Parts whose steps depend on values, by the end of their class's name: every rank computes them on whole tensors.
_MIXTURES = ("MoeBlock", "MoE", "Moe", "SparseMLP")


@dataclass(frozen=True)
class Structure:
    """Paths of modules. ``prologue`` and ``epilogue`` have the modules with parameters of their own outside of blocks.

    ``vocabularies`` (in the prologue) are the embeddings of the vocabulary, ``heads`` (in the epilogue) the layers that
    lead back to it.
    """

    blocks: tuple[str, ...]
    mixtures: tuple[str, ...]
    prologue: tuple[str, ...]
    epilogue: tuple[str, ...]
    vocabularies: tuple[str, ...]
    heads: tuple[str, ...]


def structure_of(model: Any) -> Structure:
    """The blocks of a model in the order in which they run, and what comes before and behind them.

    >>> from hyper_parallel import models
    >>> found = structure_of(models.Llama(models.LlamaConfig(num_blocks=2)))
    >>> found.blocks, found.prologue, found.epilogue
    (('blocks.0', 'blocks.1'), ('embedding',), ('norm', 'head'))
    """
    platform = get_platform()
    modules = dict(platform.get_cells_and_names(model))
    declaration = read_declaration(without_adapters(modules))
    blocks, first, last = _in_stages(declaration, modules)
    vocabularies, heads = read_ends(model, modules, blocks)
    prologue: list[str] = []
    epilogue: list[str] = []
    paths = list(modules)
    start = paths.index(blocks[0]) if blocks else len(paths)
    for place, path in enumerate(paths):
        if not platform.own_parameters(modules[path]) or any(path == one or is_below(path, one) for one in blocks):
            continue
        is_first = path in vocabularies or any(path == one or is_below(path, one) for one in first)
        is_last = path in heads or any(path == one or is_below(path, one) for one in last) or _says_last(path)
        (prologue if is_first or (not is_last and place < start) else epilogue).append(path)
    found = mixtures_in(paths, modules, declaration)
    return Structure(*map(tuple, (blocks, found, prologue, epilogue, vocabularies, heads)))


def _says_last(path: str) -> bool:
    """Some models make what comes behind the blocks before them, as OPT its last norm."""
    name = path.rpartition(".")[2]
    return name.startswith("final") or name.endswith("_out")


def _in_stages(declaration: Declaration, modules: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Blocks, and what is declared to run before and behind them."""
    outermost = outermost_of(list_members(modules))
    for place, stage in enumerate(declaration.stages):
        members = [path for path in outermost if path.rpartition(".")[0] == stage]
        if members:
            return members, list(declaration.stages[:place]), list(declaration.stages[place + 1 :])
    return outermost, [], []


def list_members(modules: Mapping[str, Any]) -> list[str]:
    """The members of module lists, in order; in a model without lists those of rows that have several layers each."""
    members = [path for path in modules if path.rpartition(".")[2].isdigit() and _is_member(path, modules, _LISTS)]
    return members or [path for path in modules if _is_member(path, modules, _ROWS) and _has_layers(path, modules)]


def _is_member(path: str, modules: Mapping[str, Any], kinds: tuple[str, ...]) -> bool:
    return bool(path) and _is_kind(modules[path.rpartition(".")[0]], kinds)


def _is_kind(module: Any, kinds: tuple[str, ...]) -> bool:
    return any(kind.__name__ in kinds for kind in type(module).__mro__)


def _has_layers(path: str, modules: Mapping[str, Any]) -> bool:
    platform = get_platform()
    linears = [one for one in below(path, modules) if platform.linear_weight_dims(modules[one]) is not None]
    return len(linears) > 1 and not _is_kind(modules[path], _ROWS)


def outermost_of(paths: list[str]) -> list[str]:
    """Those that are not inside of another."""
    return [path for path in paths if not any(is_below(path, other) for other in paths)]


def mixtures_in(paths: Iterable[str], modules: Mapping[str, Any], declaration: Declaration) -> list[str]:
    """Mixtures of experts with weights that are not linear layers, by their class, their parts, or what is declared.

    Where a block has experts beside its other parts, they are meant and not the block.
    """
    platform = get_platform()
    members = frozenset(list_members(modules))

    def is_mixture(path: str) -> bool:
        around = path.rpartition(".")[0]
        if type(modules[path]).__name__.endswith(_MIXTURES) or path in declaration.mixtures:
            return True
        return (f"{path}.experts" in modules and path not in members) or (
            path.endswith(".experts") and around in members
        )

    def has_weights(path: str) -> bool:
        inside = [path, *below(path, modules)]
        return any(platform.linear_weight_dims(modules[one]) is None and own_weights(modules[one]) for one in inside)

    return outermost_of([path for path in paths if is_mixture(path) and has_weights(path)])


def read_ends(
    model: Any, modules: Mapping[str, Any], blocks: Iterable[str], left_out: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """The embeddings of the vocabulary and the heads: a Hugging Face model tells, others are read by size."""
    platform = get_platform()
    path_of = {id(module): path for path, module in modules.items()}
    blocks, left_out = list(blocks), frozenset(left_out)

    def told(method: str) -> str | None:
        try:
            module = getattr(model, method)()
        except (AttributeError, NotImplementedError):
            return None
        return path_of.get(id(module))

    def outside(path: str) -> bool:
        return path not in left_out and not any(is_below(path, block) for block in blocks)

    vocabularies: list[str] = []
    embeddings = [path for path in modules if platform.is_embedding_module(modules[path]) and outside(path)]
    vocabulary = told("get_input_embeddings")
    tables = {path: platform.own_parameters(modules[path])[platform.weight_name(modules[path])] for path in embeddings}
    if vocabulary is None and embeddings:
        vocabulary = max(embeddings, key=lambda path: tables[path].shape[0])
    if vocabulary in tables:  # an encoder and a decoder may look up in one table
        vocabularies = [path for path in embeddings if tables[path] is tables[vocabulary]]
    head = told("get_output_embeddings")
    if head is None and vocabulary in tables:
        size = tables[vocabulary].shape[0]
        linears = [path for path in modules if platform.linear_weight_dims(modules[path]) is not None]
        fitting = [path for path in linears if path and outside(path) and sizes_of(path, modules)[1] == size]
        head = fitting[-1] if fitting else None
    is_head = head is not None and platform.linear_weight_dims(modules[head]) is not None and outside(head)
    return vocabularies, [head] if is_head and head is not None else []
