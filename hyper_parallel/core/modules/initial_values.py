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
from hyper_parallel.core.dtensor.random.random_state import default_state
from hyper_parallel.core.dtensor.random.sample_address import Address, at_address
from hyper_parallel.platform import get_platform

# Set by the platform, see ``without_memory``: the one number that a constructor filled it with, or what else makes the
# values of the whole, where the framework gives a parameter such a thing.
_CONSTANT = "hyper_parallel_constant"
_INITIALIZER = "hyper_parallel_initializer"
_NUMBER = "hyper_parallel_number"  # of a parameter, see below
_NUMBER_OF_MODULE = "hyper_parallel_module_number"
_LAST = "hyper_parallel_last_number"  # of all that were given with a module's
_INITIAL_VALUES = 1  # the purpose of an address


def constant_of(parameter: Any) -> Any:
    """The value that all elements of a parameter without memory had; None if they differed, or none was given."""
    return getattr(parameter, _CONSTANT, None)


def number_of(parameter: Any) -> int | None:
    """The number of the draw that makes the values of a parameter without memory; None if it has none."""
    return getattr(parameter, _NUMBER, None)


def carry_initial_values(source: Any, target: Any) -> None:
    """Let ``target``, cut out of ``source``, remember what ``source`` knows about its initial values."""
    for note in (_CONSTANT, _INITIALIZER, _NUMBER):
        if getattr(source, note, None) is not None:
            setattr(target, note, getattr(source, note))


def number_initial_values(module: Any) -> None:
    """Number the parameters without memory: the values that ``materialize`` gives them are then those of this whole
    model on one device, whatever is removed from it or cut in between.

    Call it on every rank on the whole model, built under ``deferred_init``, before anything is removed;
    ``materialize`` does it where nobody has. The seed is the one in use when ``materialize`` is called.
    """
    platform = get_platform()
    parameters: dict[int, Any] = {}
    modules = []
    for _, owner in platform.get_cells_and_names(module):
        if getattr(owner, _NUMBER_OF_MODULE, None) is None:
            modules.append(owner)
        for parameter in platform.own_parameters(owner).values():
            is_known = constant_of(parameter) is not None or number_of(parameter) is not None
            if platform.has_no_memory(parameter) and not is_known:
                parameters[id(parameter)] = parameter
    if not parameters:
        return
    first = default_state.take(len(parameters) + len(modules))
    for number, parameter in enumerate(parameters.values(), first):
        setattr(parameter, _NUMBER, number)
    last = first + len(parameters) + len(modules) - 1
    for number, owner in enumerate(modules, first + len(parameters)):
        setattr(owner, _NUMBER_OF_MODULE, number)
        setattr(owner, _LAST, last)


@contextmanager
def draws_of_module(module: Any) -> Iterator[None]:
    """Inside, what is drawn beside numbered parameters is addressed by the module's number."""
    number = getattr(module, _NUMBER_OF_MODULE, None)
    if number is None:
        yield
        return
    install_addressed_draws()
    with at_address(Address(number, None, _INITIAL_VALUES)):
        yield


def pass_by_numbers(module: Any) -> None:
    """Let later draws come behind all that were numbered with ``module``, on every rank the same."""
    default_state.pass_by(getattr(module, _LAST, -1))
