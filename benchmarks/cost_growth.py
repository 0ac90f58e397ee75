"""Does what is checked cost the same, however much of it there is?

Each subject is measured at several sizes. Between two sizes the cost grows as a power of the size;
the largest such power, from the cheapest smaller size on, is the growth: 1 is proportional, 2 means
that something looks at everything for each. By the CPU clock.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import opcheck
from benchmarks.bench_large import randn
from benchmarks.bench_review import write as write_log
from benchmarks.cost_table import Row
from benchmarks.measuring import Spread, timed
from modulecheck import PrecisionChecker
from opcheck.report import render
from opcheck.review import load_run
from tests.compiled import compile_in_place
from tests.models import ResidualBlock, ResidualBlocks

__all__ = ["LIMIT", "SIZES", "SMALL_SIZES", "growth_rows"]

LIMIT = 1.25
"""Of the power. Room for caches and the clock; the square of a thing would be 2."""
TRIES = 3
CACHES = 16
SIZES: dict[str, tuple[int, ...]] = {
    "ops": (10, 100, 1000, 5000),
    "blocks": (10, 100, 500),
    "compiled blocks": (4, 16, 64, 256),
    "elements": (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
    "steps": (10, 100, 400),
    "records": (1_000, 10_000, 50_000),
}
SMALL_SIZES: dict[str, tuple[int, ...]] = {
    "ops": (10, 20), "blocks": (2, 4), "compiled blocks": (1, 2), "elements": (256, 1024),
    "steps": (2, 4), "records": (10, 20),
}  # fmt: skip
WIDTH = 8

Phases = dict[str, float]
"""CPU seconds of each phase of one run."""


# ---- what is run --------------------------------------------------------------------------------


Subject = tuple[nn.Module | None, Callable[[], None]]


def chain(num_ops: int) -> Subject:
    """Small ops in a row, forward and backward."""
    start = torch.ones(16, requires_grad=True)

    def step() -> None:
        value = start
        for place in range(num_ops):
            value = value.sin() if place % 2 else value * 0.99
        value.sum().backward()

    return None, step


def blocks(num_blocks: int) -> Subject:
    """A model, known to the session, with the first step of AdamW."""
    model, inputs = ResidualBlocks(num_blocks, width=WIDTH), randn(4, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()

    return model, step


def loose_blocks(num_blocks: int) -> Subject:
    """Blocks of no model, called one after the other."""
    parts, inputs = [ResidualBlock(WIDTH) for _ in range(num_blocks)], randn(4, WIDTH)

    def step() -> None:
        hidden = inputs
        for part in parts:
            hidden = part(hidden)
        hidden.square().mean().backward()

    return None, step


ARMS: dict[str, dict[str, Any]] = {
    "counting": {"max_checks": 0},
    "defaults": {},
    "every call": {"max_checks": None},
    "every call fails": {"max_checks": None, "rtol": 0.0, "atol": 0.0},
    "blame": {"blame": True},
    "max_overhead=0.5": {"max_overhead": 0.5},
    "workers=2": {"max_checks": None, "workers": 2},
}
SESSIONS: tuple[tuple[str, str, Callable[[int], Subject], tuple[str, ...]], ...] = (
    ("chain of ops", "ops", chain, tuple(ARMS)),
    ("blocks, AdamW", "blocks", blocks, ("counting", "defaults", "every call", "blame")),
    ("blocks, no model", "blocks", loose_blocks, ("counting", "blame")),
)
"""Name, what grows, how it is made, how it is checked."""


def checked(make: Callable[[int], Subject], arm: str, size: int) -> Phases:
    """One step, the exit, and what reads the result."""
    torch.manual_seed(0)
    model, step = make(size)
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        session = opcheck.check(model, log_dir=folder, quiet=True, **ARMS[arm])

        def run() -> None:
            with session:
                step()

        def read() -> None:
            session.report()
            render(load_run(Path(folder)))

        return {"step": timed(run)[1], "reports": timed(read)[1]}


def many_steps(num_steps: int) -> Phases:
    """A session entered for every step, and asked for its verdict after it."""
    model, inputs = ResidualBlocks(2, width=WIDTH), randn(4, WIDTH)
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        session = opcheck.check(model, log_dir=folder, quiet=True, max_checks=None)

        def run() -> None:
            for _ in range(num_steps):
                with session:
                    model(inputs).square().mean().backward()
                if session.verdict is not opcheck.Verdict.PASS:
                    raise RuntimeError(session.report())

        return {"steps": timed(run)[1]}


def reviewed(num_records: int) -> Phases:
    """A log of so many records."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "precision.jsonl"
        write_log(path, num_records)
        return {"review": timed(lambda: render(load_run(path)))[1]}


# ---- PrecisionChecker ---------------------------------------------------------------------------


def _loss(model: nn.Module) -> Tensor:
    loss = model(torch.ones(4, WIDTH)).square().mean()
    loss.backward()
    return loss


def compiled_alone(num_blocks: int) -> Phases:
    """What no checker can be cheaper than."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ResidualBlocks(num_blocks, width=WIDTH)
    gc.collect()

    def run() -> None:
        for block in model.blocks:
            compile_in_place(block, "aot_eager")
        _loss(model)

    return {"step": timed(run)[1]}


def compared(num_blocks: int, *, single_pass: bool) -> Phases:
    """Install, step, collect; then the report."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ResidualBlocks(num_blocks, width=WIDTH)
    checker = PrecisionChecker(backend="aot_eager", single_pass=single_pass)
    checker.wrap_by_policy(model, (ResidualBlock,))
    results: list[Any] = []
    gc.collect()

    def report() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            checker.report(results[0])

    found = {
        "step": timed(lambda: results.append(checker.compare(_loss, model)))[1],
        "report": timed(report)[1],
    }
    if not results[0].all_pass:
        raise RuntimeError(f"a clean model: {results[0].judgement}")
    return found


# ---- the size of tensors ------------------------------------------------------------------------


def tensors_of(op: str, size: int) -> tuple[Callable[[], Tensor], float]:
    """A call on a result of `size` elements, and its units: elements, of mm multiply-adds."""
    side = math.isqrt(size)
    if op == "mm":
        left, right = randn(side, side), randn(side, side, seed=1)
        return lambda: left @ right, float(side**3)
    if op == "softmax":
        rows = randn(side, side)
        return lambda: rows.softmax(-1), float(size)
    values, other = randn(size), randn(size, seed=1)
    return lambda: values + other, float(size)


def seconds_of_check(call: Callable[[], Tensor]) -> float:
    """What the check takes by the session's own account, wall clock; the smallest of a few."""
    found: list[float] = []
    while len(found) < 2 or (len(found) < 7 and sum(found) < 0.5):
        with (
            tempfile.TemporaryDirectory() as folder,
            opcheck.check(log_dir=folder, quiet=True, max_checks=None) as session,
        ):
            call()
        found.append(session.coverage.check_seconds)
    return min(found)


# ---- rows ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """CPU seconds by size; `units` where the cost is of something else than the size."""

    seconds: Mapping[int, float]
    units: Mapping[int, float] | None = None
    apart: int = 1
    """Sizes are compared that are at least so many times apart: arrays that leave a cache cost
    more at once."""

    def per_unit(self, size: int) -> float:
        """Seconds of each."""
        return self.seconds[size] / (self.units or {}).get(size, size)

    @property
    def power(self) -> float:
        """The largest growth from the cheapest smaller size on."""
        sizes = sorted(self.seconds)
        found = []
        for place, size in enumerate(sizes[1:], 1):
            earlier = [item for item in sizes[:place] if item * self.apart <= size]
            if not earlier:
                continue
            cheapest = min(earlier, key=self.per_unit)
            units = self.units or {}
            ratio = units.get(size, size) / units.get(cheapest, cheapest)
            rise = math.log(self.per_unit(size) / self.per_unit(cheapest))
            found.append(1 + rise / math.log(ratio))
        return max(found, default=0.0)

    def row(self, subject: str, arm: str, unit: str, sizes: Sequence[int]) -> Row:
        """Per-unit cost at each size, and whether it is flat."""
        each = [1e6 * self.per_unit(size) for size in sizes]
        scale, name = (1e3, "ns") if max(each[-2:]) < 0.5 else (1.0, "us")
        shown = ", ".join(
            f"{_short(s)}: {scale * cost:.3g}" for s, cost in zip(sizes, each, strict=True)
        )
        ends = each[-1] / each[0]
        return Row(
            part="growth", subject=subject, arm=arm, unit="power of n",
            cpu=Spread(self.power, self.power, self.power), held=self.power <= LIMIT,
            limit=f"at most n^{LIMIT}",
            note=f"{name} per {unit} at {shown}; last over first {ends:.3g}",
        )  # fmt: skip


def _short(size: int) -> str:
    for factor, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if size >= factor and size % factor == 0:
            return f"{size // factor}{letter}"
    return str(size)


def _grown(measure: Callable[[int], Phases], sizes: Sequence[int], tries: int) -> dict[str, Growth]:
    """Each phase at each size, after a run that pays for first calls.

    What seems to grow is measured again, and the smaller counts: other work on the machine only
    ever adds.
    """
    measure(sizes[0])
    found: dict[str, dict[int, float]] = {}
    for _ in range(tries):
        for size in sizes:
            for phase, seconds in measure(size).items():
                known = found.setdefault(phase, {})
                known[size] = min(known.get(size, math.inf), max(seconds, 1e-9))
        grown = {phase: Growth(seconds) for phase, seconds in found.items()}
        if all(growth.power <= LIMIT for growth in grown.values()):
            break
    return grown


def growth_rows(sizes: Mapping[str, Sequence[int]], tries: int = TRIES) -> Iterator[Row]:
    """Everything that may grow."""
    gc.collect()
    gc.freeze()  # what was imported is of no interest to the collections before each run
    try:
        yield from _growth_rows(sizes, tries)
    finally:
        gc.unfreeze()


def _growth_rows(sizes: Mapping[str, Sequence[int]], tries: int) -> Iterator[Row]:
    for name, kind, make, arms in SESSIONS:
        for arm in arms:
            grown = _grown(lambda n, m=make, a=arm: checked(m, a, n), sizes[kind], tries)
            for phase, growth in grown.items():
                yield growth.row(name, f"{arm}: {phase}", kind[:-1], sizes[kind])
    others: tuple[tuple[str, str, str, Callable[[int], Phases]], ...] = (
        ("steps", "steps", "every call", many_steps),
        ("log", "records", "review", reviewed),
        ("compiled blocks", "compiled blocks", "alone", compiled_alone),
        ("compiled blocks", "compiled blocks", "single-pass",
         lambda n: compared(n, single_pass=True)),
        ("compiled blocks", "compiled blocks", "two-pass",
         lambda n: compared(n, single_pass=False)),
    )  # fmt: skip
    for name, kind, arm, measure in others:
        for phase, growth in _grown(measure, sizes[kind], tries).items():
            yield growth.row(name, f"{arm}: {phase}", kind.split()[-1][:-1], sizes[kind])
    for op in ("add", "mm", "softmax"):
        yield _of_tensors(op, sizes["elements"], tries)


def _of_tensors(op: str, sizes: Sequence[int], tries: int) -> Row:
    made = {size: tensors_of(op, size) for size in sizes}
    units = {size: units for size, (_, units) in made.items()}
    seconds_of_check(made[sizes[0]][0])  # pays for first calls
    seconds = dict.fromkeys(sizes, math.inf)
    growth = Growth(seconds, units, apart=CACHES)
    for _ in range(tries):
        for size, (call, _) in made.items():
            seconds[size] = min(seconds[size], seconds_of_check(call))
        if growth.power <= LIMIT:
            break
    unit = "multiply-add" if op == "mm" else "element"
    return growth.row(f"{op}, elements", "check", unit, sizes)
