"""What a report says beside verdict and coverage: what did not repeat, the first NaN or Inf."""

from __future__ import annotations

from opcheck.printing import Style
from opcheck.records import Coverage, Overhead

__all__ = ["nonfinite_lines", "overhead_text", "repeat_lines"]

MAX_ROWS = 20


def repeat_lines(coverage: Coverage, style: Style) -> list[str]:
    """What was run twice, and what did not give the same bits."""
    counts = coverage.repeat
    if not counts:
        return []
    different = sum(item.calls for item in coverage.unrepeatable)
    repeated = counts.get("run twice", 0)
    text = f"{repeated:,} calls; {repeated - different:,} gave the same bits again"
    if different:
        text += f", {different:,} did NOT (this is apart from the verdict)"
    lines = [style.paint("run twice on the same inputs", "bold"), *style.wrap(text, "    ", "  ")]
    rows = [
        [
            item.op,
            item.module or "<root>",
            item.phase,
            f"{item.calls:,}",
            str(item.first),
            f"{item.max_abs:.3g}",
        ]
        for item in coverage.unrepeatable[:MAX_ROWS]
    ]
    if rows:
        head = ["op", "module", "phase", "calls", "first", "differ by"]
        numbers = frozenset({"calls", "first", "differ by"})
        lines += style.table(head, rows, numbers=numbers)
    if len(coverage.unrepeatable) > MAX_ROWS:
        lines.append(f"  and {len(coverage.unrepeatable) - MAX_ROWS:,} more (--json lists all)")
    skipped = [
        f"{style.text(name.partition(': ')[2], 80)} {count:,}"
        for name, count in counts.items()
        if ": " in name and count
    ]
    if skipped:
        lines += style.wrap(f"not run twice: {', '.join(skipped)}", "    ", "  ")
    return lines


def nonfinite_lines(coverage: Coverage, style: Style) -> list[str]:
    """The first call that made NaN or Inf of finite inputs."""
    birth = coverage.first_nonfinite
    if birth is None:
        return []

    module = style.text(birth.module) or "<root>"
    where = f"{style.text(birth.phase)}, step {birth.step}, call {birth.index}"
    place = f" at [{', '.join(map(str, birth.place))}]"
    place += f" of output {birth.output}" if birth.output else ""
    judged = {
        "PASS": "agrees with its reference: its inputs make it so",
        "FAIL": "FAILs",
        "": "was not checked",
    }.get(birth.verdict, style.text(birth.verdict))
    title = "first NaN or Inf, made of finite inputs"
    if birth.arrived:
        title = "first NaN seen: it came with the inputs, made where no call was checked"
    lines = [style.paint(title, "bold")]
    lines += style.field("op", style.text(birth.op))
    lines += style.field("module", f"{module} ({where})")
    lines += style.field("source", style.text(birth.source))
    lines += style.field("value", f"{style.text(birth.value)}{place}")
    for number, text in enumerate(birth.inputs):
        lines += style.field("inputs" if not number else "", style.text(text, 1000))
    return lines + style.field("verdict", f"the call {judged}")


def overhead_text(share: Overhead) -> str:
    """What checking took beside the step, and how much is left to check."""
    own = max(share.own_seconds, 1e-9)
    text = (
        f"checking took {share.spent_seconds / own:.1%} of the step's own {share.own_seconds:.2f} s"
        f" (max_overhead {share.allowed_seconds / own:.4g}), of which"
        f" {share.counting_seconds / own:.1%} for looking at calls"
    )
    if share.setup_seconds >= 0.01:
        text += f", and {share.setup_seconds:.2f} s once, before the first step"
    text += "; "
    if share.num_rests:
        text += (
            f"{share.num_rests:,} of {share.num_rests + share.num_steps:,} steps left alone and not"
            " counted here, because looking at every step takes too much of what is allowed; "
        )
    if not share.num_left:
        return text + "nothing was left out that did not get its turn later"
    text += (
        f"{share.num_left:,} of {share.num_places:,} places (module, phase, op, argument types)"
        " were never checked, "
    )
    if share.steps_left is None:
        return text + "and at this rate none will be: looking at the calls takes what is allowed"
    return f"{text}about {share.steps_left:,} more step{'s' * (share.steps_left != 1)} would"
