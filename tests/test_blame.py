"""With `blame=True` each record says what was born in the call and what it inherited."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opcheck
from opcheck import Verdict
from opcheck.cli import main
from opcheck.mirrors import Mirrors
from tests import faults, models
from tests.step_equality import assert_same_step

X = torch.linspace(-2, 2, 24).reshape(4, 6)
adamw = partial(torch.optim.AdamW, lr=1e-3)


def blamed(step: Callable[[], Any], tmp_path, model: nn.Module | None = None, **options: Any):
    """Run a step under blame; return the session."""
    with opcheck.check(model, log_dir=tmp_path, quiet=True, blame=True, **options) as session:
        step()
    assert session._pipeline.own_problem == ""
    assert session.coverage.adds_up
    assert session.coverage.errors == 0
    return session


def last(session: Any, op: str) -> Any:
    return [record for record in session.records if record.op.startswith(f"aten.{op}")][-1]


@contextmanager
def gelu_wrong_in_call(number: int, relative: float = 1e-3) -> Iterator[faults.Planted]:
    """One layer's kernel is wrong: the n-th call of gelu gives a result that is too large."""
    calls = 0

    def make_wrong(original):
        def gelu(*args: Any, **kwargs: Any) -> Tensor:
            nonlocal calls
            calls += 1
            out = original(*args, **kwargs)
            return torch.lerp(torch.zeros_like(out), out, 1 + relative) if calls == number else out

        return gelu

    with faults.planted("aten.gelu.default", make_wrong) as fault:
        yield fault


# ---- the figures ----


def test_origin_in_a_deep_model_is_named_exactly(tmp_path):
    workload = models.transformer(layers=12)
    with gelu_wrong_in_call(8):
        session = blamed(workload.loss, tmp_path, workload.model)
    assert [(r.op, r.module) for r in session.failures] == [
        ("aten.gelu.default", "blocks.7.mlp.act")
    ]
    origin = session.failures[0]
    assert origin.blame.word == "born"
    assert origin.blame.born == pytest.approx(1e-3, rel=0.05)
    later = [r for r in session.records if r.index > origin.index and r.blame]
    assert all(record.blame.born < 1e-6 for record in later)
    assert (
        last(session, "mse_loss" if workload.name == "mlp" else "_log_softmax").blame.total > 1e-5
    )
    before = [r for r in session.records if r.index < origin.index and r.blame]
    assert max(record.blame.total for record in before) < 1e-6


def test_deep_bf16_model_without_a_fault_names_no_origin(tmp_path):
    workload = models.mlp(layers=16, dtype=torch.bfloat16)
    session = blamed(workload.step, tmp_path, workload.model)
    assert session.verdict is Verdict.PASS
    words = {record.blame.word for record in session.records if record.blame}
    assert "born" not in words
    forward = [r for r in session.records if r.phase == "forward" and r.op == "aten.add.Tensor"]
    assert forward[-1].blame.total > forward[0].blame.total > 0  # rounding adds up along depth


def test_cancellation_is_called_amplified(tmp_path):
    def step():
        x = torch.linspace(1, 2, 64)
        return (x * 1.1 + 1e4) - 1e4

    session = blamed(step, tmp_path)
    record = last(session, "sub")
    assert record.verdict is Verdict.PASS
    assert record.blame.word == "amplified"
    assert record.blame.inherited > 100 * record.blame.inputs > 0
    assert record.blame.born < record.blame.inherited


def test_statistics_kept_for_backward_are_not_measured(tmp_path):
    """The mean of centred rows is rounding alone: it has no right digit, and nobody minds."""

    def step():
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 1.1
        x = x - x.mean(-1, keepdim=True)
        return nn.functional.layer_norm(x, (64,))

    session = blamed(step, tmp_path)
    assert last(session, "native_layer_norm").blame.total < 1e-6
    assert last(session, "native_layer_norm").blame.word != "amplified"


# ---- what the chain follows ----

PATHS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.t().reshape(-1)[1:],
    "in place on a view": lambda x: _in_place(x.clone(), lambda y: y[1:].mul_(1.0)),
    "copy": lambda x: torch.empty_like(x).copy_(x),
    "copy into a part": lambda x: _in_place(torch.zeros(8, 6), lambda y: y[::2].copy_(x))[::2],
    "out variant": lambda x: torch.mul(x, 1.0, out=torch.empty_like(x)),
    "out variant that resizes": lambda x: torch.mul(x, 1.0, out=torch.empty(0)),
    "foreach": lambda x: torch._foreach_mul([x, x], 1.0)[1],
    "foreach in place": lambda x: _in_place([x.clone()], lambda y: torch._foreach_mul_(y, 1.0))[0],
    "foreach copy": lambda x: _in_place(
        [torch.zeros(4, 6)], lambda y: torch._foreach_copy_(y, [x])
    )[0],
    "cat and split": lambda x: torch.cat([x, x]).split(4)[1],
    "indexing": lambda x: x[torch.tensor([3, 0, 2, 1])],
    "cast up": lambda x: x.double().float(),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x).conj() * 1.0)[..., 0],
    "set_": lambda x: torch.empty(0).set_(x),
    "detach": lambda x: x.detach().data,
    "storage resized": lambda x: _in_place(x.clone(), lambda y: y.resize_(4, 6)),
}


def _in_place(value: Any, change: Callable[[Any], Any]) -> Any:
    change(value)
    return value


@pytest.mark.parametrize("path", PATHS)
def test_error_arrives_by_way_of(path, tmp_path):
    """A wrong gelu, then the path, then a sum of squares that has to know of it."""
    with faults.gelu_off_by(1e-3):
        session = blamed(
            lambda: PATHS[path](nn.functional.gelu(X + 2.0)).square().sum(), tmp_path, max_checks=99
        )
    found = last(session, "sum").blame
    assert found.inherited == pytest.approx(2e-3, rel=0.05)
    assert found.total == pytest.approx(2e-3, rel=0.05)
    assert found.born < 1e-6
    assert not [name for name in session.coverage.shadow if name.startswith("restarted")]


def test_unchecked_calls_are_followed(tmp_path):
    with faults.gelu_off_by(1e-3):
        session = blamed(
            lambda: nn.functional.gelu(X + 2.0).mul(1.0).add(0.0).sum(), tmp_path, include="sum"
        )
    assert {record.op for record in session.records} == {"aten.sum.default"}
    assert session.records[0].blame.inherited == pytest.approx(1e-3, rel=0.05)


def test_backward_and_optimizer_inherit(tmp_path):
    workload = models.mlp(layers=2)
    optimizer = adamw(workload.model.parameters())
    with gelu_wrong_in_call(1):
        session = blamed(lambda: workload.step(optimizer), tmp_path, workload.model)
    assert [record.module for record in session.failures] == ["1"]
    for phase in ("backward", "optimizer"):
        found = [r for r in session.records if r.phase == phase and r.blame]
        assert max(record.blame.total for record in found) > 1e-5
        assert max(record.blame.born for record in found) < 1e-5


def test_cast_of_autocast_is_an_error_of_the_chain(tmp_path):
    workload = models.mlp(layers=2).with_autocast(torch.bfloat16)
    session = blamed(workload.loss, tmp_path, workload.model)
    first = session.records[0]
    assert first.op == "aten.addmm.default"
    assert first.blame.inputs > 1e-4  # weights and inputs were rounded to bfloat16
    assert first.blame.inherited > 1e-4


def test_random_op_begins_the_chain_again_and_is_counted(tmp_path):
    def step():
        wrong = nn.functional.gelu(X + 2.0)
        return wrong.normal_().sum()

    with faults.gelu_off_by(1e-3):
        session = blamed(step, tmp_path)
    assert last(session, "sum").blame.inherited == 0.0
    assert session.coverage.shadow["restarted: random"] == 1


def test_dropout_keeps_the_chain(tmp_path):
    def step():
        wrong = nn.functional.gelu(X + 2.0)
        return (
            nn.functional.dropout(wrong, 0.25).sum()
            + torch.native_dropout(wrong, 0.25, True)[0].sum()
        )

    with faults.gelu_off_by(1e-3):
        session = blamed(step, tmp_path)
    found = [record.blame for record in session.records if record.op == "aten.sum.default"]
    assert [blame.inherited for blame in found] == pytest.approx([1e-3, 1e-3], rel=0.05)
    assert not [name for name in session.coverage.shadow if name.startswith("restarted")]


def test_compiled_region_begins_the_chain_again(tmp_path):
    def step():
        wrong = nn.functional.gelu(X + 2.0)
        return torch.cond(torch.tensor(True), torch.sin, torch.cos, (wrong,)).sum()

    with faults.gelu_off_by(1e-3):
        session = blamed(step, tmp_path)
    assert last(session, "sum").blame.inherited == 0.0
    assert session.coverage.shadow["restarted: a compiled region or higher-order op ran"] == 1


def test_too_large_tensors_begin_the_chain_again(tmp_path):
    def step():
        return nn.functional.gelu(X + 2.0).repeat(10, 1).sum()

    with faults.gelu_off_by(1e-3):
        session = blamed(step, tmp_path, max_numel=100)
    assert session.coverage.shadow["restarted: too_large"] == 1


def test_eigenvectors_of_other_sign_are_no_error(tmp_path):
    session = blamed(lambda: torch.linalg.eigh((X @ X.t()) * 1.1)[1].sum(), tmp_path)
    assert session.verdict is Verdict.PASS
    assert last(session, "sum").blame.total < 1e-5
    assert session.coverage.shadow["restarted: results that are not unique"] == 1


# ---- the step is as it was, and memory is bounded ----


@pytest.mark.parametrize(
    "build",
    [
        partial(models.transformer, dropout=0.1),
        partial(models.mlp, dtype=torch.bfloat16),
        lambda: models.mlp(dropout=0.2).with_autocast(torch.bfloat16),
        models.resnet,
        models.lstm,
    ],
    ids=["transformer", "bf16", "autocast", "resnet", "lstm"],
)
def test_step_is_bit_for_bit_the_same(build, tmp_path):
    session = assert_same_step(
        build,
        lambda model: opcheck.check(model, log_dir=tmp_path, quiet=True, blame=True),
        make_optimizer=adamw,
        num_steps=2,
    )
    assert session.coverage.shadow["followed"] > 50
    assert session._pipeline.own_problem == ""


def test_memory_bound_is_kept_and_said(tmp_path):
    workload = models.transformer(layers=4)
    with gelu_wrong_in_call(2):
        session = blamed(workload.step, tmp_path, workload.model, max_shadow_bytes=40_000)
    shadow = session.coverage.shadow
    assert shadow["peak bytes"] <= shadow["limit bytes"] == 40_000
    assert shadow["restarted: no memory"] > 0
    assert [record.module for record in session.failures] == ["blocks.1.mlp.act"]


def test_mirrors_keep_no_tensor_alive_and_die_with_it():
    mirrors = Mirrors(1 << 20)
    tensor = torch.ones(1000)
    alive = weakref.ref(tensor.untyped_storage())
    mirrors.write(tensor, torch.full((1000,), 2.0, dtype=torch.float64))
    assert mirrors.get(tensor[3:5]).tolist() == [2.0, 2.0]
    tensor = torch.ones(3)
    gc.collect()
    assert alive() is None
    for _ in range(40):
        mirrors.ensure(torch.ones(3))
    assert mirrors.num_bytes < 8000


def test_nothing_is_held_after_the_session(tmp_path):
    session = blamed(lambda: nn.functional.gelu(X).sum(), tmp_path)
    assert len(session._pipeline._followers._shadow.mirrors) == 0


def test_log_carries_the_figures(tmp_path):
    with faults.gelu_off_by(1e-3):
        session = blamed(lambda: nn.functional.gelu(X + 2.0).sum(), tmp_path)
    run = opcheck.load_run(tmp_path)
    assert [record.blame for record in run.records] == [r.blame for r in session.records]
    assert run.coverage.shadow == session.coverage.shadow
    text = opcheck.load_run(tmp_path / "precision.log")
    assert text.records[0].blame.word == "born"
    assert text.records[0].blame.born == pytest.approx(1e-3, rel=0.05)


def test_run_command_takes_blame_and_repeat(tmp_path, capsys):
    script = tmp_path / "step.py"
    script.write_text("import torch\ntorch.nn.functional.gelu(torch.ones(3))\n")
    assert main(["run", "--blame", "--repeat", "--log-dir", str(tmp_path), str(script)]) == 0
    text = capsys.readouterr().out
    assert "errors are rms errors" in text
    assert "run twice on the same inputs" in text


def test_without_blame_nothing_is_carried(tmp_path):
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        nn.functional.gelu(X).sum()
    assert {record.blame for record in session.records} == {None}
    assert session.coverage.shadow == {}


def test_report_has_the_blame_and_no_line_beyond_the_width(tmp_path):
    workload = models.transformer(layers=2)
    with gelu_wrong_in_call(2):
        session = blamed(workload.step, tmp_path, workload.model)
    text = session.report(width=80)
    assert "origin     gelu in blocks.1.mlp.act, forward" in text
    text = text[: text.index("\nnext\n")]  # commands are not cut
    assert max(map(len, text.splitlines())) <= 80
