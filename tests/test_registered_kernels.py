"""Calls of registered kernels: faults that wrappers of this kind pass, or see where none is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import opcheck
from opcheck import ArgumentError, ArgumentTypeError, SkipReason, Verdict
from tests import kernel_library as kernels
from tests import models
from tests.registering import enabled, json_lines, log_lines, logged_ops, registered
from tests.step_equality import capture, differences

ROOT = Path(__file__).parents[1]
X = torch.linspace(-2, 2, 6).reshape(2, 3)
C = torch.complex(X, X.flip(1))
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def switched_off():
    yield
    opcheck.disable_precision_check()


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "p.log"


@pytest.fixture(params=["allclose", "calibrated"])
def criterion(request) -> str:
    return request.param


def failed_keys(log: Path, config, call, **options) -> list[str]:
    """Ops that are logged when `call` runs with the kernels of `config` registered."""
    with registered(*config), enabled(path=log, **options):
        call()
    assert opcheck.coverage().errors == 0
    assert opcheck.coverage().adds_up
    return logged_ops(log)


# ---- arguments that the kernel writes to ----


def test_correct_inplace_kernels_are_silent(log, criterion):
    config = [(key, kernels.KERNELS[key]) for key in ("add_.Tensor", "mul_.Tensor", "relu_")]
    config.append(("_foreach_add_.List", kernels.foreach_add_))

    def call():
        x = X.clone()
        x.add_(x, alpha=2).mul_(0.5)
        x.t().relu_()
        x[0].add_(x[1])
        torch._foreach_add_([x, x[0]], [X, X[1]])

    assert failed_keys(log, config, call, criterion=criterion) == []
    assert opcheck.coverage().checked == 5


def test_undeclared_write_to_an_input_fails(log):
    def mul(a, b):
        out = kernels.product(a, b)
        b.zero_()
        return out

    assert failed_keys(log, [("mul.Tensor", mul)], lambda: X * X.clone()) == ["mul.Tensor"]
    (record,) = json_lines(log)
    assert "argument 'other' was changed" in record["reason"]


def test_reference_gets_the_inputs_from_before_the_call(log):
    """A kernel that spoils its input and then computes with it agrees with itself only."""

    def exp(x):
        x.zero_()
        return torch.ones_like(x)

    assert failed_keys(log, [("exp", exp)], lambda: torch.exp(X.clone())) == ["exp"]
    (record,) = json_lines(log)
    assert record["metrics"]["max_abs"] == pytest.approx(X.exp().max().item() - 1)


def test_result_that_is_the_input_fails(log):
    assert failed_keys(log, [("abs", lambda x: x)], lambda: torch.abs(torch.ones(3))) == ["abs"]
    (record,) = json_lines(log)
    assert "shares memory" in record["reason"]


# ---- exceptions ----


def test_exception_of_a_kernel_reaches_the_caller_and_is_counted(log):
    def mm(a, b):
        raise ValueError("launch failed")

    def call():
        with pytest.raises(ValueError, match="launch failed"):
            X @ X.t()

    assert failed_keys(log, [("mm", mm)], call) == []
    assert opcheck.coverage().skipped == {SkipReason.OP_RAISED: 1}


def test_crash_of_a_check_is_a_record_and_not_a_pass(log, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("opcheck.comparison.judge", broken)
    with registered(("mul.Tensor", kernels.mul)), enabled(path=log):
        assert torch.equal(X * 2, X + X)
    (record,) = json_lines(log)
    assert record["verdict"] == "INCONCLUSIVE"
    assert "out of luck" in record["error"]
    assert (opcheck.coverage().errors, opcheck.coverage().checked) == (1, 0)
    assert opcheck.load_run(log.with_suffix(".jsonl")).verdict == Verdict.INCONCLUSIVE


# ---- values ----

SEVENTH = torch.tensor([6])
WRONG_VALUES = {
    "sign of Inf": (torch.tensor([INF, 1.0]), torch.tensor([-INF, 1.0])),
    "Inf for NaN": (torch.tensor([NAN, 1.0]), torch.tensor([INF, 1.0])),
    "NaN for Inf": (torch.tensor([INF, 1.0]), torch.tensor([NAN, 1.0])),
    "int64 beyond 2^24": (torch.tensor([2**40]), torch.tensor([2**40 + 1])),
    "int64 beyond 2^53": (torch.tensor([2**60]), torch.tensor([2**60 + 1])),
    "index 10001 for 10000": (torch.tensor([10000]), torch.tensor([10001])),
    "conjugated complex": (torch.tensor([1 + 2j]), torch.tensor([1 - 2j])),
    "one element of many": (torch.ones(200_000), torch.ones(200_000).index_fill(0, SEVENTH, 2.0)),
    "float16 for float64": (torch.ones(3).double(), torch.ones(3).half()),
    "float32 for int64": (torch.ones(3).long(), torch.ones(3)),
    "shape": (torch.ones(3), torch.ones(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_value_fails(log, criterion, name):
    right, wrong = WRONG_VALUES[name]
    call = lambda: torch.ops.aten.clamp_min.Tensor(right, right)  # noqa: E731
    kernel = lambda x, other: wrong.clone()  # noqa: E731
    if right.is_complex():
        call, kernel = (lambda: right * 1), (lambda x, other: wrong.clone())
    key = "mul.Tensor" if right.is_complex() else "clamp_min.Tensor"
    assert failed_keys(log, [(key, kernel)], call, criterion=criterion) == [key]


@pytest.mark.parametrize("value", [NAN, INF, -INF, 0.0, -0.0, 2.0**60])
def test_equal_values_pass(log, criterion, value):
    x = torch.tensor([value, 1.0])
    mul = lambda: x * 1  # noqa: E731
    assert failed_keys(log, [("mul.Tensor", kernels.mul)], mul, criterion=criterion) == []
    assert opcheck.coverage().checked == 1


def test_fp16_softmax_of_zeros_is_found_by_the_calibrated_criterion(log):
    zeros = ("_softmax", lambda x, dim, half_to_float: torch.zeros_like(x))
    logits = torch.zeros(2, 10_000, dtype=torch.float16)
    call = lambda: torch.softmax(logits, 1)  # noqa: E731
    assert failed_keys(log, [zeros], call, criterion="calibrated") == ["_softmax"]


def test_results_of_the_wrong_number_fail(log):
    def layer_norm(*args):
        return kernels.layer_norm(*args)[:2]

    config = [("native_layer_norm", layer_norm)]
    call = lambda: kernels.calls(kernels.make_inputs())["native_layer_norm"]()  # noqa: E731
    with registered(*config), enabled(path=log), pytest.raises(RuntimeError):
        call()
    assert opcheck.coverage().failed == 1


@pytest.mark.parametrize("given", [1, 3])
def test_a_list_of_the_wrong_length_fails(log, given):
    kernel = ("_foreach_mul.Scalar", lambda tensors, scalar: [X * scalar] * given)
    call = lambda: torch._foreach_mul([X, X], 2.0)  # noqa: E731
    assert failed_keys(log, [kernel], call) == ["_foreach_mul.Scalar"]
    assert opcheck.coverage().failed == 1


# ---- kinds of arguments and results ----

ARGUMENTS = {
    "number for a Tensor": ("mul.Tensor", lambda: [X * 3, X * 0.5, X.half() * 3.5, X.int() * 2]),
    "bool for a Tensor": ("mul.Tensor", lambda: X * True),
    "number beside a 0-dim tensor": ("mul.Tensor", lambda: torch.tensor(2.0).bfloat16() * 0.3),
    "number beside integers": ("div.Tensor", lambda: torch.tensor([5, 7]) / 2),
    "tensor in a keyword": ("mm", lambda: torch.ops.aten.mm(X, mat2=X.t())),
    "number in a keyword": ("add.Tensor", lambda: torch.ops.aten.add.Tensor(X, other=X, alpha=2)),
    "list of tensors": ("_foreach_mul.Scalar", lambda: torch._foreach_mul([X, X.t()], 2.0)),
    "None result": ("_foreach_add_.List", lambda: torch._foreach_add_([X.clone()], [X])),
    "tuple result": ("native_layer_norm", lambda: torch.layer_norm(X, [3])),
    "no elements": ("mul.Tensor", lambda: X[:0] * X[:0]),
    "non-contiguous": ("mul.Tensor", lambda: X.t() * X.t()),
    "expanded": ("mul.Tensor", lambda: X * X[:1].expand(2, 3)),
    "conjugated": ("mm", lambda: torch.mm(C, C.mH)),
    "conjugated and contiguous": ("mm", lambda: torch.mm(C.t(), C.conj())),
    "0 dims": ("mul.Tensor", lambda: X[0, 0] * X[0, 1]),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_and_results_of_every_kind(log, criterion, name):
    key, call = ARGUMENTS[name]
    correct = [(key, kernels.KERNELS[key])]
    assert failed_keys(log, correct, call, criterion=criterion) == []
    if name != "no elements":
        assert opcheck.coverage().checked >= 1
        spoiled = [(key, kernels.spoiled(kernels.KERNELS[key], 1.1))]
        assert failed_keys(log, spoiled, call, criterion="calibrated") == [key]


# ---- tolerances of 16 bit ----

HALF = {
    "plain": ("mul.Tensor", lambda dtype: X.to(dtype) * X.to(dtype)),
    "in a list": ("_foreach_mul.Scalar", lambda dtype: torch._foreach_mul([X.to(dtype)], 2.0)),
    "in a keyword": ("mm", lambda dtype: torch.ops.aten.mm(X.to(dtype), mat2=X.t().to(dtype))),
    "in a keyword alone": (
        "native_layer_norm",
        lambda dtype: torch.ops.aten.native_layer_norm(
            input=X.to(dtype), normalized_shape=[3], weight=None, bias=None, eps=1e-5
        ),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("place", HALF)
def test_half_inputs_widen_the_tolerances(log, place, dtype):
    key, call = HALF[place]
    kernel = kernels.spoiled(kernels.KERNELS[key], 1.004)
    fails = failed_keys(log, [(key, kernel)], lambda: call(dtype))
    assert fails == ([key] if dtype is torch.float32 else [])
    (record,) = json_lines(log)
    expected = (1e-4, 1e-5) if dtype is torch.float32 else (1e-2, 1e-2)
    assert (record["rtol"], record["atol"]) == expected


def test_half_inputs_do_not_narrow_wider_tolerances(log):
    wide = kernels.spoiled(kernels.mul, 1.1)
    call = lambda: X.half() * 1  # noqa: E731
    assert failed_keys(log, [("mul.Tensor", wide)], call, rtol=0.2) == []


# ---- what is skipped ----

MILLION = torch.ones(1_000_000)
LARGE = torch.ones(1_000_001)


def test_a_million_elements_are_checked_and_one_more_is_not(log):
    wrong = ("neg", kernels.spoiled(kernels.neg))
    assert failed_keys(log, [wrong], lambda: [-LARGE]) == []
    assert opcheck.coverage().skipped == {SkipReason.TOO_LARGE: 1}
    assert failed_keys(log, [wrong], lambda: [-MILLION]) == ["neg"]


def test_large_tensor_in_a_list_is_skipped(log):
    call = lambda: torch._foreach_mul([X, LARGE], 2.0)  # noqa: E731
    assert failed_keys(log, [("_foreach_mul.Scalar", kernels.foreach_mul)], call) == []
    assert opcheck.coverage().skipped == {SkipReason.TOO_LARGE: 1}


def test_large_calls_use_up_no_budget(log):
    def call():
        for _ in range(3):
            torch.neg(LARGE)
        torch.neg(X)

    wrong = ("neg", kernels.spoiled(kernels.neg))
    assert failed_keys(log, [wrong], call, max_checks=1) == ["neg"]
    assert opcheck.coverage().skipped == {SkipReason.TOO_LARGE: 3}


SKIPPED = {
    "clone": (lambda x, **_: torch.full_like(x, 7), lambda: X.clone(), SkipReason.LAYOUT),
    "copy_": (lambda x, *_: x.zero_(), lambda: torch.zeros(2, 3).copy_(X), SkipReason.LAYOUT),
    "view": (lambda x, size: x.as_strided(size, (1,)), lambda: X.view(6), SkipReason.LAYOUT),
    "uniform_": (
        lambda x, *_, **__: x.fill_(0.5), lambda: torch.zeros(3).uniform_(), SkipReason.RANDOM
    ),
    "normal_": (
        lambda x, *_, **__: x.fill_(0.5), lambda: torch.zeros(3).normal_(), SkipReason.RANDOM
    ),
    "bernoulli": (
        lambda x, **_: torch.ones_like(x), lambda: torch.bernoulli(X.abs() / 4), SkipReason.RANDOM
    ),
    "mm.out": (
        lambda a, b, *, out: out.zero_(),
        lambda: torch.mm(X, X.t(), out=torch.zeros(2, 2)),
        SkipReason.OUT_VARIANT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", SKIPPED)
def test_layout_random_and_out_ops_are_skipped_and_counted(log, key):
    kernel, call, reason = SKIPPED[key]
    assert failed_keys(log, [(key, kernel)], call) == []
    assert opcheck.coverage().skipped == {reason: 1}
    assert opcheck.coverage().checked == 0


def test_random_stream_of_the_user_is_untouched(log):
    def run():
        torch.manual_seed(5)
        first = torch.rand(3)
        dropped = nn.functional.dropout(X.abs() + 1, 0.5)
        return [
            first,
            dropped,
            nn.functional.dropout(X, 0.0),
            torch.randn(3),
            torch.get_rng_state(),
        ]

    plain = run()
    config = [("mul.Tensor", kernels.mul), ("native_dropout", native_dropout)]
    with registered(*config), enabled(path=log):
        checked = run()
        torch.native_dropout(X, 0.5, True)
    assert all(torch.equal(a, b) for a, b in zip(plain, checked, strict=True))
    assert log_lines(log) == []
    assert opcheck.coverage().skipped == {SkipReason.RANDOM: 1}


def native_dropout(x, p, train):
    mask = torch.bernoulli(torch.full_like(x, 1 - p))
    return torch.addcmul(torch.zeros(()), x, mask, value=1 / (1 - p)), mask.bool()


# ---- independence of the reference ----


def test_a_wrong_kernel_does_not_judge_its_neighbours(log, criterion):
    """`_foreach_mul` of torch calls `mul`, `silu_backward` sigmoids and products, and so on."""
    wrong = [(key, kernels.spoiled(kernel)) for key, kernel in kernels.CONFIG if "." in key]
    right = [(key, kernel) for key, kernel in kernels.CONFIG if "." not in key]
    called = kernels.calls(kernels.make_inputs())

    def call():
        for key, _ in right:
            called[key]()

    assert failed_keys(log, wrong + right, call, criterion=criterion) == []
    assert opcheck.coverage().checked >= len(right)


def test_while_a_reference_runs_wrapped_kernels_stand_aside(log):
    """The original of a composite op reaches the wrapped kernels of what it is made of."""
    ran: list[str] = []

    def mul(a, b):
        ran.append("mul")
        return kernels.product(a, b)

    def foreach_mul(tensors, scalar):
        return [torch.lerp(torch.zeros_like(tensor), tensor, scalar) for tensor in tensors]

    config = [("mul.Tensor", mul), ("mul.Scalar", mul), ("_foreach_mul.Scalar", foreach_mul)]
    assert failed_keys(log, config, lambda: torch._foreach_mul([X], 2.0)) == []
    assert opcheck.coverage().checked == 1
    assert ran == []


def test_integer_kernels_have_an_independent_reference(log):
    wrong = ("add.Tensor", lambda a, b, *, alpha=1: kernels.scaled_sum(a, 1))
    call = lambda: torch.arange(3) + 5  # noqa: E731
    assert failed_keys(log, [wrong], call) == ["add.Tensor"]


LATE = """
import sys, torch
library = torch.library.Library("aten", "IMPL")
gelu = torch.library.get_kernel("aten::gelu", "CPU")
library.impl("gelu", lambda x, **kwargs: torch.relu(x), "CPU")
import opcheck
opcheck.enable_precision_check(path=sys.argv[1])
mine = torch.library.Library("aten", "IMPL")
opcheck.PrecisionCheckRegister([("gelu", lambda x, **kwargs: torch.relu(x))], lib=mine)
torch.nn.functional.gelu(torch.linspace(-2, 2, 9))
"""


def test_where_the_original_cannot_be_had_a_decomposition_plays_it(log):
    subprocess.run(
        [sys.executable, "-c", LATE, str(log)], cwd=ROOT, capture_output=True, check=True
    )
    assert logged_ops(log) == ["gelu"]
    (record,) = json_lines(log)
    assert record["reference"] == "decomposition"


# ---- threads and processes ----


def in_thread(call) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_call_of_another_thread_is_checked(log):
    wrong = ("neg", kernels.spoiled(kernels.neg))
    assert failed_keys(log, [wrong], lambda: in_thread(lambda: -X)) == ["neg"]


def test_threads_share_one_budget_and_lose_no_call(log):
    def call():
        def many():
            for _ in range(50):
                torch.neg(X)

        threads = [threading.Thread(target=many) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    config = [("neg", kernels.neg)]
    assert failed_keys(log, config, call, max_checks=25) == []
    coverage = opcheck.coverage()
    assert (coverage.seen, coverage.checked) == (400, 25)


def test_enabling_and_disabling_while_threads_call(log):
    stop = threading.Event()
    errors: list[BaseException] = []

    def calls():
        try:
            while not stop.is_set():
                torch.neg(X)
        except BaseException as error:  # noqa: BLE001 - told to the test
            errors.append(error)

    with registered(("neg", kernels.spoiled(kernels.neg))):
        threads = [threading.Thread(target=calls) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(15):
            with enabled(path=log, log_once=False, max_checks=None):
                torch.neg(X)
            coverage = opcheck.coverage()
            assert coverage.adds_up
            assert coverage.failed >= 1
            assert coverage.errors == 0
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert set(logged_ops(log)) == {"neg"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_starts_disabled(log):
    with registered(("neg", kernels.spoiled(kernels.neg))), enabled(path=log):
        pid = os.fork()
        if pid == 0:
            try:
                torch.neg(X)
                os._exit(0 if opcheck.coverage().seen == 0 else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert log_lines(log) == []


# ---- inside a session ----


def test_session_hears_of_a_kernel_once(tmp_path, log):
    """Enabled as well: the session alone is told."""
    with registered(*kernels.CONFIG), enabled(path=log):
        with opcheck.check(log_dir=tmp_path / "session", quiet=True) as session:
            X * X
            X.clone().add_(X)
        assert [record.op for record in session.records] == ["aten.mul.Tensor", "aten.add_.Tensor"]
        assert session.coverage.adds_up
        assert session.coverage.seen == 3
        assert opcheck.coverage().seen == 0
        X * X
        assert opcheck.coverage().seen == 1
    assert session.verdict == Verdict.PASS


def test_session_switches_kernels_on_without_enabling(tmp_path):
    with (
        registered(("neg", kernels.spoiled(kernels.neg))),
        opcheck.check(log_dir=tmp_path, quiet=True) as session,
    ):
        torch.neg(X)
        in_thread(lambda: -X)
    assert [record.verdict for record in session.records] == [Verdict.FAIL] * 2
    assert session.coverage.seen == 2
    assert {record.reference for record in session.records} == {"cpu kernel"}


def test_session_sees_what_a_kernel_calls(tmp_path):
    """The mode sees `_softmax` alone; the wrong kernel is the one below."""

    def softmax(x, dim, half_to_float):
        weights = torch.exp(x)
        return torch.addcdiv(torch.zeros(()), weights, weights.cumsum(dim)[:, -1:])

    with (
        registered(("exp", kernels.spoiled(kernels.exp)), ("_softmax", softmax)),
        opcheck.check(log_dir=tmp_path, quiet=True) as session,
    ):
        torch.softmax(X, 1)
    assert [record.op for record in session.failures] == ["aten.exp.default"]


def test_innermost_of_nested_sessions_and_both_modes(tmp_path):
    with registered(("neg", kernels.neg)):
        with (
            opcheck.check(log_dir=tmp_path, quiet=True) as outer,
            opcheck.check(log_dir=tmp_path, quiet=True) as inner,
        ):
            torch.neg(X)
            in_thread(lambda: -X)
        assert (outer.coverage.seen, inner.coverage.seen) == (1, 2)


def test_session_tells_module_and_phase(tmp_path):
    workload = models.mlp()
    wrong = kernels.spoiled(kernels.addmm)
    with (
        registered(("addmm", wrong)),
        opcheck.check(workload.model, log_dir=tmp_path, quiet=True) as session,
    ):
        workload.step()
    found = {(record.module, record.phase) for record in session.failures}
    linear = {
        (name, "forward")
        for name, module in workload.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert found == linear


def test_undeclared_write_is_found_in_a_session_too(tmp_path):
    def mul(a, b):
        out = kernels.product(a, b)
        b.zero_()
        return out

    with (
        registered(("mul.Tensor", mul)),
        opcheck.check(log_dir=tmp_path, quiet=True) as session,
    ):
        X * X.clone()
    assert "was changed" in session.failures[0].reason


def test_budget_of_a_session_counts_its_own_calls_alone(tmp_path, log):
    with registered(("neg", kernels.neg)), enabled(path=log, max_checks=1):
        torch.neg(X)
        torch.neg(X)
        with opcheck.check(log_dir=tmp_path, max_checks=2, quiet=True) as session:
            torch.neg(X)
    assert session.coverage.checked == 1


# ---- where a call was made ----


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


def test_module_phase_and_line_without_a_session(log):
    config = [("addmm", kernels.addmm), ("mm", kernels.mm), ("neg", kernels.neg)]
    with registered(*config), enabled(path=log, max_checks=None):
        net = Block()
        net(X).sum().backward()
        torch.neg(X)
    records = json_lines(log)
    places = [(record["op"], record["module"], record["phase"]) for record in records]
    assert places[:2] == [
        ("aten.addmm.default", "inner.0", "forward"),
        ("aten.addmm.default", "inner.1", "forward"),
    ]
    assert set(places[2:-1]) == {("aten.mm.default", "", "backward")}
    assert places[-1] == ("aten.neg.default", "", "other")
    assert "test_module_phase_and_line" in records[-1]["source"]


def test_optimizer_phase_without_a_session(log):
    parameter = nn.Parameter(X.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=False)
    parameter.grad = torch.ones(2, 3)
    with registered(("add_.Tensor", kernels.add_)), enabled(path=log):
        optimizer.step()
    assert {record["phase"] for record in json_lines(log)} == {"optimizer"}


# ---- the step ----


def test_training_step_is_bit_for_bit_the_unchecked_one(log):
    config = [item for item in kernels.CONFIG if item[0] != "embedding"]

    def run(context) -> object:
        workload = models.transformer()
        optimizer = torch.optim.AdamW(workload.model.parameters(), foreach=True)
        with registered(*config), context:
            for _ in range(2):
                loss = workload.step(optimizer)
        return capture(workload, loss, optimizer)

    plain = run(nullcontext())
    checked = run(enabled(path=log, max_checks=None, criterion="calibrated"))
    assert differences(plain, checked) == []
    assert log_lines(log) == []
    assert opcheck.coverage().checked > 100
    assert opcheck.coverage().errors == 0


# ---- a library with its own loop ----


def test_checked_kernel_called_directly(log):
    neg = opcheck.checked_kernel("neg", kernels.spoiled(kernels.neg))
    with enabled(path=log):
        out = neg(X)
        neg(torch.tensor([1, 2]))
    assert torch.equal(out, kernels.spoiled(kernels.neg)(X))
    assert logged_ops(log) == ["neg"]


def test_checked_kernel_is_judged_although_torch_computes_in_its_place(log):
    """Called directly its op goes to nobody else: integers have a reference then too."""
    add = opcheck.checked_kernel("aten::add.Tensor", lambda a, b, *, alpha=1: kernels.add(a, b))
    with enabled(path=log, log_once=False):
        add(torch.arange(3), torch.arange(3), alpha=2)
        add(torch.arange(3), torch.arange(3))
    assert [record["verdict"] for record in json_lines(log)] == ["FAIL", "PASS"]


def test_checked_kernel_with_own_loop(log):
    library = torch.library.Library("aten", "IMPL")
    try:
        for key, kernel in kernels.CONFIG:
            library.impl(key, opcheck.checked_kernel(key, kernel), "CPU")
        with enabled(path=log):
            for call in kernels.calls(kernels.make_inputs()).values():
                call()
    finally:
        library._destroy()
    assert log_lines(log) == []
    assert opcheck.coverage().checked > len(kernels.CONFIG)


def test_checked_kernel_keeps_the_name():
    assert opcheck.checked_kernel("mm", kernels.mm).__name__ == "mm"


@pytest.mark.parametrize(
    ("key", "fn", "error"),
    [
        ("no_such_op", kernels.mm, ArgumentError),
        ("add.Tensr", kernels.add, ArgumentError),
        ("", kernels.add, ArgumentError),
        (3, kernels.add, ArgumentTypeError),
        ("mm", "kernel", ArgumentTypeError),
    ],
)
def test_checked_kernel_of_nothing_is_an_error(key, fn, error):
    with pytest.raises(error, match=str(key) or "key"):
        opcheck.checked_kernel(key, fn)
