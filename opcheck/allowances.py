"""What single ops may do beyond the rule, each with its measured evidence.

To add one: measure what a correct kernel does, by how much it exceeds the rule, and what bounds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from opcheck.arrays import Array, round_to
from opcheck.tolerances import EPS, HALF_DTYPES, ROUNDS_TO_INF, compute_eps

__all__ = ["ALLOWANCES", "Allowance", "Inputs", "find_allowance"]

Inputs: TypeAlias = Sequence[Array | None]
Formula: TypeAlias = Callable[[Inputs, Array, str], Array | float]
"""(inputs, golden, dtype) to a number or an array of golden's shape. `inputs` are the op's tensor
arguments in schema order as float64 arrays, None where one is absent; `dtype` is the result's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What one op may do beyond the rule, since its CPU kernel is known to do it."""

    evidence: str
    half_result: bool = False
    """Only for results of 16 bit."""
    half_inputs: bool = False
    """Only where an input has 16 bits."""
    outputs: tuple[int, ...] | None = None
    """Only these outputs of the op; None: all."""
    limit_factor: float = 1.0
    """Times the element limit and, in 16 bit, the rms limit."""
    shift_factor: float = 1.0
    """Times the limit of the mean shift."""
    test_rms: bool = True
    extra: Formula | None = None
    """Added to the allowance of each element, which the class limit multiplies."""
    bound: Formula | None = None
    """Replaces the rule: |actual - golden| <= bound, no mean or rms test."""
    nonfinite_where: Formula | None = None
    """The kernel overflows where float64 does not: NaN and Inf in these elements are no FAIL, but
    a note."""
    note: str = ""
    """For the record, where what is left of the check is weak."""


def _top(values: Array | None) -> float:
    """Largest finite magnitude; 0.0 if there is none."""
    if values is None:
        return 0.0
    return float(np.max(np.absolute(values), initial=0.0, where=np.isfinite(values)))


def _root_mean_square(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(np.sqrt(np.mean(finite * finite))) if finite.size else 0.0


def _of(values: Array | None) -> Array:
    return np.zeros(0) if values is None else values


def _first(inputs: Inputs) -> Array:
    return _of(inputs[0])


def _gelu_cancels(inputs: Inputs, _golden: Array, dtype: str) -> Array:
    return 0.25 * compute_eps(dtype) * np.absolute(_first(inputs))


def _gelu_backward_cancels(inputs: Inputs, golden: Array, dtype: str) -> Array:
    grad, x = inputs[0], inputs[1]
    if grad is None or x is None:
        return np.zeros_like(golden)
    slope: Array = np.absolute(grad) * (1.0 + x * x)
    return 0.25 * compute_eps(dtype) * slope


def _sum_of_rows(inputs: Inputs, golden: Array, dtype: str, *, of_weight: bool) -> Array:
    grad, x, mean, rstd = inputs[:4]
    if grad is None or x is None or mean is None or rstd is None:
        return np.full(golden.shape, math.inf)
    rows = max(mean.size, 1)
    grad, x = grad.reshape(rows, -1), x.reshape(rows, -1)
    normalized = (x - mean.reshape(rows, 1)) * rstd.reshape(rows, 1)
    sizes = grad * np.maximum(1.0, np.absolute(normalized))
    norm = np.sqrt(np.sum(np.square(sizes), axis=0)).reshape(golden.shape)
    largest: Array = np.maximum(np.maximum(norm, np.absolute(golden)), _root_mean_square(golden))
    bound: Array = 2.0 * EPS[dtype] * math.sqrt(rows) * largest
    terms = grad * normalized if of_weight else grad
    bound += np.absolute(_row_by_row(terms, dtype).reshape(golden.shape) - golden)
    return bound


def _row_by_row(terms: Array, dtype: str) -> Array:
    """A sum in 16 bit: it stops growing where a term is less than half a spacing."""
    total = np.zeros(terms.shape[1:])
    for row in terms:
        total = round_to(total + row, dtype).astype(np.float64)
    return total


def _sum_beside_wide_weights(
    inputs: Inputs, golden: Array, _dtype: str, *, of_weight: bool
) -> Array:
    """The weights are float32, so their gradients are; the sums are of 16 bit all the same."""
    return _sum_of_rows(inputs, golden, "bfloat16", of_weight=of_weight)


def _log_softmax_cancels(inputs: Inputs, golden: Array, dtype: str) -> Array:
    grad, output = inputs[0], inputs[1]
    if grad is None or output is None:
        return np.zeros_like(golden)
    # the softmaxed dimension is not a tensor argument: the largest sum there can be
    total = np.max(np.absolute(grad), initial=0.0)
    subtracted: Array = np.exp(np.minimum(output, 0.0)) * total
    return 0.0625 * compute_eps(dtype) * subtracted


def _logits(inputs: Inputs, golden: Array, dtype: str) -> float:
    return EPS[dtype] * (_top(inputs[0]) + math.log(max(_first(inputs).size, 1)))


def _weighted_logits(inputs: Inputs, golden: Array, dtype: str) -> float:
    return _logits(inputs, golden, dtype) * max([1.0, *(_top(item) for item in inputs[2:])])


def _sums_of_logarithms(inputs: Inputs, _golden: Array, dtype: str) -> float:
    # the loss and not log_alpha, whose unreached entries are memory that nobody wrote
    return compute_eps(dtype) / 32 * _top(inputs[0]) * _top(inputs[-2])


def _one_normalized_element(inputs: Inputs, golden: Array, dtype: str) -> Array:
    bias: Any = inputs[2] if len(inputs) > 2 and inputs[2] is not None else 0.0
    weight = _top(inputs[1]) if len(inputs) > 1 and inputs[1] is not None else 1.0
    floor = 0.25 * EPS["float32"] * _LARGEST_RSTD * weight * _top(inputs[0])
    cancelled: Array = np.where(golden == bias, floor, 0.0)
    return cancelled


def _one_normalized_gradient(inputs: Inputs, golden: Array, dtype: str) -> Array | float:
    grad, x, _, rstd = inputs[:4]
    if grad is None or x is None or rstd is None or golden.size != 1:
        return 0.0
    rounding: Array = np.sqrt(
        np.sum(np.square(grad.reshape(-1) * x.reshape(-1) * rstd.reshape(-1)))
    )
    return np.where(golden == 0.0, 0.0625 * compute_eps(dtype) * rounding, 0.0)


def _products_cancel(inputs: Inputs, golden: Array, dtype: str) -> float:
    return 0.0625 * EPS[dtype] * math.prod(_root_mean_square(_of(item)) for item in inputs[:2])


def _rounded_between(inputs: Inputs, golden: Array, dtype: str) -> float:
    return EPS[dtype] / 3.0 * _root_mean_square(golden)


def _beside_largest(inputs: Inputs, golden: Array, dtype: str) -> Array:
    largest: Array = np.max(np.absolute(golden), axis=-1, keepdims=True, initial=0.0)
    share = 0.0625 * compute_eps(dtype) * math.sqrt(max(golden.shape[-1], 1))
    return np.broadcast_to(share * largest, golden.shape)


def _exp_overflows(inputs: Inputs, golden: Array, dtype: str) -> Array:
    """Where exp(-x * target) does, or its products; of a sum of terms, where one of them does."""
    *grads, x, target = (_of(item) for item in inputs)
    factor = np.maximum(1.0, np.absolute(target))
    for grad in grads:
        factor = factor * np.maximum(1.0, np.absolute(grad))
    largest = math.log(ROUNDS_TO_INF[dtype]) * (1.0 - 4.0 * EPS[dtype])
    where: Array = -x * target + np.log(factor) >= largest
    return where if where.shape == golden.shape else np.full(golden.shape, where.any())


_LARGEST_RSTD = 316.0
"""1 / sqrt(1e-5), of a row that is constant."""


def _pooled(inputs: Inputs, golden: Array, dtype: str) -> Array:
    window = _first(inputs).size / max(golden.size, 1)
    drift: Array = math.sqrt(window) * np.absolute(golden)
    return EPS[dtype] * (_root_mean_square(_first(inputs)) + drift)


def _spread_over_windows(inputs: Inputs, golden: Array, dtype: str) -> Array:
    grad = _first(inputs)
    term = _top(grad) * grad.size / max(golden.size, 1)
    return np.full(golden.shape, 0.05 * EPS[dtype] * term)


def _interpolated(inputs: Inputs, golden: Array, dtype: str) -> Array:
    return np.full(golden.shape, 0.5 * EPS[dtype] * _root_mean_square(_first(inputs)))


def _at_positions(inputs: Inputs, golden: Array, dtype: str) -> Array:
    x = _first(inputs)  # batch, channels, and the sizes that are resized
    farthest = sum(x.shape[2:])
    share = 0.125 * compute_eps(dtype) * farthest
    return np.full(golden.shape, share * _root_mean_square(x))


def _gradient_at_positions(inputs: Inputs, golden: Array, dtype: str) -> Array:
    grad = _first(inputs)
    num_terms = max(1.0, 2.0 ** (golden.ndim - 2) * grad.size / max(golden.size, 1))
    typical = max(math.sqrt(num_terms) * _root_mean_square(grad), _root_mean_square(golden))
    share = 0.125 * compute_eps(dtype) * sum(golden.shape[2:])
    return np.full(golden.shape, share * typical)


def _gradient_of_positions(inputs: Inputs, golden: Array, dtype: str) -> Array:
    x, grid = inputs[1], inputs[2]
    if x is None or grid is None:
        return np.zeros(golden.shape)
    sizes = np.array(x.shape[:1:-1], dtype=np.float64)  # a grid has the last dimension first
    slope = 0.125 * compute_eps(dtype) * float(sizes.sum()) * _root_mean_square(golden)
    # bilinear gradients jump where a position crosses a pixel, by either meaning of the corners
    positions = ((grid + 1) * (sizes - 1) / 2, ((grid + 1) * sizes - 1) / 2)
    near = np.zeros(golden.shape, dtype=bool)
    for position in positions:
        near |= np.absolute(position - np.rint(position)) <= 2.0 * compute_eps(dtype) * sizes
    return np.where(near, 2.0 * _top(golden), slope)


def _steps(_inputs: Inputs, golden: Array, dtype: str) -> float:
    half_spacing = 2.0**-25 if dtype == "float16" else 0.0  # of its subnormal numbers
    return 1.5 * EPS[dtype] * _top(golden) + 0.5 * golden.size * half_spacing


def _floored(inputs: Inputs, golden: Array, dtype: str) -> Array:
    rounding: Array = EPS[dtype] * np.absolute(golden)
    dividend, divisor = _first(inputs), inputs[1] if len(inputs) > 1 else None
    if divisor is None:
        return rounding + 1.0
    with np.errstate(all="ignore"):
        quotient = np.broadcast_to(dividend / divisor, golden.shape)
        away = np.absolute(quotient - np.rint(quotient))
        return rounding + (away <= 2.0 * EPS[dtype] * np.absolute(quotient))


_SUMMED_IN_HALF = "this kernel sums rows in 16 bit, so a wide error is allowed"
_SUMS_OF_ROWS = tuple(
    allowance
    for output in (1, 2)
    for allowance in (
        Allowance(
            half_result=True,
            outputs=(output,),
            bound=partial(_sum_of_rows, of_weight=output == 1),
            note=_SUMMED_IN_HALF,
            evidence="rms error 0.15 * eps * sqrt(rows) * rms(g), largest 0.49 up to 32,768 rows; a"
            " column whose terms have one sign stops growing (fp16, 4,096 rows of ones: 2,048), as"
            " a sum row by row does: 4 times a limit by |g| alone",
        ),
        Allowance(
            half_inputs=True,
            outputs=(output,),
            bound=partial(_sum_beside_wide_weights, of_weight=output == 1),
            note=_SUMMED_IN_HALF,
            evidence="float32 weights beside 16-bit activations (autocast): every sum is a 16-bit"
            " number; -93 for -88.01 over 1,024 rows of 24",
        ),
    )
)
_LAYER_IN_ONE_OP = Allowance(
    half_result=True,
    outputs=(0,),
    extra=_rounded_between,
    evidence="projections, scores and weights are each rounded to 16 bit, which an element that"
    " cancels shows: 30 times the plain limit; |y-g| up to 4.1 * eps * rms(g) in 80 calls of 16 to"
    " 512 features, masked and not, in bf16 and fp16 (8 in all allowed)",
)
_SMALL_VALUES = (
    "small values of a matrix of low rank are off by up to 5.9 * eps times its largest one at 300"
    " rows (2 * sqrt(rows) allowed); the typical size that the rule goes by is near zero there"
)
_OVERFLOWS = "the kernel overflows where float64 does not"
_WEIGHTS = Allowance(
    half_result=True,
    shift_factor=2.0,
    extra=_interpolated,
    evidence="interpolation weights in 16 bit: 75 calls an op, |y-g| up to 2.5 * eps * rms(x) (3 in"
    " all allowed; up to 15.9 times the plain limit), shift 1.24 times its limit",
)
_POSITIONS = Allowance(
    extra=_at_positions,
    evidence="positions of pixels are computed in float32 and are off by eps * size of a pixel:"
    " |y-g| up to 4 * 2^-23 * rms(x) * the sum of the sizes, inputs of 3 to 255 pixels a side",
)
_POSITIONS_BACKWARD = Allowance(
    extra=_gradient_at_positions,
    evidence="as forward, summed over the pixels that a gradient is of: 3.3 times the plain limit",
)
_RESIZED = (_WEIGHTS, _POSITIONS)
_GRID = Allowance(
    half_result=True,
    bound=lambda inputs, golden, dtype: 2.5 * _top(inputs[0]),
    note="sampling positions are computed in 16 bit: only the range of the result was checked",
    evidence="a position is off by eps * size pixels, so another pixel is taken: |y-g| up to 1.95"
    " times max|x| in bf16, 1.77 in fp16",
)
_GRID_BACKWARD = Allowance(
    half_result=True,
    bound=lambda inputs, golden, dtype: 3.0 * _top(golden),
    note=_GRID.note,
    evidence="as forward: |y-g| up to 2.07 times max|g|",
)
_GRID_POSITIONS = Allowance(
    outputs=(1,),
    extra=_gradient_of_positions,
    evidence="gradients of the grid: positions are off by eps * size pixels, 1.8 (bicubic) and 2.2"
    " (bilinear) times the limit in the middle of 256 and 512 pixels, and 3,145 times where a"
    " position crosses a pixel (5 of 524,288)",
)
_LINSPACE = Allowance(
    half_result=True,
    bound=_steps,
    evidence="the step is rounded to 16 bit: 165 calls, |y-g| up to 1.06 * eps * max|g|; values"
    " near zero are many of their own spacings off; steps below 2^-14 are rounded as subnormal"
    " numbers of fp16, half of all steps away from an end: 0.52 of what that adds",
)
_FLOOR_DIVISION = Allowance(
    half_result=True,
    bound=_floored,
    evidence="the quotient is rounded to 16 bit before it is floored or truncated: off by one where"
    " it is within 2 eps of an integer (bf16 trunc: 4,720 of 40,000); 0.998 of this bound",
)
_LOGSUMEXP = Allowance(
    half_inputs=True,
    outputs=(1,),
    limit_factor=4.0,
    evidence="float32 logsumexp of 16-bit scores: 2.2 times the limit on training steps",
)
_FLASH_BACKWARD = Allowance(
    half_result=True,
    test_rms=False,
    evidence="where the softmax saturates the gradients of query and key cancel to zero and what is"
    " left is rounding: rms ratio 1e3 to 1e7 on all 4 OpInfo samples with q 0.9; x1.01 still shows"
    " in the mean shift",
)
_CONSTANT_FACTOR = Allowance(
    half_result=True,
    shift_factor=2.0,
    evidence="2/n is rounded to 16 bit, which shifts all elements alike: 1.34 times the limit",
)

_FLASH = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_flash_attention_forward",
)

_STEPS = Allowance(
    limit_factor=4.0,
    evidence="errors of a step feed the next: 1.34 times the limit (bf16, 800), 0.9 (float32, 50)",
)
ALLOWANCES: Mapping[str, Allowance | tuple[Allowance, ...]] = MappingProxyType(
    {
        "_ctc_loss_backward": Allowance(
            extra=_sums_of_logarithms,
            evidence="exp of sums of logarithms as large as the loss, each rounded: 1.24 times"
            " the limit in 50 steps of 20 classes",
        ),
        "gelu": Allowance(
            extra=_gelu_cancels, evidence="1 + erf cancels: |y-g| up to 3 * 2^-23 * |x|"
        ),
        "gelu_backward": Allowance(
            extra=_gelu_backward_cancels,
            evidence="as gelu; 1.18 times the limit in 16 bit where the slope is nearly zero",
        ),
        "native_batch_norm": Allowance(
            half_result=True,
            outputs=(3, 4),
            shift_factor=3.0,
            evidence="running statistics in 16 bit: momentum, both products and the sum are each"
            " rounded, the same way in all channels: mean shift up to 0.56, largest error 1.2",
        ),
        "native_layer_norm_backward": (
            *_SUMS_OF_ROWS,
            Allowance(
                outputs=(1,),
                extra=_one_normalized_gradient,
                evidence="as native_layer_norm: x * rstd - mean * rstd over one element",
            ),
        ),
        "_log_softmax_backward_data": Allowance(
            extra=_log_softmax_cancels,
            evidence="grad - exp(output) * sum cancels where the class is certain, and exp near 1"
            " is insensitive to its argument: 1.71 times the limit on a trained ResNet",
        ),
        "_log_softmax": Allowance(
            half_result=True,
            bound=_logits,
            evidence="x - max is rounded to 16 bit: 33 (bf16) and 56 (fp16) times the limit near"
            " zero; 0.73 of this bound",
        ),
        "binary_cross_entropy_with_logits": Allowance(
            half_result=True,
            bound=_weighted_logits,
            evidence="terms are rounded to 16 bit: 8.3 times the limit; 0.91 of this bound",
        ),
        **dict.fromkeys(_FLASH, _LOGSUMEXP),
        **{f"{name}_backward": _FLASH_BACKWARD for name in _FLASH[:2]},
        "grid_sampler_2d": _GRID,
        "grid_sampler_3d": _GRID,
        "grid_sampler_2d_backward": (
            _GRID_BACKWARD,
            Allowance(
                outputs=(0,),
                extra=_gradient_at_positions,
                evidence="as of resizing: bicubic gradients of 256 x 256 pixels, 1.46 times the"
                " limit (float32)",
            ),
            _GRID_POSITIONS,
        ),
        "grid_sampler_3d_backward": (_GRID_BACKWARD, _GRID_POSITIONS),
        "linspace": _LINSPACE,
        "native_layer_norm": Allowance(
            half_result=True,
            outputs=(0,),
            extra=_one_normalized_element,
            evidence="over one element x * rstd - mean * rstd leaves its rounding, where float64"
            " gives 0: up to 0.44 * 2^-23 * rstd * |x| (1.5 in all allowed)",
        ),
        "_adaptive_avg_pool2d_backward": Allowance(
            half_result=True,
            limit_factor=2.5,
            extra=_spread_over_windows,
            evidence="windows that overlap are summed in 16 bit: 1.81 times the limit in 53 calls"
            " (bf16), and sums that cancel 22 times (fp16, 20 by 24 pixels of 9 by 11); 0.69 * eps"
            " * the largest term in all (3 allowed)",
        ),
        "_adaptive_avg_pool3d_backward": Allowance(
            half_result=True, limit_factor=5.0, evidence="3.42 times the limit in 43 calls (bf16)"
        ),
        "_adaptive_avg_pool3d": Allowance(
            half_result=True,
            bound=_pooled,
            evidence="the window is summed in 16 bit: 10.5 times the limit; 0.74 of this bound",
        ),
        "div.Tensor_mode": _FLOOR_DIVISION,
        "div.Scalar_mode": _FLOOR_DIVISION,
        "floor_divide": _FLOOR_DIVISION,
        "mse_loss_backward": _CONSTANT_FACTOR,
        "huber_loss_backward": _CONSTANT_FACTOR,
        "upsample_linear1d": _RESIZED,
        "upsample_bilinear2d": _RESIZED,
        "upsample_bicubic2d": _RESIZED,
        "upsample_trilinear3d": _RESIZED,
        "_upsample_bilinear2d_aa": _RESIZED,
        "_upsample_bicubic2d_aa": _RESIZED,
        "upsample_linear1d_backward": _POSITIONS_BACKWARD,
        "upsample_bilinear2d_backward": _POSITIONS_BACKWARD,
        "upsample_trilinear3d_backward": _POSITIONS_BACKWARD,
        "_upsample_bilinear2d_aa_backward": _POSITIONS_BACKWARD,
        "_upsample_bicubic2d_aa_backward": _POSITIONS_BACKWARD,
        "upsample_bicubic2d_backward": (
            Allowance(
                half_result=True,
                shift_factor=2.5,
                evidence="weights in 16 bit: shift 1.75 times its limit (bf16, scale_factor 0.6)",
            ),
            _POSITIONS_BACKWARD,
        ),
        "mkldnn_rnn_layer": _STEPS,
        "mkldnn_rnn_layer_backward": _STEPS,
        "_native_multi_head_attention": _LAYER_IN_ONE_OP,
        "_transformer_encoder_layer_fwd": _LAYER_IN_ONE_OP,
        "_linalg_svd": Allowance(outputs=(1,), extra=_beside_largest, evidence=_SMALL_VALUES),
        "_linalg_eigh": Allowance(outputs=(0,), extra=_beside_largest, evidence=_SMALL_VALUES),
        "xlogy": Allowance(
            half_result=True,
            shift_factor=2.5,
            evidence="log y is rounded to 16 bit before the product, which for one number y shifts"
            " all elements alike: 1.9 times the limit (fp16, y = 0.3)",
        ),
        "_trilinear": Allowance(
            half_result=True,
            shift_factor=2.0,
            evidence="products and sums are rounded to fp16 one by one: shift 1.31 times its limit",
        ),
        "convolution_backward": Allowance(
            half_result=True,
            outputs=(0,),
            shift_factor=1.5,
            evidence="sums over output channels in fp16: shift 1.08 times its limit, 100 elements",
        ),
        "linalg_cross": Allowance(
            half_result=True,
            extra=_products_cancel,
            evidence="both products are rounded to 16 bit and cancel: 1.32 times the limit (fp16)",
        ),
        "soft_margin_loss": Allowance(
            half_result=True, nonfinite_where=_exp_overflows, evidence=f"exp in fp16: {_OVERFLOWS}"
        ),
        "soft_margin_loss_backward": Allowance(
            half_result=True, nonfinite_where=_exp_overflows, evidence=f"exp in fp16: {_OVERFLOWS}"
        ),
    }
)
"""By op base name, or by base name and overload, both without in-place `_`. Measured against
float64 with the plain rule on OpInfo samples and on normal inputs of 64 to 10,007 elements."""


def find_allowance(
    op: str, *, dtype: str, output: int = 0, half_inputs: bool = False
) -> Allowance | None:
    """The named allowance that applies to one output of a call, if there is one.

    Args:
        op: base name with or without overload, `gelu`, `div_.Tensor_mode`.
        dtype: of the result.
        output: which of the op's outputs.
        half_inputs: some floating input has 16 bits.
    """
    base, _, overload = op.partition(".")
    base = base[:-1] if base.endswith("_") else base
    named = ALLOWANCES.get(f"{base}.{overload}") or ALLOWANCES.get(base) or ()
    for item in named if isinstance(named, tuple) else (named,):
        is_other = item.outputs is not None and output not in item.outputs
        is_wide = item.half_result and dtype not in HALF_DTYPES
        if not (is_other or is_wide or (item.half_inputs and not half_inputs)):
            return item
    return None
