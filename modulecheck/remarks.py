"""What both modes are told, and what they tell beside the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modulecheck.compared import Rule
from modulecheck.selection import Plan
from modulecheck.sidechannel import TIMEOUT_S

__all__ = ["Settings", "notes_of", "problem_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a run is told."""

    backend: Any
    rule: Rule
    cast_dtype: torch.dtype | None
    golden_always: bool = False
    record_limit_mb: float = 0.0
    timeout_s: float = TIMEOUT_S
    """How long one rank waits for another."""
    graph_dir: Path | None = None
    """Where captured graphs are written; None: nowhere."""


NOT_CALLED = "SKIP_not_called"
NOTHING_TO_COMPILE = "nothing to compile: no op runs in it"


def problem_of(plan: Plan) -> str:
    """Why a plan compares nothing, "" if it compares something."""
    if not plan.targets and not plan.skipped:
        return "nothing was wrapped: no module was marked by wrap, or no class matched"
    if not any(target.checked for target in plan.targets):
        return "nothing was compared: every wrapped module is skipped"
    return ""


def notes_of(plan: Plan, backend: Any, *, random_switched: bool, idle: Sequence[str]) -> list[str]:
    """How finely was compiled, which settings were on, which modules were not called."""
    found = []
    num = len(plan.targets)
    if num:
        what = "1 module was compiled" if num == 1 else f"{num} modules were compiled one by one"
        found.append(
            f"{what} with backend {_name_of(backend)}; a whole-model compile"
            " fuses across modules: wrap the root to check that"
        )
    if random_switched:
        found.append(
            "torch._inductor.config.fallback_random was on while this step ran, so that both"
            " sides draw the same random numbers"
        )
    if idle:
        first = idle[0] or "<root>"
        found.append(f"{len(idle)} wrapped modules were not called, the first is {first}")
    return found


def _name_of(backend: Any) -> str:
    return backend if isinstance(backend, str) else getattr(backend, "__name__", repr(backend))
