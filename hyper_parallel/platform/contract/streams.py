"""What a framework must provide: streams, events and profiling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Streams(ABC):
    """Streams and events; where a device has none, stand-ins keep program order."""

    @abstractmethod
    def new_stream(self) -> Any:
        """A stream of work beside the current one."""

    @abstractmethod
    def get_stream_context(self) -> Any:
        """``with platform.get_stream_context()(stream):`` runs what is inside on ``stream``."""

    @abstractmethod
    def get_current_stream(self) -> Any:
        """The stream that work goes to now."""

    @abstractmethod
    def new_event(self) -> Any:
        """A mark in a stream that others can wait for."""

    @staticmethod
    @abstractmethod
    def profiler_record(name: str) -> Any:
        """Context: a named range in the framework's profiler."""
