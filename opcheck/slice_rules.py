"""How slices of an op are told to be independent: what the entries of the static table are made of.

A rule gives the spaces of a call, none where its slices depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from opcheck import _torch
from opcheck.calls import Call
from opcheck.golden_rules import argument
from opcheck.slices import Space

__all__ = [
    "Rule",
    "both",
    "dims_but",
    "fixed",
    "group_norm_images",
    "layer_norm_rows",
    "layer_norm_weights",
    "leading",
    "normalized",
    "padded",
    "rows_of_loss",
    "sampler_images",
    "spatial",
    "split_up",
    "spread_gradient",
    "stacked",
    "trailing_of_index",
    "two",
    "upsampled_planes",
]

Rule = Callable[[Call], list[Space]]


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


def normalized(call: Call) -> int:
    """Dimensions that a layer norm is over, the last ones."""
    return len(argument(call, "normalized_shape"))


def spatial(call: Call) -> int:
    """The 2 of `avg_pool2d_backward`."""
    return int(call.traits.base.split("d_", 1)[0].removesuffix("d")[-1])


def two(call: Call) -> int:
    """The last two are those of a matrix."""
    return 2


def padded(call: Call) -> int:
    """Dimensions that are padded, the last ones."""
    return len(argument(call, "pad", argument(call, "padding", ()))) // 2


def layer_norm_weights(call: Call) -> list[Space]:
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


def layer_norm_rows(*statistics: str) -> Rule:
    """Input gradients: rows; the statistics of each are given."""

    def rule(call: Call) -> list[Space]:
        mask = list(argument(call, "output_mask"))
        if not mask[0]:
            return []
        found = leading("grad_out", "input", *statistics, but=normalized)(call)
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


def trailing_of_index(source: str) -> Rule:
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


def spread_gradient(call: Call) -> list[Space]:
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


def split_up(call: Call) -> list[Space]:
    """All dimensions but the one that is split; each piece is a result."""
    x, size = argument(call, "self"), int(argument(call, "split_size"))
    kept = int(_given(call, "dim")) % x.dim()
    free = tuple(dim for dim in range(x.dim()) if dim != kept)
    if not free or not size:
        return []
    return [
        Space(
            sizes=tuple(x.shape[dim] for dim in free),
            tensors={"self": free},
            outputs=dict.fromkeys(range(-(-x.shape[kept] // size)), free),
        )
    ]


def upsampled_planes(call: Call) -> list[Space]:
    """Gradients of an upsampling: images and channels, whose sizes are named in a list."""
    sizes = list(argument(call, "input_size"))
    return [
        Space(
            sizes=(int(sizes[0]), int(sizes[1])),
            tensors={"grad_output": (0, 1)},
            outputs={0: (0, 1)},
            changes={"input_size": lambda n: [n, 1, *sizes[2:]]},
        )
    ]


def sampler_images(call: Call) -> list[Space]:
    """Gradients of `grid_sampler`: images, of the gradients that are wanted."""
    mask = argument(call, "output_mask")
    outputs = {number: 0 for number in range(2) if mask[number]}
    return fixed({"grad_output": 0, "input": 0, "grid": 0}, outputs)(call) if outputs else []


def stacked(call: Call) -> list[Space]:
    """All dimensions of the tensors; the result has one more."""
    tensors = argument(call, "tensors")
    ndim = tensors[0].dim()
    at = int(_given(call, "dim")) % (ndim + 1)
    dims = tuple(range(ndim))
    there = tuple(dim + (dim >= at) for dim in dims)
    return [Space(sizes=tuple(tensors[0].shape), tensors={"tensors": dims}, outputs={0: there})]


def group_norm_images(call: Call) -> list[Space]:
    """Input gradients: images."""
    mask = argument(call, "output_mask")
    if not mask[0]:
        return []
    changes = {"N": lambda n: n, "output_mask": lambda n: [True, False, False]}
    names = {"grad_out": 0, "input": 0, "mean": 0, "rstd": 0}
    return fixed(names, {0: 0}, **changes)(call)


def rows_of_loss(call: Call) -> list[Space]:
    """The total weight is given, so that rows are independent."""
    x, target = argument(call, "self"), argument(call, "target")
    if x.dim() != 2 or (argument(call, "reduction") == 0):
        return []
    tensors = {"self": (0,), "target": (0,)}
    return [Space(sizes=(target.shape[0],), tensors=tensors, outputs={0: (0,)})]
