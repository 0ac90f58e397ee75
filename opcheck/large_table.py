"""Which slices of an op are independent: the static table behind checks of large calls.

An op that is tagged pointwise needs no entry, nor does a list op (`_foreach_*`). Every entry is
re-derived by probing in the tests: the op on some slices gives those slices of its result, bit for
bit or to the last rounding. An op that is in no table cannot be checked above `max_numel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from opcheck import _torch
from opcheck.calls import Call
from opcheck.golden_rules import argument
from opcheck.slices import Space

__all__ = ["FACTORIES", "LISTS", "POINTWISE", "SPACES", "is_pointwise", "lists_of", "spaces_of"]

Rule = Callable[[Call], list[Space]]

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


# ---- rules --------------------------------------------------------------------------------------


def _default(call: Call, name: str) -> Any:
    for item in _torch.schema_of(call.func).arguments:
        if item.name == name:
            return item.default_value if item.has_default_value() else None
    return None


def _given(call: Call, name: str) -> Any:
    return argument(call, name, _default(call, name))


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, (list, tuple)):
        value = value[0] if value else None
    return value if isinstance(value, Tensor) else None


def _shift(free: tuple[int, ...], kept: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim - sum(other < dim for other in kept) for dim in free)


def dims_but(*tensors: str, dims: str = "dim", results: str = "same", count: int = 1) -> Rule:
    """Every dimension is independent but those that the parameter `dims` names.

    Args:
        tensors: parameters that have these dimensions; the first one gives the sizes.
        dims: an int, a list, or (None, empty: all of them) nothing that could be sliced.
        results: "same", as many dimensions as the first tensor; "reduced", those named are gone
            unless `keepdim` is set.
        count: of results.
    """

    def rule(call: Call) -> list[Space]:
        first = _first_tensor(argument(call, tensors[0]))
        named = _given(call, dims)
        if first is None or not first.dim() or named is None or named == []:
            return []
        listed = named if isinstance(named, (list, tuple)) else [named]
        kept = tuple(sorted({int(dim) % first.dim() for dim in listed}))
        free = tuple(dim for dim in range(first.dim()) if dim not in kept)
        keeps = results == "same" or bool(_given(call, "keepdim"))
        sizes = _common_sizes(call, tensors, free)
        if not free or sizes is None:
            return []
        there = free if keeps else _shift(free, kept)
        given = {name: free for name in tensors if argument(call, name) is not None}
        return [Space(sizes=sizes, tensors=given, outputs=dict.fromkeys(range(count), there))]

    return rule


def _common_sizes(call: Call, tensors: tuple[str, ...], free: tuple[int, ...]) -> Any:
    """Sizes of the free dimensions, None where the tensors do not agree in them."""
    found = None
    for name in tensors:
        value = argument(call, name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, Tensor):
                continue
            if tensor.dim() <= max(free, default=0):
                return None
            sizes = tuple(tensor.shape[dim] for dim in free)
            if found is not None and sizes != found:
                return None
            found = sizes
    return found


def leading(
    *tensors: str, but: Callable[[Call], int], count: int = 1, **changes: Callable[[int], Any]
) -> Rule:
    """The first dimensions are independent, all but the last `but(call)`."""

    def rule(call: Call) -> list[Space]:
        first = _first_tensor(argument(call, tensors[0]))
        if first is None:
            return []
        free = tuple(range(first.dim() - but(call)))
        sizes = _common_sizes(call, tensors, free)
        if not free or sizes is None:
            return []
        given = {name: free for name in tensors if argument(call, name) is not None}
        outputs = dict.fromkeys(range(count), free)
        return [Space(sizes=sizes, tensors=given, outputs=outputs, changes=changes)]

    return rule


def fixed(
    tensors: Mapping[str, int], outputs: Mapping[int, int], **changes: Callable[[int], Any]
) -> Rule:
    """One dimension is independent; negative ones count from the end."""

    def rule(call: Call) -> list[Space]:
        given: dict[str, tuple[int, ...]] = {}
        sizes: set[int] = set()
        for name, dim in tensors.items():
            value = argument(call, name)
            if isinstance(value, Tensor):
                if not value.dim():
                    return []
                at = dim % value.dim()
                given[name] = (at,)
                sizes.add(value.shape[at])
        if len(sizes) != 1:
            return []
        first = argument(call, next(iter(given)))
        there = {number: (dim,) for number, dim in outputs.items()}
        for number, dim in outputs.items():
            if dim < 0:
                there[number] = (_result_dims(call, first) + dim,)
        return [Space(sizes=(sizes.pop(),), tensors=given, outputs=there, changes=changes)]

    return rule


def _result_dims(call: Call, first: Tensor) -> int:
    """Of an embedding: one more than its indices."""
    indices = argument(call, "indices")
    return indices.dim() + 1 if isinstance(indices, Tensor) else first.dim()


def both(*rules: Rule) -> Rule:
    """Spaces of different results."""
    return lambda call: [space for rule in rules for space in rule(call)]


def _normalized(call: Call) -> int:
    return len(argument(call, "normalized_shape"))


def _spatial(call: Call) -> int:
    """The 2 of `avg_pool2d_backward`."""
    return int(call.traits.base.split("d_", 1)[0].removesuffix("d")[-1])


def _two(call: Call) -> int:
    return 2


def _padded(call: Call) -> int:
    return len(argument(call, "pad", argument(call, "padding", ()))) // 2


def _layer_norm_weights(call: Call) -> list[Space]:
    """Gradients of weight and bias: columns; statistics are of whole rows and are given."""
    x, shape = argument(call, "input"), argument(call, "normalized_shape")
    if len(shape) != 1:
        return []
    last = (x.dim() - 1,)
    mask = argument(call, "output_mask")
    names = ["weight", "bias"] if len(mask) == 3 else ["weight"]
    tensors = {"grad_out": last, "input": last}
    tensors |= {name: (0,) for name in names if argument(call, name) is not None}
    wanted = [number for number in range(1, len(mask)) if mask[number]]
    if not wanted:
        return []
    return [
        Space(
            sizes=(int(shape[0]),),
            tensors=tensors,
            outputs=dict.fromkeys(wanted, (0,)),
            changes={
                "normalized_shape": lambda n: [n],
                "output_mask": lambda n: [False, *list(mask)[1:]],
            },
        )
    ]


def _layer_norm_rows(*statistics: str) -> Rule:
    def rule(call: Call) -> list[Space]:
        mask = list(argument(call, "output_mask"))
        if not mask[0]:
            return []
        found = leading("grad_out", "input", *statistics, but=_normalized)(call)
        return [
            Space(
                sizes=space.sizes,
                tensors=space.tensors,
                outputs={0: space.outputs[0]},
                changes={"output_mask": lambda n: [True, *[False] * (len(mask) - 1)]},
            )
            for space in found
        ]

    return rule


def _trailing_of_index(source: str) -> Rule:
    """`x[i]`, `x[i] = v` with one index tensor, the first: what stands behind it is free."""

    def rule(call: Call) -> list[Space]:
        x, indices = argument(call, "self"), argument(call, "indices")
        given = [item for item in indices if item is not None]
        if len(given) != 1 or indices[0] is None or given[0].dtype.itemsize == 1 or x.dim() < 2:
            return []
        free = tuple(range(1, x.dim()))
        behind = tuple(range(given[0].dim(), given[0].dim() + len(free)))
        tensors = {"self": free}
        outputs = {0: behind}
        if source:
            values = argument(call, source)
            if values.dim() != given[0].dim() + len(free) or values.shape[-1] != x.shape[-1]:
                return []
            tensors[source] = behind
            outputs = {0: free}
            if any(values.shape[b] != x.shape[a] for a, b in zip(free, behind, strict=True)):
                return []
        return [Space(sizes=tuple(x.shape[1:]), tensors=tensors, outputs=outputs)]

    return rule


def _spread_gradient(call: Call) -> list[Space]:
    """A slice's gradient, zeros elsewhere: all dimensions but the one that was sliced."""
    grad, sizes = argument(call, "grad_output"), list(argument(call, "input_sizes"))
    kept = int(argument(call, "dim")) % len(sizes)
    free = tuple(dim for dim in range(len(sizes)) if dim != kept)
    if not free:
        return []
    there = free if grad.dim() == len(sizes) else _shift(free, (kept,))
    ones = [size if dim == kept else 1 for dim, size in enumerate(sizes)]

    def shape(count: int) -> list[int]:
        return [count if dim == free[0] else size for dim, size in enumerate(ones)]

    return [
        Space(
            sizes=tuple(int(sizes[dim]) for dim in free),
            tensors={"grad_output": there},
            outputs={0: free},
            changes={"input_sizes": shape},
        )
    ]


def _stacked(call: Call) -> list[Space]:
    tensors = argument(call, "tensors")
    ndim = tensors[0].dim()
    at = int(_given(call, "dim")) % (ndim + 1)
    dims = tuple(range(ndim))
    there = tuple(dim + (dim >= at) for dim in dims)
    return [Space(sizes=tuple(tensors[0].shape), tensors={"tensors": dims}, outputs={0: there})]


def _group_norm_images(call: Call) -> list[Space]:
    mask = argument(call, "output_mask")
    if not mask[0]:
        return []
    changes = {"N": lambda n: n, "output_mask": lambda n: [True, False, False]}
    names = {"grad_out": 0, "input": 0, "mean": 0, "rstd": 0}
    return fixed(names, {0: 0}, **changes)(call)


def _rows_of_loss(call: Call) -> list[Space]:
    """The total weight is given, so that rows are independent."""
    x, target = argument(call, "self"), argument(call, "target")
    if x.dim() != 2 or (argument(call, "reduction") == 0):
        return []
    tensors = {"self": (0,), "target": (0,)}
    return [Space(sizes=(target.shape[0],), tensors=tensors, outputs={0: (0,)})]


_PLANES = leading("self", but=_spatial)
_CHANNELS = {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0}

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
        "native_layer_norm": leading("input", but=_normalized, count=3),
        "_fused_rms_norm": leading("input", but=_normalized, count=2),
        "rms_norm": leading("input", but=_normalized),
        "layer_norm": leading("input", but=_normalized),
        "native_layer_norm_backward": both(
            _layer_norm_rows("mean", "rstd"), _layer_norm_weights
        ),
        "_fused_rms_norm_backward": both(_layer_norm_rows("rstd"), _layer_norm_weights),
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
            leading("self", but=_spatial, count=2),
        ),
        **dict.fromkeys(
            ("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
             "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
             "_upsample_nearest_exact2d", "upsample_bilinear2d", "upsample_bicubic2d",
             "upsample_linear1d", "upsample_trilinear3d"),
            _PLANES,
        ),
        **dict.fromkeys(
            ("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d",
             "constant_pad_nd"),
            leading("self", but=_padded),
        ),
        **dict.fromkeys(
            ("avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward"),
            leading("grad_output", "self", but=_spatial),
        ),
        "max_pool2d_with_indices_backward": leading(
            "grad_output", "self", "indices", but=_spatial
        ),
        **dict.fromkeys(("tril", "triu"), leading("self", but=_two)),
        **dict.fromkeys(("im2col", "col2im"), fixed({"self": 0}, {0: 0})),
        "grid_sampler_2d": fixed({"input": 0, "grid": 0}, {0: 0}),
        "embedding": fixed({"weight": 1}, {0: -1}),
        "embedding_dense_backward": fixed({"grad_output": -1}, {0: 1}),
        "nll_loss_backward": _rows_of_loss,
        "slice_backward": _spread_gradient,
        "select_backward": _spread_gradient,
        "stack": _stacked,
        "native_group_norm_backward": _group_norm_images,
        "index.Tensor": _trailing_of_index(""),
        **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"),
                        _trailing_of_index("values")),
        "mv": fixed({"self": 0}, {0: 0}),
    }
)  # fmt: skip
"""Op base name, or base name and overload, to its spaces."""
