"""Is a wrong result found? Gross faults in the ops of OpInfo, one at a time.

Each op runs with its result spoiled, first as it comes (`original`: the fault is an override of the
CPU kernel, so that torch's own kernel judges it), then as on a laptop where nobody overrides
anything (`alone`: a mode below the checker spoils the result, and float64 alone judges).

    OMP_NUM_THREADS=1 python -m benchmarks.opinfo_faults --dtypes float32,bfloat16 --num-ops 150
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID251 - spoils from outside

import opcheck
from benchmarks.opinfo_sweep import op_infos
from opcheck.records import OpRecord, Verdict
from tests.faults import planted

__all__ = ["FAULTS", "Target", "alone", "find_targets", "run_fault"]

Spoil = Callable[[Tensor], Tensor]
_MIN_ELEMENTS = 8
_SEED = 20

# ---- faults: a result in, a wrong result out ----------------------------------------------------


def _last_off(result: Tensor) -> Tensor:
    """The last element that is not zero is off by 10%."""
    wrong = result.clone()
    flat = wrong.reshape(-1)
    place = int(flat.nonzero()[-1])
    flat[place] = flat[place] * 1.1
    return flat.reshape(result.shape)


def _last_row_zero(result: Tensor) -> Tensor:
    wrong = result.clone(memory_format=torch.contiguous_format)
    wrong.reshape(-1, result.shape[-1])[-1] = 0
    return wrong


FAULTS: dict[str, Spoil] = {
    "last element off by 10%": _last_off,
    "last row zero": _last_row_zero,
    "sign flipped": lambda result: -result,
    "x1.01": lambda result: result * 1.01,
}


@dataclass(frozen=True)
class Target:
    """One overload, and a call of it."""

    op: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self) -> None:
        """Run it."""
        self.func(*self.args, **self.kwargs)


class _Collect(TorchDispatchMode):
    """Keeps the first fitting call of every overload: a floating result of some elements."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Target] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if name not in self.found and _fits(func, out):
            self.found[name] = Target(name, func, args, dict(kwargs or {}))
        return out


def _fits(func: Any, out: Any) -> bool:
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return False
    if first.layout is not torch.strided or "sparse" in func._schema.name:
        return False
    writes = any(
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in func._schema.arguments
    )
    drawn = "nondeterministic_seeded" in {tag.name for tag in func.tags}
    if writes or drawn or func.is_view or first.numel() < _MIN_ELEMENTS or not first.dim():
        return False
    row = first.reshape(-1, first.shape[-1])[-1]
    return bool(first.isfinite().all()) and bool(row.any()) and bool((first != 0).sum() > 4)


def find_targets(dtype: torch.dtype) -> list[Target]:
    """One call of every overload that OpInfo reaches, forward, for which the faults are faults."""
    collect = _Collect()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for info in op_infos():
            if dtype not in info.supported_dtypes("cpu"):
                continue
            torch.manual_seed(_SEED)
            for sample in info.sample_inputs("cpu", dtype):
                with collect, contextlib.suppress(Exception):
                    info(sample.input, *sample.args, **sample.kwargs)
    return [target for _, target in sorted(collect.found.items())]


# ---- one fault ----------------------------------------------------------------------------------


def _spoiled(out: Any, spoil: Spoil) -> Any:
    if isinstance(out, Tensor):
        return spoil(out)
    return type(out)((spoil(out[0]), *out[1:]))


@contextlib.contextmanager
def alone(op: str, spoil: Spoil) -> Iterator[None]:
    """Spoil the first result of `op` in a mode, where no table of kernels can see it."""

    class Wrong(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            return _spoiled(out, spoil) if str(func) == op else out

    with Wrong():
        yield


def _override(op: str, spoil: Spoil) -> Any:
    spoiling = False

    def make_wrong(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            nonlocal spoiling
            out = original(*args, **kwargs)
            if spoiling:  # the fault itself computes with this op
                return out
            spoiling = True
            try:
                return _spoiled(out, spoil)
            finally:
                spoiling = False

        return wrong

    return planted(op, make_wrong)


ARMS: dict[str, Callable[[str, Spoil], Any]] = {"original": _override, "alone": alone}


def run_fault(target: Target, spoil: Spoil, arm: str, log_dir: Path) -> OpRecord | str:
    """Judge one spoiled call: its record, or why there is none."""
    with warnings.catch_warnings(), torch.no_grad(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.enter_context(ARMS[arm](target.op, spoil))
        session = stack.enter_context(
            opcheck.check(log_dir=log_dir, quiet=True, include=[target.op.removeprefix("aten.")])
        )
        target.call()
    for record in session.records:
        if record.op == target.op:
            return record
    skipped = [reason for reason in session.coverage.skipped if reason != "excluded"]
    return f"skipped: {', '.join(map(str, skipped))}"


def _measure(targets: list[Target], arm: str, log_dir: Path, *, show: bool) -> None:
    tried: Counter[str] = Counter()
    found: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for target in targets:
        for name, spoil in FAULTS.items():
            result = run_fault(target, spoil, arm, log_dir)
            if isinstance(result, str):
                skipped[result] += 1
                continue
            tried[name] += 1
            if result.verdict is Verdict.FAIL:
                found[name] += 1
            elif show:
                q = result.metrics.q
                print(f"    missed {name}: {target.op} {result.outputs} q {q:.3g} {result.error}")
    share = sum(found.values()) / max(sum(tried.values()), 1)
    print(f"  {arm}: {share:.1%} of {sum(tried.values())} faults found; {dict(skipped)}")
    for name in FAULTS:
        print(f"    {found[name]:4d} of {tried[name]:4d} {name}")


def main() -> int:
    """Plant and look."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.opinfo_faults", description=__doc__)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--num-ops", type=int, default=150)
    parser.add_argument("--misses", action="store_true", help="show every fault that was missed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.dtypes.split(","):
            targets = find_targets(getattr(torch, name))
            step = max(1, len(targets) // options.num_ops)
            chosen = targets[::step][: options.num_ops]
            print(f"{name}: {len(chosen)} of {len(targets)} overloads")
            for arm in ARMS:
                _measure(chosen, arm, Path(folder), show=options.misses)
    return 0


if __name__ == "__main__":
    sys.exit(main())
