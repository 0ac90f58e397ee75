"""What a person sees: the verdict leads, hostile strings are harmless, lines fit the width."""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import replace

import pytest

from opcheck.call_text import render_call
from opcheck.printing import Style, visible
from opcheck.records import Coverage, Metrics, SkipReason, UncheckedSignature, Verdict
from opcheck.report import one_line, render, spans
from opcheck.review import Run, load_run
from opcheck.rundiff import compare_runs
from opcheck.rundiff_report import render_diff
from opcheck.tree import module_tree, render_tree
from tests import log_samples as logs

HOSTILE = [
    "\x1b[2J\x1b[31mred", "a\nb\rc\td", "[bold red]x[/]", "x" * 5000, "\ud800", "\u202eevil",
    "\x9b31m", "\x07\x08\x7f", "\u2028line", "\U000e0041", "名前" * 80, "e\u0301" * 50, "{0}%s\\",
]  # fmt: skip


def live(records, **fields):
    return Run(header={"run_id": "live"}, records=records, coverage=logs.coverage_of(records))


def hostile_run(name):
    metrics = replace(logs.failing(0).metrics, worst_output=1)
    records = [
        logs.failing(
            0, op=name, module=name, phase=name, source=name, reason=name, notes=(name,),
            inputs=(name,), outputs=(name, name), criterion=name, reference=name, metrics=metrics,
        ),
        logs.crashed(1, op=name, module=f"{name}.{name}", error=name),
    ]  # fmt: skip
    unchecked = UncheckedSignature(op=name, signature=name, reason=SkipReason.TOO_LARGE, calls=1)
    coverage = replace(logs.coverage_of(records), unchecked_signatures=(unchecked,))
    return Run(
        header={"run_id": name, "started": name, "world_size": 8},
        records=records,
        coverage=coverage,
        warnings=[name],
        others=((name, 3),),
    )


def everything(run, style):
    """All that can be printed of a run."""
    return "\n".join(
        [
            render(run, style=style, log_path="logs/x.jsonl"),
            one_line(run, "logs/x.jsonl", style=style),
            *render_tree(run, style),
            *(line for record in run.records for line in render_call(record, style)),
            render_diff(compare_runs(run, live([logs.passing(0)])), style),
            render_diff(compare_runs(live([logs.passing(0)]), run), style),
        ]
    )


# ---- order and content --------------------------------------------------------------------------


def test_the_verdict_and_of_what_lead():
    text = render(live(logs.TWO_FAULTS), width=100)
    assert text.startswith("opcheck: FAIL: 2 failed, 6 of 16 calls checked (4 of 5 computing")
    order = ["first divergence", "aten.gelu.default", "failing ops", "coverage", "never checked"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_the_first_divergence_is_shown_with_its_element():
    text = render(live(logs.TWO_FAULTS), width=200, log_path="logs/x.jsonl")
    for part in (
        "blocks.3.mlp.fc1 (forward, step 0, call 2)", "model.py:41 in forward",
        "q 213.2 at [3, 17]: actual 0.8413, expected 0.82, allowed error 0.0001",
        "12 of 4,096 beyond what is allowed", "RMS error 31 times",
        "opcheck review logs/x.jsonl --call 2",
    ):  # fmt: skip
        assert part in text


def test_coverage_adds_up_on_paper():
    text = render(live(logs.TWO_FAULTS), width=100)
    assert "16 calls seen = 6 checked + 10 skipped + 0 crashed" in text
    assert re.search(r"10  layout  views", text)
    broken = Run(coverage=Coverage(seen=9, checked=1))
    assert "does NOT equal" in render(broken, width=100)


def test_pass_is_short():
    run = Run(records=[logs.passing(0)], coverage=Coverage(seen=1, checked=1, check_seconds=1.0))
    assert len(render(run, width=100, log_path="x").splitlines()) <= 5
    assert render(run, width=100).startswith("opcheck: PASS: 1 of 1 calls checked")


def test_a_crash_of_ours_is_inconclusive_and_shown():
    text = render(live([logs.passing(0), logs.crashed(1)]), width=100)
    assert text.startswith("opcheck: INCONCLUSIVE")
    assert "checking crashed in 1 calls" in text
    assert "RuntimeError: boom" in text
    call = "\n".join(render_call(logs.crashed(1), Style()))
    assert "Traceback (most recent call last):" in call


def test_nothing_compared_is_not_a_pass():
    text = render(Run(coverage=Coverage(seen=4, skipped={SkipReason.LAYOUT: 4})), width=100)
    assert text.startswith("opcheck: INCONCLUSIVE")
    assert "nothing was compared" in text


def test_the_root_has_a_name():
    assert "<root>" in render(live([logs.failing(0, module="")]), width=100)
    assert "<root>" in one_line(live([logs.failing(0, module="")]))


def test_one_line_is_one_line():
    text = one_line(live(logs.TWO_FAULTS), "my logs/x.jsonl")
    assert "\n" not in text
    assert text.startswith("opcheck: FAIL; 2 failed, 6 of 16 calls checked")
    assert "aten.gelu.default in blocks.3.mlp.fc1, forward at model.py:41" in text
    assert text.endswith("opcheck review 'my logs/x.jsonl'")


def test_nonfinite_and_complex_numbers_are_shown():
    metrics = Metrics(
        q=float("nan"), actual_at=complex(1, float("nan")), expected_at=float("-inf"),
        worst_index=(), num_nonfinite=3, num_elements=4,
    )  # fmt: skip
    text = render(live([logs.failing(0, metrics=metrics)]), width=200)
    assert "q nan at []: actual 1+nanj, expected -inf" in text
    assert "3 differ in being NaN or infinite" in text


@pytest.mark.parametrize(
    ("failing", "text"),
    [
        ({0, 1, 2}, "on all ranks (0-2)"),
        ({1}, "on only rank 1; not on 0, 2"),
        ({0, 2}, "on ranks 0, 2; not on 1"),
    ],
    ids=["all", "one", "some"],
)
def test_ranks_at_fault_are_named(failing, text):
    records = [
        (logs.failing if rank in failing else logs.passing)(0, rank=rank) for rank in range(3)
    ]
    run = Run(records=records, coverage=logs.coverage_of(records), ranks=(0, 1, 2))
    assert text in render(run, width=100)


def test_ranks_that_call_differently_are_reported_not_fatal():
    records = [logs.failing(0), logs.failing(0, rank=1), logs.passing(0, rank=1)]
    run = Run(records=records, coverage=logs.coverage_of(records), ranks=(0, 1))
    assert "1 on rank 0, 2 on rank 1" in render(run, width=200)


def test_spans():
    assert spans([3, 0, 1, 2, 7]) == "0-3, 7"


# ---- hostile strings ----------------------------------------------------------------------------


@pytest.mark.parametrize("color", [False, True], ids=["plain", "color"])
@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name[:8]))
def test_nothing_from_a_log_acts_on_the_terminal(name, color):
    text = everything(hostile_run(name), Style(width=100, color=color))
    text = re.sub(r"\x1b\[(0|1|2|31|32|33)m", "", text) if color else text
    assert all(char.isprintable() for line in text.split("\n") for char in line)
    text.encode()


def test_five_thousand_characters_are_cut_with_a_count():
    text = render(hostile_run("x" * 5000), width=100)
    assert "(4600 more characters)" in text or "(4,600 more characters)" in text
    assert len(text) < 20_000


def test_markup_is_printed_as_it_is():
    assert "[bold red]x[/]" in render(hostile_run("[bold red]x[/]"), width=200)


def test_visible_keeps_what_is_harmless():
    assert visible("名前 é ok") == "名前 é ok"
    assert visible("a\x1b\u202e\ud800\U000e0041") == "a\\x1b\\u202e\\ud800\\U000e0041"


# ---- the page -----------------------------------------------------------------------------------


def columns(line):
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in line)
    return len(line) + wide - sum(bool(unicodedata.combining(char)) for char in line)


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    "name", ["transformer.h.11.attention.self.query", *HOSTILE[3:6], "名前" * 80]
)
def test_lines_fit_the_width(name, width):
    style = Style(width=width)
    lines = render(hostile_run(name), style=style).split("\n")
    lines += render_tree(hostile_run(name), style)
    assert [line for line in lines if columns(line) > width] == []


def test_no_color_unless_asked_for():
    assert "\x1b" not in render(live(logs.TWO_FAULTS), width=100)
    assert "\x1b[31m" in render(live(logs.TWO_FAULTS), width=100, color=True)


def test_ascii_terminals_get_ascii():
    style = Style(width=80, unicode=False)
    assert everything(hostile_run("名前" * 30), style).isascii()


# ---- the tree -----------------------------------------------------------------------------------


def tree_run():
    records, index = [], 0
    for block in range(12):
        for part in ("attn", "mlp.fc1", "mlp.fc2"):
            make = logs.failing if (block, part) == (3, "mlp.fc1") else logs.passing
            name = f"blocks.{block}.{part}"
            records.append(make(index, op="aten.mm.default", module=name))
            index += 1
    records.append(logs.failing(index, op="aten.mm.default", module="head", phase="backward"))
    return live(records)


def test_equal_siblings_are_one_line():
    lines = render_tree(tree_run(), Style(width=100))
    names = [line.split("─ ")[-1].split()[0] for line in lines]
    assert names.count("attn") == 2
    assert any("[0-2, 4-11]" in line for line in lines)
    joined = module_tree(tree_run()).children["blocks"].children["[0-2, 4-11]"]
    assert (joined.members, joined.total.checked, joined.total.failed) == (11, 33, 0)


def test_all_equal_blocks_are_a_single_line():
    records = [logs.passing(i, module=f"blocks.{i}") for i in range(12)]
    assert any("[0-11]" in line for line in render_tree(live(records), Style()))


def test_the_tree_points_at_the_faults():
    lines = render_tree(tree_run(), Style(width=100))
    fault = next(line for line in lines if "first" in line)
    assert re.search(r"fc1 +1 +1 +1 +213  forward ← first", fault)
    assert any(re.search(r"head +1 +1 +1 +213  backward$", line) for line in lines)
    root = next(line for line in lines if "<root>" in line)
    assert re.search(r"37 +37 +2 +213", root)


def test_totals_include_children_and_the_root_its_own_calls():
    records = [
        logs.passing(0, module=""),
        logs.passing(1, module="a"),
        logs.passing(2, module="a.b"),
    ]
    root = module_tree(live(records))
    assert (root.total.checked, root.own.checked) == (3, 1)
    assert (root.children["a"].total.checked, root.children["a"].own.checked) == (2, 1)


@pytest.mark.parametrize("name", ["a." * 5000 + "b", ".", "..", "0.0.0", "²", "0" * 50, "[0-1].3"])
def test_strange_names_draw_a_tree(name):
    run = live([logs.failing(0, module=name), logs.passing(1, module="0.1"), logs.passing(2)])
    assert render_tree(run, Style(width=80))


def test_a_log_that_is_drawn_live_is_drawn_the_same_from_the_file(tmp_path):
    records = [replace(record, run_id="live") for record in logs.TWO_FAULTS]
    path = logs.write_log(tmp_path / "x.jsonl", logs.run_lines(records, run_id="live"))
    stored, memory = load_run(path), live(records)
    memory.header = json.loads(logs.header_line("live"))
    assert render(stored, width=100) == render(memory, width=100)
    assert render_tree(stored, Style()) == render_tree(memory, Style())
    assert stored.verdict is Verdict.FAIL
