"""With `repeat=True` kernels run twice; what does not give the same bits is told."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opcheck
from opcheck import Verdict
from tests import faults, models
from tests.hanging import HANGS_S
from tests.step_equality import EmptyMode, assert_same_step

X = torch.linspace(-2, 2, 24).reshape(4, 6)
adamw = partial(torch.optim.AdamW, lr=1e-3)


def repeated(step, tmp_path, **options: Any):
    """Run a step under repeat; return the session."""
    with opcheck.check(log_dir=tmp_path, quiet=True, repeat=True, **options) as session:
        step()
    assert session._pipeline.own_problem == ""
    assert session.coverage.adds_up
    assert session.coverage.errors == 0
    return session


def restless(op: str):
    """Plant a kernel that moves one element by one bit at every second call."""
    turns = itertools.cycle([False, True])

    def make_wrong(original):
        def run(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            if next(turns):
                flat = out.view(-1).view(torch.int32)
                flat[3] = int(flat[3]) ^ 1
            return out

        return run

    return faults.planted(op, make_wrong)


@pytest.mark.parametrize(
    ("op", "step"),
    [
        ("aten.gelu.default", lambda: nn.functional.gelu(X)),
        ("aten.mul_.Tensor", lambda: X.clone().mul_(2.5)),
        ("aten.tanh.out", lambda: torch.tanh(X, out=torch.empty_like(X))),
    ],
)
def test_op_that_does_not_repeat_is_told_apart_from_the_verdict(op, step, tmp_path):
    with restless(op):
        session = repeated(step, tmp_path)
    assert session.verdict is not Verdict.FAIL
    (found,) = session.coverage.unrepeatable
    assert (found.op, found.calls) == (op, 1)
    assert 0 < found.max_abs < 1e-6
    assert "did NOT" in session.report()
    assert op in session.report().split("run twice on the same inputs")[1]
    records = [record for record in session.records if record.op == op]
    assert [record.repeats for record in records] == [False] * len(records)
    for record in records:
        assert "1 of 24 elements differ" in record.notes[-1]


def test_ops_that_repeat_are_counted(tmp_path):
    session = repeated(models.mlp().step, tmp_path)
    assert session.coverage.repeat["run twice"] >= session.coverage.checked > 20
    assert session.coverage.unrepeatable == ()
    assert {record.repeats for record in session.records} == {True}
    assert not [name for name in session.coverage.repeat if name.startswith("not run")]
    assert "0 did" not in session.report()


def test_random_ops_repeat_from_the_same_state(tmp_path):
    generator = torch.Generator().manual_seed(3)

    def step():
        torch.rand(5)
        torch.bernoulli(torch.full((7,), 0.5))
        torch.empty(4).normal_()
        torch.randint(0, 9, (6,), generator=generator)
        torch.native_dropout(X, 0.5, True)

    torch.manual_seed(0)
    before = generator.get_state()
    step()
    expected = torch.get_rng_state(), generator.get_state()
    torch.manual_seed(0)
    generator.set_state(before)
    session = repeated(step, tmp_path)
    assert torch.equal(torch.get_rng_state(), expected[0])
    assert torch.equal(generator.get_state(), expected[1])
    assert session.coverage.unrepeatable == ()
    assert session.coverage.repeat["run twice"] >= 5


def test_random_kernel_that_ignores_the_generator_is_told(tmp_path):
    source = itertools.count()

    def make_wrong(original):
        def normal_(target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            original(target, *args, **kwargs)
            return target.fill_(next(source))

        return normal_

    with faults.planted("aten.normal_.default", make_wrong):
        session = repeated(lambda: torch.empty(4).normal_(), tmp_path)
    assert [item.op for item in session.coverage.unrepeatable] == ["aten.normal_.default"]


def test_registered_kernel_runs_twice_and_is_one_call(tmp_path):
    calls = itertools.count()

    def gelu(x: Tensor, approximate: str = "none") -> Tensor:
        next(calls)
        return x * torch.special.ndtr(x)

    library = torch.library.Library("aten", "IMPL")
    try:
        opcheck.PrecisionCheckRegister([("gelu", gelu)], lib=library, dispatch_key="CPU")
        session = repeated(lambda: nn.functional.gelu(X), tmp_path)
    finally:
        library._destroy()
    assert next(calls) == 2
    found = [record for record in session.records if record.op == "aten.gelu.default"]
    assert [record.repeats for record in found] == [True]
    assert session.coverage.seen == 1


def test_kernel_that_waits_for_a_thread_does_not_hang(tmp_path):
    def gelu(x: Tensor, approximate: str = "none") -> Tensor:
        out = []
        thread = threading.Thread(target=lambda: out.append(torch.nn.functional.silu(x)))
        thread.start()
        thread.join(HANGS_S)
        return x * torch.special.ndtr(x) + 0 * out[0]

    library = torch.library.Library("aten", "IMPL")
    kernels = [("gelu", gelu), ("silu", lambda x: x * torch.sigmoid(x))]
    try:
        opcheck.PrecisionCheckRegister(kernels, lib=library, dispatch_key="CPU")
        session = repeated(lambda: nn.functional.gelu(X), tmp_path)
    finally:
        library._destroy()
    assert session.coverage.failed == 0
    assert [r.repeats for r in session.records if r.op == "aten.gelu.default"] == [True]


def test_ops_of_others_are_not_run_twice(tmp_path):
    seen = []

    @torch.library.custom_op("opcheck_test::counted", mutates_args=())
    def counted(x: Tensor) -> Tensor:
        seen.append(1)
        return x + 1

    session = repeated(lambda: counted(X), tmp_path)
    assert len(seen) <= 1 + session.coverage.checked  # its reference, where it was checked
    assert any("opcheck_test" in name for name in session.coverage.repeat)


def test_other_modes_are_respected(tmp_path):
    with EmptyMode():
        session = repeated(lambda: nn.functional.gelu(X), tmp_path)
    assert session.coverage.repeat["run twice"] == 0
    assert session.coverage.repeat["not run twice: another dispatch mode takes part in it"] == 1


def test_budget_and_size_apply(tmp_path):
    def step():
        for _ in range(5):
            torch.rand(4)
            nn.functional.gelu(X)
        torch.rand(100)

    session = repeated(step, tmp_path, max_checks=2, max_numel=50, large="skip")
    assert session.coverage.repeat["not run twice: budget_used_up"] >= 2


def test_aliased_arguments_are_copied_together(tmp_path):
    def step():
        x = X.clone()
        x[:2].mul_(x[2:])
        torch._foreach_mul_([x[0], x[3]], [x[1], x[2]])

    session = repeated(step, tmp_path)
    assert session.coverage.unrepeatable == ()
    assert session.coverage.repeat["run twice"] == 2


@pytest.mark.parametrize(
    "build",
    [
        partial(models.transformer, dropout=0.1),
        lambda: models.mlp(dropout=0.2).with_autocast(torch.bfloat16),
        models.resnet,
        models.lstm,
    ],
    ids=["transformer", "autocast", "resnet", "lstm"],
)
@pytest.mark.parametrize("blame", [False, True])
def test_step_is_bit_for_bit_the_same(build, blame, tmp_path):
    session = assert_same_step(
        build,
        lambda model: opcheck.check(model, log_dir=tmp_path, quiet=True, repeat=True, blame=blame),
        plain=lambda model: EmptyMode(),
        make_optimizer=adamw,
        num_steps=2,
    )
    assert session.coverage.unrepeatable == ()
    assert session.coverage.repeat["run twice"] > 20


def test_log_carries_it(tmp_path):
    with restless("aten.gelu.default"):
        session = repeated(lambda: nn.functional.gelu(X), tmp_path)
    run = opcheck.load_run(tmp_path)
    assert [record.repeats for record in run.records] == [False]
    assert run.coverage.unrepeatable == session.coverage.unrepeatable
    assert run.coverage.repeat == session.coverage.repeat
