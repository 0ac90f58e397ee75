"""Does the checker keep quiet on what is correct? Every OpInfo sample of torch, checked.

Each sample runs twice from the same seed, under an empty dispatch mode and under `opcheck.check`:
forward, in place, with `out=`, and backward. Wanted: no ERROR record, no FAIL record, nothing that
differs from the run under the empty mode, and every call accounted for.

    OMP_NUM_THREADS=1 python -m benchmarks.opinfo_sweep --dtypes float32,bfloat16 --backward
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import (  # noqa: TID251 - the sweep looks at modes from outside
    _disable_current_modes,
)
from torch.utils._pytree import tree_leaves, tree_map  # noqa: TID251 - as OpInfo's own tests do

import opcheck
from opcheck.records import Coverage, OpRecord, SkipReason, Verdict
from tests.step_equality import EmptyMode

__all__ = ["DEFAULT_DTYPES", "WRONG_IN_TORCH", "Sweep", "cases_of", "op_infos", "sweep"]

DEFAULT_DTYPES = ("float32", "bfloat16", "float16", "complex64", "float64", "int64", "bool")
_SEED = 20
_UNINITIALIZED = ("empty", "new_empty")
"""Entries whose results are memory that nobody wrote: shapes, dtypes and strides are compared."""
_NOT_REPEATABLE = ("linalg.lstsq",)
"""Entries that do not repeat themselves bit for bit, with no mode at all."""
_MATRIX_EXP = (
    "torch's CPU kernel is wrong in 16 bit: NaN for 1.00007 at norm 1e-4, 1e30 for 1.03 at 0.05"
)
WRONG_IN_TORCH: dict[tuple[str, str], str] = {
    ("aten.linalg_matrix_exp.default", "torch.bfloat16"): _MATRIX_EXP,
    ("aten.linalg_matrix_exp.default", "torch.float16"): _MATRIX_EXP,
}
"""(op, dtype of its result) -> why a FAIL is right there, with what was measured."""

# ---- what is run --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One way to call an op on one sample."""

    label: str
    """`forward`, `in place`, `out=` or `backward`."""
    tensors: list[Tensor]
    """Everything the call was given."""
    call: Callable[[], Any]


@dataclass(frozen=True)
class Outcome:
    """What a case left behind; compared after both runs."""

    results: list[Any]
    versions: list[int]
    rng: Tensor
    error: str


def op_infos(globs: Sequence[str] = ("*",)) -> list[Any]:
    """OpInfo entries whose name matches one of the globs."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if any(fnmatchcase(op.name, glob) for glob in globs)]


def _reseed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - OpInfo draws from the global generator


def _copy(value: Any) -> Any:
    """A tensor of its own with the same strides; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return value.detach().clone().requires_grad_(value.requires_grad)
    with torch.no_grad():
        if value.numel() and 0 not in value.stride():
            copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
            copy.copy_(value)
        else:
            copy = value.detach().clone()
    return copy.requires_grad_(value.requires_grad)


def cases_of(op: Any, dtype: torch.dtype, *, limit: int | None, backward: bool) -> list[Case]:
    """Every call of an op, with arguments of its own; the same at each time of asking."""
    found: list[Case] = []
    _reseed(_SEED)
    for sample in _first(op.sample_inputs("cpu", dtype, requires_grad=False), limit):
        found += _forward_cases(op, sample)
    if backward and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"):
        _reseed(_SEED)
        for sample in _first(op.sample_inputs("cpu", dtype, requires_grad=True), limit):
            found.append(_backward_case(op, sample))
    return found


def _first(samples: Iterable[Any], limit: int | None) -> Iterator[Any]:
    for number, sample in enumerate(samples):
        if limit is not None and number >= limit:
            return
        yield sample


def _arguments(sample: Any) -> tuple[Any, Any, Any]:
    given: tuple[Any, Any, Any] = tree_map(_copy, (sample.input, sample.args, sample.kwargs))
    return given


def _forward_cases(op: Any, sample: Any) -> Iterator[Case]:
    first, args, kwargs = _arguments(sample)
    yield _case("forward", op, first, args, kwargs)
    if op.inplace_variant is not None and not sample.broadcasts_input:
        first, args, kwargs = _arguments(sample)
        yield _case("in place", op.inplace_variant, first, args, kwargs)
    if op.supports_out:
        first, args, kwargs = _arguments(sample)
        try:
            out = tree_map(_empty_like, op(*_arguments_flat(sample)[0], **sample.kwargs))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return
        yield _case("out=", op, first, args, {**kwargs, "out": out})


def _arguments_flat(sample: Any) -> tuple[list[Any], dict[str, Any]]:
    return [tree_map(_copy, sample.input), *tree_map(_copy, sample.args)], sample.kwargs


def _empty_like(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


def _case(label: str, call: Any, first: Any, args: Any, kwargs: Any) -> Case:
    tensors = [item for item in tree_leaves((first, args, kwargs)) if isinstance(item, Tensor)]
    return Case(label, tensors, lambda: call(first, *args, **kwargs))


def _backward_case(op: Any, sample: Any) -> Case:
    first, args, kwargs = _arguments(sample)
    tensors = [item for item in tree_leaves((first, args, kwargs)) if isinstance(item, Tensor)]
    leaves = [item for item in tensors if item.requires_grad]

    def call() -> Any:
        result = op(first, *args, **kwargs)
        if sample.output_process_fn_grad is not None:
            result = sample.output_process_fn_grad(result)
        outputs = [
            item for item in tree_leaves(result) if isinstance(item, Tensor) and item.requires_grad
        ]
        if not outputs or not leaves:
            return result
        # without a mode: what the sweep itself computes is not to be counted
        with _disable_current_modes():
            grads = [_gradient(item) for item in outputs]
        return result, torch.autograd.grad(outputs, leaves, grads, allow_unused=True)

    return Case("backward", tensors, call)


def _gradient(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(output.numel())
    return torch.randn(output.shape, generator=generator, dtype=torch.float32).to(output.dtype)


def _run(case: Case, number: int) -> Outcome:
    _reseed(number)
    error, results = "", []
    try:
        results = tree_leaves(case.call())
    except Exception as problem:  # noqa: BLE001 - compared with what the other run raised
        error = f"{type(problem).__name__}: {problem}"
    with _disable_current_modes():
        rng = torch.get_rng_state()
    # the versions of inference tensors are not tracked
    versions = [-1 if item.is_inference() else item._version for item in case.tensors]
    return Outcome(results, versions, rng, error)


# ---- what differs -------------------------------------------------------------------------------


def _difference(
    plain: tuple[Case, Outcome], checked: tuple[Case, Outcome], *, values: bool = True
) -> str:
    """In one line what tells two runs of a case apart; "" if nothing does.

    Args:
        plain: the yardstick.
        checked: the other run.
        values: False where results are memory that nobody wrote.
    """
    (plain_case, expected), (case, actual) = plain, checked
    if actual.error != expected.error:
        return f"raised {actual.error or 'nothing'!r}, expected {expected.error or 'nothing'!r}"
    if actual.versions != expected.versions:
        return f"versions of the arguments {actual.versions}, expected {expected.versions}"
    if not torch.equal(actual.rng, expected.rng):
        return "the random state"
    groups = (("argument", plain_case.tensors, case.tensors),
              ("result", expected.results, actual.results))  # fmt: skip
    for name, wanted, got in groups:
        if len(wanted) != len(got):
            return f"{len(got)} {name}s, expected {len(wanted)}"
        for number, (one, two) in enumerate(zip(wanted, got, strict=True)):
            if text := _value_difference(one, two, values=values):
                return f"{name} {number}: {text}"
    if _aliases(case, actual) != _aliases(plain_case, expected):
        return "which results and arguments share memory"
    return ""


def _value_difference(wanted: Any, got: Any, *, values: bool) -> str:
    if not isinstance(wanted, Tensor):
        same = repr(wanted) == repr(got)
        return "" if same else f"{got!r}, expected {wanted!r}"
    if not isinstance(got, Tensor):
        return f"{type(got).__name__}, expected a tensor"
    wanted, got = wanted.detach(), got.detach()
    if (wanted.layout, wanted.dtype, wanted.shape) != (got.layout, got.dtype, got.shape):
        return f"{got.layout} {got.dtype} {tuple(got.shape)}"
    if wanted.layout is not torch.strided or wanted.is_quantized or wanted.is_nested:
        return ""
    if wanted.stride() != got.stride():
        return f"strides {got.stride()}, expected {wanted.stride()}"
    if not values or torch.equal(_bytes(wanted), _bytes(got)):
        return ""
    return f"values of {got.dtype} {tuple(got.shape)}"


def _bytes(tensor: Tensor) -> Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return flat.copy_(tensor.reshape(-1)).view(torch.uint8)


def _aliases(case: Case, outcome: Outcome) -> list[int]:
    """For each tensor the number of the first one that has the same memory."""
    found: list[int] = []
    known: dict[int, int] = {}
    for item in (*case.tensors, *outcome.results):
        if isinstance(item, Tensor) and item.layout is torch.strided:
            place = item.untyped_storage()._cdata
            found.append(known.setdefault(place, len(known)))
    return found


# ---- the sweep ----------------------------------------------------------------------------------


@dataclass
class Sweep:
    """What a sweep found, added up over ops and dtypes."""

    num_cases: int = 0
    seen: int = 0
    checked: int = 0
    skipped: Counter[SkipReason] = field(default_factory=Counter)
    crashes: list[tuple[str, OpRecord]] = field(default_factory=list)
    alarms: list[tuple[str, OpRecord]] = field(default_factory=list)
    named: list[tuple[str, OpRecord]] = field(default_factory=list)
    """A FAIL that is right."""
    differences: list[str] = field(default_factory=list)
    unrepeatable: Counter[str] = field(default_factory=Counter)
    """OpInfo entries whose results differ between two runs under the empty mode."""
    not_adding_up: list[str] = field(default_factory=list)
    unchecked: Counter[tuple[str, SkipReason]] = field(default_factory=Counter)
    """Calls of computing ops that were skipped, by op and reason."""
    checked_ops: set[str] = field(default_factory=set)
    weakly_checked: Counter[str] = field(default_factory=Counter)
    """Records with a note, by note."""
    seconds: float = 0.0

    @property
    def computing(self) -> int:
        """Calls seen that computed something."""
        idle = sum(count for reason, count in self.skipped.items() if not reason.is_computation)
        return self.seen - idle

    def add_records(self, where: str, records: Iterable[OpRecord]) -> None:
        """Sort the records of one session."""
        for record in records:
            self.checked_ops.add(record.op)
            if record.error is not None:
                self.crashes.append((where, record))
            elif record.verdict is Verdict.FAIL:
                is_named = (record.op, record.outputs[0].rpartition(":")[2]) in WRONG_IN_TORCH
                (self.named if is_named else self.alarms).append((where, record))
            self.weakly_checked.update(f"{record.op}: {note}" for note in record.notes)

    def add_coverage(self, where: str, coverage: Coverage) -> None:
        """Add the books of one session."""
        self.seen += coverage.seen
        self.checked += coverage.checked
        self.skipped.update(coverage.skipped)
        if not coverage.adds_up:
            self.not_adding_up.append(f"{where}: {coverage.seen} seen")
        for item in coverage.unchecked_signatures:
            if item.reason.is_computation:
                self.unchecked[item.op, item.reason] += item.calls


def sweep(
    infos: Iterable[Any],
    dtype: torch.dtype,
    *,
    log_dir: Path,
    limit: int | None = None,
    backward: bool = True,
    into: Sweep | None = None,
) -> Sweep:
    """Check every sample of some OpInfo entries in one dtype, one session an entry.

    Args:
        infos: entries of `op_db`.
        dtype: entries that do not support it are passed over.
        log_dir: where the sessions write.
        limit: samples of an entry at most; None is all.
        backward: differentiate as well.
        into: add to this one.
    """
    total = into or Sweep()
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in infos:
            if dtype in op.supported_dtypes("cpu"):
                _sweep_entry(total, op, dtype, log_dir, limit=limit, backward=backward)
    total.seconds += time.perf_counter() - start
    return total


def _sweep_entry(
    total: Sweep, op: Any, dtype: torch.dtype, log_dir: Path, *, limit: int | None, backward: bool
) -> None:
    name = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}"
    where = f"{name} {str(dtype).removeprefix('torch.')}"

    def run(context: AbstractContextManager[Any]) -> list[tuple[Case, Outcome]]:
        cases = cases_of(op, dtype, limit=limit, backward=backward)
        with context:
            return [(case, _run(case, number)) for number, case in enumerate(cases)]

    plain = run(EmptyMode())
    session = opcheck.check(log_dir=log_dir, quiet=True, max_checks=None)
    checked = run(session)
    total.num_cases += len(checked)
    total.add_records(where, session.records)
    total.add_coverage(where, session.coverage)
    lines = [
        (number, text)
        for number, pair in enumerate(zip(plain, checked, strict=True))
        if (text := _difference(*pair, values=not op.name.startswith(_UNINITIALIZED)))
    ]
    if not lines:
        return
    again = run(EmptyMode())
    for number, text in lines:
        if op.name in _NOT_REPEATABLE or _difference(plain[number], again[number]):
            total.unrepeatable[where] += 1
        else:
            total.differences.append(f"{where}, {plain[number][0].label} {number}: {text}")


# ---- the table ----------------------------------------------------------------------------------


def _print_total(total: Sweep, *, details: int) -> None:
    share = total.checked / max(total.computing, 1)
    print(f"{total.num_cases} cases in {total.seconds:.0f} s, {total.seen} calls seen")
    print(
        f"  checked {total.checked}: {share:.1%} of {total.computing} that compute something;"
        f" {len(total.checked_ops)} overloads"
    )
    print("  skipped " + ", ".join(f"{key} {count}" for key, count in total.skipped.most_common()))
    print(f"  crashes {len(total.crashes)}")
    for op, group in _by_op(total.crashes):
        head = (group[0][1].error or "").strip().splitlines()[-1]
        print(f"    {len(group):5d} {op}: {head[:150]}  [{group[0][0]}]")
    _print_alarms("false alarms", total.alarms, details=details)
    _print_alarms("named, a right FAIL", total.named, details=0)
    print(f"  differences from the empty mode {len(total.differences)}")
    for line in total.differences[: max(20, details)]:
        print(f"    {line}")
    print(f"  not repeatable under the empty mode either {sum(total.unrepeatable.values())}")
    for where, count in total.unrepeatable.most_common():
        print(f"    {count:5d} {where}")
    print(f"  sessions that do not add up {len(total.not_adding_up)}")
    for line in total.not_adding_up:
        print(f"    {line}")


def _print_alarms(title: str, alarms: list[tuple[str, OpRecord]], *, details: int) -> None:
    print(f"  {title} {len(alarms)}")
    for op, group in _by_op(alarms):
        where, worst = max(group, key=lambda item: item[1].metrics.q)
        print(f"    {len(group):5d} {op}: q {worst.metrics.q:.3g}; {worst.reason[:150]}  [{where}]")
        for entry, record in group[:details]:
            print(f"          {entry}: {record.inputs} -> {record.outputs}: {record.reason}")


def _by_op(found: list[tuple[str, OpRecord]]) -> list[tuple[str, list[tuple[str, OpRecord]]]]:
    groups: dict[str, list[tuple[str, OpRecord]]] = {}
    for item in found:
        groups.setdefault(item[1].op, []).append(item)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def _print_unchecked(total: Sweep) -> None:
    print("  computing calls of signatures that were never checked in their session")
    for (op, reason), count in total.unchecked.most_common():
        never = "" if op in total.checked_ops else "; never checked"
        print(f"    {count:5d} {op}: {reason}{never}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.opinfo_sweep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtypes", default=",".join(DEFAULT_DTYPES))
    parser.add_argument("--ops", default="*", metavar="GLOB[,GLOB]", help="of OpInfo names")
    parser.add_argument("--limit-samples", type=int, default=None, metavar="N")
    parser.add_argument("--backward", action="store_true", help="differentiate as well")
    parser.add_argument("--details", type=int, default=0, metavar="N", help="alarms shown an op")
    parser.add_argument("--unchecked", action="store_true", help="list what was skipped, by op")
    return parser.parse_args()


def main() -> int:
    """Run the sweep for each dtype; 1 when something was found."""
    options = _parse()
    infos = op_infos(options.ops.split(","))
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in options.dtypes.split(","):
            total = sweep(
                infos,
                getattr(torch, name),
                log_dir=Path(folder) / name,
                limit=options.limit_samples,
                backward=options.backward,
            )
            print(f"{name}: ", end="")
            _print_total(total, details=options.details)
            if options.unchecked:
                _print_unchecked(total)
            sys.stdout.flush()
            found += len(total.crashes) + len(total.alarms) + len(total.differences)
            found += len(total.not_adding_up)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
