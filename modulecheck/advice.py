"""What helps, tried for real on the failing call before it is said."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from modulecheck import _inductor
from modulecheck.backends import load_backend, random_as_eager
from modulecheck.budget import Budget, Progress
from modulecheck.culprit import Culprit
from modulecheck.findings import Place
from modulecheck.ladder import Ladder
from modulecheck.rerun import Rerun

__all__ = ["with_advice"]

_HALF = ("float16", "bfloat16")
MOST_MODULES = 4
"""More than these left out is no advice."""


def with_advice(
    culprits: list[Culprit], place: Place, ladder: Ladder, budget: Budget, on_progress: Progress
) -> list[Culprit]:
    """Add what made the failing tensors right in a run again.

    Args:
        culprits: all of one call; a module may have to be left out together with the others.
        place: the call.
        ladder: how it was reproduced.
        budget: of compiles; what it refuses is not tried, and not printed.
        on_progress: told what is tried.
    """
    if ladder.of_step and budget.allows_compile("the call compiled again"):
        on_progress("compiling the call again")
        if _passes(place.rerun, ladder):
            return [_of_step_alone(item) for item in culprits]  # nothing left to help
    advice: list[str] = []
    for text, context in _remedies(culprits, place, ladder):
        if not budget.allows_compile(f"advice: {text}"):
            break
        on_progress(f"trying: {text}")
        with context:
            helps = _passes(place.rerun, ladder)
        if helps:
            advice.append(f"{text} (tried: the failing tensors then pass)")
    return [dataclasses.replace(item, advice=tuple(advice)) for item in culprits]


def _of_step_alone(culprit: Culprit) -> Culprit:
    text = f"{culprit.explanation} Only the code that the step ran is wrong: compiled again, the"
    return dataclasses.replace(culprit, explanation=f"{text} call is right.")


def _remedies(
    culprits: list[Culprit], place: Place, ladder: Ladder
) -> Iterator[tuple[str, contextlib.AbstractContextManager[Any]]]:
    rerun = place.rerun
    if ladder.top == "inductor" and set(rerun.eager.dtypes.values()) & set(_HALF):
        yield (
            "set torch._inductor.config.emulate_precision_casts = True",
            _inductor.inductor_options(emulate_precision_casts=True),
        )
    inner = _inner_modules(culprits, place)
    if inner:
        names = ", ".join(place.fqn(name) for name in inner)
        modules = [rerun.module.get_submodule(name) for name in inner]
        yield f"leave {names} out with torch.compiler.disable", _left_out(modules)


def _inner_modules(culprits: list[Culprit], place: Place) -> list[str]:
    """Names inside the failing module; none where one of them is the module itself."""
    prefix = place.rerun.call.fqn
    found: dict[str, None] = {}
    for culprit in culprits:
        others = [item.partition(" (")[0] for item in culprit.also_in]
        for name in (culprit.module, *others):
            inner = name.removeprefix(f"{prefix}.") if prefix else name
            if inner in ("", prefix, "<root>"):
                return []
            found[inner] = None
    return list(found) if len(found) <= MOST_MODULES else []


@contextlib.contextmanager
def _left_out(modules: list[nn.Module]) -> Iterator[None]:
    """On the copy of the module, so that the user's own is not touched."""
    for module in modules:
        module.__dict__["forward"] = torch.compiler.disable(module.forward)
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def _passes(rerun: Rerun, ladder: Ladder) -> bool:
    backend = rerun.call.backend
    with random_as_eager(backend):
        outcome = rerun.compiled(load_backend(backend), dynamic=ladder.dynamic)
    return not outcome.problem and not rerun.failed(outcome)
