"""Where did the first NaN or Inf come from, and should it have?

An op that turns finite inputs into NaN or Inf agrees with its reference and may still be where a
step dies: an eps that vanishes in float16 makes `rsqrt(0)` infinite. The judge is the innermost
module around it, run again in float64: finite there means that the program lost the value, and
the call FAILs; not finite there either is a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from opcheck import _torch
from opcheck.calls import traits_of
from opcheck.expected import leaves_of
from opcheck.golden import CannotRunAgainError, OpTrace, own_copy, run_module, runs_again
from opcheck.modules import ModuleFrame
from opcheck.references import host_array

__all__ = ["Born", "is_finite", "judge_origin"]


@dataclass(frozen=True, slots=True)
class Born:
    """What is known of an origin once its module has ended."""

    failed: bool
    text: str
    """The reason of a FAIL, or a note."""


def is_finite(value: Any) -> bool:
    """True when every inexact tensor in a value is finite everywhere."""
    return all(
        bool(np.isfinite(host_array(leaf)).all())
        for leaf in _torch.tree_leaves(value)
        if isinstance(leaf, Tensor) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    )


def judge_origin(
    frame: ModuleFrame,
    kwargs: Mapping[str, Any],
    output: Any,
    op: str,
    random_calls: int,
) -> Born:
    """Decide on the first call of a module that made a non-finite value of finite ones."""
    made = f"{op} made a non-finite value of finite inputs"
    hindered = _hindrance(frame, kwargs, output, random_calls)
    if hindered:
        return Born(failed=False, text=f"{made}; {hindered}")
    where = f"module {frame.fqn or '<root>'!r}"
    try:
        golden_out, golden = run_module(frame.module, frame.args, kwargs)
        _, same = run_module(frame.module, frame.args, kwargs, convert=own_copy)
    except CannotRunAgainError as refusal:
        return Born(failed=False, text=f"{made}; {where} cannot be run again: {refusal}")
    except Exception as error:  # noqa: BLE001 - the user's forward may refuse float64 in any way
        return Born(
            failed=False, text=f"{made}; {where} cannot run in float64 ({type(error).__name__})"
        )
    if not is_finite(golden_out):
        return Born(failed=False, text=f"{made}; so does {where} in float64")
    return Born(failed=True, text=_story(op, where, same, golden))


def _hindrance(
    frame: ModuleFrame, kwargs: Mapping[str, Any], output: Any, random_calls: int
) -> str:
    if output is None or is_finite(output):
        return "the outputs of its module are finite"
    if not is_finite((frame.args, dict(kwargs))):
        return "its module had non-finite inputs"
    if not runs_again(frame.args, kwargs):
        return "its module cannot be run again (an input is no plain value)"
    now = [
        _torch.version_of(arg)
        for arg in frame.args
        if isinstance(arg, Tensor) and not arg.is_inference()
    ]
    if now != frame.versions:
        return "its module changed its inputs"
    if random_calls != frame.random_calls:
        return "its module drew random numbers"
    return ""


def _story(op: str, where: str, same: OpTrace, golden: OpTrace) -> str:
    """Which op lost the value, which made it non-finite, and what float64 has there."""
    lost = bad = origin = ""
    for (func, actual), (other, expected) in zip(same, golden, strict=False):
        if func is not other:
            break
        name = traits_of(func).name
        pair = _first_difference(actual, expected)
        if pair is None:
            continue
        got, want = pair
        text = f"{name} ({got:.4g}, in float64 {want:.4g})"
        if np.isfinite(got):
            lost = lost or text
        elif name == op and not origin:
            origin = text
        elif not bad:
            bad = text
    parts = [f"{origin or op} made a non-finite value of finite inputs in {where}"]
    parts += [f"the value was lost at {lost}"] if lost else []
    parts += [f"then {bad}"] if bad else []
    return "; ".join([*parts, "in float64 the module's outputs are finite"])


_LOST = 0.5
"""Relative error from which a value counts as lost and not as rounded."""


def _first_difference(actual: Any, expected: Any) -> tuple[float, float] | None:
    """The first element that lost its value: not finite, or wrong by more than half."""
    for got_leaf, want_leaf in zip(leaves_of(actual), leaves_of(expected), strict=False):
        if not (isinstance(got_leaf.value, Tensor) and isinstance(want_leaf.value, Tensor)):
            continue
        got, want = host_array(got_leaf.value), host_array(want_leaf.value)
        if got.shape != want.shape or not np.issubdtype(got.dtype, np.floating):
            continue
        with np.errstate(all="ignore"):
            gone = np.isfinite(want) & (
                ~np.isfinite(got) | (np.abs(got - want) > _LOST * np.abs(want))
            )
        if gone.any():
            place = np.unravel_index(int(np.argmax(gone)), gone.shape)
            return float(got[place]), float(want[place])
    return None
