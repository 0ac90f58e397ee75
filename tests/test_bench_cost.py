"""The table of costs has every row, with finite figures. No test looks at how long it took."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest

from benchmarks import bench_cost, bench_ops, cost_growth, cost_parts
from benchmarks.cost_growth import LIMIT, Growth
from benchmarks.cost_parts import MEMORY_ARMS, REGISTRAR_ARMS, STEP_ARMS
from benchmarks.cost_table import Row
from benchmarks.measuring import Spread, in_fresh_process
from tests import models
from tests.compiled import DYNAMO_WARNS

pytestmark = DYNAMO_WARNS
GROWN = {
    *(f"{arm}: {phase}" for arm in cost_growth.ARMS for phase in ("step", "reports")),
    "every call: steps", "review: review", "alone: step", "single-pass: step",
    "single-pass: report", "two-pass: step", "two-pass: report", "check",
}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tiny model, and what has a process of its own runs here: both are for the figures."""
    tiny = partial(models.mlp, width=8, layers=1, batch_size=2)
    monkeypatch.setitem(bench_ops.MODELS, "mlp", tiny)

    def here(expression: str, *, module: str) -> str:
        assert module == "benchmarks.cost_parts"
        return str(eval(expression, {"m": cost_parts}))

    monkeypatch.setattr(cost_parts, "in_fresh_process", here)


def run(path: Path, parts: str) -> tuple[int, list[dict]]:
    status = bench_cost.main(
        ["--parts", parts, "--models", "mlp", "--rounds", "1", "--short", "--json", str(path)]
    )
    data = json.loads(path.read_text())
    assert data["about"]["command"].startswith("python -m benchmarks.bench_cost --parts")
    for row in data["rows"]:
        for clock in ("cpu", "wall"):
            if row[clock] is not None:
                assert all(math.isfinite(value) for value in row[clock].values()), row
        has_figure = row["cpu"] is not None or row["wall"] is not None
        assert has_figure or row["note"].startswith("none: "), row
    assert status == int(any(row["held"] is False for row in data["rows"]))
    return status, data["rows"]


def arms(rows: list[dict], part: str) -> set[str]:
    return {row["arm"] for row in rows if row["part"] == part}


def test_every_row_of_steps_memory_and_drilldown_is_there(tmp_path, capsys):
    _, rows = run(tmp_path / "cost.json", "step,registrar,memory,compile,drilldown")
    assert arms(rows, "step") == {*STEP_ARMS, "max_overhead=0.5"} - {"wrapper_first_10"}
    assert not any("step changed" in row["note"] for row in rows)
    assert arms(rows, "registrar") == set(REGISTRAR_ARMS)
    assert arms(rows, "memory") == {"plain", "live"} <= set(MEMORY_ARMS)
    assert arms(rows, "compile") >= {"none", "own", "none2", "own2"}
    assert arms(rows, "drilldown") >= {
        "drilldown", "drilldown, reproducers", "a reproducer runs", "reproducer written as it is",
        "reproducer made smaller",
    }  # fmt: skip
    assert all(row["held"] for row in rows if row["part"] == "drilldown" and row["limit"])
    printed = capsys.readouterr().out
    assert all(f"{row['part']:<10}{row['subject']:<20}{row['arm']}" in printed for row in rows)


def test_every_row_of_growth_is_there(tmp_path):
    _, rows = run(tmp_path / "cost.json", "growth")
    assert arms(rows, "growth") == GROWN
    assert {row["subject"] for row in rows} == {
        "chain of ops", "blocks, AdamW", "blocks, no model", "steps", "log", "compiled blocks",
        "add, elements", "mm, elements", "softmax, elements",
    }  # fmt: skip
    assert all("last over first" in row["note"] for row in rows)


# ---- what is called growth ----------------------------------------------------------------------

SIZES = (10, 100, 1000)


@pytest.mark.parametrize(
    ("cost", "power"),
    [
        (lambda n: 3.0 * n, 1.0),
        (lambda n: 3.0 * n * n, 2.0),
        (lambda n: 50.0 + 3.0 * n, 0.98),
        (lambda n: 7.0, 0.0),
        (lambda n: 100.0 * n + n**2, 1.5),
    ],
)
def test_power_of_a_cost(cost, power):
    growth = Growth({size: cost(size) for size in SIZES})
    assert growth.power == pytest.approx(power, abs=0.06)
    row = growth.row("subject", "arm", "op", SIZES)
    assert row.held is (power <= LIMIT)


def test_units_other_than_the_size():
    growth = Growth({4: 8.0, 16: 64.0}, units={4: 8.0, 16: 64.0})
    assert growth.power == pytest.approx(1.0)


def test_a_missed_target_is_exit_status_1(monkeypatch, capsys):
    def rows_of(part, options):
        for held in (None, True, options.rounds != 2):
            yield Row(part=part, subject="a", arm="b", unit="s", cpu=Spread(1, 1, 1), held=held)

    monkeypatch.setattr(bench_cost, "rows_of", rows_of)
    assert bench_cost.main(["--parts", "step"]) == 0
    assert bench_cost.main(["--parts", "step", "--rounds", "2"]) == 1
    assert "targets missed: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--parts", "steps"], "steps"), (["--models", "gpt3"], "gpt3"), (["--rounds", "0"], "0")],
)
def test_what_is_not_known_is_refused(arguments, named, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_cost.main(arguments)
    assert stopped.value.code == 2
    assert named in capsys.readouterr().err


def test_a_process_of_its_own_answers_or_says_why_not():
    assert in_fresh_process("m.sqrt(16)", module="math") == "4.0"
    with pytest.raises(RuntimeError, match="no_such_thing"):
        in_fresh_process("m.no_such_thing", module="math")
