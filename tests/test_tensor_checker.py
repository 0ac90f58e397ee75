"""TensorChecker as its user meets it: what it registers, compares, reports, keeps and leaves."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import json
import sys
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import modulecheck
from modulecheck import (
    TensorChecker,
    assert_tensor_allclose,
    assert_tensor_equal,
    module_register_tensor_checker,
)
from modulecheck.cli import main
from modulecheck.tensor_values import Snapshot
from opcheck import ArgumentError, ArgumentTypeError, Verdict
from tests import models


@pytest.fixture
def checker() -> TensorChecker:
    return TensorChecker(quiet=True)


def compared(checker: TensorChecker, first: Any, second: Any, **options: Any) -> Any:
    """The record of two values under one tag."""
    checker.register_tensor("t", first)
    checker.register_tensor("t", second)
    checker.check_equal(**options)
    return checker.result.records[0]


class Block(nn.Module):
    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.scale = scale
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = self.linear(self.norm(hidden)) * self.scale
        return out if bias is None else out + bias


class Net(nn.Module):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.conv_in = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.conv_out = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv_in(x)
        for block in self.blocks:
            hidden = hidden + block(hidden, bias=hidden.mean())
        return self.conv_out(hidden)


def net(seed: int = 0, **sizes: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**sizes).eval()


def batch() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def run_both(checker: TensorChecker, first: nn.Module, second: nn.Module, **options: Any) -> None:
    with (
        module_register_tensor_checker(first, checker),
        module_register_tensor_checker(second, checker, **options),
        torch.no_grad(),
    ):
        first(batch())
        second(batch())


# ---- printed lines ------------------------------------------------------------------------------


def test_lines_are_the_documented_ones(capsys):
    checker = TensorChecker()
    for tag, second in (("checker_a", 1.0), ("checker_b", 2.0)):
        checker.register_tensor(tag, torch.ones(2))
        checker.register_tensor(tag, torch.full((2,), second))
    assert checker.check_equal() is False
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "TensorChecker: 2 tensors equal in checker_a",
        "TensorChecker: 2 tensors not equal in checker_b",
    ]
    assert checker.check_allclose() is False
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "TensorChecker: 2 tensors close in checker_a",
        "TensorChecker: 2 tensors not close in checker_b",
    ]


def test_a_pass_prints_the_documented_lines_alone(capsys):
    checker = TensorChecker()
    for _ in range(3):
        checker.register_tensor("a", torch.ones(2))
    assert checker.check_equal() is True
    assert capsys.readouterr().out == "TensorChecker: 3 tensors equal in a\n"


def test_a_quiet_checker_prints_nothing(capsys, checker):
    checker.register_tensor("a", 1)
    checker.check_equal()
    assert capsys.readouterr().out == ""
    assert checker.result.verdict is Verdict.INCONCLUSIVE


# ---- what can be registered ---------------------------------------------------------------------


class WithDlpack:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


class WithArray:
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.ones(3, np.float32)


class WithToTorch:
    def to_torch(self) -> torch.Tensor:
        return torch.ones(3)


class BrokenDlpack(WithArray):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("read-only")

    def __dlpack_device__(self) -> Any:
        return (1, 0)


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, requires_grad=True),
        nn.Parameter(torch.ones(3)),
        torch.ones(3).expand(3),
        np.ones(3, np.float32),
        np.ones(6, np.float32)[::-2],
        np.ones(3, ">f4"),
        WithDlpack(torch.ones(3)),
        WithArray(),
        WithToTorch(),
        BrokenDlpack(),
        torch.ones(3).to_sparse(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_holds_the_same_values_is_equal(checker, value):
    assert compared(checker, torch.ones(3), value).verdict is Verdict.PASS


DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint64,
    torch.bool,
]


@pytest.mark.parametrize("keep", ["all", "stats"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_compared_as_it_is(dtype, keep):
    checker = TensorChecker(quiet=True, keep=keep)
    first = torch.tensor([0, 1, 1]).to(dtype)
    second = torch.tensor([0, 1, 0]).to(dtype)
    checker.register_tensor("same", first)
    checker.register_tensor("same", first.clone())
    checker.register_tensor("other", first)
    checker.register_tensor("other", second)
    checker.check_equal()
    same, other = checker.result.records
    assert (same.verdict, same.num_elements) == (Verdict.PASS, 3)
    assert (other.verdict, other.num_differing, other.first_index) == (Verdict.FAIL, 1, (2,))


def test_a_python_number_is_compared_by_value(checker):
    assert compared(checker, torch.tensor(0.1), 0.1).verdict is Verdict.PASS
    checker.clear()
    assert compared(checker, 3, torch.tensor(3.0)).verdict is Verdict.PASS
    checker.clear()
    assert compared(checker, 2**40, 2**40 + 1).verdict is Verdict.FAIL
    checker.clear()
    assert compared(checker, True, 1).verdict is Verdict.FAIL


@pytest.mark.parametrize("value", ["text", object(), None, {1, 2}, np.array(["a"]), nn.ReLU])
def test_a_wrong_type_is_an_error_with_tag_and_type(checker, value):
    with pytest.raises(ArgumentTypeError, match=rf"tag 'my tag': got .*{type(value).__name__}"):
        checker.register_tensor("my tag", value)


def test_a_leaf_of_a_wrong_type_is_named(checker):
    with pytest.raises(ArgumentTypeError, match=r"'t_1_key'.*str"):
        checker.register_tensor("t", [torch.ones(1), {"key": "text"}])
    assert checker.check_equal() is False  # nothing of it was registered
    assert not checker.result.records


@pytest.mark.parametrize("value", [torch.empty(2, device="meta"), 10**30, [], {"a": None}], ids=str)
def test_a_value_without_values_is_an_error(checker, value):
    with pytest.raises(ArgumentError, match="tag 't'"):
        checker.register_tensor("t", value)


def test_a_list_that_contains_itself_is_an_error(checker):
    value: list[Any] = [torch.ones(1)]
    value.append(value)
    with pytest.raises(ArgumentError, match="contains itself"):
        checker.register_tensor("t", value)


@pytest.mark.parametrize("tag", [None, 3, b"x"])
def test_a_tag_is_a_string(checker, tag):
    with pytest.raises(ArgumentTypeError, match="tag: expected a string"):
        checker.register_tensor(tag, 1)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Output:
    logits: Any
    hidden: Any = None


def test_nested_values_get_a_tag_per_leaf(checker):
    value = {
        "a": [torch.zeros(1), None, (torch.ones(1), 2.0)],
        "b": Output(torch.zeros(2), hidden=Pair(torch.zeros(1), np.ones(1))),
    }
    for _ in range(2):
        checker.register_tensor("t", value)
    assert checker.check_equal()
    assert [record.tag for record in checker.result.records] == [
        "t_a_0",
        "t_a_2_0",
        "t_a_2_1",
        "t_b_logits",
        "t_b_hidden_0",
        "t_b_hidden_1",
    ]


def test_leaves_that_would_share_a_tag_are_told_apart(checker):
    value = {"a": {"b": torch.zeros(1)}, "a_b": torch.ones(1)}
    for _ in range(2):
        checker.register_tensor("t", value)
    assert checker.check_equal()
    assert [record.tag for record in checker.result.records] == ["t_a_b", "t_a_b_2"]


# ---- registering leaves the step alone ----------------------------------------------------------


def test_a_snapshot_is_not_the_tensor(checker):
    tensor = torch.ones(3)
    checker.register_tensor("t", tensor)
    tensor.add_(1)
    checker.register_tensor("t", torch.ones(3))
    assert checker.check_equal()


def test_nothing_is_kept_alive(checker):
    class Mark:
        pass

    model, value = net(), batch().requires_grad_()
    module_register_tensor_checker(model, checker)
    out = model(value)
    out.grad_fn.metadata["mark"] = mark = Mark()
    checker.register_tensor("out", out)
    gone = [weakref.ref(item) for item in (out, mark, model, value)]
    del out, mark, value, model
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)


def test_the_step_is_the_same_bit_for_bit(checker):
    def step(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model.train()
        value = batch().requires_grad_()
        out = model(value)
        out.square().sum().backward()
        return [out, value.grad, *(p.grad for p in model.parameters()), torch.rand(1)]

    plain = step(net())
    model = net()
    forwards = {name: module.forward for name, module in model.named_modules()}
    with module_register_tensor_checker(model, checker):
        watched = step(model)
        assert {name: module.forward for name, module in model.named_modules()} == forwards
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_hooks_come_off_with_remove_and_with_the_context(checker):
    model = net()
    handle = module_register_tensor_checker(model, checker)
    handle.remove()
    handle.remove()
    with pytest.raises(ZeroDivisionError), module_register_tensor_checker(model, checker):
        raise ZeroDivisionError
    model(batch())
    checker.check_equal()
    assert not checker.result.records


def test_the_fused_path_of_an_encoder_layer_stays_on(checker, monkeypatch):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    value, fused = torch.randn(2, 5, 8), []
    original = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(
        torch, "_transformer_encoder_layer_fwd", lambda *a: fused.append(1) or original(*a)
    )
    with torch.no_grad(), module_register_tensor_checker(layer, checker):
        layer(value, src_key_padding_mask=None)
    assert fused == [1]
    checker.check_equal()
    tags = [record.tag for record in checker.result.records if record.site.role != "param"]
    assert tags == ["checker_<root>_input_0", "checker_<root>"]


def test_a_module_that_raises_leaves_no_trace(checker):
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.fail = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            if self.fail:
                raise ValueError("the step's own")
            return x

    first, second = Failing(), Failing()
    second.load_state_dict(first.state_dict())
    with module_register_tensor_checker([first, second], checker):
        for model in (first, second):
            with pytest.raises(ValueError, match="the step's own"):
                model(batch())
            model.fail = False
            model(batch())
    assert checker.running.frames == []
    assert checker.check_equal()
    assert "checker_inner#2" in [record.tag for record in checker.result.records]


def test_a_crash_of_ours_is_noted_and_the_step_goes_on(checker, monkeypatch):
    from modulecheck import tensor_hooks

    def crash(*args: Any, **options: Any) -> Any:
        raise RuntimeError("ours")

    monkeypatch.setattr(tensor_hooks, "leaves", crash)
    first, second = net(), net()
    run_both(checker, first, second)
    assert checker.check_equal() is False
    assert checker.result.verdict is Verdict.INCONCLUSIVE
    assert "RuntimeError: ours" in checker.result.problems[0]
    assert "crashes of the checker" in checker.result.report()


def test_a_crash_at_one_tensor_is_no_pass_of_the_others(checker, monkeypatch):
    from modulecheck import tensor_hooks

    leaves = tensor_hooks.leaves

    def crash_at_one(tag: str, *args: Any, **options: Any) -> Any:
        if tag.endswith("_input_0"):
            raise RuntimeError("ours")
        return leaves(tag, *args, **options)

    monkeypatch.setattr(tensor_hooks, "leaves", crash_at_one)
    run_both(checker, net(), net())
    assert checker.check_equal() is False
    assert {record.verdict for record in checker.result.records} == {Verdict.PASS}
    assert checker.result.verdict is Verdict.INCONCLUSIVE


# ---- equality -----------------------------------------------------------------------------------


def test_only_nan_differs_and_the_message_says_so(checker):
    value = torch.tensor([1.0, float("nan")])
    record = compared(checker, value, value)
    assert record.verdict is Verdict.FAIL
    assert "only NaN differs: 1 of 2" in record.reason
    assert record.first_index == (1,)


def test_equal_nan_accepts_it(checker):
    value = torch.tensor([1.0, float("nan")])
    assert compared(checker, value, value, equal_nan=True).verdict is Verdict.PASS


def test_equal_nan_does_not_accept_nan_elsewhere(checker):
    first = torch.tensor([1.0, float("nan")])
    record = compared(checker, first, first.flip(0), equal_nan=True)
    assert (record.verdict, record.num_differing) == (Verdict.FAIL, 2)


def test_a_record_says_where_and_how_much(checker):
    first = torch.zeros(2, 6)
    second = first.clone()
    second[1, 3:5] = torch.tensor([0.5, 2.0])
    record = compared(checker, first, second)
    assert (record.first_index, record.reference_at, record.actual_at) == ((1, 3), 0.0, 0.5)
    assert (record.num_differing, record.share_differing) == (2, 2 / 12)
    assert record.metrics.max_abs == 2.0
    assert [(index, actual) for index, _, actual in record.neighbourhood] == [
        ((1, 1), 0.0),
        ((1, 2), 0.0),
        ((1, 3), 0.5),
        ((1, 4), 2.0),
        ((1, 5), 0.0),
    ]
    assert record.descriptions == ("(2, 6):float32",) * 2


@pytest.mark.parametrize(
    ("dtype", "steps"), [(torch.float32, 3), (torch.bfloat16, 2), (torch.float64, 1)], ids=str
)
def test_ulp_distance_counts_representable_numbers(checker, dtype, steps):
    first = second = torch.tensor([1.0, -1.0]).to(dtype)
    eps = torch.finfo(dtype).eps
    second = first + steps * eps * first
    assert compared(checker, first, second).max_ulp == steps


def test_ulp_distance_crosses_zero(checker):
    tiny = torch.tensor([5e-324], dtype=torch.float64)
    assert compared(checker, tiny, -tiny).max_ulp == 2


def test_zeros_of_other_sign_are_equal_and_noted(checker):
    record = compared(checker, torch.tensor([0.0]), torch.tensor([-0.0]))
    assert record.verdict is Verdict.PASS
    assert record.notes == ("the sign of zero differs in 1 elements",)


def test_a_dtype_that_differs_is_named(checker):
    record = compared(checker, torch.ones(2), torch.ones(2).double())
    assert record.verdict is Verdict.FAIL
    assert "dtype float64 against float32 in the reference; the values agree" in record.reason


PAIRS = {
    "check_dtype": (torch.ones(3), torch.ones(3, dtype=torch.float64)),
    "equal_nan": (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])),
    "atol": (torch.zeros(3), torch.full((3,), 1e-3)),
    "rtol": (torch.full((3,), 1e3), torch.full((3,), 1001.0)),
}
ACCEPTING = {"check_dtype": False, "equal_nan": True, "atol": 2e-3, "rtol": 2e-3}
OPTIONS = [
    (method, criterion, option)
    for method, criterion in (("check_equal", ()), ("check_allclose", ()), ("check", ("equal",)),
                              ("check", ("allclose",)), ("check", ("calibrated",)))
    for option in PAIRS
    if option in ("check_dtype", "equal_nan") or "allclose" in (method[6:], *criterion)
]  # fmt: skip


@pytest.mark.parametrize(("method", "criterion", "option"), OPTIONS)
def test_each_option_does_what_it_says(checker, method, criterion, option):
    for value in PAIRS[option]:
        checker.register_tensor("t", value)
    check, accepting = getattr(checker, method), ACCEPTING[option]
    assert check(*criterion) is (criterion == ("calibrated",))
    assert check(*criterion, **{option: accepting}) is True
    if isinstance(accepting, bool):
        assert check(*criterion, **{option: not accepting}) is False


def test_check_dtype_false_compares_values_of_one_kind(checker):
    checker.register_tensor("float", torch.ones(2))
    checker.register_tensor("float", np.ones(2))
    assert checker.check_equal(check_dtype=False)
    checker.register_tensor("kind", torch.ones(2))
    checker.register_tensor("kind", torch.ones(2, dtype=torch.int64))
    assert not checker.check_equal(check_dtype=False)
    assert "another kind of number" in checker.result.find("kind").reason


def test_a_shape_that_differs_is_named(checker):
    record = compared(checker, torch.ones(2), torch.ones(1, 2))
    assert "shape (1, 2) against (2,)" in record.reason


def test_a_device_that_differs_is_a_note(checker):
    checker.add("t", Snapshot(torch.ones(2), device="cuda:0"), side="a")
    checker.add("t", Snapshot(torch.ones(2)), side="b")
    assert checker.check_equal()
    assert checker.result.records[0].notes == ("devices cuda:0, cpu; compared on the CPU",)


def test_strides_do_not_matter(checker):
    assert compared(checker, torch.eye(3), torch.eye(3).t()).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (float("inf"), float("-inf")),
        (float("nan"), float("inf")),
        (1 + 2j, 1 - 2j),
        (10001, 10000),
        (5e-4, 0.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["check_equal", "check_allclose"])
def test_what_others_let_pass_differs(checker, first, second, method):
    checker.register_tensor("t", first)
    checker.register_tensor("t", second)
    assert getattr(checker, method)() is False


def test_one_element_of_a_million_is_found(checker):
    first = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    second = first.clone()
    second[123_456] += 0.09
    record = compared(checker, first, second)
    assert (record.num_differing, record.first_index) == (1, (123_456,))
    assert checker.check("calibrated") is False


# ---- closeness ----------------------------------------------------------------------------------


def test_allclose_follows_rtol_and_atol(checker):
    checker.register_tensor("t", torch.tensor([1.0, 0.0]))
    checker.register_tensor("t", torch.tensor([1.0009, 0.0009]))
    assert checker.check_allclose(rtol=1e-3, atol=1e-3)
    assert not checker.check_allclose(rtol=1e-3, atol=1e-5)
    assert checker.result.records[0].first_index == (1,)
    assert not checker.check_allclose()


def test_allclose_with_equal_nan(checker):
    for _ in range(2):
        checker.register_tensor("t", torch.tensor([float("nan"), float("inf")]))
    assert checker.check_allclose(1e-5, 1e-8, True)  # positional, as torch.allclose
    assert not checker.check_allclose()


@pytest.mark.parametrize("options", [{"rtol": -1}, {"atol": float("nan")}, {"rtol": "1"}])
def test_a_tolerance_that_means_nothing_is_an_error(checker, options):
    with pytest.raises((ArgumentError, ArgumentTypeError), match="tol: expected a finite number"):
        checker.check_allclose(**options)


def test_an_unknown_criterion_is_an_error(checker):
    with pytest.raises(ArgumentError, match="criterion: expected one of"):
        checker.check("near")
    with pytest.raises(ArgumentError, match="precision"):
        checker.register_tensor("t", 1.0)
        checker.check("calibrated", precision="int8")


@pytest.mark.parametrize(
    ("factor", "passes"), [(1.0, True), (1.01, False), (0.0, False), (-1.0, False)]
)
def test_calibrated_takes_rounding_to_bf16_and_no_more(checker, factor, passes):
    first = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    checker.register_tensor("t", first)
    checker.register_tensor("t", (first * factor).bfloat16())
    assert checker.check("calibrated") is passes
    assert checker.result.criterion == "calibrated"


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("num_masked", [300, 1900, 3500])
@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (1.01, False)])
def test_masked_scores_hide_no_others(checker, factor, passes, num_masked, fill):
    scores = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    is_masked = torch.arange(4096) < num_masked
    checker.register_tensor("t", torch.where(is_masked, fill, scores))
    checker.register_tensor("t", torch.where(is_masked, fill, scores * factor))
    assert checker.check("calibrated") is passes


def test_calibrated_judges_complex_numbers_by_component(checker):
    first = torch.randn(64, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    checker.register_tensor("t", first)
    checker.register_tensor("t", first * (1 + 1e-7))
    assert checker.check()
    checker.register_tensor("t", first.conj())
    assert not checker.check()


def test_a_float32_tensor_of_a_bf16_side_is_judged_as_bf16(checker):
    weight = torch.randn(64, generator=torch.Generator().manual_seed(0))
    for side, value in (("a", weight), ("b", weight.bfloat16())):
        checker.register_tensor("weight", value, side=side)
        checker.register_tensor("logits", value.float() * 3, side=side)
    assert checker.check()
    checker.clear()
    checker.register_tensor("logits", weight)
    checker.register_tensor("logits", weight.bfloat16().float())
    assert not checker.check()
    assert checker.check(precision=torch.bfloat16)


# ---- sides --------------------------------------------------------------------------------------


def test_the_first_registered_is_the_reference(checker):
    record = compared(checker, 1.0, 2.0)
    assert (record.reference_at, record.actual_at) == (1.0, 2.0)


def test_named_sides_pair_the_nth_of_one_with_the_nth_of_the_other(checker):
    for side in ("b", "a"):
        for value in (1.0, 2.0):
            checker.register_tensor("loop", value, side=side)
    assert checker.check_equal()
    assert [record.tag for record in checker.result.records] == ["loop", "loop#2"]
    assert checker.result.records[0].sides == ("b", "a")


def test_a_tag_of_one_side_alone_is_no_pass(checker, capsys):
    checker.quiet = False
    for side in ("a", "b"):
        checker.register_tensor("both", 1.0, side=side)
    checker.register_tensor("only", 1.0, side="b")
    assert checker.check_equal() is False
    assert checker.result.verdict is Verdict.INCONCLUSIVE
    assert checker.result.find("only").missing_sides == ("a",)
    out = capsys.readouterr().out
    assert "TensorChecker: 1 tensor not compared in only (missing: a)" in out
    assert "seen by b only, not by a" in out


def test_a_tag_that_one_of_three_sides_lacks_is_no_pass(checker):
    for side in ("a", "b", "c"):
        checker.register_tensor("everywhere", torch.ones(2), side=side)
        if side != "c":
            checker.register_tensor("not in c", torch.ones(2), side=side)
    assert checker.check_equal() is False
    verdicts = {record.tag: record.verdict for record in checker.result.records}
    assert verdicts == {"everywhere": Verdict.PASS, "not in c": Verdict.INCONCLUSIVE}
    assert "not by c" in checker.result.records[1].reason


def test_a_difference_beats_a_missing_tag(checker):
    for side, value in (("a", 1.0), ("b", 2.0)):
        checker.register_tensor("both", value, side=side)
    checker.register_tensor("only", 1.0, side="b")
    checker.check_equal()
    assert checker.result.verdict is Verdict.FAIL


def test_an_unnamed_tag_registered_once_is_no_pass(checker):
    checker.register_tensor("a", 1.0)
    assert checker.check_equal() is False
    assert "nothing to compare it with" in checker.result.find("a").reason


def test_an_empty_checker_is_no_pass(checker):
    assert checker.check_equal() is False
    assert checker.check_allclose() is False
    assert checker.result.verdict is Verdict.INCONCLUSIVE
    assert checker.result.reason == "nothing was registered"
    assert not checker.result


def test_empty_tensors_alone_are_no_pass(checker):
    record = compared(checker, torch.empty(0, 3), torch.empty(0, 3))
    assert record.verdict is Verdict.PASS
    assert checker.result.verdict is Verdict.INCONCLUSIVE


def test_three_tensors_are_held_against_the_first(checker):
    for value in (1.0, 1.0, 2.0):
        checker.register_tensor("t", value)
    assert checker.check_equal() is False
    assert checker.result.records[0].failing_side == "tensor 2"


def test_a_result_needs_a_check(checker):
    with pytest.raises(ArgumentError, match="nothing checked yet"):
        checker.result  # noqa: B018 - the access is the test


def test_clear_forgets_tensors_and_result(checker):
    compared(checker, 1.0, 2.0)
    checker.clear()
    assert checker.check_equal() is False
    assert not checker.result.records
    assert compared(checker, 1.0, 1.0).verdict is Verdict.PASS


# ---- models -------------------------------------------------------------------------------------


def test_two_equal_models_are_equal(checker):
    run_both(checker, net(), net())
    assert checker.check_equal()
    tags = [record.tag for record in checker.result.records]
    assert tags[:2] == ["checker_conv_in.weight", "checker_conv_in.bias"]
    assert "checker_conv_in" in tags
    assert "checker_conv_in_input_0" in tags
    assert "checker_blocks.0_input_bias" in tags
    assert tags[-1] == "checker_<root>"


def test_several_models_in_one_call(checker):
    models = [net(), net(), net()]
    with module_register_tensor_checker(models, checker, side=["x", "y", "z"]), torch.no_grad():
        for model in models:
            model(batch())
    assert checker.check_equal()
    assert checker.result.records[0].sides == ("x", "y", "z")


def test_the_origin_is_told_from_what_inherits(checker):
    first, second = net(), net()
    second.blocks[1].scale = 0.501
    run_both(checker, first, second)
    assert not checker.check_equal()
    result = checker.result
    assert result.first_divergence.tag == "checker_blocks.1"
    assert result.origins == ["blocks.1"]
    kinds = {found.module: found.kind for found in result.findings}
    assert kinds == {
        "blocks.1": "origin",
        "blocks.2.norm": "inherited",
        "blocks.2.linear": "inherited",
        "blocks.2": "inherited",
        "conv_out": "inherited",
        "": "contains",
    }
    assert "origin     blocks.1: its inputs agree" in result.report()


def test_a_parameter_that_differs_is_the_origin(checker):
    first, second = net(), net()
    with torch.no_grad():
        second.blocks[1].norm.weight[0] += 1
    run_both(checker, first, second)
    checker.check_equal()
    assert checker.result.first_divergence.tag == "checker_blocks.1.norm.weight"
    assert checker.result.origins == ["blocks.1.norm"]


def test_later_calls_of_a_module_are_told_apart(checker):
    first, second = nn.Sequential(*[nn.Linear(4, 4)] * 3), None
    second = copy.deepcopy(first)
    calls = []

    def off_at_the_third(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return out + 1 if len(calls) == 3 else out

    second[0].register_forward_hook(off_at_the_third)
    run_both(checker, first, second)
    assert not checker.check_equal()
    assert checker.result.first_divergence.tag == "checker_0#3"
    found = checker.result.findings[0]
    assert (found.module, found.call, found.kind) == ("0", 2, "origin")


def test_recomputation_in_backward_is_left_out(checker):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    first, second = net(), Checkpointed()
    second.load_state_dict(first.state_dict())
    with module_register_tensor_checker([first, second], checker):
        for model in (first, second):
            model(batch()).sum().backward()
    assert checker.check_equal()


def test_buffers_that_a_call_writes_are_taken_after_it_too(checker):
    first = nn.Sequential(nn.BatchNorm1d(4))
    second = copy.deepcopy(first)
    second[0].momentum = 0.2
    run_both(checker, first, second)
    assert not checker.check_equal()
    failing = [record.tag for record in checker.result.failures]
    assert failing == ["checker_0.running_mean_after", "checker_0.running_var_after"]
    assert checker.result.origins == ["0"]


def test_a_module_shared_by_two_models_counts_for_the_one_that_runs(checker):
    shared = nn.Linear(4, 4)
    run_both(checker, nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.ReLU()))
    assert checker.check_equal()
    assert all(record.num_tensors == 2 for record in checker.result.records)


def test_a_model_is_not_compared_with_itself(checker):
    model = net()
    with module_register_tensor_checker(model, checker):
        with pytest.raises(ArgumentError, match="compared with itself"):
            module_register_tensor_checker(model, checker)
        model(batch())
        model(batch())
    assert checker.check_equal() is False  # one side alone, twice


def test_a_model_that_did_not_run_is_no_pass(checker):
    first, second = net(), net()
    with module_register_tensor_checker([first, second], checker):
        first(batch())
    assert checker.check_equal() is False
    assert checker.result.verdict is Verdict.INCONCLUSIVE


def test_models_that_did_not_run_are_no_pass_of_other_tags(checker):
    with module_register_tensor_checker([net(), net()], checker) as handle:
        checker.register_tensor("t", 1.0)
        checker.register_tensor("t", 1.0)
        checker.check_equal()
    del handle
    assert checker.result.verdict is Verdict.INCONCLUSIVE
    assert checker.result.reason == "model 1 is registered and did not run; 1 more reason"


def test_modules_that_did_not_run_are_named(checker):
    class Partial(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv_in(x)

    run_both(checker, Partial(1), first := Partial(1))
    del first
    checker.check_equal()
    assert "conv_out" in checker.result.not_run
    assert "blocks.0.norm" in checker.result.not_run
    assert "modules did not run on any side" in checker.result.report()


class Opaque:
    """No mapping, no dataclass."""

    def __init__(self, value: torch.Tensor | None) -> None:
        self.value = [{"deep": value}]
        self.me = self


class GivesOpaque(nn.Module):
    def __init__(self, factor: float | None) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> tuple[Any, str]:
        return Opaque(None if self.factor is None else x * self.factor), "text"


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (2.0, False)])
def test_tensors_in_an_object_of_another_class_are_compared(checker, factor, passes):
    run_both(checker, GivesOpaque(1.0), GivesOpaque(factor))
    assert checker.check_equal() is passes
    assert checker.result.records[-1].tag == "checker_<root>_0_value_0_deep"


def test_an_output_in_which_nothing_is_seen_is_no_pass(checker):
    run_both(checker, GivesOpaque(None), GivesOpaque(None))
    assert not checker.check_equal()
    assert checker.result.verdict is Verdict.INCONCLUSIVE
    assert "checker_<root>_0 holds nothing that can be compared" in checker.result.reason


def test_a_cache_of_keys_and_values_in_an_output_is_compared(checker):
    first, second = (models.llama().model.eval() for _ in range(2))
    with torch.no_grad():
        second.model.layers[1].self_attn.v_proj.weight[0, 0] += 1
    ids = models.llama().batch[0]
    with module_register_tensor_checker([first, second], checker), torch.no_grad():
        first(ids, use_cache=True)
        second(ids, use_cache=True)
    checker.check_equal()
    kv = [
        record
        for record in checker.result.records
        if record.tag.startswith("checker_<root>_") and record.tag.endswith(("_keys", "_values"))
    ]
    assert len(kv) == 4
    assert [record.verdict for record in kv].count(Verdict.FAIL) == 1


def test_hooks_start_anew_after_clear(checker):
    first, second = net(), net()
    with module_register_tensor_checker([first, second], checker), torch.no_grad():
        first(batch())
        checker.clear()
        for model in (first, second):
            model(batch())
        assert checker.check_equal()
    assert not any("#" in record.tag for record in checker.result.records)


def test_a_tensor_registered_in_a_forward_has_the_side_of_its_model(checker):
    class Loop(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = x * 2
                checker.register_tensor("loop.x", x)
            return x

    run_both(checker, Loop(), Loop())
    assert checker.check_equal()
    tags = [record.tag for record in checker.result.records if "loop" in record.tag]
    assert tags == ["loop.x", "loop.x#2", "loop.x#3"]


def test_module_and_input_with_one_tag_are_not_mixed_up(checker):
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "a_input_0": nn.Linear(4, 4)})
    model.forward = lambda x: model["a_input_0"](model["a"](x))
    other = nn.ModuleDict({"a": nn.Linear(4, 4), "a_input_0": nn.Linear(4, 4)})
    other.load_state_dict(model.state_dict())
    other.forward = lambda x: other["a_input_0"](other["a"](x))
    run_both(checker, model, other)
    assert checker.check_equal()
    same = [record for record in checker.result.records if record.tag == "checker_a_input_0"]
    assert len(same) == 2


def test_wrapper_names_are_stripped(checker):
    first = net()
    second = torch.compile(net(), backend="eager")
    run_both(checker, first, second)
    checker.check_equal()
    assert checker.result.name_mismatches == ()
    assert checker.result.find("checker_<root>").verdict is Verdict.PASS


def test_a_tensor_registered_in_compiled_code_is_registered_each_time(checker):
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        checker.register_tensor("y", y)
        return y.sin()

    compiled = torch.compile(function, backend="eager")  # the graph is broken there
    for call in (function, compiled, compiled):
        call(torch.ones(3))
    assert checker.check_equal()
    assert checker.result.find("y").num_tensors == 3


def test_documented_signatures_are_pinned():
    def defaults(function: Any) -> dict[str, Any]:
        given = inspect.signature(function).parameters.values()
        return {item.name: item.default for item in given if item.name != "self"}

    empty = inspect.Parameter.empty
    assert list(defaults(TensorChecker.register_tensor))[:2] == ["tag", "tensor"]
    close = defaults(TensorChecker.check_allclose)
    assert list(close)[:3] == ["rtol", "atol", "equal_nan"]
    assert (close["rtol"], close["atol"], close["equal_nan"]) == (1e-5, 1e-8, False)
    for method in (TensorChecker.check_equal, TensorChecker.check_allclose):
        assert defaults(method)["dump_mode"] is modulecheck.DumpMode.NOT
        assert "dump_path" in defaults(method)
    assert defaults(TensorChecker.clear) == {}
    hooks = defaults(module_register_tensor_checker)
    assert list(hooks)[:2] == ["modules", "checker"]
    assert [name for name, value in hooks.items() if value is empty] == ["modules", "checker"]


# ---- names that do not match --------------------------------------------------------------------


class Renamed(nn.Module):
    """`Net` under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden, bias=hidden.mean())
        return self.head(hidden)


def renamed() -> Renamed:
    model = Renamed().eval()
    model.load_state_dict(dict(zip(model.state_dict(), net().state_dict().values(), strict=True)))
    return model


NAMES = {"stem": "conv_in", "layers": "blocks", "head": "conv_out"}


@pytest.mark.parametrize(
    "rename",
    [
        NAMES,
        [(r"^stem\b", "conv_in"), (r"^layers\b", "blocks"), (r"^head\b", "conv_out")],
        lambda name: ".".join(NAMES.get(part, part) for part in name.split(".")),
    ],
    ids=["dict", "patterns", "function"],
)
def test_rename_gives_the_names_of_the_reference(checker, rename):
    run_both(checker, net(), renamed(), rename=rename, strict=True)
    assert checker.check_equal()


def test_names_that_do_not_match_are_listed_and_no_pass(checker):
    run_both(checker, net(), renamed(), rename={"layers": "blocks", "head": "conv_out"})
    assert checker.check_equal() is False
    assert checker.result.verdict is Verdict.INCONCLUSIVE
    found = {(item.name, item.other_side): item for item in checker.result.name_mismatches}
    assert set(found) == {("conv_in", "model 2"), ("stem", "model 1")}
    assert "modules without a counterpart" in checker.result.report()


def test_the_closest_names_are_given(checker):
    first = nn.ModuleDict({"attention": nn.Linear(4, 4)})
    second = nn.ModuleDict({"self_attention": nn.Linear(4, 4)})
    module_register_tensor_checker([first, second], checker)
    checker.check_equal()
    closest = {item.name: item.closest for item in checker.result.name_mismatches}
    assert closest["attention"] == ("self_attention",)


def test_strict_raises_and_leaves_no_hook(checker):
    second = renamed()
    module_register_tensor_checker(net_1 := net(), checker)
    with pytest.raises(ArgumentError, match="names do not match"):
        module_register_tensor_checker(second, checker, strict=True)
    assert not any(module._forward_hooks for module in second.modules())
    del net_1


def test_two_modules_of_one_name_are_an_error(checker):
    with pytest.raises(ArgumentError, match="would both be 'same'"):
        module_register_tensor_checker(
            net(), checker, rename={"conv_in": "same", "conv_out": "same"}
        )


@pytest.mark.parametrize("rename", [3, [("(", "x")], {"a": 1}, lambda name: 3])
def test_a_rename_that_cannot_rename_is_an_error(checker, rename):
    with pytest.raises((ArgumentError, ArgumentTypeError), match="rename"):
        module_register_tensor_checker(net(), checker, rename=rename)


def test_what_has_no_counterpart_can_be_left_out(checker):
    class Logged(Net):
        def __init__(self) -> None:
            super().__init__()
            self.probe = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.probe(super().forward(x))

    second = Logged()
    second.load_state_dict(net().state_dict())
    run_both(checker, net(), second, exclude=["*probe*"])
    assert checker.check_equal()
    checker = TensorChecker(quiet=True)
    run_both(checker, net(), second, rename={"probe": None})
    assert checker.check_equal()


def test_excluded_tags_are_counted(checker):
    run_both(checker, net(), net(), exclude=["*_input_bias"])
    assert not checker.check_equal()
    assert checker.result.excluded == 3


ROLES = {
    "parameters": {"param"},
    "buffers": {"buffer", "buffer_after"},
    "inputs": {"input"},
    "outputs": {"output"},
}


@pytest.mark.parametrize("alone", ROLES)
def test_kinds_can_be_left_out(checker, alone):
    options = {kind: kind == alone for kind in ROLES}
    models = [nn.Sequential(nn.BatchNorm1d(4)), nn.Sequential(nn.BatchNorm1d(4))]
    with module_register_tensor_checker(models, checker, **options):
        for model in models:
            model(torch.arange(8.0).reshape(2, 4))
    assert checker.check_equal()
    assert {record.site.role for record in checker.result.records} == ROLES[alone]


@pytest.mark.parametrize("modules", [3, [net(), "model"], "model"])
def test_what_is_no_module_is_an_error(checker, modules):
    with pytest.raises((ArgumentTypeError, TypeError)):
        module_register_tensor_checker(modules, checker)


# ---- one element per fault that other tools have -------------------------------------------------


class InADict(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"logits": x * self.value, "deep": Output([x + self.value])}


def test_outputs_in_a_dict_or_dataclass_are_compared(checker):
    run_both(checker, InADict(1.0), InADict(2.0))
    assert not checker.check_equal()
    failing = [record.tag for record in checker.result.failures]
    assert failing == ["checker_<root>_logits", "checker_<root>_deep_logits_0"]


def test_a_tuple_that_is_longer_on_one_side_is_no_pass(checker):
    checker.register_tensor("t", (1.0, 2.0), side="a")
    checker.register_tensor("t", (1.0,), side="b")
    assert checker.check_equal() is False
    assert checker.result.find("t_1").verdict is Verdict.INCONCLUSIVE


def test_a_fused_path_that_ignores_its_scale_is_named(checker):
    """Every op of it is right, so that the op level has nothing to say."""
    import opcheck

    class Fused(Block):
        def forward(self, hidden: torch.Tensor, *, bias: Any = None) -> torch.Tensor:
            out = nn.functional.linear(self.norm(hidden), self.linear.weight, self.linear.bias)
            self.linear(self.norm(hidden))
            return out + bias  # self.scale is forgotten

    first, second = net(), net()
    second.blocks[1].__class__ = Fused
    run_both(checker, first, second, exclude=["blocks.1.*"])
    with opcheck.check(second, quiet=True) as session:
        second(batch())
    assert session.verdict is Verdict.PASS
    checker.check("calibrated")
    assert checker.result.origins == ["blocks.1"]


# ---- hostile tags, many tags --------------------------------------------------------------------

HOSTILE = ["../../x", "x" * 5000, "a\nTensorChecker: b\r\x1b[2J", "ä\u202e\udc80", "", "a#2", "a"]


@pytest.mark.parametrize("tag", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_tags_print_one_line(tag, capsys):
    checker = TensorChecker()
    checker.register_tensor(tag, 1.0)
    checker.register_tensor(tag, 1.0)
    assert checker.check_equal()
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.startswith("TensorChecker: 2 tensors equal in ")
    assert len(out) < 600
    assert out[:-1].isprintable()


def _lines_run(action) -> int:
    """How many lines of Python `action` runs."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def test_work_grows_with_the_number_of_tags_and_no_faster(tmp_path, capsys):
    def compare(num_tags):
        checker = TensorChecker()
        for side in ("a", "b"):
            for number in range(num_tags):
                checker.register_tensor(f"tag {number}", torch.ones(4), side=side)
        assert checker.check_equal()
        checker.save(tmp_path / f"{num_tags}.npz")
        assert TensorChecker.load(tmp_path / f"{num_tags}.npz", quiet=True).check_equal()

    compare(1)  # what is imported and remembered the first time is not counted
    few, many = _lines_run(lambda: compare(10)), _lines_run(lambda: compare(80))
    assert many < 8 * 1.2 * few
    assert capsys.readouterr().out.count("\n") == 1 + 10 + 80


# ---- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["all", "stats"])
def test_each_side_may_run_elsewhere(tmp_path, keep):
    for name, model in (("a", net()), ("b", net())):
        side = TensorChecker(quiet=True, keep=keep)
        with module_register_tensor_checker(model, side), torch.no_grad():
            model(batch())
        side.save(tmp_path / f"{name}.npz")
    checker = TensorChecker.load(tmp_path / "a.npz", tmp_path / "b.npz", keep=keep, quiet=True)
    assert checker.check_equal()
    assert checker.result.sides == ("a", "b")


def test_a_saved_reference_is_compared_with_a_model_that_runs(tmp_path):
    checker = TensorChecker(quiet=True)
    with module_register_tensor_checker(net(), checker) as handle, torch.no_grad():
        handle.models[0].model()
    model = net()
    with module_register_tensor_checker(model, checker), torch.no_grad():
        model(batch())
    checker.save(tmp_path / "a.npz")
    loaded = TensorChecker.load(tmp_path / "a.npz", keep="stats", quiet=True)
    wrong = net()
    wrong.blocks[0].scale = 0.25
    with module_register_tensor_checker(wrong, loaded), torch.no_grad():
        wrong(batch())
    assert not loaded.check_equal()
    assert loaded.result.origins == ["blocks.0"]


def test_a_file_keeps_dtypes_tags_and_numbers(tmp_path):
    checker = TensorChecker(quiet=True)
    value = [torch.tensor([0.1]).to(dtype) for dtype in DTYPES]
    for tag in HOSTILE:
        checker.register_tensor(tag, value)
        checker.register_tensor(tag, [0.5, True, 2])
    checker.save(tmp_path / "x.npz")
    loaded = TensorChecker.load(tmp_path / "x.npz", quiet=True)
    for tag in HOSTILE:
        loaded.register_tensor(tag, value)
    before = [(entry.tag, entry.stored.description) for entry in checker._entries]
    assert [(entry.tag, entry.stored.description) for entry in loaded._entries][
        : len(before)
    ] == before


def test_numpy_opens_a_saved_file(tmp_path):
    checker = TensorChecker(quiet=True)
    checker.register_tensor("t", torch.ones(3))
    checker.save(tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz", allow_pickle=False) as arrays:
        assert arrays["t00000000"].tolist() == [1.0, 1.0, 1.0]


def test_an_npz_of_arrays_is_a_side(tmp_path):
    np.savez(tmp_path / "foreign.npz", out=np.ones(3, np.float32))
    checker = TensorChecker.load(tmp_path / "foreign.npz", quiet=True)
    checker.register_tensor("out", torch.ones(3))
    assert checker.check_equal()


def damaged_files() -> list[tuple[str, bytes | dict[str, Any]]]:
    index = {"schema": "modulecheck.tensors", "version": 1, "sides": [], "module_names": {}}
    row = {
        "tag": "t",
        "side": None,
        "number": 0,
        "member": "../../etc/passwd",
        "description": "(3,):float32",
        "is_number": False,
        "precision": None,
        "site": None,
    }
    return [
        ("no zip", b"text"),
        ("empty", b""),
        ("other schema", {"schema": "x", "version": 1}),
        ("newer", {**index, "version": 99}),
        ("no entries", index),
        ("member", {**index, "problems": [], "entries": [row]}),
        ("dtype", {**index, "problems": [], "entries": [{**row, "description": "x"}]}),
        ("side", {**index, "problems": [], "entries": [{**row, "side": "b"}]}),
        ("types", {**index, "problems": [], "entries": [{**row, "tag": 3}]}),
    ]


@pytest.mark.parametrize(("name", "content"), damaged_files(), ids=lambda value: str(value)[:12])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, name, content):
    import zipfile

    path = tmp_path / "bad.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("index.json", json.dumps(content))
    with pytest.raises(modulecheck.TensorFileError, match=r"bad\.npz"):
        TensorChecker.load(path)


def test_loading_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("it ran",))

    np.savez(tmp_path / "evil.npz", x=np.array([Evil()], dtype=object), allow_pickle=True)
    with pytest.raises(modulecheck.TensorFileError, match="evil"):
        TensorChecker.load(tmp_path / "evil.npz")


def test_stats_keeps_what_is_equal_once(tmp_path):
    checker = TensorChecker(quiet=True, keep="stats")
    big = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for side in ("a", "b"):
        checker.register_tensor("same", big, side=side)
        checker.register_tensor("other", big + (side == "b"), side=side)
    assert checker._scratch.num_bytes == 3 * 4000
    assert checker.check_equal() is False
    assert checker.result.find("same").verdict is Verdict.PASS
    assert checker.check_allclose(atol=1.1)
    checker.clear()
    assert checker._scratch is None


@pytest.mark.parametrize(("keep", "num_alive"), [("all", 1), ("stats", 0)])
def test_stats_leaves_tensors_in_the_file_that_they_were_saved_in(tmp_path, keep, num_alive):
    size, path = 12_347, tmp_path / "a.npz"

    def alive() -> int:
        gc.collect()
        tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor]
        return sum(item.shape == (size,) for item in tensors)

    saved = TensorChecker(quiet=True)
    saved.register_tensor("x", torch.arange(size), side="a")
    saved.save(path)
    saved.clear()
    assert alive() == 0
    loaded = TensorChecker.load(path, keep=keep, quiet=True)
    assert alive() == num_alive
    loaded.register_tensor("x", torch.arange(size), side="b")
    assert loaded.check_equal()
    assert alive() <= 2 * num_alive  # what was loaded to be compared is gone again
    assert [item.name for item in tmp_path.iterdir()] == ["a.npz"]


def test_keep_is_all_or_stats():
    with pytest.raises(ArgumentError, match="keep"):
        TensorChecker(keep="some")


# ---- command ------------------------------------------------------------------------------------


@pytest.fixture
def two_files(tmp_path):
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        checker = TensorChecker(quiet=True)
        checker.register_tensor("x", torch.full((3,), value))
        checker.register_tensor("same", 1)
        if name == "c":
            checker.register_tensor("more", 1)
        checker.save(tmp_path / name)
    return tmp_path


def test_the_command_compares_two_files(two_files, capsys):
    assert main(["tensors", str(two_files / "a"), str(two_files / "b")]) == 0
    out = capsys.readouterr().out
    assert "TensorChecker: 2 tensors equal in x\n" in out
    assert "PASS" in out


def test_the_command_exits_with_1_for_a_difference(two_files, capsys):
    dump = two_files / "dump"
    arguments = ["tensors", str(two_files / "a"), str(two_files / "c")]
    assert main([*arguments, "--dump-mode", "not_equal", "--dump-path", str(dump)]) == 1
    assert "TensorChecker: 2 tensors not equal in x\n" in capsys.readouterr().out
    assert (dump / "x.0.npy").exists()


def test_the_command_writes_a_reproducer(two_files, tmp_path, capsys):
    folder = tmp_path / "repros"
    arguments = ["tensors", str(two_files / "a"), str(two_files / "c")]
    assert main([*arguments, "--repro-dir", str(folder)]) == 1
    (path,) = folder.glob("*.py")
    assert str(path) in capsys.readouterr().out


def test_the_command_exits_with_3_where_a_tag_is_missing(two_files, capsys):
    arguments = ["tensors", str(two_files / "a"), str(two_files / "c")]
    assert main([*arguments, "--criterion", "allclose", "--atol", "2"]) == 3
    assert main([*arguments, "--criterion", "allclose", "--atol", "2", "--exclude", "more"]) == 0


def test_the_command_exits_with_2_for_what_it_cannot_read(two_files, capsys):
    assert main(["tensors", str(two_files / "a"), str(two_files / "none")]) == 2
    assert "none" in capsys.readouterr().err
    assert main(["tensors"]) == 2
    assert main([]) == 2


# ---- assertions ---------------------------------------------------------------------------------


def test_assert_tensor_equal_passes_and_fails():
    assert_tensor_equal({"a": torch.ones(2)}, {"a": torch.ones(2)})
    with pytest.raises(AssertionError, match="2 tensors not equal in tensor_a") as caught:
        assert_tensor_equal({"a": torch.zeros(2)}, {"a": torch.ones(2)})
    assert "first at (0,): 0 against 1 in the reference" in str(caught.value)


def test_assertions_refuse_what_has_no_counterpart():
    with pytest.raises(AssertionError, match="not compared"):
        assert_tensor_equal([1.0], [1.0, 2.0])
    with pytest.raises(AssertionError):
        assert_tensor_equal(torch.empty(0), torch.empty(0))


def test_assert_tensor_allclose_passes_and_fails():
    assert_tensor_allclose(torch.tensor(1.0), torch.tensor(1.000001))
    with pytest.raises(AssertionError, match="not close in tensor"):
        assert_tensor_allclose(torch.tensor(1.0), torch.tensor(1.1), 1e-3)
    nan = torch.tensor(float("nan"))
    assert_tensor_allclose([nan, 1.0], [nan, 1.0], equal_nan=True)


def test_public_names_are_listed_and_documented():
    for name in modulecheck.__all__:
        assert name in dir(modulecheck)
    assert isinstance(modulecheck.tensor_checker, TensorChecker)
