"""Registered kernels: each wrapped with a check, and what is kept while checking is enabled."""

from __future__ import annotations

import atexit
import functools
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from opcheck import _torch
from opcheck.callers import CallerTracker
from opcheck.calls import Call, traits_of
from opcheck.environment import process_rank, run_header
from opcheck.errors import ArgumentError, LogWriteError
from opcheck.kernel_inputs import keep_inputs
from opcheck.kernel_table import call_kernel, decomposition, kernels, with_number_tensors
from opcheck.outside import leave_references, reference_depth, running_reference
from opcheck.passes import release_scratch
from opcheck.pipeline import Pipeline
from opcheck.policy import KernelPolicy
from opcheck.records import Coverage, OpRecord, Verdict
from opcheck.settings import Settings
from opcheck.sinks import LogFiles, log_names
from opcheck.switch import SWITCH, KernelSwitch
from opcheck.validation import wrong_type

__all__ = ["KernelCheck", "KernelChecks", "find_op", "wrap_kernel"]


# ---- one kernel ---------------------------------------------------------------------------------


def find_op(key: Any, namespace: str = "aten") -> Any:
    """The overload of an op key: `add.Tensor`, `aten::mm`, or an overload itself.

    Raises:
        ArgumentError, ArgumentTypeError: there is no such op; the message names the key.
    """
    if isinstance(key, _torch.OpOverload):
        return key
    if not isinstance(key, str):
        raise wrong_type("key", "an op key such as 'add.Tensor'", key)
    given, _, name = key.rpartition("::")
    base, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, given or namespace), base, None) if base else None
    if packet is None:
        raise ArgumentError(f"key {key!r}: there is no op {given or namespace}::{base}")
    found = getattr(packet, overload or "default", None)
    if found is None:
        known = ", ".join(f"{base}.{name}".removesuffix(".default") for name in packet.overloads())
        raise ArgumentError(f"key {key!r}: no such overload; there are {known}")
    return found


def wrap_kernel(func: Any, kernel: Callable[..., Any], switch: KernelSwitch) -> Callable[..., Any]:
    """`kernel`, which computes the overload `func`, with a check; off, it costs a flag test."""
    kernels().note(
        traits_of(func).qualified, registrant=str(getattr(kernel, "__module__", None) or "")
    )
    switch.has_kernels = True

    @functools.wraps(kernel, updated=())
    def checked(*args: Any, **kwargs: Any) -> Any:
        if switch.is_on:
            return _run(switch, func, kernel, args, kwargs)
        return kernel(*args, **kwargs)

    return checked


def _run(
    switch: KernelSwitch,
    func: Any,
    kernel: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if running_reference():
        return _stand_in(func, kernel)(*args, **kwargs)
    if switch.is_silenced:
        return kernel(*args, **kwargs)
    known = switch.take_announced(func)
    if known is not None:
        for call in known:
            if isinstance(call, Call):
                _keep_inputs(call)
        return kernel(*args, **kwargs)
    observer = switch.observer
    if observer is None:
        return kernel(*args, **kwargs)
    call = observer.before(func, (), args, kwargs)
    if isinstance(call, Call):
        _keep_inputs(call)
    try:
        with switch.announced(func, False):  # noqa: FBT003 - an op that reaches itself is one call
            out = kernel(*args, **kwargs)
    except BaseException:
        observer.raised(call)
        raise
    if call is not False:
        observer.after(call, out)
    return out


def _keep_inputs(call: Call) -> None:
    depth = reference_depth()
    try:
        keep_inputs(call)
    except BaseException:  # Ctrl-C must not leave autograd off
        leave_references(depth)
        raise


# ---- while a reference runs ---------------------------------------------------------------------


def _stand_in(func: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """What runs in place of a kernel under test while a reference is computed."""

    def run(*args: Any, **kwargs: Any) -> Any:
        traits = traits_of(func)
        if not _is_on_cpu(args, kwargs):  # torch has no other kernel for that device
            return kernel(*args, **kwargs)
        original = kernels().original(traits.qualified)
        if original is not None:
            return call_kernel(original, with_number_tensors(func, args), kwargs)
        formula = decomposition(func)
        return (formula or kernel)(*args, **kwargs)

    return run


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return False
    leaves = _torch.tree_leaves((args, kwargs))
    return all(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, Tensor))


# ---- while checking is enabled ------------------------------------------------------------------


class KernelCheck:
    """One run of `enable_precision_check`, until it is disabled."""

    def __init__(self, settings: Settings, path: Path | None) -> None:
        self.run_id = uuid.uuid4().hex[:12]
        self.rank, world_size = process_rank()
        text, lines = _log_paths(path, settings.log_dir, self.rank, world_size)
        self._log_once = settings.log_once
        self._logged: set[str] = set()
        self._is_open = False
        self._files = LogFiles(text, lines, quiet=False)
        self._header = run_header(self.run_id, self.rank, world_size, settings)
        self.pipeline = Pipeline(
            settings, CallerTracker(), run_id=self.run_id, rank=self.rank, emit=self._keep,
            policy=KernelPolicy(settings),
        )  # fmt: skip

    def open(self) -> None:
        """Open the logs and begin the run.

        Raises:
            LogWriteError: the logs cannot be written.
        """
        try:
            self._files.open()
        except LogWriteError as error:
            raise LogWriteError(
                f"path: cannot write {str(self._files.text_path)!r}: {error.__cause__};"
                " choose another file with path="
            ) from error
        self._files.header(self._header)
        self._is_open = True

    def close(self) -> None:
        """End the run; calls that are still being checked in other threads are not written."""
        with self.pipeline.lock:
            was_open, self._is_open = self._is_open, False
            try:
                if was_open:  # else Ctrl-C, or a path that cannot be written
                    coverage = self.pipeline.ledger.coverage()
                    self._files.coverage(coverage, self.run_id, self.rank)
            finally:
                self._files.close()
                release_scratch()
        if self._files.problem:
            text = f"opcheck: the log is incomplete: {self._files.problem}"
            logger.bind(opcheck=self.run_id).warning(text)

    def _keep(self, record: OpRecord) -> None:
        if not self._is_open:
            return
        self._files.record(record)
        if record.verdict is not Verdict.FAIL or (self._log_once and record.op in self._logged):
            return
        self._logged.add(record.op)
        self._files.failure(record)


def _log_paths(path: Path | None, log_dir: Path, rank: int, world_size: int) -> tuple[Path, Path]:
    """Text log and JSON lines; each rank of several has its own."""
    if path is None:
        text, lines = log_names(rank, world_size)
        return log_dir / text, log_dir / lines
    if world_size > 1:
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    lines_path = path.with_suffix(".jsonl")
    if lines_path == path:
        lines_path = path.with_name(f"{path.name}.jsonl")
    return path, lines_path


class KernelChecks:
    """What `enable_precision_check` and `disable_precision_check` switch."""

    def __init__(self, switch: KernelSwitch) -> None:
        self.switch = switch
        self._current: KernelCheck | None = None
        self._last: KernelCheck | None = None
        self._lock = threading.RLock()

    def enable(self, check: KernelCheck) -> None:
        """Begin afresh; an earlier run ends here."""
        with self._lock:
            self.disable()
            try:
                check.open()
                self._current = self._last = check
                self.switch.enable(check.pipeline)
                atexit.register(self.disable)
            except BaseException:  # Ctrl-C in the middle
                self._current = check
                self.disable()
                raise

    def disable(self) -> None:
        """End the run, if there is one."""
        with self._lock:
            check = self._current
            if check is None:
                return
            try:
                self.switch.enable(None)
            finally:
                check.close()
                self._current = None
                atexit.unregister(self.disable)

    def coverage(self) -> Coverage:
        """Of the run that is on, else of the last one."""
        with self._lock:
            return self._last.pipeline.coverage() if self._last is not None else Coverage()


CHECKS = KernelChecks(SWITCH)
