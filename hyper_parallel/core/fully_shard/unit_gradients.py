"""What becomes of a unit's gradients: reduced at once, kept whole until later, or reduced between replicas later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.fully_shard.gradient_layout import GradientLayout
from hyper_parallel.core.fully_shard.gradient_reduction import InFlight, Reduction
from hyper_parallel.core.fully_shard.policies import CPUOffloadPolicy
from hyper_parallel.core.fully_shard.sharded_parameter import ShardedParameter
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.core.fully_shard.unit import Unit

_platform = get_platform()


class UnitGradients:
    """Gradients of one unit over the micro-batches of a step.

    Bytes that each way keeps between micro-batches, for P parameter bytes on N ranks that shard: reduced each time P/N;
    kept whole (``reduces = False``) P; reduced over the shard axes only (``all_reduces = False``) twice P/N.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.reduces = True
        self.all_reduces = True
        self.is_due = False  # something was kept, by some rank, that has not been reduced
        self._whole: dict[int, Any] = {}
        self._watched: list[list[Any]] = []
        self._partial: list[list[Any]] | None = None
        self._partial_missing: list[bool] = []
        self._layouts: list[GradientLayout] = []
        self._sent_bytes = 0
        self._planned_for: Any = None
        self._has_main_gradients = unit.mp_policy.apply_grad_on_fp32_main_grad

    def take(self, gradients: list[Any], later: InFlight | None) -> list[Any] | None:
        """Gradients of whole values, None where there is none; this rank's blocks, or None: never, or by ``later``."""
        if not self.reduces:
            self._keep(gradients)
            return None
        reduction = self._start(gradients)
        if reduction is None:
            return None
        if later is not None:
            later.add(reduction, self.unit.root.reduction_bytes)
            return None
        blocks = reduction.finish()
        if not self._has_main_gradients:
            return blocks
        self.deliver(blocks)
        return None

    # Note [Gradients that others write]
    # A pipeline that splits its backward computes the gradients of inputs first and those of weights later, perhaps
    # outside of the framework's backward, and writes the latter into ``grad`` of the whole values that forward has
    # seen. While gradients are kept these values are remembered, and what lies in their ``grad`` when the unit is
    # reduced is added to what backward has brought.

    def watch(self, values: list[Any]) -> None:
        """Whole values that forward is to see; see Note [Gradients that others write]."""
        if not self.reduces:
            self._watched.append(values)

    def take_kept(self) -> None:
        """Reduce what was kept, if anything was; the result goes to ``grad``."""
        if self.is_due:
            reduction = self._start([None] * len(self.unit.parameters))
            if reduction is not None:
                self.unit.root.in_flight.add(reduction, self.unit.root.reduction_bytes)

    def _keep(self, gradients: list[Any]) -> None:
        self.is_due = True
        wanted = self.unit.mp_policy.reduce_dtype
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                self._whole[i] = _platform.accumulate(self._whole.get(i), gradient, wanted or gradient.dtype)

    def _start(self, gradients: list[Any]) -> Reduction | None:
        layouts = self._plan()
        if not layouts:
            return None
        for i, kept in self._whole.items():
            given = gradients[i]
            gradients[i] = kept if given is None else _platform.accumulate(kept, given, kept.dtype)
        for values in self._watched:
            for i, written in enumerate(_platform.take_grads(values)):
                if written is not None and self.unit.needs_grad[i]:
                    dtype = self.unit.mp_policy.reduce_dtype or written.dtype
                    total, given = _platform.accumulate(None, written, dtype), gradients[i]
                    gradients[i] = total if given is None else _platform.accumulate(total, given, dtype)
        self._whole, self.is_due, self._watched = {}, False, []
        return Reduction(self.unit, layouts, gradients, self._device())

    @property
    def num_bytes(self) -> int:
        """What a reduction has in flight and gives back when it is complete."""
        self._plan()
        return self._sent_bytes

    def _plan(self) -> list[GradientLayout]:
        unit = self.unit
        wanted = (unit.needs_grad, unit.buffers)
        if wanted != self._planned_for:
            alike: dict[Any, list[tuple[int, ShardedParameter]]] = {}
            for i, p in enumerate(unit.parameters):
                if unit.needs_grad[i]:
                    dtype = unit.compute_dtype(p) or p.parameter.dtype
                    alike.setdefault((p.axes.key(), dtype, p.parameter.dtype), []).append((i, p))
            reduce_dtype = unit.mp_policy.reduce_dtype
            self._layouts = [GradientLayout(group, dtype, reduce_dtype) for (_, dtype, _), group in alike.items()]
            self._sent_bytes = sum(
                layout.num_elements * _platform.get_element_size(_platform.new_tensor((1,), layout.dtype, "cpu"))
                for layout in self._layouts
                if layout.num_rows > 1
            )
            self._planned_for = wanted
        return self._layouts

    def _device(self) -> Any:
        block = _platform.detached(self.unit.parameters[0].parameter)
        if _platform.has_no_memory(block) or not isinstance(self.unit.offload_policy, CPUOffloadPolicy):
            return block.device
        return _platform.get_device_type()

    # ---------------------------------------------------------------- reductions between replicas that come later

    def add_partial(self, results: list[list[Any]], missing: list[bool]) -> None:
        """Add what earlier micro-batches left to be reduced between replicas; keep it again unless this is the last."""
        if self._partial is not None:
            for mine, before in zip(results, self._partial, strict=True):
                for place, earlier in enumerate(before):
                    mine[place] = _platform.accumulate(mine[place], earlier, mine[place].dtype)
            missing[:] = [now and before for now, before in zip(missing, self._partial_missing, strict=True)]
        self._partial = None if self.all_reduces else results
        self._partial_missing = [] if self.all_reduces else list(missing)

    # ---------------------------------------------------------------- results

    def as_gradients(self, results: list[Any], p: ShardedParameter) -> list[Any]:
        """Reduced values as sharded parameters like ``p`` want them: their dtype, and in host memory where they are."""
        dtype = _platform.str_to_dtype("float32") if self._has_main_gradients else p.parameter.dtype
        results = [one if one.dtype == dtype else _platform.tensor_type_cast(one, dtype) for one in results]
        if isinstance(self.unit.offload_policy, CPUOffloadPolicy):
            results = [_platform.to_device(one, "cpu") for one in results]
        return results

    def deliver(self, blocks: list[Any]) -> None:
        """Add finished blocks to the gradients of the sharded parameters."""
        if not self._has_main_gradients:
            _platform.add_all_to_grad(self.unit.tensors, blocks)
            return
        for p, block in zip(self.unit.parameters, blocks, strict=True):
            if block is None:
                continue
            before = getattr(p.parameter, "main_grad", None)
            if before is not None:
                block = _platform.accumulate(_platform.detached(before), block, block.dtype)
            lawful = p.layouts.between.gradient()
            p.parameter.main_grad = _platform.as_dtensor(DTensor, _platform.detached(block), lawful, p.shape)
