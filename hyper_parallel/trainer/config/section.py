"""What all sections of a config have in common: how they are checked, and the kinds of values in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import CoreSchema, PydanticCustomError, core_schema
from typing_extensions import Self

from hyper_parallel.analysis.byte_sizes import parse_bytes
from hyper_parallel.data.config import DataConfig, SourceConfig
from hyper_parallel.launch.durations import seconds_of

__all__ = [
    "STRICT",
    "Bytes",
    "Count",
    "Data",
    "Duration",
    "Flag",
    "Fraction",
    "Positive",
    "Problem",
    "Section",
    "Text",
    "Whole",
]

STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)


def _is_duration(text: str) -> str:
    try:
        seconds_of(text)
    except ValueError as error:
        raise PydanticCustomError("allowed", "{allowed}", {"allowed": str(error)}) from None
    return text


def _has_no_nul(text: str) -> str:
    if "\0" in text:
        raise PydanticCustomError("allowed", "{allowed}", {"allowed": "a text without NUL"})
    return text


def _is_bytes(text: str) -> str:
    try:
        parse_bytes(text)
    except ValueError:
        raise PydanticCustomError("allowed", "{allowed}", {"allowed": 'an amount of memory such as "80GB"'}) from None
    return text


# A text is no number, 1 is no flag: nothing is converted but whole numbers where any number will do.
Count = Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)]
Whole = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(min_length=1), AfterValidator(_has_no_nul)]
Duration = Annotated[str, AfterValidator(_is_duration)]
Bytes = Annotated[str, AfterValidator(_is_bytes)]


class _OrDict:
    """DataConfig converts nothing, which for a dataclass means dicts too. Files are read as JSON, where it takes them;
    here it does from Python as well."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        from_dict = core_schema.no_info_before_validator_function(_data, schema)
        return core_schema.json_or_python_schema(json_schema=schema, python_schema=from_dict)


def _data(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    sources = value.get("sources", ())
    if isinstance(sources, list | tuple):
        value = value | {"sources": tuple(SourceConfig(**one) if isinstance(one, dict) else one for one in sources)}
    return DataConfig(**value)


Data = Annotated[DataConfig, _OrDict]


class Problem(NamedTuple):
    """Values that are each allowed and do not go together; the first key is where it is reported."""

    keys: tuple[str, ...]
    what: str


@dataclass(config=STRICT, kw_only=True, frozen=True)
class Section:
    """One table of a config."""

    # Keys of which one is given. One that a later file or --set gives takes the place of the others.
    ALTERNATIVES: ClassVar[tuple[str, ...]] = ()
    # Keys that are about the alternative they were given with, and go when it goes.
    WITH_ALTERNATIVE: ClassVar[tuple[str, ...]] = ()

    def problems(self) -> Iterator[Problem]:
        """What is wrong between the values of this section, keys relative to it."""
        yield from ()

    @model_validator(mode="after")
    def _raise_problems(self) -> Self:
        found = list(self.problems())
        if found:
            text = "; ".join(f"{problem.keys[0]}: {problem.what}" for problem in found)
            raise PydanticCustomError("problems", "{text}", {"text": text, "problems": found})
        return self
