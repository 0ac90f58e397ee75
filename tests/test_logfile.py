"""Text lines round-trip; files of every kind are read or refused, and nothing crashes."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcheck import logfile
from opcheck.errors import LogReadError, SchemaVersionError
from opcheck.logfile import format_text_line, parse_text_line
from opcheck.record_json import to_json
from opcheck.records import Metrics, OpRecord, SkipReason, Verdict
from opcheck.review import load_run
from tests import log_samples as logs
from tests.exploring import examples
from tests.hanging import HANGS_S

DOCUMENTED = (
    "2025-05-19 10:00:01 [WARNING] Op: add.Tensor | FAIL | in: [(2, 3):torch.float16]"
    " | out: (2, 3):torch.float16 | max_abs: 1.200000e-03 | max_rel: 2.500000e-02"
    " | rtol=0.01, atol=0.01"
)
CARRIED = (
    "op", "module", "phase", "index", "step", "inputs", "outputs", "verdict", "source",
    "criterion", "rtol", "atol", "run_id", "rank",
)  # fmt: skip

hostile = st.text(alphabet=st.characters(exclude_categories=()), max_size=40) | st.sampled_from(
    ["\x1b[31m", "a | b", "a\nb", "\ud800", "\u202e", "[x", "a, b", "]", "\\x41", "\\", " ", "e\\e"]
)


# ---- the documented line ------------------------------------------------------------------------


def test_documented_line_is_parsed():
    record = parse_text_line(DOCUMENTED)
    assert record.op == "aten.add.Tensor"
    assert record.verdict is Verdict.FAIL
    assert record.inputs == record.outputs == ("(2, 3):torch.float16",)
    assert (record.metrics.max_abs, record.metrics.max_rel) == (1.2e-3, 2.5e-2)
    assert (record.rtol, record.atol, record.criterion) == (0.01, 0.01, "allclose")


def test_documented_line_is_what_is_written_before_our_fields():
    record = parse_text_line(DOCUMENTED)
    assert format_text_line(record).startswith(DOCUMENTED.split("[WARNING] ")[1] + " | module: ")


def test_several_outputs_are_a_list():
    record = logs.failing(0, outputs=("(2, 3):torch.float16", "(2,):torch.int64"))
    line = format_text_line(record)
    assert " | out: [(2, 3):torch.float16, (2,):torch.int64] | " in line
    assert parse_text_line(line).outputs == record.outputs


@given(
    names=st.tuples(hostile, hostile, hostile, hostile, hostile),
    inputs=st.lists(hostile, max_size=3),
    outputs=st.lists(hostile, max_size=3),
    numbers=st.tuples(st.floats(), st.floats(), st.floats(), st.none() | st.floats()),
    whole=st.tuples(*[st.integers(0, 10**9)] * 3),
)
@examples(300)
def test_format_and_parse_are_inverses(names, inputs, outputs, numbers, whole):
    op, module, phase, source, run_id = names
    max_abs, max_rel, q, rmse_ratio = numbers
    record = OpRecord(
        op=op, module=module, phase=phase, source=source, run_id=run_id, verdict=Verdict.FAIL,
        inputs=tuple(inputs), outputs=tuple(outputs), index=whole[0], step=whole[1], rank=whole[2],
        metrics=Metrics(max_abs=max_abs, max_rel=max_rel, q=q, rmse_ratio=rmse_ratio),
    )  # fmt: skip
    line = format_text_line(record)
    assert line.isprintable()
    back = parse_text_line(f"2025-05-19 10:00:01 [WARNING] {line}\n")
    assert [getattr(back, name) for name in CARRIED] == [getattr(record, name) for name in CARRIED]
    assert format_text_line(back) == line


@pytest.mark.parametrize(
    "line",
    [
        "", "Op: ", "hello", DOCUMENTED[:60], DOCUMENTED.replace("1.200000e-03", "x"),
        DOCUMENTED.replace("FAIL", "MAYBE"), "INFO " + DOCUMENTED,
    ],
)  # fmt: skip
def test_other_lines_are_refused(line):
    with pytest.raises(LogReadError):
        parse_text_line(line)


@pytest.mark.parametrize("ours", [False, True], ids=["documented", "appended"])
def test_text_log_of_a_hundred_lines(tmp_path, ours):
    records = [logs.failing(i, run_id="r1") for i in range(100)]
    lines = [f"2025-05-19 10:00:01 [WARNING] {format_text_line(record)}" for record in records]
    if not ours:
        lines = [line.split(" | module: ")[0] for line in lines]
    run = load_run(logs.write_log(tmp_path / "precision.log", lines))
    assert (run.verdict, len(run.records), len(run.failures)) == (Verdict.FAIL, 100, 100)
    assert run.run_id == ("r1" if ours else "")
    assert {r.op for r in run.records} == set(logs.OPS)
    assert {r.module for r in run.records} == ({r.module for r in records} if ours else {""})


def test_text_log_without_failures_is_inconclusive(tmp_path):
    run = load_run(logs.write_log(tmp_path / "precision.log", []))
    assert run.verdict is Verdict.INCONCLUSIVE
    assert "empty" in run.verdict_reason


# ---- JSON lines ---------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was(tmp_path):
    record = logs.failing(
        1,
        notes=("inherited",),
        metrics=Metrics(
            max_abs=float("inf"), q=float("nan"), actual_at=1 + 2j, expected_at=complex("nan"),
            worst_index=(1, 2),
        ),
        module="a\"b\\c\n\ud800",
    )  # fmt: skip
    run = load_run(logs.write_log(tmp_path / "x.jsonl", logs.run_lines([record])))
    assert repr(list(run.records)) == repr([record])
    assert repr(run.first_divergence) == repr(record)


def test_lines_of_the_writer_and_reordered_lines_give_the_same_groups(tmp_path):
    records = [logs.failing(i) if i % 7 == 3 else logs.passing(i) for i in range(600)]
    records += [logs.crashed(600), logs.passing(601, module='quote"'), logs.passing(602, module="")]
    lines = logs.run_lines(records)
    spaced = [json.dumps(dict(reversed(json.loads(line).items()))) for line in lines]
    fast = load_run(logs.write_log(tmp_path / "fast.jsonl", lines))
    slow = load_run(logs.write_log(tmp_path / "slow.jsonl", spaced))
    assert fast.groups == slow.groups
    assert sum(group.checked for group in fast.groups) == 602
    assert not fast.warnings
    assert not slow.warnings
    assert fast.coverage == slow.coverage == logs.coverage_of(records)
    assert list(fast.records) == list(slow.records) == records
    assert [r.index for r in fast.with_index(17)] == [r.index for r in slow.with_index(17)] == [17]


def test_strings_that_look_like_keys_are_not_read_as_keys(tmp_path):
    trap = '","verdict":"FAIL","q":9e9,"run_id":"other","rank":3}'
    records = [logs.passing(i, op="x", module=trap, source=trap, notes=(trap,)) for i in range(3)]
    run = load_run(logs.write_log(tmp_path / "x.jsonl", logs.run_lines(records)))
    assert run.verdict is Verdict.PASS
    assert [(g.checked, g.failed, g.max_q, g.rank) for g in run.groups] == [(3, 0, 0.25, 0)]


def test_records_are_a_sequence_left_in_the_file(tmp_path):
    records = [logs.passing(i) for i in range(50)]
    run = load_run(logs.write_log(tmp_path / "x.jsonl", logs.run_lines(records)))
    assert len(run.records) == 50
    assert run.records[7] == records[7]
    assert run.records[-1] == records[-1]
    assert run.records[3:5] == records[3:5]
    with pytest.raises(IndexError):
        run.records[50]


# ---- bad input ----------------------------------------------------------------------------------


def test_a_log_cut_anywhere_is_read(tmp_path):
    whole = "\n".join(logs.run_lines(logs.TWO_FAULTS)).encode() + b"\n"
    path = tmp_path / "x.jsonl"
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for end in range(ends[0], len(whole), 7):
        path.write_bytes(whole[:end])
        run = load_run(path)
        num_lines = sum(place <= end for place in ends)
        is_cut = end not in ends and end + 1 not in ends
        assert len(run.records) == min(num_lines + (end + 1 in ends), 7) - 1
        assert run.torn == is_cut
        assert run.verdict is (Verdict.FAIL if run.failures else Verdict.INCONCLUSIVE)


def test_a_log_cut_in_its_first_line_is_refused(tmp_path):
    path = logs.write_log(tmp_path / "x.jsonl", [logs.header_line()[:50]], end="")
    with pytest.raises(LogReadError, match=r"x\.jsonl:1: the last line is cut"):
        load_run(path)


def test_a_torn_last_line_is_said(tmp_path):
    lines = logs.run_lines(logs.TWO_FAULTS)
    path = logs.write_log(tmp_path / "x.jsonl", [*lines[:4], lines[4][:100]], end="")
    run = load_run(path)
    assert run.torn
    assert f"{path}:5: the last line is cut" in run.warnings
    assert len(run.records) == 3
    assert run.verdict is Verdict.FAIL


def test_a_whole_last_line_without_newline_counts(tmp_path):
    run = load_run(logs.write_log(tmp_path / "x.jsonl", logs.run_lines([logs.passing(0)]), end=""))
    assert run.verdict is Verdict.PASS
    assert not run.torn


def test_a_killed_run_and_the_next_one_glued_to_it(tmp_path):
    killed = logs.run_lines([logs.passing(0), logs.passing(1)], run_id="killed")[:3]
    for cut in (30, 150, 400, 600):
        glued = killed[2][:cut] + logs.header_line("next")
        rest = logs.run_lines([logs.passing(0, run_id="next")], run_id="next")[1:]
        run = load_run(logs.write_log(tmp_path / "x.jsonl", [*killed[:2], glued, *rest]))
        assert (run.run_id, run.verdict, len(run.records)) == ("next", Verdict.PASS, 1)
        assert any("x.jsonl:3: a line is cut" in warning for warning in run.warnings)


def test_a_cut_record_glued_to_a_record_is_not_counted_as_passed(tmp_path):
    lines = logs.run_lines([logs.passing(0), logs.passing(1), logs.failing(192), logs.passing(3)])
    for cut in range(20, len(lines[2]) - 1, 11):
        glued = lines[2][:cut] + lines[3]
        run = load_run(logs.write_log(tmp_path / "x.jsonl", [*lines[:2], glued, *lines[4:]]))
        assert [record.index for record in run.failures] == [192], cut
        assert sum(group.checked for group in run.groups) == len(list(run.records)) == 3


def test_a_run_without_coverage_did_not_finish(tmp_path):
    lines = logs.run_lines([logs.passing(0), logs.passing(1)])[:-1]
    run = load_run(logs.write_log(tmp_path / "x.jsonl", lines))
    assert run.verdict is Verdict.INCONCLUSIVE
    assert "did not finish" in run.verdict_reason
    assert run.coverage.checked == 2
    failed = [*lines, logs.record_line(logs.failing(2))]
    assert load_run(logs.write_log(tmp_path / "y.jsonl", failed)).verdict is Verdict.FAIL


def test_records_after_the_last_coverage_mean_not_finished(tmp_path):
    lines = [*logs.run_lines([logs.passing(0)]), logs.record_line(logs.passing(1))]
    run = load_run(logs.write_log(tmp_path / "x.jsonl", lines))
    assert run.verdict is Verdict.INCONCLUSIVE
    again = [*lines, logs.coverage_line(logs.coverage_of([logs.passing(0), logs.passing(1)]))]
    run = load_run(logs.write_log(tmp_path / "y.jsonl", again))
    assert run.verdict is Verdict.PASS
    assert run.coverage.checked == 2


@pytest.mark.parametrize(
    "junk",
    [
        b"hello\nworld\n", b"\x00" * 5000, random.Random(0).randbytes(5000), b"[1, 2]\n", b"{}\n",
        b'{"type":"dance"}\n', b"\xff\xfe{\x00}\x00\n", b'"text"\n', b"{" * 100_000,
        b"[" * 100_000 + b"\n", b'{"type":"record"}\n', b'{"type":"record","op":5}\n',
        b'{"type":"record","op":"x","index":' + b"9" * 6000 + b"}\n", b"\x89PNG\r\n\x1a\n" * 9,
    ],
)  # fmt: skip
def test_garbage_is_refused_with_file_and_line(tmp_path, junk):
    path = tmp_path / "x.jsonl"
    path.write_bytes(junk)
    with pytest.raises(LogReadError, match=r"x\.jsonl: not a log of opcheck; .*x\.jsonl:1: "):
        load_run(path)


@pytest.mark.parametrize(
    "bad",
    [
        {"op": 5}, {"op": None}, {"module": ["a"]}, {"metrics": 3}, {"metrics": {"q": "x"}},
        {"metrics": {"q": [1]}}, {"metrics": {"worst_index": 5}}, {"verdict": "MAYBE"},
        {"metrics": {"worst_index": ["a"]}}, {"metrics": {"max_abs": {"re": 1, "im": 2}}},
        {"metrics": {"num_out": 1.5}}, {"metrics": {"actual_at": [1]}}, {"index": "1"},
        {"index": 10**30}, {"metrics": {"max_abs": 10**400}}, {"inputs": "abc"}, {"inputs": [1]},
        {"rank": True}, {"step": None}, {"error": 5}, {"rtol": "x"}, {"verdict": {}},
        {"metrics": {"actual_at": {"re": "x"}}}, {"sample": 3}, {"sample": {"strategy": 3}},
        {"sample": {"strategy": "x", "share": "1"}}, {"sample": {"strategy": "x", "seed": 1.5}},
        {"sample": {"strategy": "x", "covers_all": 1}},
        {"sample": {"strategy": "x", "tile": ["a"]}},
        {"blame": "born"}, {"blame": {"born": "1"}}, {"blame": {"word": 3}}, {"repeats": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_record_costs_a_warning_with_its_line(tmp_path, bad):
    good = [logs.passing(0), logs.failing(1)]
    lines = logs.run_lines(good)
    lines.insert(2, json.dumps({"type": "record", **to_json(logs.passing(5)), **bad}))
    run = load_run(logs.write_log(tmp_path / "x.jsonl", lines))
    assert list(run.records) == good
    assert any("x.jsonl:3: " in warning for warning in run.warnings)


def test_of_many_bad_records_the_first_are_shown_and_the_others_counted(tmp_path):
    lines = logs.run_lines([logs.passing(0)])
    bad = json.dumps({"type": "record", **to_json(logs.passing(5)), "op": 5})
    run = load_run(logs.write_log(tmp_path / "x.jsonl", [*lines[:2], *[bad] * 8, *lines[2:]]))
    shown = [warning for warning in run.warnings if "x.jsonl:" in warning]
    assert len(shown) == 5
    assert "and 3 more lines that could not be read" in run.warnings


def test_missing_fields_take_defaults_and_extra_ones_are_ignored(tmp_path):
    lines = [
        logs.header_line("r", future={"a": [1]}),
        '{"type":"record","op":"aten.mm.default","run_id":"r","verdict":"FAIL","new":[{}]}',
        '{"type":"record","op":"x","run_id":"r"}',
        logs.coverage_line(logs.coverage_of([logs.failing(0), logs.passing(1)]), "r", new=1),
    ]
    run = load_run(logs.write_log(tmp_path / "x.jsonl", lines))
    assert [record.op for record in run.records] == ["aten.mm.default", "x"]
    assert run.verdict is Verdict.FAIL
    assert not run.warnings


@pytest.mark.parametrize(
    "bad",
    [{"seen": "x"}, {"skipped": 5}, {"calls": [5]}, {"calls": 1}, {"checked": 10**40},
     {"unchecked_signatures": [{"op": 1}]}, {"check_seconds": "x"}, {"skipped": {"layout": []}},
     {"shadow": {"a": "x"}}, {"repeat": {"a": []}}, {"unrepeatable": [{"op": 3}]},
     {"unrepeatable": [{"op": "x", "max_abs": "y"}]}, {"first_nonfinite": {"op": 3}},
     {"first_nonfinite": {"op": "x", "arrived": 3}}],
    ids=str,
)  # fmt: skip
def test_a_bad_coverage_is_no_coverage(tmp_path, bad):
    lines = logs.run_lines([logs.passing(0)])
    lines[-1] = json.dumps({**json.loads(lines[-1]), **bad})
    run = load_run(logs.write_log(tmp_path / "x.jsonl", lines))
    assert run.verdict is Verdict.INCONCLUSIVE
    assert any("x.jsonl:3: " in warning for warning in run.warnings)


def test_an_unknown_reason_for_skipping_still_adds_up(tmp_path):
    lines = logs.run_lines([logs.passing(0)])
    lines[-1] = lines[-1].replace('"layout":10', '"tired":4,"bored":3,"layout":3')
    run = load_run(logs.write_log(tmp_path / "x.jsonl", lines))
    assert run.coverage.adds_up
    assert run.coverage.skipped[SkipReason.NOT_CHECKABLE] == 7
    assert any("bored, tired" in warning for warning in run.warnings)


def test_a_log_without_its_beginning_is_read(tmp_path):
    run = load_run(logs.write_log(tmp_path / "x.jsonl", logs.run_lines(logs.TWO_FAULTS)[3:]))
    assert run.verdict is Verdict.FAIL
    assert any("no header" in warning for warning in run.warnings)


def test_a_line_of_many_megabytes_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(logfile, "MAX_LINE_BYTES", 3 << 20)
    path = tmp_path / "x.jsonl"
    lines = logs.run_lines(logs.TWO_FAULTS)
    logs.write_log(path, [lines[0], b"x" * (9 << 20), *lines[1:]])
    run = load_run(path)
    assert len(run.records) == len(logs.TWO_FAULTS)
    assert list(run.records) == logs.TWO_FAULTS
    assert run.records[4] == logs.TWO_FAULTS[4]
    assert any("x.jsonl:2: a line of over" in warning for warning in run.warnings)


def test_crlf_and_bom_are_read(tmp_path):
    text = "\r\n".join(logs.run_lines(logs.TWO_FAULTS)) + "\r\n"
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    run = load_run(path)
    assert (len(run.records), run.finished, run.warnings) == (6, True, [])


def test_random_damage_never_crashes(tmp_path):
    rng = random.Random(1)
    whole = "\n".join(logs.run_lines(logs.TWO_FAULTS)).encode() + b"\n"
    path = tmp_path / "x.jsonl"
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        try:
            run = load_run(path)
            assert len(list(run.records)) <= 7
        except LogReadError:
            pass


# ---- paths --------------------------------------------------------------------------------------


def test_a_fifo_does_not_hang(tmp_path):
    fifo = tmp_path / "x.jsonl"
    os.mkfifo(fifo)
    raised: list[BaseException] = []

    def read() -> None:
        try:
            load_run(fifo)
        except LogReadError as error:
            raised.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(HANGS_S)
    assert not thread.is_alive()
    assert "not a regular file" in str(raised[0])


@pytest.mark.parametrize("name", ["missing.jsonl", "a\0b", "x" * 5000])
def test_a_path_that_is_not_there_is_named(tmp_path, name):
    with pytest.raises(LogReadError, match="cannot be read"):
        load_run(str(tmp_path / "dir") + name)


def test_a_device_is_refused():
    with pytest.raises(LogReadError, match="not a regular file"):
        load_run(Path("/dev/zero"))


def test_a_folder_without_a_log_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(LogReadError, match="a folder without a log"):
        load_run(tmp_path)


def test_a_folder_with_both_logs_is_read_from_the_json_lines(tmp_path):
    logs.write_log(tmp_path / "precision.jsonl", logs.run_lines([logs.passing(0)]))
    logs.write_log(tmp_path / "precision.log", [DOCUMENTED])
    assert load_run(tmp_path).verdict is Verdict.PASS


def test_a_folder_with_the_text_log_alone(tmp_path):
    logs.write_log(tmp_path / "precision.log", [DOCUMENTED])
    assert load_run(str(tmp_path)).verdict is Verdict.FAIL


# ---- schema versions ----------------------------------------------------------------------------


def test_a_newer_version_is_refused_and_named(tmp_path):
    lines = logs.run_lines([logs.passing(0)], version=2, environment={"opcheck": "0.9"})
    path = logs.write_log(tmp_path / "x.jsonl", lines)
    with pytest.raises(SchemaVersionError, match=r"x\.jsonl:1: schema version 2.*0\.9"):
        load_run(path)


def test_an_older_version_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(logfile, "SCHEMA_VERSION", 2)
    run = load_run(logs.write_log(tmp_path / "x.jsonl", logs.run_lines([logs.passing(0)])))
    assert run.header["version"] == 1
    assert run.verdict is Verdict.PASS


def test_an_older_run_in_a_log_with_a_newer_one_can_be_read(tmp_path):
    old = logs.run_lines([logs.passing(0, run_id="old")], run_id="old")
    new = logs.run_lines([logs.passing(0, run_id="new")], run_id="new", version=99)
    path = logs.write_log(tmp_path / "x.jsonl", old + new)
    assert load_run(path, run="old").verdict is Verdict.PASS
    with pytest.raises(SchemaVersionError):
        load_run(path)


@pytest.mark.parametrize("fields", [{"schema": "other"}, {"version": "1"}, {"version": True}])
def test_another_schema_is_refused(tmp_path, fields):
    path = logs.write_log(tmp_path / "x.jsonl", logs.run_lines([logs.passing(0)], **fields))
    with pytest.raises(LogReadError, match=r"x\.jsonl:1: schema"):
        load_run(path)
