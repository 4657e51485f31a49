"""What errors call an object that was expected to be a tensor or a module of the framework that is in use.

Where both frameworks are installed, a program can be written for the one and run on the other: then "takes a tensor,
got Tensor" would not help.
"""

from __future__ import annotations

from hyper_parallel.platform.platform import (
    HYPER_PARALLEL_PLATFORM,
    HYPER_PARALLEL_PLATFORM_MINDSPORE,
    HYPER_PARALLEL_PLATFORM_TORCH,
    PlatformType,
    get_platform,
)

_NAMES = {
    PlatformType.PYTORCH: HYPER_PARALLEL_PLATFORM_TORCH,
    PlatformType.MINDSPORE: HYPER_PARALLEL_PLATFORM_MINDSPORE,
}


def kind_of(obj: object) -> str:
    """The name of its class; for an object of the other framework also how to choose that one.

    >>> kind_of([1, 2])
    'list'
    """
    used = _NAMES[get_platform().platform_type]
    packages = [kind.__module__.partition(".")[0] for kind in type(obj).__mro__]
    own = next((package for package in packages if package in _NAMES.values()), used)
    if own == used:
        return type(obj).__name__
    return (
        f"{type(obj).__name__} of {own}, but this process runs on {used}; "
        f"set {HYPER_PARALLEL_PLATFORM}={own} before it starts"
    )


def require_module(function: str, obj: object) -> None:
    """A TypeError in the name of ``function`` unless ``obj`` is a module of the framework."""
    if not isinstance(obj, get_platform().Module):
        raise TypeError(f"{function} takes a module, got {kind_of(obj)}")
