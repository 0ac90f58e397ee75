"""Judge a result as if another device had computed it, without one."""

from __future__ import annotations

from typing import Any

from opcheck.calls import Call, Site, traits_of
from opcheck.compare import Judgement, judge
from opcheck.outside import outside_everything
from opcheck.policy import describe
from opcheck.references import choose


def judged(
    func: Any, args: tuple[Any, ...], out: Any, *, device: str = "", on_device: bool = True
) -> Judgement:
    """What is said of `out` for `func(*args)`.

    Args:
        func: an overload that changes no argument.
        args: its arguments, on the CPU.
        out: what the device gave.
        device: its type, where that matters.
        on_device: False: the CPU itself gave it.
    """
    call = Call(
        func=func, traits=traits_of(func), args=args, kwargs={}, site=Site("", "other"), index=0,
        step=0, occurrence=0, signature=tuple(describe(func, args, {}).key), source="",
        device_type=device,
    )  # fmt: skip
    first = out[0] if isinstance(out, (tuple, list)) else out
    call.out_dtype = first.dtype
    with outside_everything():
        reference = choose(call, on_device=on_device, seed=0)
        return judge(call, out, reference, criterion="calibrated", rtol=1e-4, atol=1e-5)
