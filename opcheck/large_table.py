"""Which slices of an op are independent: the static table behind checks of large calls.

An op that is tagged pointwise needs no entry, nor does a list op (`_foreach_*`). Every entry is
re-derived by probing in the tests: the op on some slices gives those slices of its result, bit for
bit or to the last rounding. An op that is in no table cannot be checked above `max_numel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from opcheck import _torch
from opcheck.calls import Call
from opcheck.golden_rules import argument
from opcheck.slice_rules import (
    Rule,
    both,
    dims_but,
    fixed,
    group_norm_images,
    layer_norm_rows,
    layer_norm_weights,
    leading,
    normalized,
    padded,
    rows_of_loss,
    sampler_images,
    spatial,
    split_up,
    spread_gradient,
    stacked,
    trailing_of_index,
    two,
    upsampled_planes,
)
from opcheck.slices import Space

__all__ = ["FACTORIES", "LISTS", "POINTWISE", "SPACES", "is_pointwise", "lists_of", "spaces_of"]

POINTWISE = frozenset(
    {
        "masked_fill", "masked_fill_", "fill", "fill_", "zero", "zero_", "zeros_like", "ones_like",
        "full_like", "mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward",
        "hardswish", "hardswish_", "hardswish_backward", "leaky_relu_backward", "_prelu_kernel",
        "_prelu_kernel_backward", "polar", "complex", "clamp_min", "clamp_max", "clamp_min_",
        "clamp_max_", "logit_backward", "log_sigmoid_backward", "rsub", "threshold_", "hardtanh_",
        "silu_", "gelu_", "celu_", "elu_", "leaky_relu_", "mish_backward", "elu_backward",
        "softplus_backward", "hardsigmoid_backward", "hardtanh_backward", "floor_divide",
        "floor_divide_",
    }
)  # fmt: skip
"""Ops that act on each element alone and carry no tag."""

_LOSSES_WITH_MEAN = frozenset(
    {"mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"}
)
"""Pointwise, but for `reduction=mean`, which divides by the number of elements."""

LISTS = ("_foreach_", "_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad")
"""Prefixes of ops that act on lists of tensors, each element alone."""
FACTORIES = frozenset({"zeros", "ones", "full", "new_zeros", "new_ones", "new_full"})
"""Ops that make elements, all alike: a sample is made by asking for fewer."""
_REDUCING_LISTS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


def is_pointwise(call: Call) -> bool:
    """The op acts on each element alone, its tensors broadcast."""
    base = call.traits.base
    if base in _LOSSES_WITH_MEAN:
        return bool(argument(call, "reduction", 1) != 1)
    if base == "equal":  # tagged so, and gives one answer for all elements
        return False
    return base in POINTWISE or "pointwise" in _torch.tags_of(call.func)


def lists_of(call: Call) -> bool:
    """The op acts on lists of tensors, each element of each alone."""
    base = call.traits.base
    return base.startswith(LISTS) and not base.startswith(_REDUCING_LISTS)


def spaces_of(call: Call) -> list[Space]:
    """The spaces of a call, none where its slices depend on each other.

    Several spaces of one call belong to different results; `grid` ops are not here.
    """
    name = call.traits.name.split(".", 1)[1]
    rule = SPACES.get(name) or SPACES.get(call.traits.base)
    return [space for space in rule(call) if space.sizes] if rule is not None else []


_PLANES = leading("self", but=spatial)
_CHANNELS = {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}

_MATRICES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("cholesky", "cholesky_inverse", "linalg_eigvals", "_linalg_eigvals",
         "linalg_matrix_exp"),
        leading("self", but=two),
    ),
    **dict.fromkeys(("geqrf", "linalg_cholesky_ex", "linalg_eig"),
                    leading("self", but=two, count=2)),
    "linalg_ldl_factor_ex": leading("self", but=two, count=3),
    **dict.fromkeys(("linalg_qr", "linalg_inv_ex", "_linalg_eigh"),
                    leading("A", but=two, count=2)),
    **dict.fromkeys(("linalg_lu", "linalg_lu_factor_ex", "_linalg_det", "_linalg_svd"),
                    leading("A", but=two, count=3)),
    "_linalg_slogdet": leading("A", but=two, count=4),
    "_linalg_solve_ex": leading("A", "B", but=two, count=4),
    "linalg_solve_triangular": leading("self", "B", but=two),
    "triangular_solve": leading("self", "A", but=two, count=2),
    "cholesky_solve": leading("self", "input2", but=two),
    "linalg_lu_solve": leading("LU", "pivots", "B", but=two),
    "linalg_householder_product": leading("input", "tau", but=two),
    "ormqr": leading("self", "input2", "input3", but=two),
    "lu_unpack": leading("LU_data", "LU_pivots", but=two, count=3),
}  # fmt: skip
"""Factorisations and solutions of many matrices; one alone has no slices."""

SPACES: Mapping[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(
            ("_softmax", "_log_softmax", "softmax.int", "log_softmax.int", "_safe_softmax",
             "cumsum", "cumprod", "logcumsumexp", "_logcumsumexp", "cumsum_", "cumprod_",
             "glu"),
            dims_but("self"),
        ),
        "flip": dims_but("self", dims="dims"),
        **dict.fromkeys(
            ("_softmax_backward_data", "_log_softmax_backward_data"),
            dims_but("grad_output", "output"),
        ),
        "glu_backward": dims_but("self", "grad_output"),
        **dict.fromkeys(("sort", "topk", "cummax", "cummin"), dims_but("self", count=2)),
        **dict.fromkeys(
            ("kthvalue", "mode", "median.dim", "nanmedian.dim", "max.dim", "min.dim"),
            dims_but("self", results="reduced", count=2),
        ),
        **dict.fromkeys(("var_mean.correction", "std_mean.correction", "aminmax"),
                        dims_but("self", results="reduced", count=2)),
        **dict.fromkeys(
            ("sum.dim_IntList", "mean.dim", "nansum", "prod.dim_int", "amax", "amin", "argmax",
             "argmin", "var.correction", "std.correction", "logsumexp", "linalg_vector_norm",
             "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "any.dim", "any.dims", "all.dim",
             "all.dims", "count_nonzero.dim_IntList"),
            dims_but("self", results="reduced"),
        ),
        "cat": dims_but("tensors"),
        "gather": dims_but("self", "index"),
        "index_select": dims_but("self"),
        "index_fill": dims_but("self"),
        "index_fill_": dims_but("self"),
        **dict.fromkeys(("index_add", "index_add_", "index_copy", "index_copy_"),
                        dims_but("self", "source")),
        "index_reduce": dims_but("self", "source"),
        **dict.fromkeys(
            ("scatter.src", "scatter_.src", "scatter_add", "scatter_add_", "scatter_reduce.two",
             "scatter_reduce_.two"),
            dims_but("self", "index", "src"),
        ),
        **dict.fromkeys(("scatter.value", "scatter_.value"), dims_but("self", "index")),
        **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), dims_but("self")),
        "native_layer_norm": leading("input", but=normalized, count=3),
        "_fused_rms_norm": leading("input", but=normalized, count=2),
        "rms_norm": leading("input", but=normalized),
        "layer_norm": leading("input", but=normalized),
        "native_layer_norm_backward": both(
            layer_norm_rows("mean", "rstd"), layer_norm_weights
        ),
        "_fused_rms_norm_backward": both(layer_norm_rows("rstd"), layer_norm_weights),
        "native_batch_norm": fixed({"input": 1, **_CHANNELS}, {0: 1, 1: 0, 2: 0}),
        **dict.fromkeys(
            ("_native_batch_norm_legit", "_native_batch_norm_legit.no_stats"),
            fixed({"input": 1, **_CHANNELS}, {0: 1, 1: 0, 2: 0}),
        ),
        "_native_batch_norm_legit_no_training": fixed({"input": 1, **_CHANNELS}, {0: 1}),
        "native_batch_norm_backward": fixed(
            {"grad_out": 1, "input": 1, **_CHANNELS, "save_mean": 0, "save_invstd": 0},
            {0: 1, 1: 0, 2: 0},
        ),
        "native_group_norm": fixed({"input": 0}, {0: 0, 1: 0, 2: 0}, N=lambda n: n),
        **dict.fromkeys(
            ("max_pool2d_with_indices", "adaptive_max_pool2d", "max_pool3d_with_indices",
             "adaptive_max_pool3d"),
            leading("self", but=spatial, count=2),
        ),
        **dict.fromkeys(
            ("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
             "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
             "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d",
             "upsample_linear1d", "upsample_trilinear3d", "_upsample_nearest_exact1d",
             "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
            _PLANES,
        ),
        **dict.fromkeys(
            ("upsample_nearest1d_backward", "upsample_nearest2d_backward",
             "upsample_nearest3d_backward", "_upsample_nearest_exact1d_backward",
             "_upsample_nearest_exact2d_backward", "_upsample_nearest_exact3d_backward",
             "upsample_linear1d_backward", "upsample_bilinear2d_backward",
             "upsample_bicubic2d_backward", "upsample_trilinear3d_backward",
             "_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward"),
            upsampled_planes,
        ),
        **dict.fromkeys(
            ("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
             "constant_pad_nd"),
            leading("self", but=padded),
        ),
        **dict.fromkeys(
            ("reflection_pad1d_backward", "reflection_pad2d_backward",
             "replication_pad1d_backward", "replication_pad2d_backward"),
            leading("grad_output", "self", but=padded),
        ),
        **dict.fromkeys(
            ("avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward"),
            leading("grad_output", "self", but=spatial),
        ),
        "max_pool2d_with_indices_backward": leading(
            "grad_output", "self", "indices", but=spatial
        ),
        **dict.fromkeys(("tril", "triu"), leading("self", but=two)),
        **dict.fromkeys(("im2col", "col2im"), fixed({"self": 0}, {0: 0})),
        **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d"),
                        fixed({"input": 0, "grid": 0}, {0: 0})),
        **dict.fromkeys(("grid_sampler_2d_backward", "grid_sampler_3d_backward"), sampler_images),
        "embedding": fixed({"weight": 1}, {0: -1}),
        "embedding_dense_backward": fixed({"grad_output": -1}, {0: 1}),
        "nll_loss_backward": rows_of_loss,
        "slice_backward": spread_gradient,
        "select_backward": spread_gradient,
        "stack": stacked,
        "native_group_norm_backward": group_norm_images,
        "index.Tensor": trailing_of_index(""),
        **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"),
                        trailing_of_index("values")),
        # of the gradients those that belong to one sequence of the batch
        "mkldnn_rnn_layer": fixed({"input": 1, "hx_": 0, "cx_": 0}, {0: 1, 1: 0, 2: 0}),
        "mkldnn_rnn_layer_backward": fixed(
            {"input": 1, "hx_": 0, "cx_tmp": 0, "output": 1, "hy_": 0, "cy_": 0,
             "grad_output": 1, "grad_hy": 0, "grad_cy": 0},
            {0: 1, 5: 0, 6: 0},
        ),
        "mv": fixed({"self": 0}, {0: 0}),
        "unsafe_split": split_up,
        **_MATRICES,
    }
)  # fmt: skip
"""Op base name, or base name and overload, to its spaces."""
