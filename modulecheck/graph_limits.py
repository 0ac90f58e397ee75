"""The rule for compiled graphs, worked out to limits that a file with the graph can apply."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modulecheck.compared import Array, References
from modulecheck.trial import LIMITS, SENSITIVE_DRAWS, Limits, Measured, Trial
from opcheck import tolerances as tol
from opcheck.arrays import spacing_of
from opcheck.errors import ReproError
from opcheck.references import host_array
from opcheck.repro_limits import Limit

__all__ = ["GraphRule", "Result", "graph_limits", "loaded"]

Result = tuple[str, int]
"""("output", place) or ("grad_input", place): an output of the graph, or the gradient of one of its
inputs."""


@dataclass(frozen=True, slots=True)
class GraphRule:
    """How the results of a graph are judged."""

    criterion: str
    atol: float
    rtol: float
    failed: tuple[Result, ...]
    """Which are; none: all."""
    by_golden: bool
    """By float64 alone, not beside eager."""


def loaded(path: Path) -> ModuleType:
    """The written file as a module: what it computes is what its limits are worked out from."""
    spec = importlib.util.spec_from_file_location("graph_repro_scratch", path)
    if spec is None or spec.loader is None:
        raise ReproError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def graph_limits(module: ModuleType, rule: GraphRule) -> list[Limit]:
    """What each result of a written graph may differ by, worked out by running it.

    Args:
        module: the file, as `loaded` gives it.
        rule: by which its results are judged.
    """
    before = torch.get_rng_state()
    try:
        eager = module.in_eager()
        golden = _golden(module, len(eager))
        wants = module.WANTS_GRAD
        names: list[Result] = [("output", place) for place in range(len(eager) - len(wants))]
        names += [("grad_input", place) for place in wants]
        moved = _Moved(module)
        return [
            _limit(name, place, eager[place], golden, moved, rule)
            for place, name in enumerate(names)
        ]
    finally:
        torch.set_rng_state(before)


def _golden(module: ModuleType, count: int) -> list[Any] | None:
    try:
        found: list[Any] = module.in_float64()
    except Exception:  # noqa: BLE001 - many programs do not run in float64; eager judges then
        return None
    return found if len(found) == count else None


class _Moved:
    """The graph in float64 on inputs that are off by one unit in the last place."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._draws: dict[int, list[Any]] = {}

    def __call__(self, draw: int) -> list[Any]:
        if draw not in self._draws:
            rng = np.random.default_rng((0, draw))
            narrow = self._module.tensors("cpu", wide=False)[0]

            def change(given: list[Any]) -> list[Any]:
                return [_nudged(item, like, rng) for item, like in zip(given, narrow, strict=True)]

            self._draws[draw] = self._module.in_float64(change)
        return self._draws[draw]


def _nudged(item: Any, like: Any, rng: np.random.Generator) -> Any:
    if not isinstance(item, Tensor) or not item.is_floating_point():
        return item
    values = host_array(item)
    flat = np.ascontiguousarray(values, dtype=np.float64).reshape(-1)
    step = np.where(np.isfinite(flat), spacing_of(flat, _real_name(like.dtype)), 0.0)
    signs = rng.integers(0, 2, size=flat.shape, dtype=np.int8) * 2 - 1
    new = torch.from_numpy((flat + step * signs).reshape(values.shape))
    with torch.no_grad():
        return item.copy_(new)


def _real_name(dtype: torch.dtype) -> str:
    real = {torch.complex64: "float32", torch.complex128: "float64"}.get(dtype)
    name = real or str(dtype).removeprefix("torch.")
    return name if name in tol.EPS else "float16"


def _limit(
    name: Result, place: int, eager: Any, golden: list[Any] | None, moved: Callable[[int], Any],
    rule: GraphRule,
) -> Limit:  # fmt: skip
    label = f"{'output' if name[0] == 'output' else 'gradient of input'} {name[1]}"
    if (rule.failed and name not in rule.failed) or not isinstance(eager, Tensor):
        return {"name": label, "rule": "none"}
    head: Limit = {"name": label, "shape": tuple(eager.shape), "dtype": str(eager.dtype)}
    if not (eager.is_floating_point() or eager.is_complex()):
        return {**head, "rule": "exact"}
    if rule.criterion == "allclose":
        return {**head, "rule": "allclose", "atol": rule.atol, "rtol": rule.rtol}
    array = host_array(eager)
    wide = None
    if golden is not None and isinstance(golden[place], Tensor):
        wide = host_array(golden[place])
        wide = wide if wide.shape == array.shape else None
    draws = (
        [host_array(moved(k)[place]) for k in range(SENSITIVE_DRAWS)] if wide is not None else []
    )
    return {**head, **_granted(array, wide, draws, _real_name(eager.dtype), rule)}


def _granted(
    eager: Array, golden: Array | None, draws: list[Array], dtype: str, rule: GraphRule
) -> Limit:
    limit: Limit = {"rule": "within", "overflow": tol.ROUNDS_TO_INF[dtype]}
    references = References(golden=lambda: golden, moved=lambda k: draws[k] if draws else None)
    with np.errstate(all="ignore"):
        trial = Trial.of(eager, eager, golden, dtype, references)
        if not trial.golden.size:
            return {**limit, "allowed": 0.0}
        moved = trial.sensitivity(references.moved, len(draws))
        apart = trial.apart() or golden is None
        sides = (trial.eager, trial.eager) if apart else (trial.eager, trial.golden)
        if rule.by_golden:
            apart, sides = False, (trial.golden, trial.golden)
        found = trial.measure(*sides, moved)
    allowed = np.zeros(trial.keep.size)
    allowed[trial.keep] = found.allowed * LIMITS[dtype].q
    limit |= {"allowed": allowed, **({"by_dtype": True} if apart else {})}
    return {**limit, **_of_all(trial, found, LIMITS[dtype])}


def _of_all(trial: Trial, found: Measured, limits: Limits) -> Limit:
    """The two tests of a small error that is in all elements."""
    if trial.golden.size < tol.MIN_ELEMENTS:
        return {}
    limit: Limit = {"max_rms": limits.rms_ratio * found.rms_unit}
    if trial.tests_shift():
        unit = np.full(trial.keep.size, math.inf)  # others have no part in the mean
        unit[trial.keep] = found.allowed
        limit |= {
            "max_shift": found.shift_limit, "unit": unit, "clamp": math.inf,
            "from_rounded": False,
        }  # fmt: skip
    return limit
