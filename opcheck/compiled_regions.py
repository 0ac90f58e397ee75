"""Runs of code that inductor compiled, which no mode sees into."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any

from opcheck import _torch

__all__ = ["compiled_regions"]


class _RegionCounter:
    """Tells its listeners each time that inductor code runs.

    The class that runs the code is patched while somebody listens. Importing inductor takes most
    of a second, so where it has not been imported yet, the patch waits for its import.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[], None]] = []
        self._original: Any = None
        self._lock = threading.Lock()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` at each run of a compiled region, until `ignore`."""
        with self._lock:
            if not self._listeners:
                self._start()  # raises where this torch has no such class
            self._listeners.append(listener)

    def ignore(self, listener: Callable[[], None]) -> None:
        """Call it no more; does no harm where it was not called."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            if not self._listeners:
                self._stop()

    def _start(self) -> None:
        if _torch.INDUCTOR_CODE in sys.modules:
            self.patch()
        else:
            sys.meta_path.insert(0, _AfterImport(_torch.INDUCTOR_CODE, self.patch))

    def _stop(self) -> None:
        sys.meta_path[:] = [item for item in sys.meta_path if not isinstance(item, _AfterImport)]
        if self._original is not None:
            _torch.compiled_fx_graph().__call__ = self._original
            self._original = None

    def patch(self) -> None:
        """Count the runs of compiled code."""
        compiled = _torch.compiled_fx_graph()
        original = self._original = compiled.__call__

        @functools.wraps(original)
        def counted(graph: Any, *args: Any, **kwargs: Any) -> Any:
            for listener in list(self._listeners):
                listener()
            return original(graph, *args, **kwargs)

        compiled.__call__ = counted


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function right after somebody has imported a module, once."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._then()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


compiled_regions = _RegionCounter()
