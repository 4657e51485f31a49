"""``Parallel``: a model under its degrees, the same type for every layout, and the step of every training loop."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.activation_memory.recompute import Recomputed
from hyper_parallel.core.context_parallel.batch import ordered_tokens
from hyper_parallel.core.distributed_checkpoint import state_dict as state_dicts
from hyper_parallel.core.distributed_checkpoint.async_save import async_save
from hyper_parallel.core.distributed_checkpoint.load import load
from hyper_parallel.core.distributed_checkpoint.save import save
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.random.by_sample import draws_by_sample
from hyper_parallel.core.dtensor.random.random_state import initial_seed, manual_seed
from hyper_parallel.core.dtensor.random.sample_rows import SampleRows
from hyper_parallel.core.fully_shard.hsdp_module import HSDPModule
from hyper_parallel.core.modules.deferred import materialize
from hyper_parallel.core.shard.dispatching.mixing import implicit_replication
from hyper_parallel.core.tensor_parallel.single_device_code import map_tensors
from hyper_parallel.parallel.adapter_files import save_adapters
from hyper_parallel.parallel.counts import Counts, plain, total_counts
from hyper_parallel.parallel.degrees import Degrees
from hyper_parallel.parallel.explanation import explain, prove_packing_of
from hyper_parallel.parallel.hugging_face import load_folder, require_memory, save_folder
from hyper_parallel.parallel.losses import GivenLoss, LabelledLoss, configs_of_caches, without_caches
from hyper_parallel.parallel.meshes import Meshes
from hyper_parallel.parallel.micro_batches import MicroBatch, micro_batches, named_batch, num_rows, parts_of
from hyper_parallel.parallel.part_runs import InTurn, PartRuns, own_samples, raise_added
from hyper_parallel.parallel.pipeline import Pipeline, in_silent_world
from hyper_parallel.parallel.routed_tokens import RoutedTokens
from hyper_parallel.parallel.sequence_inputs import Sequences, shard_sequences
from hyper_parallel.parallel.state_names import more_state, refuse_rest, renamed_model, renamed_optimizer, shared_names
from hyper_parallel.platform import get_platform

__all__ = ["Parallel"]

_platform = get_platform()


class Parallel:
    """A model that :func:`hyper_parallel.parallelize` has split, and what a training loop does with it.

    Every rank calls every method, with its own part of a batch. Calling the object is the model's forward; in stages,
    without gradients, and its outputs are on ranks with the last one, None on others.
    """

    lowering: Any = None  # what `compile` has lowered, a :class:`hyper_parallel.Lowering`

    def __init__(
        self,
        model: Any,
        degrees: Degrees,
        meshes: Meshes,
        loss: GivenLoss | LabelledLoss,
        microbatches: int,
        pipeline: Pipeline | None = None,
        sequences: Sequences | None = None,
    ) -> None:
        self.parts = [model]
        self.degrees = degrees
        self.microbatches = microbatches
        self._meshes = meshes
        self._loss = loss
        self._has_values = False
        self._place = meshes.batch_place()  # Once: `part_of` is also called by threads that are no rank.
        #: The number of the next step, which random numbers are addressed by; in checkpoints.
        self.step = 0
        self._first_row, self._num_rows = (0, -1), 0
        #: Numbers that each rank may set, and their sums of the last step: they travel with the number of targets.
        self.tell: tuple[int, ...] = ()
        self.told: Any = None
        #: The targets and rows of the last step's whole batch, as tensors.
        self.counts: Counts | None = None
        #: The stages of the model and their table; None where every rank has all of it.
        self.pipeline = pipeline
        self.sequences = sequences or Sequences()
        self.configs_of_caches = configs_of_caches(self.parts)
        self._runs: PartRuns = InTurn(model, degrees, meshes) if pipeline is None else pipeline
        self._routed = RoutedTokens(self.parts, meshes.batch)

    @property
    def model(self) -> Any:
        """The model, on this rank."""
        return self.parts[0]

    @property
    def name(self) -> str:
        """The name of the model's class, as it was."""
        kinds = type(self.model).__mro__
        return next(kind.__name__ for kind in kinds if not issubclass(kind, (HSDPModule, Recomputed)))

    @property
    def mesh(self) -> Any:
        """The mesh of all ranks, with an axis for each degree."""
        return self._meshes.world

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes of the mesh over which experts are sharded."""
        return self._meshes.expert_axes

    # ---------------------------------------------------------------- a step

    def mine(self, samples: Any) -> Any:
        """This rank's share of the samples of a batch, which are the same on every rank: a block of neighbours.

        >>> import hyper_parallel as hp, torch
        >>> run = hp.parallelize(torch.nn.Linear(2, 2), loss=lambda outputs, batch: (outputs.sum(), outputs.numel()))
        >>> run.mine(range(4))
        range(0, 4)
        """
        mine = self.part_of(samples)
        place, num_places = self._place
        self._first_row = parts_of(len(samples), num_places)[place][0], len(mine)
        return mine

    def part_of(self, samples: Any) -> Any:
        """What :meth:`mine` gives, of a batch that is not the next one."""
        place, num_places = self._place
        begin, end = parts_of(len(samples), num_places)[place]
        return samples[begin:end]

    def forward_backward(self, *args: Any, **batch: Any) -> Any:
        """The loss of a batch, of which this rank gives its part, with its gradients added to those that are there.

        The loss is the mean over the valid targets of the whole batch, equal on every rank, whatever the degrees, the
        micro-batches and the masks; a plain tensor without gradient. Gradients are sums, in ``parameter.grad``.

        forward: all-reduces of the number of targets and of the loss over the ranks that share a batch, beside the
        model's; backward: the model's, and the reductions of gradients over the data axes.
        """
        if not _platform.is_recording():
            raise RuntimeError("forward_backward was called under no_grad: call it outside, or loss_of in its place")
        with self._routed.counting():
            loss = self._step(named_batch(self.model, args, batch), backward=True)
        self.step += 1
        return loss

    def loss_of(self, *args: Any, **batch: Any) -> Any:
        """The loss of a batch as in :meth:`forward_backward`, in evaluation and without gradients."""
        was_training = _platform.set_training(self.model, False)
        try:
            with _platform.no_grad():
                return self._step(named_batch(self.model, args, batch), backward=False)
        finally:
            _platform.set_training(self.model, was_training)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch, order = self.sequences.ordered_values(named_batch(self.model, args, kwargs), self._loss)
        with self.sequences.running(), own_samples(self.model, self._meshes), ordered_tokens(order):
            if self.pipeline is not None:
                outputs = self.pipeline.outputs(batch, functools.partial(map_tensors, plain))
            else:
                outputs = map_tensors(plain, self.model(**shard_sequences(batch, self._meshes.compute)))
        return self.sequences.restored(outputs, order)

    def _step(self, batch: dict[str, Any], backward: bool) -> Any:
        like = next((value for value in batch.values() if _platform.is_tensor(value)), None)
        if like is None:
            raise ValueError(f"the batch has no tensors; it has {', '.join(batch) or 'nothing'}")
        if not self._has_values:
            self._require_values(like)
        alone = own_samples(self.model, self._meshes)
        with self.sequences.running(), without_caches(self.configs_of_caches), alone:
            return self._run_step(batch, like, backward)

    def _run_step(self, batch: dict[str, Any], like: Any, backward: bool) -> Any:
        self._num_rows = num_rows(batch)
        if backward and self.pipeline is not None:
            self.microbatches = self.pipeline.settle_microbatches(self._num_rows)
        parts = list(micro_batches(batch, self.microbatches))
        counts = [self._loss.counts(part.values, part.rows, like) for part in parts]
        total, self.told = total_counts(counts, self._meshes.world, ("pp", "cp", "tp"), self.tell)
        self.counts = total
        parts = [self.sequences.ordered(part, self._loss) for part in parts]
        if not self._loss.is_counted_before:
            return self._step_counted_behind(parts, backward)

        def share(model: Any, number: int, values: dict[str, Any]) -> tuple[Any, ...]:
            return (self._loss.share(model, values, counts[number], total),)

        beside = functools.partial(self._loss.share_of_auxiliary, counts, total)
        found = self._runs.run(parts, share, self._draws, backward, beside)
        return self._summed([one for (one,) in self._loss.checked(found)])

    def _require_values(self, like: Any) -> None:
        """A model without memory runs where nobody looks at values: in a world that is silent, or on such inputs."""
        if not in_silent_world() and not _platform.has_no_memory(like):
            for part in self.parts:
                require_memory(part)
            self._has_values = True

    def _step_counted_behind(self, parts: list[MicroBatch], backward: bool) -> Any:
        """A loss whose number of targets only the model's outputs tell: gradients of sums, divided at the end."""
        loss = self._loss
        assert isinstance(loss, GivenLoss)
        before = self._set_aside() if backward else {}

        def sum_and_count(model: Any, number: int, values: dict[str, Any]) -> tuple[Any, ...]:
            value, count = loss.sum_and_count(model, values)
            like = _platform.detached(value)
            return value, count if _platform.is_tensor(count) else _platform.full_like(like, count)

        found = self._runs.run(parts, sum_and_count, self._draws, backward)
        total = self._summed([count for _, count in found])
        if backward:
            self._divide_gradients(total, before)
        return self._summed([value for value, _ in found]) / total

    @contextmanager
    def _draws(self, part: MicroBatch) -> Iterator[None]:
        """Random numbers of the samples of a part, by their place in the whole batch; and the order of its tokens.

        It is the one that :meth:`mine` gave them; where it was not asked, all ranks have as many as this one.
        """
        begin, count = self._first_row
        if count != self._num_rows:
            begin = self._place[0] * self._num_rows
        tokens = None if part.order is None else part.order.indices
        rows_of_part = SampleRows(begin + part.first, max(1, part.rows), runs_along=not part.rows, tokens=tokens)
        with draws_by_sample(step=self.step, rows=rows_of_part), ordered_tokens(part.order):
            yield

    def _set_aside(self) -> dict[str, Any]:
        named = dict(self.named_parameters())
        before = {name: _platform.get_grad(one) for name, one in named.items()}
        for one in named.values():
            _platform.set_grad(one, None)
        return before

    def _divide_gradients(self, total: Any, before: Mapping[str, Any]) -> None:
        with _platform.no_grad():
            for name, parameter in self.named_parameters():
                gradient, earlier = _platform.get_grad(parameter), before[name]
                if gradient is not None:
                    gradient = gradient / _platform.tensor_type_cast(total, gradient.dtype)
                    _platform.set_grad(parameter, gradient if earlier is None else earlier + gradient)
                elif earlier is not None:
                    _platform.set_grad(parameter, earlier)

    def _summed(self, shares: Sequence[Any]) -> Any:
        """The sum over the parts and the ranks that have rows of their own; shares are with the last stage."""
        axes: tuple[str, ...] = ("dp_replicate", *self._meshes.dp_shard)
        if self.pipeline is not None:
            axes = ("pp", *axes)
            shares = [_platform.tensor_type_cast(share, self.pipeline.dtype) for share in shares]
            shares = shares or [self.pipeline.nothing]
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        mesh = self._meshes.world[axes]
        if mesh.size() > 1:
            total = _platform.all_reduce(_platform.copied(total), mesh.get_group(axes))
        return total

    def prove_packing(self, *, length: int = 32, vocab_size: int | None = None, tolerance: float = 1e-3) -> Any:
        """Proof on this model, under its degrees, that packed documents do not see each other; an error if they do. Its
        ``spelling`` is how the model is told of them. Let ``length`` be longer than a sliding window."""
        return prove_packing_of(self, length, vocab_size, tolerance)

    # ---------------------------------------------------------------- parameters and gradients

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Every parameter of this rank by its name on one device, the first that it has there, each once."""
        if self.pipeline is not None:
            yield from self.pipeline.stages.named_parameters().items()
            return
        for name, parameter in _platform.parameters_dict(self.model).items():
            if self._meshes.batch.size() > 1 and not isinstance(parameter, DTensor):
                raise_added(name, parameter)
            yield name, parameter

    def parameters(self) -> list[Any]:
        """Every parameter, for an optimizer."""
        return [parameter for _, parameter in self.named_parameters()]

    def gradients(self) -> tuple[Any, ...]:
        """The gradient of each of :meth:`parameters`, None where there is none."""
        return tuple(_platform.get_grad(parameter) for parameter in self.parameters())

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters():
            _platform.set_grad(parameter, None)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Any:
        """Scale the gradients down to the norm ``max_norm``; the norm before, that of one device."""
        if self.pipeline is not None:
            return self.pipeline.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)
        return _platform.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)

    # ---------------------------------------------------------------- values

    def materialize(self, *, seed: int | None = None) -> Parallel:
        """Give a model that was built under ``deferred_init()`` memory and initial values; this object.

        The values are those that one device would make, whatever the degrees: a Hugging Face model's own distribution,
        or the modules' own initialisation. No communication.
        """
        if seed is not None:
            manual_seed(seed)
        for part in self.parts:
            materialize(part)
        return self

    def load_hugging_face(self, folder: Any, **options: Any) -> Any:
        """Fill the model from a folder of safetensors files; every rank reads its own bytes."""
        return load_folder(self.parts, folder, **options)

    def save_hugging_face(self, folder: Any, *, tokenizer: Any = None, **options: Any) -> None:
        """Write a folder that ``from_pretrained`` opens: weights, config, generation config and the tokenizer's files.

        ``tokenizer`` is one of transformers, or a folder with its files.
        """
        self._runs.settle_buffers()
        save_folder(self.model, folder, tokenizer=tokenizer, **options)

    def save_adapters(self, folder: Any, *, base: str | None = None) -> None:
        """Write adapters, of :func:`hyper_parallel.add_lora` or peft's, as peft reads them; ``base`` is their model."""
        save_adapters(self.model, folder, base=base)

    def state_dict(self, optimizer: Any = None, *, frozen: bool = True) -> dict[str, Any]:
        """The state of the run, of the model, and of the optimizer, by names that both frameworks share.

        Without ``frozen`` parameters that are not trained are left out.
        """
        self._runs.settle_buffers()
        run = {"step": self.step, "seed": initial_seed()}
        model = state_dicts.get_model_state_dict(self.model)
        if not frozen:
            named = _platform.named_state_parameters(self.model)
            kept = {name for name, parameter in named.items() if not _platform.requires_grad(parameter)}
            model = {name: value for name, value in model.items() if name not in kept}
        names = shared_names(self.model)
        found = {"run": run, "model": renamed_model(model, names)}
        if optimizer is not None:
            found["optimizer"] = renamed_optimizer(state_dicts.get_optimizer_state_dict(self.model, optimizer), names)
        return found

    def save(
        self, path: Any, optimizer: Any = None, *, background: bool = False, frozen: bool = True, **more: Any
    ) -> Any:
        """Write a checkpoint of the model, the optimizer and ``more``, which loads under any other degrees.

        With ``background`` the state is copied and written while training goes on; a handle with ``result()``. Without
        ``frozen`` parameters that are not trained are left out, as the weights that adapters are added to.
        """
        write = async_save if background else save
        return write({**self.state_dict(optimizer, frozen=frozen), **more_state(more, "save")}, checkpoint_id=path)

    def load(
        self, path: Any, optimizer: Any = None, *, frozen: bool = True, options: bool = True, **more: Any
    ) -> dict[str, Any]:
        """Fill the model, the optimizer and ``more`` from a checkpoint; what ``more`` has become.

        ``more`` are the names that were given to :meth:`save`, with None or a value with ``load_state_dict``. Without
        ``frozen`` parameters that are not trained stay as they are, without ``options`` the optimizer's rate and decay.
        """
        state = {**self.state_dict(optimizer, frozen=frozen), **more_state(more, "load")}
        load(state, checkpoint_id=path)
        refuse_rest(path, state if frozen else self.state_dict(optimizer), self.mesh)
        names = {ours: own for own, ours in shared_names(self.model).items()}
        model = {**state_dicts.get_model_state_dict(self.model), **renamed_model(state["model"], names)}
        if optimizer is None:
            state_dicts.set_model_state_dict(self.model, model)
        else:
            slots = renamed_optimizer(state["optimizer"], names)
            if not options:
                slots["options"] = state_dicts.get_optimizer_state_dict(self.model, optimizer)["options"]
            state_dicts.set_state_dict(self.model, optimizer, model_state_dict=model, optim_state_dict=slots)
        manual_seed(state["run"]["seed"])
        self.step = state["run"]["step"]
        return {name: state[name] for name in more}

    # ---------------------------------------------------------------- looking at it

    def explain(self, *args: Any, **batch: Any) -> str:
        """The mesh, where parameters lie, their bytes on this rank; with a batch also what a step sends, and why.

        With a batch it runs :meth:`forward_backward`, and forgets the gradients of that.
        """
        return explain(self, named_batch(self.model, args, batch))

    def draw(self, *args: Any, **batch: Any) -> Any:
        """A picture of where the parameters lie; with inputs of the way through the model, and its collectives."""
        from hyper_parallel.drawing.drawing import draw

        with implicit_replication():
            return draw(self.model, **shard_sequences(named_batch(self.model, args, batch), self._meshes.compute))

    def __repr__(self) -> str:
        return f"Parallel({self.name}, {self.degrees}, microbatches={self.microbatches})"
