"""The parts of the table of costs other than growth, each a generator of rows."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import opcheck
from benchmarks import bench_compile, bench_ops, bench_overhead
from benchmarks.cost_table import Row
from benchmarks.measuring import (
    Ratios,
    Spread,
    in_fresh_process,
    peak_mib,
    reset_peak,
    resident_mib,
    timed,
)
from modulecheck import PrecisionChecker
from tests.planted_lowerings import transformer, wrong_lowering
from tests.registering import enabled

__all__ = [
    "compile_rows",
    "drilldown_rows",
    "memory_rows",
    "overhead_rows",
    "registrar_rows",
    "reproducer_rows",
    "step_rows",
]

WRAPPED_MODELS = ("gpt2", "resnet18")
"""Those with a target beside the usual wrapper."""
STEP_ARMS = (
    "plain", "empty_mode", "max_checks=0", "live", "every_call", "blame", "used_up",
    "not_entered", "num_steps=0", "wrapper_first_10",
)  # fmt: skip
MEMORY_ARMS = ("plain", "empty_mode", "live", "every_call", "blame", "used_up")
OVERHEAD = 0.5
MSPROBE_LIMIT = 0.50
"""Of msProbe's CPU time, as in `bench_compile`; of its peak memory no more than the same."""


# ---- a step under opcheck.check -----------------------------------------------------------------


def step_rows(name: str, rounds: int) -> Iterator[Row]:
    """Every way to run a step, as a multiple of the plain steps right beside it."""
    build = bench_ops.MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        arms = bench_ops.make_arms(Path(folder))
        chosen = {
            arm: arms[arm]
            for arm in STEP_ARMS
            if not arm.startswith("wrapper") or name in WRAPPED_MODELS
        }
        results = bench_ops.measure(build, chosen, rounds)
    targets = {target.arm: target for target in bench_ops.TARGETS if target.applies_to(name)}
    for arm, result in results.items():
        if result.error:
            yield Row(
                part="step", subject=name, arm=arm, unit="x plain", held=False, note=result.error
            )
            continue
        target = targets.get(arm)
        ratio = None if target is None else target.ratio(results)
        held = None if target is None or ratio is None else ratio <= target.limit
        if result.changes and not arm.startswith("wrapper"):
            held = False
        yield Row(
            part="step", subject=name, arm=arm, unit="x plain",
            cpu=Spread.of(result.cpu), wall=Spread.of(result.wall), held=held,
            limit="" if ratio is None else f"{target.text}: {ratio:.2f}",
            note=f"step changed: {result.changes[0]}" if result.changes else "",
        )  # fmt: skip


def overhead_rows(name: str, num_steps: int) -> Iterator[Row]:
    """Training with `max_overhead`, the checked steps in turn with plain ones."""
    with tempfile.TemporaryDirectory() as folder:
        found = bench_overhead.measure(name, OVERHEAD, num_steps, Path(folder))
    limit = 1 + OVERHEAD * (1 + bench_overhead.TOLERANCE)
    cpu, wall = 1 + found.cpu, 1 + found.wall
    yield Row(
        part="step", subject=name, arm=f"max_overhead={OVERHEAD}", unit="x plain",
        cpu=Spread(cpu, cpu, cpu), wall=Spread(wall, wall, wall),
        limit=f"at most {limit:.2f} x plain", held=cpu <= limit,
        note=f"sum of {num_steps} steps, {found.num_checked} of {found.num_seen} calls checked",
    )  # fmt: skip


# ---- registered kernels -------------------------------------------------------------------------

CALLS = 300
"""Of a registered kernel, timed together."""
REGISTRAR_LIMIT = 1.10
"""Disabled; a Python call more, beside a kernel of a few microseconds."""
REGISTRAR_ARMS: dict[str, dict[str, Any] | None] = {
    "disabled": None,
    "enabled, used up": {"max_checks": 0},
    "enabled, first 10": {},
    "enabled, every call": {"max_checks": None},
}


def _silu(values: Tensor) -> Tensor:
    return values * torch.sigmoid(values)


def registrar_ratios(rounds: int, num_calls: int) -> dict[str, tuple[list[float], ...]]:
    """Ratios (CPU, wall) to the kernel registered without a check, and CPU seconds; by arm.

    For a process of its own: registering keeps sessions from leaving the dispatch path for as
    long as the process lives.
    """
    torch.set_num_threads(1)
    values = torch.ones(1000)

    def calls() -> None:
        for _ in range(num_calls):
            torch.ops.aten.silu.default(values)

    def bare() -> tuple[float, float]:
        library = torch.library.Library("aten", "IMPL")
        library.impl("silu", _silu, "CPU")
        try:
            return timed(calls)
        finally:
            library._destroy()

    def checked(options: dict[str, Any] | None) -> tuple[float, float]:
        library = torch.library.Library("aten", "IMPL")
        opcheck.PrecisionCheckRegister([("silu", _silu)], lib=library, dispatch_key="CPU")
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "precision.log"
                on = contextlib.nullcontext() if options is None else enabled(path=path, **options)
                with on:
                    return timed(calls)
        finally:
            library._destroy()

    found = {arm: Ratios() for arm in REGISTRAR_ARMS}
    seconds: dict[str, list[float]] = {arm: [] for arm in REGISTRAR_ARMS}
    for number in range(rounds + 1):
        for arm, options in REGISTRAR_ARMS.items():
            times = bare(), checked(options), bare()
            if number:  # the first pays for imports
                found[arm].add(*times)
                seconds[arm].append(times[1][1])
    return {arm: (ratios.cpu, ratios.wall, seconds[arm]) for arm, ratios in found.items()}


def registrar_rows(rounds: int, num_calls: int = CALLS) -> Iterator[Row]:
    """Calls of a registered kernel, as a multiple of the same kernel without a check."""
    call = f"__import__('json').dumps(m.registrar_ratios({rounds}, {num_calls}))"
    found = json.loads(in_fresh_process(call, module="benchmarks.cost_parts"))
    for arm, (cpu, wall, seconds) in found.items():
        is_off = arm == "disabled"
        yield Row(
            part="registrar", subject="silu, 1000 elements", arm=arm, unit="x bare",
            cpu=Spread.of(cpu), wall=Spread.of(wall),
            limit=f"at most {REGISTRAR_LIMIT:.2f} x bare" if is_off else "",
            held=statistics.median(cpu) <= REGISTRAR_LIMIT if is_off else None,
            note=f"{num_calls} calls, {1e6 * statistics.median(seconds) / num_calls:.1f} us each",
        )  # fmt: skip


# ---- memory -------------------------------------------------------------------------------------


def peak_of_step(name: str, arm: str) -> float:
    """MiB that one step under an arm takes at most above what the process held before it."""
    torch.set_num_threads(1)
    workload = bench_ops.MODELS[name]()
    for _ in range(2):
        workload.step()
    with tempfile.TemporaryDirectory() as folder:
        enter = bench_ops.make_arms(Path(folder))[arm]
        for _ in range(getattr(enter, "settling_steps", 0)):
            with enter(workload.model):
                workload.step()
        reset_peak()
        before = resident_mib()
        with enter(workload.model):
            workload.step()
        return peak_mib() - before


def memory_rows(name: str, arms: Sequence[str] = MEMORY_ARMS) -> Iterator[Row]:
    """Peak memory of a step, each in a process of its own."""
    plain = 0.0
    for arm in arms:
        call = f"m.peak_of_step({name!r}, {arm!r})"
        peak = float(in_fresh_process(call, module="benchmarks.cost_parts"))
        plain = peak if arm == "plain" else plain
        yield Row(
            part="memory", subject=name, arm=arm, unit="MiB", cpu=Spread(peak, peak, peak),
            note="" if arm == "plain" else f"{peak - plain:+.1f} beside plain",
        )  # fmt: skip


# ---- PrecisionChecker ---------------------------------------------------------------------------


def compile_rows(
    name: str, rounds: int, *, tools: Sequence[str], with_memory: bool = True
) -> Iterator[Row]:
    """Install, step, collect and report with a cold Dynamo, as a multiple of the eager step."""
    backend = "aot_eager"
    timings = bench_compile.measure(name, list(tools), backend, rounds)
    seconds = {tool: statistics.median(timing.cpu) for tool, timing in timings.items()}
    peaks = {
        tool: bench_compile.peak_in_fresh_process(name, tool, backend) if with_memory else 0.0
        for tool in tools
    }
    for tool, timing in timings.items():
        ratios = [cpu / base for cpu, base in zip(timing.cpu, timing.eager, strict=True)]
        limit, held = _beside_msprobe(tool, seconds, peaks)
        about = f"{seconds[tool]:.2f} s CPU, {statistics.median(timing.total):.2f} s wall"
        yield Row(
            part="compile", subject=name, arm=tool, unit="x eager", cpu=Spread.of(ratios),
            note=f"{about}, peak +{peaks[tool]:.0f} MiB" if with_memory else about,
            limit=limit, held=held,
        )  # fmt: skip


def _beside_msprobe(
    tool: str, seconds: dict[str, float], peaks: dict[str, float]
) -> tuple[str, bool | None]:
    if not tool.startswith("own"):
        return "", None
    suffix = tool.removeprefix("own")
    other, floor = f"msprobe{suffix}", f"none{suffix}"
    if other not in seconds:
        return "msprobe is not installed", None
    share = seconds[tool] / seconds[other]
    text = f"at most {MSPROBE_LIMIT:.2f} x {other}: {share:.2f}"
    if floor in seconds:
        text += f" ({floor} alone: {seconds[floor] / seconds[other]:.2f})"
    text += f"; peak {peaks[tool] - peaks[other]:+.0f} MiB"
    return text, share <= MSPROBE_LIMIT and peaks[tool] <= peaks[other]


# ---- from a failing module to op and line -------------------------------------------------------


def _failing_result(fault: str) -> tuple[PrecisionChecker, Any]:
    torch._dynamo.reset()
    if fault == "aot_eager":
        case = bench_compile.stack_case("plain", "forward", bench_compile.FAULTS["forward"])
        workload, _ = bench_compile.prepared(case)
        model, classes, step = workload.model, case.classes, bench_compile.step_of(workload)
        backend = case.fault() if case.fault is not None else case.backend
    else:
        model, ids = transformer()
        classes, backend = type(model.blocks[0]), "inductor"

        def step(model: Any) -> Tensor:
            loss = model(ids).float().square().mean()
            loss.backward()
            return loss

    checker = PrecisionChecker(backend=backend)
    checker.wrap_by_policy(model, classes if isinstance(classes, tuple) else (classes,))
    return checker, checker.compare(step, model)


def drilldown_rows(faults: Sequence[str] = ("aot_eager", "inductor")) -> Iterator[Row]:
    """A planted fault: the step that finds the module, the way to the line, the reproducer."""
    for fault in faults:
        around = wrong_lowering("erf") if fault == "inductor" else contextlib.nullcontext()
        with around, tempfile.TemporaryDirectory() as folder:
            yield from _drilled(fault, Path(folder))


def _drilled(fault: str, folder: Path) -> Iterator[Row]:
    found: list[Any] = []
    step_s = timed(lambda: found.append(_failing_result(fault)))
    checker, result = found.pop()
    quiet: dict[str, Any] = {"progress": False}
    for arm, more in (
        ("drilldown", {"repro_dir": None}),
        ("drilldown, reproducers", {"repro_dir": folder}),
    ):
        wall, cpu = timed(
            lambda more=more: found.append(checker.drilldown(result, **quiet, **more))
        )
        culprits = found.pop()
        named = [item for item in culprits if item.op]
        where = f"{named[0].op}, {named[0].source.split(': ')[0] or 'no line'}" if named else "none"
        yield Row(
            part="drilldown", subject=fault, arm=arm, unit="s",
            cpu=Spread(cpu, cpu, cpu), wall=Spread(wall, wall, wall),
            limit="an op is named", held=bool(named),
            note=f"{len(culprits)} culprits, {where}; the step {step_s[1]:.1f} s CPU",
        )  # fmt: skip
    files = sorted(folder.rglob("*.py"))
    if not files:
        yield Row(
            part="drilldown", subject=fault, arm="a reproducer runs", unit="s",
            note="none: a backend that is a function has no name to import",
        )  # fmt: skip
    for file in files[:1]:
        wall, _ = timed(partial(subprocess.run, [sys.executable, file], capture_output=True))
        yield Row(
            part="drilldown", subject=fault, arm="a reproducer runs", unit="s",
            wall=Spread(wall, wall, wall), note=f"torch imported included, {file.name}",
        )  # fmt: skip


def reproducer_rows() -> Iterator[Row]:
    """`opcheck.check(repro_dir=...)` where a call fails: what leaving the context takes."""
    values = torch.linspace(-3, 3, 4096).reshape(64, 64)
    for arm, seconds in (("written as it is", 0.0), ("made smaller", 20.0)):
        with tempfile.TemporaryDirectory() as folder:
            session = opcheck.check(
                log_dir=folder, quiet=True, rtol=0.0, atol=0.0, repro_dir=Path(folder) / "repro",
                repro_seconds=seconds,
            )  # fmt: skip

            def run(session: Any = session) -> None:
                with session:
                    torch.exp(values).softmax(-1)

            wall, cpu = timed(run)
            yield Row(
                part="drilldown", subject="opcheck.check", arm=f"reproducer {arm}", unit="s",
                cpu=Spread(cpu, cpu, cpu), wall=Spread(wall, wall, wall),
                limit="one is written", held=bool(session.repros),
                note=f"{len(session.repros)} of {len(session.failures)} failing calls",
            )  # fmt: skip
