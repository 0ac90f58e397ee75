"""False alarms where nobody is wrong: eager against eager, computed in another way.

    OMP_NUM_THREADS=1 python -m benchmarks.eager_variants

The same model, weights and batch run twice, the second time with two threads, with kernels that
add in another order (no oneDNN, attention from single ops), or one example of the batch after the
other. Both are right, so each difference that a judge reports is a false alarm. Judges are
`TensorChecker` on the output of every module, `PrecisionChecker` on outputs and gradients of the
blocks, and `opcheck.check` on the calls of the changed step; `torch.equal` and the documented
tolerances stand beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import opcheck
from benchmarks.kink_faults import other_backend
from benchmarks.models_sweep import MODELS
from modulecheck import PrecisionChecker, TensorChecker
from opcheck import Verdict
from tests.models import Workload

__all__ = ["CHANGES", "DTYPES", "JUDGES", "Tally", "measure"]

Context = Callable[[], contextlib.AbstractContextManager[None]]

# ---- other ways to compute the same -------------------------------------------------------------


@contextlib.contextmanager
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def other_order() -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            # told whenever its flags are set, whichever of them
            warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
            with torch.backends.mkldnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


CHANGES: dict[str, Context] = {
    "threads": two_threads,
    "order": other_order,
    "batch": contextlib.nullcontext,
}
DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
"""Of autocast."""
OURS = ("TensorChecker", "PrecisionChecker", "opcheck.check")
EQUAL, ALLCLOSE = "torch.equal", "allclose 1e-4, 1e-3"
JUDGES = (*OURS, EQUAL, ALLCLOSE)


@dataclass
class Tally:
    """What each judge was shown, and what it reported."""

    shown: Counter[str] = field(default_factory=Counter)
    alarms: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, judge: str, shown: int, alarms: Sequence[str]) -> None:
        self.shown[judge] += shown
        self.alarms[judge] += len(alarms)
        for text in alarms[:1]:
            self.examples.setdefault(judge, text)


# ---- outputs of all modules ---------------------------------------------------------------------


def outputs_of(workload: Workload) -> dict[str, Tensor]:
    """Every tensor that a module of the model returns in a forward, by module, call and place."""
    found: dict[str, Tensor] = {}
    calls: Counter[str] = Counter()
    handles = []
    for name, module in workload.model.named_modules():

        def keep(module: nn.Module, args: Any, out: Any, name: str = name) -> None:
            call = calls[name]
            calls[name] += 1
            for place, tensor in enumerate(_tensors(out)):
                found[f"{name or '<root>'} call {call} [{place}]"] = tensor.detach().clone()

        handles.append(module.register_forward_hook(keep))
    try:
        workload.evaluate()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):  # outputs of the transformers library are
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def one_by_one(workload: Workload) -> dict[str, Tensor]:
    """Likewise, the examples of the batch run one after the other and put together again."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for place in range(len(workload.batch[0])):
        example = tuple(item[place : place + 1] for item in workload.batch)
        for name, tensor in outputs_of(replace(workload, batch=example)).items():
            parts[name].append(tensor)
    return {
        name: torch.cat(tensors)
        for name, tensors in parts.items()
        # else it is not by example: a loss, tokens sorted by expert, time first
        if all(tensor.shape[:1] == (1,) for tensor in tensors)
    }


def compare_outputs(build: Callable[[], Workload], change: str, tally: Tally) -> None:
    workload = build()
    plain = outputs_of(workload)
    with CHANGES[change]():
        changed = one_by_one(build()) if change == "batch" else outputs_of(build())
    pairs = {
        name: (tensor, changed[name])
        for name, tensor in plain.items()
        if name in changed and changed[name].shape == tensor.shape
    }
    checker = TensorChecker(quiet=True)
    for name, (first, second) in pairs.items():
        checker.register_tensor(name, first, side="plain")
        checker.register_tensor(name, second, side="changed")
    # a float32 tensor may come of products that autocast computed in another dtype
    checker.check("calibrated", precision=workload.autocast_dtype)
    wrong = [item for item in checker.result.records if item.verdict is not Verdict.PASS]
    tally.add("TensorChecker", len(pairs), [f"{item.tag}: {item.reason}" for item in wrong])
    unequal = [name for name, pair in pairs.items() if not torch.equal(*pair)]
    tally.add(EQUAL, len(pairs), unequal)
    far = [name for name, pair in pairs.items() if not _documented(*pair)]
    tally.add(ALLCLOSE, len(pairs), far)


def _documented(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first.float(), second.float(), atol=1e-4, rtol=1e-3, equal_nan=True)


# ---- steps --------------------------------------------------------------------------------------


def compare_blocks(name: str, build: Callable[[], Workload], change: str, tally: Tally) -> None:
    """Blocks whose compiled code is eager in the other way; a batch cannot change inside of one."""
    if change == "batch":
        return
    context = CHANGES[change]

    class InTheOtherWay(torch.fx.Interpreter):
        def run(self, *args: Any, **options: Any) -> Any:
            with context():
                return super().run(*args, **options)

    torch._dynamo.reset()
    workload = build()
    workload.model.eval()  # dropout is another question
    checker = PrecisionChecker(backend=other_backend(interpreter=InTheOtherWay))
    for block in MODELS[name].blocks(workload.model):
        checker.wrap(block)
    with torch._dynamo.config.patch(allow_rnn=True), checker.installed(workload.model):
        loss = workload.step()
    result = checker.collect(loss)
    tensors = [(diff.name, kind, item) for diff in result.diffs for kind, _, item in diff.tensors()]
    alarms = [
        f"{where} {kind} {item.name}: {item.reason}"
        for where, kind, item in tensors
        if item.judged is Verdict.FAIL
    ]
    tally.add("PrecisionChecker", len(tensors), alarms)


def check_ops(build: Callable[[], Workload], change: str, log_dir: Path, tally: Tally) -> None:
    workload = build()
    workload.model.eval()
    with CHANGES[change](), opcheck.check(log_dir=log_dir, quiet=True, max_checks=None) as session:
        for place in range(len(workload.batch[0]) if change == "batch" else 1):
            batch = workload.batch
            if change == "batch":
                batch = tuple(item[place : place + 1] for item in batch)
            replace(workload, batch=batch).step()
    alarms = [f"{record.op} in {record.module}: {record.reason}" for record in session.failures]
    tally.add("opcheck.check", session.coverage.checked, alarms)


def measure(name: str, dtype: str, change: str, log_dir: Path) -> Tally:
    """One model in one dtype, computed in one other way.

    Args:
        name: of `models_sweep.MODELS`.
        dtype: of `DTYPES`; 16-bit ones by autocast.
        change: of `CHANGES`.
        log_dir: where `opcheck.check` may write.
    """

    def build() -> Workload:
        workload = MODELS[name].build()
        autocast = DTYPES[dtype]
        return workload.with_autocast(autocast) if autocast else workload

    tally = Tally()
    compare_outputs(build, change, tally)
    compare_blocks(name, build, change, tally)
    check_ops(build, change, log_dir, tally)
    return tally


# ---- for a person -------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each change, dtype and judge; 1 when one of ours raised an alarm."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--changes", default=",".join(CHANGES))
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ours = 0
    print(f"{'change':<8} {'dtype':<9} {'judge':<20} {'shown':>7} {'alarms':>7}")
    with tempfile.TemporaryDirectory() as folder:
        run = partial(measure, log_dir=Path(folder))
        for change in options.changes.split(","):
            for dtype in options.dtypes.split(","):
                total, models = Tally(), {}
                for name in options.models.split(","):
                    models[name] = run(name, dtype, change)
                    total.shown += models[name].shown
                    total.alarms += models[name].alarms
                for judge in [judge for judge in JUDGES if total.shown[judge]]:
                    shown, alarms = total.shown[judge], total.alarms[judge]
                    print(
                        f"{change:<8} {dtype:<9} {judge:<20} {shown:>7,} {alarms:>7,}", flush=True
                    )
                    ours += alarms * (judge in OURS)
                _explain(models)
    return 1 if ours else 0


def _explain(models: dict[str, Tally]) -> None:
    for name, tally in models.items():
        for judge, text in tally.examples.items():
            if judge in OURS:
                print(f"    {name}, {judge}: {tally.alarms[judge]}, such as {text[:200]}")


if __name__ == "__main__":
    sys.exit(main())
