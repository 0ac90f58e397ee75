"""What the benchmarks share: clocks, spreads, peak memory, processes of their own."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "ROOT",
    "Ratios",
    "Spread",
    "in_fresh_process",
    "peak_mib",
    "reset_peak",
    "resident_mib",
    "timed",
    "timed_between",
]

ROOT = Path(__file__).resolve().parent.parent


def timed(function: Callable[[], Any]) -> tuple[float, float]:
    """Return wall seconds and CPU seconds of one call."""
    wall_s = time.perf_counter()
    cpu_s = time.process_time()
    function()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def text(self, width: int = 7, digits: int = 2) -> str:
        """`   1.02 [  0.99,   1.10]`."""
        narrow = width - 1
        return (
            f"{self.median:{width}.{digits}f}"
            f" [{self.low:{narrow}.{digits}f},{self.high:{narrow}.{digits}f}]"
        )


@dataclass
class Ratios:
    """Ratios to what ran right before and after, one a round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def add(
        self, before: tuple[float, float], during: tuple[float, float], after: tuple[float, float]
    ) -> None:
        """One round; (wall, CPU) seconds each."""
        self.wall.append(2 * during[0] / (before[0] + after[0]))
        self.cpu.append(2 * during[1] / (before[1] + after[1]))


def timed_between(ratios: Ratios, plain: Callable[[], Any], arm: Callable[[], Any]) -> None:
    """Time `arm` between two runs of `plain`."""
    ratios.add(timed(plain), timed(arm), timed(plain))


# ---- memory -------------------------------------------------------------------------------------


def reset_peak() -> None:
    """Forget the peak of this process so far (Linux only)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_mib() -> float:
    """The most memory that this process had, since `reset_peak` if that was called."""
    return _status_kib("VmHWM") / 1024


def resident_mib() -> float:
    """The memory that this process has now."""
    return _status_kib("VmRSS") / 1024


def _status_kib(name: str) -> int:
    for line in (
        Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    ):
        if line.startswith(name):
            return int(line.split()[1])
    raise OSError(f"no {name} in /proc/self/status")


# ---- processes ----------------------------------------------------------------------------------


def in_fresh_process(expression: str, *, module: str) -> str:
    """Evaluate `expression`, where `m` is the module, in a process of its own.

    Returns:
        Its value as text, the last line of what was printed.

    Raises:
        RuntimeError: the process failed; the message ends with what it said.
    """
    quiet = "import warnings; warnings.simplefilter('ignore')"
    code = f"{quiet}; import {module} as m; print({expression})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{expression}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1]
