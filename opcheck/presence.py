"""Is a session on the dispatch path of its thread? It may rest for a step, and leave for good."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from opcheck import _torch
from opcheck.exits import Exits
from opcheck.global_hooks import ModuleHooks, OptimizerHooks
from opcheck.intercept import CheckMode
from opcheck.key_blocks import key_blocks
from opcheck.modules import ModuleTracker
from opcheck.own_thread import OwnThread
from opcheck.pipeline import Pipeline
from opcheck.switch import Observer

__all__ = ["Presence"]


class Presence:
    """Of one session: puts its mode and its hooks on and takes them off.

    Args:
        tracker: whose hooks they are.
        pipeline: says whether anything is left to look at.
        on_step_end: called at the first module after an optimizer's step that nobody looked at.
    """

    def __init__(
        self, tracker: ModuleTracker, pipeline: Pipeline, *, on_step_end: Callable[[], None]
    ) -> None:
        self._tracker = tracker
        self._pipeline = pipeline
        self._step_end = _StepEnd(self._unseen_step_ended, is_moment=lambda: self._may_move)
        self._on_step_end = on_step_end
        self._mode: CheckMode | None = None
        self._exits = Exits()
        """Of the context that was entered last; knows by whom."""
        self.is_resting = False
        """Nobody looks at the present step."""

    @property
    def is_looking(self) -> bool:
        """Calls are seen."""
        return self._mode is not None and not self.is_resting

    def begin(self, observer: Observer, exits: Exits) -> None:
        """The context is entered: look, where there is anything to look at."""
        self._exits = exits
        self.is_resting = False
        if self._pipeline.is_used_up:
            self._pipeline.stop_counting()
            return
        exits.add(self._end)
        key_blocks.watch(self)
        mode = CheckMode(observer)
        exits.add(partial(mode.__exit__, None, None, None))
        if self._pipeline.wants_rest:
            mode.stay_off()
            self._rest()
        else:
            self._tracker.install()
            mode.__enter__()
        self._mode = mode

    def end(self) -> None:
        """The context is being left: nothing is decided any more."""
        self._mode = None

    def _end(self) -> None:
        key_blocks.ignore(self)
        self._step_end.remove()
        self._tracker.remove()

    def decide(self) -> None:
        """A step begins: look at it, rest, or see no more calls, which would be for nothing."""
        mode = self._mode
        if mode is None:  # not in the context
            self.is_resting = False
        if mode is None or self._exits.is_fork or self._exits.is_elsewhere:
            return
        if self._pipeline.is_used_up:
            if mode.leave():
                self.end()
                self._end()
                self._pipeline.stop_counting()
        elif self._pipeline.wants_rest:
            if mode.leave():
                self._rest()
        elif self.is_resting and mode.come_back():
            self.is_resting = False
            self._step_end.remove()
            self._tracker.install()
        elif self.is_resting:
            self._rest()

    @property
    def _may_move(self) -> bool:
        return self._mode is not None and self._mode.may_move

    def _rest(self) -> None:
        self.is_resting = True
        self._tracker.remove()
        self._step_end.await_it()

    def _unseen_step_ended(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._on_step_end()
        if self.is_looking:
            self._tracker.module_begins(module, args)


class _StepEnd:
    """Global hooks that tell of the first module after an optimizer's step, and of nothing else.

    Args:
        then: is told, once.
        is_moment: False for a module at which nothing can be decided: a later one is awaited.
    """

    def __init__(
        self,
        then: Callable[[nn.Module, tuple[Any, ...]], None],
        *,
        is_moment: Callable[[], bool],
    ) -> None:
        self._then = then
        self._is_moment = is_moment
        self._thread = OwnThread()
        self._has_stepped = False
        self._modules = ModuleHooks(self._before_module, self._nothing)
        self._optimizers = OptimizerHooks(self._nothing, self._after_step)

    def await_it(self) -> None:
        """Once; what was awaited before is not any more."""
        self.remove()
        self._thread.claim()
        self._optimizers.put_on()

    def remove(self) -> None:
        """Await nothing."""
        self._optimizers.take_off()
        self._modules.take_off()
        self._has_stepped = False

    def _after_step(self, *_: Any) -> None:
        if self._thread.is_current and not self._has_stepped:
            self._has_stepped = True
            self._modules.put_on()

    def _before_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if (
            torch.compiler.is_compiling()
            or not self._thread.is_current
            or _torch.current_graph_task_id() != -1
            or not self._is_moment()
        ):
            return
        self.remove()
        self._then(module, args)

    def _nothing(self, *_: Any) -> None:
        """Take no notice."""
