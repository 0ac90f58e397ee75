"""Results that comparisons are known to let pass, through each way of asking, to its verdict.

The rule alone is tested in `test_verdicts.py`. Here the wrong result comes out of a kernel, of
compiled code, or of a second implementation, and the verdict is what a user is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opcheck
from modulecheck import CompareResult, PrecisionChecker, TensorChecker
from modulecheck.cli import main as modulecheck_main
from opcheck import Verdict
from opcheck.cli import main as opcheck_main
from tests.compiled import DYNAMO_WARNS, explain
from tests.faults import planted
from tests.registering import enabled, registered

pytestmark = DYNAMO_WARNS
INF, NAN = math.inf, math.nan


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def with_one(tensor: Tensor, place: int, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[place] = value
    return changed


def softmax_of_many() -> Tensor:
    return torch.softmax(normal(4, 10_000), 1).half()


def off_by_a_little(size: int) -> tuple[Tensor, Tensor]:
    right = normal(size)
    return right, with_one(right, 123_456, right[123_456].item() + 0.09)


def every_200th_is_garbage() -> tuple[Tensor, Tensor]:
    right = normal(10_000)
    wrong = right.clone()
    wrong[::200] = 7.0
    return right, wrong


def rows_twice() -> tuple[Tensor, Tensor]:
    right = normal(64, 32)
    wrong = right.clone()
    wrong[2:4] = right[:2]
    return right, wrong


FAULTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "Inf of the other sign": lambda: (torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0])),
    "NaN for Inf": lambda: (torch.tensor([INF, 1.0]), torch.tensor([NAN, 1.0])),
    "one NaN in 200,000": lambda: (normal(200_000), with_one(normal(200_000), 777, NAN)),
    "one Inf in 200,000": lambda: (normal(200_000), with_one(normal(200_000), 777, INF)),
    "conjugated": lambda: (torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([1 - 2j, 3 + 1j])),
    "2^40 + 1 for 2^40": lambda: (torch.tensor([2**40, 1]), torch.tensor([2**40 + 1, 1])),
    "10001 for 10000": lambda: (torch.tensor([10_000, 1]), torch.tensor([10_001, 1])),
    "float16 for float64": lambda: (torch.ones(3).double(), torch.ones(3).half()),
    "no softmax at all": lambda: (softmax_of_many(), torch.zeros(4, 10_000).half()),
    "5e-4 for a scalar 0": lambda: (torch.tensor(0.0), torch.tensor(5e-4)),
    "1e-4 for 9e-4": lambda: (torch.full((8,), 9e-4), torch.full((8,), 1e-4)),
    "0 for values of 9e-4": lambda: (normal(1000, scale=9e-4), torch.zeros(1000)),
    "one of a million off by 0.09": lambda: off_by_a_little(1_000_000),
    "half a percent garbage": every_200th_is_garbage,
    "flipped": lambda: (normal(64, 32), normal(64, 32).flip(0)),
    "other sign": lambda: (normal(64, 32), -normal(64, 32)),
    "rows twice": rows_twice,
}
each_fault = pytest.mark.parametrize("name", FAULTS)


def times_one(tensor: Tensor) -> Tensor:
    return tensor * 1


def kernel_giving(result: Tensor) -> Callable[..., Any]:
    """What `planted` makes of the kernel of a product: another result for it."""
    return lambda original: lambda *args: result.clone()


# ---- opcheck ------------------------------------------------------------------------------------


@each_fault
def test_a_kernel_that_gives_it_fails_in_a_session_and_its_log(name: str, tmp_path: Path) -> None:
    right, wrong = FAULTS[name]()
    with (
        planted("aten.mul.Tensor", kernel_giving(wrong)),
        opcheck.check(log_dir=tmp_path, quiet=True) as session,
    ):
        times_one(right)
    assert session.verdict is Verdict.FAIL
    assert [record.op for record in session.failures] == ["aten.mul.Tensor"]
    assert opcheck_main(["review", str(tmp_path)]) == 1


@each_fault
def test_the_right_result_passes_in_a_session(name: str, tmp_path: Path) -> None:
    right, _ = FAULTS[name]()
    with (
        planted("aten.mul.Tensor", kernel_giving(right)),
        opcheck.check(log_dir=tmp_path, quiet=True) as session,
    ):
        times_one(right)
    assert session.failures == []
    assert session.verdict is Verdict.PASS


@each_fault
@pytest.mark.parametrize("criterion", ["calibrated", "allclose"])
def test_a_registered_kernel_that_gives_it_fails(name: str, criterion: str, tmp_path: Path) -> None:
    right, wrong = FAULTS[name]()
    log = tmp_path / "kernels.log"
    for result, fails in ((right, False), (wrong, True)):
        kernel = ("mul.Tensor", lambda x, y, result=result: result.clone())
        with registered(kernel), enabled(path=log, criterion=criterion):
            times_one(right)
        coverage = opcheck.coverage()
        assert coverage.checked == 1
        # the documented tolerance of 1e-2 for 16-bit numbers is larger than such a softmax
        hidden = criterion == "allclose" and name == "no softmax at all"
        assert coverage.failed == (fails and not hidden)


# ---- modulecheck --------------------------------------------------------------------------------


class TimesOne(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return times_one(tensor)


def compiled_to(result: Tensor, inputs: Tensor, *, single_pass: bool) -> CompareResult:
    """A module whose compiled code gives `result`."""

    def backend(graph: Any, examples: Any) -> Any:
        return lambda *args: [result.clone()]

    model = nn.Sequential(TimesOne())
    checker = PrecisionChecker(backend=backend, single_pass=single_pass)
    checker.wrap(model[0])

    def step(model: nn.Module) -> None:
        with torch.no_grad():
            model(inputs)

    return checker.compare(step, model)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("single_pass", [True, False], ids=["single-pass", "two-pass"])
@each_fault
def test_compiled_code_that_gives_it_fails(name: str, single_pass: bool) -> None:
    right, wrong = FAULTS[name]()
    result = compiled_to(wrong, right, single_pass=single_pass)
    assert result.verdict is Verdict.FAIL, explain(result)
    assert result.suspects == [("0", "forward")]
    assert not result.all_pass
    result = compiled_to(right, right, single_pass=single_pass)
    assert result.suspects == []
    assert all(item.judged is Verdict.PASS for item in result.diffs[0].fwd_output)


@each_fault
def test_a_second_implementation_that_gives_it_differs(name: str, tmp_path: Path) -> None:
    right, wrong = FAULTS[name]()
    for other, agrees in ((right, True), (wrong, False)):
        checker = TensorChecker(quiet=True)
        checker.register_tensor("out", right, side="torch")
        checker.register_tensor("out", other, side="port")
        assert checker.check_equal() is agrees
        # two precisions are what this criterion is for, and these values are the same in both
        assert checker.check("calibrated") is (agrees or name == "float16 for float64")
    files = [str(tmp_path / "torch.npz"), str(tmp_path / "port.npz")]
    for file, values in zip(files, (right, wrong), strict=True):
        checker = TensorChecker(quiet=True)
        checker.register_tensor("out", values)
        checker.save(file)
    assert modulecheck_main(["tensors", *files]) == 1


# ---- what crashes, is missing or is empty is no PASS --------------------------------------------


class Longer(nn.Module):
    """Gives two tensors in eager, and three where it is compiled."""

    def forward(self, tensor: Tensor) -> tuple[Tensor, ...]:
        two = tensor + 1, tensor + 2
        return (*two, tensor + 3) if torch.compiler.is_compiling() else two


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("single_pass", [True, False], ids=["single-pass", "two-pass"])
def test_an_output_that_only_compiled_code_has_fails(single_pass: bool) -> None:
    model = nn.Sequential(Longer())
    checker = PrecisionChecker(single_pass=single_pass)
    checker.wrap(model[0])
    result = checker.compare(lambda model: model(torch.ones(3))[0].sum(), model)
    assert result.verdict is Verdict.FAIL
    assert "has 3 parts" in explain(result)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("single_pass", [True, False], ids=["single-pass", "two-pass"])
def test_a_compiler_that_crashes_is_the_users_to_see(single_pass: bool) -> None:
    def backend(graph: Any, examples: Any) -> Any:
        raise ZeroDivisionError("no code today")

    def compared() -> CompareResult:
        model = nn.Sequential(TimesOne())
        checker = PrecisionChecker(backend=backend, single_pass=single_pass)
        checker.wrap(model[0])
        return checker.compare(lambda model: model(torch.ones(3)).sum(), model)

    with pytest.raises(Exception, match="no code today"):
        compared()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=True):  # then Dynamo goes on in eager
        result = compared()
    assert result.verdict is Verdict.INCONCLUSIVE, explain(result)
    assert not result.all_pass


def test_a_diff_says_what_one_run_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, calls in (("a", 3), ("b", 0), ("nothing", None)):
        with opcheck.check(log_dir=tmp_path / name, quiet=True):
            values = torch.arange(3.0) if calls is not None else torch.empty(3)
            for _ in range(calls or 0):
                torch.softmax(values, 0)
            if calls is not None:
                values.exp()
    a, b, nothing = (str(tmp_path / name) for name in ("a", "b", "nothing"))
    assert opcheck_main(["diff", a, a]) == 0
    assert "PASS: nothing fails in B that did not in A\n" in capsys.readouterr().out
    assert opcheck_main(["diff", a, b]) == 0
    said = capsys.readouterr().out
    assert "2 calls were checked in both, 3 in A only" in said.partition("\n")[0]
    assert opcheck_main(["diff", a, nothing]) == 3


def test_empty_tensors_are_seen_and_reported(tmp_path: Path) -> None:
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        torch.softmax(torch.ones(0, 4), 1)
        torch.ones(2, 0) @ torch.ones(0, 3)
    assert session.failures == []
    assert session.coverage.errors == 0
    assert session.coverage.adds_up
    assert "calls seen" in session.report()


def test_one_session_leaves_no_settings_to_the_next(tmp_path: Path) -> None:
    with opcheck.check(
        log_dir=tmp_path, quiet=True, rtol=1.0, max_checks=0, include="nothing", blame=True
    ):
        torch.ones(3) * 2
    with (
        planted("aten.mul.Tensor", kernel_giving(torch.full((3,), 2.001))),
        opcheck.check(log_dir=tmp_path / "next", quiet=True) as session,
    ):
        torch.ones(3) * 2
    assert session.verdict is Verdict.FAIL
    assert session.failures[0].criterion == "calibrated"


def test_random_ops_and_dropout_in_training_pass(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    with opcheck.check(model, log_dir=tmp_path, quiet=True, max_checks=None) as session:
        hidden = torch.randn_like(torch.ones(8, 4))
        model(hidden).sum().backward()
        torch.native_dropout(hidden, 0.5, True)
    assert session.verdict is Verdict.PASS
    assert session.coverage.skipped[opcheck.SkipReason.RANDOM] >= 2
