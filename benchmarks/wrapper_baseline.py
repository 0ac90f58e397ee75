"""The yardstick: an op checker of the usual kind, which wraps every op and runs it twice.

Written from the observed behaviour of such wrappers, with their limits on purpose: the first N
calls of each op, at most a million elements in any top-level argument, one report per op, the
tolerance taken from the first floating point argument, its own errors swallowed, and blind to
in-place ops, `out=` variants and random ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID251 - not part of the package

MAX_NUMEL = 1 << 20
HALF_DTYPES = (torch.float16, torch.bfloat16)
SKIPPED_OPS = frozenset(
    {
        "_to_copy",
        "argsort",
        "bernoulli_",
        "clone",
        "contiguous",
        "copy_",
        "empty",
        "empty_permuted",
        "expand",
        "expand_",
        "exponential",
        "exponential_",
        "full",
        "masked_fill_",
        "multinomial",
        "narrow",
        "normal_",
        "ones",
        "random_",
        "randperm",
        "sort",
        "topk",
        "unbind",
        "uniform_",
        "zeros",
    }
)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(item) for item in value)
    return value


def _tolerance(args: Sequence[Any]) -> tuple[float, float]:
    """Return rtol and atol by the first floating point argument."""
    for value in args:
        if isinstance(value, Tensor) and value.is_floating_point():
            return (1e-2, 1e-2) if value.dtype in HALF_DTYPES else (1e-4, 1e-5)
    return 1e-4, 1e-5


def _tensors_agree(actual: Tensor, expected: Tensor, *, rtol: float, atol: float) -> bool:
    if actual.shape != expected.shape:
        return False
    actual, expected = actual.float(), expected.float()
    both_nan = actual.isnan() & expected.isnan()
    same_inf = actual.isinf() & expected.isinf() & (actual == expected)
    matching = both_nan | same_inf
    if bool(matching.all()):
        return True
    actual_special = actual.isnan() | actual.isinf()
    expected_special = expected.isnan() | expected.isinf()
    if bool(((actual_special != expected_special) & ~matching).any()):
        return False
    finite = ~matching & ~actual_special
    difference = (actual[finite] - expected[finite]).abs()
    if difference.numel():
        # what is reported beside the verdict, and paid for at every call
        difference.max().item()
        (difference / (expected[finite].abs() + 1e-12)).max().item()
    return torch.allclose(actual[finite], expected[finite], rtol=rtol, atol=atol)


def _agree(actual: Any, expected: Any, *, rtol: float, atol: float) -> bool:
    if isinstance(actual, Tensor) and isinstance(expected, Tensor):
        return _tensors_agree(actual, expected, rtol=rtol, atol=atol)
    if isinstance(actual, (list, tuple)) and isinstance(expected, (list, tuple)):
        pairs = zip(actual, expected, strict=False)
        return all(_agree(first, second, rtol=rtol, atol=atol) for first, second in pairs)
    return True


class WrapperMode(TorchDispatchMode):
    """Run the first `max_checks` calls of every op twice and compare with `allclose`."""

    def __init__(self, max_checks: int | None = 10) -> None:
        super().__init__()
        self.max_checks = max_checks
        self.checked = 0
        self.reported: set[Any] = set()
        self._calls: dict[Any, int] = {}
        self._skipped: dict[Any, bool] = {}

    def _is_skipped(self, func: Any) -> bool:
        skipped = self._skipped.get(func)
        if skipped is None:
            name = func._schema.name.split("::")[1]
            foreign = func.namespace != "aten" or func._overloadname == "out"
            skipped = self._skipped[func] = foreign or name in SKIPPED_OPS
        return skipped

    def _is_due(self, func: Any, args: Sequence[Any]) -> bool:
        if self._is_skipped(func) or func in self.reported:
            return False
        num_calls = self._calls[func] = self._calls.get(func, 0) + 1
        if self.max_checks is not None and num_calls > self.max_checks:
            return False
        sizes = [value.numel() for value in args if isinstance(value, Tensor)]
        return max(sizes, default=0) <= MAX_NUMEL

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        due = self._is_due(func, args)
        output = func(*args, **kwargs)
        if due:
            with contextlib.suppress(Exception):  # as the wrappers do
                self._check(func, args, kwargs, output)
        return output

    def _check(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
    ) -> None:
        copied_args = [_copied(value) for value in args]
        copied_kwargs = {name: _copied(value) for name, value in kwargs.items()}
        copied_output = _copied(output)
        with torch.no_grad():
            expected = func(*copied_args, **copied_kwargs)
        rtol, atol = _tolerance(args)
        self.checked += 1
        if not _agree(copied_output, expected, rtol=rtol, atol=atol):
            self.reported.add(func)
