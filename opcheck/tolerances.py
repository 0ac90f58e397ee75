"""Every constant of the pass/fail rule, with the measurement it comes from.

Nothing here computes a verdict (`verdicts.py` does) and nothing imports torch. "Measured" means on
PyTorch 2.13 CPU: 66,251 correct results (every OpInfo sample, large inputs, training steps of 30
models) and as many planted faults. dtypes are named by their strings, `"bfloat16"`; the dtype of
a complex result is that of its components.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

__all__ = [
    "CLASS_LIMITS",
    "EPS",
    "EXACT_BESIDE_BASELINE_ONLY",
    "EXACT_OPS",
    "HALF_DTYPES",
    "OP_CLASS",
    "ClassLimits",
    "compute_eps",
    "documented_tolerances",
    "length_factor",
    "op_class",
]

# ---- the documented criterion -------------------------------------------------------------------

OP_RTOL = 1e-4
OP_ATOL = 1e-5
HALF_TOLERANCE = 1e-2
"""With a float16 or bfloat16 input, rtol and atol are each at least this."""
MODULE_ATOL = 1e-4
MODULE_RTOL = 1e-3
MAX_REL_FLOOR = 1e-8
"""`max_rel` divides by `|expected| + 1e-8`."""


def documented_tolerances(
    *, rtol: float = OP_RTOL, atol: float = OP_ATOL, half: bool = False
) -> tuple[float, float]:
    """(rtol, atol) that apply at op level.

    Args:
        rtol: as the user gave it.
        atol: as the user gave it.
        half: some floating input, also inside lists and keyword arguments, is 16 bit.
    """
    return (max(rtol, HALF_TOLERANCE), max(atol, HALF_TOLERANCE)) if half else (rtol, atol)


# ---- dtypes -------------------------------------------------------------------------------------

HALF_DTYPES = frozenset({"float16", "bfloat16"})
EPS = MappingProxyType(
    {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
)
SMALLEST_NORMAL = MappingProxyType(
    {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
)
ROUNDS_TO_INF = MappingProxyType(
    {
        "float16": 65520.0,
        "bfloat16": (2 - 2.0**-8) * 2.0**127,
        "float32": (2 - 2.0**-24) * 2.0**127,
        "float64": math.inf,
    }
)
"""Magnitudes from here on become Inf: the largest finite value plus half a spacing (ties to even
go up, since the largest value is odd)."""
ALLOWED_UNDERFLOW = MappingProxyType(
    {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
)
"""Added to every allowance. Kernels may flush subnormals to zero, except in float16, whose
subnormals are ordinary results: there it is the smallest of them."""


def compute_eps(dtype: str) -> float:
    """The eps in which an op accumulates: float64 for float64, float32 for all else."""
    return EPS["float64"] if dtype == "float64" else EPS["float32"]


# ---- stage 0, the quick test --------------------------------------------------------------------

QUICK_LIMIT = 8.0
"""float32/float64: `|actual - expected| / (ulp + ec * typical size)` up to here is a PASS. It
settles 88-99% of correct results without a perturbed run."""
QUICK_LIMIT_HALF = 1.01
"""16 bit: one spacing, that is the neighbouring number."""
QUICK_SHIFT_HALF = 0.1
"""16 bit beside a same-dtype result: mean signed shift in spacings. A scale error of 1% in bf16
moves every second element by one spacing, which the limit above lets pass."""

# ---- stage 1, the interval rule -----------------------------------------------------------------

NUM_DRAWS = 4
"""Perturbed runs at most. Tested after 0, 1, 2 and 4 of them."""
PERTURBED_SHARE = 1.0
PERTURBED_SHARE_HALF = 0.25
"""Share of the sensitivity (result moved by inputs moved by one ulp) that is allowed. A 16-bit
kernel computes in float32 and owes less."""
LOCAL_FLOOR = 0.25
"""An element is granted at least this share of the typical sensitivity of its tensor: a single
draw can miss an element by luck."""
MAX_RMS_OVER_MEDIAN = 1e3
"""The rms in the allowance is capped at this many medians, or one huge element hides all others."""
SMALLEST_FILL = 1e3
FILL_SPREAD = 0.01
FILL_OVER_REST = 100.0
LEAST_FILL = 1 / 16
"""Elements so large, so near each other, so much larger than all others and so many of them beside
the others are a fill value, which does not count in the typical size of the rest. Scores beside a
mask of -1e4 or `finfo.min`: x1.01 in all others passed in float32 and bfloat16."""
ELEMENT_LIMIT = 32.0
"""float32/float64: largest distance in allowances, for reduction lengths up to 4096."""
REFERENCE_LENGTH_ROOT = 64.0
"""Beyond 4096 = 64**2 summed terms the limit grows with the square root of the length: ResNet's
stem alarmed at 1.02 of a fixed limit, 0.73 with the true length."""
SHIFT_LIMIT = 2.0
"""float32/float64 beside a same-dtype result: mean signed distance in allowances."""
SHIFT_OF_BASELINE = 4.0
SHIFT_OF_BASELINE_HALF = 2.0
"""And so many times the mean shift of the same-dtype result on top."""
SHIFT_SIGMAS = 5.0
"""16 bit: and so many standard errors of the mean, by the spread of its elements. Where results
cancel, single elements are several of their own spacings off, to either side: the heads of one
token through flash attention in bf16 (64 elements) were shifted by up to 0.73, 2.6 of them."""
SHIFT_CLAMP = 8.0
"""One element counts at most this many spacings in a mean shift."""
ROUNDING_RMS = 0.25
"""rms error of correct rounding in units of eps * rms: between 0.20 and 0.41 over a binade."""
SENSITIVITY_RMS = 0.25
"""Share of the rms sensitivity that may take the place of correct rounding: where a result is well
conditioned it is less than that and changes nothing."""
GOLDEN_RMS_FACTOR = 2.0
"""Without an independent same-dtype result the rms limit is doubled: its own error is unknown."""
MIN_ELEMENTS = 64
"""Mean and rms tests need so many elements."""
MIN_DISTINCT = 16
"""The mean test needs so many distinct expected values: rounding shared by all elements, as in a
constant gradient, is a shift and no fault. And it needs MIN_ELEMENTS of them by weight (Kish's
effective sample size): the input gradient of a convolution under a constant gradient has 200 values
in 2,304 elements, 8 of them in nearly half, and its slow path was 0.62 spacings off."""
DISTINCT_SAMPLE = 4096


def length_factor(reduction_length: float) -> float:
    """How much the float32/float64 limits grow for sums of `reduction_length` terms."""
    return max(1.0, math.sqrt(max(reduction_length, 1.0)) / REFERENCE_LENGTH_ROOT)


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """Limits of a class of ops with 16-bit results."""

    max_q: float
    """K: largest distance, in allowances."""
    max_shift: float
    """M: largest mean signed shift, in spacings."""
    max_rms_ratio: float
    """R: largest rms error, in rms errors of the reference or of correct rounding."""


CLASS_LIMITS = MappingProxyType(
    {
        "std": ClassLimits(6.0, 0.5, 4.0),
        # split-K sums partial results in 16 bit
        "mm": ClassLimits(24.0, 0.5, 8.0),
        # atomics add in 16 bit, in any order
        "atom": ClassLimits(24.0, 2.0, 8.0),
        # a scan kept in 16 bit drifts to one side, whatever its rms
        "scan": ClassLimits(48.0, 8.0, math.inf),
    }
)
"""At these limits no correct result of the large and OpInfo runs failed in 16 bit; of planted
faults 78-89% are found (documented allclose: 37-86%, with 2-18% of ops alarming falsely)."""

_CLASS_MEMBERS = {
    "mm": """
        mm bmm addmm baddbmm addbmm addmv addr mv dot vdot inner matmul linear linear_backward
        einsum tensordot bilinear chain_matmul linalg_multi_dot linalg_vecdot _addmm_activation
        _int_mm _scaled_mm _grouped_mm _trilinear ger outer
        convolution _convolution convolution_overrideable convolution_backward
        _convolution_double_backward convolution_backward_overrideable conv1d conv2d conv3d
        conv_tbc conv_tbc_backward conv_transpose1d conv_transpose2d conv_transpose3d
        mkldnn_convolution mkldnn_linear cudnn_convolution cudnn_convolution_transpose
        cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution
        miopen_convolution_transpose miopen_depthwise_convolution
        slow_conv3d slow_conv_dilated2d slow_conv_dilated3d
        slow_conv_transpose2d slow_conv_transpose3d thnn_conv2d _slow_conv2d_forward
        _slow_conv2d_backward slow_conv3d_forward _conv_depthwise2d conv_depthwise3d
        scaled_dot_product_attention _scaled_dot_product_attention_math
        _scaled_dot_product_attention_math_for_mps
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable
        _scaled_dot_product_fused_attention_overrideable_backward
        _flash_attention_forward _flash_attention_backward
        _efficient_attention_forward _efficient_attention_backward
        _cudnn_attention_forward _cudnn_attention_backward
        _native_multi_head_attention _transform_bias_rescale_qkv _transformer_encoder_layer_fwd
        native_layer_norm_backward native_group_norm_backward native_batch_norm_backward
        cudnn_batch_norm_backward miopen_batch_norm_backward batch_norm_backward
        _batch_norm_impl_index_backward _fused_rms_norm_backward
        cdist _cdist_forward _cdist_backward _euclidean_dist
        mkldnn_rnn_layer mkldnn_rnn_layer_backward _thnn_fused_lstm_cell _cudnn_rnn
        _cudnn_rnn_backward
    """,
    "atom": """
        scatter_add scatter_reduce scatter index_add index_put _index_put_impl
        _unsafe_index_put index_reduce _unsafe_masked_index_put_accumulate put
        embedding_dense_backward embedding_backward embedding_renorm embedding_sparse_backward
        _embedding_bag_backward _embedding_bag_dense_backward
        _embedding_bag_per_sample_weights_backward
        avg_pool2d_backward avg_pool3d_backward
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
        adaptive_max_pool2d_backward adaptive_max_pool3d_backward
        max_pool2d_with_indices_backward max_pool3d_with_indices_backward max_pool2d_backward
        fractional_max_pool2d_backward fractional_max_pool3d_backward
        reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
        replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
        _upsample_nearest_exact3d_backward upsample_linear1d_backward
        upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward
        _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
        grid_sampler_2d_backward grid_sampler_3d_backward
        _grid_sampler_2d_cpu_fallback_backward cudnn_grid_sampler_backward
        affine_grid_generator_backward cudnn_affine_grid_generator_backward
        col2im unfold_backward segment_reduce _segment_reduce_backward bincount histc
    """,
    "scan": "cumsum cumprod logcumsumexp _logcumsumexp cumulative_trapezoid",
}

OP_CLASS = MappingProxyType(
    {name: kind for kind, names in _CLASS_MEMBERS.items() for name in names.split()}
)
"""Op base name without in-place `_` to its class; every other op is "std"."""


def op_class(op_base_name: str) -> str:
    """The class of an op, its in-place spelling included: `index_add_` is "atom", `gelu` "std"."""
    found = OP_CLASS.get(op_base_name)
    if found is None and op_base_name.endswith("_"):
        found = OP_CLASS.get(op_base_name[:-1])
    return found or "std"


# ---- ops that must be equal bit for bit ---------------------------------------------------------

_EXACT_OPS = """
    _chunk_cat.default _sparse_mm_reduce_impl.default _unique2.default
    _unsafe_masked_index.default _unsafe_view.default _upsample_nearest_exact1d.default
    _upsample_nearest_exact2d.default _upsample_nearest_exact3d.default abs.default
    adaptive_max_pool2d.default adaptive_max_pool3d.default amax.default amin.default
    aminmax.default as_strided_copy.default as_strided_scatter.default block_diag.default
    cat.default channel_shuffle.default clamp.Tensor clamp_.default clamp_max.Tensor
    clamp_min.Tensor clamp_min.default clamp_min_.Tensor clamp_min_.default clone.default
    constant_pad_nd.default copy_.default copysign.Tensor cummax.default cummin.default
    diag_embed.default diagonal_backward.default diagonal_copy.default diagonal_scatter.default
    embedding.default expand_copy.default eye.m flip.default floor_divide.default fmax.default
    fmin.default fmod.Tensor fractional_max_pool2d.default fractional_max_pool3d.default
    full.default full_like.default gather.default hardshrink.default hardshrink_backward.default
    hardtanh.default hardtanh_backward.default heaviside.default im2col.default index.Tensor
    index_copy.default index_fill.int_Scalar index_fill.int_Tensor index_select.default
    kthvalue.default masked_fill.Scalar masked_fill.Tensor masked_fill_.Scalar
    masked_scatter.default masked_scatter_backward.default masked_select.default max.dim
    max_pool2d_with_indices.default max_pool2d_with_indices_backward.default
    max_pool3d_with_indices.default max_unpool2d.default max_unpool3d.default maximum.default
    median.default median.dim min.dim minimum.default mode.default nanmedian.default nanmedian.dim
    narrow_copy.default native_dropout_backward.default neg.default neg_.default new_ones.default
    new_zeros.default ones.default ones_like.default permute_copy.default pixel_shuffle.default
    pixel_unshuffle.default reflection_pad1d.default reflection_pad2d.default relu.default
    repeat.default replication_pad1d.default replication_pad2d.default roll.default rot90.default
    scalar_tensor.default scatter.src scatter.value select_backward.default select_scatter.default
    sgn.default slice_backward.default slice_scatter.default softshrink.default
    softshrink_backward.default sort.default sort.stable split_with_sizes_copy.default
    squeeze_.dim squeeze_copy.dim stack.default t_copy.default take.default threshold.default
    threshold_backward.default topk.default transpose_copy.int tril.default triu.default
    unbind_copy.int unfold_copy.default unique_consecutive.default unique_dim.default
    unsafe_split.Tensor unsqueeze_.default unsqueeze_copy.default upsample_nearest1d.default
    upsample_nearest2d.default upsample_nearest3d.default view_copy.default where.self
    zero_.default zeros.default zeros_like.default
"""

EXACT_OPS = frozenset(f"aten.{name}" for name in _EXACT_OPS.split())
"""Ops (full overload names) that were bit-identical under every correct variant: they move or
choose data, or round once. Real dtypes only."""

EXACT_BESIDE_BASELINE_ONLY = frozenset(
    {
        "aten.floor_divide.default",  # 16 bit: 374 (bf16) and 38 (fp16) of 40,000 differ
        "aten.max_pool2d_with_indices_backward.default",  # overlapping windows are summed
        "aten.native_dropout_backward.default",  # scale is rounded: 5,806 of 40,000 differ
    }
)
"""Of the ops above those that need not equal the rounded float64 result. The others do, on every
OpInfo sample in float32, bfloat16 and float16, and on 40,000 normal elements with scalars that no
16-bit dtype holds."""
