"""Conjugate and negative bits within a checked step are those of the step without a checker."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID251 - a mode of the user's

import modulecheck
import opcheck
from modulecheck import PrecisionChecker
from modulecheck.report import report_lines
from opcheck.modes import Mode
from opcheck.records import Verdict
from tests.compiled import DYNAMO_WARNS
from tests.faults import planted, spoiled
from tests.step_equality import same_bits

pytestmark = DYNAMO_WARNS

LAZY = ("Conjugate", "Negative")
is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded  # noqa: TID251 - from outside


def matrix() -> Tensor:
    return torch.randn(5, 5, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))


CALLS = {
    "pinv": torch.linalg.pinv,
    "pinv of a conjugate": lambda a: torch.linalg.pinv(a.mH),
    "negative bits": lambda a: torch.linalg.pinv(a.conj().imag),
    "mv of a conjugate": lambda a: torch.mv(a.mH, a[0].conj()),
    "eigvals": torch.linalg.eigvals,
    "matrix_rank": torch.linalg.matrix_rank,
    "solve": lambda a: torch.linalg.solve(a.mH, a.conj()),
    "copy of a conjugate": lambda a: a.conj().clone(),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_without_a_mode(name: str, needs_grad: bool, tmp_path: Path) -> None:
    given = matrix().requires_grad_(needs_grad)
    plain = CALLS[name](given)
    with opcheck.check(log_dir=tmp_path, quiet=True, max_checks=None) as session:
        actual = CALLS[name](given)
    assert same_bits(actual.detach(), plain.detach())
    assert actual.is_conj() == plain.is_conj()
    assert session.verdict is not Verdict.FAIL, session.report()
    assert session.coverage.errors == 0


def test_a_wrong_pseudo_inverse_is_found(tmp_path: Path) -> None:
    with (
        planted("aten.linalg_pinv.atol_rtol_tensor", spoiled(lambda y: y.mul_(1.01))),
        opcheck.check(log_dir=tmp_path, quiet=True) as session,
    ):
        torch.linalg.pinv(matrix())
    assert session.verdict is Verdict.FAIL


def test_reference_has_them_where_kernels_are_overridden(tmp_path: Path) -> None:
    with (
        planted("aten.exp.default", spoiled(lambda y: y)),  # it runs through a mode of its own then
        opcheck.check(log_dir=tmp_path, quiet=True) as session,
    ):
        torch.linalg.pinv(matrix())
    assert session.verdict is Verdict.PASS, session.report()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_module_that_runs_again_has_them(backend: str) -> None:
    class Inverse(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            return torch.linalg.pinv(a)

    module, given = Inverse(), matrix()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend)(given)
    # torch 2.13 compiles it wrongly where it traces: conjugate bits are lost there as well
    is_right = torch.allclose(compiled, torch.linalg.pinv(given), rtol=1e-3)
    torch._dynamo.reset()
    checker = PrecisionChecker(backend=backend, single_pass=True)
    checker.wrap(module)
    result = checker.compare(lambda model: model(given).abs().sum(), module)
    lines = list(report_lines(result))
    assert result.verdict is (Verdict.PASS if is_right else Verdict.FAIL), lines
    assert not any("eager is the wrong side" in line for line in lines)


def test_every_mode_of_ours_has_them() -> None:
    found = [
        item
        for package in (opcheck, modulecheck)
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        if not info.name.endswith("__main__")
        for item in vars(importlib.import_module(info.name)).values()
        if isinstance(item, type)
        and issubclass(item, TorchDispatchMode)
        and item.__module__ == info.name
    ]
    assert len(found) > 10
    assert [item for item in found if not issubclass(item, Mode)] == []


class Asks(TorchDispatchMode):
    """A mode of the user's above ours: what it sees is what torch gives to it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.seen.append(tuple(map(is_excluded, LAZY)))
        return out


def test_keys_are_as_before_in_the_handler_of_another_mode(tmp_path: Path) -> None:
    with Asks() as alone:
        matrix().exp()
    with opcheck.check(log_dir=tmp_path, quiet=True), Asks() as beside:
        matrix().exp()
    assert beside.seen == alone.seen
