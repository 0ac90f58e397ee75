"""Calls above `max_numel`: which strategy looks at which, before and after they run."""

from __future__ import annotations

from typing import Any

from opcheck.attention_rows import is_attention, judge_attention
from opcheck.calls import Call
from opcheck.convolutions import is_convolution, judge_convolution
from opcheck.counted import is_counted, judge_counted
from opcheck.decomposed import has_vectors, judge_decomposed
from opcheck.large_table import FACTORIES, is_pointwise, lists_of, spaces_of
from opcheck.product_grid import judge_grid, pick_grid
from opcheck.products import is_product, judge_projection, products_of
from opcheck.records import SkipReason
from opcheck.sampled import (
    Criterion,
    Judged,
    judge_parts,
    nonfinite_rows,
    pick_rows,
    rng_of,
    sample_of,
)
from opcheck.sampled_elements import ElementsKept, elements_before, judge_elements_of
from opcheck.slices import Kept, Part, Pick, cut_with, keep, part_of_slices
from opcheck.tensor_kinds import tensors_within
from opcheck.wholes import is_whole, judge_whole

__all__ = ["judge_large", "prepare_large", "strategy_of"]


def strategy_of(call: Call) -> str:
    """The strategy that looks at a large call, or "not_checkable"."""
    if is_pointwise(call) or lists_of(call) or call.traits.base in FACTORIES:
        return "sampled_elements"
    if is_product(call) or has_vectors(call):
        return "projection"
    if is_convolution(call):
        return "adjoint_probe"
    if is_attention(call):
        return "attention"
    if is_whole(call) or is_counted(call):
        return "exact_full"
    if spaces_of(call):
        return "sampled_rows"
    return "not_checkable"


def prepare_large(call: Call, seed: int) -> SkipReason | None:
    """Keep what a large op is about to change, slices of it.

    Returns:
        A reason to skip the call, when nothing could be kept that says something.
    """
    if not call.traits.mutates:
        return None
    strategy = strategy_of(call)
    rng = rng_of(call, seed)
    if strategy == "sampled_elements":
        call.large = elements_before(call, rng)
        return None
    if strategy == "projection":
        picks_of = pick_grid(call, rng)
        call.large = (picks_of, keep(call, cut_with(picks_of)))
        return None
    if strategy != "sampled_rows":
        return SkipReason.NOT_CHECKABLE
    picks = [pick_rows(call, space, rng) for space in spaces_of(call)]
    if not picks or picks[0] is None:
        return SkipReason.NOT_CHECKABLE
    call.large = (picks[0], keep(call, cut_with([picks[0]])))
    return None


def judge_large(call: Call, out: Any, criterion: Criterion) -> Judged | SkipReason:
    """Judge a large call by a sample of it.

    Raises:
        Anything that its reference raises.
    """
    if _is_empty(out):  # of no rows, through large weights: an expert that got no token
        return SkipReason.NOTHING_TO_COMPARE
    strategy = strategy_of(call)
    if strategy == "sampled_elements":
        earlier = call.large if isinstance(call.large, ElementsKept) else None
        return judge_elements_of(call, out, earlier, criterion)
    known = _JUDGES.get(strategy)
    if known is not None:
        return known(call, out, criterion)
    if strategy == "sampled_rows":
        return _judge_rows(call, out, criterion)
    return SkipReason.NOT_CHECKABLE


def _is_empty(out: Any) -> bool:
    results = list(tensors_within(out))
    return bool(results) and not any(result.numel() for result in results)


def _judge_projected(call: Call, out: Any, criterion: Criterion) -> Judged | SkipReason:
    if has_vectors(call):
        return judge_decomposed(call, out, criterion)
    if call.large is not None:
        picks, kept = call.large
        return judge_grid(call, out, picks, kept, criterion)
    products = products_of(call, out)
    if products:
        return judge_projection(call, out, products, criterion)
    picks = pick_grid(call, rng_of(call, criterion.seed), out)
    return judge_grid(call, out, picks, None, criterion)


def _judge_all(call: Call, out: Any, criterion: Criterion) -> Judged | SkipReason:
    judge = judge_counted if is_counted(call) else judge_whole
    return judge(call, out, criterion)


def _judge_rows(call: Call, out: Any, criterion: Criterion) -> Judged | SkipReason:
    parts: list[Part] = []
    details: list[str] = []
    if call.large is not None:
        pick, kept = call.large
        _add(parts, details, call, out, pick, kept)
    else:
        rng = rng_of(call, criterion.seed)
        for space in spaces_of(call):
            chosen = pick_rows(call, space, rng, also=nonfinite_rows(space, out))
            if chosen is not None:
                _add(parts, details, call, out, chosen, None)
    if not parts:
        return SkipReason.NOT_CHECKABLE
    sample = sample_of("sampled_rows", out, criterion.seed, "; ".join(details))
    return judge_parts(parts, criterion, sample)


def _add(
    parts: list[Part], details: list[str], call: Call, out: Any, pick: Pick, kept: Kept | None
) -> None:
    parts.append(part_of_slices(call, out, [pick], kept))
    details.append(f"{pick.count:,} of {pick.space.count:,} slices")


_JUDGES = {
    "projection": _judge_projected,
    "adjoint_probe": judge_convolution,
    "attention": judge_attention,
    "exact_full": _judge_all,
}
