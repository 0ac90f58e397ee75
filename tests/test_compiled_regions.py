"""Compiled code stays compiled, is counted, and never looks as if it had been checked."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import opcheck
from opcheck import SkipReason, Verdict
from tests.test_resources import run_python

# torch warns of itself as it imports inductor
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

X = torch.linspace(-2, 2, 32).reshape(4, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.gelu(self.linear(x)).sin()


def model():
    torch.manual_seed(0)
    torch._dynamo.reset()
    return nn.Sequential(Block(), Block())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", "inside"])
def test_backends_that_dispatch_are_seen_in_full(backend, when, tmp_path):
    net = model()
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    if when == "before":
        compiled(X)
    with opcheck.check(net, log_dir=tmp_path, quiet=True) as session:
        compiled(X).sum().backward()
    assert session.verdict is Verdict.PASS
    assert SkipReason.INSIDE_COMPILED_REGION not in session.coverage.skipped
    assert {"aten.addmm.default", "aten.gelu_backward.default"} <= {r.op for r in session.records}
    assert session.coverage.adds_up


@pytest.mark.slow
def test_inductor_code_is_counted_and_inconclusive_however_often_it_is_checked(tmp_path):
    net = model()
    compiled = torch.compile(net)
    compiled(X).sum().backward()
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    code = sys.modules["torch._inductor.output_code"].CompiledFxGraph
    call = code.__call__
    seen = set()
    for max_checks in (0, 10, None):
        net.zero_grad()
        with opcheck.check(net, log_dir=tmp_path, quiet=True, max_checks=max_checks) as session:
            compiled(X).sum().backward()
        assert session.verdict is Verdict.INCONCLUSIVE
        assert session.coverage.skipped[SkipReason.INSIDE_COMPILED_REGION] == 2
        assert session.coverage.adds_up
        assert "2 compiled regions" in session.report()
        assert all(map(torch.equal, gradients, [p.grad for p in net.parameters()]))
        seen.add(session.coverage.seen)
    assert len(seen) == 1
    assert code.__call__ is call
    phases = {row.phase for row in session.coverage.calls if row.op.startswith("inductor")}
    assert phases == {"forward", "backward"}


@pytest.mark.slow
def test_fullgraph_works_for_a_model_compiled_inside(tmp_path):
    net = model()
    with opcheck.check(net, log_dir=tmp_path, quiet=True) as session:
        compiled = torch.compile(net, fullgraph=True)
        compiled(X).sum().backward()
    assert session.coverage.skipped[SkipReason.INSIDE_COMPILED_REGION] == 2
    compiled(X)


@pytest.mark.slow
def test_regions_that_dispatch_as_one_op_are_counted_once(tmp_path):
    net = model()
    with torch._inductor.config.patch(wrap_inductor_compiled_regions=True):
        compiled = torch.compile(net)
        with opcheck.check(net, log_dir=tmp_path, quiet=True) as session:
            compiled(X).sum().backward()
    assert session.coverage.skipped[SkipReason.INSIDE_COMPILED_REGION] == 2


FIRST = """
import sys, torch, opcheck
assert "torch._inductor.output_code" not in sys.modules
finders = list(sys.meta_path)
with opcheck.check(log_dir=sys.argv[1], quiet=True) as session:
    double = torch.compile(lambda x: x.sin() * 2 + x.cos())
    double(torch.ones(4))
print(session.verdict, session.coverage.skipped)
from torch._inductor.output_code import CompiledFxGraph
print(CompiledFxGraph.__call__.__module__, hasattr(CompiledFxGraph.__call__, "__wrapped__"))
print(sys.meta_path == finders, double(torch.ones(4)).shape)
"""


@pytest.mark.slow
def test_inductor_first_imported_inside_the_session_is_counted(tmp_path):
    done = run_python(FIRST, tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("INCONCLUSIVE"), done.stderr
    assert "inside_compiled_region" in lines[0]
    assert lines[1:] == ["torch._inductor.output_code False", "True torch.Size([4])"]


def test_torchs_warning_about_global_hooks_stays_away_and_comes_back(tmp_path):
    import warnings

    before = list(warnings.filters)
    net = model()
    compiled = torch.compile(net, backend="eager")
    with opcheck.check(net, log_dir=tmp_path, quiet=True):
        compiled(X)  # warnings are errors in these tests
    assert warnings.filters == before
