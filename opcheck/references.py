"""Call -> what it should have computed.

Two references. The *baseline* is the op in the same dtype, by torch's own CPU kernel: it exists
where that kernel is not itself under test (the op ran on another device, or somebody registered
another kernel). The *golden* is the op on inputs widened to float64, and *perturbed* goldens show
how far the result moves when the inputs move by one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck import _torch
from opcheck.arrays import Array, spacing_of
from opcheck.call_dtypes import (
    as_number,
    computing_dtype,
    input_dtypes,
    is_inexact,
    is_narrow,
    name_dtypes,
    number_tensor,
    real_name,
    rounded_number,
    rounding_dtype,
)
from opcheck.calls import Call, Param
from opcheck.factors import factor_step
from opcheck.golden_rules import (
    ADJUST,
    KEPT_DTYPE,
    NO_FLOAT64,
    NO_GOLDEN,
    NO_HALF_BASELINE,
    NOT_MOVED,
    Bound,
    wider,
)
from opcheck.kernel_table import call_kernel, decomposition, kernels
from opcheck.records import SkipReason
from opcheck.recurrent import FORMULAS
from opcheck.snapshots import same_dtype, to_host, widened_like
from opcheck.tensor_kinds import HALF

__all__ = [
    "Reference",
    "Result",
    "choose",
    "host_array",
    "in_float64",
]


_NUMBERS = ("scalar", "scalars", "tensor")
"""Kinds of parameters that take Python numbers."""


@dataclass(slots=True)
class Result:
    """What a run of the reference gave: its results, and its arguments that were written to."""

    out: Any
    written: list[Any]


@dataclass(slots=True)
class Reference:
    """Runs the reference of one call."""

    call: Call
    label: str
    """Who plays it: "float64", "cpu kernel", "decomposition", "formula"."""
    run: Callable[[list[Any], dict[str, Any]], Any]
    seed: int
    integers_become_floats: bool = False
    """The op makes floats of integers, and would make float32 of them in the golden too."""
    has_baseline: bool = False
    """Torch's own kernel, which is not under test, can run in the dtype of the call."""
    numbers_in_float32: bool = False
    """Python numbers beside 16-bit tensors are those of float32, where the CPU rounds them."""
    _widened: dict[int, Tensor] = field(default_factory=dict)
    _golden: Result | None = None
    _draws: dict[int, Result] = field(default_factory=dict)

    def baseline(self) -> Result:
        """The op in the dtype of the call, strides as they were."""
        call = self.call
        fresh: dict[int, Tensor] = {}
        return self._run(partial(same_dtype, call.before, fresh))

    def golden(self) -> Result:
        """The op in float64, once."""
        if self._golden is None:
            self._golden = self._run(self._widen, adjust=True)
        return self._golden

    def perturbed(self, draw: int) -> Result:
        """The op in float64 on inputs moved by one unit in the last place, signs drawn at random.

        The draws depend on the seed, the call and `draw` alone, so that a verdict never flips from
        run to run.
        """
        found = self._draws.get(draw)
        if found is None:
            rng = np.random.default_rng((self.seed, self.call.index, draw))
            moved: dict[int, Tensor] = {}
            found = self._run(partial(self._perturb, rng, moved), adjust=True)
            self._draws[draw] = found
        return found

    def on(self, values: Callable[[Tensor], Tensor | None]) -> Result:
        """The op in float64 on other values of its tensor arguments, where there are any.

        Written arguments are written to in place.
        """

        def convert(param: Param, tensor: Tensor) -> Tensor:
            found = values(tensor)
            return self._widen(param, tensor) if found is None else found

        return self._run(convert, adjust=True)

    def with_numbers_in_float32(self) -> Reference | None:
        """For a kernel that keeps Python numbers in float32; None where that changes nothing.

        `x + 0.3` of bfloat16 adds 0.30078125 on the CPU and 0.3 on a GPU. Only float64 judges then.
        """
        call = self.call
        if not self.has_baseline or computing_dtype(call) not in HALF:
            return None
        for param, value in call.traits.bound(call.args, call.kwargs):
            numbers = value if isinstance(value, (list, tuple)) else (value,)
            if param.kind in _NUMBERS and any(_is_rounded(call, number) for number in numbers):
                return Reference(
                    call, "float64", self.run, self.seed, self.integers_become_floats,
                    numbers_in_float32=True,
                )  # fmt: skip
        return None

    def inputs(self) -> list[Array | None]:
        """The tensor arguments in schema order as float64 arrays, None where one is absent."""
        call = self.call
        given = {param.name: value for param, value in call.traits.bound(call.args, call.kwargs)}
        found: list[Array | None] = []
        for param in call.traits.params:
            if param.kind == "tensor":
                value = given.get(param.name)
                wide = self._widened_copy(value) if isinstance(value, Tensor) else None
                found.append(None if wide is None else host_array(wide))
        return found

    # ---- arguments ----

    def golden_arguments(self) -> tuple[Bound, dict[int, Tensor], list[Tensor]]:
        """What the golden is given, by parameter name.

        Returns:
            The arguments; id of a widened tensor -> the tensor of the call that it was; all
            widened tensors, which have to live as long as their ids are used.
        """
        origins: dict[int, Tensor] = {}
        alive: list[Tensor] = []

        def convert(param: Param, tensor: Tensor) -> Tensor:
            wide = self._widen(param, tensor)
            origins[id(wide)] = tensor
            alive.append(wide)
            return wide

        bound, _ = self._bind(convert, adjust=True)
        return bound, origins, alive

    def _run(self, convert: Callable[[Param, Tensor], Tensor], *, adjust: bool = False) -> Result:
        bound, written = self._bind(convert, adjust=adjust)
        args, kwargs = self.call.traits.spread(bound)
        return Result(self.run(args, kwargs), written)

    def _bind(
        self, convert: Callable[[Param, Tensor], Tensor], *, adjust: bool
    ) -> tuple[Bound, list[Any]]:
        call = self.call
        call.wide_storages.clear()
        bound: Bound = {}
        written: list[Any] = []
        for param, value in call.traits.bound(call.args, call.kwargs):
            new = self._convert(param, value, convert, adjust=adjust)
            bound[param.name] = new
            if param.mutated and value is not None:
                written.append(new)
        if adjust:
            name_dtypes(call, bound)
            rule = ADJUST.get(call.traits.base)
            if rule is not None:
                rule(call, bound)
        return bound, written

    def _convert(
        self, param: Param, value: Any, convert: Callable[[Param, Tensor], Tensor], *, adjust: bool
    ) -> Any:
        if isinstance(value, Tensor):
            return convert(param, value)
        if isinstance(value, (list, tuple)) and param.kind in ("tensors", "scalars"):
            return [self._convert(param, item, convert, adjust=adjust) for item in value]
        if isinstance(value, (bool, complex)) and param.kind == "tensor":
            return torch.tensor(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        if param.kind in _NUMBERS and adjust:
            wide = self.numbers_in_float32
            value = float(np.float32(value)) if wide else rounded_number(self.call, value)
        # below the dispatcher a Tensor argument has to be one; a 0-dim tensor promotes likewise
        return number_tensor(self.call, value, wide=adjust) if param.kind == "tensor" else value

    def _widen(self, param: Param, tensor: Tensor) -> Tensor:
        if self._keeps_dtype(param):
            return to_host(self.call.before.get(id(tensor), tensor)).clone()
        number = None if self.numbers_in_float32 else as_number(self.call, tensor)
        if number is not None:
            return torch.tensor(number, dtype=torch.float64)
        if param.mutated or self.call.before_groups:  # fresh for each run, which writes to it
            return self._widened_copy(tensor)
        known = self._widened.get(id(tensor))
        if known is None:
            known = self._widened[id(tensor)] = self._widened_copy(tensor)
        return known

    def _keeps_dtype(self, param: Param) -> bool:
        return param.name in KEPT_DTYPE.get(self.call.traits.base, ())

    def _widened_copy(self, tensor: Tensor) -> Tensor:
        source = self.call.before.get(id(tensor), tensor)
        dtype = wider(source.dtype)
        if self.integers_become_floats:
            dtype = torch.float64
        if not is_inexact(dtype):
            is_copied = id(tensor) in self.call.before
            return to_host(source).clone() if is_copied else to_host(source)
        if id(tensor) in self.call.before and self.call.before_groups:
            return widened_like(self.call, source, dtype)
        wide = to_host(source).to(dtype, memory_format=torch.contiguous_format)
        # a float64 program: `.to` gave the tensor itself
        return wide.clone() if wide.data_ptr() == source.data_ptr() and wide.numel() else wide

    def _perturb(
        self, rng: np.random.Generator, moved: dict[int, Tensor], param: Param, tensor: Tensor
    ) -> Tensor:
        known = moved.get(id(tensor))
        if known is not None:
            return known
        wide = self._widen(param, tensor)
        dtype = tensor.dtype
        if not is_inexact(dtype) and self.integers_become_floats:
            # the op casts them first and rounds from there on: sinc(3) is pi's rounding alone
            dtype = self.call.out_dtype
        dtype = rounding_dtype(self.call, dtype)
        is_fixed = self._keeps_dtype(param) or param.name in NOT_MOVED.get(
            self.call.traits.base, ()
        )
        if is_fixed or not is_inexact(dtype) or self.call.before_groups:
            return wide
        values = wide.detach().numpy()
        flat = np.ascontiguousarray(values).reshape(-1)
        parts = flat.view(np.float64) if dtype.is_complex else flat
        # Inf stays where it is: a mask of -Inf moved by its spacing would be NaN
        step = np.where(np.isfinite(parts), spacing_of(parts, real_name(dtype)), 0.0)
        signs = rng.integers(0, 2, size=parts.shape, dtype=np.int8) * 2 - 1
        rounded = factor_step(self.call, tensor)
        if rounded:
            # by various amounts: x * 1 with both moved alike would be x again in one draw of two
            share = rounded * rng.uniform(0.5, 1.0, size=parts.shape)
            step = np.where(step > 0, np.maximum(step, np.abs(parts) * share), 0.0)
        new = (parts + step * signs).view(flat.dtype).reshape(values.shape)
        moved[id(tensor)] = torch.from_numpy(new)
        return moved[id(tensor)]


def choose(call: Call, *, on_device: bool, seed: int) -> Reference | SkipReason:
    """Who plays the reference of a call, or why nobody can."""
    traits = call.traits
    table = kernels()
    overridden = table.is_overridden(traits.qualified)
    kernel = table.original(traits.qualified)
    own = FORMULAS.get(traits.base)
    if own is not None:
        return Reference(call, "formula", partial(_call_formula, own), seed)
    if traits.base in NO_FLOAT64 and not (kernel and (on_device or overridden)):
        return SkipReason.REFERENCE_NOT_AVAILABLE
    makes_floats = _makes_floats(call)
    if kernel is not None:
        run = partial(_call_kernel, kernel)
        if on_device or overridden:
            if traits.base in NO_HALF_BASELINE and computing_dtype(call) in HALF:
                return Reference(call, "float64", run, seed, makes_floats)
            return Reference(call, "cpu kernel", run, seed, makes_floats, has_baseline=True)
        if not _golden_is_independent(call):
            return SkipReason.NO_INDEPENDENT_REFERENCE
        return Reference(call, "float64", run, seed, makes_floats)
    if not traits.name.startswith(("aten.", "prims.")):
        # a kernel registered since the table was taken would judge itself
        has_own = table.has_kernel(traits.qualified)
        return SkipReason.NO_INDEPENDENT_REFERENCE if has_own else SkipReason.NO_CPU_KERNEL
    formula = decomposition(call.func)
    if formula is None:
        return SkipReason.REFERENCE_NOT_AVAILABLE
    run = partial(_call_formula, formula)
    return Reference(call, "decomposition", run, seed, makes_floats)


def in_float64(call: Call, *, seed: int) -> Reference | None:
    """The op in float64, whether or not that would be a judge; None where nothing computes it."""
    if call.traits.base in NO_FLOAT64:
        return None
    kernel = kernels().original(call.traits.qualified)
    if kernel is not None:
        return Reference(call, "float64", partial(_call_kernel, kernel), seed, _makes_floats(call))
    if not call.traits.name.startswith(("aten.", "prims.")):
        return None
    formula = decomposition(call.func)
    if formula is None:
        return None
    run = partial(_call_formula, formula)
    return Reference(call, "decomposition", run, seed, _makes_floats(call))


def _golden_is_independent(call: Call) -> bool:
    """False where the golden could only repeat what the kernel under test did.

    That is so for integers and for float64, which have no wider twin.
    """
    if call.traits.base in NO_GOLDEN:
        return False
    inexact = [dtype for dtype in input_dtypes(call) if is_inexact(dtype)]
    if inexact:
        return any(is_narrow(dtype) for dtype in inexact)
    return is_narrow(call.out_dtype)


def _is_rounded(call: Call, number: Any) -> bool:
    """The CPU rounds a Python number, or a 0-dim tensor that stands for one, before it computes."""
    if isinstance(number, Tensor):
        seen = as_number(call, number)
        return seen is not None and seen != float(number)
    return type(number) is float and rounded_number(call, number) != number


def _makes_floats(call: Call) -> bool:
    """True for a pointwise op that takes integers and gives floats, `5 / 2`."""
    inputs = input_dtypes(call)
    return (
        bool(inputs)
        and is_narrow(call.out_dtype)
        and not any(is_inexact(dtype) for dtype in inputs)
        and "pointwise" in _torch.tags_of(call.func)
    )


def _call_kernel(kernel: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return call_kernel(kernel, tuple(args), kwargs)


def _call_formula(formula: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    return formula(*args, **kwargs)


def wide_array(tensor: Tensor) -> Array:
    """The values as a NumPy array of its own in float64, of a complex tensor in complex128."""
    array = host_array(tensor)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def host_array(tensor: Tensor) -> Array:
    """The values as a NumPy array: 16-bit floats as float32, which holds them exactly."""
    plain = tensor.detach()
    if plain.device.type != "cpu":
        plain = plain.to("cpu")
    if plain.is_conj():
        plain = plain.resolve_conj()
    if plain.is_neg():
        plain = plain.resolve_neg()
    if plain.dtype in (torch.bfloat16, torch.float16):
        plain = plain.to(torch.float32)
    elif plain.dtype is torch.complex32:
        plain = plain.to(torch.complex64)
    # not .numpy(): it makes the storage one that can never be resized, and the tensor may be the
    # user's (FSDP2 frees gathered parameters by resizing)
    array: Array = np.from_dlpack(plain)
    return array
