"""How single ops are run in float64: the exceptions to "widen the inputs and call the kernel".

A golden must mean what the program meant. Most ops do once their inputs are float64; the ops below
read a dtype, name one, or have results that are right in more than one way. To add one: a function
over the bound arguments in `ADJUST`, or over results in `COMPARE_AS`, and a line saying why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.calls import Call

__all__ = [
    "ADJUST",
    "COMPARED_OUTPUTS",
    "KEPT_DTYPE",
    "NOT_MOVED",
    "NO_FLOAT64",
    "NO_GOLDEN",
    "NO_HALF_BASELINE",
    "NUMBER_TENSORS_IN_FLOAT32",
    "READS_STORAGE",
    "ROUNDED_INSIDE",
    "SAVED_STATISTICS",
    "SCALARS_IN_FLOAT32",
    "SCRATCH",
    "Bound",
    "argument",
    "reduction_length",
    "wider",
]

Bound = dict[str, Any]
"""Parameter name -> value of the arguments that were given."""


def wider(dtype: torch.dtype) -> torch.dtype:
    """float64 for floating dtypes, complex128 for complex ones, itself for all else."""
    if dtype.is_floating_point:
        return torch.float64
    return torch.complex128 if dtype.is_complex else dtype


def argument(call: Call, name: str, default: Any = None) -> Any:
    """An argument of a call by its name in the schema."""
    for param, value in call.traits.bound(call.args, call.kwargs):
        if param.name == name:
            return value
    return default


# ---- arguments ----------------------------------------------------------------------------------

SCALARS_IN_FLOAT32 = frozenset(
    {
        "mul", "div", "lerp", "addcmul", "addcdiv", "leaky_relu", "leaky_relu_backward", "elu",
        "elu_backward", "celu", "softplus", "softplus_backward", "softshrink",
        "threshold", "threshold_backward", "hardtanh_backward",
        # the exponent of a norm
        "norm", "linalg_vector_norm", "renorm",
    }
)  # fmt: skip
"""In 16 bit these take Python numbers in float32; all others round them to the dtype first.
Measured with 0.3 on 20,000 elements in bf16: `lerp` is within 0.50 spacings of the one and 196 of
the other golden, `remainder` within 0.50 and 9115 the other way round; `add`, `sub` and `rsub`
round (0.50 against 56). Every pointwise overload with numbers was tried with 0.3 and 0.7."""

NUMBER_TENSORS_IN_FLOAT32 = frozenset({"mul", "div", "floor_divide"})
"""In 16 bit these take a 0-dim tensor in float32 beside tensors with dims; all other pointwise ops
round it to 16 bit first. Measured as above, with `torch.tensor(0.3)` in either place."""

KEPT_DTYPE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        # the scale is float32 whatever the gradients are
        "_amp_foreach_non_finite_check_and_unscale_": frozenset({"found_inf", "inv_scale"}),
        "_amp_foreach_non_finite_check_and_unscale": frozenset({"found_inf", "inv_scale"}),
        # the kernel takes no wider ones
        "fake_quantize_per_channel_affine_cachemask": frozenset({"scale", "zero_point"}),
        # what a GradScaler hands to a fused optimizer, in place of unscaling itself
        **dict.fromkeys(
            (
                "_fused_adam",
                "_fused_adam_",
                "_fused_adamw",
                "_fused_adamw_",
                "_fused_sgd",
                "_fused_sgd_",
                "_fused_adagrad",
                "_fused_adagrad_",
            ),
            frozenset({"grad_scale", "found_inf"}),
        ),
    }
)
"""Arguments that are neither widened nor moved: a `found_inf` beside 0 leaves the update out."""

NOT_MOVED: Mapping[str, frozenset[str]] = MappingProxyType(
    {"multilabel_margin_loss_backward": frozenset({"is_target"})}
)
"""Floating arguments that are flags: the kernel refuses what lies beside 0 and 1."""

SCRATCH: Mapping[str, frozenset[str]] = MappingProxyType(
    {"mkldnn_rnn_layer_backward": frozenset({"workspace"})}
)
"""Arguments that a kernel may write to though the schema does not say so: memory without a meaning
outside of the op, which torch's own kernel uses again in bfloat16."""

ROUNDED_INSIDE = frozenset(
    {"ldexp", "ldexp_", "binary_cross_entropy_with_logits", "mkldnn_rnn_layer_backward"}
)
"""Ops with a finer result that work in the dtype of a 16-bit argument on the way: `x * 2**y` with
the power in bfloat16. The first two are the only ones of OpInfo, whose samples were tried with
every other tensor narrowed (12,618 calls). An LSTM under autocast has float32 gradients of gates in
bfloat16: 1.2% off, in all elements."""

NO_GOLDEN = frozenset({"nextafter", "nextafter_", "_amp_update_scale", "_amp_update_scale_"})
"""Ops that mean something in their own dtype only."""

NO_HALF_BASELINE = frozenset({"linalg_matrix_exp"})
"""Base names whose CPU kernel gives wrong numbers in 16 bit, and so is no reference there.

Of torch 2.13: `matrix_exp` of 5 x 5 matrices is off by the identity where the norm is 5e-5, NaN at
0.01 and 1e30 at 0.5 (bfloat16).
"""

NO_FLOAT64 = frozenset(
    {
        "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward", "_grouped_mm", "_scaled_mm",
        "mkldnn_linear", "mkldnn_linear_backward", "mkldnn_convolution", "_int_mm",
        "_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm", "_dyn_quant_matmul_4bit",
    }
)  # fmt: skip
"""Ops whose kernels exist in the narrow dtypes only."""

READS_STORAGE = frozenset({"as_strided_copy", "as_strided_scatter", "_reshape_copy"})
"""Ops whose result depends on strides and storage: their widened inputs keep both."""


def _eps_of_dtype(call: Call, bound: Bound) -> None:
    """`eps=None` is the eps of the program's dtype."""
    if bound.get("eps") is None:
        bound["eps"] = torch.finfo(call.args[0].dtype).eps


def _limits_of_dtype(call: Call, bound: Bound) -> None:
    """`posinf=None` is the largest number of the program's dtype."""
    dtype = call.args[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return
    limits = torch.finfo(dtype)
    if bound.get("posinf") is None:
        bound["posinf"] = limits.max
    if bound.get("neginf") is None:
        bound["neginf"] = limits.min


def _plain_softmax(call: Call, bound: Bound) -> None:
    """`half_to_float` asks for a float32 result of a half input; float64 has it anyway."""
    bound["half_to_float"] = False


def _farthest_coordinates(call: Call, bound: Bound) -> None:
    """With p=inf the kernel looks for the coordinate that equals the distance, bit for bit.

    The distance of the program, widened, equals none of the float64 differences.
    """
    first, second = (np.asarray(bound[name]) for name in ("x1", "x2"))
    if math.isinf(bound["p"]) and first.shape[-1]:
        apart = np.absolute(first[..., :, None, :] - second[..., None, :, :])
        bound["cdist"] = torch.from_numpy(apart.max(-1))


def _farthest_coordinates_of_pairs(call: Call, bound: Bound) -> None:
    """As for two sets of points."""
    points = np.asarray(bound["self"])
    if math.isinf(bound["p"]) and points.shape[-1]:
        first, second = np.triu_indices(points.shape[0], 1)
        apart = np.absolute(points[first] - points[second])
        bound["pdist"] = torch.from_numpy(apart.max(-1))


ADJUST: Mapping[str, Callable[[Call, Bound], None]] = MappingProxyType(
    {
        "_softmax": _plain_softmax,
        "_log_softmax": _plain_softmax,
        "_cdist_backward": _farthest_coordinates,
        "_pdist_backward": _farthest_coordinates_of_pairs,
        "rms_norm": _eps_of_dtype,
        "_fused_rms_norm": _eps_of_dtype,
        "nan_to_num": _limits_of_dtype,
        "nan_to_num_": _limits_of_dtype,
    }
)

# ---- results ------------------------------------------------------------------------------------

_FIRST = (0,)
COMPARED_OUTPUTS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        # the others differ in shape by dtype, or are uninitialised memory
        "_embedding_bag": _FIRST,
        "_embedding_bag_forward_only": _FIRST,
        "_ctc_loss": _FIRST,
        "_thnn_fused_lstm_cell": (0, 1),
        "_batch_norm_with_update": (0, 1, 2),
        "_batch_norm_no_update": _FIRST,
        "_batch_norm_impl_index": (0, 1, 2),
        "cudnn_batch_norm": (0, 1, 2),
        "_scaled_dot_product_flash_attention": (0, 1),
        "_scaled_dot_product_efficient_attention": (0, 1),
        "_scaled_dot_product_cudnn_attention": (0, 1),
        "_flash_attention_forward": (0, 1),
        "_efficient_attention_forward": (0, 1),
        "_cudnn_rnn": (0, 1, 2),
        "mkldnn_rnn_layer": (0, 1, 2),
        # the factorisation is a means to the result, and its pivots may differ
        "_linalg_det": _FIRST,
        "_linalg_slogdet": (0, 1),
        "_linalg_solve_ex": _FIRST,
        "linalg_lstsq": _FIRST,
    }
)
"""Results that mean something, where not all of them do."""


_STATISTICS = frozenset({1, 2})
SAVED_STATISTICS: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        "native_layer_norm": _STATISTICS,
        "_fused_rms_norm": frozenset({1}),
        "native_group_norm": _STATISTICS,
        "_weight_norm_interface": frozenset({1}),
        "native_batch_norm": _STATISTICS,
        "_native_batch_norm_legit": _STATISTICS,
        "_batch_norm_with_update": _STATISTICS,
        "_batch_norm_impl_index": _STATISTICS,
    }
)
"""Results that a norm keeps for its backward. Of 16-bit inputs they are 16 bit in one kernel and
float32 in another: the CPU and CUDA differ in layer_norm and batch_norm, and so do kernel and
decomposition."""


# ---- reduction lengths --------------------------------------------------------------------------


_LISTS = ("_foreach_", "_amp_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad")
"""Ops on lists of tensors: each is computed from those at its own place of the other lists."""


def reduction_length(call: Call, out: Tensor, number: int = 0) -> float:
    """How many terms were summed for one element of the result; the true one where it is known.

    With "largest input / output" a ResNet's stem alarmed at 1.02 of its limit, with this at 0.73.

    Args:
        call: the call.
        out: the result.
        number: which one it is, of a list.
    """
    base = call.traits.base.rstrip("_")
    if base.startswith(_LISTS):
        return _length_in_list(call, out, number)
    tensors = _tensors(call)
    known = _KNOWN_LENGTH.get(base)
    if known is not None:
        return known(call, tensors, out)
    largest = max((tensor.numel() for tensor in tensors), default=1)
    return max(1.0, largest / max(1, out.numel()))


def _length_in_list(call: Call, out: Tensor, number: int) -> float:
    """As above, of its own tensor alone: of all of them it would take their number squared."""
    own = call.args[0] if call.args else ()
    if not isinstance(own, (list, tuple)) or not own:
        return 1.0
    source: Tensor = own[number % len(own)]
    return max(1.0, source.numel() / max(1, out.numel()))


def _product_length(call: Call, tensors: list[Tensor], out: Tensor) -> float:
    factors = (
        tensors[1:] if call.traits.base.startswith(("addmm", "badd", "addb", "addmv")) else tensors
    )
    return float(factors[0].shape[-1]) if factors and factors[0].dim() else 1.0


def _convolution_length(call: Call, tensors: list[Tensor], out: Tensor) -> float:
    weight = tensors[1]
    return float(math.prod(weight.shape[1:]))


def _convolution_backward_length(call: Call, tensors: list[Tensor], out: Tensor) -> float:
    grad, x, weight = tensors[:3]
    if out.shape == weight.shape:
        return grad.numel() / max(1, grad.shape[1])
    if out.shape == x.shape:
        return float(math.prod(weight.shape) / max(1, weight.shape[1]))
    return grad.numel() / max(1, out.numel())


_KNOWN_LENGTH: Mapping[str, Callable[[Call, list[Tensor], Tensor], float]] = MappingProxyType(
    {
        "mm": _product_length, "bmm": _product_length, "mv": _product_length,
        "dot": _product_length, "linear": _product_length, "matmul": _product_length,
        "addmm": _product_length, "baddbmm": _product_length, "addmv": _product_length,
        "convolution": _convolution_length, "_convolution": _convolution_length,
        "conv2d": _convolution_length, "conv1d": _convolution_length,
        "convolution_backward": _convolution_backward_length,
    }
)  # fmt: skip


def _tensors(call: Call) -> list[Tensor]:
    found: list[Tensor] = []
    for value in (*call.args, *call.kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, Tensor))
    return found
