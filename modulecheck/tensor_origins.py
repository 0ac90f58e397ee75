"""Where in a model a difference was born, and where it was only inherited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from modulecheck.tensor_records import ModuleFinding, TensorRecord
from opcheck.records import Verdict

__all__ = ["module_findings"]

Call = tuple[str, int]
_RESULTS = ("output", "buffer_after")


@dataclass(slots=True)
class _Seen:
    """What was compared of one module call."""

    parent: Call | None
    inputs: list[TensorRecord] = field(default_factory=list)
    outputs: list[TensorRecord] = field(default_factory=list)
    params: list[TensorRecord] = field(default_factory=list)
    contains: str | None = None
    """The origin inside."""


def module_findings(records: Sequence[TensorRecord]) -> tuple[ModuleFinding, ...]:
    """Findings for the module calls whose outputs differ, in the order in which they ended.

    Args:
        records: in the order of execution.
    """
    calls: dict[Call, _Seen] = {}
    params: dict[str, list[TensorRecord]] = {}
    ended: dict[Call, None] = {}
    for record in records:
        site = record.site
        if site is None:
            continue
        if site.role in ("param", "buffer"):
            params.setdefault(site.module, []).append(record)
            continue
        call = (site.module, site.call)
        seen = calls.setdefault(call, _Seen(site.parent))
        if site.role in _RESULTS:
            seen.outputs.append(record)
            ended[call] = None
        else:
            seen.inputs.append(record)
    findings = []
    for call in ended:
        seen = calls[call]
        seen.params = params.get(call[0], [])
        if _first_fail(seen.outputs) is not None:
            findings.append(_finding(call, seen))
            if findings[-1].kind == "origin":
                _tell_parents(calls, call)
    return tuple(findings)


def _first_fail(records: Iterable[TensorRecord]) -> TensorRecord | None:
    return next((record for record in records if record.verdict is Verdict.FAIL), None)


def _tell_parents(calls: dict[Call, _Seen], origin: Call) -> None:
    parent = calls[origin].parent
    known: set[Call] = set()
    while parent is not None and parent not in known:
        known.add(parent)
        seen = calls.setdefault(parent, _Seen(None))
        if seen.contains is None:
            seen.contains = origin[0]
        parent = seen.parent


def _finding(call: Call, seen: _Seen) -> ModuleFinding:
    output = _first_fail(seen.outputs)
    bad_input, bad_param = _first_fail(seen.inputs), _first_fail(seen.params)
    tag = next(record.tag for record in (bad_input, output) if record is not None)
    unseen = [record for record in seen.inputs if record.verdict is Verdict.INCONCLUSIVE]
    if bad_input is not None:
        kind, reason = "inherited", f"its input {bad_input.tag} differs already"
    elif seen.contains is not None:
        kind, reason = "contains", f"the origin inside of it is {seen.contains or '<root>'}"
    elif bad_param is not None:
        kind, reason = "origin", f"its {bad_param.tag} differs"
    elif unseen and len(unseen) == len(seen.inputs):
        kind, reason = "unclear", "none of its inputs could be compared"
    elif unseen:
        kind = "origin"
        reason = f"the inputs that were compared agree ({len(unseen)} could not be), outputs differ"
    else:
        kind, reason = "origin", "its inputs agree and its outputs differ"
    return ModuleFinding(module=call[0], call=call[1], kind=kind, reason=reason, tag=tag)
