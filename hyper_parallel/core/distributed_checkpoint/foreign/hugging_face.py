"""Weights in the form of the Hugging Face hub: a folder of safetensors files, into and out of tensors that are cut.

Names and shapes may differ from the program's: a mapping (:mod:`.key_mapping`) says how. Loading reads only the boxes
that this rank's blocks are made of; saving gathers one tensor (or the few that share one in the files) at a time.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.agreement.agreement import Agreement, AloneAgreement, GroupAgreement
from hyper_parallel.core.distributed_checkpoint.base.metadata import dtype_name, dtype_size
from hyper_parallel.core.distributed_checkpoint.base.shown_text import shown
from hyper_parallel.core.distributed_checkpoint.foreign.folder_files import (
    DEFAULT_SHARD_BYTES,
    FolderPlan,
    assemble,
    commit_folder,
    create_file,
    fill_box,
    folder_path,
    write_at,
)
from hyper_parallel.core.distributed_checkpoint.foreign.key_mapping import KeyMapping, Mapped, Piece
from hyper_parallel.core.distributed_checkpoint.foreign.safetensors_folder import SafetensorsFolder
from hyper_parallel.core.distributed_checkpoint.planning.held_state import WrittenEntries, require_memory
from hyper_parallel.core.distributed_checkpoint.storage.aside_folder import AsideFolder
from hyper_parallel.core.distributed_checkpoint.storage.file_names import new_save_name
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.region import Region

__all__ = ["LoadedNames", "load_hugging_face", "save_hugging_face"]

Shape = tuple[int, ...]
Mapping_ = KeyMapping | Iterable[Mapping[str, Any]] | None

_LISTED = 20


class LoadedNames(NamedTuple):
    """What a load left alone: names of the program that are not in the files, and of the files that nobody wanted."""

    missing: list[str]
    unused: list[str]


# ---------------------------------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------------------------------


def load_hugging_face(
    state_dict: Mapping[str, Any],
    folder: str | os.PathLike[str] | SafetensorsFolder,
    *,
    mapping: Mapping_ = None,
    allow_missing: bool = False,
    allow_unused: bool = False,
    cast: bool = False,
    no_dist: bool = False,
    whole: bool = False,
) -> LoadedNames:
    """Fill the tensors of ``state_dict`` in place from a folder of safetensors files; every rank reads its own blocks.

    Names that are missing in the files, or in them but unused by all ranks, which may hold different parts of a model,
    are an error that lists them unless allowed; so is a dtype that differs, unless ``cast``. A tied tensor needs to be
    in the files under one of its names.

    If it raises while files are read, the state is part old and part new; with ``whole=True`` nothing is changed before
    all ranks have read what they want, in memory of its own.
    """
    agreement = _agreement(no_dist)
    rules = KeyMapping.of(mapping)

    opened: list[tuple[SafetensorsFolder, Mapped]] = []

    def look() -> list[str]:
        source = folder if isinstance(folder, SafetensorsFolder) else SafetensorsFolder(folder)
        mapped = rules.from_files(source.known())
        opened.append((source, mapped))
        return [name for name in mapped.our_shapes if name not in state_dict]

    def work() -> LoadedNames:
        source, mapped = opened[0]
        missing = _compare_names(state_dict, mapped, source.path, allow_missing, [] if allow_unused else unused)
        _check_fit(state_dict, mapped, source.path, cast)
        pieces = mapped.by_our_name()
        # In the order of the files: disks like to read forward.
        places = {
            name: min((source.tensors[p.file_name][::3] for p in found), default=("", 0))
            for name, found in pieces.items()
        }
        wanted = sorted(set(state_dict) & set(pieces), key=places.__getitem__)
        written.num_wanted = len(wanted)
        if whole:
            require_memory(sum(_local_bytes(state_dict[name], mapped.our_dtypes[name]) for name in wanted))
        for name in wanted:
            block = _Block(state_dict[name], mapped.our_dtypes[name])
            if whole:
                block.read(pieces[name], source, into_target=False)
                held.append((name, block))
            else:
                written.add(name)
                block.read(pieces[name], source, into_target=True)
                block.apply()
        return LoadedNames(missing, unused)

    written = WrittenEntries()
    held: list[tuple[str, _Block]] = []

    def apply() -> None:
        for name, block in held:
            written.add(name)
            block.apply()

    result: list[LoadedNames] = []
    with written.explained("load_hugging_face", whole):
        unused = agreement.round("loading safetensors files", look, _in_all)
        agreement.round("loading safetensors files", lambda: result.append(work()))
        if whole:
            agreement.round("loading safetensors files (all is read, and is put into place)", apply)
    return result[0]


def _in_all(lists: Sequence[list[str]]) -> list[str]:
    others = [set(one) for one in lists[1:]]
    return [name for name in lists[0] if all(name in other for other in others)]


def _compare_names(
    state_dict: Mapping[str, Any], mapped: Mapped, path: Path, allow_missing: bool, refused: list[str]
) -> list[str]:
    """The names of this rank that are not in the files; an error unless that is allowed, and for ``refused`` ones."""
    missing = [name for name in state_dict if name not in mapped.our_shapes]
    if missing:
        there = {_address(value) for name, value in state_dict.items() if name in mapped.our_shapes}
        missing = [name for name in missing if _address(state_dict[name]) not in there]
    problems = []
    if missing and not allow_missing:
        problems.append(f"not in the files: {_listed(missing)} (allow_missing=True leaves them as they are)")
    if refused:
        problems.append(
            f"in the files but not wanted: {_listed(refused)} (allow_unused=True, or a rule that drops them)"
        )
    if problems:
        raise ValueError(f"'{path}': {'; '.join(problems)}")
    return missing


def _check_fit(state_dict: Mapping[str, Any], mapped: Mapped, path: Path, cast: bool) -> None:
    problems = []
    for name, value in state_dict.items():
        if name not in mapped.our_shapes:
            continue
        if not get_platform().is_tensor(value):
            problems.append(f"'{name}' is a {type(value).__name__} here, and files hold tensors only")
        elif tuple(value.shape) != mapped.our_shapes[name]:
            problems.append(f"'{name}' has shape {mapped.our_shapes[name]} in the files and {tuple(value.shape)} here")
        elif isinstance(value, DTensor) and value.layout.has_partial:
            problems.append(f"'{name}' is a partial sum ({value.layout}), which cannot be loaded into")
        elif (there := mapped.our_dtypes[name]) != (here := _dtype_of(value)):
            wrong = "" if cast else "pass cast=True"
            if "int" in there and "int" not in here:
                wrong = "quantized weights mean nothing alone, give the folder they were made of"
            problems += [f"'{name}' is {there} in the files and {here} here; {wrong}"] if wrong else []
    if problems:
        raise ValueError(f"'{path}': {_listed(problems, '; ')}")


class _Block:
    """This rank's block of a tensor, as it comes from the files: read first, applied then."""

    def __init__(self, target: Any, dtype: str) -> None:
        self._target = target
        self._is_cast = dtype != _dtype_of(target)
        self._dtype = dtype
        self._offsets, self._sizes = _local_region(target)
        self._data: Any = None

    def read(self, pieces: Sequence[Piece], source: SafetensorsFolder, into_target: bool) -> None:
        """Read it, straight into the tensor where that can be and may be."""
        if 0 in self._sizes:
            return
        platform = get_platform()
        if self._is_cast:
            self._data = platform.new_tensor(self._sizes, platform.str_to_dtype(self._dtype), "cpu")
            array = platform.raw_array(self._data)
        else:
            array = platform.raw_array(self._target)
            self._data = array = array if into_target else np.empty(array.shape, array.dtype)
        fill_box(array, self._offsets, pieces, source.read)

    def apply(self) -> None:
        if self._data is None:
            return
        if self._is_cast:
            get_platform().load_into_param(self._target, self._data)
        else:
            get_platform().set_raw(self._target, self._data)
        self._data = None


def _local_region(target: Any) -> Region:
    """Where this rank's local tensor lies; of no elements where it has none."""
    if not isinstance(target, DTensor):
        return Region.whole(tuple(target.shape))
    if target.device_mesh.get_coordinate() is None:
        return Region((0,), (0,))
    return target.layout.local_region(tuple(target.shape))


def _local_bytes(target: Any, dtype: str) -> int:
    return _local_region(target).num_elements * dtype_size(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Saving
# ---------------------------------------------------------------------------------------------------------------------


def save_hugging_face(
    state_dict: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    mapping: Mapping_ | Callable[[dict[str, Shape]], Mapping_] = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    no_dist: bool = False,
) -> None:
    """Write the tensors of ``state_dict``, whole, into a folder of safetensors files; other files there stay.

    Every rank calls; ranks may hold different parts of a model. Tensors that are cut are gathered one after the other,
    by the ranks that hold them, one of which writes. A tied tensor is written under its first name. An older set of
    weights in the folder is replaced as a whole. ``mapping`` may be a function that gives it for the shapes by name of
    the tensors of all ranks.
    """
    target = folder_path(folder)
    agreement = _agreement(no_dist)
    aside: AsideFolder | None = None
    untied: list[dict[str, Any]] = []

    def look() -> Any:
        untied.append(_untied(state_dict))
        return {name: (tuple(value.shape), _dtype_of(value)) for name, value in untied[0].items()}

    def begin(everybody: list[Any]) -> tuple[str, dict[str, Any], dict[str, list[int]]]:
        nonlocal aside
        known, holders = _united(everybody)
        save_name = new_save_name()
        aside = AsideFolder(target, save_name)
        aside.make()
        return save_name, known, holders

    try:
        save_name, known, holders = agreement.round("saving safetensors files", look, begin)
        aside = aside or AsideFolder(target, save_name)
        planned: list[tuple[FolderPlan, _Writers]] = []

        def create() -> None:
            rules = mapping({name: shape for name, (shape, _) in known.items()}) if callable(mapping) else mapping
            mapped = KeyMapping.of(rules).to_files(known)
            plan = FolderPlan(mapped.file_shapes, mapped.file_dtypes, max_shard_bytes)
            planned.append((plan, _Writers(mapped, plan, holders, agreement.rank)))
            for number in range(agreement.rank, len(plan.headers), agreement.world_size):
                os.close(create_file(aside.file(number), plan, number))

        agreement.round("saving safetensors files", create)
        plan, writers = planned[0]
        agreement.round(
            "saving safetensors files",
            lambda: _write_files(untied[0], plan, writers, aside),
            lambda _: commit_folder(aside, target, plan),
        )
    finally:
        if aside is not None and agreement.is_coordinator:
            aside.remove()


def _united(everybody: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The tensors of all ranks, and which ranks hold each."""
    known: dict[str, Any] = {}
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(everybody):
        for name, what in held.items():
            if known.setdefault(name, what) != what:
                raise ValueError(
                    f"the ranks have different shapes or dtypes for '{name}': {known[name]} on rank "
                    f"{holders[name][0]}, {what} on rank {rank}"
                )
            holders.setdefault(name, []).append(rank)
    return known, holders


class _Writers:
    """Which tensors of the files this rank writes, and of which of ours it makes them."""

    def __init__(self, mapped: Mapped, plan: FolderPlan, holders: Mapping[str, list[int]], rank: int) -> None:
        self.pieces = mapped.by_file_name()
        self.groups = [group for group in mapped.groups if any(rank in holders[name] for name in group)]
        self.wanted: dict[str, list[str]] = {}  # our name -> tensors of the files that this rank writes from it
        group_of = {name: group for group in mapped.groups for name in group}
        for name, pieces in self.pieces.items():
            ours = pieces[0].our_name if pieces else ""
            group = group_of.get(ours, ())
            able = sorted(set.intersection(*(set(holders[one]) for one in group))) if group else [0]
            if not able:
                raise ValueError(
                    f"'{name}' of the files is made of tensors that different ranks hold ({_listed(group)}); leave it "
                    "out of the mapping"
                )
            if able[plan.entries[name].file % len(able)] == rank:
                self.wanted.setdefault(ours, []).append(name)


def _untied(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    seen: set[Any] = set()
    tensors = {}
    for name, value in state_dict.items():
        if not get_platform().is_tensor(value):
            raise TypeError(f"'{name}' is a {type(value).__name__}; safetensors files hold tensors only")
        if isinstance(value, DTensor) and value.layout.has_partial:
            raise ValueError(f"'{name}' is a partial sum ({value.layout}); call reduce_partial() first")
        address = _address(value)
        if address not in seen:
            tensors[name] = value
            seen.add(address)
    return tensors


def _write_files(tensors: Mapping[str, Any], plan: FolderPlan, writers: _Writers, aside: AsideFolder) -> None:
    """Gather the tensors, all ranks that hold them together, and write those that are this rank's to write.

    A rank that cannot write (a full disk, say) still takes part in the gathers, or the others would wait for it.
    """
    platform = get_platform()
    files: dict[int, int] = {}
    failures: list[Exception] = []

    def attempt(step: Callable[[], Any]) -> None:
        if not failures:
            try:
                step()
            except Exception as error:
                failures.append(error)

    def write(group: Iterable[str], whole: Mapping[str, Any]) -> None:
        for name in [file_name for ours in group for file_name in writers.wanted.get(ours, ())]:
            entry = plan.entries[name]
            if entry.file not in files:
                files[entry.file] = os.open(aside.file(entry.file), os.O_WRONLY)
            write_at(files[entry.file], assemble(entry, writers.pieces[name], whole), entry.start)

    try:
        for group in writers.groups:
            whole = {}
            for name in group:
                if name in tensors:
                    value = tensors[name]
                    whole[name] = platform.raw_array(value.full_tensor() if isinstance(value, DTensor) else value)
            attempt(functools.partial(write, group, whole))
        for descriptor in files.values():
            attempt(functools.partial(os.fsync, descriptor))
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    if failures:
        raise failures[0]


# ---------------------------------------------------------------------------------------------------------------------


def _agreement(no_dist: bool) -> Agreement:
    return AloneAgreement() if no_dist or get_platform().get_world_size() == 1 else GroupAgreement()


def _dtype_of(value: Any) -> str:
    return dtype_name(get_platform().dtype_name(value.dtype))


def _address(value: Any) -> Any:
    """Equal for tensors that are one and the same memory."""
    platform = get_platform()
    if not platform.is_tensor(value):
        return id(value)
    block = platform.detached(value)
    return (block.data_ptr(), tuple(block.shape), tuple(block.stride())) if math.prod(block.shape) else id(value)


def _listed(names: Sequence[str], between: str = ", ") -> str:
    more = len(names) - _LISTED
    return between.join(map(shown, names[:_LISTED])) + (f" and {more} more" if more > 0 else "")
