"""An exception that takes a model's output out of its forward before the end, as a pipeline stage does."""

from __future__ import annotations

from typing import Any


class LeftEarly(Exception):
    """``outputs`` are what the model gives. An ``Exception``: hooks that must always run do so for no other."""

    def __init__(self, outputs: Any) -> None:
        super().__init__()
        self.outputs = outputs
