"""A failing call as a file that runs with torch alone and shows the fault where it is."""

from __future__ import annotations

import io
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opcheck
from opcheck.kernel_table import KernelTable, call_kernel, kernels
from opcheck.packing import nbytes_of, pack, tree_items, unpack
from opcheck.repro_call import script_of
from opcheck.repro_tensors import spell_value
from opcheck.repro_text import MARK
from opcheck.rerun import keep, run_again
from opcheck.runstate import RunState
from opcheck.shrinking import shrink
from tests import faults, models
from tests.reproducers import plant_file, run_file
from tests.test_planted_faults import SCENARIOS

KINDS = {
    "gelu": "gelu_off_by",
    "softmax_strides": "softmax_ignoring_strides",
    "add_": "add_inplace_off_by",
    "gelu_backward": "gelu_backward_off_by",
    "foreach_add_list": "foreach_add_without_last_tensor",
}


def check(folder: Path, model: Any = None, **options: Any) -> opcheck.Session:
    return opcheck.check(
        model, log_dir=folder / "logs", quiet=True, repro_dir=folder / "repros", **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_reproducer_fails_with_the_fault_and_not_without(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    workload = scenario.workload()
    optimizer = None
    if scenario.make_optimizer is not None:
        optimizer = scenario.make_optimizer(workload.model.parameters())
    with scenario.fault() as planted, check(tmp_path, workload.model) as session:
        for _ in range(scenario.num_steps):
            workload.step(optimizer)
    script = session.repros[0]
    without = run_file(script)
    assert without.returncode == 0, without.stdout + without.stderr
    assert "note: another kernel of" in without.stdout
    found = run_file(script, load=plant_file(tmp_path, KINDS[name]))
    assert found.returncode == 1, found.stdout + found.stderr
    assert "the fault is there" in found.stdout
    assert {"actual", "expected", "max_abs"} <= set(re.findall(r"\w+", found.stdout))
    text = script.read_text()
    assert MARK in text
    assert "opcheck import" not in text
    assert f"{planted.op.replace('.', '::', 1).removesuffix('.default')} (CPU)" in text


@pytest.mark.parametrize("is_torchs_own", [False, True], ids=["registered", "torchs_own"])
@pytest.mark.parametrize("name", ["masked_select", "gelu"])
def test_reproducer_of_a_wrong_dtype(
    name: str, is_torchs_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a kernel of torch's own the float64 reference judges alone, and has no such dtype."""
    if is_torchs_own:
        monkeypatch.setattr(KernelTable, "is_overridden", lambda table, op: False)
    inputs = torch.linspace(-2, 2, 8)
    run = {
        "masked_select": lambda: torch.masked_select(inputs, torch.tensor([True, False] * 4)),
        "gelu": lambda: torch.nn.functional.gelu(inputs),
    }[name]
    fault = f"{name}_in_float64"
    with getattr(faults, fault)(), check(tmp_path) as session:
        run()
    (record,) = session.failures
    assert "dtype torch.float64, expected torch.float32" in record.reason
    assert (record.reference == "float64") is is_torchs_own
    without = run_file(session.repros[0])
    assert without.returncode == 0, without.stdout + without.stderr
    found = run_file(session.repros[0], load=plant_file(tmp_path, fault))
    assert found.returncode == 1, found.stdout + found.stderr
    assert "dtype torch.float64, expected torch.float32: FAULT" in found.stdout


def test_one_file_for_each_op_module_and_phase(tmp_path: Path) -> None:
    workload = models.transformer()
    with faults.gelu_off_by(), check(tmp_path, workload.model) as session:
        workload.step()
    assert len(session.repros) == len(session.failures) == 2
    report = session.report()
    assert all(str(path) in report for path in session.repros)
    assert sorted(path.name for path in (tmp_path / "repros").iterdir()) == sorted(
        path.name for path in session.repros
    )


def test_no_folder_without_a_failure(tmp_path: Path) -> None:
    workload = models.transformer()
    with check(tmp_path, workload.model) as session:
        workload.step()
    assert session.repros == []
    assert not (tmp_path / "repros").exists()


# ---- packing ------------------------------------------------------------------------------------


def odd_tensors() -> Any:
    base = torch.arange(20.0)
    rows, window = base[4:12].view(2, 4).t(), base[6:10]
    conj = torch.complex(torch.randn(3), torch.randn(3)).conj()
    return (
        [rows, window],
        {"expanded": torch.randn(3, 1).expand(3, 4), "none": None},
        (conj, torch.view_as_complex(torch.randn(3, 2)).conj().imag),
        torch.empty(0, 3), torch.tensor(1.5, dtype=torch.bfloat16), rows, 3, "text",
    )  # fmt: skip


def test_packed_tensors_come_back_with_strides_and_shared_memory() -> None:
    tree = odd_tensors()
    back = unpack(pack(tree))
    for old, new in zip(tree_items(tree), tree_items(back), strict=True):
        if not isinstance(old, Tensor):
            assert old == new
            continue
        assert torch.equal(old, new)
        assert (old.stride(), old.is_conj(), old.is_neg()) == (
            new.stride(), new.is_conj(), new.is_neg(),
        )  # fmt: skip
    back[0][1].zero_()
    assert back[0][0].eq(0).sum() == 4
    assert back[0][0] is back[-3]
    assert tree[0][0].eq(0).sum() == 0


def test_of_a_large_storage_only_what_is_reached_is_packed() -> None:
    base = torch.zeros(1000, 1000)
    assert pack([base[3, 10:20], base[4, :5]]).nbytes == nbytes_of([base[3, 10:20], base[4, :5]])
    assert pack([base[3, 10:20]]).nbytes == 40


def test_values_from_before_the_call_take_the_place_of_the_present_ones() -> None:
    tensor = torch.ones(2, 3).t()
    packed = pack((tensor,), {id(tensor): torch.full((3, 2), 7.0)})
    assert unpack(packed)[0].eq(7.0).all()
    assert unpack(packed)[0].stride() == tensor.stride()


# ---- shrinking ----------------------------------------------------------------------------------


def smallest(tree: Any, fails: Any, seconds: float = 60.0) -> Any:
    found = shrink(pack(tree), lambda packed: bool(fails(*unpack(packed))), seconds=seconds)
    return unpack(found.arguments)


def test_dimensions_that_belong_together_are_cut_together() -> None:
    left, right = torch.randn(8, 16), torch.randn(16, 8)
    left[3, 5] = 1000.0

    def fails(left: Tensor, right: Tensor) -> bool:
        return (left @ right).abs().max() > 100

    small = smallest((left, right), fails)
    assert [tuple(item.shape) for item in small] == [(1, 1), (1, 1)]


def test_order_of_strides_and_expanded_dimensions_stay() -> None:
    transposed, expanded = torch.randn(6, 4).t(), torch.randn(6, 1).expand(6, 5)
    small = smallest(
        (transposed, expanded),
        lambda a, b: not a.is_contiguous() and a.shape[0] > 2 and b.stride(1) == 0,
    )
    assert small[0].stride()[0] < small[0].stride()[1]
    assert small[1].stride(1) == 0


def test_what_does_not_shrink_stays_and_values_become_simple() -> None:
    values = torch.randn(3, 7)
    (small,) = smallest((values,), lambda item: item.shape == (3, 7) and item[1, 2] != 0)
    assert small.shape == (3, 7)
    assert small[1, 2] != 0
    assert small.count_nonzero() in (1, 21)


def test_search_ends_in_time() -> None:
    found = shrink(pack((torch.randn(64, 64),)), lambda packed: True, seconds=0.0)
    assert found.out_of_time
    assert found.num_runs == 0


# ---- what a reproducer keeps --------------------------------------------------------------------


def test_kernels_of_a_library_are_named_with_their_module(tmp_path: Path) -> None:
    library = torch.library.Library("aten", "IMPL")
    original = torch.library.get_kernel("aten::gelu", "CPU")

    def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
        return call_kernel(original, (x,), {"approximate": approximate}).add_(0.5)

    gelu.__module__ = "my_kernels.activations"
    try:
        opcheck.PrecisionCheckRegister([("gelu", gelu)], lib=library, dispatch_key="CPU")
        with check(tmp_path) as session:
            torch.nn.functional.gelu(torch.randn(4, 8))
    finally:
        library._destroy()
        kernels().look_again()
    text = session.repros[0].read_text()
    assert "# import my_kernels.activations" in text
    assert "aten::gelu (CPU): registered at" in text


# ---- kinds of arguments -------------------------------------------------------------------------


class Keeper:
    """Keeps the last checked call, as the keeper of failing ones does."""

    def __init__(self) -> None:
        self.kept: Any = None

    def judged(self, call: Any, out: Any, record: Any, *, is_open: bool) -> None:
        self.kept = keep(call, record, RunState.now(), seed=0)

    def wants_before(self, call: Any) -> bool:
        return False

    def concluded(self, record: Any) -> None:
        pass


def kept_call(folder: Path, run: Any) -> Any:
    """What the reproducer of a (right) call is made of."""
    keeper = Keeper()
    session = opcheck.check(log_dir=folder, quiet=True)
    session._pipeline._conclusions._keepers = (keeper,)
    with session:
        run()
    assert keeper.kept is not None
    return keeper.kept


def as_module(kept: Any) -> dict[str, Any]:
    """The names of its reproducer, which is run in this process."""
    script = script_of(kept, kept.arguments, run_again(kept, kept.arguments), shrunk="")
    names: dict[str, Any] = {"__name__": "reproducer"}
    exec(compile(script.text, "reproducer.py", "exec"), names)
    names["saved"] = lambda: dict(script.tensors)
    names["configure"] = lambda: None
    return names


def spoiled(names: dict[str, Any]) -> dict[str, Any]:
    """With an op that goes wrong once the library is loaded."""
    right, armed = names["call"], []

    def call(*args: Any) -> list[Any]:
        out = right(*args)
        if armed:
            wrong = torch.lerp(torch.zeros_like(out[0]), out[0], 1.5)
            out[0] = wrong + 1 if wrong.is_floating_point() else wrong
        return out

    names["load_kernels"] = lambda: armed.append(1)
    names["call"] = call
    return names


X = torch.linspace(-2, 2, 24).reshape(4, 6)
CALLS = {
    "scalar_arguments": lambda: torch.add(X, X, alpha=0.3),
    "python_number_for_a_tensor": lambda: X * 0.3,
    "dtype_argument": lambda: torch.sum(X, dtype=torch.bfloat16),
    "list_of_tensors": lambda: torch.cat([X, X.t().contiguous().t()], 1),
    "foreach": lambda: torch._foreach_mul_([X.clone(), X[0].clone()], [0.5, 0.25]),
    "several_results": lambda: torch.nn.functional.layer_norm(X, (6,), torch.ones(6)),
    "in_place_on_views_of_one_memory": lambda: (lambda b: b[:3].add_(b[1:4]))(X.clone()[:, 0]),
    "bfloat16": lambda: torch.nn.functional.silu(X.bfloat16()),
    "complex": lambda: torch.exp(torch.complex(X, X).conj()),
    "non_finite": lambda: torch.log(X),
    "string_argument": lambda: torch.nn.functional.gelu(X, approximate="tanh"),
    "empty_tensor_beside": lambda: torch.cat([X, torch.empty(0, 6)]),
    "large": lambda: torch.tanh(X.repeat(50, 50)),
}


@pytest.mark.parametrize("name", CALLS)
def test_file_of_a_right_call_is_silent_and_of_a_wrong_one_is_not(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    kept = kept_call(tmp_path, CALLS[name])
    assert as_module(kept)["main"]([]) == 0, capsys.readouterr().out
    assert spoiled(as_module(kept))["main"]([]) == 1
    assert "FAULT" in capsys.readouterr().out


def test_a_generator_is_written_with_its_seed() -> None:
    generator = torch.Generator().manual_seed(42)
    again = eval(spell_value(generator, str), {"torch": torch})
    assert torch.equal(torch.rand(3, generator=again), torch.rand(3, generator=generator))


def test_out_variant_can_be_written_too(tmp_path: Path) -> None:
    out = torch.empty(4, 6)
    kept = kept_call(tmp_path, lambda: torch.add(X, X))
    kept = replace(
        kept, func=torch.ops.aten.add.out, arguments=pack(((X, X), {"alpha": 2, "out": out}))
    )
    names = as_module(kept)
    assert names["main"]([]) == 0
    assert spoiled(names)["main"]([]) == 1


def test_state_of_the_process_is_written_down(tmp_path: Path) -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
            kept = kept_call(tmp_path, lambda: torch.exp(X))
    finally:
        torch.set_float32_matmul_precision("highest")
    text = script_of(kept, kept.arguments, run_again(kept, kept.arguments), shrunk="").text
    assert "torch.set_float32_matmul_precision('high')" in text
    assert f"torch.manual_seed({torch.initial_seed()})" in text
    assert f"torch.set_num_threads({torch.get_num_threads()})" in text
    assert "with torch.inference_mode()" in text


def test_text_of_a_log_cannot_become_code(tmp_path: Path) -> None:
    kept = kept_call(tmp_path, lambda: torch.exp(X))
    evil = '"""\nraise SystemExit(7)\n"""\\'
    kept = replace(kept, record=replace(kept.record, module=evil, source=evil, reason=evil))
    assert as_module(kept)["main"]([]) == 0


def test_one_wrong_element_of_a_large_input_comes_out_small(tmp_path: Path, monkeypatch) -> None:
    """And progress is shown on a terminal."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    torch.manual_seed(0)
    inputs = torch.randn(64, 128, 768).clamp(-4, 4)
    inputs[37, 90, 500] = 6.0
    with (
        planted_above_five(),
        check(tmp_path, max_numel=10_000_000, repro_seconds=200.0) as session,
    ):
        torch.nn.functional.gelu(inputs)
    text = session.repros[0].read_text()
    assert not session.repros[0].with_suffix(".pt").exists()
    shapes = re.search(r"shrunk +\(64, 128, 768\) -> \((\d+), (\d+), (\d+)\)", text)
    assert shapes is not None, text
    assert math.prod(map(int, shapes.groups())) <= 8
    assert "shrinking aten.gelu.default: (64, 128, 768) -> " in terminal.text


class Terminal(io.StringIO):
    """Where progress is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


def planted_above_five() -> Any:
    def make_wrong(original: Any) -> Any:
        def gelu(x: Tensor, **options: Any) -> Tensor:
            out = original(x, **options)
            return torch.where(x > 5, torch.full_like(out, 5.0), out)

        return gelu

    return faults.planted("aten.gelu.default", make_wrong)


def test_origin_of_nan_is_a_reproducer_too(tmp_path: Path) -> None:
    class Normed(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x * 0 + 1e-8)  # 1e-8 is 0 in float16

    model = Normed()
    with check(tmp_path, model) as session:
        model((X + 5).half())
    assert [record.op for record in session.failures] == ["aten.div.Tensor"]
    names: dict[str, Any] = {"__name__": "reproducer", "__file__": str(session.repros[0])}
    exec(compile(session.repros[0].read_text(), "reproducer.py", "exec"), names)
    names["configure"] = lambda: None
    assert "'rule': 'finite'" in session.repros[0].read_text()
    assert names["main"]([]) == 1
