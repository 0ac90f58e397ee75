"""How private names of torch are reached: by their path, with a clear error where one is missing.

Each package has one file, `_torch.py`, that asks for all that it uses. No other file names any.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any

import torch

from opcheck.errors import OpcheckError

__all__ = ["TESTED", "Door"]

TESTED = ">=2.13,<2.14"
"""The versions of torch that the tests run with; `pyproject.toml` asks for no others."""


look: Callable[[Any, str], Any] = getattr
"""How an attribute is looked up; tests put another in its place."""


class Door:
    """The way of one package to private torch.

    A path is spelled as in Python: `torch._C._current_graph_task_id`. A part that ends in `()` is
    called, for what only instances have: `torch.nn.Module()._forward_hooks`.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def need(self, path: str) -> Any:
        """What a path leads to; modules on the way are imported.

        Raises:
            OpcheckError: this version of torch does not have it; the message names the path as far
                as the first part that is missing, the version, and those that were tested.
        """
        first, *names = path.split(".")
        found: Any = importlib.import_module(first)
        at = first
        for name in names:
            at = f"{at}.{name.removesuffix('()')}"
            try:
                found = look(found, name.removesuffix("()"))
            except AttributeError:
                found = self._imported(at)
            if name.endswith("()"):
                found = found()
        return found

    def _imported(self, module: str) -> Any:
        try:
            return importlib.import_module(module)
        except ImportError:
            raise self._lacks(module) from None

    def later(self, path: str) -> Callable[[], Any]:
        """A function that gives what the path leads to by then."""
        return functools.partial(self.need, path)

    def getter(self, path: str) -> Callable[[Any], Any]:
        """A function that reads the last name of a path from an object; it is looked up now."""
        self.need(path)
        return operator.attrgetter(path.rpartition(".")[2])

    def reader(self, path: str) -> Callable[[Any], Any]:
        """As `getter`, for what only an object at hand can tell: missing is an error then."""
        name = path.rpartition(".")[2]

        def read(owner: Any) -> Any:
            try:
                return look(owner, name)
            except AttributeError:
                raise self._lacks(path) from None

        return read

    def writer(self, path: str) -> Callable[[Any, Any], None]:
        """A function that sets the last name of a path in an object that has it already."""
        read, name = self.reader(path), path.rpartition(".")[2]

        def write(owner: Any, value: Any) -> None:
            read(owner)
            setattr(owner, name, value)

        return write

    def _lacks(self, path: str) -> OpcheckError:
        return OpcheckError(
            f"torch {torch.__version__} has no {path.replace('()', '')}, which {self._package}"
            f" needs; tested versions: torch {TESTED}"
        )
