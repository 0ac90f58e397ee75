"""CSV reports of several ranks as one: bytes, names, errors; and the store between ranks."""

from __future__ import annotations

import datetime
import functools
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from loguru import logger

from modulecheck import CompareResult, ModuleDiff, PrecisionChecker, TensorDiff, merge_reports
from modulecheck.cli import main
from modulecheck.gathering import report_of
from modulecheck.sidechannel import SideChannel
from opcheck import ArgumentError, LogReadError, LogWriteError, Verdict
from tests.hanging import HANGS_S

HEAD = (
    "module_name,check_type,tensor_index,status,max_abs_diff,mean_abs_diff,max_rel_diff,shape,"
    "note\n"
)
LOSS = "LOSS,loss,0,PASS,N/A,N/A,N/A,compiled=0.333408,single_pass mode\n"
FORWARD = 'layers.0,fwd_output,0,PASS,1.192093e-07,3.421843e-08,2.980232e-07,"(2, 16, 128)",\n'
GRADIENT = 'layers.0,grad_input,0,PASS,0.000000e+00,0.000000e+00,0.000000e+00,"(2, 16, 128)",\n'
IGNORED = "layers.1,note,0,SKIP,,,,,IGNORED\n"
FAILED = 'layers.1,fwd_output,0,FAIL,5.0e-01,1.0e-03,1.9e+00,"(2, 16)","element (0, 7) is 1"\n'
CLEAN = HEAD + LOSS + FORWARD + GRADIENT


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
        return path

    return write


def test_merged_bytes_are_the_documented_ones(write, tmp_path):
    parts = [
        write("precision_rank1.csv", CLEAN),
        write("precision_bf16_rank0.csv", CLEAN),
        write("precision_rank0.csv", CLEAN),
        write("precision_ignore_rank1.csv", CLEAN + IGNORED),
    ]
    merged = merge_reports(parts, tmp_path / "all.csv")
    rows = [LOSS, FORWARD, GRADIENT]
    expected = ["rank,scenario," + HEAD]
    for prefix in ("0,core,", "1,core,", "0,bf16,", "1,ignore,"):
        expected += [prefix + row for row in rows]
    expected.append("1,ignore," + IGNORED)
    assert (tmp_path / "all.csv").read_bytes().decode() == "".join(expected)
    assert merged.verdict is Verdict.INCONCLUSIVE  # rank 0 has no report of scenario ignore
    assert merged.holes == ["rank 0 has no report in scenario ignore"]


def test_what_the_checker_writes_is_merged_as_it_is(tmp_path):
    tensor = TensorDiff(1e-7, 1e-8, 1e-6, True, (2, 3), name="a,b")
    result = CompareResult(
        float("nan"), 0.5, [ModuleDiff("x", fwd_output=[tensor]), ModuleDiff("", note="IGNORED")]
    )
    paths = [tmp_path / f"precision_rank{rank}.csv" for rank in range(2)]
    for path in paths:
        PrecisionChecker().report(result, csv_path=path)
    assert merge_reports(paths, tmp_path / "all.csv").verdict is Verdict.PASS
    head, *rows = paths[0].read_text().splitlines()
    merged = (tmp_path / "all.csv").read_text().splitlines()
    assert merged == [
        f"rank,scenario,{head}",
        *(f"0,core,{row}" for row in rows),
        *(f"1,core,{row}" for row in rows),
    ]


def test_merged_files_merge_again_and_keep_their_own_names(write, tmp_path):
    core, bf16 = tmp_path / "core.csv", tmp_path / "b.csv"
    merge_reports([write("precision_rank0.csv", CLEAN)], core)
    merge_reports([write("x.csv", CLEAN)], bf16, scenario="bf16", ranks=[0])
    merged = merge_reports([core, bf16], tmp_path / "all.csv")
    assert [(part.rank, part.scenario) for part in merged.reports] == [(0, "core"), (0, "bf16")]
    assert merged.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("name", "rank", "scenario"),
    [
        ("precision_rank0.csv", 0, "core"),
        ("precision.rank12.csv", 12, "core"),
        ("precision_report_bf16_rank_3.csv", 3, "bf16"),
        ("rank1-no_fsdp.csv", 1, "no_fsdp"),
        ("Rank2.csv", 2, "core"),
    ],
)
def test_rank_and_scenario_come_from_the_file_name(name, rank, scenario, write, tmp_path):
    (report,) = merge_reports([write(name, CLEAN)], tmp_path / "all.csv").reports
    assert (report.rank, report.scenario) == (rank, scenario)


def test_given_names_go_before_those_of_the_files(write, tmp_path):
    parts = [write("a.csv", CLEAN), write("precision_rank0.csv", CLEAN)]
    merged = merge_reports(parts, tmp_path / "all.csv", scenario="bf16", ranks=[0, 5])
    assert [(part.rank, part.scenario) for part in merged.reports] == [(0, "bf16"), (5, "bf16")]


def test_ranks_and_paths_may_be_any_iterable(write, tmp_path):
    parts = [write("a.csv", CLEAN), write("b.csv", CLEAN)]
    merged = merge_reports(iter(parts), tmp_path / "all.csv", ranks=(rank for rank in (3, 7)))
    assert [part.rank for part in merged.reports] == [3, 7]


@pytest.mark.parametrize(
    ("files", "options", "error", "message"),
    [
        ({}, {}, ArgumentError, "at least one"),
        ({"a.csv": CLEAN}, {}, LogReadError, "the name tells no rank"),
        ({"rank1_rank2.csv": CLEAN}, {}, LogReadError, "the name tells no rank"),
        ({"frank1.csv": CLEAN}, {}, LogReadError, "the name tells no rank"),
        ({"rank0.csv": None}, {}, LogReadError, "rank0.csv: cannot be read"),
        ({"rank0.csv": ""}, {}, LogReadError, "an empty file"),
        ({"rank0.csv": HEAD}, {}, LogReadError, "no rows"),
        ({"rank0.csv": "a,b\n1,2\n"}, {}, LogReadError, "expected the columns module_name"),
        ({"rank0.csv": HEAD + "x,y\n"}, {}, LogReadError, "line 2: expected 9 fields, got 2"),
        ({"rank0.csv": HEAD + LOSS[:-4] + ',"'}, {}, LogReadError, "rank0.csv"),
        ({"rank0.csv": CLEAN.replace("PASS", "FINE")}, {}, LogReadError, "got 'FINE'"),
        (
            {"rank0.csv": CLEAN, "precision_rank0.csv": CLEAN}, {}, LogReadError,
            "two reports are of rank 0 in scenario 'core'",
        ),
        ({"rank0.csv": CLEAN}, {"ranks": [0, 1]}, ArgumentError, "expected 1, one a file, got 2"),
        ({"rank0.csv": CLEAN}, {"ranks": [-1]}, ArgumentError, ">= 0"),
        ({"rank0.csv": CLEAN}, {"scenario": ""}, ArgumentError, "expected a name"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_an_error_and_no_file(
    files, options, error, message, write, tmp_path
):
    paths = [tmp_path / n if text is None else write(n, text) for n, text in files.items()]
    with pytest.raises(error, match=message):
        merge_reports(paths, tmp_path / "all.csv", **options)
    assert not (tmp_path / "all.csv").exists()


def test_a_file_that_is_merged_is_never_overwritten(write):
    path = write("precision_rank0.csv", CLEAN)
    with pytest.raises(ArgumentError, match="is one of the files to merge"):
        merge_reports([path], path)
    assert path.read_text() == CLEAN


def test_a_failed_write_leaves_the_old_file(write, tmp_path):
    with pytest.raises(LogWriteError, match="cannot be written"):
        merge_reports([write("rank0.csv", CLEAN)], write("file", "") / "all.csv")
    target = tmp_path / "folder"
    target.mkdir()
    with pytest.raises(LogWriteError, match="cannot be written"):
        merge_reports([tmp_path / "rank0.csv"], target)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


# ---- what the ranks say together ----


@pytest.mark.parametrize(
    ("row", "verdict", "said"),
    [
        (FAILED, Verdict.FAIL, "FAIL  rank 1       layers.1"),
        ("layers.1,note,0,WARN,,,,,not_compiled: x\n", Verdict.INCONCLUSIVE,
         "WARN  rank 1       layers.1: not_compiled: x"),
        (IGNORED, Verdict.PASS, "pass  rank 1"),
    ],
)  # fmt: skip
def test_each_rank_has_a_line(row, verdict, said, write, tmp_path):
    parts = [write("precision_rank0.csv", CLEAN), write("precision_rank1.csv", CLEAN + row)]
    merged = merge_reports(parts, tmp_path / "all.csv")
    assert merged.verdict is verdict
    assert f"  {said}" in list(merged.lines())
    assert "  pass  rank 0" in list(merged.lines())


def test_a_rank_that_compared_nothing_is_no_pass(write, tmp_path):
    merged = merge_reports([write("rank0.csv", HEAD + LOSS + IGNORED)], tmp_path / "all.csv")
    assert merged.verdict is Verdict.INCONCLUSIVE
    assert merged.reports[0].reason == "nothing was compared"


def test_a_rank_without_a_file_is_named(write, tmp_path):
    parts = [write("precision_rank0.csv", CLEAN), write("precision_rank2.csv", CLEAN)]
    merged = merge_reports(parts, tmp_path / "all.csv")
    assert merged.verdict is Verdict.INCONCLUSIVE
    assert "  WARN  rank 1 has no report in scenario core" in list(merged.lines())


def test_the_first_divergence_is_forward_then_the_last_module_in_backward(write, tmp_path):
    backward = "".join(
        f'layers.{place},grad_input,0,FAIL,1.0e-01,1.0e-03,1.0e+00,"(2,)",out\n' for place in (0, 2)
    )
    zero = write("precision_rank0.csv", CLEAN + backward)
    one = write("precision_rank1.csv", CLEAN + FAILED + backward)
    report, first = merge_reports([zero], tmp_path / "all.csv").first_divergence
    assert (report.rank, first.module, first.phase) == (0, "layers.2", "backward")
    merged = merge_reports([zero, one], tmp_path / "all.csv")
    report, first = merged.first_divergence
    assert (report.rank, first.module, first.phase) == (1, "layers.1", "forward")
    assert list(merged.lines())[-1] == (
        "  First divergence: rank 1, layers.1 (forward): fwd_output [0] element (0, 7) is 1"
    )


def test_rows_of_a_result_and_of_its_file_say_the_same(tmp_path):
    bad = TensorDiff(1.0, 1.0, 1.0, False, (2,), reason="far off", name="0")
    good = TensorDiff(0.0, 0.0, 0.0, True, (2,))
    result = CompareResult(
        float("nan"), 0.5,
        [ModuleDiff("a", fwd_output=[good]), ModuleDiff("b", fwd_output=[good], grad_input=[bad])],
    )  # fmt: skip
    own = report_of(result, 0, "core")
    path = tmp_path / "rank0.csv"
    PrecisionChecker().report(result, csv_path=path)
    (read,) = merge_reports([path], tmp_path / "all.csv").reports
    assert read.rows == own.rows
    assert read.verdict is own.verdict is Verdict.FAIL
    assert (read.first.module, read.first.phase) == (own.first.module, own.first.phase)


# ---- command ----


def test_command_prints_a_line_a_rank_and_exits_by_verdict(write, tmp_path, capsys):
    out = tmp_path / "all.csv"
    parts = [write("precision_rank0.csv", CLEAN), write("precision_rank1.csv", CLEAN + FAILED)]
    assert main(["merge", *map(str, parts), "-o", str(out)]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[2:] == [
        "  pass  rank 0",
        "  FAIL  rank 1       layers.1",
        "=" * 72,
        "  RESULT OF ALL RANKS: FAILED",
        "=" * 72,
        "  First divergence: rank 1, layers.1 (forward): fwd_output [0] element (0, 7) is 1",
        f"CSV report saved to: {out}",
    ]
    assert main(["merge", str(parts[0]), "-o", str(out)]) == 0
    assert main(["merge", str(parts[1]), "-o", str(out), "--rank", "0", "--scenario", "x"]) == 1
    assert out.read_text().splitlines()[1].startswith("0,x,LOSS,")
    assert main(["merge", str(tmp_path / "none_rank0.csv"), "-o", str(out)]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_merging_needs_no_torch(write, tmp_path):
    path = write("precision_rank0.csv", CLEAN)
    code = (
        "import sys, modulecheck\n"
        f"modulecheck.merge_reports([{str(path)!r}], {str(tmp_path / 'all.csv')!r})\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"


def test_without_a_process_group_gather_is_rank_0_alone(tmp_path, capsys):
    good = TensorDiff(0.0, 0.0, 0.0, True, (2,))
    result = CompareResult(float("nan"), 0.5, [ModuleDiff("a", fwd_output=[good])])
    path = tmp_path / "all.csv"
    PrecisionChecker().report(result, csv_path=path, gather=True, scenario="bf16")
    assert path.read_text().splitlines()[1:] == [
        "0,bf16,LOSS,loss,0,PASS,N/A,N/A,N/A,compiled=0.500000,single_pass mode",
        '0,bf16,a,fwd_output,0,PASS,0.000000e+00,0.000000e+00,0.000000e+00,"(2,)",',
    ]
    assert capsys.readouterr().out.splitlines()[-1] == f"CSV report saved to: {path}"
    with pytest.raises(ArgumentError, match="scenario"):
        PrecisionChecker().report(result, gather=True, scenario="")


# ---- the store between ranks ----


@pytest.fixture
def channels():
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=HANGS_S))
    return [SideChannel(store, rank, 2, name="t", timeout_s=0.5) for rank in range(2)]


@pytest.fixture
def patient(channels):
    """Channels of ranks that do come, however late."""
    for channel in channels:
        channel.timeout_s = HANGS_S
    return channels


def both(*calls):
    """Run at the same time; what each gives."""
    found = [None] * len(calls)

    def run(place):
        found[place] = calls[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=HANGS_S)
    return found


def test_messages_of_any_size_arrive_whole(patient):
    import random

    text = "".join(random.Random(0).choices("abcdefghijkl", k=4_000_000))
    patient[1].send("rows", {"text": text})
    patient[0].send("rows", [1, None])
    assert patient[0].receive("rows", [0, 1]) == {0: [1, None], 1: {"text": text}}


def test_a_rank_that_sends_nothing_is_left_out_in_time(channels):
    channels[0].send("rows", 1)
    assert channels[0].receive("rows", [0, 1]) == {0: 1}


@pytest.mark.parametrize("votes", [(True, True), (False, True), (False, False)])
def test_every_rank_gets_every_vote(votes, patient):
    calls = [
        functools.partial(channel.votes, "a", [0, 1], vote)
        for channel, vote in zip(patient, votes, strict=True)
    ]
    assert both(*calls) == [list(votes), list(votes)]


def test_a_vote_that_ended_is_the_same_for_who_comes_late(channels):
    assert channels[0].votes("a", [0, 1], True) is None
    assert channels[1].votes("a", [0, 1], True) is None  # although all votes are there by now


def test_votes_leave_nothing_behind_but_the_last(patient):
    for stage in range(20):
        calls = [functools.partial(c.votes, f"s{stage}", [0, 1], True) for c in patient]
        assert both(*calls) == [[True, True], [True, True]]
    assert patient[0]._store.num_keys() < 8


def test_ranks_out_of_step_do_not_wait_again(channels):
    assert channels[0].votes("a", [0, 1], True) is None
    channels[0].timeout_s = channels[1].timeout_s = 60.0
    assert channels[1].votes("b", [0, 1], True) is None
    assert channels[0].votes("c", [0, 1], True) is None


class UnreachableStore:
    """As of a rank 0 that has died."""

    def __getattr__(self, name):
        def call(*args):
            raise dist.DistNetworkError("Connection reset by peer")

        return call


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_gone_ends_in_a_warning_and_not_in_an_exception(
    rank, tmp_path, monkeypatch
):
    channel = SideChannel(UnreachableStore(), rank, 2, name="t", timeout_s=1.0)
    monkeypatch.setattr(SideChannel, "of_default_group", lambda *args, **options: channel)
    said = []
    sink = logger.add(said.append, format="{message}")
    path = tmp_path / "all.csv"
    try:
        PrecisionChecker().report(CompareResult(0.5, 0.5), csv_path=path, gather=True)
    finally:
        logger.remove(sink)
    assert "Connection reset by peer" in said[0]
    if rank == 0:
        assert "1,core,-,note,0,WARN" in path.read_text()
    else:
        assert not path.exists()
