"""``einsum``: its equation is the signature; letters that the output lacks leave a pending sum."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import Labels, OpCall, Signature, TensorSpec

_ELLIPSIS = "..."


@rule("einsum")
def einsum(call: OpCall) -> Signature | None:
    """Letters repeated within one operand (diagonals) stay whole; dims of size 1 stretch to the letter's others."""
    operands, output = _parse(call.args)
    if len(operands) != len(call.tensors):
        return None
    shapes = [spec.shape for spec in call.tensors]
    num_stretched = max(
        (len(shape) - len(labels) + 1 for labels, shape in zip(operands, shapes, strict=True) if _ELLIPSIS in labels),
        default=0,
    )
    spread = [_spread(labels, len(shape), num_stretched) for labels, shape in zip(operands, shapes, strict=True)]
    if output is None:
        output = _implicit_output(spread, num_stretched)
    else:
        output = _spread(output, len(output) - (_ELLIPSIS in output) + num_stretched, num_stretched)
    sizes: dict[str, int] = {}
    for labels, shape in zip(spread, shapes, strict=True):
        for letter, size in zip(labels, shape, strict=True):
            if sizes.get(letter, 1) == 1:
                sizes[letter] = size
    whole = {letter for labels in spread for letter in labels if labels.count(letter) > 1}
    inputs = tuple(
        tuple(
            None if letter in whole or size != sizes[letter] else letter
            for letter, size in zip(labels, shape, strict=True)
        )
        for labels, shape in zip(spread, shapes, strict=True)
    )
    out: Labels = tuple(None if letter in whole else letter for letter in output)
    reduces = {letter: "sum" for letter in sizes if letter not in output and letter not in whole}
    alone = tuple(frozenset({index}) for index in range(len(inputs)))
    return Signature(inputs, (out,), reduces=reduces, linear=alone)


def _parse(args: tuple[Any, ...]) -> tuple[list[list[str]], list[str] | None]:
    """The letters of the operands and of the output (None: not given), from an equation or from lists of numbers."""
    if isinstance(args[0], TensorSpec):
        lists = [value for value in args if isinstance(value, (list, tuple))]
        num_operands = sum(isinstance(value, TensorSpec) for value in args)
        named = [[_ELLIPSIS if item is Ellipsis else f"#{item}" for item in one] for one in lists]
        return named[:num_operands], named[num_operands] if len(named) > num_operands else None
    left, arrow, right = args[0].replace(" ", "").partition("->")
    return [_letters(labels) for labels in left.split(",")], _letters(right) if arrow else None


def _letters(labels: str) -> list[str]:
    before, ellipsis, after = labels.partition(_ELLIPSIS)
    return [*before, *([_ELLIPSIS] if ellipsis else []), *after]


def _spread(labels: list[str], ndim: int, num_stretched: int) -> list[str]:
    """The labels with an ellipsis written out, counted from the right as broadcasting does."""
    if _ELLIPSIS not in labels:
        return labels
    place = labels.index(_ELLIPSIS)
    count = ndim - len(labels) + 1
    written = [f"...{number}" for number in range(num_stretched - count, num_stretched)]
    return [*labels[:place], *written, *labels[place + 1 :]]


def _implicit_output(operands: list[list[str]], num_stretched: int) -> list[str]:
    """As for numpy: the ellipsis, then the letters that appear once, in order, capitals before small letters."""
    every = [letter for labels in operands for letter in labels if not letter.startswith(_ELLIPSIS)]
    once = [letter for letter in every if every.count(letter) == 1]
    ellipsis = [f"...{number}" for number in range(num_stretched)]
    return [*ellipsis, *sorted(once, key=lambda letter: int(letter[1:]) if letter.startswith("#") else ord(letter))]
