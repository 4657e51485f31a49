"""Operators whose result, or its shape, depends on values: without memory there are none to look at.

Note [Integers are real]
------------------------
Models look at integers on the host: whether a mask hides anything, where packed sequences begin, how long a cache is.
So what a program makes of integers, ranges and masks alone is computed for real, on the host. An operator that mixes
them with tensors without memory sees them without memory too, and its result has none. What is left are values that
follow from weights: a program that reads one inside of a step is told which of its lines does.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from hyper_parallel.platform.torch.dry_run.user_lines import user_line

aten = torch.ops.aten

# Those that end in Python as a number, or whose results have as many elements as the values say.
READ_BY = {
    aten._local_scalar_dense: "item(), float(), int() or a condition such as `if tensor:`",
    aten.is_nonzero: "a condition such as `if tensor:`",
    aten.equal: "torch.equal",
    aten.nonzero: "nonzero, or where with one argument",
    aten.masked_select: "masked_select",
    aten._unique2: "unique",
    aten.unique_dim: "unique",
    aten.unique_consecutive: "unique_consecutive",
    aten.bincount: "bincount",
    aten.repeat_interleave: "repeat_interleave with a tensor of counts",
}


class ValueReadError(RuntimeError):
    """A value that follows from weights was read inside of a run without memory."""


def refuse_read(operator: Any) -> NoReturn:
    """Raise, with the line that reads."""
    how = READ_BY.get(operator, str(operator).removeprefix("aten."))
    raise ValueReadError(
        f"dry run: {user_line() or 'a line outside of the model'} reads a value that follows from weights ({how}), "
        "and a run without memory has none. Move it out of the step (log the loss once in a while, not in each step), "
        "or compute with tensors: torch.where in place of a condition, a fixed size in place of a count"
    )
