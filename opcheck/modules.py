"""Which module and which phase a call belongs to, and the source line that made it.

Forward: an own stack, kept by global module hooks. Backward: autograd numbers its nodes as the
forward makes them, so a map from that number to the module open at the time attributes every
backward call (measured right 103 of 103 times, where walking the graph was right 100 times).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from opcheck import _torch
from opcheck.calls import Site
from opcheck.global_hooks import ModuleHooks, OptimizerHooks
from opcheck.own_thread import OwnThread
from opcheck.owners import Owners
from opcheck.source_lines import find_user_frame, spell_line

__all__ = ["ModuleFrame", "ModuleTracker", "clean_fqn"]

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
Origin = tuple[str, CodeType | None, int]
"""Module FQN, code object and line of the forward call that made an autograd node."""

_MANY_ORIGINS = 50_000
"""Autograd nodes that are remembered beyond the forward that made them, at 100 bytes each: a graph
may run backward long after its step (a GAN's generator, gradient accumulation)."""


_FEW_MODULES = 32


@dataclass(slots=True)
class ModuleFrame:
    """One open module call."""

    module: nn.Module
    fqn: str
    task: int
    """Autograd graph task that was running when the module was entered, -1 for none."""
    args: tuple[Any, ...]
    versions: list[int]
    """Version counters of the positional tensor inputs on entry."""
    random_calls: int
    held: list[Any] = field(default_factory=list)
    """Outcomes of calls that made non-finite values, kept until the module ends."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.stack: list[ModuleFrame] = []
        self.last_sequence_nr = -1
        self.replaying = False


class ModuleTracker:
    """Global hooks that know the open modules; one per session, entered with it."""

    def __init__(
        self,
        model: nn.Module | None,
        *,
        on_step_end: Callable[[], None],
        on_module_end: Callable[[ModuleFrame, dict[str, Any], Any], None],
        on_crash: Callable[[str], None],
    ) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._on_step_end = on_step_end
        self._on_module_end = on_module_end
        self._on_crash = on_crash
        self._local = _Local()
        self._thread = OwnThread()
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._taken: weakref.WeakValueDictionary[str, nn.Module] = weakref.WeakValueDictionary()
        """Names, each with the module that had it first."""
        self._numbers: dict[str, int] = {}
        """Class of outermost modules -> number in the name of the newest."""
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._owners = Owners(self._roots, self._names)
        self._origins: dict[int, Origin] = {}
        self._older_origins: dict[int, Origin] = {}
        self._places: dict[tuple[Any, ...], Origin] = {}
        """One object for each place, of which there are few beside the nodes made there."""
        self._optimizer: tuple[FrameType, Any] | None = None
        """Frame and object of the optimizer whose step runs."""
        self._stepped = False
        self._hooks: tuple[ModuleHooks | OptimizerHooks, ...] = ()
        self.charge: Callable[[float], None] | None = None
        """Is told what every hook took, in seconds."""
        self._user_files: dict[str, bool] = {}
        self.random_calls = 0
        """Calls that moved the generators, counted by the session."""

    @property
    def model(self) -> nn.Module | None:
        """The model that was given, as long as somebody else holds it."""
        return self._model() if self._model is not None else None

    # ---- life ----

    def install(self) -> None:
        """Put the hooks on."""
        self._thread.claim()
        model = self.model
        if model is not None:
            self._add_root(model)
        timed = self._timed
        self._hooks = (
            ModuleHooks(timed(self._before_module), timed(self._after_module)),
            OptimizerHooks(timed(self._before_step), timed(self._after_step)),
        )
        for hooks in self._hooks:
            hooks.put_on()

    def step_ended(self) -> None:
        """Notice was taken of the optimizer's step, if there was one."""
        self._stepped = False

    def module_begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Of a module whose hooks came too late."""
        self._before_module(module, args)

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        charge = self.charge
        if charge is None:
            return hook

        def timed_hook(*args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            start = perf_counter()
            hook(*args)
            charge(perf_counter() - start)

        return timed_hook

    def remove(self) -> None:
        """Take the hooks off and let go of the user's modules."""
        for hooks in self._hooks:
            hooks.take_off()
        self._hooks = ()
        self._local = _Local()
        for container in (self._names, self._taken, self._numbers, self._roots, self._owners):
            container.clear()
        for origins in (self._origins, self._older_origins, self._places):
            origins.clear()
        self._optimizer = None
        self._stepped = False

    # ---- hooks ----

    def _before_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            self._module_begins(module, args)
        except Exception:  # noqa: BLE001 - our crash must not be the user's
            self._on_crash("module_hook")

    def _module_begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        local = self._local
        if local.replaying:
            return
        stack = local.stack
        task = _torch.current_graph_task_id()
        if not stack and task == -1:
            if not self._thread.is_current:
                return  # of a thread that this session does not see
            self._begin_forward()
            if not self._hooks:  # the session has seen enough, and left or rests
                return
        self.locate()  # a node made since the last call is the caller's, not this module's
        fqn = self._names.get(module)
        if fqn is None:
            fqn = self._name(module, stack)
        stack.append(ModuleFrame(module, fqn, task, args, _versions(args), self.random_calls))

    def _after_module(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None, output: Any = None
    ) -> None:
        if torch.compiler.is_compiling():
            return
        try:
            self._module_ends(module, kwargs, output)
        except Exception:  # noqa: BLE001 - our crash must not be the user's
            self._on_crash("module_hook")

    def _module_ends(self, module: nn.Module, kwargs: Any, output: Any) -> None:
        local = self._local
        stack = local.stack
        if local.replaying or not any(frame.module is module for frame in stack):
            return
        frame = stack.pop()
        while frame.module is not module:  # a module left by an exception that nobody saw
            frame = stack.pop()
        if frame.held:
            # checkpoint's early stop calls always_call hooks with three arguments, the output last
            named = kwargs if isinstance(kwargs, dict) and output is not kwargs else {}
            self._on_module_end(frame, named, output)

    def _begin_forward(self) -> None:
        if self._stepped and not self._in_optimizer():
            self.step_ended()
            self._on_step_end()
        if len(self._origins) > _MANY_ORIGINS:
            self._older_origins, self._origins = self._origins, {}

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if self._thread.is_current:
            self._optimizer = sys._getframe(1), optimizer
            try:
                self._owners.learn(optimizer)
            except Exception:  # noqa: BLE001 - our crash must not be the user's
                self._on_crash("optimizer_hook")

    def _after_step(self, *_: Any) -> None:
        if self._thread.is_current:
            self._optimizer = None
            self._owners.step_ended()
            self._stepped = True

    def _in_optimizer(self) -> bool:
        """True while an optimizer's step runs.

        An optimizer that raises calls no post hook, so it is asked whether its frame is still
        among the callers.
        """
        if self._optimizer is None:
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame is self._optimizer[0]:
                return True
            frame = frame.f_back
        self._optimizer = None
        self._owners.step_ended()
        return False

    # ---- names ----

    def _add_root(self, root: nn.Module, prefix: str = "") -> None:
        self._roots.add(root)
        for name, module in root.named_modules():
            inner = clean_fqn(name, root)
            fqn = f"{prefix}.{inner}" if prefix and inner else prefix or inner
            self._give_name(module, fqn)

    def _give_name(self, module: nn.Module, fqn: str) -> None:
        if module not in self._names:
            self._names[module] = fqn
            self._taken.setdefault(fqn, module)

    def _name(self, module: nn.Module, stack: list[ModuleFrame]) -> str:
        held = _wrapped(module)
        while held is not None:  # made around a module that has its name already
            known = self._names.get(held)
            if known is not None:
                self._give_name(module, known)
                return known
            held = _wrapped(held)
        if stack:  # made after its parent was named, or kept out of the module tree
            parent = stack[-1]
            self._name_below(parent, module)
            known = self._names.get(module)
            if known is not None:
                return known
            name = type(module).__name__
            if isinstance(module, torch.fx.GraphModule):  # what a compiler made of its parent
                return parent.fqn
            return f"{parent.fqn}.{name}" if parent.fqn else name
        prefix = self._free_name(type(module).__name__) if self._roots else ""
        self._add_root(module, prefix)
        return self._names[module]

    def _name_below(self, parent: ModuleFrame, wanted: nn.Module) -> None:
        """Name a module that its parent was given since the parent's were named.

        It is looked for among the newest first, then everything without a name is named: to go
        through all of them for one module at a time takes their number squared.
        """
        path = _newest(parent.module, wanted)
        named = parent.module.named_modules() if path is None else [(path, wanted)]
        for name, child in named:
            if child not in self._names and (child is wanted or _wrapped(child) is None):
                inner = clean_fqn(name, parent.module)
                fqn = f"{parent.fqn}.{inner}" if parent.fqn and inner else parent.fqn or inner
                self._give_name(child, fqn)

    def _free_name(self, name: str) -> str:
        """`Linear`, `Linear#2`, ...: one that no living module has."""
        number = self._numbers.get(name, 0)
        if f"{name}#{number}" not in self._taken:  # it may have died, and its name is free
            number = 0
        candidate = name if number == 0 else f"{name}#{number}"
        while candidate in self._taken:
            number = max(number, 1) + 1
            candidate = f"{name}#{number}"
        self._numbers[name] = number
        return candidate

    def owner(self, tensors: Iterable[Any]) -> str:
        """FQN of the module that owns the parameters among `tensors`, "" if not one alone.

        A parameter's gradient and its state in the running optimizer count as the parameter.
        """
        optimizer = self._optimizer[1] if self._optimizer is not None else None
        return self._owners.of(list(tensors), optimizer)

    # ---- sites ----

    def locate(self) -> Site:
        """Module and phase of the call that is being dispatched in this thread."""
        local = self._local
        stack = local.stack
        task = _torch.current_graph_task_id()
        if stack:
            frame = stack[-1]
            self._remember(local, frame.fqn)
            inside_backward = task != -1 and frame.task != -1
            return Site(frame.fqn, "recompute" if inside_backward else "forward")
        if task == -1:
            self._remember(local, "")
            return Site("", "optimizer" if self._in_optimizer() else "other")
        return self._locate_backward(local)

    def _locate_backward(self, local: _Local) -> Site:
        origin = self._backward_origin()
        module = origin[0] if origin else self._gradient_owner()
        if _is_recompute():
            self._remember(local, module)
            return Site(module, "recompute")
        if torch.is_grad_enabled():  # double backward: the nodes made here will run as well
            sequence_nr = _torch.next_sequence_nr() - 1
            self._origins.setdefault(sequence_nr, origin or (module, None, 0))
        return Site(module, "backward")

    def _backward_origin(self) -> Origin | None:
        node = _torch.current_autograd_node()
        if node is None:
            return None
        sequence_nr = _torch.sequence_nr_of(node)
        return self._origins.get(sequence_nr) or self._older_origins.get(sequence_nr)

    def _gradient_owner(self) -> str:
        parameter = getattr(_torch.current_autograd_node(), "variable", None)
        if parameter is None:
            return ""
        return self._owners.of_gradient(parameter, _torch.current_graph_task_id())

    def _remember(self, local: _Local, fqn: str) -> None:
        sequence_nr = _torch.next_sequence_nr() - 1
        if sequence_nr == local.last_sequence_nr:
            return
        local.last_sequence_nr = sequence_nr
        frame = find_user_frame(sys._getframe(1), self._user_files)
        code, line = (frame.f_code, frame.f_lineno) if frame else (None, 0)
        # equal code of two files is equal, so the code itself would not tell the place
        key = (fqn, code and code.co_filename, code and code.co_name, line)
        self._origins.setdefault(sequence_nr, self._places.setdefault(key, (fqn, code, line)))

    def source(self) -> str:
        """`model.py:41 in forward` of the running call, of its forward call in backward; or ""."""
        in_backward = _torch.current_graph_task_id() != -1 and not self._local.stack
        if in_backward and not _is_recompute():
            origin = self._backward_origin()
            if origin is not None and origin[1] is not None:
                return spell_line(origin[1], origin[2])
        frame = find_user_frame(sys._getframe(1), self._user_files)
        return spell_line(frame.f_code, frame.f_lineno) if frame else ""

    @property
    def open_frame(self) -> ModuleFrame | None:
        """The innermost open module call of this thread."""
        stack = self._local.stack
        return stack[-1] if stack else None

    def drain(self) -> list[ModuleFrame]:
        """Module calls that never ended, innermost last; the stack is empty afterwards."""
        stack, self._local.stack = self._local.stack, []
        return stack

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Modules that run inside run for our own sake: the hooks take no notice."""
        self._local.replaying = True
        try:
            yield
        finally:
            self._local.replaying = False


def _is_recompute() -> bool:
    """True in backward where a graph is built that dies with it: a forward is run again."""
    return torch.is_grad_enabled() and not _torch.graph_task_keeps_graph()


def clean_fqn(name: str, root: nn.Module | None = None) -> str:
    """An FQN without the names of wrapper modules; `module.` goes where the root is a DDP."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if parts and parts[0] == "module" and type(root).__name__ == "DistributedDataParallel":
        parts = parts[1:]
    return ".".join(parts)


def _wrapped(module: nn.Module) -> nn.Module | None:
    """The module that a wrapper of torch holds."""
    is_ddp = type(module).__name__ == "DistributedDataParallel"
    names = (*_WRAPPERS, "module") if is_ddp else _WRAPPERS
    return next((child for name, child in module.named_children() if name in names), None)


def _newest(root: nn.Module, wanted: nn.Module) -> str | None:
    """Name of a module among the last few below `root`, None if it is not one of them."""
    waiting = [("", root)]
    for _ in range(_FEW_MODULES):
        if not waiting:
            return None
        path, module = waiting.pop()
        if module is wanted:
            return path
        newest = list(islice(reversed(_torch.own_children(module).items()), _FEW_MODULES))
        prefix = f"{path}." if path else ""
        waiting += [(f"{prefix}{name}", child) for name, child in newest[::-1] if child is not None]
    return None


def _versions(args: tuple[Any, ...]) -> list[int]:
    return [
        _torch.version_of(arg) for arg in args if isinstance(arg, Tensor) and not arg.is_inference()
    ]
