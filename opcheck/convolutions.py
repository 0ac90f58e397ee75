"""Large convolutions: sums over channels and images of all positions, and some blocks one by one.

A convolution is linear in its output channels and in its images: for random signs r and s

    sum over n, o of s[n] r[o] y[n, o] = conv(sum over n of s[n] x[n], sum over o of r[o] w[o])

so that one channel of one image stands for all channels of several images. The gradients have the
same identity over the other channels. What such a sum flags is computed again and judged by the
rule of any convolution; it never fails a call by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opcheck.arrays import Array
from opcheck.calls import Call
from opcheck.convolution_sums import forward_sums, input_sums, weight_sums
from opcheck.golden_rules import argument
from opcheck.projection import SUSPECT, Residual
from opcheck.records import SkipReason
from opcheck.sampled import Criterion, Judged, judge_parts, nonfinite_places, rng_of, sample_of
from opcheck.slices import Pick, Space, part_of_slices
from opcheck.tolerances import MIN_ELEMENTS

__all__ = ["is_convolution", "judge_convolution"]

FOLD = 4
"""Images that are summed into one."""
EVERY = 4
"""One group of images in so many is looked at."""
NUM_IMAGES, NUM_CHANNELS = 2, 4
"""Of which planes are computed again: float64 convolutions are ten times slower."""
MAX_FACTOR = 1 << 20
_WORST_GROUPS = 2


def is_convolution(call: Call) -> bool:
    """Forward or backward, with images in the first dimension, and some of them."""
    if call.traits.base not in ("convolution", "convolution_backward"):
        return False
    x = argument(call, "input")
    return bool(x.dim() >= 3 and x.shape[0])


def judge_convolution(call: Call, out: Any, criterion: Criterion) -> Judged | SkipReason:
    """Judge a convolution or its gradients by blocks, and by sums where there are no groups."""
    rng = rng_of(call, criterion.seed)
    is_backward = call.traits.base == "convolution_backward"
    blocks = list(_backward_blocks(call, rng) if is_backward else _forward_blocks(call, rng))
    details = [_spell(picks) for picks in blocks]
    suspects: list[list[Pick]] = []
    if _is_probed(call):
        found, text = _probe(call, out, rng, is_backward=is_backward)
        suspects += found
        details.insert(0, text)
    for number, result in enumerate(out if is_backward else [out]):
        suspects += _nonfinite_blocks(call, number, result)
    sample = sample_of("adjoint_probe", out, criterion.seed, "; ".join(details))
    parts = (part_of_slices(call, out, picks) for picks in [*suspects, *blocks] if picks)
    return judge_parts(parts, criterion, sample)


def _spell(picks: list[Pick]) -> str:
    return " x ".join(f"{pick.count:,} of {pick.space.count:,}" for pick in picks) + " planes"


def _is_probed(call: Call) -> bool:
    x = argument(call, "input")
    return (
        argument(call, "groups") == 1
        and not argument(call, "transposed")
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and argument(call, "weight").dtype is x.dtype
    )


# ---- blocks: some images times some channels ----------------------------------------------------


def _pick(space: Space, count: int, rng: np.random.Generator) -> Pick:
    """Some positions, the last one among them: where a tile is cut."""
    size = space.sizes[0]
    chosen = rng.choice(size, min(size, max(1, count)), replace=False)
    return Pick(space, (np.union1d(chosen[1:], [size - 1]).astype(np.int64),))


def _images(call: Call) -> Space:
    names = ["input", "grad_output"] if call.traits.base == "convolution_backward" else ["input"]
    size = argument(call, "input").shape[0]
    changes = _mask(0) if len(names) == 2 else {}
    return Space(
        sizes=(size,), tensors=dict.fromkeys(names, (0,)), outputs={0: (0,)}, changes=changes
    )


def _mask(*outputs: int) -> dict[str, Any]:
    return {"output_mask": lambda n: [number in outputs for number in range(3)]}


def _forward_blocks(call: Call, rng: np.random.Generator) -> Iterator[list[Pick]]:
    x, weight = argument(call, "input"), argument(call, "weight")
    groups, transposed = argument(call, "groups"), argument(call, "transposed")
    picks = [_pick(_images(call), NUM_IMAGES, rng)]
    channels = {"bias": (0,)} if argument(call, "bias") is not None else {}
    if groups == 1:
        dim = 1 if transposed else 0
        size = weight.shape[dim]
        space = Space(sizes=(size,), tensors={"weight": (dim,), **channels}, outputs={0: (1,)})
        picks.append(_pick(space, NUM_CHANNELS, rng))
    elif groups == x.shape[1] == weight.shape[0] and not transposed:
        space = Space(
            sizes=(groups,), tensors={"weight": (0,), "input": (1,), **channels},
            outputs={0: (1,)}, changes={"groups": lambda n: n},
        )  # fmt: skip
        picks.append(_pick(space, max(NUM_CHANNELS, groups // 8), rng))
    yield picks


def _backward_blocks(call: Call, rng: np.random.Generator) -> Iterator[list[Pick]]:
    """Input gradient: images times input channels. Weight gradient: channels times channels."""
    grad, x, weight = (argument(call, name) for name in ("grad_output", "input", "weight"))
    mask = argument(call, "output_mask")
    plain = argument(call, "groups") == 1 and not argument(call, "transposed")
    if mask[0]:
        picks = [_pick(_images(call), NUM_IMAGES, rng)]
        if plain:
            space = Space(
                sizes=(x.shape[1],), tensors={"input": (1,), "weight": (1,)}, outputs={0: (1,)}
            )
            picks.append(_pick(space, NUM_CHANNELS, rng))
        yield picks
    outputs = [number for number in (1, 2) if mask[number]]
    if plain and outputs:
        yield from _weight_blocks(call, grad, x, weight, outputs, rng)
    elif outputs and not argument(call, "transposed"):
        yield from _group_blocks(call, outputs, rng)


def _rows_of_weight(call: Call, outputs: list[int]) -> Space:
    """Output channels of the gradients of weight (1) or bias (2)."""
    changes = _mask(*outputs)
    if 2 in outputs:
        changes["bias_sizes"] = lambda n: [n]
    return Space(
        sizes=(argument(call, "weight").shape[0],),
        tensors={"grad_output": (1,), "weight": (0,)},
        outputs=dict.fromkeys(outputs, (0,)),
        changes=changes,
    )


def _weight_blocks(
    call: Call, grad: Tensor, x: Tensor, weight: Tensor, outputs: list[int], rng: Any
) -> Iterator[list[Pick]]:
    rows = max(1, min(NUM_CHANNELS, MAX_FACTOR * weight.shape[0] // grad.numel()))
    columns = max(1, min(NUM_CHANNELS, MAX_FACTOR * weight.shape[1] // x.numel()))
    if 1 in outputs:
        to_columns = Space(
            sizes=(weight.shape[1],), tensors={"input": (1,), "weight": (1,)}, outputs={1: (1,)}
        )
        yield [_pick(_rows_of_weight(call, [1]), rows, rng), _pick(to_columns, columns, rng)]
    if 2 in outputs:
        yield [_pick(_rows_of_weight(call, [2]), rows, rng)]


def _group_blocks(call: Call, outputs: list[int], rng: np.random.Generator) -> Iterator[list[Pick]]:
    """Gradients of some groups, each as those of a convolution without groups; of all biases."""
    x, weight, groups = argument(call, "input"), argument(call, "weight"), argument(call, "groups")
    of_group, in_group = weight.shape[0] // groups, weight.shape[1]
    within = MAX_FACTOR * x.shape[1] // x.numel()
    most = max(1, min(NUM_CHANNELS, within))
    chosen = np.empty(0, dtype=np.int64)
    if 1 in outputs and in_group == 1:
        yield _depthwise_block(call, within, rng)
    elif 1 in outputs:
        chosen = np.unique([0, int(rng.integers(groups)), groups - 1])
    for group in chosen:
        rows = group * of_group + np.sort(rng.permutation(of_group)[:most])
        columns = np.sort(rng.permutation(in_group)[:most])
        to_rows = _rows_of_weight(call, [1])
        there = torch.from_numpy(group * in_group + columns).to(x.device)
        changes = {"input": _always(x.detach()[:, there].to("cpu")), "groups": _always(1)}
        yield [
            Pick(replace(to_rows, changes={**to_rows.changes, **changes}), (rows,)),
            Pick(Space(sizes=(in_group,), tensors={"weight": (1,)}, outputs={1: (1,)}), (columns,)),
        ]
    if 2 in outputs:
        to_rows = _rows_of_weight(call, [2])
        kernel = tuple(weight.shape[2:])
        changes = {
            "input": _always(x.detach()[:, :1].to("cpu")),
            "weight": lambda n: torch.zeros(n, 1, *kernel, dtype=weight.dtype),
            "groups": _always(1),
        }
        space = replace(
            to_rows, tensors={"grad_output": (1,)}, changes={**to_rows.changes, **changes}
        )
        yield [_pick(space, most, rng)]


def _depthwise_block(call: Call, within: int, rng: np.random.Generator) -> list[Pick]:
    """Gradients of some groups at once: of few elements each, but enough for tests of the mean."""
    x, weight, groups = argument(call, "input"), argument(call, "weight"), argument(call, "groups")
    of_group = weight.shape[0] // groups
    enough = math.ceil(MIN_ELEMENTS / max(1, weight.numel() // groups))
    count = min(groups, max(NUM_CHANNELS, min(enough, within)))
    chosen = np.union1d(rng.permutation(groups)[:count], [0, groups - 1])
    rows = (chosen[:, None] * of_group + np.arange(of_group)).reshape(-1)
    to_rows = _rows_of_weight(call, [1])
    there = x.detach()[:, torch.from_numpy(chosen).to(x.device)].to("cpu")
    changes = {"input": _always(there), "groups": _always(len(chosen))}
    return [Pick(replace(to_rows, changes={**to_rows.changes, **changes}), (rows,))]


def _always(value: Any) -> Callable[[int], Any]:
    return lambda _: value


# ---- sums ---------------------------------------------------------------------------------------


def _probe(
    call: Call, out: Any, rng: np.random.Generator, *, is_backward: bool
) -> tuple[list[list[Pick]], str]:
    """Blocks that sums flag, and what was summed."""
    x = argument(call, "input")
    fold = min(FOLD, x.shape[0])
    starts = np.arange(0, x.shape[0] - fold + 1, fold)
    chosen = np.sort(rng.choice(starts, max(1, starts.size // EVERY), replace=False))
    suspects: list[list[Pick]] = []
    texts = []
    if not is_backward:
        sums = forward_sums(call, out, chosen, fold, rng)
        suspects += _flagged_images(call, sums, chosen, fold)
        texts.append("outputs")
    else:
        mask = argument(call, "output_mask")
        if mask[0]:
            sums = input_sums(call, out[0], chosen, fold, rng)
            suspects += _flagged_images(call, sums, chosen, fold)
            texts.append("input gradients")
        if mask[1] and out[1].shape[0] > 1:
            suspects += _flagged_columns(call, weight_sums(call, out[1], rng))
            texts.append("all weight gradients")
    images = f"{chosen.size * fold:,} of {x.shape[0]:,} images"
    return suspects, f"sums of all channels of {images} ({', '.join(texts)})"


def _nonfinite_blocks(call: Call, number: int, result: Any) -> list[list[Pick]]:
    """The images of the first NaN and Inf, all channels; of weight gradients the channels."""
    if not isinstance(result, Tensor) or number > 1:
        return []
    first = nonfinite_places(result)[:, 0]
    space = _images(call) if number == 0 else _rows_of_weight(call, [1])
    return [[Pick(space, (np.array([at], dtype=np.int64),))] for at in np.unique(first)[:2]]


def _flagged_images(call: Call, residual: Residual, starts: Array, fold: int) -> list[list[Pick]]:
    """Every image of a group whose sums are off, all channels."""
    found = []
    for group in residual.worst_rows(_WORST_GROUPS):
        if not residual.z[group].max() > SUSPECT:
            continue
        space = _images(call)
        found += [
            [Pick(space, (np.array([image], dtype=np.int64),))]
            for image in range(int(starts[group]), int(starts[group]) + fold)
        ]
    return found


def _flagged_columns(call: Call, residual: Residual) -> list[list[Pick]]:
    """Weight gradients of the input channel whose sum is off, some output channels at a time."""
    weight, grad = argument(call, "weight"), argument(call, "grad_output")
    row = int(residual.worst_rows(1)[0])
    if not residual.z[row].max() > SUSPECT:
        return []
    together = max(1, MAX_FACTOR * weight.shape[0] // grad.numel())
    column = Space(
        sizes=(weight.shape[1],), tensors={"input": (1,), "weight": (1,)}, outputs={1: (1,)}
    )
    rows = _rows_of_weight(call, [1])
    return [
        [
            Pick(rows, (np.arange(start, min(weight.shape[0], start + together)),)),
            Pick(column, (np.array([row], dtype=np.int64),)),
        ]
        for start in range(0, weight.shape[0], together)
    ]
