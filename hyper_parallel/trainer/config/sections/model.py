"""``[model]``: which model is trained and what its first values are."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from hyper_parallel.models.sizes import SIZES
from hyper_parallel.trainer.config.builders import problems_of_call
from hyper_parallel.trainer.config.reading import read_text
from hyper_parallel.trainer.config.section import STRICT, Count, Flag, Positive, Problem, Section, Text

__all__ = ["DEFAULT_TARGETS", "SCRATCH", "LoraConfig", "ModelConfig"]

SCRATCH = "scratch"
_COUNTS = ("num_hidden_layers", "n_layer", "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")
DEFAULT_TARGETS = ("*proj*", "*attention.*", "*feed_forward.*")


@dataclass(config=STRICT, kw_only=True, frozen=True)
class LoraConfig(Section):
    """Low-rank adapters are trained, and the model's own weights are not."""

    rank: Count
    """Width of the adapters."""
    alpha: Positive = 16.0
    """The adapters' output is multiplied by alpha / rank."""
    dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0
    """Part of the adapters' inputs that is zeroed in training."""
    targets: Annotated[tuple[Text, ...], Field(min_length=1)] = DEFAULT_TARGETS
    """Patterns of the names of linear layers that get an adapter."""
    save_frozen: Flag = True
    """Checkpoints hold the model's own weights too; false: they are read from model.weights again at a resume."""


@dataclass(config=STRICT, kw_only=True, frozen=True)
class ModelConfig(Section):
    """Which model is trained: one of `name`, `hugging_face` and `build`."""

    ALTERNATIVES: ClassVar[tuple[str, ...]] = ("name", "hugging_face", "build")
    WITH_ALTERNATIVE: ClassVar[tuple[str, ...]] = ("args",)

    name: Text | None = None
    """A size of a reference model, "llama-8b", "mixture-8x7b"; or "llama" or "mixture", with sizes in [model.args]."""
    hugging_face: Text | None = None
    """A folder with a Hugging Face config.json, or the path of one (PyTorch only)."""
    build: Text | None = None
    """A function that builds the model, "package.module:function"; it gets [model.args]."""
    args: dict[str, Any] = Field(default_factory=dict)
    """With name: sizes that differ. With hugging_face: values of config.json that differ. With build: its arguments."""
    weights: Text | None = None
    """The first values: "scratch" (the default but for hugging_face, where it must be said) or a folder with them."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights; needs weights from a folder."""

    @property
    def from_scratch(self) -> bool:
        """Whether the first values are drawn and not read."""
        return self.weights in (None, SCRATCH)

    def problems(self) -> Iterator[Problem]:
        given = [key for key in self.ALTERNATIVES if getattr(self, key) is not None]
        if len(given) > 1:
            yield Problem((given[1], *given), f"is given beside {given[0]}; a run has one model: keep one of them")
        elif not given:
            yield Problem(
                ("name", *self.ALTERNATIVES),
                'is missing: give name = "llama-8b", hugging_face = "folder" or build = "package.module:function"',
            )
        elif self.name is not None:
            yield from self._problems_of_name(self.name)
        elif self.hugging_face is not None:
            yield from self._problems_of_hugging_face(self.hugging_face)
        elif self.build is not None:
            for key, what in problems_of_call(self.build, self.args):
                yield Problem(("build",) if key is None else (f"args.{key}", "build"), what)
        if self.weights not in (None, SCRATCH) and not os.path.isdir(self.weights):
            yield Problem(
                ("weights",), f"must be {SCRATCH!r} or a folder; there is no folder {str(self.weights)!r} here"
            )
        if self.lora is not None and self.from_scratch:
            yield Problem(
                ("lora", "weights"),
                "adapters on weights that are drawn at random train nothing useful; say where the weights are, "
                'weights = "folder"',
            )

    def _problems_of_name(self, name: str) -> Iterator[Problem]:
        sizes = SIZES.get(name)
        if sizes is None:
            near = difflib.get_close_matches(name, SIZES, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            yield Problem(("name",), f"must be one of {', '.join(SIZES)}, got {name!r}{hint}")
            return
        wrong = list(_unknown_args(self.args, [field.name for field in dataclasses.fields(sizes)], name))
        for field in dataclasses.fields(sizes):
            value, usual = self.args.get(field.name), getattr(sizes, field.name)
            if value is not None and type(value) is not type(usual):
                if isinstance(usual, float) and type(value) is int:
                    continue
                kind = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[type(usual)]
                wrong.append(Problem((f"args.{field.name}", "name"), f"must be {kind}, got {value!r}"))
        if not wrong:
            try:
                dataclasses.replace(sizes, **self.args)
            except ValueError as error:
                what = str(error).removeprefix(f"{type(sizes).__name__}: ")
                key = next((key for key in self.args if what.startswith(f"{key}=") or f" {key}=" in what), None)
                key = key or next((key for key in self.args if what.startswith(key)), None)
                wrong.append(Problem((f"args.{key}" if key else "args", "name"), what))
        yield from wrong

    def _problems_of_hugging_face(self, given: str) -> Iterator[Problem]:
        path = os.path.join(given, "config.json") if os.path.isdir(given) else given
        if not os.path.isfile(path):
            yield Problem(
                ("hugging_face",),
                f"must be a folder with a config.json, or the path of one, on this machine; there is no file {path!r}",
            )
            return
        try:
            values = json.loads(read_text(path))
        except (json.JSONDecodeError, RecursionError) as error:
            yield Problem(("hugging_face",), f"{path!r} is not JSON: {error}")
            return
        except ValueError as error:
            yield Problem(("hugging_face",), f"{path!r} cannot be read: {error}")
            return
        if not isinstance(values, dict) or "model_type" not in values:
            yield Problem(
                ("hugging_face",), f"{path!r} is not the config of a Hugging Face model: it has no 'model_type'"
            )
            return
        yield from _unknown_args(self.args, list(values), f"{path!r}")
        for name in _COUNTS:
            size = self.args.get(name, values.get(name))
            if type(size) is int and size < 1:
                key = f"args.{name}" if name in self.args else "hugging_face"
                yield Problem((key, "hugging_face"), f"{name} of {path!r} must be at least 1, got {size}")
        if self.weights is None:
            yield Problem(
                ("weights", "hugging_face"),
                f"is missing: say {SCRATCH!r} to draw new values, or the folder whose weights are trained on",
            )


def _unknown_args(args: dict[str, Any], known: list[str], of: str) -> Iterator[Problem]:
    for key in args:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            yield Problem((f"args.{key}", "name", "hugging_face"), f"{of} has no such value; {hint}")
