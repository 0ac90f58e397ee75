"""Collectives over real processes, and the rule that judges them on numbers made for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from modulecheck import audit_collectives
from modulecheck.collective_findings import compare_ranks
from modulecheck.collective_rule import Digest, compare_sums, digest
from modulecheck.sidechannel import TIMEOUT_S
from opcheck import ArgumentError, Verdict
from tests.audit_steps import EXCHANGES, FAULTS, WRAPS
from tests.on_ranks import run

# ---- the rule -----------------------------------------------------------------------------------


def digest_of(tensor: torch.Tensor, max_sums: int = 4096) -> Digest:
    is_float = tensor.is_floating_point()
    values = tensor.to(torch.float64 if is_float else torch.int64).reshape(-1).numpy()
    raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return digest(raw, values, dtype, numel=values.size, max_sums=max_sums, with_sums=True)


def parts(num_ranks: int, size: int, dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_ranks)
    return [(torch.randn(size, generator=generator) * scale).to(dtype) for _ in range(num_ranks)]


def added(tensors: list[torch.Tensor], order: str) -> torch.Tensor:
    """The sum in the dtype itself, in one of the orders that backends take."""
    if order == "tree" and len(tensors) > 1:
        half = len(tensors) // 2
        return added(tensors[:half], order) + added(tensors[half:], order)
    total = tensors[0].clone()
    for item in tensors[1:]:
        total += item
    return total


def judged(given: list[torch.Tensor], got: torch.Tensor, reduction: str = "sum", **options: int):
    return compare_sums(
        [digest_of(item, **options) for item in given], digest_of(got, **options), reduction
    )


@pytest.mark.parametrize("max_sums", [4096, 100, 1], ids=["elements", "blocks", "one sum"])
@pytest.mark.parametrize("order", ["ring", "tree"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
def test_any_order_of_additions_passes(num_ranks, dtype, order, max_sums) -> None:
    for scale in (1.0, 1e-4):
        given = parts(num_ranks, 4000, getattr(torch, dtype), scale)
        got = added(given, order)
        assert judged(given, got, max_sums=max_sums) == (None, 0)
        averages = [got / num_ranks, added([item / num_ranks for item in given], order)]
        for average in averages:
            assert judged(given, average, "avg", max_sums=max_sums) == (None, 0)


@pytest.mark.parametrize(
    ("dtype", "max_sums", "error"),
    [("float32", 4096, 1e-5), ("float32", 100, 1e-4), ("float64", 100, 1e-12),
     ("bfloat16", 4096, 0.2), ("float16", 4096, 0.02), ("float16", 100, 1.0)],
)  # fmt: skip
def test_one_element_that_is_off_is_named(dtype: str, max_sums: int, error: float) -> None:
    given = parts(4, 4000, getattr(torch, dtype))
    got = added(given, "ring")
    got[1234] += error
    mismatch, unsaid = judged(given, got, max_sums=max_sums)
    assert mismatch is not None
    assert mismatch.start <= 1234 < mismatch.stop
    assert mismatch.stop - mismatch.start == math.ceil(4000 / max_sums)
    assert unsaid == 0


@pytest.mark.parametrize("spoil", ["a rank is missing", "a rank counts twice", "swapped"])
def test_gross_faults_are_found_in_one_sum(spoil: str) -> None:
    given = parts(4, 4000, torch.bfloat16)
    wrong = {
        "a rank is missing": added(given[:3], "ring"),
        "a rank counts twice": added([*given, given[0]], "ring"),
        "swapped": added(given, "ring").roll(1),
    }[spoil]
    assert judged(given, wrong, max_sums=50)[0] is not None


@pytest.mark.parametrize(
    ("given", "got", "passes"),
    [
        ([6e4, 6e4], math.inf, True),  # it leaves float16
        ([6e4, 4e3], math.inf, False),
        ([math.inf, -math.inf], math.nan, True),
        ([math.inf, 1.0], math.inf, True),
        ([math.inf, 1.0], -math.inf, False),
        ([math.nan, 1.0], 1.0, False),
        ([1.0, 1.0], math.nan, False),
        ([0.0, 0.0], 0.0, True),
        ([6e-8, 6e-8], 1.2e-7, True),  # the two smallest numbers
    ],
)
def test_what_is_not_finite(given: list[float], got: float, passes: bool) -> None:
    tensors = [torch.tensor([1.0, item]).half() for item in given]
    mismatch, unsaid = judged(tensors, torch.tensor([2.0, got]).half())
    assert (mismatch is None) == passes
    assert unsaid == 0


def test_blocks_with_infinite_inputs_say_nothing_and_are_counted() -> None:
    given = parts(2, 100, torch.float32)
    given[1][7] = math.inf
    assert judged(given, added(given, "ring"), max_sums=10) == (None, 1)
    finite = parts(2, 100, torch.float32)
    lost = added(finite, "ring")
    lost[7] = math.nan
    assert judged(finite, lost, max_sums=10)[0] is not None


@pytest.mark.parametrize("max_sums", [4096, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_are_exact_and_wrap(dtype: torch.dtype, max_sums: int) -> None:
    top = torch.iinfo(dtype).max
    given = [torch.tensor([1, 5, top, 7], dtype=dtype), torch.tensor([2, 5, top, 0], dtype=dtype)]
    got = given[0] + given[1]
    assert judged(given, got, max_sums=max_sums) == (None, 0)
    got[2] += 1
    assert judged(given, got, max_sums=max_sums)[0] is not None


def test_extremes_are_exact() -> None:
    given = parts(3, 50, torch.float32)
    largest = torch.stack(given).amax(0)
    assert judged(given, largest, "max") == (None, 0)
    largest[9] += 1e-6
    mismatch, _ = judged(given, largest, "max")
    assert (mismatch.start, mismatch.reduction) == (9, "max")
    assert judged(given, largest, "max", max_sums=10) == (None, 10)


def test_digests_come_back_bit_for_bit() -> None:
    for tensor in (parts(1, 9, torch.float32)[0], torch.arange(9)):
        for max_sums in (9, 2):
            item = digest_of(tensor, max_sums)
            again = Digest.of_json(item.to_json())
            assert (again.bits, again.block, again.dtype) == (item.bits, item.block, item.dtype)
            np.testing.assert_array_equal(again.sums, item.sums)
            np.testing.assert_array_equal(again.squares, item.squares)


# ---- one process --------------------------------------------------------------------------------


def test_one_process_has_nothing_to_compare() -> None:
    with audit_collectives() as audit:
        torch.ones(3).sum()
    assert audit.verdict is Verdict.INCONCLUSIVE
    assert "there is no process group of several ranks" in audit.report()
    with pytest.raises(ArgumentError, match="for one block"), audit:
        pass


@pytest.mark.parametrize("options", [{"max_sums": 0}, {"timeout_s": 0.0}])
def test_wrong_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        audit_collectives(**options)


def test_a_rank_that_sent_nothing_is_named() -> None:
    nothing = {"seen": [], "not_understood": {}, "replicas": [], "problems": []}
    assert compare_ranks({0: nothing}, 2).problems == ["nothing came from rank 1"]


# ---- real processes -----------------------------------------------------------------------------

several_processes = pytest.mark.slow


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    found, said = run("tests.audit_steps:all_steps", tmp_path_factory.mktemp("audit"))
    assert all(part is not None for part in found), "\n".join(said)
    return found


@several_processes
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_clean_step_passes_and_is_bit_for_bit_the_same(steps: list[Any], wrap: str) -> None:
    for rank in range(2):
        found = steps[rank]["clean"][wrap]
        assert found["same"]
        assert (found["verdict"], found["problems"]) == ("PASS", []), found["report"]
    expected = {
        "fsdp2": {"all_gather": 6, "reduce_scatter": 4},
        "fsdp2_mixed": {"all_gather": 6, "reduce_scatter": 4},
        "ddp": {"all_reduce": 2, "broadcast": 2, "replicated parameters": 4},
        "tensor_parallel": {"all_reduce": 2, "replicated parameters": 1},
    }[wrap]
    assert steps[0]["clean"][wrap]["compared"] == expected


@several_processes
def test_large_tensors_and_a_session_of_opcheck_pass(steps: list[Any]) -> None:
    for name in ("in_blocks", "under_opcheck"):
        assert steps[1]["clean"][name]["verdict"] == "PASS"
    assert steps[1]["clean"]["under_opcheck"]["opcheck"] == "PASS"


@several_processes
def test_every_way_to_call_a_collective_is_understood(steps: list[Any]) -> None:
    found = steps[0]["ops"]["all"]
    assert (found["same"], found["verdict"]) == (True, "PASS"), found["report"]
    assert found["compared"] == {
        "all_gather": 3, "all_reduce": 11, "broadcast": 2, "reduce_scatter": 3
    }  # fmt: skip
    others = steps[0]["ops"]["others"]
    assert others["not_understood"] == {"c10d.recv_any_source_": 1}
    assert "not compared: c10d.recv_any_source_, 1 call" in others["report"]
    assert others["verdict"] == "PASS"
    assert steps[0]["ops"]["empty"]["verdict"] == "INCONCLUSIVE"
    booleans = steps[0]["ops"]["booleans"]  # of a sum of them only the bits are known
    assert (booleans["verdict"], booleans["compared"]) == ("INCONCLUSIVE", {"all_reduce": 1})
    assert "only the bits are known" in booleans["report"]


@several_processes
def test_what_is_exchanged_has_the_bits_that_were_given(steps: list[Any]) -> None:
    found = steps[0]["ops"]["exchange"]
    assert (found["same"], found["verdict"]) == (True, "PASS"), found["report"]
    assert found["compared"] == {
        "all_to_all": 3, "gather": 1, "scatter": 1, "reduce": 1, "send and receive": 3
    }  # fmt: skip
    alone = steps[0]["ops"]["alone"]
    assert alone["verdict"] == "INCONCLUSIVE"
    assert "rank 0 sent 1 tensors to rank 1, which received 0" in alone["report"]


@several_processes
@pytest.mark.parametrize("kind", EXCHANGES)
def test_an_exchange_that_changes_a_number_is_named(steps: list[Any], kind: str) -> None:
    found = steps[0]["faulty"][f"exchange_{kind}"]
    assert found["verdict"] == "FAIL"
    wrong = {(item["rank"], item["kind"]) for item in found["findings"]}
    assert wrong == {(0 if kind == "reduce" else 1, kind)}


@several_processes
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_backend_on_one_rank_is_named(steps: list[Any], name: str) -> None:
    for rank in range(2):  # both are told
        found = steps[rank]["faulty"][name]
        assert found["verdict"] == "FAIL"
        first = found["findings"][0]
        assert (first["rank"], first["op"]) == (1, f"c10d.{FAULTS[name][1]}")
        assert first["kind"] == name.removesuffix("_nan").removesuffix("_bits")
        assert first["source"].startswith("audit_steps.py:")
        assert {item["rank"] for item in found["findings"]} == {1}
    index = 3 if "scatter" in name else 0  # of all of the group: three gathers come before
    assert first["index"] == index


@several_processes
@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("in_blocks", "reduce_scatter", "the signed sum of elements 0 to 3 is"),
        ("broadcast", "broadcast", "it has not the bits that rank 0 gave"),
        ("order", "order", "calls all_reduce (sum) of 2 x float32, and rank 0 calls"),
        ("extreme", "all_reduce", "the min over the ranks in float64 is"),
        ("integers", "all_reduce", "element 3 is 600001, the sum over the ranks in float64 is"),
        ("replica", "replica", "its bits are not those of rank 0"),
    ],
)
def test_other_faults_are_named(steps: list[Any], name: str, kind: str, said: str) -> None:
    found = steps[1]["faulty"][name]
    assert found["verdict"] == "FAIL"
    first = found["findings"][0]
    assert (first["rank"], first["kind"]) == (1, kind)
    assert said in first["reason"]


@several_processes
def test_a_rank_that_left_is_waited_for_no_longer_than_told(steps: list[Any]) -> None:
    here, there = (part["left"] for part in steps)
    assert (here["verdict"], there["verdict"]) == ("INCONCLUSIVE", "INCONCLUSIVE")
    assert "nothing came from rank 1" in here["problems"]
    assert there["problems"] == ["the block was left by KeyError"]
    assert here["waited_s"] < TIMEOUT_S  # what it waits for untold
