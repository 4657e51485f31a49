"""What a parameter without memory knows about its initial values; it goes with the parameter when that is cut.

Note [Numbers of initial values]
A parameter without memory has a number, and its values are those of the draw with that number; so they depend on
neither the parameters that other pipeline stages hold nor on the order in which values are made. Modules have numbers
too, for what their code draws beside parameters. Numbers are given once, in the order of the modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.random.by_sample import install_addressed_draws
from hyper_parallel.core.dtensor.random.random_fill import NUMBERED
from hyper_parallel.core.dtensor.random.random_state import default_state
from hyper_parallel.core.dtensor.random.sample_address import Address, at_address
from hyper_parallel.core.modules.lora import is_of_adapter
from hyper_parallel.core.shard.dispatching.mixing import implicit_replication
from hyper_parallel.platform import get_platform

# Set by the platform, see ``without_memory``: the one number that a constructor filled it with, or what else makes the
# values of the whole, where the framework gives a parameter such a thing.
_CONSTANT = "hyper_parallel_constant"
_INITIALIZER = "hyper_parallel_initializer"
_NUMBER = "hyper_parallel_number"  # of a parameter, see below
_FIRST_OWNER = "hyper_parallel_first_owner"  # of a parameter that several modules have: (module, name there)
_NUMBER_OF_MODULE = "hyper_parallel_module_number"
_INITIAL_VALUES = 1  # the purpose of an address


def constant_of(parameter: Any) -> Any:
    """The value that all elements of a parameter without memory had; None if they differed, or none was given."""
    return getattr(parameter, _CONSTANT, None)


def number_of(parameter: Any) -> int | None:
    """The number of the draw that makes the values of a parameter without memory; None if it has none."""
    number = getattr(parameter, _NUMBER, None)
    return None if number is None else number.draw()


def first_owner_of(parameter: Any) -> tuple[Any, str] | None:
    """The first module that has a tied parameter without memory, which may be on another stage, and its name there."""
    return getattr(parameter, _FIRST_OWNER, None)


def carry_initial_values(source: Any, target: Any) -> None:
    """Let ``target``, cut out of ``source``, remember what ``source`` knows about its initial values."""
    for note in (_CONSTANT, _INITIALIZER, _NUMBER, _FIRST_OWNER):
        if getattr(source, note, None) is not None:
            setattr(target, note, getattr(source, note))


class _Numbering:
    """Numbers that were given together: one row of draws, which begins where the first values of it are made."""

    def __init__(self, count: int) -> None:
        self._count, self._first = count, -1

    def first(self) -> int:
        """The draw that place 0 has."""
        if self._first < 0:
            self._first = default_state.take(self._count)
        return self._first


class _Number:
    """One place of a numbering."""

    def __init__(self, numbering: _Numbering, place: int) -> None:
        self._numbering, self._place = numbering, place

    def draw(self) -> int:
        return self._numbering.first() + self._place


def number_initial_values(module: Any) -> None:
    """Number the parameters without memory: the values that ``materialize`` gives them are then those of this whole
    model on one device, whatever is removed from it or cut in between.

    Call it on every rank on the whole model, built under ``deferred_init``, before anything is removed;
    ``materialize`` does it where nobody has. Nothing is drawn yet: the seed is the one in use when ``materialize`` is
    called, and what remains of one model may be given its values in several calls.
    """
    platform = get_platform()
    parameters: dict[int, Any] = {}
    adapters: dict[int, Any] = {}
    modules = []
    owners: dict[int, tuple[Any, str]] = {}
    for _, owner in platform.get_cells_and_names(module):
        if getattr(owner, _NUMBER_OF_MODULE, None) is None:
            modules.append(owner)
        for name, parameter in platform.own_parameters(owner).items():
            if owners.setdefault(id(parameter), (owner, name))[0] is not owner and platform.has_no_memory(parameter):
                setattr(parameter, _FIRST_OWNER, owners[id(parameter)])
            # Also those that are all one number: frameworks differ in which of them tell, and not in their numbers.
            if platform.has_no_memory(parameter) and getattr(parameter, _NUMBER, None) is None:
                (adapters if is_of_adapter(name) else parameters)[id(parameter)] = parameter
    # Behind the others, which have the same values with adapters and without.
    numbering = _Numbering(len(adapters))
    for place, parameter in enumerate(adapters.values()):
        setattr(parameter, _NUMBER, _Number(numbering, place))
    if not parameters:
        return
    numbering = _Numbering(len(parameters) + len(modules))
    for place, parameter in enumerate(parameters.values()):
        setattr(parameter, _NUMBER, _Number(numbering, place))
    for place, owner in enumerate(modules, len(parameters)):
        setattr(owner, _NUMBER_OF_MODULE, _Number(numbering, place))


@contextmanager
def draws_of_module(module: Any) -> Iterator[None]:
    """Inside, what is drawn beside numbered parameters is addressed by the module's number: plain tensors are the same
    on every rank, and may meet distributed ones."""
    number = getattr(module, _NUMBER_OF_MODULE, None)
    for parameter in get_platform().own_parameters(module).values():
        if (fills := getattr(parameter, NUMBERED, None)) is not None:
            fills.restart()
    if number is None:
        yield
        return
    install_addressed_draws()
    with implicit_replication(), at_address(Address(number.draw(), None, _INITIAL_VALUES)):
        yield
