"""Programs that nobody would write: the step stays as it is, nothing correct fails, all adds up."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import opcheck
from modulecheck import PrecisionChecker
from opcheck.records import SkipReason
from opcheck.verdicts import Rule, judge_golden
from tests.exploring import examples
from tests.faults import planted, spoiled
from tests.step_equality import EmptyMode, active_modes, global_hooks, same_bits

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what torch says is its own

PROPERTY = examples(60, database=None, phases=[Phase.explicit, Phase.generate])

# ---- random programs ----------------------------------------------------------------------------

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64,
    torch.int32, torch.uint8, torch.bool, torch.int8, torch.complex128,
)  # fmt: skip

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "zeros of both signs": lambda x: torch.copysign(torch.zeros_like(x), x),
    "constant": lambda x: torch.full_like(x, 3.0),
    "huge": lambda x: x * 1e30,
    "beyond": lambda x: x * 3e38,
    "tiny": lambda x: x * 1e-39,
    "integers": lambda x: (x * 4).round(),
    "one NaN": lambda x: _with_first(x, float("nan")),
    "one Inf": lambda x: _with_first(x, float("inf")),
    "all NaN": lambda x: torch.full_like(x, float("nan")),
    "large mean": lambda x: x + 1e4,
}


def _with_first(values: Tensor, bad: float) -> Tensor:
    if values.numel():
        values.view(-1)[0] = bad
    return values


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.clone().transpose(0, -1) if x.dim() > 1 else x,
    "every other": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2] if x.dim() else x,
    "offset": lambda x: torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[x.numel() and 1 :].view_as(x),
    "expanded": lambda x: x[:1].expand_as(x) if x.dim() and len(x) else x,
    "overlapping": lambda x: _overlapping(x),
    "flipped sign bit": lambda x: torch._neg_view(x) if x.dtype not in (torch.bool,) else x,
    "conjugate": lambda x: x.conj(),
}


def _overlapping(values: Tensor) -> Tensor:
    if values.dim() < 2 or not values.numel():
        return values
    return values.clone().as_strided(values.shape, [1] * values.dim())


@dataclass(frozen=True)
class Made:
    """How one tensor of a program is made; the same each time."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: str
    layout: str
    seed: int

    def make(self) -> Tensor:
        """A new tensor."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            drawn = VALUES[self.values](drawn)
            if not (self.dtype.is_floating_point or self.dtype.is_complex):
                # what a float beyond the integers becomes is undefined
                drawn = drawn.nan_to_num(0, 100, -100).clamp(-100, 100).abs()
            return LAYOUTS[self.layout](drawn.to(self.dtype))


def _grad_of(x: Tensor) -> Tensor:
    return torch.func.grad(lambda y: y.sin().sum())(x)


def _jvp_of(x: Tensor) -> Any:
    return torch.func.jvp(torch.sigmoid, (x,), (torch.ones_like(x),))


def _checkpointed(x: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(functional.gelu, x, use_reentrant=False)


UNARY: tuple[Callable[[Tensor], Any], ...] = (
    torch.exp, torch.log, torch.log1p, torch.sqrt, torch.rsqrt, torch.sin, torch.tan, torch.tanh,
    torch.sigmoid, torch.erf, torch.erfinv, torch.lgamma, torch.digamma, torch.abs, torch.neg,
    torch.reciprocal, torch.sign, torch.floor, torch.round, torch.angle, torch.isfinite,
    torch.sum, torch.mean, torch.std, torch.prod, torch.amax, torch.argmax, torch.logcumsumexp,
    torch.isnan, torch.nan_to_num, torch.logical_not, torch.square, torch.frac, torch.expm1,
    functional.gelu, functional.silu, functional.relu, functional.softplus, functional.hardswish,
    functional.mish, partial(torch.softmax, dim=-1), partial(torch.log_softmax, dim=0),
    partial(torch.cumsum, dim=0), partial(torch.cumprod, dim=-1), partial(torch.sort, dim=-1),
    partial(torch.logsumexp, dim=-1), partial(torch.var_mean, dim=-1), partial(torch.median, dim=0),
    partial(torch.cummax, dim=0), partial(torch.topk, k=1), partial(torch.flip, dims=(0,)),
    partial(torch.clamp, min=-1, max=1), partial(torch.linalg.vector_norm, ord=2),
    partial(torch.sum, dim=-1, keepdim=True), partial(torch.mean, dim=0), torch.nonzero,
    partial(torch.pow, exponent=3), partial(torch.pow, exponent=1.5), torch.t, torch.ravel,
    lambda x: functional.layer_norm(x, x.shape[-1:]), lambda x: functional.normalize(x, dim=-1),
    lambda x: x.to(torch.float32), lambda x: x.to(torch.bfloat16), lambda x: x.to(torch.float16),
    lambda x: x.unsqueeze(0), lambda x: x[..., 1:], lambda x: x.diff(), torch.tril, torch.frexp,
    lambda x: x.exp_(), lambda x: x.add_(1), lambda x: x.mul_(x), lambda x: x.zero_(),
    lambda x: x.clamp_(0, 2), lambda x: x.t_(), lambda x: x.cumsum_(0), lambda x: x.fill_(7),
    lambda x: x.relu_(), lambda x: x.masked_fill_(x > 0, 2), lambda x: x[..., :1].neg_(),
    _grad_of, _jvp_of, torch.vmap(torch.cos), torch.vmap(lambda x: x.sum()), _checkpointed,
    lambda x: torch.func.hessian(lambda y: (y**3).sum())(x.reshape(-1)[:3]),
    lambda x: x.unbind(0)[0].mul_(2), lambda x: x.view(-1)[::2].add_(1), lambda x: x.data.mul_(2),
    lambda x: x.diagonal(0, 0, -1).zero_(), lambda x: x.expand(2, *x.shape).sum(0),
    lambda x: x.expand(2, *x.shape).add_(1), lambda x: x.resize_(x.numel() // 2),
    lambda x: x.select(0, -1),
    lambda x: torch.sort(x, out=(torch.empty(0, dtype=x.dtype), torch.empty(0, dtype=torch.int64))),
    lambda x: torch.abs(x, out=x), lambda x: torch.neg(x, out=torch.empty(3)),
    lambda x: x.sum(dtype=torch.int8), lambda x: x * 100, lambda x: x.to(torch.int8) * 100,
    lambda x: x.to(torch.complex64), torch.view_as_real, lambda x: x.real.mul_(2),
    torch.conj_physical,
    lambda x: x.imag, lambda x: x.view(torch.uint8), torch.fft.fft, lambda x: torch.fft.irfft(x),
    lambda x: x.unfold(0, 2, 1), lambda x: x.roll(1, 0), lambda x: torch.unique(x),
    lambda x: torch.histc(x.float(), 4), lambda x: x.argsort(stable=True), torch.trace, torch.triu,
    lambda x: x.put_(torch.tensor([0, 0]), x.reshape(-1)[:2], accumulate=True), torch.det,
    lambda x: functional.pad(x, (1, 1)), lambda x: functional.avg_pool1d(x, 2), torch.numel,
    lambda x: x.new_zeros(2).requires_grad_(), lambda x: x.mT @ x, torch.special.i0e,
    lambda x: functional.one_hot(x, 130), lambda x: torch.bincount(x.ravel()), torch.signbit,
)  # fmt: skip

BINARY: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.fmod, torch.remainder,
    torch.atan2, torch.hypot, torch.maximum, torch.fmin, torch.copysign, torch.nextafter,
    torch.logaddexp, torch.floor_divide, torch.eq, torch.lt, torch.logical_and, torch.bitwise_xor,
    torch.matmul, torch.outer, torch.dot, torch.xlogy, torch.cdist, torch.kron, torch.isclose,
    torch.bmm, torch.bitwise_left_shift, torch.gcd, torch.heaviside, functional.mse_loss,
    functional.smooth_l1_loss, functional.cosine_similarity,
    partial(functional.kl_div, reduction="sum"),
    partial(torch.sub, alpha=2), partial(torch.div, rounding_mode="floor"),
    partial(torch.lerp, weight=0.3), lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.cat([a, b]), lambda a, b: torch.stack([a, b]),
    lambda a, b: functional.linear(a, b), lambda a, b: torch.einsum("i...,i...->...", a, b),
    lambda a, b: torch.addmm(a, a, b), lambda a, b: torch.addcdiv(a, a, b, value=0.5),
    lambda a, b: a.add_(b), lambda a, b: a.mul_(b), lambda a, b: a.div_(b), lambda a, b: a.copy_(b),
    lambda a, b: a[1:].add_(b[:-1]), lambda a, b: torch.mul(a[:-1], b[1:], out=a[1:]),
    lambda a, b: a.copy_(b.flip(0)), lambda a, b: torch.exp(b, out=a.t()),
    lambda a, b: torch.add(a, b, out=a), lambda a, b: torch.mm(a, b, out=torch.empty(0)),
    lambda a, b: a.index_add_(0, torch.zeros(len(b), dtype=torch.int64), b),
    lambda a, b: torch.cat([a, b], out=torch.empty(0)), lambda a, b: a.t().add_(b.t()),
    lambda a, b: a[..., :1].mul_(b[..., -1:]), lambda a, b: torch.maximum(a, b, out=b),
    lambda a, b: a.masked_fill_(b > 0, -1), lambda a, b: a.addcmul_(a, b, value=2),
    lambda a, b: a.lerp_(b, 0.5), lambda a, b: torch.sub(a, b, out=torch.empty(2, 2)),
    lambda a, b: torch.index_put(a, (b.long() % max(len(a), 1),), a[0], accumulate=True),
    lambda a, b: a.scatter_add_(0, b.long() * 0, b), lambda a, b: a.gather(0, b.long() * 0),
    lambda a, b: torch.vmap(torch.mul)(a, b), lambda a, b: torch.func.vjp(torch.mul, a, b)[1](a),
    lambda a, b: torch.searchsorted(a, b), lambda a, b: torch.bucketize(a, b.ravel()),
    lambda a, b: torch.complex(a, b), lambda a, b: torch.polar(a, b), torch.isin, torch.tensordot,
    lambda a, b: a.set_(b), lambda a, b: a.swapaxes_(0, -1), torch.bitwise_right_shift, torch.lcm,
    lambda a, b: functional.conv1d(a, b), lambda a, b: torch.baddbmm(a, a, b),
    lambda a, b: torch._foreach_lerp_([a], [b], 0.5), lambda a, b: torch._foreach_norm([a, b]),
    lambda a, b: functional.embedding(a, b), lambda a, b: torch.take_along_dim(a, b.long() * 0, 0),
    lambda a, b: torch.equal(a, b), lambda a, b: torch.cross(a, b), lambda a, b: torch.vdot(a, b),
    lambda a, b: torch._foreach_add([a, b], 1), lambda a, b: torch._foreach_mul_([a, b], 2),
    # overlapping arguments give garbage, another one each time, without any checker
    lambda a, b: functional.scaled_dot_product_attention(a[None].clone(), *[b[None].clone()] * 2),
)  # fmt: skip

Op = tuple[int, int, int]
"""Which op (the unary ones first), and which two tensors of the pool."""
GRADIENTS = ("", "backward", "double backward")
Program = tuple[list[Made], list[Op], str]

SHAPES = st.one_of(
    st.sampled_from([(), (0,), (1,), (3, 0), (4, 4), (3, 5), (2, 3, 3)]),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
)
TENSORS = st.builds(
    Made,
    shape=SHAPES,
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from(list(VALUES)),
    layout=st.sampled_from(list(LAYOUTS)),
    seed=st.integers(0, 50),
)
OPS = st.tuples(
    st.integers(0, len(UNARY) + len(BINARY) - 1), st.integers(0, 30), st.integers(0, 30)
)
PROGRAMS = st.tuples(
    st.lists(TENSORS, min_size=1, max_size=3),
    st.lists(OPS, min_size=1, max_size=12),
    st.sampled_from(GRADIENTS),
)


def is_moderate(tensor: Tensor) -> bool:
    """Squares, and products of a few, stay far within float32."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return True
    sizes = tensor.detach().abs().double()
    sizes = sizes[sizes.isfinite() & (sizes != 0)]
    return bool(((sizes > 1e-4) & (sizes < 2e4)).all())


def run_program(program: Program, *, moderate: bool) -> list[Any]:
    """Every tensor that the program makes or changes, and the text of what it raises."""
    made, ops, gradients = program
    torch.manual_seed(0)
    pool = [item.make() for item in made]
    inputs = list(pool)
    if moderate:
        pool = [x for x in pool if is_moderate(x)] or [torch.ones(3)]
    if gradients:
        inputs = [x.requires_grad_() for x in pool if x.is_floating_point() or x.is_complex()]
    notes: list[str] = []
    for number, left, right in ops:
        first, second = pool[left % len(pool)], pool[right % len(pool)]
        try:
            if number < len(UNARY):
                result = UNARY[number](first)
            else:
                result = BINARY[number - len(UNARY)](first, second)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            notes.append(f"{type(error).__name__}: {error}")
            continue
        leaves = result if isinstance(result, (list, tuple)) else [result]
        pool += [x for x in leaves if isinstance(x, Tensor) and x.numel() <= 5000]
        if moderate:
            pool = [x for x in pool if is_moderate(x)] or [torch.ones(3)]
    notes.append(_backward(pool, twice=gradients == "double backward") if gradients else "")
    grads = [x.grad for x in inputs if x.grad is not None]
    return [*pool, *grads, *notes, torch.get_rng_state()]


def _backward(pool: list[Tensor], *, twice: bool) -> str:
    ends = [x for x in pool if x.requires_grad and not x.is_complex() and x.grad_fn is not None]
    if not ends:
        return ""
    try:
        if twice:
            leaves = [x for x in pool if x.requires_grad and x.is_leaf]
            found = torch.autograd.grad(
                ends[-1].sum(), leaves, create_graph=True, allow_unused=True
            )
            ends = [x.abs() for x in found if x is not None and x.requires_grad] or ends
        ends[-1].sum().backward()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def differing(plain: list[Any], checked: list[Any]) -> list[str]:
    """What is not the same bit for bit in the two runs of a program."""
    if len(plain) != len(checked):
        return [f"{len(plain)} results and {len(checked)}"]
    found = []
    for place, (left, right) in enumerate(zip(plain, checked, strict=True)):
        if isinstance(left, Tensor):
            same = isinstance(right, Tensor) and same_bits(
                left.detach().resolve_conj().resolve_neg(),
                right.detach().resolve_conj().resolve_neg(),
            )
            same = same and (left.stride(), left._version) == (right.stride(), right._version)
        else:
            same = left == right
        if not same:
            found.append(f"{place}: {left} became {right}")
    return found


KNOWN = ("aten.fmod.", "aten.remainder.")
"""Vector kernels of torch that are wrong for large quotients; they are told, rightly."""


def assert_unharmed(program: Program, *, moderate: bool, **options: Any) -> None:
    with EmptyMode():
        plain = run_program(program, moderate=moderate)
    with tempfile.TemporaryDirectory() as folder:
        session = opcheck.check(
            log_dir=folder, quiet=True, max_checks=None, record_dir=f"{folder}/records", **options
        )
        with session:
            checked = run_program(program, moderate=moderate)
        logged = opcheck.load_run(folder)
    assert differing(plain, checked) == []
    wrong = [
        (record.op, record.reason)
        for record in session.failures
        # far out some kernels overflow on the way to a result that is in range
        if moderate or not (record.metrics.num_nonfinite or record.op.startswith(KNOWN))
    ]
    assert wrong == []
    assert [record.error for record in session.records if record.error] == []
    assert session.coverage.errors == 0
    assert session.coverage.adds_up
    # what nobody accounted for would be there, so that the sum alone could not fail
    assert set(session.coverage.skipped) <= set(SkipReason) - {SkipReason.INTERRUPTED}
    assert logged.verdict == session.verdict
    assert len(logged.records) == len(session.records)
    assert session.report()


@PROPERTY
@given(PROGRAMS)
def test_any_program_is_left_alone_and_passes(program: Program) -> None:
    assert_unharmed(program, moderate=True)


@PROPERTY
@given(PROGRAMS)
def test_extreme_numbers_crash_nothing_and_fail_only_where_a_kernel_overflows(
    program: Program,
) -> None:
    assert_unharmed(program, moderate=False)


@PROPERTY
@given(PROGRAMS)
def test_every_option_at_once_leaves_any_program_alone(program: Program) -> None:
    assert_unharmed(
        program, moderate=False, blame=True, repeat=True, selftest=True, record="all",
        large="sample", max_numel=8,
    )  # fmt: skip


# ---- what stays behind --------------------------------------------------------------------------


def surroundings() -> tuple[Any, ...]:
    """What a checker may have changed in the process."""
    return (
        active_modes(), global_hooks(), torch.is_grad_enabled(), torch.get_num_threads(),
        torch.Tensor.backward, torch.autograd.backward, nn.Module.__call__,
        torch.optim.Optimizer.zero_grad,
    )  # fmt: skip


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_in_the_step_leaves_nothing_of_any_option(error, tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    before, keys = surroundings(), [sorted(vars(item)) for item in model.modules()]
    session = opcheck.check(
        model, log_dir=tmp_path, quiet=True, blame=True, repeat=True, selftest=True,
        repro_dir=tmp_path / "repro", record="all", record_dir=tmp_path / "records",
    )  # fmt: skip
    thrown = error("of the user")
    with pytest.raises(error) as caught, session:
        model(torch.ones(3, 4)).sum().backward()
        raise thrown
    assert caught.value is thrown
    assert surroundings() == before
    assert [sorted(vars(item)) for item in model.modules()] == keys
    assert session.coverage.adds_up
    assert session.failures == []


def test_both_checkers_at_once_see_the_step_and_leave_nothing(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 2)))
    before = surroundings()
    checker = PrecisionChecker(backend="aot_eager")
    checker.wrap_all_children(model, depth=0)
    with opcheck.check(model, log_dir=tmp_path, quiet=True) as session:
        with checker.installed(model):
            model(torch.ones(3, 4)).sum().backward()
        result = checker.collect()
    assert surroundings() == before
    assert session.failures == []
    assert session.coverage.checked > 0
    assert session.coverage.adds_up
    assert str(result.verdict) == "PASS"


# ---- what these programs showed -----------------------------------------------------------------

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("actual", "expected", "passes"),
    [
        (complex(NAN, NAN), complex(-INF, NAN), True),
        (complex(INF, NAN), complex(INF, 0), True),
        (complex(1, 0), complex(INF, 0), False),
        (complex(1, 0), complex(0, NAN), False),
        (complex(NAN, 0), complex(1, 0), False),
        (complex(1, INF), complex(1, 1), False),
    ],
)
def test_complex_numbers_that_are_not_finite_agree_as_a_whole(actual, expected, passes) -> None:
    sides = [np.array([value, 2 + 1j], dtype=np.complex64) for value in (actual, expected)]
    outcome = judge_golden(*sides, perturbed=None, rule=Rule(dtype="float32"))
    assert outcome.passed is passes


@pytest.mark.parametrize("overlapping", [True, False])
def test_writing_to_shared_elements_is_skipped_and_to_others_is_not(overlapping, tmp_path) -> None:
    target = torch.ones(6).as_strided((3, 2), (1, 1) if overlapping else (2, 1))
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        torch._foreach_mul_([target], 2.0)
    assert session.coverage.skipped.get(SkipReason.OVERLAPPING, 0) == overlapping
    assert session.coverage.checked == (not overlapping)
    assert session.coverage.adds_up
    assert session.failures == []


def test_nan_to_num_of_complex_numbers_knows_their_limits(tmp_path) -> None:
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        torch.nan_to_num(torch.tensor([complex(INF, -INF), 1j]))
    assert session.failures == []
    assert session.coverage.checked == 1


@pytest.mark.parametrize("bins", [4, 6, 1])
@pytest.mark.parametrize("value", [-0.1467950940132141, 0.1, 3.0, -1e4, 12345.678])
def test_one_value_on_the_edge_of_a_bin_is_counted_on_either_side(value, bins, tmp_path) -> None:
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        torch.histc(torch.full((1,), value), bins)
    assert session.failures == []
    assert session.coverage.checked >= 1


def test_a_value_counted_in_a_bin_far_away_fails(tmp_path) -> None:
    wrong = planted("aten.histc.default", spoiled(lambda counts: counts.copy_(counts.roll(2))))
    with wrong, opcheck.check(log_dir=tmp_path, quiet=True) as session:
        torch.histc(torch.full((1,), 0.1), 4)
    assert [record.op for record in session.failures] == ["aten.histc.default"]


def test_how_much_memory_a_tensor_is_a_view_of_is_no_number_to_check(tmp_path) -> None:
    """Forward-mode AD asks; a copy on which the reference runs has less."""
    base = torch.arange(12.0)
    with opcheck.check(log_dir=tmp_path, quiet=True) as session:
        torch.func.jvp(torch.sigmoid, (base[2:5],), (torch.ones(3),))
        assert not torch.ops.aten._has_same_storage_numel(base[:3], torch.ones(3))
    assert session.failures == []
    assert session.coverage.checked
