"""Calls of a session kept whole, results included, to be judged on another machine.

One file a call, written when its verdict is final: tensors, and JSON text for all else, so that
reading one executes no code.
"""

from __future__ import annotations

import json
import math
import operator
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opcheck.calls import Call
from opcheck.errors import ReproError
from opcheck.outside import outside_everything
from opcheck.packing import Packed, View, map_tree, nbytes_of, pack, tree_items
from opcheck.record_json import from_json, to_json
from opcheck.records import OpRecord, Verdict
from opcheck.repro_files import MIB, save_atomically
from opcheck.rerun import Argument, KeptCall, keep
from opcheck.runstate import RunState, machine
from opcheck.settings import Settings

__all__ = ["CallRecorder", "Recorded", "read_call", "recorded_files"]

FORMAT = "opcheck.call"
VERSION = 1
_MAX_OP = 120
"""Characters of the op in a file name."""


class CallRecorder:
    """Writes checked calls to a folder, as long as there is room.

    Attributes:
        num_written: calls on disk.
    """

    def __init__(self, folder: Path, settings: Settings, *, run_id: str, rank: int) -> None:
        self._folder, self._settings = folder, settings
        self._prefix = f"{run_id}.rank{rank}"
        self._open: dict[int, tuple[KeptCall, Packed]] = {}
        self._left_out: Counter[str] = Counter()
        self._bytes = 0
        self._pid = os.getpid()
        self.num_written = 0

    @property
    def notes(self) -> list[str]:
        """What was left out, one sentence for each reason."""
        return [f"{count} calls not recorded: {why}" for why, count in self._left_out.items()]

    def wants_before(self, call: Call) -> bool:
        """Not beyond what may be written."""
        settings = self._settings
        size = self._bytes + nbytes_of((call.args, call.kwargs))
        has_room = self.num_written + len(self._open) < settings.max_recorded
        return has_room and size <= settings.max_record_bytes and os.getpid() == self._pid

    def judged(self, call: Call, out: Any, record: OpRecord, *, is_open: bool) -> None:
        """Copy a call before the step goes on; never raises into the step."""
        wanted = self._settings.record == "all" or record.verdict is Verdict.FAIL or is_open
        if not wanted or os.getpid() != self._pid:
            return
        try:
            why = self._take(call, out, record)
        except Exception as error:  # noqa: BLE001 - out of memory: never worth the user's step
            why = f"copying failed: {error!r}"
        if why:
            self._left_out[why] += 1

    def _take(self, call: Call, out: Any, record: OpRecord) -> str:
        settings = self._settings
        if self.num_written + len(self._open) >= settings.max_recorded:
            return f"max_recorded={settings.max_recorded} are"
        size = nbytes_of((call.args, call.kwargs)) + nbytes_of(out)
        if self._bytes + size > settings.max_record_bytes:
            return (
                f"they would go beyond max_record_bytes={settings.max_record_bytes}"
                f" ({settings.max_record_bytes / MIB:.0f} MiB)"
            )
        if call.is_large and call.traits.mutates and not call.whole_before:
            return "they wrote to more than max_numel elements, of which no copy was kept"
        kept = keep(call, record, RunState.now(), seed=settings.seed)
        self._open[record.index] = kept, _results(call, out)
        self._bytes += size
        return ""

    def concluded(self, record: OpRecord) -> None:
        """Write it, where it is wanted now that its verdict is final."""
        kept, results = self._open.pop(record.index, (None, None))
        if kept is None or results is None:
            return
        if self._settings.record != "all" and record.verdict is not Verdict.FAIL:
            self._bytes -= kept.arguments.nbytes + results.nbytes
            return
        name = f"{self._prefix}.{record.index:08d}.{record.op[:_MAX_OP]}.pt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_atomically(self._folder / name, _encoded(replace(kept, record=record), results))
        except Exception as error:  # noqa: BLE001 - a full disk is never worth the user's step
            self._left_out[f"cannot be written: {error}"] += 1
            return
        self.num_written += 1


def _results(call: Call, out: Any) -> Packed:
    places = {
        id(item): place
        for place, item in enumerate(tree_items((call.args, call.kwargs)))
        if isinstance(item, Tensor)
    }
    given = call.traits.bound(call.args, call.kwargs)
    written = {
        str(call.traits.params.index(param)): value
        for param, value in given
        if param.mutated and value is not None
    }
    marked = map_tree(out, lambda item: Argument(places[id(item)]) if id(item) in places else item)
    with outside_everything():
        return pack({"out": marked, "written": written})


# ---- files --------------------------------------------------------------------------------------


def _encoded(kept: KeptCall, results: Packed) -> dict[str, Any]:
    about = {
        "format": FORMAT, "version": VERSION, "op": kept.traits.name, "machine": machine(),
        "record": to_json(kept.record), "state": kept.state.as_json(), "seed": kept.seed,
        "on_device": kept.on_device, "in_kernel": kept.in_kernel,
        "out_dtype": None if kept.out_dtype is None else _name(kept.out_dtype),
        "arguments": _spelled(kept.arguments.tree), "results": _spelled(results.tree),
    }  # fmt: skip
    return {
        "about": json.dumps(about, allow_nan=False),
        "arguments": list(kept.arguments.storages),
        "results": list(results.storages),
    }


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _spelled(value: Any) -> Any:
    """A nest as JSON: numbers, texts and None as they are, anything else with its kind."""
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_spelled(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": {key: _spelled(item) for key, item in value.items()}}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    return _spelled_object(value)


def _spelled_object(value: Any) -> dict[str, Any]:
    if isinstance(value, View):
        return {"view": {**asdict(value), "dtype": _name(value.dtype)}}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, Argument):
        return {"argument": value.place}
    if isinstance(value, torch.Generator):
        return {"generator": [value.device.type, value.initial_seed()]}
    for kind, cls in _KINDS.items():
        if isinstance(value, cls):
            return {kind: _name(value)}
    raise TypeError(f"no way to record an argument of type {type(value).__name__}")


_KINDS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
    "device": torch.device,
}


def _read(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, item),) = value.items()
    if kind in ("list", "tuple"):
        items = [_read(part) for part in item]
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        return {key: _read(part) for key, part in item.items()}
    return _READERS[kind](item)


def _read_view(fields: Any) -> View:
    sizes = {name: tuple(fields[name]) for name in ("size", "stride")}
    return View(**{**fields, **sizes, "dtype": _named(fields["dtype"], torch.dtype)})


def _named(name: str, kind: type) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise ValueError(f"torch has no {kind.__name__} {name!r}")
    return found


_READERS: dict[str, Any] = {
    "view": _read_view,
    "float": float,
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "argument": Argument,
    "generator": lambda parts: torch.Generator(parts[0]).manual_seed(parts[1]),
    "device": torch.device,
    "dtype": lambda name: _named(name, torch.dtype),
    "layout": lambda name: _named(name, torch.layout),
    "memory_format": lambda name: _named(name, torch.memory_format),
}


class Recorded:
    """A call from a file."""

    def __init__(self, kept: KeptCall, results: Packed, about_machine: str) -> None:
        self.kept, self.results, self.machine = kept, results, about_machine


def recorded_files(folder: Path) -> Iterator[Path]:
    """The calls in a folder, in the order of their run."""
    return iter(sorted(folder.glob("*.pt")))


def read_call(path: Path) -> Recorded:
    """Read one; no code of the file runs.

    Raises:
        ReproError: it cannot be read, or was written by a newer version.
    """
    try:
        data = torch.load(path, weights_only=True, map_location="cpu")
        about = json.loads(data["about"])
        if about["format"] != FORMAT or about["version"] > VERSION:
            raise ReproError(f"{path}: {about['format']} version {about['version']} is not known")
        dtype = about["out_dtype"]
        kept = KeptCall(
            func=_overload(about["op"], path),
            arguments=Packed(_read(about["arguments"]), data["arguments"]),
            record=from_json(OpRecord, about["record"]),
            state=RunState.from_json(about["state"]),
            on_device=about["on_device"], in_kernel=about["in_kernel"], seed=about["seed"],
            out_dtype=None if dtype is None else _named(dtype, torch.dtype),
        )  # fmt: skip
        return Recorded(kept, Packed(_read(about["results"]), data["results"]), about["machine"])
    except ReproError:
        raise
    except Exception as error:
        raise ReproError(f"{path}: no recorded call: {type(error).__name__}: {error}") from error


def _overload(name: str, path: Path) -> Any:
    try:
        return operator.attrgetter(name)(torch.ops)
    except AttributeError:
        raise ReproError(
            f"{path}: there is no op {name} in this process; load its library with --load"
        ) from None
