"""Steps of a user who begins and ends blocks that put back the dispatch keys of the thread.

`python -m tests.key_block_steps` prints a JSON line for each way of doing so: what differs from the
same steps without a session. In processes of its own, because what goes wrong may end one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import opcheck
from opcheck.overhead import OverheadBudget
from tests.step_equality import active_modes

_C = torch._C  # noqa: TID251 - the keys are looked at from outside
X = torch.linspace(-2, 2, 24).reshape(4, 6)
KEYS = (_C.DispatchKey.Python, _C.DispatchKey.PythonTLSSnapshot)
CLASSES = (_C._InferenceMode, _C._ForceDispatchKeyGuard, _C._PreserveDispatchKeyGuard)
METHODS = [(item.__enter__, item.__exit__) for item in CLASSES]
Block = Callable[[], AbstractContextManager[Any]]
Act = Callable[[], None]
Call = Callable[[torch.Tensor], torch.Tensor]


def forced() -> AbstractContextManager[None]:
    keys = _C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()
    return _C._ForceDispatchKeyGuard(*keys)


BLOCKS: dict[str, Block] = {
    "inference_mode(False)": lambda: torch.inference_mode(False),
    "inference_mode": torch.inference_mode,
    "the keys as they are": forced,
    "keys to be put back": _C._PreserveDispatchKeyGuard,
    "without modes": _C._DisableTorchDispatch,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor, lambda tensor: tensor
    ),
}
PUTS_NOTHING_BACK = {"without modes", "no_grad", "autocast", "saved_tensors_hooks"}
NO_BACKWARD = {"inference_mode", "no_grad"}
UNSEEN = {"without modes"}


def small_net() -> nn.Module:
    """[B, 6] to [B, 1], the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1))


class User:
    """Steps of a small model; with what each left, and whether anything is wrong in between."""

    def __init__(self, session: Any, *, trains: bool, is_seen: bool) -> None:
        self.net = small_net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.session, self.trains, self.is_seen = session, trains, is_seen
        self.outputs: list[list[float]] = []
        self.faults: list[str] = []
        self.modes: list[int] = []

    def step(self) -> None:
        seen = None if self.session is None else self.session.coverage.seen
        out = self.net(X)
        modes = len(active_modes())
        if self.trains:
            self.optimizer.zero_grad()
            out.float().square().mean().backward()
            self.optimizer.step()
        self.modes.append(modes)
        self.outputs.append(out.float().flatten().tolist())
        if seen is None:
            return
        has_looked = self.session.coverage.seen > seen
        if self.is_seen and has_looked != bool(modes) and len(self.modes) > 1:
            self.faults.append(f"step {len(self.modes)}: {modes} modes, calls seen: {has_looked}")
        if not self.trains:
            self.session.next_step()


def each_step(block: Block, session: Any, step: Act) -> None:
    with session:
        for _ in range(6):
            with block():
                step()


def around_the_session(block: Block, session: Any, step: Act) -> None:
    with block(), session:
        for _ in range(6):
            step()


def begun_before_and_ended_within(block: Block, session: Any, step: Act) -> None:
    opened = block()
    opened.__enter__()
    with session:
        step()
        opened.__exit__(None, None, None)
        for _ in range(5):
            step()


def begun_within_and_ended_after(block: Block, session: Any, step: Act) -> None:
    with session:
        step()
        opened = block()
        opened.__enter__()
        for _ in range(5):
            step()
    opened.__exit__(None, None, None)


def over_some_steps(block: Block, session: Any, step: Act) -> None:
    with session:
        step()
        with block():
            step()
            step()
        for _ in range(3):
            step()


def nested(block: Block, session: Any, step: Act) -> None:
    with session:
        with block():
            step()
            for _ in range(3):
                with block():
                    step()
            step()
        step()


def in_turns(block: Block, session: Any, step: Act) -> None:
    first, second = block(), block()
    with session:
        step()
        first.__enter__()
        step()
        second.__enter__()
        step()
        second.__exit__(None, None, None)
        step()
        first.__exit__(None, None, None)
        step()
        step()


def ended_by_an_exception(block: Block, session: Any, step: Act) -> None:
    with session:
        for _ in range(6):
            with contextlib.suppress(ValueError), block():
                step()
                raise ValueError


def left_by_an_exception(block: Block, session: Any, step: Act) -> None:
    with contextlib.suppress(ValueError), session:
        for _ in range(4):
            step()
        with block():
            step()
            step()
            raise ValueError


def of_a_generator(block: Block, session: Any, step: Act) -> None:
    def stepping() -> Iterator[None]:
        with block():
            while True:
                step()
                yield

    steps = stepping()
    with session:
        for _ in range(6):
            next(steps)
    steps.close()


ORDERS = (
    each_step, around_the_session, begun_before_and_ended_within, begun_within_and_ended_after,
    over_some_steps, nested, in_turns, ended_by_an_exception, left_by_an_exception, of_a_generator,
)  # fmt: skip
BUDGETS: dict[str, dict[str, Any]] = {
    "max_checks": {"max_checks": 1},
    "num_steps": {"num_steps": 1},
    "max_overhead": {"max_overhead": 1e9},
}


def rest_and_look() -> None:
    """Look at the first step; of the others, every second is left alone."""
    asked: WeakKeyDictionary[OverheadBudget, Iterator[bool]] = WeakKeyDictionary()

    def wants_rest(budget: OverheadBudget) -> bool:
        return next(asked.setdefault(budget, itertools.cycle([False, True])))

    OverheadBudget.wants_rest = property(wants_rest)  # type: ignore[method-assign,assignment]


def differences(name: str, order: Any, arguments: dict[str, Any]) -> list[str]:
    """What a session changes, or leaves behind."""
    block, trains = BLOCKS[name], name not in NO_BACKWARD
    plain = User(None, trains=trains, is_seen=True)
    order(block, contextlib.nullcontext(), plain.step)
    with tempfile.TemporaryDirectory() as folder:
        session = opcheck.check(log_dir=folder, quiet=True, **arguments)
        user = User(session, trains=trains, is_seen=name not in UNSEEN)
        order(block, session, user.step)
    faults = [*user.faults, *left_behind()]
    if user.outputs != plain.outputs:
        faults.append("the steps differ")
    coverage = session.coverage
    if not coverage.adds_up:
        faults.append("calls not accounted for")
    if "max_overhead" not in arguments:
        has_left = user.modes[-1] == 0
        if has_left != (coverage.counting_stopped_at is not None):
            faults.append(f"{user.modes}, counting stopped at {coverage.counting_stopped_at}")
        if not has_left and name not in UNSEEN:
            faults.append(f"stays: {user.modes}")
    elif not {0, 1} <= set(user.modes[1:]) and name not in UNSEEN:
        faults.append(f"does not rest and come back: {user.modes}")
    return faults


def left_behind() -> Iterator[str]:
    if active_modes():
        yield "a mode is left behind"
    if any(_C._dispatch_tls_is_dispatch_key_included(key) for key in KEYS):
        yield "keys are left behind"
    if [(item.__enter__, item.__exit__) for item in CLASSES] != METHODS:
        yield "the classes of the blocks are left changed"
    (X + 1).exp()


def compiled(net: nn.Module) -> Call:
    eager = torch.compiler.disable(net)

    @torch.compile(backend="eager")
    def forward(x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        torch._dynamo.graph_break()
        return eager(doubled)

    return forward


class OfUser(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, net: nn.Module) -> torch.Tensor:
        with torch.enable_grad():
            ctx.held = x.detach().requires_grad_()
            ctx.out = net(ctx.held)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.out.backward(*grads)
        return ctx.held.grad, None


def differentiated(net: nn.Module) -> Call:
    gradient = torch.func.grad(lambda x: net(x).square().sum())
    return lambda x: net[0](gradient(x))


def compiled_whole(net: nn.Module) -> Call:
    forward = torch.compile(net, backend="eager", fullgraph=True)

    def graph(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):
            return x * 2

    double = torch.compile(graph, backend="eager", fullgraph=True)
    return lambda x: forward(double(x))


CALLS: dict[str, Callable[[nn.Module], Call]] = {
    "a compiled function with a graph break": compiled,
    "compiled functions without": compiled_whole,
    "checkpoint": lambda net: lambda x: checkpoint(net, x, use_reentrant=False),
    "checkpoint(use_reentrant=True)": lambda net: lambda x: checkpoint(net, x, use_reentrant=True),
    "torch.func.grad": differentiated,
    "torch.func.vmap": lambda net: torch.func.vmap(lambda row: net(row)),
    "an autograd.Function": lambda net: lambda x: OfUser.apply(x, net),
}
"""Calls that begin no step themselves, and run a module."""


def trained(call: Callable[[nn.Module], Call], session: Any) -> tuple[list[Any], list[int]]:
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    forward, x = call(net), X.clone().requires_grad_()
    modes = []
    with session:
        for _ in range(6):
            optimizer.zero_grad()
            forward(x).square().mean().backward()
            optimizer.step()
            modes.append(len(active_modes()))
    return [item.tolist() for item in (*net.parameters(), x.grad)], modes


def of_call(name: str, arguments: dict[str, Any]) -> list[str]:
    """The session leaves or rests, and comes back, at the module within the call."""
    plain, _ = trained(CALLS[name], contextlib.nullcontext())
    with tempfile.TemporaryDirectory() as folder:
        session = opcheck.check(log_dir=folder, quiet=True, **arguments)
        with_session, modes = trained(CALLS[name], session)
    faults = list(left_behind())
    if with_session != plain:
        faults.append("the steps differ")
    coverage = session.coverage
    if "max_overhead" in arguments:
        if coverage.overhead.num_rests == 0 or modes[4] != 1:
            faults.append(f"{modes}, {coverage.overhead.num_rests} rests")
    elif modes[-1] != 0 or coverage.counting_stopped_at != coverage.seen - 1:
        faults.append(f"{modes}, counting stopped at {coverage.counting_stopped_at}")
    return faults


def of_a_hook() -> list[str]:
    """Autograd puts the stack back after a backward within which a step was said to end."""
    net = small_net()
    modes = []
    with tempfile.TemporaryDirectory() as folder:
        session = opcheck.check(log_dir=folder, quiet=True, max_checks=1)
        net[0].weight.register_post_accumulate_grad_hook(lambda _: session.next_step())
        with session:
            for _ in range(4):
                net(X).square().mean().backward()
                modes.append(len(active_modes()))
        stopped = session.coverage.counting_stopped_at
    faults = [] if (stopped is None) == (modes[-1] == 1) else [f"{modes}, stopped at {stopped}"]
    return [*faults, *left_behind()]


def in_another_process(work: Callable[[], None], name: str) -> None:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        work()
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        print(json.dumps([name, [f"ended with {status}"]]))


def report(case: str, faults: Callable[[], list[str]]) -> None:
    try:
        found = faults()
    except Exception as error:  # noqa: BLE001 - told of; what runs later may go wrong with it
        found = [f"{type(error).__name__}: {error}"]
    print(json.dumps([case, found]))


def blocks(name: str) -> None:
    rest_and_look()
    orders = ORDERS if name not in PUTS_NOTHING_BACK else ORDERS[:4]
    for order, (budget, arguments) in itertools.product(orders, BUDGETS.items()):
        if budget == "num_steps" and order is not each_step:
            continue  # it leaves as with `max_checks`
        case = f"{name}, {order.__name__}, {budget}"
        report(case, partial(differences, name, order, arguments))


def calls(name: str) -> None:
    rest_and_look()
    for budget, arguments in BUDGETS.items():
        report(f"{name}, {budget}", partial(of_call, name, arguments))


def main() -> None:
    for name in BLOCKS:
        in_another_process(partial(blocks, name), name)
    for name in CALLS:
        in_another_process(partial(calls, name), name)
    in_another_process(partial(report, "a hook", of_a_hook), "a hook")


if __name__ == "__main__":
    main()
