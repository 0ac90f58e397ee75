"""Attention above `max_numel`: some query rows of every head, and some keys for the gradients.

A row of the result depends on its query alone, a row of the gradient of keys and values on its key
alone, once the logsumexp is given. A causal mask goes by position, so that the rows that were
picked get theirs spelled out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.golden_rules import argument
from opcheck.records import SkipReason
from opcheck.sampled import (
    MAX_PART,
    Criterion,
    Judged,
    judge_parts,
    nonfinite_places,
    rng_of,
    sample_of,
)
from opcheck.slices import Part, Pick, Space, one_in, part_of_slices

__all__ = ["is_attention", "judge_attention"]

_FORWARD = frozenset({"_scaled_dot_product_flash_attention_for_cpu"})
_BACKWARD = frozenset({"_scaled_dot_product_flash_attention_for_cpu_backward"})
_NONFINITE_ROWS = 4
ROW_STEP = 64
"""One query row in so many of each head."""


def is_attention(call: Call) -> bool:
    """Has rows that can be picked: four dimensions, no dropout."""
    if call.traits.base not in _FORWARD | _BACKWARD:
        return False
    if argument(call, "query").dim() != 4:
        return False
    return not argument(call, "dropout_p", 0.0)


def judge_attention(call: Call, out: Any, criterion: Criterion) -> Judged | SkipReason:
    """Judge rows of every head by the rule of any attention."""
    call = _with_whole_mask(call)
    rng = rng_of(call, criterion.seed)
    query, key = argument(call, "query"), argument(call, "key")
    is_backward = call.traits.base in _BACKWARD
    rows = _with_nonfinite(one_in(query.shape[2], ROW_STEP, rng), out[0])
    keys = one_in(key.shape[2], ROW_STEP, rng)
    if is_backward:
        keys = _with_nonfinite(_with_nonfinite(keys, out[1]), out[2])
    detail = f"{rows.size:,} of {query.shape[2]:,} query rows of every head"
    if is_backward:
        detail += f", {keys.size:,} of {key.shape[2]:,} keys"
    sample = sample_of("sampled_rows", out, criterion.seed, detail)
    return judge_parts(_parts(call, out, rows, keys, is_backward=is_backward), criterion, sample)


def _with_nonfinite(rows: Array, result: Tensor) -> Array:
    places = nonfinite_places(result)
    return np.union1d(rows, places[:_NONFINITE_ROWS, 2]) if places.size else rows


def _parts(call: Call, out: Any, rows: Array, keys: Array, *, is_backward: bool) -> Iterator[Part]:
    query, key = argument(call, "query"), argument(call, "key")
    # where several query heads share a key head, whole images are taken
    axes = 2 if query.shape[1] == key.shape[1] else 1
    sizes = tuple(query.shape[:axes])
    heads = math.prod(sizes)
    per_head = max(query.numel(), key.numel()) // max(heads, 1)
    together = max(1, MAX_PART // max(per_head, 1))
    for start in range(0, heads, together):
        flat = np.arange(start, min(heads, start + together))
        head = _heads(call, np.unravel_index(flat, sizes))
        yield part_of_slices(call, out, [_queries(call, rows, is_backward=is_backward), head])
        if is_backward:
            yield part_of_slices(call, out, [_keys(call, keys), head])


def _with_whole_mask(call: Call) -> Call:
    """The mask with all four dimensions, without making them."""
    mask = argument(call, "attn_mask")
    if mask is None:
        return call
    query, key = argument(call, "query"), argument(call, "key")
    whole = mask.expand(*query.shape[:3], key.shape[2])
    return replace(call, kwargs={**call.kwargs, "attn_mask": whole})


def _heads(call: Call, index: tuple[Array, ...]) -> Pick:
    names = ["query", "key", "value", "grad_out", "out", "logsumexp", "attn_mask"]
    given = [name for name in names if isinstance(argument(call, name), Tensor)]
    dims = tuple(range(len(index)))
    space = Space(
        sizes=tuple(argument(call, "query").shape[: len(index)]),
        tensors=dict.fromkeys(given, dims),
        outputs=dict.fromkeys(range(3), dims),
    )
    return Pick(space, tuple(np.asarray(item, dtype=np.int64) for item in index))


def _queries(call: Call, rows: Array, *, is_backward: bool) -> Pick:
    names = ["query", "grad_out", "out", "logsumexp", "attn_mask"]
    given = [name for name in names if isinstance(argument(call, name), Tensor)]
    query, key = argument(call, "query"), argument(call, "key")
    space = Space(
        sizes=(query.shape[2],),
        tensors=dict.fromkeys(given, (2,)),
        outputs={0: (2,)} if is_backward else {0: (2,), 1: (2,)},
        changes=_spelled_mask(call, rows[:, None], np.arange(key.shape[2])[None, :]),
    )
    return Pick(space, (rows,))


def _keys(call: Call, keys: Array) -> Pick:
    query, key = argument(call, "query"), argument(call, "key")
    tensors: dict[str, tuple[int, ...]] = {"key": (2,), "value": (2,)}
    if argument(call, "attn_mask") is not None:
        tensors["attn_mask"] = (3,)
    space = Space(
        sizes=(key.shape[2],),
        tensors=tensors,
        outputs={1: (2,), 2: (2,)},
        changes=_spelled_mask(call, np.arange(query.shape[2])[:, None], keys[None, :]),
    )
    return Pick(space, (keys,))


def _spelled_mask(call: Call, rows: Array, keys: Array) -> dict[str, Any]:
    """A causal mask of the rows and keys that were picked: a later key is not seen."""
    if not argument(call, "is_causal"):
        return {}
    hidden = torch.from_numpy(keys > rows)
    mask = torch.zeros(hidden.shape, dtype=argument(call, "query").dtype)
    mask.masked_fill_(hidden, -math.inf)
    return {"is_causal": lambda n: False, "attn_mask": lambda n: mask}
