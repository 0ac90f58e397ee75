"""A kept call, run and judged again: after the step, on fresh copies, seen by nobody."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from opcheck.calls import Call, OpTraits, Site, traits_of
from opcheck.compare import Judgement, judge
from opcheck.declared import DeclaredDtypes
from opcheck.factors import kind_of_product
from opcheck.kernel_inputs import keep_inputs, with_changed_inputs
from opcheck.modes import without_modes
from opcheck.outside import outside_everything
from opcheck.packing import Packed, View, map_tree, pack, tree_items, unpack
from opcheck.policy import describe
from opcheck.records import OpRecord, SkipReason
from opcheck.references import Reference, choose
from opcheck.runstate import RunState
from opcheck.snapshots import snapshot
from opcheck.switch import SWITCH

__all__ = ["Again", "Argument", "KeptCall", "NotJudged", "judge_results", "keep", "run_again"]


class NotJudged(Exception):  # noqa: N818 - an outcome, not an error
    """These arguments have no reference."""


@dataclass(slots=True, kw_only=True)
class KeptCall:
    """A call in memory of its own: what it got, and the state that it ran in."""

    func: Any
    arguments: Packed
    """Of `(args, kwargs)` before the call."""
    record: OpRecord
    state: RunState
    on_device: bool
    in_kernel: bool
    out_dtype: torch.dtype | None
    seed: int
    """Of the sampling of the check."""
    declared: DeclaredDtypes = field(default_factory=DeclaredDtypes, repr=False)

    @property
    def traits(self) -> OpTraits:
        """Of the overload."""
        return traits_of(self.func)

    @property
    def device(self) -> str:
        """Type of the device that it ran on."""
        for view in self.arguments.views():
            if not view.device.startswith("cpu"):
                return view.device.partition(":")[0]
        given = [item for item in tree_items(self.arguments.tree) if isinstance(item, torch.device)]
        return given[0].type if given else "cpu"


@dataclass(slots=True)
class Again:
    """What came of running it again."""

    call: Call
    out: Any
    reference: Reference
    found: Judgement

    def names_of(self, arguments: Packed) -> dict[int, View]:
        """Id of each tensor that the call got -> its view in the packed arguments."""
        pairs = zip(
            tree_items((self.call.args, self.call.kwargs)), tree_items(arguments.tree), strict=True
        )
        return {id(tensor): view for tensor, view in pairs if isinstance(view, View)}


def keep(call: Call, record: OpRecord, state: RunState, *, seed: int) -> KeptCall:
    """Copy a call that was just judged; what it wrote to is kept as it was before."""
    with outside_everything():
        arguments = pack((call.args, call.kwargs), {**call.before, **call.whole_before})
    return KeptCall(
        func=call.func, arguments=arguments, record=record, state=state, on_device=call.on_device,
        in_kernel=call.in_kernel, out_dtype=call.out_dtype, seed=seed,
    )  # fmt: skip


def _call_of(kept: KeptCall, arguments: Packed, device: str | None) -> Call:
    args, kwargs = unpack(arguments, device=device)
    if device is not None:
        args, kwargs = map_tree(
            (args, kwargs),
            lambda item: torch.device(device) if isinstance(item, torch.device) else item,
        )
    return Call(
        func=kept.func, traits=kept.traits, args=args, kwargs=kwargs, site=Site("", "other"),
        index=kept.record.index, step=0, occurrence=0,
        signature=tuple(describe(kept.func, args, kwargs).key), source="",
        on_device=kept.on_device, in_kernel=kept.in_kernel, out_dtype=kept.out_dtype,
    )  # fmt: skip


def run_again(kept: KeptCall, arguments: Packed) -> Again:
    """Run the kernel that is registered now, and judge it.

    The reference comes first: arguments that make no sense are refused by torch's own kernel and
    never reach one that may not look.

    Raises:
        NotJudged: there is no reference.
        Anything that the reference or the kernel raises.
    """
    with outside_everything():
        call = _call_of(kept, arguments, None)
        snapshot(call)
        if kept.in_kernel:
            keep_inputs(call)
        reference = _reference(kept, call)
        _ = reference.baseline() if reference.has_baseline else reference.golden()
    with _as_it_was(kept.state), without_modes(), SWITCH.silenced():
        out = kept.func(*call.args, **call.kwargs)
    with outside_everything():
        return Again(call, out, reference, _judged(kept, call, out, reference))


@dataclass(frozen=True, slots=True)
class Argument:
    """Stands in recorded results for an argument that the op gave back."""

    place: int
    """Among the leaves of `(args, kwargs)`."""


def judge_results(kept: KeptCall, results: Packed) -> Again:
    """Judge what another machine got, on the CPU.

    Args:
        kept: a call of that machine.
        results: "out", what the op gave, and "written", what mutated parameters held after the
            call, by their place in the schema.

    Raises:
        NotJudged: there is no reference.
        Anything that the reference raises.
    """
    with outside_everything():
        call = _call_of(kept, kept.arguments, "cpu")
        call.tf32 = _had_tf32(kept)
        snapshot(call)
        given = list(tree_items((call.args, call.kwargs)))
        found = unpack(results, device="cpu")
        for place, value in found["written"].items():
            _write(call, int(place), value)
        out = map_tree(
            found["out"], lambda item: given[item.place] if isinstance(item, Argument) else item
        )
        reference = _reference(kept, call)
        return Again(call, out, reference, _judged(kept, call, out, reference))


def _had_tf32(kept: KeptCall) -> bool:
    """The other machine may have rounded float32 inputs of products to TF32."""
    if kept.device != "cuda":
        return False
    state = kept.state
    return state.cuda_tf32 if kind_of_product(kept.traits.base) == "matmul" else state.cudnn_tf32


def _write(call: Call, place: int, value: Any) -> None:
    param = call.traits.params[place]
    for other, given in call.traits.bound(call.args, call.kwargs):
        if other is param:
            pairs = zip(tree_items(given), tree_items(value), strict=True)
            for target, source in pairs:
                target.copy_(source)


def _reference(kept: KeptCall, call: Call) -> Reference:
    found = choose(call, on_device=kept.on_device or kept.in_kernel, seed=kept.seed)
    if isinstance(found, SkipReason):
        raise NotJudged(found.value)
    if not found.has_baseline:
        call.declared = kept.declared.of(call)
    return found


def _judged(kept: KeptCall, call: Call, out: Any, reference: Reference) -> Judgement:
    record = kept.record
    found = judge(
        call, out, reference, criterion=record.criterion, rtol=record.rtol, atol=record.atol
    )
    if found.skip is not None:
        raise NotJudged(found.skip.value)
    return with_changed_inputs(call, out, found) if kept.in_kernel and found.passed else found


@contextlib.contextmanager
def _as_it_was(state: RunState) -> Iterator[None]:
    """The contexts of the call; the generators are put back."""
    before = torch.get_rng_state()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_rng_state, before)
        stack.enter_context(torch.inference_mode(state.inference))
        stack.enter_context(torch.set_grad_enabled(False))
        for device, dtype in state.autocast:
            stack.enter_context(torch.autocast(device, dtype=getattr(torch, dtype)))
        yield
