"""Records as JSON, strictly: NaN and Inf are strings and complex numbers are objects."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

from opcheck.records import (
    Birth,
    Blame,
    CallCount,
    Coverage,
    Metrics,
    OpRecord,
    Overhead,
    RepeatDifference,
    Sample,
    SkipReason,
    UncheckedSignature,
    Verdict,
)

__all__ = ["from_json", "to_json"]

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


_AS_IT_IS = frozenset({str, int, bool, type(None)})


def _encode(value: Any) -> Any:
    if type(value) in _AS_IT_IS:
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, complex):
        return {"re": _encode(value.real), "im": _encode(value.imag)}
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(type(value)):
        return {name: _encode(getattr(value, name)) for name in _field_names(type(value))}
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value


def to_json(
    value: OpRecord | Metrics | Sample | Coverage | CallCount | UncheckedSignature,
) -> dict[str, Any]:
    """The fields under their names, ready for `json.dumps(..., allow_nan=False)`."""
    return {name: _encode(getattr(value, name)) for name in _field_names(type(value))}


_FIELDS: dict[type, tuple[str, ...]] = {}


def _field_names(kind: type) -> tuple[str, ...]:
    names = _FIELDS.get(kind)
    if names is None:
        names = _FIELDS[kind] = tuple(item.name for item in dataclasses.fields(kind))
    return names


def _number(value: Any) -> Any:
    if isinstance(value, str):
        return _NONFINITE.get(value)
    if isinstance(value, Mapping):
        return complex(_number(value.get("re", 0.0)), _number(value.get("im", 0.0)))
    return value


def from_json(kind: type, data: Mapping[str, Any]) -> Any:
    """Rebuild a record; unknown fields are ignored, missing ones take their defaults.

    Raises:
        TypeError, ValueError: a field has a value that the type cannot hold.
    """
    known = {name: data[name] for name in _field_names(kind) if name in data}
    return kind(**{name: _decode(kind, name, value) for name, value in known.items()})


_NESTED: dict[tuple[type, str], type] = {
    (OpRecord, "metrics"): Metrics,
    (OpRecord, "blame"): Blame,
    (OpRecord, "sample"): Sample,
    (Coverage, "first_nonfinite"): Birth,
    (Coverage, "overhead"): Overhead,
}
_LISTED: dict[tuple[type, str], type] = {
    (Coverage, "unchecked_signatures"): UncheckedSignature,
    (Coverage, "calls"): CallCount,
    (Coverage, "unrepeatable"): RepeatDifference,
}


def _decode(kind: type, name: str, value: Any) -> Any:
    if kind is Metrics:
        return tuple(value) if name == "worst_index" and value is not None else _number(value)
    if name == "verdict" and kind is OpRecord:
        return Verdict(value)
    if name == "reason" and kind is UncheckedSignature:
        return SkipReason(value)
    if kind in (Blame, RepeatDifference) and not isinstance(value, bool):
        number = _number(value)
        return value if number is None else number
    nested = _NESTED.get((kind, name))
    if nested is not None:
        return None if value is None else from_json(nested, value)
    if name == "skipped":
        return {SkipReason(reason): int(count) for reason, count in value.items()}
    listed = _LISTED.get((kind, name))
    if listed is not None:
        return tuple(from_json(listed, item) for item in value)
    return tuple(value) if isinstance(value, list) else value
