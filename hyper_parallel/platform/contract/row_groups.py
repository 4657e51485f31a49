"""What a framework must provide: rows in groups, each with a matrix of its own, as of tokens by expert."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class RowGroups(ABC):
    """Plain tensors of rows that are ordered by group."""

    @staticmethod
    @abstractmethod
    def order_by_key(keys: Any, num_keys: int) -> tuple[Any, Any]:
        """(the positions of a vector of whole numbers ordered by value, equal ones in their order; how many there are
        of each number below ``num_keys``); no gradient, nothing is read on the host."""

    @staticmethod
    @abstractmethod
    def inverse_order(order: Any) -> Any:
        """Where each position went: ``inverse[order[i]] == i``."""

    @staticmethod
    @abstractmethod
    def group_of_rows(counts: Any, num_rows: int) -> Any:
        """The group of each of ``num_rows`` rows, of which group g has ``counts[g]``, one group after the other."""

    @staticmethod
    @abstractmethod
    def keys_within(keys: Any, begin: int, end: int) -> Any:
        """``key - begin`` for keys from ``begin`` to before ``end``, and ``end - begin`` for all others."""

    @staticmethod
    @abstractmethod
    def replaced(keys: Any, condition: Any, other: int) -> Any:
        """``keys``, with ``other`` where the condition holds."""

    @staticmethod
    @abstractmethod
    def first_of_row(keys: Any, width: int, other: int) -> Any:
        """``keys``, rows of ``width`` behind each other, with ``other`` for each that stands in its row before."""

    @staticmethod
    @abstractmethod
    def take_rows(tensor: Any, index: Any) -> Any:
        """``tensor[index]`` for a vector of positions, also none; for use where no gradient is recorded."""

    @staticmethod
    @abstractmethod
    def grouped_linear(rows: Any, weight: Any, bias: Any, counts: Any, is_transposed: bool) -> Any:
        """``rows[i] @ weight[g].T + bias[g]`` for every row i of group g; rows are ordered by group.

        ``weight`` is (groups, outputs, inputs), with ``is_transposed`` (groups, inputs, outputs), ``bias`` (groups,
        outputs) or None. ``counts.tensor`` has the rows of each group, ``counts.numbers()`` the same as a list, read on
        the host at first use. There are rows, and every one is in a group. All groups get a gradient, zeros where
        they have no rows.
        """

    @staticmethod
    @abstractmethod
    def no_rows(width: int, rows: Any, tensors: Any) -> Any:
        """(0, ``width``) that keeps ``rows``, of which there are none, and ``tensors`` in the graph: they get zeros."""
