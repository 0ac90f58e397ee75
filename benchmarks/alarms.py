"""What a sweep over correct kernels has counted, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.correct_kernels import Variant

__all__ = ["ARMS", "Alarm", "Tally", "print_tally"]

ARMS = ("beside the CPU kernel", "float64 alone")


@dataclass(frozen=True, slots=True)
class Alarm:
    """A correct result that was called wrong."""

    variant: str
    arm: str
    op: str
    dtype: str
    entry: str
    q: float
    reason: str


@dataclass
class Tally:
    """What came of a sweep."""

    calls: int = 0
    ops: set[str] = field(default_factory=set)
    judged: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(variant, arm) -> results judged."""
    differ: Counter[str] = field(default_factory=Counter)
    """Variant -> of these beside the CPU kernel, those that have other bits than it."""
    skipped: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(variant or "", reason) -> calls."""
    alarms: list[Alarm] = field(default_factory=list)
    named: list[Alarm] = field(default_factory=list)
    tf32_found: int = 0
    tf32_missed: int = 0
    errors: list[str] = field(default_factory=list)
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Variant -> largest q of a PASS, and the op."""
    seconds: float = 0.0


def print_tally(
    name: str, tally: Tally, variants: Sequence[Variant], *, details: int, skips: bool
) -> None:
    """The table of one dtype; of each op so many alarms as `details` says."""
    print(
        f"{name}: {tally.calls} calls of {len(tally.ops)} overloads in {tally.seconds:.0f} s;"
        f" {tally.judged.total()} results judged, false alarms {len(tally.alarms)}"
    )
    for variant in variants:
        counts = ", ".join(f"{tally.judged[variant.name, arm]} {arm}" for arm in ARMS)
        q, op = tally.worst.get(variant.name, (0.0, "none"))
        print(
            f"  {variant.name}: judged {counts}; other bits than the CPU kernel's"
            f" {tally.differ[variant.name]}; largest q of a PASS {q:.2g} ({op})"
        )
    if tally.tf32_found or tally.tf32_missed:
        total = tally.tf32_found + tally.tf32_missed
        print(f"  TF32 where it is not allowed: FAIL {tally.tf32_found} of {total}")
    _print_alarms("false alarms", tally.alarms, details)
    _print_alarms("named, a right FAIL", tally.named, 0)
    skipped = Counter(
        {reason: count for (variant, reason), count in tally.skipped.items() if not variant}
    )
    print("  skipped calls: " + ", ".join(f"{key} {n}" for key, n in skipped.most_common()))
    if skips:
        for (variant, reason), count in tally.skipped.most_common():
            if variant:
                print(f"    {count:5d} {variant}: {reason}")
    print(f"  crashes {len(tally.errors)}")
    for error in tally.errors[:5]:
        print("    " + error.replace("\n", "\n    "))


def _print_alarms(title: str, alarms: list[Alarm], details: int) -> None:
    print(f"  {title} {len(alarms)}")
    groups: dict[tuple[str, str, str], list[Alarm]] = {}
    for alarm in alarms:
        groups.setdefault((alarm.variant, alarm.op, alarm.dtype), []).append(alarm)
    for (variant, op, dtype), group in sorted(groups.items()):
        worst = max(group, key=lambda item: item.q)
        arms = ", ".join(sorted({item.arm for item in group}))
        print(f"    {len(group):4d} {variant}: {op} {dtype}, {arms}: q {worst.q:.3g};"
              f" {worst.reason[:260]} [{worst.entry}]")  # fmt: skip
        for item in group[:details]:
            print(f"           {item.entry}, {item.arm}: q {item.q:.3g}; {item.reason[:300]}")
