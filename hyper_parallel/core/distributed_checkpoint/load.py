"""Loading in place: every rank reads the bytes that its own blocks need, checks them, and all agree at the end."""

from __future__ import annotations

import functools
import math
import operator
import os
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.agreement.agreement import Agreement, GroupAgreement
from hyper_parallel.core.distributed_checkpoint.agreement.file_agreement import make_agreement
from hyper_parallel.core.distributed_checkpoint.base.checksum import share_of_box, share_of_whole
from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.grids import slices
from hyper_parallel.core.distributed_checkpoint.base.metadata import dtype_size
from hyper_parallel.core.distributed_checkpoint.format.index_file import StoredTensor
from hyper_parallel.core.distributed_checkpoint.format.stored_files import StoredFiles
from hyper_parallel.core.distributed_checkpoint.planning.exchange import ReplicaExchange
from hyper_parallel.core.distributed_checkpoint.planning.flatten import stateful_in
from hyper_parallel.core.distributed_checkpoint.planning.held_state import HeldState, WrittenEntries
from hyper_parallel.core.distributed_checkpoint.planning.merge_specs import fingerprint, merge_specs
from hyper_parallel.core.distributed_checkpoint.planning.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from hyper_parallel.core.distributed_checkpoint.planning.standard_planner import StandardLoadPlanner
from hyper_parallel.core.distributed_checkpoint.storage.storage import CheckpointId, StorageReader, default_reader
from hyper_parallel.platform import get_platform


def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: CheckpointId,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    whole: bool = False,
) -> None:
    """Fill ``state_dict`` from a checkpoint, in place; every rank calls it with the state that it wants.

    Tensors are written to where they are, whatever layout, mesh and world size they have and had; other values are put
    into their dicts and lists; values with ``state_dict()`` and ``load_state_dict()`` are given theirs. Entries of the
    checkpoint that ``state_dict`` lacks are not read; entries that the checkpoint lacks are an error that lists them.

    Every byte that is read is checked. If it raises, on any rank, it raises on all, and the state is then part old and
    part new: load another checkpoint before going on. With ``whole=True`` nothing is changed before all ranks have read
    and checked everything that they want, in memory of its own: as much again as the state takes.
    """
    reader = storage_reader if storage_reader is not None else default_reader(checkpoint_id)
    planner = planner if planner is not None else StandardLoadPlanner()
    agreement = make_agreement(no_dist, use_collectives, checkpoint_id, "load")
    written = WrittenEntries()
    held = HeldState(planner, written) if whole else None
    loading = _Loading(checkpoint_id, reader, planner, agreement, state_dict, held, written)
    try:
        with written.explained("load", whole):
            loading.run()
    finally:
        reader.close()
        agreement.close()


class Share(NamedTuple):
    """A box of a chunk that a rank has read, and its part in the chunk's checksum; see ``checksum.py``."""

    tensor: int
    chunk: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    share: int


class _ReadReport(NamedTuple):
    index_crc: int
    shares: list[Share]
    keeps_state: bool  # whether the rank has values with a load_state_dict()


class _Loading:
    """One load on one rank."""

    def __init__(
        self,
        checkpoint_id: CheckpointId,
        reader: StorageReader,
        planner: LoadPlanner,
        agreement: Agreement,
        state_dict: dict[str, Any],
        held: HeldState | None,
        written: WrittenEntries,
    ) -> None:
        self._id = checkpoint_id
        self._reader = reader
        self._planner = planner
        self._agreement = agreement
        self._given = self._state = state_dict
        self._stateful: dict[str, Any] = {}
        self._held = held
        self._written = written

    def run(self) -> None:
        """Plan, read, check and agree."""
        agreement, planner = self._agreement, self._planner
        if self.trades:
            some_keep_state = self.plan_and_trade()
        elif planner.needs_global_plan:
            plan = agreement.round("loading (planning)", self.plan, planner.build_global_plan, one_each=True)
            some_keep_state = agreement.round("loading", lambda: self.read(plan), self.verify)
        else:
            some_keep_state = agreement.round("loading", lambda: self.read(self.plan()), self.verify)
        if self._held is not None:
            agreement.round("loading (all is read and checked, and is put into place)", self._held.apply)
        if some_keep_state:  # on any rank, so that all take part
            agreement.round("loading (load_state_dict)", self.give_back)

    def plan(self) -> LoadPlan:
        self._stateful = stateful_in(self._given)
        if self._stateful:
            self._state = {**self._given, **{key: value.state_dict() for key, value in self._stateful.items()}}
        self._files = StoredFiles(self._id, self._reader)
        self._planner.configure_planner(
            self._state,
            self._files.index.metadata(),
            index=self._files.index,
            rank=get_platform().get_rank(),
            is_coordinator=self._agreement.is_coordinator,
        )
        return self._planner.build_local_plan()

    def give_back(self) -> None:
        """Give the values that keep their own state what was loaded for them."""
        for key, value in self._stateful.items():
            value.load_state_dict(self._state[key])
        if self._state is not self._given:
            self._given.update({key: value for key, value in self._state.items() if key not in self._stateful})

    def read(self, plan: LoadPlan, places: dict[int, Any] | None = None) -> _ReadReport:
        """Read the items of a plan; with ``places`` only into these, to be applied later."""
        if places is None:
            plan = self._planner.finalize_plan(plan)
            self._expect(plan)
        index = self._files.index
        for number in range(self._agreement.rank, len(index.files), self._agreement.world_size):
            self._files.check_header(number)
        numbers = {key: number for number, key in enumerate(index.tensors)}
        shares: list[Share] = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                self._take_bytes(item, self._files.object_bytes(item.storage_index.fqn))
            elif places is not None:
                self._read_box(item, places[id(item)], numbers, shares)
            elif self._held is not None:
                self._read_box(item, self._held.place_for(item), numbers, shares)
            else:
                self._written.add(item.dest_index.fqn)
                place = self._planner.acquire_tensor(item)
                target = place if isinstance(place, np.ndarray) else get_platform().raw_array(place)
                self._read_box(item, target, numbers, shares)
                if place is not target:
                    get_platform().set_raw(place, target)
                self._planner.apply_tensor(item, place)
        return _ReadReport(index.crc32c, shares, bool(self._stateful))

    def _expect(self, plan: LoadPlan) -> None:
        self._written.num_wanted = len({item.dest_index.fqn for item in plan.items})
        if self._held is not None:
            self._held.expect(plan, self._files.index)

    def _take_bytes(self, item: ReadItem, data: memoryview) -> None:
        if self._held is not None:
            self._held.keep_bytes(item, data)
        else:
            self._written.add(item.dest_index.fqn)
            self._planner.apply_bytes(item, data)

    def _read_box(
        self, item: ReadItem, target: np.ndarray[Any, Any], numbers: dict[str, int], shares: list[Share]
    ) -> None:
        key = item.storage_index.fqn
        tensor = self._files.index.tensors[key]
        number = _chunk_number(tensor, item)
        whole = tensor.chunk_sizes(number)
        if item.lengths == whole:
            self._files.compare(key, number, self._files.read_chunk(tensor, number, target), tensor.crc32c[number])
        elif math.prod(whole) * target.itemsize <= self._reader.page_bytes:
            chunk = np.empty(whole, target.dtype)
            self._files.compare(key, number, self._files.read_chunk(tensor, number, chunk), tensor.crc32c[number])
            target[...] = chunk[slices(item.storage_offsets, item.lengths)]
        else:
            self._files.read_box(tensor, number, item.storage_offsets, target)
            share = share_of_box(target, item.storage_offsets, whole)
            shares.append(Share(numbers[key], number, item.storage_offsets, item.lengths, share))
        self._reader.bytes_read += target.nbytes

    # ---------------------------------------------------------------- replicas that are read once

    @property
    def trades(self) -> bool:
        """Whether ranks get replicas from each other."""
        return (
            self._reader.reads_are_dear
            and isinstance(self._agreement, GroupAgreement)
            and isinstance(self._planner, StandardLoadPlanner)
        )

    def plan_and_trade(self) -> bool:
        """Load with every byte read by one rank only; see ``exchange.py``. What :meth:`verify` says."""
        planner, agreement = self._planner, self._agreement
        assert isinstance(planner, StandardLoadPlanner)
        plans: list[LoadPlan] = []

        def look() -> bytes:
            plans.append(self.plan())
            return fingerprint(planner.specs)

        is_uniform = agreement.round("loading (planning)", look, lambda values: len(set(values)) == 1)
        specs = planner.specs if is_uniform else agreement.round("loading", lambda: planner.specs, merge_specs)
        plan = planner.finalize_plan(plans[0])
        items = plan.items
        exchange = ReplicaExchange(items, dict(specs), agreement.rank, agreement.world_size)
        boxes = [item for item in items if item.type is not LoadItemType.BYTE_IO]
        places: dict[int, Any] = {}

        def read_own() -> _ReadReport:
            self._expect(plan)
            place_for = planner.acquire_tensor if self._held is None else self._held.place_for
            places.update({id(item): place_for(item) for item in boxes})
            for item in boxes if self._held is None else ():
                self._written.add(item.dest_index.fqn)
            mine = [item for item in items if exchange.reader_of(item) == agreement.rank]
            return self.read(LoadPlan(mine), places)

        some_keep_state: bool = agreement.round("loading", read_own, self.verify)

        def trade() -> None:
            exchange.trade(places)
            for item in boxes if self._held is None else ():
                planner.apply_tensor(item, places[id(item)])

        agreement.round("loading (trading replicas)", trade)
        return some_keep_state

    # ---------------------------------------------------------------- on the coordinator

    def verify(self, reports: list[_ReadReport]) -> bool:
        """Check that every chunk that was read in parts has the checksum that was written; whether any rank has values
        that keep their own state."""
        if len({report.index_crc for report in reports}) > 1:
            raise CheckpointChangedError(f"'{os.fspath(self._id)}' was replaced while it was loaded; load it again")
        parts: dict[tuple[int, int], dict[Any, int]] = {}
        for report in reports:
            for tensor, chunk, offsets, sizes, share in report.shares:
                known = parts.setdefault((tensor, chunk), {})
                if known.setdefault((offsets, sizes), share) != share:
                    known[offsets, sizes, len(known)] = share  # Two ranks read different values: see below.
        names = list(self._files.index.tensors)
        for (number, chunk), shares in parts.items():
            key = names[number]
            stored = self._files.index.tensors[key]
            whole = math.prod(stored.chunk_sizes(chunk))
            if sum(math.prod(box[1]) for box in shares) != whole:
                # The ranks did not read all of it, or some of it twice: look at the chunk itself.
                self._files.check_chunk(key, chunk)
                continue
            total = functools.reduce(operator.xor, shares.values())
            self._files.compare(
                key, chunk, total, share_of_whole(stored.crc32c[chunk], whole * dtype_size(stored.dtype))
            )
        return any(report.keeps_state for report in reports)


class CheckpointChangedError(CorruptCheckpointError):
    """The checkpoint was replaced in the middle of a load."""


def _chunk_number(tensor: StoredTensor, item: ReadItem) -> int:
    if item.storage_index.index is not None:
        return item.storage_index.index
    return next(n for n, (offsets, _) in enumerate(tensor.all_boxes()) if offsets == item.storage_index.offset)
