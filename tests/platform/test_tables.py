"""A platform's methods are found by name in its files; a name that is missing or defined twice is an error."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod

import pytest

from hyper_parallel.platform.contract.tables import takes_from

only_on = "torch"  # no framework takes part


class Contract(ABC):
    @staticmethod
    @abstractmethod
    def first(x): ...

    @abstractmethod
    def second(self): ...


def room(name, **functions):
    made = types.ModuleType(name)
    for key, function in functions.items():
        function.__module__ = name
        setattr(made, key, function)
    return made


def test_methods_come_from_the_room_that_defines_them():
    importing = room("importing")
    importing.first = len  # imported there, not defined
    defining = room("defining", first=lambda x: x + 1)

    @takes_from(importing, defining)
    class Table(Contract):
        def second(self):
            return "own"

    assert Table().first(1) == 2 and Table.first(1) == 2 and Table().second() == "own"


def test_a_method_of_an_object_that_the_room_has_is_its_own():
    class Adder:
        def first(self, x):
            return x + 1

    having = room("having")
    having.first = Adder().first

    @takes_from(having)
    class Table(Contract):
        def second(self):
            return "own"

    assert Table().first(1) == 2


def test_what_no_room_defines_is_missing():
    @takes_from(room("one", first=lambda x: x))
    class Table(Contract):
        pass

    with pytest.raises(TypeError, match="second"):
        Table()


def test_what_two_rooms_define_is_refused():
    with pytest.raises(TypeError, match=r"Table\.first is defined by one and by two"):

        @takes_from(room("one", first=lambda x: x), room("two", first=lambda x: x))
        class Table(Contract):
            pass
