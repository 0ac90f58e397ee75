"""Products of float32 whose factors the user's settings allow to be rounded: TF32, bfloat16."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from opcheck import _torch
from opcheck.calls import Call
from opcheck.runstate import factor_precision
from opcheck.tolerances import op_class

__all__ = ["factor_step", "is_product", "kind_of_product"]

_STEPS = MappingProxyType({"tf32": 2.0**-11, "bf16": 2.0**-9})
"""Largest relative error of a factor that is rounded to 10 and to 8 bits."""
_NO_MATRIX_UNIT = frozenset(
    {
        "mv", "dot", "vdot", "addmv", "addr", "ger", "outer", "linalg_vecdot", "_trilinear",
        "native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward",
        "cudnn_batch_norm_backward", "miopen_batch_norm_backward", "batch_norm_backward",
        "_batch_norm_impl_index_backward", "_fused_rms_norm_backward",
        "_transform_bias_rescale_qkv", "_thnn_fused_lstm_cell", "_cdist_backward", "_int_mm",
    }
)  # fmt: skip
"""Of the class of products those that are no matrix product: float32 stays float32 in them."""
_WITH_PRODUCTS_INSIDE = frozenset({"linalg_matrix_exp"})


def is_product(base: str) -> bool:
    """The op multiplies matrices, or convolves."""
    base = base.rstrip("_")
    if base in _WITH_PRODUCTS_INSIDE:
        return True
    return op_class(base) == "mm" and base not in _NO_MATRIX_UNIT


def factor_step(call: Call, tensor: Tensor) -> float:
    """Largest relative error that the settings allow in a float32 factor of a product, else 0.0."""
    base = call.traits.base
    if tensor.dtype is not torch.float32 or not is_product(base):
        return 0.0
    if call.tf32:
        return _STEPS["tf32"]
    device = call.device_type or tensor.device.type
    if device == "cpu" and not _torch.cpu_multiplies_in_tiles():
        return 0.0
    return _STEPS.get(factor_precision(device, kind_of_product(base)), 0.0)


def kind_of_product(base: str) -> str:
    """Which setting decides: "conv", "rnn" or "matmul"."""
    if "conv" in base:
        return "conv"
    return "rnn" if "rnn" in base else "matmul"
