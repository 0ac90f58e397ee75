"""Runs: order, sums, filters, diff, merge of ranks, export."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from opcheck.errors import LogReadError, LogWriteError
from opcheck.export import diff_json, diff_markdown, run_json, run_markdown, write_csv
from opcheck.globs import module_matches, op_matches
from opcheck.merging import merge_logs
from opcheck.records import Coverage, Metrics, SkipReason, UncheckedSignature, Verdict
from opcheck.review import Filter, Run, load_run
from opcheck.rundiff import compare_runs
from tests import log_samples as logs


def live(records, **fields):
    coverage = logs.coverage_of(records, **fields)
    return Run(header={"run_id": "live"}, records=records, coverage=coverage)


def stored(path, records, **fields):
    run_id = fields.get("run_id", "run1")
    owned = [replace(r, run_id=run_id, rank=fields.get("rank", 0)) for r in records]
    return logs.write_log(path, logs.run_lines(owned, **fields))


# ---- a run --------------------------------------------------------------------------------------


def test_first_divergence_is_the_earliest_call_not_the_first_written():
    late, early = logs.failing(9, step=0), logs.failing(2, step=0)
    run = live([logs.failing(0, step=1), late, early])
    assert [(r.step, r.index) for r in run.failures] == [(0, 2), (0, 9), (1, 0)]
    assert run.first_divergence is early


def test_a_run_from_memory_and_from_its_log_agree(tmp_path):
    memory = live(logs.TWO_FAULTS)
    file = load_run(stored(tmp_path / "x.jsonl", logs.TWO_FAULTS))
    assert file.by_op() == memory.by_op()
    assert file.by_module() == memory.by_module()
    assert file.failures == memory.failures
    assert file.first_divergence == memory.first_divergence == logs.TWO_FAULTS[2]
    assert (file.verdict, file.verdict_reason) == (memory.verdict, memory.verdict_reason)


def test_tallies_count_seen_checked_failed_and_worst():
    records = [logs.passing(0, op="a", module="m"), logs.failing(1, op="a", module="m")]
    records += [logs.crashed(2, op="a", module="n"), logs.passing(3, op="b", module="m")]
    tally = live(records).by_op()["a"]
    assert (tally.seen, tally.checked, tally.failed, tally.errors) == (3, 2, 1, 1)
    assert tally.max_q == 213.2
    assert list(live(records).by_module()) == ["m", "n"]


def test_nan_q_is_the_worst():
    bad = logs.failing(1, op="a", metrics=Metrics(q=float("nan")))
    worse = logs.failing(2, op="a", metrics=Metrics(q=1e9))
    assert str(live([bad, worse]).by_op()["a"].max_q) == "nan"
    assert str(live([worse, bad]).by_op()["a"].max_q) == "nan"


@pytest.mark.parametrize(
    ("coverage", "verdict"),
    [
        (Coverage(), Verdict.INCONCLUSIVE),
        (Coverage(seen=2, checked=2), Verdict.PASS),
        (Coverage(seen=2, checked=1), Verdict.INCONCLUSIVE),
        (Coverage(seen=2, checked=1, errors=1), Verdict.INCONCLUSIVE),
        (Coverage(seen=2, checked=2, failed=1), Verdict.FAIL),
        (
            Coverage(seen=2, checked=1, skipped={SkipReason.INSIDE_COMPILED_REGION: 1}),
            Verdict.INCONCLUSIVE,
        ),
    ],
    ids=["nothing compared", "pass", "does not add up", "crashed", "fail", "compiled region"],
)
def test_verdict_fails_closed(coverage, verdict):
    assert Run(coverage=coverage).verdict is verdict


def test_a_failing_record_fails_whatever_the_coverage_says():
    run = Run(records=[logs.failing(0)], coverage=Coverage(seen=5, checked=5))
    assert run.verdict is Verdict.FAIL


def test_several_runs_interleaved_in_one_log(tmp_path):
    a = logs.run_lines([logs.passing(i, run_id="a") for i in range(3)], run_id="a")
    b = logs.run_lines([logs.failing(i, run_id="b") for i in range(3)], run_id="b")
    mixed = [line for pair in zip(a, b, strict=True) for line in pair]
    path = logs.write_log(tmp_path / "x.jsonl", mixed)
    last = load_run(path)
    assert (last.run_id, last.verdict, last.others) == ("b", Verdict.FAIL, (("a", 3),))
    first = load_run(path, run="a")
    assert (first.verdict, [r.run_id for r in first.records]) == (Verdict.PASS, ["a"] * 3)
    with pytest.raises(LogReadError, match="no run 'c'; it has: a, b"):
        load_run(path, run="c")


def test_lost_records_are_noticed(tmp_path):
    lines = logs.run_lines(logs.TWO_FAULTS)
    run = load_run(logs.write_log(tmp_path / "x.jsonl", lines[:2] + lines[3:]))
    assert any("6 checked calls, the log has 5 records" in line for line in run.warnings)


# ---- filters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("glob", ["aten.add.*", "add", "add.Tensor", "aten.add.Tensor", "a*", "*"])
def test_op_globs_match(glob):
    assert op_matches("aten.add.Tensor", glob)


@pytest.mark.parametrize("glob", ["Tensor", "ad", "aten", "add.Scalar", ""])
def test_other_op_globs_do_not(glob):
    assert not op_matches("aten.add.Tensor", glob)


def test_module_globs_take_children():
    assert module_matches("h.0.mlp", "h.*")
    assert module_matches("h.0.mlp", "h.0")
    assert not module_matches("h.0.mlp", "mlp")
    assert module_matches("", "<root>")
    assert not module_matches("h", "<root>")


@pytest.mark.parametrize(
    "where",
    [Filter(op="gelu"), Filter(module="blocks.3"), Filter(phase="backward"), Filter(step=0),
     Filter(step=1), Filter(op="mm", phase="backward", step=0)],
    ids=str,
)  # fmt: skip
def test_filtering_a_log_is_filtering_its_records(tmp_path, where):
    records = [*logs.TWO_FAULTS, *(replace(r, index=r.index + 20, step=1) for r in logs.TWO_FAULTS)]
    records.sort(key=lambda r: (r.op, r.step))
    path = stored(tmp_path / "x.jsonl", records)
    run, expected = load_run(path, where=where), [r for r in records if where.takes(r)]
    assert list(run.records) == expected
    assert sum(group.checked for group in run.groups) == len(expected)
    assert run.failures == sorted(
        (r for r in expected if r.verdict is Verdict.FAIL), key=lambda r: (r.step, r.index)
    )
    assert run.verdict is Verdict.FAIL
    chosen = {name: getattr(where, name) for name in ("op", "module", "phase", "step")}
    assert load_run(path).filter(**chosen).groups == run.groups


# ---- diff ---------------------------------------------------------------------------------------


def changes(diff, name):
    return [(c.op, c.module, c.phase, c.calls) for c in getattr(diff, name)]


def test_a_run_and_itself_do_not_differ(tmp_path):
    path = stored(tmp_path / "x.jsonl", logs.TWO_FAULTS)
    diff = compare_runs(load_run(path), load_run(path))
    assert diff.verdict[0] is Verdict.PASS
    assert diff.num_paired == len(logs.TWO_FAULTS)
    assert len(diff.still_failing) == 2
    assert not (diff.newly_failing)
    assert not (diff.only_a)
    assert not (diff.only_b)
    assert not (diff.q_changes)


def test_new_failures_and_mended_ones(tmp_path):
    good = [logs.passing(i) for i in range(4)]
    before = [logs.failing(0), *good[1:]]
    after = [good[0], logs.failing(1), *good[2:]]
    a = load_run(stored(tmp_path / "a.jsonl", before))
    b = load_run(stored(tmp_path / "b.jsonl", after, run_id="other"))
    for left, right in ((a, b), (live(before), live(after))):
        diff = compare_runs(left, right)
        assert diff.verdict[0] is Verdict.FAIL
        assert changes(diff, "newly_failing") == [
            ("aten.mm.default", "blocks.0.attn", "forward", 1)
        ]
        assert changes(diff, "no_longer_failing") == [
            ("aten.add.Tensor", "blocks.0.attn", "forward", 1)
        ]
        assert len(diff.q_changes) == 2
    assert compare_runs(b, b).verdict[0] is Verdict.PASS


def test_a_call_without_partner_is_listed():
    diff = compare_runs(
        live([logs.passing(0), logs.passing(1)]), live([logs.passing(1), logs.failing(2)])
    )
    assert len(diff.only_a) == len(diff.only_b) == 1
    assert diff.verdict[0] is Verdict.FAIL


def test_a_failure_that_is_not_checked_any_more_is_not_mended():
    good = [logs.passing(1), logs.passing(2)]
    gone = compare_runs(live([logs.failing(0), *good]), live(good))
    assert gone.verdict[0] is Verdict.INCONCLUSIVE
    assert len(gone.failing_unchecked) == 1
    crashed = compare_runs(live([logs.failing(0), *good]), live([logs.crashed(0), *good]))
    assert crashed.verdict[0] is Verdict.INCONCLUSIVE
    assert not crashed.no_longer_failing


def test_nothing_paired_is_inconclusive():
    assert compare_runs(live([]), live([logs.passing(0)])).verdict[0] is Verdict.INCONCLUSIVE


def test_a_diff_of_runs_that_share_no_call_says_so():
    a, b = live([logs.passing(0)]), live([logs.passing(0, op="aten.sin.default")])
    assert a.verdict is b.verdict is Verdict.PASS
    assert compare_runs(a, b).verdict == (Verdict.INCONCLUSIVE, "no call of A has a partner in B")


def test_a_diff_with_a_run_that_became_inconclusive_is_no_pass():
    records = [logs.passing(0)]
    cut = Run(records=records, coverage=logs.coverage_of(records), finished=False)
    verdict, reason = compare_runs(live(records), cut).verdict
    assert verdict is Verdict.INCONCLUSIVE
    assert reason.startswith("B is inconclusive: ")
    assert compare_runs(cut, live(records)).verdict[0] is Verdict.PASS


def test_shifted_order_is_paired():
    records = [logs.passing(i) for i in range(300)]
    diff = compare_runs(live(records), live(records[150:] + records[:150]))
    assert (diff.num_paired, diff.only_a) == (300, [])


def test_text_logs_are_paired_by_occurrence(tmp_path):
    from opcheck.logfile import format_text_line

    lines = [format_text_line(logs.failing(i, op="aten.mm.default", module="m")) for i in range(5)]
    a = load_run(logs.write_log(tmp_path / "a.log", lines))
    b = load_run(logs.write_log(tmp_path / "b.log", lines[:4]))
    diff = compare_runs(a, b)
    assert (diff.num_paired, len(diff.only_a)) == (4, 1)


# ---- ranks --------------------------------------------------------------------------------------


def rank_logs(folder, *parts, world_size=None):
    size = world_size or len(parts)
    for rank, records in enumerate(parts):
        path = folder / f"precision.rank{rank}.jsonl"
        stored(path, records, run_id=f"r{rank}", rank=rank, world_size=size)


def test_a_folder_with_a_log_of_each_rank_is_one_run(tmp_path):
    good = [logs.passing(i) for i in range(4)]
    rank_logs(tmp_path, good, [*good[:3], logs.failing(3)], good)
    run = load_run(tmp_path)
    assert run.ranks == (0, 1, 2)
    assert run.verdict is Verdict.FAIL
    assert run.first_divergence.rank == 1
    assert run.coverage.checked == 12
    assert [r.rank for r in run.records] == [0] * 4 + [1] * 4 + [2] * 4
    assert run.by_op()[logs.failing(3).op].failing_ranks == {1}
    assert not run.rank_differences()


def test_merge_writes_one_log_with_every_record_and_its_rank(tmp_path):
    good = [logs.passing(i) for i in range(3)]
    odd = logs.passing(3, module='a"b', notes=("x",))
    rank_logs(tmp_path, good, [*good[:2], logs.failing(2), odd])
    out = tmp_path / "all.jsonl"
    run, differences = merge_logs([tmp_path], out)
    assert (run.ranks, run.missing_ranks, run.verdict) == ((0, 1), (), Verdict.FAIL)
    assert run.coverage.adds_up
    again = load_run(out)
    assert [(r.rank, r.index, r.run_id) for r in again.records] == [
        (0, 0, "r0"), (0, 1, "r0"), (0, 2, "r0"),
        (1, 0, "r0"), (1, 1, "r0"), (1, 2, "r0"), (1, 3, "r0"),
    ]  # fmt: skip
    assert list(again.records)[-1] == replace(odd, rank=1, run_id="r0")
    assert not again.warnings
    assert len(differences) == 1
    assert "from checked call 3 on" in differences[0]
    assert again.rank_differences()
    for line in out.read_text().splitlines():
        json.loads(line)


def test_a_missing_rank_is_not_a_pass(tmp_path):
    rank_logs(tmp_path, [logs.passing(0)], [logs.passing(0)], world_size=3)
    run, _ = merge_logs([tmp_path], tmp_path / "all.jsonl")
    assert run.verdict is Verdict.INCONCLUSIVE
    assert "rank 2" in run.verdict_reason


def test_an_unfinished_rank_is_not_a_pass(tmp_path):
    rank_logs(tmp_path, [logs.passing(0)], [logs.passing(0)])
    path = tmp_path / "precision.rank1.jsonl"
    logs.write_log(path, path.read_text().splitlines()[:-1])
    assert load_run(tmp_path).verdict is Verdict.INCONCLUSIVE
    run, _ = merge_logs([tmp_path], tmp_path / "all.jsonl")
    assert run.verdict is Verdict.INCONCLUSIVE


def test_two_logs_of_one_rank_are_refused(tmp_path):
    a, b = (stored(tmp_path / f"{name}.jsonl", [logs.passing(0)]) for name in "ab")
    with pytest.raises(LogReadError, match="both of rank 0"):
        merge_logs([a, b], tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_merge_never_writes_over_a_file(tmp_path):
    a = stored(tmp_path / "a.jsonl", [logs.passing(0)])
    with pytest.raises(LogWriteError, match="is there already"):
        merge_logs([a], a)
    with pytest.raises(LogWriteError, match="cannot be written"):
        merge_logs([a], tmp_path / "no" / "out.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


# ---- export -------------------------------------------------------------------------------------


def test_csv_has_every_field(tmp_path):
    run = load_run(stored(tmp_path / "x.jsonl", logs.TWO_FAULTS))
    stream = io.StringIO()
    assert write_csv(run.records, stream) == 6
    rows = list(csv.DictReader(io.StringIO(stream.getvalue())))
    assert rows[2]["verdict"] == "FAIL"
    assert float(rows[2]["q"]) == 213.2
    assert rows[2]["module"] == "blocks.3.mlp.fc1"
    assert rows[2]["worst_index"] == "3, 17"


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1", "-1+1", "@SUM(A1)", " =1", "\t=1", "\n=1"])
def test_csv_cells_are_no_formulas(name):
    stream = io.StringIO()
    write_csv([logs.failing(0, module=name, reason=name)], stream)
    row = next(csv.DictReader(io.StringIO(stream.getvalue())))
    assert row["module"][0] in "'\\"
    assert row["reason"][0] in "'\\"


def test_csv_has_no_control_characters():
    stream = io.StringIO()
    write_csv([logs.failing(0, module="a\x1b[31m\r\nb\u202e\ud800")], stream)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2
    text.encode()


def test_json_is_strict_and_says_it_all():
    run = live([*logs.TWO_FAULTS, logs.failing(50, metrics=Metrics(q=float("inf")))])
    data = json.loads(json.dumps(run_json(run), allow_nan=False))
    assert data["verdict"] == "FAIL"
    assert data["first_divergence"]["index"] == 2
    assert data["coverage"]["seen"] == run.coverage.seen
    assert next(item["name"] for item in data["by_op"]) == "aten.gelu.default"
    assert "Infinity" in {item["max_q"] for item in data["by_op"]}
    diff = compare_runs(run, run)
    json.dumps(diff_json(diff), allow_nan=False)


def test_markdown_interprets_nothing():
    name = "a|b`c``d\n<img src=x> @user [l](u) **b**"
    run = live([logs.failing(0, module=name, op=name, source=name, phase=name, reason=name)])
    run.warnings.append(name)
    for text in (run_markdown(run), diff_markdown(compare_runs(run, run))):
        assert "```a\\|b`c``d\\n<img src=x> @user [l](u) **b**```" in text
        for line in text.splitlines():
            assert "<img" not in "".join(line.split("```")[::2])
        rows = [line for line in text.splitlines() if line.startswith("| ```")]
        assert rows


def test_signatures_count_once_over_ranks(tmp_path):
    rank_logs(tmp_path, [logs.passing(0)], [logs.passing(0)])
    unchecked = UncheckedSignature(
        op="aten.sort.stable", signature="int64", reason=SkipReason.TOO_LARGE, calls=2
    )
    assert load_run(tmp_path).coverage.unchecked_signatures == (unchecked,)
    assert load_run(tmp_path).coverage.signatures_seen == 5
