"""Logs for tests and benchmarks, written the way a session writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from opcheck.record_json import to_json
from opcheck.records import (
    SCHEMA,
    SCHEMA_VERSION,
    CallCount,
    Coverage,
    Metrics,
    OpRecord,
    SkipReason,
    UncheckedSignature,
    Verdict,
)

OPS = ("aten.add.Tensor", "aten.mm.default", "aten.gelu.default", "aten.native_layer_norm.default")
MODULES = tuple(
    f"blocks.{block}.{part}" for block in range(12) for part in ("attn", "mlp.fc1", "mlp.fc2")
)


def dump(kind: str, data: dict[str, Any]) -> str:
    """One line, keys in the order of the writer."""
    return json.dumps({"type": kind, **data}, separators=(",", ":"), allow_nan=False)


def header_line(run_id: str = "run1", rank: int = 0, **fields: Any) -> str:
    data = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "run_id": run_id,
        "rank": rank,
        "world_size": 1,
        "started": "2025-05-19T10:00:01+00:00",
        "environment": {"torch": "2.13.0"},
        "settings": {"rtol": 1e-4},
    }
    return dump("header", {**data, **fields})


def record_line(record: OpRecord) -> str:
    return dump("record", to_json(record))


def coverage_line(coverage: Coverage, run_id: str = "run1", **fields: Any) -> str:
    return dump("coverage", {"run_id": run_id, **to_json(coverage), **fields})


def passing(index: int, *, run_id: str = "run1", **fields: Any) -> OpRecord:
    place = index % (len(OPS) * len(MODULES))
    data: dict[str, Any] = {
        "op": OPS[place % len(OPS)],
        "module": MODULES[place // len(OPS)],
        "phase": "forward",
        "index": index,
        "step": index // 1000,
        "occurrence": index % 1000 // (len(OPS) * len(MODULES)),
        "inputs": ("(2, 3):torch.float32", "(3, 4):torch.float32"),
        "outputs": ("(2, 4):torch.float32",),
        "metrics": Metrics(
            max_abs=1.1920929e-07, mean_abs=1e-8, max_rel=2e-7, q=0.25, rmse_ratio=1.1,
            num_elements=8, worst_index=(0, 1), actual_at=1.25, expected_at=1.2500001,
            allowed_at=1e-6, expected_rms=0.8, allclose=True,
        ),
        "source": "model.py:41 in forward",
        "run_id": run_id,
    }  # fmt: skip
    return OpRecord(**{**data, **fields})


def failing(index: int, **fields: Any) -> OpRecord:
    metrics = Metrics(
        max_abs=0.02, mean_abs=0.001, max_rel=0.3, q=213.2, rmse_ratio=31.0, mean_shift=0.5,
        num_out=12, num_elements=4096, num_nonfinite=1, worst_index=(3, 17), actual_at=0.8413,
        expected_at=0.82, allowed_at=1e-4, expected_rms=1.2, allclose=False,
    )  # fmt: skip
    data = {
        "verdict": Verdict.FAIL,
        "metrics": metrics,
        "reason": "12 of 4,096 elements are beyond what is allowed",
    }
    return passing(index, **{**data, **fields})


def crashed(index: int, **fields: Any) -> OpRecord:
    error = 'Traceback (most recent call last):\n  File "x.py", line 1\nRuntimeError: boom'
    data = {"verdict": Verdict.INCONCLUSIVE, "error": error, "reason": "checking crashed"}
    return passing(index, **{**data, **fields})


def coverage_of(records: Iterable[OpRecord], *, layout: int = 10, **fields: Any) -> Coverage:
    records = list(records)
    errors = sum(record.error is not None for record in records)
    failed = sum(record.verdict is Verdict.FAIL for record in records)
    counts: dict[tuple[str, str, str], list[int]] = {}
    for record in records:
        count = counts.setdefault((record.module, record.phase, record.op), [0, 0, 0, 0])
        count[0] += 1
        count[1] += record.error is None
        count[2] += record.verdict is Verdict.FAIL
        count[3] += record.error is not None
    data: dict[str, Any] = {
        "seen": len(records) + layout,
        "checked": len(records) - errors,
        "failed": failed,
        "errors": errors,
        "skipped": {SkipReason.LAYOUT: layout} if layout else {},
        "elements_seen": 1000,
        "elements_checked": 900,
        "signatures_seen": 5,
        "signatures_checked": 4,
        "unchecked_signatures": (
            UncheckedSignature(
                op="aten.sort.stable", signature="int64", reason=SkipReason.TOO_LARGE, calls=1
            ),
        ),
        "calls": tuple(
            CallCount(module=m, phase=p, op=o, seen=s, checked=c, failed=f, errors=e)
            for (m, p, o), (s, c, f, e) in counts.items()
        ),
        "steps": 1,
        "check_seconds": 0.5,
    }
    return Coverage(**{**data, **fields})


def run_lines(
    records: Sequence[OpRecord], *, run_id: str = "run1", rank: int = 0, **fields: Any
) -> list[str]:
    """Header, records, coverage."""
    return [
        header_line(run_id, rank, **fields),
        *map(record_line, records),
        coverage_line(coverage_of(records), run_id),
    ]


def write_log(path: Path, lines: Iterable[str | bytes], *, end: str = "\n") -> Path:
    data = [line if isinstance(line, bytes) else line.encode() for line in lines]
    path.write_bytes(b"\n".join(data) + (end.encode() if data else b""))
    return path


TWO_FAULTS = [
    passing(0),
    passing(1),
    failing(2, module="blocks.3.mlp.fc1", op="aten.gelu.default", source="model.py:41 in forward"),
    passing(3),
    failing(
        9, module="blocks.1.attn", op="aten.mm.default", phase="backward",
        source="model.py:77 in forward",
    ),
    passing(10, phase="backward"),
]  # fmt: skip
