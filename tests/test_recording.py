"""Failing calls are kept as they were, within a limit, and cost the step nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modulecheck import CompareResult, PrecisionChecker
from modulecheck.goldens import array_of, results_of
from modulecheck.recording import RecordedCall
from modulecheck.replay import Replayed, replay
from opcheck import ArgumentError, ArgumentTypeError, Verdict
from tests.compiled import (
    DYNAMO_WARNS,
    MARK,
    Block,
    add_to_one,
    block_class,
    checked_step,
    compile_in_place,
    mark,
    plain_step,
    stack,
    wrong_backend,
)
from tests.models import Workload
from tests.step_equality import differences

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]


def step_with_optimizer(workload: Workload) -> Tensor:
    return workload.step(torch.optim.SGD(workload.model.parameters(), lr=0.5))


def failing(kind: str = "plain", **fault: Any) -> tuple[CompareResult, Workload, str]:
    """A step with a wrong block, after which the optimizer has moved every parameter."""
    workload = stack(kind)
    where = mark(workload.model)
    backend = wrong_backend(**fault)
    result, _ = checked_step(workload, block_class(kind), backend, step=step_with_optimizer)
    assert result.verdict == Verdict.FAIL
    return result, workload, where


def run_again(call: RecordedCall) -> Replayed:
    """The eager module with the recorded parameters."""

    def recorded(tensor: Tensor, name: str) -> Tensor:
        kind, _, rest = name.partition(" ")
        return call.parameters[rest].detach() if kind == "parameter" else tensor.detach().clone()

    assert call.module is not None
    return replay(call.module, call.snapshot, recorded)


@pytest.mark.parametrize("kind", ["plain", "dropout", "twice", "dict"])
def test_call_can_be_run_again_after_the_optimizer_has_moved_the_parameters(kind: str) -> None:
    result, _, where = failing(kind, forward=add_to_one(1e-2))
    call = result.recordings[0]
    assert (call.name, call.index, call.failed[0]) == (where, 0, ("output", 0))
    assert call.phases[0] == "forward"
    eager = array_of(results_of(run_again(call))[("output", 0)])
    error = np.abs(call.actual[("output", 0)] - eager).reshape(-1)
    assert error[7] == pytest.approx(1e-2, rel=1e-3)
    assert np.delete(error, 7).max() < 1e-5
    assert call.module is not None
    assert not torch.equal(call.parameters["up.weight"], call.module.up.weight)


def test_output_gradients_of_the_real_step_are_kept() -> None:
    result, _, where = failing(backward=lambda grad: grad * 2)
    (call,) = result.recordings
    assert (call.name, call.phases) == (where, ("backward",))
    again = run_again(call)
    outputs = [results_of(again)[key] for key in call.sources]
    _, of_parameters = again.gradients(outputs, list(call.grads))
    for kind, name in call.failed:
        if kind == "param":
            expected = array_of(of_parameters[str(name)])
            np.testing.assert_allclose(call.actual[kind, name], 2 * expected, rtol=1e-4, atol=1e-7)
    assert ("param", "up.weight") in call.failed


def test_call_that_fails_is_kept_and_not_the_first_one() -> None:
    result, _, where = failing("twice", forward=add_to_one(1e-2), at=2)
    assert [(call.name, call.index) for call in result.recordings] == [(where, 1)]


def test_one_forward_and_one_backward_a_module_the_first_failing_call_first() -> None:
    result, _, where = failing(
        "twice", forward=add_to_one(1e-2), backward=lambda grad: grad * 2
    )  # both calls fail, in both phases; backward reaches the second call first
    assert [(call.name, call.phases) for call in result.recordings] == [
        (where, ("forward", "backward"))
    ]


def test_failed_mutation_is_kept_with_what_the_step_gave() -> None:
    workload = stack("batch_norm")
    backend = wrong_backend(forward=add_to_one(1e-2))
    model = workload.model
    model.blocks[1].out = nn.Sequential(nn.Linear(16, MARK), nn.Linear(MARK, 16))
    result, _ = checked_step(workload, block_class("batch_norm"), backend)
    (call,) = [item for item in result.recordings if item.name == "blocks.1"]
    (key,) = [key for key in call.failed if key[0] == "buffer"]
    assert call.actual[key].shape == tuple(call.snapshot.buffers[str(key[1])].shape)


def test_modes_of_the_call_are_kept() -> None:
    workload = stack("dropout")
    mark(workload.model)
    workload.model.blocks[1].norm.eval()
    backend = wrong_backend(forward=add_to_one(8.0))
    checker = PrecisionChecker(backend=backend, cast_dtype=torch.bfloat16)
    checker.wrap_by_policy(workload.model, (Block,))
    with checker.installed(workload.model):
        workload.step()
    workload.model.eval()
    call = checker.collect().recordings[0]
    assert call.training["dropout"]
    assert not call.training["norm"]
    assert call.cast_dtype == torch.bfloat16
    assert call.backend is backend


def test_call_without_gradients_has_none() -> None:
    workload = stack()
    mark(workload.model)
    backend = wrong_backend(forward=add_to_one(1e-2))
    result, _ = checked_step(workload, Block, backend, step=Workload.evaluate)
    (call,) = result.recordings
    assert call.grads == call.sources == ()


def test_passing_step_records_nothing() -> None:
    result, _ = checked_step(stack(), Block)
    assert result.recordings == []


# ---- the limit ----------------------------------------------------------------------------------


def test_what_does_not_fit_is_said() -> None:
    workload = stack()
    where = mark(workload.model)
    backend = wrong_backend(forward=add_to_one(1e-2))
    result, _ = checked_step(workload, Block, backend, record_limit_mb=0.001)
    assert result.verdict == Verdict.FAIL
    assert result.recordings == []
    (note,) = [note for note in result.notes if "not recorded" in note]
    assert where in note
    assert "record_limit_mb=0.001" in note


def test_recordings_stay_within_the_limit() -> None:
    workload = stack()
    for place in range(3):
        mark(workload.model, place)
    backend = wrong_backend(forward=add_to_one(1e-2))
    result, _ = checked_step(workload, Block, backend)
    sizes = [call.num_bytes for call in result.recordings]
    assert len(sizes) == 3
    limit = (sum(sizes) - 1) / 2**20
    result, _ = checked_step(stack_of_marked(), Block, backend, record_limit_mb=limit)
    assert len(result.recordings) == 2
    assert sum("not recorded" in note for note in result.notes) == 1


def stack_of_marked() -> Workload:
    workload = stack()
    for place in range(3):
        mark(workload.model, place)
    return workload


@pytest.mark.parametrize("value", [-1.0, float("nan"), "much"])
def test_limit_is_a_number_of_0_or_more(value: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match="record_limit_mb"):
        PrecisionChecker(record_limit_mb=value)


def test_copy_that_fails_is_said_and_the_verdict_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise MemoryError("no more")

    monkeypatch.setattr(RecordedCall, "of", refuse)
    result, _, where = failing(forward=add_to_one(1e-2))
    assert result.suspects[0] == (where, "forward")
    assert any("MemoryError: no more" in note for note in result.notes)


# ---- no side effects ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "dropout", "in_place_input"])
def test_recording_does_not_change_the_step(kind: str) -> None:
    backend = wrong_backend(forward=add_to_one(1e-2), backward=lambda grad: grad * 2)
    workloads = [stack(kind), stack(kind)]
    for workload in workloads:
        mark(workload.model)
    classes = block_class(kind)
    expected = plain_step(workloads[0], classes, backend, step_with_optimizer)
    result, actual = checked_step(workloads[1], classes, backend, step_with_optimizer)
    assert result.recordings
    assert not differences(expected, actual)


def test_recordings_belong_to_their_result_and_go_with_it() -> None:
    workload = stack()
    mark(workload.model)
    checker = PrecisionChecker(backend=wrong_backend(forward=add_to_one(1e-2)))
    checker.wrap_by_policy(workload.model, (Block,))
    checker.install(workload.model)
    results = []
    for keep in (True, False):
        workload.step()
        results.append(checker.collect(keep_installed=keep))
    assert [len(result.recordings) for result in results] == [1, 1]
    assert results[0].recordings[0] is not results[1].recordings[0]
    kept = [weakref.ref(item) for item in results[0].recordings[0].parameters.values()]
    del results
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


def test_recordings_are_no_part_of_what_is_printed_or_compared() -> None:
    result, _, _ = failing(forward=add_to_one(1e-2))
    bare = CompareResult(**{**vars(result), "recordings": []})
    assert "recordings" not in repr(result)
    assert repr(bare) == repr(result)


def test_compiled_code_in_place_is_not_taken_for_the_module() -> None:
    """The recording holds the user's module, which by then runs whatever the user lets it run."""
    result, workload, where = failing(forward=add_to_one(1e-2))
    call = result.recordings[0]
    assert call.module is workload.model.get_submodule(where)
    assert call.module is not None
    before = array_of(results_of(run_again(call))[("output", 0)]).copy()
    compile_in_place(call.module, wrong_backend(forward=add_to_one(1e-2)))
    after = array_of(results_of(run_again(call))[("output", 0)])
    np.testing.assert_array_equal(before, after)
