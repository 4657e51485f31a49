"""What a config says of its model before one is built, and what the rest of the run has to keep to."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.pipeline_parallel.tables import make_table
from hyper_parallel.core.pipeline_parallel.tables.counts import default_microbatches
from hyper_parallel.data.config import DataConfig, SourceConfig
from hyper_parallel.models.mixture_config import MixtureConfig
from hyper_parallel.models.sizes import SIZES
from hyper_parallel.trainer.config.reading import read_text
from hyper_parallel.trainer.config.section import Problem
from hyper_parallel.trainer.config.sections.model import ModelConfig
from hyper_parallel.trainer.config.sections.parallel import ParallelConfig

if TYPE_CHECKING:
    from hyper_parallel.trainer.config.run_config import RunConfig

__all__ = ["KnownModel", "known_model", "problems_with_model", "runs_on_mindspore"]

_NUM_BYTES = 256  # tokens of the tokenizer "bytes"
_ANY_STAGES = ("interleaved", "looped_bfs", "zb1p")  # schedules that take any number of stages a rank
_POSITIONS, _BLOCKS = ("max_position_embeddings", "n_positions"), ("num_hidden_layers", "n_layer")


@dataclass(frozen=True)
class KnownModel:
    """Sizes of a model, each with the key of [model.args] that changes it; what is None is not known."""

    name: str = "the model"
    vocab_size: tuple[str, int] | None = None
    length: tuple[str, int] | None = None  # the most tokens of a sample
    blocks: tuple[str, int] | None = None
    is_ours: bool = False
    has_experts: bool | None = None

    def problems_of_data(self, data: DataConfig, at: str = "data") -> Iterator[Problem]:
        """Samples that it has no positions, no ids or no masks for."""
        if self.length is not None and data.length > self.length[1]:
            key, most = self.length
            yield Problem(
                (f"{at}.length", f"model.args.{key}", "model"),
                f"must be at most {key} = {most} of {self.name}, got {data.length}; for longer samples give it in "
                f"[model.args], {key} = {data.length}",
            )
        for place, source in [(f"{at}.sources", one) for one in data.sources] or [(at, data)]:
            yield from self._problems_of_source(place, at, source, data)

    def _problems_of_source(
        self, place: str, at: str, source: SourceConfig | DataConfig, data: DataConfig
    ) -> Iterator[Problem]:
        ids = _vocabulary(source, data)
        if self.vocab_size is not None and ids is not None and ids[1] > self.vocab_size[1]:
            key, most = self.vocab_size
            yield Problem(
                (f"{place}.{ids[0]}" if place == at else place, f"{at}.tokenizer", f"model.args.{key}", at, "model"),
                f"has {ids[1]} token ids, but {self.name} only {most}; give the tokenizer that belongs to the model, "
                f"or {key} = {ids[1]} in [model.args]",
            )
        packs = "packing" if source.kind == "chat" else "isolate"
        if self.is_ours and source.kind != "synthetic" and getattr(data, packs):
            yield Problem(
                (f"{at}.{packs}", place, at),
                f"must be false for {self.name}, which cannot keep the documents of a sample apart: its forward takes "
                "no position_ids",
            )

    def problems_of_degrees(self, parallel: ParallelConfig, pp: int, cp: int, ep: int) -> Iterator[Problem]:
        """More stages than blocks, experts that it does not have, an order that it does not know."""
        if self.blocks is not None and pp > 1:
            yield from self._problems_of_stages(parallel, pp, *self.blocks)
        if ep > 1 and self.has_experts is False:
            yield Problem(("parallel.ep", "model"), f"must be 1: {self.name} has no experts, got {ep}")
        if cp > 1 and self.is_ours and parallel.order != "contiguous":
            yield Problem(
                ("parallel.order", "parallel.cp", "model"),
                f'must be "contiguous" for {self.name}, which counts positions by itself, got "{parallel.order}"',
            )

    def _problems_of_stages(self, parallel: ParallelConfig, pp: int, key: str, blocks: int) -> Iterator[Problem]:
        schedule, given = parallel.schedule, parallel.stages_per_rank
        keys = ("parallel.pp", "parallel.schedule", f"model.args.{key}", "model")
        if pp > blocks:
            yield Problem(keys, f"must be at most the blocks of {self.name}, {key} = {blocks}, got {pp}")
            return
        usual = make_table(schedule, pp, default_microbatches(schedule, pp)).stages.stages_per_rank
        if given not in (None, usual) and schedule not in _ANY_STAGES:
            yield Problem(
                ("parallel.stages_per_rank", "parallel.schedule"),
                f'must be left out: schedule = "{schedule}" has {usual} on each rank, got {given}; '
                f"{', '.join(_ANY_STAGES)} take any number",
            )
            return
        each = usual if given is None else given
        if pp * each > blocks:
            yield Problem(
                keys,
                f'is too many for schedule = "{schedule}": {each} stages on each rank are {pp * each} in all, of one '
                f'block or more, and {self.name} has {key} = {blocks}; give fewer, or "1f1b", which has one a rank',
            )


def problems_with_model(config: RunConfig) -> Iterator[Problem]:
    """What does not go together with the model of a run, as far as it is known before one is built."""
    given, known = config.model, known_model(config.model)
    if not given.from_scratch and not any(one.endswith(".safetensors") for one in os.listdir(str(given.weights))):
        yield Problem(("model.weights",), f"must be a folder with safetensors files; {given.weights!r} has none")
    if runs_on_mindspore():
        yield from _problems_on_mindspore(config)
    yield from known.problems_of_data(config.data)
    if config.eval.data is not None:
        yield from known.problems_of_data(config.eval.data, "eval.data")
    degrees = config.parallel.degrees.fit(config.world_size)
    yield from known.problems_of_degrees(config.parallel, degrees.sizes["pp"], degrees.sizes["cp"], int(degrees.ep))


def _problems_on_mindspore(config: RunConfig) -> Iterator[Problem]:
    if config.model.hugging_face is not None:
        yield Problem(
            ("model.hugging_face",),
            "is for PyTorch, and this run is on MindSpore: set HYPER_PARALLEL_PLATFORM=torch, or take a model by name",
        )
    if config.precision.compile == "inductor":
        yield Problem(
            ("precision.compile",),
            'must be "local" or "none" on MindSpore, which inductor does not compile; or set '
            "HYPER_PARALLEL_PLATFORM=torch",
        )


def runs_on_mindspore() -> bool:
    """As ``get_platform`` decides, without importing a framework."""
    asked = os.environ.get("HYPER_PARALLEL_PLATFORM", "").strip().lower()
    return asked == "mindspore" or (not asked and importlib.util.find_spec("mindspore") is not None)


def known_model(config: ModelConfig) -> KnownModel:
    """What is known of the model of a config that has been checked by itself."""
    if config.name is not None:
        sizes = dataclasses.replace(SIZES[config.name], **config.args)
        return KnownModel(
            config.name,
            ("vocab_size", sizes.vocab_size),
            ("max_length", sizes.max_length),
            ("num_blocks", sizes.num_blocks),
            is_ours=True,
            has_experts=isinstance(sizes, MixtureConfig),
        )
    if config.hugging_face is not None:
        path = config.hugging_face
        file = os.path.join(path, "config.json") if os.path.isdir(path) else path
        values = {**json.loads(read_text(file)), **config.args}
        return KnownModel(repr(path), _size(values, ("vocab_size",)), _size(values, _POSITIONS), _size(values, _BLOCKS))
    return KnownModel()


def _size(values: dict[str, Any], names: tuple[str, ...]) -> tuple[str, int] | None:
    """The first of the values that is a size."""
    return next(((name, values[name]) for name in names if type(values.get(name)) is int and values[name] > 0), None)


def _vocabulary(source: SourceConfig | DataConfig, data: DataConfig) -> tuple[str, int] | None:
    """(the key that decides, how many token ids the data has); None: only a file knows."""
    if source.kind == "synthetic":
        return "vocab_size", source.vocab_size or _NUM_BYTES
    if source.kind == "tokens":
        return ("vocab_size", source.vocab_size) if source.vocab_size is not None else None
    return ("tokenizer", _NUM_BYTES) if data.tokenizer == "bytes" else None
