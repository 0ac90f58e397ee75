"""The drill-down of a whole result: order, limits, what could not be followed, files."""

from __future__ import annotations

import io
import math
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modulecheck import CompareResult, ModuleDiff, TensorDiff
from modulecheck.binding import bound, named_object
from modulecheck.budget import Budget
from modulecheck.culprit import Culprit
from modulecheck.drilldown import CRASHED, NOT_REACHED, NOT_RECORDED, drill, status_of
from modulecheck.progress import telling
from modulecheck.recording import RecordedCall
from modulecheck.report import drilldown_lines
from modulecheck.snapshot import Snapshot
from opcheck import ArgumentError, ArgumentTypeError, Metrics, Verdict
from tests.step_equality import active_modes

WRONG = TensorDiff(1.0, 1.0, 1.0, False, (2,), Verdict.FAIL, reason="it is wrong")


class Scale(nn.Module):
    """A module with a parameter and a buffer."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.factor + self.shift


class Net(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Scale(width) for width in widths or (2, 2, 3))


def failing(
    *phases: str, widths: Sequence[int] = (2, 2, 3), recorded: Any = None, backend: Any = "inductor"
) -> CompareResult:
    """A result in which each part failed in these phases."""
    model = Net(*widths)
    diffs = [
        ModuleDiff(
            f"parts.{place}",
            fwd_output=[WRONG] if "forward" in phases else None,
            grad_input=[WRONG] if "backward" in phases else None,
        )
        for place in range(len(widths))
    ]
    order = [diff.name for diff in reversed(diffs)]
    result = CompareResult(math.nan, 1.0, diffs, backward_order=order)
    keys = {"forward": ("output", 0), "backward": ("grad_input", 0)}
    for place, part in enumerate(model.parts):
        if recorded is not None and place not in recorded:
            continue
        given = (torch.ones(widths[place]),)
        snapshot = Snapshot.take(part, given, {}, cast_dtype=None)
        result.recordings.append(
            RecordedCall.of(
                f"parts.{place}", part, snapshot, failed=[keys[phase] for phase in phases],
                actual={}, backend=backend,
            )
        )  # fmt: skip
    return result


class Finder:
    """A `locate` that finds what it is told to, and notes what it was asked."""

    def __init__(self, action: Callable[[RecordedCall, Budget], Any] | None = None) -> None:
        self.asked: list[str] = []
        self.action = action

    def __call__(
        self, call: RecordedCall, *, budget: Budget, on_progress: Callable[[str], None]
    ) -> list[Culprit]:
        self.asked.append(call.name)
        on_progress("compiling with inductor")
        found = None if self.action is None else self.action(call, budget)
        if found is not None:
            return list(found)
        return [
            Culprit(module=f"{call.name}.act", phase=phase, stage="inductor", op="aten.erf.default")
            for phase in call.phases
        ]


def run(result: CompareResult, finder: Any, **options: Any) -> list[Culprit]:
    return drill(result, finder, budget=options.pop("budget", Budget()), **options)


def summary(culprits: list[Culprit]) -> list[tuple[str, str, str]]:
    return [(item.module, item.phase, item.stage) for item in culprits]


# ---- which calls, in which order ----------------------------------------------------------------


def test_every_suspect_is_followed_and_the_first_divergence_comes_first() -> None:
    result = failing("forward")
    culprits = run(result, Finder())
    assert summary(culprits) == [(f"parts.{n}.act", "forward", "inductor") for n in range(3)]
    assert result.culprits == culprits
    assert status_of(result) == 1


def test_backward_is_followed_in_the_order_of_the_backward() -> None:
    culprits = run(failing("backward"), Finder())
    assert [item.module for item in culprits] == ["parts.2.act", "parts.1.act", "parts.0.act"]


def test_call_that_failed_in_both_phases_is_run_once() -> None:
    finder = Finder()
    culprits = run(failing("forward", "backward"), finder)
    assert sorted(finder.asked) == ["parts.0", "parts.1", "parts.2"]
    assert [(item.module, item.phase) for item in culprits[:2]] == [
        ("parts.0.act", "forward"),
        ("parts.0.act", "backward"),
    ]


def test_one_of_each_kind_of_module_is_followed_before_its_equals() -> None:
    finder = Finder()
    culprits = run(failing("forward"), finder)
    assert finder.asked == ["parts.0", "parts.2", "parts.1"]  # 0 and 1 are equal blocks
    assert [item.module for item in culprits] == ["parts.0.act", "parts.1.act", "parts.2.act"]


def test_passing_result_has_no_culprits() -> None:
    diff = ModuleDiff("m", fwd_output=[TensorDiff(0, 0, 0, True, (1,))])
    result = CompareResult(math.nan, 1.0, [diff])
    assert run(result, Finder()) == []
    assert status_of(result) == 0
    assert list(drilldown_lines(result)) == []


# ---- never a clean bill -------------------------------------------------------------------------


def test_module_without_a_recording_is_said() -> None:
    result = failing("forward", recorded=[0, 2])
    culprits = run(result, Finder())
    assert summary(culprits)[1] == ("parts.1", "forward", NOT_RECORDED)
    assert not culprits[1].reproduced
    assert "was not recorded" in culprits[1].explanation


def test_nothing_recorded_at_all_is_inconclusive() -> None:
    result = failing("forward", recorded=[])
    assert {item.stage for item in run(result, Finder())} == {NOT_RECORDED}
    assert status_of(result) == 3


def test_nothing_found_in_a_call_is_not_reproduced() -> None:
    result = failing("forward")
    culprits = run(result, Finder(lambda call, budget: []))
    assert {item.stage for item in culprits} == {"not reproduced"}
    assert len(culprits) == 3
    assert status_of(result) == 3


def test_crash_in_one_call_is_said_and_the_others_are_followed() -> None:
    def crash(call: RecordedCall, budget: Budget) -> None:
        if call.name == "parts.0":
            raise RuntimeError("no such node")

    result = failing("forward")
    culprits = run(result, Finder(crash))
    assert culprits[0].stage == CRASHED
    assert "RuntimeError: no such node" in culprits[0].explanation
    assert "in crash" in culprits[0].not_reached  # the traceback
    assert [item.stage for item in culprits[1:]] == ["inductor", "inductor"]


def test_budget_that_is_used_up_is_said() -> None:
    def wait(call: RecordedCall, budget: Budget) -> None:
        budget._ends = 0.0  # as time passing

    result = failing("forward")
    culprits = run(result, Finder(wait))
    assert [item.stage for item in culprits] == ["inductor", NOT_REACHED, NOT_REACHED]
    assert "its time is used up" in culprits[1].explanation
    assert status_of(result) == 1


def test_interrupt_stops_and_returns_what_was_found() -> None:
    def interrupt(call: RecordedCall, budget: Budget) -> None:
        if call.name == "parts.2":
            raise KeyboardInterrupt

    result = failing("forward")
    finder = Finder(interrupt)
    culprits = run(result, finder)
    assert finder.asked == ["parts.0", "parts.2"]
    assert [item.stage for item in culprits] == ["inductor", NOT_REACHED, NOT_REACHED]
    assert "interrupted" in culprits[1].explanation
    assert "interrupted" in culprits[2].explanation


# ---- nothing is left behind ---------------------------------------------------------------------


def test_generators_and_modes_of_the_caller_are_as_before() -> None:
    from opcheck import check

    seen = []

    def draw(call: RecordedCall, budget: Budget) -> None:
        seen.append(active_modes())
        torch.randn(3)

    torch.manual_seed(0)
    before = torch.get_rng_state()
    with check(quiet=True, max_checks=0):
        run(failing("forward"), Finder(draw))
        assert len(active_modes()) == 1
    assert seen == [[], [], []]
    assert torch.equal(torch.get_rng_state(), before)


# ---- progress -----------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_one_line_that_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run(failing("forward"), Finder())
    text = terminal.getvalue()
    assert "\n" not in text
    assert "0/3" in text
    assert "2/3  0 s  parts.1 (forward): compiling with inductor" in text
    assert text.endswith("\r")
    assert not text.rpartition("\r")[0].rpartition("\r")[2].strip()
    assert max(map(len, text.split("\r"))) <= 100


def test_log_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    run(failing("forward"), Finder())
    assert capfd.readouterr() == ("", "")


def test_function_is_told_each_step() -> None:
    told: list[str] = []
    run(failing("backward", widths=[2]), Finder(), progress=told.append)
    assert told == [
        "parts.0 (backward): running it again",
        "parts.0 (backward): compiling with inductor",
    ]


def test_progress_of_another_type_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="progress"), telling("yes"):  # type: ignore[arg-type]
        pass


# ---- results from a file ------------------------------------------------------------------------


@pytest.fixture
def from_file(tmp_path: Path) -> Callable[..., CompareResult]:
    def load(*phases: str, **options: Any) -> CompareResult:
        failing(*(phases or ("forward",)), **options).save(tmp_path / "result.mc")
        return CompareResult.load(tmp_path / "result.mc")

    return load


def test_model_is_needed_and_found_by_name(from_file: Any) -> None:
    finder = Finder(lambda call, budget: seen.append(call))
    seen: list[RecordedCall] = []
    model = Net()
    for given in (model, lambda: model):
        run(from_file(), finder, model=given)
    assert {call.module for call in seen} == set(model.parts)
    with pytest.raises(ArgumentError, match=r"does not hold the code of tests.*:Scale.*--model"):
        run(from_file(), finder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(1, 1), "Linear has no module 'parts.0'"),
        (Net(5), "parameter 'factor' has shape \\(5,\\), the recorded one \\(2,\\)"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["other_model", "other_shape", "factory_raises"],
)
def test_model_that_does_not_fit_is_an_error(from_file: Any, model: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        run(from_file(), Finder(), model=model)


def test_module_of_another_class_or_with_other_parameters_is_an_error(from_file: Any) -> None:
    other = Net()
    other.parts[0] = nn.Linear(2, 2)  # type: ignore[assignment]
    with pytest.raises(ArgumentError, match="is a Linear, the recorded one was a Scale"):
        run(from_file(), Finder(), model=other)
    more = Net()
    more.parts[0].extra = nn.Parameter(torch.ones(1))
    with pytest.raises(ArgumentError, match="the recorded one has no parameter 'extra'"):
        run(from_file(), Finder(), model=more)


def test_model_that_is_no_model_is_a_type_error(from_file: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"expected a torch\.nn\.Module"):
        run(from_file(), Finder(), model=lambda: "model")


def test_backend_that_was_a_function_has_to_be_given(from_file: Any) -> None:
    def mine(graph: Any, inputs: Any) -> Any:
        return graph

    seen: list[Any] = []
    finder = Finder(lambda call, budget: seen.append(call.backend))
    with pytest.raises(ArgumentError, match=r"mine, which is not in the file.*--backend"):
        run(from_file(backend=mine), finder, model=Net)
    run(from_file(backend=mine), finder, model=Net, backend=mine)
    assert seen == [mine] * 3


def test_recorded_names_are_found_below_wrappers(from_file: Any) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = Net()

    assert len(run(from_file(), Finder(), model=Outer)) == 3


def test_loaded_model_is_not_written(from_file: Any) -> None:
    model = Net()
    with torch.no_grad():
        model.parts[0].factor.fill_(5.0)
    run(from_file(), Finder(), model=model)
    assert torch.equal(model.parts[0].factor, torch.full((2,), 5.0))


def test_call_of_this_process_needs_nothing() -> None:
    call = failing("forward").recordings[0]
    assert bound(call, model=None) is call


# ---- names on the command line ------------------------------------------------------------------


def test_named_object_of_a_module_and_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_drilled_net.py").write_text("class Net:\n    @staticmethod\n    def a(): 1\n")
    monkeypatch.delitem(sys.modules, "my_drilled_net", raising=False)
    assert named_object("my_drilled_net.py:Net", "--model").__name__ == "Net"
    assert isinstance(named_object("my_drilled_net:Net.a", "--model"), types.FunctionType)
    monkeypatch.delitem(sys.modules, "my_drilled_net")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("torch", "expected package.module:name"),
        (":build", "expected package.module:name"),
        ("no_such_package:build", "ModuleNotFoundError"),
        ("no_such_file.py:build", "no such file"),
        ("torch:no_such_name", "torch has no 'no_such_name'"),
    ],
)
def test_name_that_is_not_there_is_an_error(reference: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        named_object(reference, "--model")


# ---- the report ---------------------------------------------------------------------------------


def test_section_of_the_report() -> None:
    result = failing("forward", recorded=[0])
    full = Culprit(
        module="parts.0.act", phase="forward", stage="inductor", kernel="cpp_fused_gelu_0",
        op="aten.erf.default", node="erf", source="model.py:41 in forward: return gelu(x)",
        metrics=Metrics(max_abs=1e-3, max_rel=2e-3, num_out=3, num_elements=8),
        explanation="erf is wrong.", advice=("torch.compiler.disable(parts.0)",),
        repro="repro/x.py", other_ops=("aten.mul.Tensor", "aten.mul.Tensor", "aten.add.Tensor"),
        also_in=("parts.1 (cpp_fused_gelu_1)",), tensor="output 0",
    )  # fmt: skip
    run(result, Finder(lambda call, budget: [full]))
    text = "\n".join(drilldown_lines(result))
    assert text == (
        "\n  DRILL-DOWN\n  " + "-" * 68 + "\n"
        "  FAIL  parts.0.act (forward)\n"
        "        stage    inductor\n"
        "        kernel   cpp_fused_gelu_0\n"
        "        op       aten.erf.default  (node erf)\n"
        "        fused    aten.mul.Tensor x2, aten.add.Tensor\n"
        "        also in  parts.1 (cpp_fused_gelu_1)\n"
        "        tensor   output 0\n"
        "        line     model.py:41 in forward: return gelu(x)\n"
        "        error    max_abs=1.000e-03  max_rel=2.000e-03, 3 of 8 elements\n"
        "        why      erf is wrong.\n"
        "        advice   torch.compiler.disable(parts.0)\n"
        "        repro    repro/x.py\n"
        "  WARN  parts.1 (forward)\n"
        "        stage    not recorded\n"
        "        why      its failing call was not recorded, so that it cannot be run again\n"
        "  WARN  parts.2 (forward)\n"
        "        stage    not recorded\n"
        "        why      its failing call was not recorded, so that it cannot be run again"
    )


def test_control_characters_of_a_culprit_are_not_printed() -> None:
    result = CompareResult(1.0, 1.0)
    result.culprits = [Culprit(module="a\x1b[2J", phase="forward", stage="x", source="\x07")]
    assert "\x1b" not in "".join(drilldown_lines(result))
    assert "\x07" not in "".join(drilldown_lines(result))


def test_culprits_are_saved_with_their_result(tmp_path: Path) -> None:
    result = failing("forward")
    run(result, Finder())
    result.save(tmp_path / "result.mc")
    assert CompareResult.load(tmp_path / "result.mc").culprits == result.culprits


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
