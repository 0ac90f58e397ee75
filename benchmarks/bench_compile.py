"""What does PrecisionChecker find, and what does checking a compiled step cost?

    OMP_NUM_THREADS=1 python -m benchmarks.bench_compile --part detect
    OMP_NUM_THREADS=1 python -m benchmarks.bench_compile --part timing --tools own,msprobe
    OMP_NUM_THREADS=1 python -m benchmarks.bench_compile --tools none2,own2,msprobe2

`detect` plants faults in one block of a model, behind `torch.compile`, and says whether exactly
that block is named; clean cases must stay silent, with rows compared, and every case must leave
gradients, buffers and random state as the unchecked step does. `timing` runs install, step, collect
and report in interleaved rounds beside the eager and the compiled step. The names with a 2 are
two-pass: the step on copies, eager and compiled, and the model must be as it was. The tool of the
same name and use, msProbe, takes part where it is installed. See the README beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
from torch import Tensor, nn

from benchmarks.bench_ops import MODELS as LARGE
from benchmarks.measuring import in_fresh_process, peak_mib, reset_peak, resident_mib, timed
from tests import compiled, models
from tests.compiled import KINDS, add_to_one, compile_in_place, mark, random_as_eager, stack
from tests.compiled import wrong_backend as wrong
from tests.models import Workload

Check = Callable[[nn.Module, Callable[[nn.Module], Tensor], Any, Any], "Finding"]


@dataclass
class Finding:
    """What a tool said of one step."""

    verdict: str
    suspects: list[str]
    num_forward: int
    num_backward: int


# ---- tools --------------------------------------------------------------------------------------


def own(model: nn.Module, step: Any, classes: Any, backend: Any) -> Finding:
    """Our checker, as the document says."""
    from modulecheck import PrecisionChecker

    checker = PrecisionChecker(backend=backend)
    checker.wrap_by_policy(model, classes if isinstance(classes, tuple) else (classes,))
    checker.install(model)
    return _own_finding(checker, checker.collect(step(model)))


def own_two_pass(model: nn.Module, step: Any, classes: Any, backend: Any) -> Finding:
    """Our checker, on an eager and a compiled copy."""
    from modulecheck import PrecisionChecker

    checker = PrecisionChecker(backend=backend, single_pass=False)
    checker.wrap_by_policy(model, classes if isinstance(classes, tuple) else (classes,))
    return _own_finding(checker, checker.compare(step, model))


def _own_finding(checker: Any, result: Any) -> Finding:
    with contextlib.redirect_stdout(io.StringIO()):
        checker.report(result)
    return Finding(
        str(result.verdict),
        sorted({name for name, _ in result.suspects}),
        sum(bool(diff.fwd_output) for diff in result.diffs),
        sum(bool(diff.grad_input) for diff in result.diffs),
    )


def msprobe(model: nn.Module, step: Any, classes: Any, backend: Any) -> Finding:
    """The released tool of the same use, as its document says."""
    from msprobe.pytorch.compile_accuracy_checker.precision_checker import PrecisionChecker

    checker = PrecisionChecker(backend=backend)
    checker.wrap_by_policy(model, classes if isinstance(classes, tuple) else (classes,))
    checker.install(model)
    return _msprobe_finding(checker, checker.collect(step(model)))


def msprobe_two_pass(model: nn.Module, step: Any, classes: Any, backend: Any) -> Finding:
    """The released tool, on an eager and a compiled copy."""
    from msprobe.pytorch.compile_accuracy_checker.precision_checker import PrecisionChecker

    checker = PrecisionChecker(backend=backend, single_pass=False)
    checker.wrap_by_policy(model, classes if isinstance(classes, tuple) else (classes,))
    return _msprobe_finding(checker, checker.compare(step, model))


def _msprobe_finding(checker: Any, result: Any) -> Finding:
    with contextlib.redirect_stdout(io.StringIO()):
        checker.report(result)

    def is_bad(diffs: Any) -> bool:
        return any(not diff.allclose for diff in diffs or ())

    return Finding(
        "PASS" if result.all_pass else "FAIL",
        [diff.name for diff in result.diffs if is_bad(diff.fwd_output) or is_bad(diff.grad_input)],
        sum(bool(diff.fwd_output) for diff in result.diffs),
        sum(bool(diff.grad_input) for diff in result.diffs),
    )


def nothing(model: nn.Module, step: Any, classes: Any, backend: Any) -> Finding:
    """The compiled step alone: what no checker can be cheaper than."""
    for block in [item for item in model.modules() if isinstance(item, classes)]:
        compile_in_place(block, backend)
    step(model)
    return Finding("PASS", [], 0, 0)


def nothing_two_pass(model: nn.Module, step: Any, classes: Any, backend: Any) -> Finding:
    """The step on a copy, and compiled on another one."""
    step(copy.deepcopy(model))
    return nothing(copy.deepcopy(model), step, classes, backend)


TOOLS: dict[str, Check] = {
    "own": own, "msprobe": msprobe, "none": nothing,
    "own2": own_two_pass, "msprobe2": msprobe_two_pass, "none2": nothing_two_pass,
}  # fmt: skip


def available(names: list[str]) -> list[str]:
    """Those that can be imported; says which cannot."""
    found = []
    for name in names:
        try:
            if name.startswith("msprobe"):
                import msprobe.pytorch.compile_accuracy_checker.precision_checker  # noqa: F401
        except ImportError as error:
            print(f"{name}: left out, cannot be imported ({error})")
            continue
        found.append(name)
    return found


# ---- what is found ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One step; without `fault` a tool must stay silent."""

    name: str
    build: Callable[[], Workload]
    classes: Any
    fault: Callable[[], Any] | None = None
    backend: Any = "aot_eager"
    tiny: bool = False


def stack_case(kind: str, fault: str | None, make: Callable[[], Any] | None, **more: Any) -> Case:
    dtype = more.pop("dtype", torch.float32)
    name = f"{kind}-{fault or 'clean'}" + (
        f"-{dtype}".replace("torch.", "") if dtype != torch.float32 else ""
    )
    return Case(name, lambda: stack(kind, dtype=dtype), compiled.block_class(kind), make, **more)


def _negate(tensor: Tensor) -> Tensor:
    return -tensor


FAULTS: dict[str, Callable[[], Any]] = {
    "forward": lambda: wrong(forward=add_to_one(1e-2)),
    "forward-small": lambda: wrong(forward=add_to_one(1e-3)),
    "forward-x1.001": lambda: wrong(forward=lambda out: out * 1.001),
    "backward": lambda: wrong(backward=lambda grad: grad * 2),
    "input-gradient": lambda: wrong(backward=add_to_one(1e-2)),
    "parameter-gradient": lambda: wrong(backward={0: add_to_one(1e-2)}),
    "first-call-only": lambda: wrong(forward=add_to_one(1e-2), at=1),
    "second-call-only": lambda: wrong(forward=add_to_one(1e-2), at=2),
    "backward-once": lambda: wrong(backward=lambda grad: grad * 2, at=1),
    "nan": lambda: wrong(forward=add_to_one(float("nan"))),
    "inf": lambda: wrong(forward=add_to_one(float("inf"))),
    "zeros": lambda: wrong(forward=torch.zeros_like),
}


def cases() -> list[Case]:
    """Every fault in plain blocks, the main ones in blocks of other kinds, and clean ones."""
    found = [stack_case("plain", name, make) for name, make in FAULTS.items() if "call" not in name]
    found += [stack_case("twice", name, FAULTS[name]) for name in FAULTS if "call" in name]
    found.append(
        stack_case("plain", "sign-flip-of-tiny-values", lambda: wrong(forward=_negate), tiny=True)
    )
    for kind in ("dict", "dataclass", "tuple", "keyword_only", "dropout", "twice"):
        found += [stack_case(kind, name, FAULTS[name]) for name in ("forward", "backward")]
    found += [stack_case(kind, None, None) for kind in KINDS]
    found += [
        stack_case("plain", None, None, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)
    ]
    for name in ("gpt2", "llama", "resnet"):
        build, layer = compiled.real_model(name)
        found.append(Case(f"{name}-clean", build, layer))
    return found


def _state(workload: Workload) -> dict[str, Tensor]:
    model = workload.model
    state = {
        f"gradient of {k}": p.grad.clone()
        for k, p in model.named_parameters()
        if p.grad is not None
    }
    state.update({f"buffer {k}": b.clone() for k, b in model.named_buffers()})
    state["random state"] = torch.get_rng_state()
    return {key.replace("_orig_mod.", ""): value for key, value in state.items()}


def _same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(torch.nan_to_num(first[key]), torch.nan_to_num(second[key])) for key in first
    )


def prepared(case: Case) -> tuple[Workload, str]:
    workload = case.build()
    where = mark(workload.model) if case.fault else ""
    if case.tiny:
        with torch.no_grad():
            for part in (workload.model.inp, workload.model.blocks):
                for parameter in part.parameters():
                    parameter.mul_(1e-5)
    return workload, where


def step_of(workload: Workload) -> Callable[[nn.Module], Tensor]:
    def step(model: nn.Module) -> Tensor:
        model.zero_grad()
        loss = workload.loss_fn(model, workload.batch)
        loss.backward()
        return loss

    return step


def detect(tool: str, case: Case) -> tuple[str, str]:
    """Run one case; returns the score and one line about it."""
    torch._dynamo.reset()
    workload, where = prepared(case)
    torch.manual_seed(123)
    backend = case.fault() if case.fault else case.backend
    if not tool.endswith("2"):  # two-pass leaves the model as it was
        with random_as_eager(backend):
            for block in [m for m in workload.model.modules() if isinstance(m, case.classes)]:
                compile_in_place(block, backend)
            step_of(workload)(workload.model)
    expected = _state(workload)

    torch._dynamo.reset()
    workload, _ = prepared(case)
    torch.manual_seed(123)
    backend = case.fault() if case.fault else case.backend
    try:
        found = TOOLS[tool](workload.model, step_of(workload), case.classes, backend)
    except Exception as error:  # noqa: BLE001 - a crash is a score
        return "CRASH", f"{type(error).__name__}: {error}"[:100]
    changed = "" if _same(expected, _state(workload)) else "  STEP CHANGED"
    return _score(found, where) + changed, f"{found.verdict} {found.suspects}"


def _score(found: Finding, where: str) -> str:
    if not where:
        if found.verdict != "PASS":
            return "FALSE ALARM"
        return "clean" if found.num_forward else "SILENT, NOTHING COMPARED"
    if found.suspects == [where]:
        return "found"
    return "FOUND AMONG OTHERS" if where in found.suspects else "MISSED"


def print_detection(tools: list[str], only: str) -> int:
    """The matrix; returns the number of wrong scores of our own."""
    wrong_ones = 0
    for tool in tools:
        scores: dict[str, int] = {}
        for case in cases():
            if only and only not in case.name:
                continue
            score, about = detect(tool, case)
            scores[score] = scores.get(score, 0) + 1
            wrong_ones += tool.startswith("own") and score not in ("found", "clean")
            print(f"{tool:8s} {case.name:44s} {score:28s} {about}", flush=True)
        print(f"{tool}: " + ", ".join(f"{count} {score}" for score, count in scores.items()))
    return wrong_ones


# ---- what it costs ------------------------------------------------------------------------------


@dataclass
class Timing:
    """Seconds of one tool on one model, by round."""

    total: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    eager: list[float] = field(default_factory=list)


def _layer_of(name: str) -> Any:
    if name == "mlp":
        return models.MLPBlock
    if name == "resnet18":
        return models.BasicBlock
    return compiled.real_model(name)[1]


def measure(name: str, tools: list[str], backend: str, rounds: int) -> dict[str, Timing]:
    """Install, step, collect and report of each tool in turn, each with a cold Dynamo."""
    workload = LARGE[name]()
    workload.model.train()
    step, layer = step_of(workload), (_layer_of(name),)
    found = {tool: Timing() for tool in tools}
    step(copy.deepcopy(workload.model))
    for number in range(rounds):
        for tool in tools if number % 2 else reversed(tools):
            eager_model = copy.deepcopy(workload.model)
            eager = statistics.median(timed(lambda m=eager_model: step(m))[1] for _ in range(3))
            torch._dynamo.reset()
            model = copy.deepcopy(workload.model)
            wall, cpu = timed(lambda m=model, t=tool: TOOLS[t](m, step, layer, backend))
            found[tool].total.append(wall)
            found[tool].cpu.append(cpu)
            found[tool].eager.append(eager)
    return found


def peak_in_fresh_process(name: str, tool: str, backend: str) -> float:
    """Peak memory of a process that does one checked step, above that of the plain steps."""
    call = f"m.peak_of({name!r}, {tool!r}, {backend!r})"
    return float(in_fresh_process(call, module="benchmarks.bench_compile"))


def peak_of(name: str, tool: str, backend: str) -> float:
    """MiB by which one checked step raises the peak of a process that has run compiled steps."""
    torch.set_num_threads(1)
    workload = LARGE[name]()
    workload.model.train()
    step, layer = step_of(workload), (_layer_of(name),)
    plain = copy.deepcopy(workload.model)
    for block in [item for item in plain.modules() if isinstance(item, layer)]:
        compile_in_place(block, backend)
    step(plain)
    del plain
    reset_peak()
    before = resident_mib()
    if tool:
        TOOLS[tool](workload.model, step, layer, backend)
    return peak_mib() - before


def print_timing(args: argparse.Namespace, tools: list[str]) -> dict[str, Any]:
    """One table row for each model and tool."""
    print(f"{'model':10s} {'backend':10s} {'tool':8s} {'total s':>8s} {'cpu s':>8s}"
          f" {'x eager (cpu: median, min, max)':>34s} {'peak MiB':>9s}")  # fmt: skip
    rows: dict[str, Any] = {}
    for name in args.models.split(","):
        for backend in args.backends.split(","):
            timings = measure(name, tools, backend, args.rounds)
            for tool, timing in timings.items():
                ratios = [cpu / base for cpu, base in zip(timing.cpu, timing.eager, strict=True)]
                peak = peak_in_fresh_process(name, tool, backend)
                rows[f"{name}/{backend}/{tool}"] = {
                    "total_s": statistics.median(timing.total),
                    "cpu_s": statistics.median(timing.cpu),
                    "ratio": statistics.median(ratios),
                    "peak_mib": peak,
                }
                print(f"{name:10s} {backend:10s} {tool:8s} {statistics.median(timing.total):8.2f}"
                      f" {statistics.median(timing.cpu):8.2f}   {statistics.median(ratios):8.1f}"
                      f" {min(ratios):8.1f} {max(ratios):8.1f}      {peak:9.0f}",
                      flush=True)  # fmt: skip
            _print_beside(rows, name, backend)
    return rows


def _print_beside(rows: dict[str, Any], name: str, backend: str) -> None:
    for suffix in ("", "2"):
        _print_pair(rows, f"{name}/{backend}/", suffix)


def _print_pair(rows: dict[str, Any], prefix: str, suffix: str) -> None:
    ours, theirs, floor = (
        rows.get(f"{prefix}{tool}{suffix}") for tool in ("own", "msprobe", "none")
    )
    if ours and theirs:
        share = ours["cpu_s"] / theirs["cpu_s"]
        if floor:
            shares = [floor["cpu_s"] / row["cpu_s"] for row in (ours, theirs)]
            print(f"{'':10s} the compiled step alone is {min(shares[0], 1.0):.0%} of own,"
                  f" {min(shares[1], 1.0):.0%} of msprobe: own / msprobe can be no less than"
                  f" {shares[1]:.2f}")  # fmt: skip
            less = [max(row["cpu_s"] - floor["cpu_s"], 0.0) for row in (ours, theirs)]
            print(f"{'':10s} above the compiled step alone: own {less[0]:.2f} s, msprobe"
                  f" {less[1]:.2f} s of cpu; own / msprobe without it:"
                  f" {less[0] / max(less[1], 1e-9):.2f}")  # fmt: skip
        print(f"{'':10s} own / msprobe: {share:.2f} of the cpu time (target 0.50),"
              f" {ours['peak_mib'] - theirs['peak_mib']:+.0f} MiB of peak (target 0)")  # fmt: skip


def main() -> int:
    """Run what was asked for; exit status 1 when a detection of our own is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", default="detect,timing")
    parser.add_argument("--tools", default="none,own,msprobe")
    parser.add_argument("--models", default="mlp,gpt2,resnet18")
    parser.add_argument("--backends", default="aot_eager")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default="", help="only those whose name contains this")
    parser.add_argument("--json", default="", help="write the timing rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tools = available(args.tools.split(","))
    checkers = [tool for tool in tools if not tool.startswith("none")]
    failures = print_detection(checkers, args.cases) if "detect" in args.part else 0
    if "timing" in args.part:
        rows = print_timing(args, tools)
        if args.json:
            Path(args.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    sys.exit(main())
