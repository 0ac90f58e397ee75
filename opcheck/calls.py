"""Live objects with the lifetime of one call: what was dispatched, where, and its traits."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from opcheck import _torch
from opcheck.records import SkipReason

__all__ = ["Call", "OpTraits", "Param", "Site", "place_of", "traits_of"]


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of a schema."""

    name: str
    kind: str
    """"tensor", "tensors", "scalar", "scalars", "dtype" or "other"."""
    mutated: bool
    kwarg_only: bool


@dataclass(frozen=True, slots=True)
class OpTraits:
    """What the schema and the tags of an overload say, worked out once."""

    name: str
    """`aten.gelu.default`"""
    qualified: str
    """`aten::gelu`, with the overload where it has one: the dispatcher's spelling."""
    base: str
    """`gelu`"""
    params: tuple[Param, ...]
    skip: SkipReason | None
    """Never to be checked, for this reason."""
    maybe_random: bool
    """May draw random numbers, depending on its arguments: whether the RNG moved tells."""
    mutates: bool
    unreturned: frozenset[str]
    """Names of parameters that are written to and not returned."""
    may_alias: bool
    """A result may share memory with an argument: its schema says so, or cannot say it."""

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Param, Any]]:
        """The arguments that were given, each with its parameter."""
        pairs = list(zip(self.params, args, strict=False))
        if kwargs:
            pairs += [(param, kwargs[param.name]) for param in self.params if param.name in kwargs]
        return pairs

    def spread(self, values: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Values by name as positional arguments as far as possible, keywords from a gap on."""
        args: list[Any] = []
        for param in self.params:
            if param.kwarg_only or param.name not in values:
                break
            args.append(values[param.name])
        named = {param.name for param in self.params[: len(args)]}
        return args, {name: value for name, value in values.items() if name not in named}


class Site(NamedTuple):
    """Where a call was made."""

    module: str
    phase: str


@dataclass(slots=True)
class Call:
    """One dispatch that is to be checked, from before the op runs until it was judged."""

    func: Any
    traits: OpTraits
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    site: Site
    index: int
    step: int
    occurrence: int
    signature: tuple[Any, ...]
    source: str
    on_device: bool = False
    in_kernel: bool = False
    """A registered kernel computes it, so that torch's own CPU kernel is independent."""
    tf32: bool = False
    """Another machine computed it, with its float32 inputs rounded to TF32."""
    before: dict[int, Tensor] = field(default_factory=dict)
    """id of a tensor argument -> copy from before the op ran, for what the op may change."""
    before_groups: bool = False
    """Some of these copies share memory, as their originals do."""
    wide_storages: dict[int, Any] = field(default_factory=dict)
    """Memory shared by arguments, widened; one run of the golden at a time."""
    out_dtype: Any = None
    """dtype of the first inexact result, once the op has run."""
    promoted: Any = field(default=None, init=False)
    """What its inexact tensors promote to (in a tuple), once somebody has asked: a list has
    thousands. A call that is made of another one with other arguments does not take it over."""
    given_dtypes: frozenset[Any] | None = field(default=None, init=False)
    """Of its tensors, likewise."""
    declared: Any = None
    """dtypes that the op declares for its results; None where nobody knows."""
    rng_before: Any = None
    crash: Exception | None = None
    """Of ours, when it was prepared."""
    skipped: SkipReason | None = None
    """Not to be checked, and counted as such: only its values are followed."""
    counted: bool = True
    """The elements of its result count as those of a computing op."""
    followed: bool = False
    """The shadow has taken note of its result."""
    large: Any = None
    """What was kept from before a large op that changes its arguments."""
    whole_before: dict[int, Tensor] = field(default_factory=dict)
    """As `before`, of a large op: for those who keep calls, and the checks do not look at it."""
    is_large: bool = False
    """Above `max_numel`: a sample of it is looked at."""
    in_worker: bool = False
    """A worker judges a copy of it."""
    device_type: str = ""
    """Of a part of a large call: where that one ran, "" for the CPU."""
    repeat: Any = None
    """What a second run needs, where there will be one."""
    frame: Any = None
    """The innermost open module call, for the origin of non-finite values."""


def place_of(call: Call) -> tuple[str, str, tuple[Any, ...]]:
    """Module, phase and signature."""
    return (call.site.module, call.site.phase, call.signature)


# ---- from schema and tags to traits -------------------------------------------------------------

_LAYOUT_BY_NAME = frozenset(
    {
        # copies and casts: memory moves, at most a rounding, no formula (documented as skipped)
        "clone", "copy", "copy_", "_to_copy", "_unsafe_view", "lift", "lift_fresh_copy",
        "_conj_physical", "pin_memory", "_pin_memory", "_copy_from", "_copy_from_and_resize",
        "_to_cpu", "_foreach_copy_", "_foreach_copy",
        # reads of one value or of metadata
        "_local_scalar_dense", "item", "is_same_size", "is_pinned", "is_set_to", "record_stream",
        "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "size", "stride", "numel",
        "_version", "is_coalesced", "dense_dim", "sparse_dim", "_nnz", "_has_same_storage_numel",
        # storage is exchanged, nothing is computed
        "set_", "set_data",
    }
)  # fmt: skip
"""Ops that neither alias in their schema nor carry a tag, and yet compute nothing."""

_UNINITIALIZED = ("empty", "new_empty", "resize", "_resize", "_empty", "_efficientzerotensor")
"""Prefixes; these 18 overloads carry no tag (measured on 2.13)."""

_OWN_NAMES = frozenset({"aten", "prim", "prims"})
"""Namespaces in which the names above mean what they say: torch's own."""

_SIDE_EFFECTS = frozenset(
    {
        "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "fsdp",
        "profiler", "streams", "inductor", "rngprims", "debugprims", "higher_order",
        "_inductor_test",
    }
)  # fmt: skip
"""Namespaces whose ops reach other processes or the tools of torch: never run twice."""

_UNDECLARED_MUTATION = {
    "native_batch_norm": ("running_mean", "running_var"),
    "batch_norm": ("running_mean", "running_var"),
    "instance_norm": ("running_mean", "running_var"),
    "_batch_norm_impl_index": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
}
"""Older than alias annotations: they update the running statistics without saying so."""


@functools.cache
def traits_of(func: Any) -> OpTraits:
    """Work out what to do with an overload from its schema and tags."""
    schema = _torch.schema_of(func)
    namespace, _, base = schema.name.partition("::")
    tags = _torch.tags_of(func)
    undeclared = _UNDECLARED_MUTATION.get(base, ())
    params = tuple(_param(argument, undeclared) for argument in schema.arguments)
    overload = schema.overload_name
    return OpTraits(
        name=f"{namespace}.{base}.{overload or 'default'}",
        qualified=schema.name + (f".{overload}" if overload else ""),
        base=base,
        params=params,
        skip=_static_skip(func, namespace, base, tags, params),
        maybe_random="nondeterministic_seeded" in tags,
        mutates=any(param.mutated for param in params),
        unreturned=_unreturned(schema, params),
        may_alias=_torch.is_composite(func)
        or any(item.alias_info is not None for item in schema.returns),
    )


def _unreturned(schema: Any, params: tuple[Param, ...]) -> frozenset[str]:
    returned: set[str] = set()
    for item in schema.returns:
        if item.alias_info is not None:
            returned |= item.alias_info.before_set
    return frozenset(
        param.name
        for param, argument in zip(params, schema.arguments, strict=True)
        if param.mutated
        and not (argument.alias_info is not None and argument.alias_info.before_set & returned)
    )


def _param(argument: Any, undeclared: tuple[str, ...]) -> Param:
    text = str(argument.type)
    is_list = text.startswith("List[") or "[]" in text
    if "Tensor" in text:
        kind = "tensors" if is_list else "tensor"
    elif "number" in text.lower() or "Scalar" in text:
        kind = "scalars" if is_list else "scalar"
    elif argument.name.endswith("dtype"):
        kind = "dtype"
    else:
        kind = "other"
    alias = argument.alias_info
    mutated = (alias is not None and alias.is_write) or argument.name in undeclared
    return Param(argument.name, kind, mutated, argument.kwarg_only)


def _static_skip(
    func: Any, namespace: str, base: str, tags: frozenset[str], params: tuple[Param, ...]
) -> SkipReason | None:
    schema = _torch.schema_of(func)
    if namespace in _SIDE_EFFECTS:
        return SkipReason.SIDE_EFFECT
    if any(argument.is_out for argument in schema.arguments):
        return SkipReason.OUT_VARIANT
    has_known_name = namespace in _OWN_NAMES  # `mylib::resize` computes what it likes
    if has_known_name and base.startswith(_UNINITIALIZED):
        return SkipReason.UNINITIALIZED
    if has_known_name and base in _LAYOUT_BY_NAME:
        return SkipReason.LAYOUT
    if func.is_view or "inplace_view" in tags or _only_aliases(schema):
        return SkipReason.LAYOUT
    takes_tensor = any(param.kind in ("tensor", "tensors") for param in params)
    draws = "nondeterministic_seeded" in tags
    takes_generator = any("Generator" in str(argument.type) for argument in schema.arguments)
    if draws and (takes_generator or not takes_tensor):
        return SkipReason.RANDOM
    if not schema.returns and not any(param.mutated for param in params):
        return SkipReason.NOTHING_TO_COMPARE
    return None


def _only_aliases(schema: Any) -> bool:
    """True when every result may be a view of an argument and nothing is written."""
    returns = schema.returns
    return bool(returns) and all(
        item.alias_info is not None and not item.alias_info.is_write for item in returns
    )
