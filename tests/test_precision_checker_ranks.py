"""PrecisionChecker where ranks share a model: FSDP2, DDP, tensor parallel, in real processes."""

from __future__ import annotations

import pytest

from modulecheck.cli import main
from modulecheck.csv_files import CSV_FIELDS
from modulecheck.sidechannel import TIMEOUT_S
from tests.compiled import CXX, MARK
from tests.on_ranks import run
from tests.ranks_steps import CLEAN

CSV_HEAD = ",".join(CSV_FIELDS)
pytestmark = pytest.mark.slow
FAULTY = ("fsdp2", "fsdp2_mixed", "fsdp2_checkpoint", "ddp", "tensor_parallel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def steps(folder):
    found, said = run("tests.ranks_steps:all_steps", folder)
    assert all(part is not None for part in found), "\n".join(said)
    return found


@pytest.fixture(scope="module")
def clean(steps):
    return [part["clean"] for part in steps]


@pytest.fixture(scope="module")
def faulty(steps):
    return [part["faulty"] for part in steps]


@pytest.fixture(scope="module")
def uneven(steps):
    return [part["uneven"] for part in steps]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_step_passes_and_is_bit_for_bit_the_unchecked_one(name, rank, clean):
    if name not in clean[rank]:
        assert "inductor" in name
        assert CXX is None
        pytest.skip("inductor needs a C++ compiler, there is none")
    found = clean[rank][name]
    assert found["same"]
    assert found["verdicts"] == ["PASS", "PASS"], found["explained"]
    assert len(found["compared"]) >= 2
    assert not [note for note in found["notes"] if "no float64" in note]
    for module, compared in found["compared"].items():
        assert found["param_grads"][module] >= 2
        assert compared > found["param_grads"][module]


def test_names_are_those_of_the_model_inside_the_wrappers(clean):
    for name in ("fsdp2", "fsdp2_checkpoint", "ddp", "tensor_parallel"):
        assert list(clean[0][name]["compared"]) == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_on_one_rank_is_found_there_alone(name, phase, faulty):
    assert faulty[0][f"{name} {phase}"]["verdicts"] == ["PASS", "PASS"]
    found = faulty[1][f"{name} {phase}"]
    assert found["verdicts"][0] == "FAIL"
    assert found["suspects"] == [["blocks.1", phase]]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("name", [name for name in FAULTY if name != "tensor_parallel"])
def test_the_failing_call_is_recorded_with_full_plain_parameters(name, phase, faulty):
    assert faulty[0][f"{name} {phase}"]["recorded"] == []
    first = faulty[1][f"{name} {phase}"]["recorded"][0]
    where, kind, phases, plain, shapes, num_grads = first
    assert (where, kind) == ("blocks.1", "tests.compiled:Block")
    assert phase in phases
    assert plain
    assert shapes == [[16], [16], [MARK, 16], [MARK], [16, MARK], [16]]
    assert num_grads == (phase == "backward" or name == "ddp")


def test_a_call_that_ranks_share_is_not_recorded_and_says_why(faulty):
    found = faulty[1]["tensor_parallel forward"]
    assert found["recorded"] == []
    assert any("ranks share its tensors" in remark for remark in found["remarks"])


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_one_rank_alone_follows_its_fault_with_the_plain_model(phase, faulty):
    ((module, found_phase, stage, _), *_) = faulty[1][f"fsdp2 {phase}"]["culprits"]
    assert module.startswith("blocks.1")
    assert found_phase == phase
    assert stage == "backend"


def test_one_rank_may_check_alone_since_checking_adds_no_collective(uneven):
    assert uneven[0]["one_rank"]["verdicts"] == ["PASS", "PASS"], uneven[0]["one_rank"]
    assert uneven[1]["one_rank"] is None
    for rank in uneven:
        assert sum(rank["plain_collectives"].values()) >= 8
        assert rank["checked_collectives"] == rank["plain_collectives"]


def test_a_rank_that_checks_shared_tensors_alone_waits_no_longer_than_it_was_told(uneven):
    found = uneven[0]["tensor_parallel"]
    assert uneven[1]["tensor_parallel"] is None
    assert found["verdicts"] == ["INCONCLUSIVE", "INCONCLUSIVE"]
    assert "ranks_not_in_step: ranks 0, 1 share its tensors" in found["reason"]


def test_a_collective_inside_of_a_module_is_not_run_again(uneven):
    for rank in uneven:
        found = rank["collective_inside"]
        assert found["verdicts"] == ["INCONCLUSIVE"]
        assert "collective: _c10d_functional.all_reduce.default inside" in found["reason"]
        assert found["compared"]["0"] == 3  # the module beside it is compared as ever


def test_a_module_around_sharded_ones_is_inconclusive_and_says_what_to_wrap(uneven):
    for rank in uneven:
        assert rank["root"]["verdicts"] == ["INCONCLUSIVE"]
        assert "<root>: sharded: FSDP2 holds the parameters of blocks.0" in rank["root"]["reason"]
        assert "wrap the modules that fully_shard was applied to" in rank["root"]["reason"]


@pytest.mark.parametrize("kind", ["no_backward", "inference"])
def test_float64_judges_sharded_modules_without_a_backward_too(kind, uneven):
    for rank in uneven:
        assert rank[kind]["verdicts"] == ["PASS"], rank[kind]["explained"]
        assert rank[kind]["compared"] == {"blocks.0": 1, "blocks.1": 1}
        assert rank[kind]["notes"] == []


def test_parameters_that_are_replaced_before_backward_are_no_pass(uneven):
    for rank in uneven:
        assert rank["fsdp1"]["verdicts"] == ["INCONCLUSIVE", "INCONCLUSIVE"]
        assert "blocks.0: resharded: its parameters were" in rank["fsdp1"]["reason"]


@pytest.mark.parametrize(
    ("name", "why"),
    [("fsdp2", "ranks 0, 1 share its parameters"), ("ddp", "DistributedDataParallel reduces")],
)
def test_two_pass_refuses_a_model_that_ranks_share_and_names_single_pass(name, why, uneven):
    for rank in uneven:
        assert why in rank["two_pass"][name]
        assert "use single_pass=True, with install() and collect()" in rank["two_pass"][name]


def test_a_wrapped_ddp_root_is_what_it_holds(uneven):
    for rank in uneven:
        found = rank["ddp_root"]
        assert found["verdicts"] == ["PASS"], found["explained"]
        assert list(found["compared"]) == [""]
        assert found["param_grads"][""] >= 8


# ---- reports ------------------------------------------------------------------------------------


def test_the_gathered_csv_is_that_of_each_rank_with_two_columns_before(folder, faulty):
    expected = ["rank,scenario," + CSV_HEAD]
    for rank in range(2):
        head, *rows = (folder / f"precision_rank{rank}.csv").read_text().splitlines()
        assert head == CSV_HEAD
        assert rows[0].startswith("LOSS,loss,0,PASS,N/A,N/A,N/A,compiled=")
        assert len(rows) > 10
        expected += [f"{rank},core,{row}" for row in rows]
    gathered = (folder / "gathered.csv").read_bytes().decode()
    assert gathered == "".join(line + "\n" for line in expected)
    assert gathered.count(",FAIL,") == 1
    (failed,) = [line for line in gathered.splitlines() if ",FAIL," in line]
    assert failed.startswith("1,core,blocks.1,fwd_output,0,FAIL,5.000000e-01,")


def test_merging_the_files_gives_the_gathered_one(folder, faulty, tmp_path, capsys):
    parts = [str(folder / f"precision_rank{rank}.csv") for rank in range(2)]
    assert main(["merge", *parts, "-o", str(tmp_path / "merged.csv")]) == 1
    assert (tmp_path / "merged.csv").read_bytes() == (folder / "gathered.csv").read_bytes()
    assert "  First divergence: rank 1, blocks.1 (forward)" in capsys.readouterr().out


def test_rank_0_prints_its_report_and_a_line_for_each_rank(folder, faulty):
    printed = (folder / "printed.0").read_text().splitlines()
    assert "  RESULT: ALL PASS  (atol=1e-4 rtol=1e-3; judged: calibrated)" in printed
    place = printed.index("  RANKS")
    assert printed[place + 2 : place + 7] == [
        "  pass  rank 0",
        "  FAIL  rank 1       1 of 2 modules: blocks.1",
        "=" * 72,
        "  RESULT OF ALL RANKS: FAILED",
        "=" * 72,
    ]
    first = printed[place + 7]
    assert first.startswith(
        "  First divergence: rank 1, blocks.1 (forward): fwd_output [0]: element"
    )
    assert printed[-1] == f"CSV report saved to: {folder / 'gathered.csv'}"
    assert (folder / "printed.1").read_text() == ""


def test_a_rank_that_died_is_named_and_waited_for_no_longer_than_told(tmp_path):
    (found, dead), said = run("tests.ranks_steps:dying_rank", tmp_path)
    assert dead is None
    assert found is not None, "\n".join(said)
    assert found["verdicts"] == ["PASS"], found["explained"]
    assert 1.4 < found["waited_s"] < TIMEOUT_S  # what it waits for untold
    why = "MISSING_rank: nothing came within 1.5 s; did it die, or not call report(gather=True)?"
    printed = (tmp_path / "printed.0").read_text().splitlines()
    assert f"  WARN  rank 1       {why}" in printed
    assert "  RESULT OF ALL RANKS: INCONCLUSIVE" in printed
    rows = (tmp_path / "gathered.csv").read_text().splitlines()
    assert rows[-1] == f'1,core,-,note,0,WARN,,,,,"{why}"'
    assert len([row for row in rows if row.startswith("0,core,")]) > 10
