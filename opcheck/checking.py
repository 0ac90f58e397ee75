"""`opcheck.check`: the options of a session, and the session that they make."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from torch import nn

from opcheck.records import OpRecord
from opcheck.session import Session
from opcheck.settings import (
    DEFAULT_ATOL,
    DEFAULT_MAX_CHECKS,
    DEFAULT_MAX_NUMEL,
    DEFAULT_RECORD_BYTES,
    DEFAULT_RECORDED,
    DEFAULT_REPRO_BYTES,
    DEFAULT_REPRO_SECONDS,
    DEFAULT_REPROS,
    DEFAULT_RTOL,
    DEFAULT_SHADOW_BYTES,
    Settings,
)
from opcheck.validation import an_instance

__all__ = ["check"]


def check(
    model: nn.Module | None = None,
    *,
    log_dir: str | os.PathLike[str] = "logs",
    rtol: float = DEFAULT_RTOL,
    atol: float = DEFAULT_ATOL,
    criterion: str | None = None,
    max_checks: int | None = DEFAULT_MAX_CHECKS,
    max_overhead: float | str | None = None,
    log_once: bool = True,
    max_numel: int = DEFAULT_MAX_NUMEL,
    large: str = "sample",
    workers: int = 0,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    modules: str | Iterable[str] = (),
    start_step: int = 0,
    num_steps: int | None = None,
    on_failure: str | Callable[[OpRecord], None] = "log",
    seed: int = 0,
    quiet: bool = False,
    blame: bool = False,
    repeat: bool = False,
    selftest: bool = False,
    max_shadow_bytes: int = DEFAULT_SHADOW_BYTES,
    repro_dir: str | os.PathLike[str] | None = None,
    repro_seconds: float = DEFAULT_REPRO_SECONDS,
    max_repros: int = DEFAULT_REPROS,
    max_repro_bytes: int = DEFAULT_REPRO_BYTES,
    record: str | None = None,
    record_dir: str | os.PathLike[str] = "records",
    max_recorded: int = DEFAULT_RECORDED,
    max_record_bytes: int = DEFAULT_RECORD_BYTES,
) -> Session:
    """Check every ATen op of the code in the `with` block against the CPU in float64.

    Args:
        model: gives the module names; without it they come from the outermost module that runs.
        log_dir: folder of `precision.log` and `precision.jsonl`; made when missing.
        rtol: relative tolerance of `criterion="allclose"`, at least 1e-2 with 16-bit inputs.
        atol: absolute tolerance, likewise.
        criterion: "calibrated", "allclose", or None: calibrated unless a tolerance was changed.
        max_checks: checks of each signature (op, dtypes and layouts of its tensors); None checks
            every call, 0 checks nothing and still counts.
        max_overhead: seconds of checking for each second of the step's own, 0.5 or "50%", measured
            as the step runs, over many steps. Every call is then a candidate (unless `max_checks`
            is changed), the most telling first. Which calls are checked depends on the clock, the
            verdict of a checked call does not. Where looking at calls takes more than half of what
            is allowed, whole steps are left alone and not counted. What `blame` and `repeat` do
            beside checking is counted and not bounded.
        log_once: write one text line per failing op, module and phase.
        max_numel: largest tensor, argument or result, of a call that is compared whole.
        large: what becomes of larger calls: "sample" looks at a share of them, "skip" counts
            them, "full" compares them whole, whatever memory that takes.
        workers: threads that compute references beside the step, on copies of at most 1 GiB; what
            is found, and in which order, does not change. The end of a step, and of the context,
            waits for them. Judged in the step all the same: large calls, those of optimizers, of
            random ops, on another device, of overridden kernels, with NaN or Inf, and all with
            `blame`, `repeat`, `selftest`, `repro_dir` or `record`.
        include: globs over op names (`aten.add.*`, `add`, `add.Tensor`); only these are checked.
        exclude: globs over op names that are not checked.
        modules: globs over module names; a module's children are included.
        start_step: first step that is checked.
        num_steps: how many steps are checked; None is all.
        on_failure: "log", "raise" (a `PrecisionError` on leaving the context), or a function that
            is given the record.
        seed: of our own sampling; the user's generators are never touched.
        quiet: say nothing on leaving, and keep failures to the log files.
        blame: carry a float64 shadow of the step's values, so that each record has the error born
            in the call beside what it inherited. Every call is then checked (unless `max_checks`
            is changed), and the shadow runs on through those that are not.
        repeat: run each checked kernel, and each random op with the same generator states, a
            second time on the same inputs, and report what does not give the same bits.
        selftest: plant known faults into copies of results that passed and judge those too;
            `Session.selftest` tells which of them the settings would miss. Verdict and records
            are as without.
        max_shadow_bytes: memory that the shadow may hold; what was not used for longest goes
            first, and the report says so.
        repro_dir: save the first failing call of each op, module and phase in this folder, as a
            Python file that runs with torch alone. Its arguments are copied in the step; on
            leaving the context the kernel runs again on smaller ones, as long as it fails.
        repro_seconds: for making the arguments smaller, all calls of one exit together; 0 saves
            them as they were.
        max_repros: how many are saved; the report counts the others.
        max_repro_bytes: of arguments held during the step, and of the tensors of one reproducer.
        record: "failures" or "all": write checked calls, with their inputs and results, to
            `record_dir`, where `opcheck replay DIR` judges them on a machine without the device.
        record_dir: folder of the recorded calls, one file each.
        max_recorded: how many are recorded; the report counts the others.
        max_record_bytes: of all of them.

    Returns:
        A context manager that is its own result; it may be entered again for the next step.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is not allowed; nothing was changed.
        LogWriteError: on entry, when the logs cannot be written.
        PrecisionError: on leaving, with `on_failure="raise"`.
    """
    if model is not None:
        an_instance("model", model, nn.Module, "a torch.nn.Module or None")
    settings = Settings.from_arguments(
        log_dir=log_dir, rtol=rtol, atol=atol, criterion=criterion, max_checks=max_checks,
        max_overhead=max_overhead, log_once=log_once, max_numel=max_numel, large=large,
        workers=workers, include=include, exclude=exclude, modules=modules,
        start_step=start_step, num_steps=num_steps, on_failure=on_failure,
        seed=seed, quiet=quiet, blame=blame, repeat=repeat, selftest=selftest,
        max_shadow_bytes=max_shadow_bytes,
        repro_dir=repro_dir, repro_seconds=repro_seconds, max_repros=max_repros,
        max_repro_bytes=max_repro_bytes, record=record, record_dir=record_dir,
        max_recorded=max_recorded, max_record_bytes=max_record_bytes,
    )  # fmt: skip
    return Session(model, settings)
