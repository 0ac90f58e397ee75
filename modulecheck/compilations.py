"""What Dynamo compiled, call by call, and why a call ran in eager or would run in eager elsewhere.

A module that no compiled code ran in is no evidence, so the reader is told the cause: what Dynamo
itself says, and what to do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from modulecheck import _torch, dynamo
from modulecheck.backends import recompile_limit_hits
from modulecheck.hooks import Ran, counted

__all__ = ["CompileLog", "Compiled"]

SHOWN = 4
"""Names of modules in one note; of more the rest is counted."""
_LIMIT = "torch._dynamo.config.recompile_limit"
_LOOK = 'TORCH_LOGS="graph_breaks,recompiles" prints what Dynamo does'


@dataclass(eq=False)
class Compiled:
    """What ran compiled in one call."""

    ran: Ran
    limit_hit: str = ""
    """Which function reached the recompile limit, so that part of the call ran in eager."""
    broken: str = ""
    """What Dynamo said of a function of which it compiled nothing."""

    @property
    def is_eager(self) -> bool:
        """No compiled code ran."""
        return not self.ran.num_runs

    @property
    def doubt(self) -> str:
        """Why a call in which compiled code ran is no PASS, "" if it may be one."""
        if not self.limit_hit:
            return ""
        return f"recompile_limit: {self.limit_hit}; part of the call ran in eager"

    @property
    def why_eager(self) -> str:
        """Why a call in which no compiled code ran is no evidence."""
        why = self.limit_hit or self.broken
        why = why or f"Dynamo skipped it, as it does what torch.compiler.disable marks; {_LOOK}"
        return f"not_compiled: no compiled code ran in this call: {why}"


@dataclass(eq=False)
class CompileLog:
    """The calls of one run of a step."""

    limit: int = field(default_factory=_torch.recompile_limit)
    _warnings: list[str] = field(default_factory=list)
    _functions: dict[int, str] = field(default_factory=dict)
    """Of each frame, by Dynamo's number of it."""
    _guards: dict[int, str] = field(default_factory=dict)
    """What the last recompilation of each frame was for."""
    _versions: dict[int, dict[int, str]] = field(default_factory=dict)
    """Of each frame, in the order in which they ran, with the module in which each ran first."""
    _earlier: dict[type[nn.Module], Compiled] = field(default_factory=dict)
    """By class, a call that Dynamo left to eager; it says why only once."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[CompileLog]:
        """Hears Dynamo's warnings inside."""
        with recompile_limit_hits() as self._warnings:
            yield self

    @contextlib.contextmanager
    def call(self, name: str, module: nn.Module) -> Iterator[Compiled]:
        """Takes down what one call of a module compiles and runs; final after the context."""
        mark, warnings = dynamo.last_attempt(), len(self._warnings)
        with counted() as ran:
            found = Compiled(ran)
            yield found
        self._note(found, dynamo.attempts_since(mark), name, type(module))
        if len(self._warnings) > warnings and not found.limit_hit:
            found.limit_hit = f"Dynamo reached {_LIMIT}; {_LOOK}"

    def _note(
        self, found: Compiled, attempts: list[dynamo.Attempt], name: str, kind: type[nn.Module]
    ) -> None:
        for attempt in attempts:
            frame = attempt.version[0]
            self._functions[frame] = attempt.function or self._functions.get(frame, kind.__name__)
            self._guards[frame] = attempt.recompiled or self._guards.get(frame, "")
            if attempt.limit_hit:
                found.limit_hit = self._at_limit(frame)
            elif attempt.broken and not found.broken:
                found.broken = _broken(self._functions[frame], attempt.broken)
        for frame, version in found.ran.versions:
            self._versions.setdefault(frame, {}).setdefault(version, name)
        if found.is_eager:
            earlier = self._earlier.setdefault(kind, found)
            found.limit_hit = found.limit_hit or earlier.limit_hit
            found.broken = found.broken or earlier.broken

    def _at_limit(self, frame: int) -> str:
        function = self._functions.get(frame, "a function")
        return (
            f"Dynamo reached {_LIMIT} = {self.limit} for {function}{self._last(frame)}; raise it,"
            " or turn what differs from call to call into a tensor"
        )

    def _last(self, frame: int) -> str:
        guard = self._guards.get(frame, "")
        return f" (last because `{guard}` did not hold)" if guard else ""

    def notes(self) -> list[str]:
        """Functions of which more versions ran than Dynamo compiles without a checker."""
        return [
            self._past_limit(frame, versions)
            for frame, versions in self._versions.items()
            if len(versions) > self.limit
        ]

    def _past_limit(self, frame: int, versions: dict[int, str]) -> str:
        function = self._functions.get(frame, "one function")
        names = list(dict.fromkeys(list(versions.values())[self.limit :]))
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return (
            f"{len(versions)} versions of {function} were compiled{self._last(frame)}. Compiled one"
            f" by one without a checker, Dynamo stops at {_LIMIT} = {self.limit}, and"
            f" {', '.join(names[:SHOWN])}{more} would run in eager: raise it there"
        )

    def forget(self) -> None:
        """The next step begins."""
        self._versions.clear()


def _broken(function: str, cause: str) -> str:
    return (
        f"Dynamo broke the graph of {function}: {cause}; what runs there then is left to eager,"
        " also without a checker: wrap the modules inside, or take the cause of the break away"
    )
