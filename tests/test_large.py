"""Calls above `max_numel`: what is looked at, that correct results pass, that faults are found.

The border is set low, so that small tensors go the way of large ones.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import opcheck
from opcheck.records import SkipReason, Verdict
from tests.faults import planted, spoiled

FLOAT = torch.float32
BFLOAT = torch.bfloat16


def values(*shape, dtype=FLOAT, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def checked(tmp_path, step, **options):
    options = {"max_numel": 10_000, "max_checks": None, **options}
    with opcheck.check(log_dir=tmp_path, quiet=True, **options) as session:
        step()
    assert session.coverage.adds_up
    return session


def record_of(session, op):
    (record,) = [item for item in session.records if item.op == f"aten.{op}"]
    assert record.error is None, record.error
    return record


def in_place(x, change):
    other = x.clone()
    change(other)
    return other


X, Y = values(300, 400), values(300, 400, seed=1)


def images(x):
    return x.view(15, 20, 20, 20)


def kernels(y):
    return y.view(-1)[: 12 * 20 * 9].view(12, 20, 3, 3) * 0.1


def squares(x):
    m = x.float().view(-1, 20, 20)
    return m @ m.mT + 20 * torch.eye(20)


def heads(x, y):
    return x.view(5, 6, 250, 16), y.view(5, 6, 250, 16), (x - y).view(5, 6, 250, 16)


def gradients(function, *args):
    given = [a.clone().requires_grad_() if is_float(a) else a for a in args]
    out = function(*given)
    out.backward(torch.ones_like(out) + out.detach())
    return [leaf.grad for leaf in given if is_float(leaf) and leaf.grad is not None]


def leaves(out):
    return list(out) if isinstance(out, (list, tuple)) else [out]


def is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"

CLEAN = {
    "add.Tensor": lambda x, y: x + y,
    "mul.Tensor": lambda x, y: x.t() * y.t()[:, :1],
    "gelu.default": lambda x, y: F.gelu(x),
    "where.self": lambda x, y: torch.where(x > 0, x, y),
    "masked_fill.Scalar": lambda x, y: x.masked_fill(y > 0, 2.0),
    "add_.Tensor": lambda x, y: in_place(x, lambda z: z.add_(y, alpha=0.3)),
    "mul_.Tensor": lambda x, y: in_place(x, lambda z: z.mul_(z)),
    "_foreach_add_.List": lambda x, y: in_place(x, lambda z: torch._foreach_add_([z], [y])),
    "zeros.default": lambda x, y: torch.zeros(300, 400, dtype=x.dtype),
    "_softmax.default": lambda x, y: x.view(3, 100, 400).softmax(1),
    "_log_softmax.default": lambda x, y: x.log_softmax(-1),
    "cumsum.default": lambda x, y: x.cumsum(0),
    "sum.dim_IntList": lambda x, y: x.sum(0),
    "var.correction": lambda x, y: x.var(1),
    "topk.default": lambda x, y: x.topk(5, 1),
    "sort.default": lambda x, y: x.sort(0),
    "argmax.default": lambda x, y: x.argmax(1),
    "cat.default": lambda x, y: torch.cat([x, y[:, :7]], 1),
    "native_layer_norm.default": lambda x, y: F.layer_norm(x, (400,), y[0], y[1]),
    "embedding.default": lambda x, y: F.embedding(torch.arange(299, -1, -1), x),
    "index.Tensor": lambda x, y: x[torch.arange(299, -1, -1)],
    "index_add_.default": lambda x, y: in_place(
        x, lambda z: z.index_add_(0, torch.arange(300) % 7, y)
    ),
    "bmm.default": lambda x, y: torch.bmm(x.view(4, 75, 400), y.view(4, 400, 75)),
    "mm.default": lambda x, y: x @ y.t(),
    "addmm.default": lambda x, y: torch.addmm(x[0, :300], x, y.t(), alpha=0.5, beta=2.0),
    "linalg_vector_norm.default": lambda x, y: x.norm(),
    "sum.default": lambda x, y: x.t().sum(),
    "mean.default": lambda x, y: x.mean(),
    "max.default": lambda x, y: x.max(),
    "mse_loss.default": lambda x, y: F.mse_loss(x, y),
    "_foreach_norm.Scalar": lambda x, y: torch._foreach_norm([x, y]),
    "nll_loss_forward.default": lambda x, y: F.nll_loss(x, torch.arange(300) - 1, ignore_index=-1),
    "convolution.default": lambda x, y: F.conv2d(images(x), kernels(y), y[0, :12], 2, 1),
    "convolution_backward.default": lambda x, y: gradients(
        F.conv2d, images(x), kernels(y), y[0, :12], 2, 1
    ),
    "convolution_backward.default groups": lambda x, y: gradients(
        F.conv2d, images(x), kernels(y).view(24, 10, 3, 3)[:, :5], y[0, :24], 2, 1, 1, 4
    ),
    "convolution_backward.default depthwise": lambda x, y: gradients(
        F.conv2d, images(x), kernels(y).view(240, 1, 3, 3)[:20], None, 1, 1, 1, 20
    ),
    "linalg_inv_ex.default": lambda x, y: torch.linalg.inv(squares(x)),
    "_linalg_eigh.default": lambda x, y: torch.linalg.eigh(squares(x)),
    "linalg_cholesky_ex.default": lambda x, y: torch.linalg.cholesky(squares(x)),
    "upsample_bilinear2d_backward.default": lambda x, y: gradients(
        lambda z: F.interpolate(z, scale_factor=2.0, mode="bilinear"), images(x)
    ),
    f"{ATTENTION}.default": lambda x, y: F.scaled_dot_product_attention(
        *heads(x, y), is_causal=True
    ),
    f"{ATTENTION}_backward.default": lambda x, y: gradients(
        F.scaled_dot_product_attention, *heads(x, y), (heads(y, x)[0][:, :1, :, :1] > 0)
    ),
    "baddbmm.default": lambda x, y: torch.baddbmm(
        x[0, :75], x.view(4, 75, 400), y.view(4, 400, 75), beta=0.5
    ),
}


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, torch.float16], ids=str)
@pytest.mark.parametrize("op", CLEAN)
def test_a_correct_large_call_passes_and_says_what_was_looked_at(tmp_path, op, dtype):
    x, y = X.to(dtype), Y.to(dtype)
    session = checked(tmp_path, lambda: CLEAN[op](x, y))
    record = record_of(session, op.split()[0])
    assert record.verdict is Verdict.PASS, record.reason
    assert record.sample is not None
    is_whole = record.sample.strategy == "exact_full" or op == "_linalg_eigh.default"
    assert (0 < record.sample.share < 1) != is_whole
    assert record.sample.covers_all == is_whole
    assert record.sample.num_elements > 0
    assert session.verdict is Verdict.PASS
    loaded = opcheck.load_run(tmp_path)
    assert [item.sample for item in loaded.records] == [item.sample for item in session.records]


@pytest.mark.parametrize("dtype", [BFLOAT, torch.float16], ids=str)
def test_results_of_a_wider_dtype_than_the_inputs_pass(tmp_path, dtype):
    """The logsumexp of attention is float32 whatever the queries are."""
    queries = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    with opcheck.check(log_dir=tmp_path, quiet=True, max_numel=100) as session:
        attend(queries, queries, queries)
    assert [record.reason for record in session.failures] == []
    assert session.verdict is Verdict.PASS


@pytest.mark.parametrize("op", CLEAN)
def test_results_and_inputs_are_those_of_the_unchecked_step(tmp_path, op):
    """In-place arithmetic of a check could hit the step's own float32 memory."""
    x, y, found = X.clone(), Y.clone(), []
    plain = leaves(CLEAN[op](x, y))
    checked(tmp_path, lambda: found.extend(leaves(CLEAN[op](x, y))))
    assert len(plain) == len(found) > 0
    assert all(torch.equal(left, right) for left, right in zip(plain, found, strict=True))
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


def test_the_step_is_bit_for_bit_the_step_without(tmp_path):
    def step():
        x = X.clone()
        x.add_(Y).mul_(x)
        x.index_add_(0, torch.arange(300) % 7, Y)
        return torch._foreach_mul([x, Y], 0.3)[0] @ Y.t()

    plain, found = step(), []
    checked(tmp_path, lambda: found.append(step()))
    assert torch.equal(plain, found[0])


def test_coverage_tells_covered_sampled_and_unseen_apart(tmp_path):
    def step():
        torch.exp(X[:20, :100])
        torch.exp(X)

    coverage = checked(tmp_path, step).coverage
    assert coverage.elements_checked == 2000
    assert 30_000 < coverage.elements_sampled < 40_000
    assert coverage.elements_unseen == coverage.elements_seen - 2000 - coverage.elements_sampled
    assert opcheck.load_run(tmp_path).coverage.elements_sampled == coverage.elements_sampled


def test_the_sample_depends_on_the_seed_alone(tmp_path):
    def worst(seed):
        session = checked(tmp_path, lambda: torch.exp(X), seed=seed)
        return record_of(session, "exp.default").metrics

    assert worst(0) == worst(0)
    assert worst(0) != worst(1)


def test_the_users_generators_are_not_touched(tmp_path):
    before = torch.get_rng_state()
    checked(tmp_path, lambda: X @ Y.t())
    assert torch.equal(before, torch.get_rng_state())


def test_skip_counts_and_full_compares_every_element(tmp_path):
    session = checked(tmp_path, lambda: torch.exp(X), large="skip")
    assert session.coverage.skipped == {SkipReason.TOO_LARGE: 1}
    session = checked(tmp_path, lambda: torch.exp(X), large="full")
    assert record_of(session, "exp.default").sample is None
    assert session.coverage.elements_checked == X.numel()


def test_an_op_that_writes_and_has_no_strategy_is_not_checkable(tmp_path):
    values = X.clone()
    session = checked(tmp_path, lambda: values.renorm_(2, 0, 1.0))
    assert session.coverage.skipped == {SkipReason.NOT_CHECKABLE: 1}
    assert session.verdict is Verdict.INCONCLUSIVE


def test_an_op_without_strategy_is_not_checkable(tmp_path):
    square = X[:, :300] @ X[:, :300].t()
    session = checked(tmp_path, lambda: torch.linalg.cholesky_ex(square))
    assert session.coverage.skipped[SkipReason.NOT_CHECKABLE] >= 1
    assert session.verdict is Verdict.INCONCLUSIVE


def test_a_sampled_call_uses_up_the_budget_and_one_that_cannot_be_checked_does_not(tmp_path):
    def step():
        for _ in range(3):
            torch.exp(X)

    session = checked(tmp_path, step, max_checks=2)
    assert session.coverage.checked == 2
    assert session.coverage.skipped == {SkipReason.BUDGET_USED_UP: 1}


# ---- faults ----


def zero_tile(y):
    y[100:132, 64:96] = 0


def one_nan(y):
    y.view(-1)[77_777 % y.numel()] = float("nan")


def scaled(y):
    y.add_(y, alpha=0.01)


def convolve():
    CLEAN["convolution.default"](X, Y)


def convolution_gradients():
    CLEAN["convolution_backward.default"](X, Y)


def attend():
    CLEAN[f"{ATTENTION}.default"](X, Y)


FAULTS = [
    ("gelu", zero_tile, lambda: F.gelu(X)),
    ("gelu", scaled, lambda: F.gelu(X)),
    ("gelu", one_nan, lambda: F.gelu(X)),
    ("exp", scaled, lambda: torch.exp(X.bfloat16())),
    ("_softmax", zero_tile, lambda: X.softmax(-1)),
    ("_softmax", one_nan, lambda: X.softmax(0)),
    ("mul_.Tensor", scaled, lambda: X.clone().mul_(Y)),
    ("_foreach_mul.Scalar", scaled, lambda: torch._foreach_mul([X, Y], 0.5)),
    ("bmm", lambda y: y[1].zero_(), lambda: torch.bmm(X.view(4, 75, 400), Y.view(4, 400, 75))),
    ("mm", zero_tile, lambda: X @ Y.t()),
    ("convolution", lambda y: y[:, 5].zero_(), convolve),
    ("convolution", scaled, convolve),
    ("convolution", one_nan, convolve),
    ("convolution_backward", scaled, convolution_gradients),
    (ATTENTION, lambda y: y[:, 2].copy_(y[:, 1]), attend),
    (ATTENTION, lambda y: y[1, 2, 64:128].zero_(), attend),
    (ATTENTION, scaled, attend),
    ("sum", scaled, lambda: X.sum()),
    ("max", scaled, lambda: X.max()),
    ("native_layer_norm", zero_tile, lambda: F.layer_norm(X, (400,))),
]


@pytest.mark.parametrize(
    ("op", "change", "step"), FAULTS, ids=lambda item: getattr(item, "__name__", str(item))
)
def test_a_fault_in_a_large_result_is_found(tmp_path, op, change, step):
    full = f"{op}" if "." in op else f"{op}.default"
    with planted(f"aten.{full}", spoiled(change)):
        session = checked(tmp_path, step)
    assert record_of(session, full).verdict is Verdict.FAIL


OTHER_RESULTS = [
    ("convolution_backward.default groups", 1, scaled),
    ("convolution_backward.default groups", 2, scaled),
    ("convolution_backward.default groups", 1, lambda y: y[-6:].zero_()),
    ("convolution_backward.default depthwise", 1, scaled),
    ("linalg_inv_ex.default", 0, scaled),
    ("_linalg_eigh.default", 0, scaled),
    ("linalg_cholesky_ex.default", 0, scaled),
]


@pytest.mark.parametrize(("op", "number", "change"), OTHER_RESULTS)
def test_a_fault_in_any_result_is_found(tmp_path, op, number, change):
    full = op.split()[0]
    with planted(f"aten.{full}", spoiled(change, result=number)):
        session = checked(tmp_path, lambda: CLEAN[op](X, Y))
    assert record_of(session, full).verdict is Verdict.FAIL


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("multiplier", [1, 2])
def test_a_scaled_depthwise_gradient_in_16_bit_is_found(tmp_path, seed, multiplier):
    """Of 9 or 18 elements at a time there is no mean: 1.1 times the gradient passed."""
    torch.manual_seed(seed)
    image = torch.randn(4, 8, 20, 20, dtype=torch.bfloat16)
    kernel = torch.randn(8 * multiplier, 1, 3, 3, dtype=torch.bfloat16)

    def step():
        gradients(lambda x, w: F.conv2d(x, w, groups=8), image, kernel)

    op = "convolution_backward.default"
    assert record_of(checked(tmp_path, step), op).verdict is Verdict.PASS
    with planted(f"aten.{op}", spoiled(lambda y: y.mul_(1.1), result=1)):
        session = checked(tmp_path, step)
    assert record_of(session, op).verdict is Verdict.FAIL


@pytest.mark.parametrize("sort", [True, False])
def test_a_nan_more_than_was_given_is_found(tmp_path, sort):
    values = X.clone().view(-1)[:20_000]
    values[::700] = torch.nan
    with planted(
        "aten._unique2.default",
        lambda original: (
            lambda *args, **kwargs: (
                torch.cat([(out := original(*args, **kwargs))[0], torch.tensor([torch.nan])]),
                *out[1:],
            )
        ),
    ):
        session = checked(tmp_path, lambda: torch.unique(values, sorted=sort))
    (record,) = [item for item in session.records if item.op == "aten._unique2.default"]
    assert record.verdict is Verdict.FAIL
    assert "number of NaN" in record.reason


def test_a_fault_in_the_gradient_of_an_upsampling_is_found(tmp_path):
    op = "upsample_bilinear2d_backward.default"
    with planted(f"aten.{op}", spoiled(lambda y: y.mul_(1.01))):
        session = checked(tmp_path, lambda: CLEAN[op](X, Y))
    assert record_of(session, op).verdict is Verdict.FAIL


def test_the_worst_element_is_that_of_the_whole_result(tmp_path):
    def change(y):
        y[7::8, 11] = y[7::8, 11] + 3.0

    with planted("aten.exp.default", spoiled(change)):
        record = record_of(checked(tmp_path, lambda: torch.exp(X)), "exp.default")
    row, column = record.metrics.worst_index
    assert column == 11
    assert row % 8 == 7
    assert record.metrics.actual_at == pytest.approx(float(X[row, column].exp()) + 3.0)
    assert f"element ({row}, {column})" in record.reason


def test_an_in_place_op_is_judged_by_what_stood_there_before(tmp_path):
    def twice(original):
        return lambda x, y: original(original(x, y), y)

    with planted("aten.mul_.Tensor", twice):
        session = checked(tmp_path, lambda: X.clone().mul_(Y))
    assert record_of(session, "mul_.Tensor").verdict is Verdict.FAIL


def test_registered_kernels_skip_large_calls_unless_asked(tmp_path):
    kernel = opcheck.checked_kernel("exp", lambda x: x * 0)
    for large, skipped in (("skip", {SkipReason.TOO_LARGE: 1}), ("sample", {})):
        opcheck.enable_precision_check(path=tmp_path / "kernels.log", large=large)
        kernel(torch.ones(1_000_001))
        opcheck.disable_precision_check()
        assert opcheck.coverage().skipped == skipped
    assert opcheck.coverage().failed == 1


@pytest.mark.parametrize("size", [2, (2,), (3, 500), (300, 400), (7, 11, 600)])
@pytest.mark.parametrize("dtype", [None, torch.int64])
@pytest.mark.parametrize("source", [X, X.to(BFLOAT), X[0], X.to(torch.complex64).conj()])
def test_what_is_made_like_a_large_tensor_has_a_size_of_its_own(source, dtype, size, tmp_path):
    def step():
        source.new_zeros(size, dtype=dtype)
        source.new_full((2,) if size == 2 else size, 3, dtype=dtype)

    session = checked(tmp_path, step, max_numel=100)
    assert session.coverage.errors == 0
    assert session.failures == []
    assert [record.op for record in session.records] == [
        "aten.new_zeros.default", "aten.new_full.default",
    ]  # fmt: skip


@pytest.mark.parametrize("change", ["an element", "the shape"])
def test_whether_large_tensors_are_equal_is_not_asked_of_a_sample(change, tmp_path):
    other = X.clone()
    other[150, 200] += 1
    other = other if change == "an element" else other[:7]
    session = checked(tmp_path, lambda: torch.equal(X, other), max_numel=100)
    assert session.coverage.errors == 0
    assert session.failures == []
    assert session.coverage.skipped[SkipReason.NOT_CHECKABLE] == 1


@pytest.mark.parametrize("conjugated", [False, True])
def test_norms_of_a_list_with_complex_tensors(conjugated, tmp_path):
    z = torch.complex(X, Y)
    step = partial(torch._foreach_norm, [z.conj() if conjugated else z, X])
    record = record_of(checked(tmp_path, step), "_foreach_norm.Scalar")
    assert record.verdict is Verdict.PASS
    with planted("aten._foreach_norm.Scalar", spoiled(lambda norm: norm.mul_(1.001))):
        record = record_of(checked(tmp_path, step), "_foreach_norm.Scalar")
    assert record.verdict is Verdict.FAIL


@pytest.mark.parametrize(
    "refused",
    [
        lambda x: x.view(5, 5).div_(torch.ones(4, 4)),
        lambda x: torch._foreach_add_([x], [torch.ones(7)]),
        lambda x: x.view(5, 5).addmm_(torch.ones(3, 3), torch.ones(4, 4)),
        lambda x: x.masked_fill_(torch.ones(3, dtype=torch.bool), 1.0),
    ],
)
def test_arguments_that_the_op_refuses_are_no_crash_of_ours(refused, tmp_path):
    def step():
        with pytest.raises(RuntimeError):
            refused(torch.ones(25))

    for options in ({}, {"max_numel": 10**6, "repeat": True, "blame": True}):
        session = checked(tmp_path, step, **{"max_numel": 8, **options})
        assert session.coverage.errors == 0
        assert session.coverage.skipped[SkipReason.OP_RAISED] == 1


def test_a_crash_before_the_op_is_told_when_it_has_run(tmp_path, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr("opcheck.admission.prepare_large", broken)
    x = torch.ones(25)
    session = checked(tmp_path, lambda: x.add_(1), max_numel=8)
    assert x.tolist() == [2.0] * 25
    (record,) = session.records
    assert record.verdict is Verdict.INCONCLUSIVE
    assert "of ours" in record.error
    assert record.inputs[0] == "(25,):torch.float32"
