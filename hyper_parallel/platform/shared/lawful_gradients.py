"""What a gradient of a distributed tensor must be: a distributed tensor of its shape, laid out by the law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LawfulGradients:
    """Gradients that the user gives, by ``grad``, by a seed of backward or by a hook, checked and laid out."""

    _layout: Any
    _global_shape: Any

    def lawful_gradient(self, value: Any) -> Any:
        """``value`` in the layout that a gradient of this tensor has; an error when it cannot be one."""
        if not isinstance(value, LawfulGradients):
            raise TypeError(
                f"the gradient of a distributed tensor of shape {tuple(self._global_shape)} must be a distributed "
                f"tensor, got {type(value).__name__}; use distribute_tensor or from_local"
            )
        if tuple(value._global_shape) != tuple(self._global_shape):
            raise ValueError(
                f"a gradient of shape {tuple(value._global_shape)} for a tensor of shape {tuple(self._global_shape)}"
            )
        return _laid_out(value, self._layout.gradient())

    def lawful_hook(self, hook: Callable[[Any], Any], label: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """``hook`` as a function of this rank's block of the gradient, which ``label`` makes a distributed tensor;
        gives a distributed tensor, or None where the hook did."""
        layout, shape = self._layout.gradient(), tuple(self._global_shape)

        def on_block(gradient: Any) -> Any:
            changed = hook(label(gradient))
            if changed is None:
                return None
            if not isinstance(changed, LawfulGradients) or tuple(changed._global_shape) != shape:
                raise TypeError(
                    f"the hook of a distributed tensor of shape {shape} must return a distributed tensor of that shape "
                    f"or None, got {type(changed).__name__}"
                )
            return _laid_out(changed, layout)

        return on_block


def _laid_out(value: Any, layout: Any) -> Any:
    return value if value._layout is layout else value.redistribute(layout.mesh, layout)
