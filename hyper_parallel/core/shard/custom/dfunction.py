"""DFunction: an autograd function of your own that takes plain tensors and DTensors alike."""

from __future__ import annotations

import inspect
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.shard.custom.custom_ops import find_distributed_op, run_distributed_op
from hyper_parallel.core.shard.dispatching.dispatch import dispatch
from hyper_parallel.core.shard.rule_kit.rule_table import find_rule
from hyper_parallel.platform import get_platform

_platform = get_platform()


class DFunction(_platform.Function):  # type: ignore[name-defined]
    """Subclass with static ``forward(ctx, ...)`` and ``backward(ctx, ...)`` on local tensors; call ``apply``.

    With plain tensors it is the framework's own autograd function. With DTensors it runs on the blocks, and the
    operator registered under ``_op_name`` (a :class:`DistributedOp` or a rule) says how the result lies.
    """

    _op_name: str | None = None

    @staticmethod
    def forward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the result from local tensors; every subclass has its own."""
        raise TypeError("a DFunction needs a static forward(ctx, ...) of its own")

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """The gradients of the inputs, one per argument of ``forward``; every subclass has its own."""
        raise TypeError("a DFunction needs a static backward(ctx, ...) of its own")

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run the function; keyword arguments reach ``forward`` too."""
        if not any(isinstance(value, DTensor) for value in (*args, *kwargs.values())):
            return cls._apply_plain(*args, **kwargs)
        if cls._op_name is None:
            raise ValueError(
                f"{cls.__name__}.apply got DTensors, but the class has no _op_name: set it, and register a "
                "DistributedOp or a rule of that name, which gives the layout of the result"
            )
        op = find_distributed_op(cls._op_name)
        if op is not None:
            return run_distributed_op(op, cls._apply_plain, args, kwargs)
        if find_rule(cls._op_name) is None:
            raise ValueError(
                f"{cls.__name__}.apply got DTensors, but no operator {cls._op_name!r} is registered: make an instance "
                f"of a DistributedOp with op_name={cls._op_name!r}, or register a rule"
            )
        return dispatch(cls._apply_plain, args, kwargs)

    @classmethod
    def _apply_plain(cls, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
            keyword_only = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)}
            names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            unknown = [name for name in kwargs if name not in names]
            if unknown and not keyword_only:
                raise TypeError(f"{cls.__name__}.forward has no argument {unknown[0]!r}")
            if unknown:
                rest = {name: kwargs[name] for name in unknown}
                args = cls._positional(names, parameters, args, {k: v for k, v in kwargs.items() if k not in rest})
                return cls._with_keywords(rest)._framework_apply(*args)
            args = cls._positional(names, parameters, args, kwargs)
        return cls._framework_apply(*args)

    @staticmethod
    def _positional(
        names: list[str], parameters: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """All arguments in the order of ``forward``; those not given get their defaults."""
        bound = list(args)
        defaults = {p.name: p.default for p in parameters}
        last = max((names.index(name) for name in kwargs), default=-1)
        for name in names[len(args) : last + 1]:
            bound.append(kwargs[name] if name in kwargs else defaults[name])
        return tuple(bound)

    @classmethod
    def _framework_apply(cls, *args: Any) -> Any:
        return super().apply(*args)

    @classmethod
    def _with_keywords(cls, keywords: dict[str, Any]) -> Any:
        def forward(ctx: Any, *args: Any) -> Any:
            return cls.forward(ctx, *args, **keywords)

        return type(cls.__name__, (cls,), {"forward": staticmethod(forward)})
