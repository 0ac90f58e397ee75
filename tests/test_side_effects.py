"""A session dispatches no op of its own, runs nothing of the user's twice, keeps what it found."""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import opcheck
from opcheck import SkipReason, Verdict
from opcheck.outside import outside_everything
from tests import models
from tests.step_equality import EmptyMode, active_modes

X = torch.linspace(-2, 2, 24).reshape(4, 6)


def seen_around_and_inside(step, tmp_path, **arguments):
    """Ops seen by a mode outside the session, by one inside it, and by one without any session."""
    with EmptyMode() as alone:
        step()
    with EmptyMode() as outside:
        with opcheck.check(log_dir=tmp_path, quiet=True, **arguments) as session:
            with EmptyMode() as inside:
                step()
    return alone.ops, outside.ops, inside.ops, session


class LosesValue(nn.Module):
    """Its output is Inf, in float64 as well."""

    def forward(self, x):
        return (x - x).rsqrt()


@pytest.mark.parametrize("max_checks", [0, None])
@pytest.mark.parametrize(
    "build", [lambda: models.gpt2().step, lambda: lambda: nn.Sequential(LosesValue())(X)],
    ids=["causal mask of -inf", "module ends non-finite"],
)  # fmt: skip
def test_a_session_dispatches_no_op_of_its_own(build, max_checks, tmp_path):
    step = build()
    step()  # what torch does once a process
    alone, outside, inside, session = seen_around_and_inside(step, tmp_path, max_checks=max_checks)
    assert outside == inside == alone
    assert session.coverage.seen == len(alone)
    assert session.coverage.adds_up


def test_fake_tensors_inside_are_asked_nothing(tmp_path):
    def step():
        with FakeTensorMode():
            (torch.ones(3, 3).exp() @ torch.ones(3, 3)).sum()

    step()
    alone, outside, inside, session = seen_around_and_inside(step, tmp_path)
    assert outside == inside == alone
    assert session.coverage.errors == 0


def test_higher_order_ops_are_counted_and_do_not_break_the_step(tmp_path):
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        out = torch.cond(torch.tensor(True), torch.sin, torch.cos, (X,))
    assert torch.equal(out, X.sin())
    assert session.coverage.skipped[SkipReason.INSIDE_COMPILED_REGION] == 1
    assert session.verdict is Verdict.INCONCLUSIVE
    assert session.coverage.adds_up


def test_a_checked_tensor_can_be_resized_as_before(tmp_path):
    """FSDP2 frees what it gathered by resizing; a NumPy view taken by .numpy() forbids that."""
    with opcheck.check(log_dir=tmp_path, quiet=True, max_checks=None) as session:
        tensors = [X.clone(), X.bfloat16(), X * 2, torch.nn.functional.gelu(X), *X.sort()]
        tensors[0].add_(1)
    assert session.coverage.checked >= 4
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)


def test_reference_work_is_outside_of_autograd_autocast_and_modes():
    weight = torch.ones(3, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), EmptyMode():
        with outside_everything():
            inside = weight @ weight
            assert not active_modes()
        outside = weight @ weight
        assert len(active_modes()) == 1
    assert (inside.dtype, inside.requires_grad) == (torch.float32, False)
    assert (outside.dtype, outside.requires_grad) == (torch.bfloat16, True)


# ---- a module that is run again, because its outputs turned non-finite ----


class Meter:
    def __init__(self):
        self.count = 0


class WithState(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("batches", torch.zeros(()))
        self.calls = 0
        self.history, self.recent, self.kinds = [], deque(maxlen=9), {"deep": [0]}
        self.counter, self.meter = Counter(), Meter()

    def forward(self, x):
        self.calls += 1
        self.batches += 1
        self.history.append(1)
        self.recent.append(2)
        self.kinds["deep"][0] += 1
        self.counter["x"] += 1
        self.meter.count += 1
        self.drawn = random.random(), np.random.rand()  # noqa: NPY002 - the user's generator
        return (x - x + 1e-10).rsqrt()


def test_a_module_that_is_run_again_does_not_notice(tmp_path):
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the user's generator
    expected = WithState()
    expected(X.half())
    after = random.random(), np.random.rand()  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    actual = WithState()
    with opcheck.check(actual, log_dir=tmp_path, quiet=True) as session:
        actual(X.half())
    assert (random.random(), np.random.rand()) == after  # noqa: NPY002
    assert session.verdict is Verdict.FAIL  # it was run again: float64 is finite there
    for name in ("calls", "history", "recent", "kinds", "counter", "drawn"):
        assert getattr(actual, name) == getattr(expected, name), name
    assert actual.meter.count == 1
    assert actual.batches.item() == 1
    assert actual.batches._version == expected.batches._version


class WritesOutside(nn.Module):
    def __init__(self):
        super().__init__()
        self.cache = [torch.zeros(4, 6)]  # neither parameter nor buffer

    def forward(self, x):
        self.cache[0].add_(1)
        return (x - x + 1e-10).rsqrt()


def test_a_module_that_writes_to_foreign_memory_is_not_run_again(tmp_path):
    net = WritesOutside()
    with opcheck.check(net, log_dir=tmp_path, quiet=True) as session:
        net(X.half())
    assert net.cache[0].eq(1).all()
    assert net.cache[0]._version == 1
    assert session.verdict is Verdict.PASS
    notes = [note for record in session.records for note in record.notes]
    assert any("cannot be run again" in note and "aten.add_.Tensor" in note for note in notes)


def test_ops_that_the_dispatcher_does_not_know_have_traits():
    """A fake tensor asked for its device dispatches `prim::device`, which only TorchScript has."""
    from opcheck.calls import traits_of

    assert traits_of(torch.ops.prim.device.default).name == "prim.device.default"
