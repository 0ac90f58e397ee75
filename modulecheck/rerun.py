"""A recorded call run again: eagerly, compiled by any backend, in float64."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
from torch import Tensor, nn

from modulecheck import _torch, dynamo
from modulecheck.backends import compiles_only_inlined, inlined
from modulecheck.compared import Array, Compared, Documented, Rule
from modulecheck.goldens import Goldens, Key, array_of, results_of
from modulecheck.judging import compare, quick
from modulecheck.recording import RecordedCall, phase_of
from modulecheck.replay import replay, same_dtype
from opcheck import tolerances as tol
from opcheck.records import Verdict
from opcheck.verdicts import rms

__all__ = ["Outcome", "Rerun"]

RULE = Rule(criterion="calibrated", atol=tol.MODULE_ATOL, rtol=tol.MODULE_RTOL)
_NOISE = 8.0
"""As in the comparison of the step: gradients of so many eps of the largest one are noise."""


@dataclasses.dataclass
class Outcome:
    """What one run of the call gave."""

    results: dict[Key, Array]
    dtypes: dict[Key, str]
    problem: str = ""
    """Why there are no results: the run raised."""


class Rerun:
    """Runs a recorded call on a copy of its module; the user's own is never touched."""

    def __init__(self, call: RecordedCall, module: nn.Module | None = None) -> None:
        """Copy the module around the recorded parameters.

        Args:
            call: what was recorded.
            module: in place of `call.module`, where that comes from a file.

        Raises:
            ValueError: there is no module.
            Whatever `copy.deepcopy` raises on an attribute of the module.
        """
        own = module if module is not None else call.module
        if own is None:
            raise ValueError(f"{call.name or '<root>'}: a recording from a file needs the module")
        self.call = call
        self.module = _twin(own, call)
        self.snapshot = call.snapshot.on(self.module)
        self._eager: Outcome | None = None
        self._goldens: Goldens | None = None

    @property
    def eager(self) -> Outcome:
        """The module in eager, run once."""
        if self._eager is None:
            self._eager = self.run()
        return self._eager

    @property
    def keys(self) -> list[Key]:
        """Tensors that both the real step and eager have."""
        known = set(self.eager.results)
        return [key for key in self.call.failed if key in known]

    # ---- running ----

    def run(
        self,
        through: Callable[..., Any] | None = None,
        *,
        checking: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Outcome:
        """Forward, and backward with the recorded output gradients.

        Args:
            through: a compiled version of the module's call; None: eager.
            checking: entered for an eager forward and again for its backward.
        """
        found = Outcome({}, {})
        try:
            replayed = replay(self.module, self.snapshot, modes=[checking()], through=through)
            tensors = results_of(replayed)
            _keep(found, tensors.items())
            if self.call.sources:
                outputs = [tensors[key] for key in self.call.sources]
                gradients = replayed.gradients(
                    outputs, list(self.call.grads), mode=checking(), compiled=through is not None
                )
                _keep(found, _named(*gradients))
        except Exception as error:  # noqa: BLE001 - a stage that raises is a finding
            found.problem = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        return found

    def compiled(self, backend: Any, *, dynamic: bool | None = None) -> Outcome:
        """Compiled by a backend, alone; call it inside `dynamo.isolated()`."""
        call: Any = _torch.call_impl(self.module)
        if self.call.cast_dtype is None and compiles_only_inlined(self.module):
            call = inlined(call, None)
        return self.run(dynamo.compiled_alone(call, backend, dynamic=dynamic))

    # ---- judging ----

    def judge(self, outcome: Outcome, keys: Iterable[Key] | None = None) -> dict[Key, Compared]:
        """Hold a run against eager and float64, tensor by tensor."""
        found: dict[Key, Compared] = {}
        for key in self.keys if keys is None else keys:
            found[key] = self._judge(key, outcome)
        return found

    def failed(self, outcome: Outcome, keys: Iterable[Key] | None = None) -> dict[Key, Compared]:
        """Those that do not pass."""
        judged = self.judge(outcome, keys)
        return {key: item for key, item in judged.items() if item.verdict == Verdict.FAIL}

    def _judge(self, key: Key, outcome: Outcome) -> Compared:
        eager = self.eager
        if key not in outcome.results:
            return _failed(outcome.problem or "it gives none, eager does")
        actual, expected = outcome.results[key], eager.results[key]
        if outcome.dtypes[key] != eager.dtypes[key]:
            return _failed(f"dtype is {outcome.dtypes[key]}, eager gives {eager.dtypes[key]}")
        if actual.shape != expected.shape:
            return _failed(f"shape is {actual.shape}, eager gives {expected.shape}")
        dtype = _real_dtype(eager.dtypes[key])
        if actual.dtype.kind not in "fc":
            return quick(actual, expected, dtype, RULE)
        gradient = phase_of(key) == "backward"
        forward_passed = gradient and not any(
            phase_of(other) == "forward" for other in self.call.failed
        )
        references = self.goldens(outcome).references(
            key,
            kinks=forward_passed,
            noise_floor=self._noise_floor(dtype) if gradient else 0.0,
        )
        return compare(actual, expected, dtype=dtype, rule=RULE, references=references)

    def goldens(self, outcome: Outcome | None = None) -> Goldens:
        """The module in float64, run once for all stages."""
        if self._goldens is None:
            self._goldens = Goldens(
                self.module,
                self.snapshot,
                sources=list(self.call.sources),
                grads=list(self.call.grads),
                forward_error=lambda: self._forward_error(outcome),
                seed=self.call.index,
            )
            gradients = [key for key in self.keys if phase_of(key) == "backward"]
            self._goldens.expect_kinks(
                {key: int(self.eager.results[key].size) for key in gradients}
            )
        return self._goldens

    def golden(self, key: Key) -> Array | None:
        """One tensor in float64."""
        return self.goldens().references(key, kinks=False, noise_floor=0.0).golden()

    def _noise_floor(self, dtype: str) -> float:
        sizes = [
            rms(array.reshape(-1))
            for key, array in self.eager.results.items()
            if phase_of(key) == "backward" and array.dtype.kind == "f" and array.size
        ]
        return _NOISE * tol.EPS.get(dtype, tol.EPS["float32"]) * max(sizes, default=0.0)

    def _forward_error(self, outcome: Outcome | None) -> float:
        shares = [tol.EPS["float32"]]
        for key, eager in self.eager.results.items():
            actual = None if outcome is None else outcome.results.get(key)
            if key[0] != "output" or actual is None or eager.dtype.kind != "f" or not eager.size:
                continue
            both = [side.reshape(-1).astype(np.float64) for side in (actual, eager)]
            if both[0].shape == both[1].shape and (size := rms(both[1])):
                shares.append(rms(both[0] - both[1]) / size)
            shares.append(tol.EPS.get(self.eager.dtypes[key], 0.0) / 4)
        return float(np.nanmax(shares))


def _failed(reason: str) -> Compared:
    return Compared(
        verdict=Verdict.FAIL, reason=reason, documented=Documented(allclose=False)
    )  # fmt: skip


def _real_dtype(name: str) -> str:
    name = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}.get(name, name)
    return "float16" if name.startswith("float8") else name


def _keep(found: Outcome, tensors: Iterable[tuple[Key, Tensor]]) -> None:
    for key, tensor in tensors:
        found.results[key] = array_of(tensor).copy()
        found.dtypes[key] = str(tensor.dtype).removeprefix("torch.")


def _named(
    of_inputs: list[Tensor | None], of_parameters: dict[str, Tensor | None]
) -> Iterator[tuple[Key, Tensor]]:
    for place, grad in enumerate(of_inputs):
        if grad is not None:
            yield ("grad_input", place), grad
    for name, grad in of_parameters.items():
        if grad is not None:
            yield ("param", name), grad


# ---- the twin -----------------------------------------------------------------------------------


def _twin(module: nn.Module, call: RecordedCall) -> nn.Module:
    """A copy of the module with the recorded parameters, buffers, and train or eval modes.

    Its classes, and so the code that Dynamo compiles, are those of the user.
    """
    memo: dict[int, Any] = {}
    for name, item in module.named_parameters():
        data = call.parameters[name].detach()
        memo[id(item)] = nn.Parameter(same_dtype(data, name), requires_grad=item.requires_grad)
    for name, buffer in module.named_buffers():
        memo[id(buffer)] = call.snapshot.buffers.get(name, buffer).detach().clone()
    with _no_hooks(module):
        twin = copy.deepcopy(module, memo)
    for name, part in twin.named_modules():
        part.training = call.training.get(name, part.training)
    return twin


@contextmanager
def _no_hooks(module: nn.Module) -> Iterator[None]:
    """A compiled version inside the module would be copied with it, and cannot be."""
    kept = [(item, item.__dict__.pop(_torch.COMPILED_CALL, None)) for item in module.modules()]
    try:
        yield
    finally:
        for item, compiled in kept:
            if compiled is not None:
                item.__dict__[_torch.COMPILED_CALL] = compiled
