"""How a reproducer judges what it computed; its text is copied into every reproducer.

Plain Python over lists of numbers: no kernel that may be under test takes part in the comparison,
and a reproducer needs nothing but torch. The limits were worked out when the file was written, by
the rule that failed the recorded call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

__all__ = ["judge", "results", "verdict"]

# ---- copied from here on ----

FEW = 24  # so many numbers are printed one by one


def results(out: Any, written: Iterable[Any] = ()) -> list[Any]:
    """What a call gave: its results in order, then what it wrote to and did not return."""
    found = leaves(out) if out is not None else []
    return found + [item for item in leaves(list(written)) if all(item is not x for x in found)]


def leaves(value: Any) -> list[Any]:
    """The items of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def numbers(value: Any, signed: bool = True) -> list[Any]:
    """The elements of a tensor (or one number) in C order; a complex one gives two.

    Not `signed`: their magnitudes, one for each.
    """
    found: list[Any] = []
    todo = [value.detach().tolist() if hasattr(value, "tolist") else value]
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo.extend(reversed(item))
        elif not signed:
            found.append(abs(item))
        elif isinstance(item, complex):
            found += [item.real, item.imag]
        else:
            found.append(item)
    return found


def kind_of(number: float, overflow: float = math.inf) -> str:
    """Finite, NaN or which infinity; from `overflow` on the dtype of the result has no number."""
    if number != number:
        return "nan"
    return "inf" if number >= overflow else "-inf" if number <= -overflow else "finite"


def verdict(
    limits: list[dict[str, Any]], actual: list[Any], expected: list[Any], beside: list[Any]
) -> int:
    """Judge every result; the exit status."""
    if len(actual) != len(limits):
        print(f"{len(actual)} results, expected {len(limits)}: FAULT")
        return 1
    found = [judge(*row) for row in zip(limits, actual, expected, beside, strict=True)]
    print("the fault is there" if any(found) else "the fault is not there")
    return int(any(found))


def judge(limit: dict[str, Any], actual: Any, expected: Any, beside: Any = None) -> bool:
    """Print how one result compares with what it should be; True when it is out of its limit.

    `expected` is the float64 result, `beside` that of torch's own kernel in the same dtype, where
    there is one; `limit` says by which rule they judge.
    """
    if limit["rule"] == "none" or (actual is None and expected is None):
        return False
    problem = structure_of(limit, actual)
    if problem:
        print(f"{limit['name']}: {problem}: FAULT")
        return True
    signed = not limit.get("magnitude")  # vectors whose sign or phase nothing determines
    got = numbers(actual, signed)
    want = numbers(target(limit, actual, expected, beside), signed)
    near = want if beside is None else numbers(beside, signed)
    rooms = room_of(limit, want)
    shares = [share_of(limit, *row) for row in zip(got, want, near, rooms, strict=True)]
    show(limit["name"], actual, got, want)
    print_worst(limit, actual, got, want, rooms, shares)
    num_out = sum(share > 1.0 for share in shares)
    verdict = f"{num_out} of {len(got)} numbers are out" if num_out else ""
    verdict = verdict or leaning(limit, got, want, actual, expected)
    print(f"  {verdict + ': FAULT' if verdict else 'within the limit: ok'}")
    return bool(verdict)


def structure_of(limit: dict[str, Any], actual: Any) -> str:
    """What is wrong with shape or dtype, "" if nothing."""
    if actual is None:
        return "there is none"
    if not hasattr(actual, "shape"):
        return ""
    shape, dtype = tuple(actual.shape), str(actual.dtype)
    if limit.get("shape") is not None and shape != tuple(limit["shape"]):
        return f"shape {shape}, expected {tuple(limit['shape'])}"
    if limit.get("dtype") is not None and dtype != limit["dtype"]:
        return f"dtype {dtype}, expected {limit['dtype']}"
    return ""


def target(limit: dict[str, Any], actual: Any, expected: Any, beside: Any) -> Any:
    """What the rule compares with."""
    if limit["rule"] == "finite":
        return actual
    if beside is not None and (limit["rule"] in ("exact", "allclose") or limit.get("by_dtype")):
        return beside  # `by_dtype`: float64 does not tell, it may have drawn other random numbers
    if limit["rule"] == "exact" and hasattr(expected, "to"):
        return expected.to(actual.dtype)
    return expected


def room_of(limit: dict[str, Any], want: list[Any]) -> list[float]:
    """The error that each element may have."""
    if limit["rule"] == "allclose":
        return [limit["atol"] + limit["rtol"] * abs(number) for number in want]
    allowed = limit.get("allowed", 0.0)
    return allowed if isinstance(allowed, list) else [allowed] * len(want)


def share_of(limit: dict[str, Any], got: Any, want: Any, near: Any, room: float) -> float:
    """The error as a share of what is allowed; more than 1 is out."""
    if limit["rule"] == "finite":
        return 0.0 if kind_of(got) == "finite" else math.inf
    if limit["rule"] == "exact":
        return 0.0 if got == want or (got != got and want != want) else math.inf
    kinds = {kind_of(want, limit.get("overflow", math.inf)), kind_of(near)}
    if kind_of(got) not in kinds:
        return 0.0 if limit.get("may_overflow") and kind_of(got) != "finite" else math.inf
    if kind_of(got) != "finite" or kinds != {"finite"}:
        return 0.0
    distance = max(min(want, near) - got, got - max(want, near), 0.0)
    return distance / room if room > 0.0 else math.inf if distance > 0.0 else 0.0


def leaning(
    limit: dict[str, Any], got: list[Any], want: list[Any], actual: Any, expected: Any
) -> str:
    """What is wrong on average where every element is within its limit; "" if nothing."""
    rows = [row for row in range(len(got)) if kind_of(got[row]) == kind_of(want[row]) == "finite"]
    if "max_rms" in limit and rows:
        rms = math.sqrt(sum((got[row] - want[row]) ** 2 for row in rows) / len(rows))
        if rms > limit["max_rms"]:
            return f"the rms error is {rms:.3g}, allowed {limit['max_rms']:.3g}"
    if "max_shift" in limit and rows:
        centre = numbers(expected.to(actual.dtype)) if limit["from_rounded"] else want
        most, total = limit["clamp"], 0.0
        for row in rows:
            steps = (got[row] - centre[row]) / limit["unit"][row]
            total += max(-most, min(most, steps)) * ((want[row] > 0) - (want[row] < 0))
        shift = total / len(rows)
        if abs(shift) > limit["max_shift"]:
            return (
                f"results are shifted by {shift:.3g} on average, allowed {limit['max_shift']:.3g}"
            )
    return ""


def show(name: str, actual: Any, got: list[Any], want: list[Any]) -> None:
    """Print the result, all of it where it is small."""
    print(f"{name}: {getattr(actual, 'dtype', type(actual).__name__)}", end="")
    print(f", shape {tuple(actual.shape)}" if hasattr(actual, "shape") else "")
    if len(got) <= FEW:
        print("  actual   ", *(format(number, ".9g") for number in got))
        print("  expected ", *(format(number, ".9g") for number in want))


def print_worst(
    limit: dict[str, Any], actual: Any, got: list[Any], want: list[Any], rooms: list[float],
    shares: list[float],
) -> None:  # fmt: skip
    """Print the element that is furthest out, and the metrics of all."""
    if not got:
        return
    worst = max(range(len(got)), key=shares.__getitem__)
    is_complex = hasattr(actual, "is_complex") and actual.is_complex()
    is_complex = is_complex and not limit.get("magnitude")
    index: list[int] = []
    rest = worst // 2 if is_complex else worst
    for size in reversed(tuple(getattr(actual, "shape", ()))):
        rest, at = divmod(rest, size)
        index.insert(0, at)
    allowed = "" if limit["rule"] == "finite" else f", allowed error {rooms[worst]:.3g}"
    print(f"  element {tuple(index)}: actual {got[worst]:.9g}, expected {want[worst]:.9g}{allowed}")
    pairs = [(a, e) for a, e in zip(got, want, strict=True) if kind_of(a) == kind_of(e) == "finite"]
    errors = [abs(a - e) for a, e in pairs] or [0.0]
    relative = [abs(a - e) / (abs(e) + 1e-8) for a, e in pairs] or [0.0]
    print(
        f"  max_abs {max(errors):.3g}, mean_abs {sum(errors) / len(errors):.3g},"
        f" max_rel {max(relative):.3g}, q {shares[worst]:.3g}"
    )
