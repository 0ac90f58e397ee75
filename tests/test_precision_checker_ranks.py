"""PrecisionChecker where ranks share a model: FSDP2, DDP, tensor parallel, in real processes."""

from __future__ import annotations

import pytest

from tests.compiled import CXX, MARK
from tests.on_ranks import run
from tests.ranks_steps import CLEAN

pytestmark = pytest.mark.slow
FAULTY = ("fsdp2", "fsdp2_mixed", "fsdp2_checkpoint", "ddp", "tensor_parallel")


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    found, said = run("tests.ranks_steps:all_steps", tmp_path_factory.mktemp("steps"))
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
@pytest.mark.parametrize("name", FAULTY)
def test_the_failing_call_is_recorded_with_full_plain_parameters(name, phase, faulty):
    assert faulty[0][f"{name} {phase}"]["recorded"] == []
    first = faulty[1][f"{name} {phase}"]["recorded"][0]
    where, kind, phases, plain, shapes, num_grads = first
    assert (where, kind) == ("blocks.1", "tests.compiled:Block")
    assert phase in phases
    assert plain
    assert shapes == [[16], [16], [MARK, 16], [MARK], [16, MARK], [16]]
    assert num_grads == (phase == "backward" or name == "ddp")


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
