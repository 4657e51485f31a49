"""Saving: plan, stage the bytes, write files, agree, commit. Each step is a function, so that others can put them
together differently; :func:`save` runs them in a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.agreement.agreement import Agreement
from hyper_parallel.core.distributed_checkpoint.agreement.file_agreement import make_agreement
from hyper_parallel.core.distributed_checkpoint.base.errors import LostRankError
from hyper_parallel.core.distributed_checkpoint.base.metadata import Metadata
from hyper_parallel.core.distributed_checkpoint.format.index_file import encode_index
from hyper_parallel.core.distributed_checkpoint.format.shard_file import (
    DeviceBytes,
    RankReport,
    StagedItem,
    as_buffer,
    write_shards,
)
from hyper_parallel.core.distributed_checkpoint.planning.chunks import Specs
from hyper_parallel.core.distributed_checkpoint.planning.flatten import stateful_in
from hyper_parallel.core.distributed_checkpoint.planning.make_index import (
    check_plans,
    index_by_arithmetic,
    index_of_plans,
)
from hyper_parallel.core.distributed_checkpoint.planning.merge_specs import alone, fingerprint, merge_specs
from hyper_parallel.core.distributed_checkpoint.planning.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from hyper_parallel.core.distributed_checkpoint.planning.standard_planner import StandardSavePlanner
from hyper_parallel.core.distributed_checkpoint.storage.file_names import new_save_name
from hyper_parallel.core.distributed_checkpoint.storage.storage import CheckpointId, StorageWriter, default_writer
from hyper_parallel.platform import get_platform


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Write a checkpoint; every rank calls it with its own part of the state.

    ``state_dict`` holds tensors, distributed tensors and plain data, nested in dicts and lists as you like; values with
    ``state_dict()`` and ``load_state_dict()`` are asked for theirs. Plain tensors and objects are taken to be equal on
    all ranks that have them, and written once. ``checkpoint_id`` is a directory, or a URL that fsspec knows.

    When it returns the checkpoint is there, whole and on disk; if it raises, on any rank, it raises on all, and a
    previous checkpoint of that name is untouched. ``no_dist`` saves what this process holds, alone. With
    ``use_collectives=False`` the ranks agree through files beside the checkpoint instead of the process group.
    """
    agreement = make_agreement(no_dist, use_collectives, checkpoint_id, "save")
    try:
        prepared = prepare_save(state_dict, checkpoint_id, storage_writer, planner, agreement)
        return write_and_commit(prepared, lambda: stage(prepared.planner, prepared.plan))
    finally:
        agreement.close()


class Question(NamedTuple):
    """Something else that the ranks settle in the round in which they plan: what each sees, and what follows."""

    look: Callable[[], Any]
    decide: Callable[[list[Any]], Any]


class KnownPlan(NamedTuple):
    """The plan of the save ``save_name``, which is that of any other in which every rank holds what it held then."""

    save_name: str
    own_specs: Specs
    specs: Specs
    plan: SavePlan


@dataclass
class PreparedSave:
    """A save that is planned on every rank, and of which nothing is written yet."""

    agreement: Agreement
    writer: StorageWriter
    planner: SavePlanner
    save_name: str
    plan: SavePlan
    specs: Specs | None  # What all ranks hold; None: the plans were gathered instead.
    known: KnownPlan | None = None  # for the next save
    all_plans: list[SavePlan] | None = None
    metadata: Metadata | None = None
    decision: Any = None  # on the question that was asked along


def prepare_save(
    state_dict: dict[str, Any],
    checkpoint_id: CheckpointId,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None,
    agreement: Agreement,
    question: Question | None = None,
    known: KnownPlan | None = None,
) -> PreparedSave:
    """Plan on every rank, and open the place to write to; with a ``question``, its answer comes along.

    Where all ranks hold what they held in a save before, whose plan is ``known``, that one is returned.
    """
    planner = planner if planner is not None else StandardSavePlanner()
    writer = storage_writer if storage_writer is not None else default_writer(checkpoint_id)
    planning = _Planning(state_dict, checkpoint_id, writer, planner, agreement, question, known)
    try:
        save_name, decision, answer = agreement.round(
            "saving (planning)", planning.look, planning.open_save, one_each=True
        )
        prepared = planning.prepared(save_name, answer)
        prepared.decision = decision
        return prepared
    except BaseException:
        writer.end()
        raise


@dataclass
class _Planning:
    """The round in which the ranks plan: each looks, the coordinator opens the save, each makes its plan of the answer.

    The answer is the plan itself where the planner needs to see all of them; else whether all ranks hold the same
    things, and whether those are the things of the save whose plan is known.
    """

    state_dict: dict[str, Any]
    checkpoint_id: CheckpointId
    writer: StorageWriter
    planner: SavePlanner
    agreement: Agreement
    question: Question | None
    known: KnownPlan | None
    own_specs: Specs | None = None  # None: of a planner that may plan in another way
    all_plans: list[SavePlan] | None = None  # on the coordinator, where the plans are gathered
    metadata: Metadata | None = None

    def look(self) -> tuple[Any, Any, str | None]:
        """On every rank: its plan or the fingerprint of what it holds, what the question asks, the save it recalls."""
        value = self._look_at_state()
        return value, None if self.question is None else self.question.look(), self._recalled()

    def _look_at_state(self) -> Any:
        planner, agreement = self.planner, self.agreement
        stateful = stateful_in(self.state_dict)
        state = {**self.state_dict, **{key: value.state_dict() for key, value in stateful.items()}}
        planner.configure_planner(
            state,
            rank=agreement.rank,
            world_size=agreement.world_size,
            is_coordinator=agreement.is_coordinator,
        )
        self.writer.open(self.checkpoint_id)
        if planner.needs_global_plan:
            return planner.build_local_plan()
        if agreement.world_size == 1:
            planner.set_specs(alone(planner.specs, get_platform().get_rank()))  # type: ignore[attr-defined]
        return fingerprint(planner.specs)  # type: ignore[attr-defined]

    def _recalled(self) -> str | None:
        if type(self.planner) is not StandardSavePlanner:
            return None
        self.own_specs = self.planner.specs
        known = self.known
        return known.save_name if known is not None and self.own_specs == known.own_specs else None

    def open_save(self, looks: list[tuple[Any, Any, str | None]]) -> list[Any]:
        """On the coordinator: begin the save; (its name, the decision, the answer) for each rank."""
        values = [value for value, _, _ in looks]
        decision = None if self.question is None else self.question.decide([seen for _, seen, _ in looks])
        save_name = new_save_name()
        self.writer.begin(save_name)
        if self.planner.needs_global_plan:
            self.all_plans, self.metadata = self.planner.build_global_plan(values)
            check_plans(self.all_plans, self.metadata)
            return [(save_name, decision, plan) for plan in self.all_plans]
        recalled = {name for *_, name in looks}
        is_as_before = len(recalled) == 1 and None not in recalled
        return [(save_name, decision, (len(set(values)) == 1, is_as_before))] * len(values)

    def prepared(self, save_name: str, answer: Any) -> PreparedSave:
        """On every rank: the save that the answer makes."""
        planner = self.planner
        made = functools.partial(PreparedSave, self.agreement, self.writer, planner, save_name)
        if planner.needs_global_plan:
            return made(planner.finalize_plan(answer), None, all_plans=self.all_plans, metadata=self.metadata)
        assert isinstance(planner, StandardSavePlanner)
        is_uniform, is_as_before = answer
        if is_as_before:
            assert self.known is not None
            planner.set_specs(self.known.specs)
            return made(self.known.plan, self.known.specs, self.known)
        if not is_uniform:  # The ranks hold different things: one more message, so that each knows who holds what.
            planner.set_specs(self.agreement.round("saving (planning)", lambda: planner.specs, merge_specs))
        plan = planner.finalize_plan(planner.build_local_plan())
        now_known = None if self.own_specs is None else KnownPlan(save_name, self.own_specs, planner.specs, plan)
        return made(plan, planner.specs, now_known)


def stage(planner: SavePlanner, plan: SavePlan, copy: bool = True) -> list[StagedItem]:
    """The bytes of a plan's items, by reference where they lie in the host's memory.

    What lies elsewhere is copied to the host, or, without ``copy``, left there as :class:`DeviceBytes`.
    """
    return [_staged(item, planner, copy) for item in plan.items]


def _staged(item: WriteItem, planner: SavePlanner, copy: bool) -> StagedItem:
    data = planner.get_data(item)
    if item.type is WriteItemType.BYTE_IO:
        data = bytes(data.getbuffer()) if hasattr(data, "getbuffer") else data
        encoding = planner.encoding_of(item.index.fqn) if hasattr(planner, "encoding_of") else "json"
        return StagedItem(item.index, "uint8", (len(data),), data, encoding)
    platform, shape = get_platform(), tuple(data.shape)
    buffer: np.ndarray[Any, Any] | DeviceBytes
    if copy or isinstance(data, np.ndarray) or platform.is_in_host_memory(data):
        buffer = as_buffer(data if isinstance(data, np.ndarray) else platform.raw_array(data))
    else:
        buffer = DeviceBytes(data, math.prod(shape) * platform.get_element_size(data))
    if len(buffer) != item.tensor_storage_size():
        raise ValueError(
            f"the planner gave {len(buffer)} bytes for {item.index}, whose chunk has {item.tensor_storage_size()}"
        )
    return StagedItem(item.index, item.properties.dtype, shape, buffer)


def write_and_commit(prepared: PreparedSave, staged: Any) -> Metadata:
    """Write what ``staged()`` gives, agree with the other ranks, and commit; or leave nothing behind."""
    written: list[str] = []

    def write() -> RankReport:
        return write_shards(prepared.writer, prepared.save_name, prepared.agreement.rank, staged(), written)

    try:
        return finish_save(prepared, write)
    except LostRankError:
        raise  # The coordinator may have committed before it went: leave the files, the next save cleans up.
    except BaseException:
        prepared.writer.discard(written)
        raise
    finally:
        prepared.writer.end()


def finish_save(prepared: PreparedSave, write: Any) -> Metadata:
    """The agreement at the end: all ranks have written, so the coordinator commits."""
    made: list[Metadata] = []

    def commit(reports: list[RankReport]) -> None:
        if prepared.specs is not None:
            index = index_by_arithmetic(prepared.specs, reports)
        else:
            assert prepared.all_plans is not None and prepared.metadata is not None
            index = index_of_plans(prepared.all_plans, prepared.metadata, reports)
        prepared.writer.commit(encode_index(index), [file.name for file in index.files])
        made.append(index.metadata())

    prepared.agreement.round("saving", write, commit)
    if made:
        return made[0]
    if prepared.specs is None:
        return Metadata(world_size=prepared.agreement.world_size)
    return index_by_arithmetic(prepared.specs, None, prepared.agreement.world_size).metadata()
