"""Inputs whose sequence dim is sharded over the axis cp.

Every rank of a line along cp and tp has the same samples. What has a sequence dim, ids, labels, positions and masks of
(samples, sequence), becomes a distributed tensor that is sharded there; the model's code sees global shapes, so
positions, shifted labels and masks that it makes come out as on one device. Other tensors stay as they are, and are the
same on all these ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from hyper_parallel.core.context_parallel.batch import ORDERS, TokenOrder, is_sequence, ordered_batch, sequence_shape
from hyper_parallel.core.context_parallel.blocks.schemes import SCHEMES, attention_scheme
from hyper_parallel.core.context_parallel.hugging_face import (
    counts_from_zero,
    follows_interface,
    take_over_attention,
)
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distribute import distribute_tensor
from hyper_parallel.core.dtensor.placement_types import Replicate, Shard
from hyper_parallel.core.tensor_parallel.single_device_code import map_tensors
from hyper_parallel.parallel.losses import GivenLoss, LabelledLoss, inside_adapters, is_hugging_face
from hyper_parallel.parallel.micro_batches import MicroBatch, input_names

__all__ = ["Sequences", "shard_sequences"]


def shard_sequences(batch: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """The batch with what is (samples, sequence, ...) sharded on the sequence over the axis cp of ``mesh``."""
    shape = sequence_shape(batch)
    if shape is None or mesh.size("cp") == 1:
        return dict(batch)
    placements = [Shard(1) if name == "cp" else Replicate() for name in mesh.mesh_dim_names or ()]
    return {
        name: distribute_tensor(value, mesh, placements) if is_sequence(value, shape) else value
        for name, value in batch.items()
    }


class Sequences:
    """How a run treats sequences: in how many shards, in which order tokens lie, by which scheme attention is
    computed.
    """

    def __init__(self, num_parts: int = 1, attention: str = "auto", order: str = "contiguous") -> None:
        if attention not in SCHEMES:
            raise ValueError(f"parallelize: attention={attention!r} is none of {', '.join(map(repr, SCHEMES))}")
        if order not in ORDERS:
            raise ValueError(f"parallelize: order={order!r} is none of {', '.join(map(repr, ORDERS))}")
        self.num_parts, self.attention = num_parts, attention
        self.order = order if num_parts > 1 else "contiguous"
        self._needs_positions = ""  # the name of a model that does not count from 0 where it is given no positions

    def prepare(self, model: Any, loss: GivenLoss | LabelledLoss) -> None:
        """Let the model compute attention by ours, if it is one of transformers'; errors for what cannot be done."""
        if self.num_parts == 1:
            return
        chosen = is_hugging_face(model) and take_over_attention(model)
        name, order = type(model).__name__, f"order={self.order!r}"
        if self.attention not in ("auto", "gather") and is_hugging_face(model) and not chosen:
            raise ValueError(
                f"parallelize: attention={self.attention!r}: {name} does not compute attention by transformers' "
                "AttentionInterface, so no scheme can be chosen for it; write attention='auto': its own operators run "
                "on shards of the sequence and gather where they must"
            )
        if self.order == "contiguous":
            return
        if is_hugging_face(model) and not follows_interface(model):
            raise ValueError(
                f"parallelize: {order}: {name} computes attention in a way of its own, by the order of tokens, and "
                "not by transformers' AttentionInterface; write order='contiguous'"
            )
        if not chosen or "position_ids" not in input_names(inside_adapters(model)):
            raise ValueError(
                f"parallelize: {order}: {name} counts positions by itself (its forward takes no position_ids, or it is "
                "not one of transformers'); write order='contiguous'"
            )
        if loss.shifts_labels is None:
            raise ValueError(
                f"parallelize: {order}: nothing says whether the loss compares the outputs at a token with the label "
                "of that token or of the next; give loss=hp.next_token_loss, or a function with an attribute "
                "shifts_labels, True or False"
            )
        if not counts_from_zero(model):
            self._needs_positions = name

    def ordered(self, part: MicroBatch, loss: GivenLoss | LabelledLoss) -> MicroBatch:
        """A part with its tokens in the order of this run."""
        values, order = self.ordered_values(part.values, loss)
        return part if order is None else replace(part, values=values, order=order)

    def ordered_values(
        self, batch: Mapping[str, Any], loss: GivenLoss | LabelledLoss
    ) -> tuple[dict[str, Any], TokenOrder | None]:
        """A batch in the order of this run, and that order; None: that of the sequence."""
        if self._needs_positions and batch.get("position_ids") is None:
            raise ValueError(
                f"parallelize: order={self.order!r}: {self._needs_positions} does not count positions from 0 in every "
                "row (from behind the padding, or from another number); give position_ids with the batch as it would "
                "count them, or write order='contiguous'"
            )
        values, order = ordered_batch(batch, self.order, self.num_parts, shifts_labels=bool(loss.shifts_labels))
        if order is not None and isinstance(loss, LabelledLoss) and "shift_labels" in values:
            values["labels"] = values["shift_labels"]  # without labels the model computes no loss
            if "shift_labels" not in batch:
                del values["shift_labels"]
        return values, order

    def running(self) -> AbstractContextManager[None]:
        """Context: of a forward, and of a backward, in which blocks may be computed again."""
        return attention_scheme(self.attention)

    @staticmethod
    def restored(outputs: Any, order: TokenOrder | None) -> Any:
        """Outputs of (samples, sequence, ...) with their tokens in the order of the sequence."""
        if order is None:
            return outputs
        num_tokens = len(order.indices)

        def one(value: Any) -> Any:
            return order.restored(value) if value.ndim > 1 and value.shape[1] == num_tokens else value

        return map_tensors(one, outputs)

    def described(self) -> Sequence[str]:
        """Lines for an explanation."""
        if self.num_parts == 1:
            return []
        return [f"  attention over {self.num_parts} parts of the sequence: {self.attention}, {self.order} order"]
