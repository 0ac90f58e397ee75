"""Training steps on a device, checked in every way; run in a process of its own.

    python -m tests.second_device.scenarios second OUT.json
    python -m tests.second_device.scenarios cuda OUT.json

A process cannot leave the second device again, so the results go to a file for the tests to read.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import opcheck
from opcheck import _torch
from opcheck.kernel_table import call_kernel
from tests import kernel_library as kernels
from tests import models, registering, second_device
from tests.step_equality import assert_same_step

Result = dict[str, Any]
LOGS = Path("logs")


def on_device(build: Callable[[], models.Workload], device: str) -> Callable[[], models.Workload]:
    """The same workload, its model and batch on a device."""

    def moved() -> models.Workload:
        workload = build()
        batch = tuple(tensor.to(device) for tensor in workload.batch)
        return replace(workload, model=workload.model.to(device), batch=batch)

    return moved


def check(model: Any = None, **options: Any) -> opcheck.Session:
    return opcheck.check(model, log_dir=LOGS, quiet=True, **options)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def summary(session: opcheck.Session) -> Result:
    coverage = session.coverage
    return {
        "verdict": str(session.verdict),
        "seen": coverage.seen,
        "checked": coverage.checked,
        "errors": coverage.errors,
        "adds_up": coverage.adds_up,
        "skipped": {str(reason): count for reason, count in coverage.skipped.items()},
        "unchecked": sorted(item.op for item in coverage.unchecked_signatures),
        "failures": [place(record) for record in session.failures],
        "reasons": [record.reason for record in session.failures],
        "references": sorted({record.reference for record in session.records}),
        "places": sorted({tuple(place(record)[1:]) for record in session.records}),
    }


def place(record: opcheck.OpRecord) -> list[str]:
    return [record.op, record.module, record.phase]


@contextmanager
def planted(op: str, device: str, make_wrong: Callable[[Any], Any]) -> Iterator[None]:
    """A kernel that is wrong on the device alone: it computes on the CPU, and then wrongly."""
    original = torch.library.get_kernel(op, "CPU")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        found = [value.cpu() if isinstance(value, torch.Tensor) else value for value in args]
        out = call_kernel(original, tuple(found), kwargs)
        return make_wrong(out).to(device)

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl(op.partition("::")[2], kernel, _torch.dispatch_key_of(device))
        yield
    finally:
        library._destroy()


# ---- under the context manager ------------------------------------------------------------------


def step_is_unchanged(device: str) -> Result:
    """Raises with the differences, where there is one."""
    session = assert_same_step(
        on_device(models.transformer, device), check, make_optimizer=adamw, num_steps=2
    )
    return summary(session)


def step_of_a_convolution_net(device: str) -> Result:
    session = assert_same_step(on_device(models.resnet, device), check, num_steps=1)
    return summary(session)


def wrong_forward(device: str) -> Result:
    workload = on_device(models.transformer, device)()
    with planted("aten::gelu", device, lambda out: out * 1.001), check(workload.model) as session:
        workload.step()
    return summary(session)


def wrong_backward(device: str) -> Result:
    workload = on_device(models.transformer, device)()
    with (
        planted("aten::gelu_backward", device, lambda out: out * 1.001),
        check(workload.model) as session,
    ):
        workload.step()
    return summary(session)


def wrong_on_the_device_alone(device: str) -> Result:
    x = torch.linspace(-2, 2, 24)
    with planted("aten::gelu", device, lambda out: out * 1.001), check() as session:
        torch.nn.functional.gelu(x)
        torch.nn.functional.gelu(x.to(device))
    return {**summary(session), "checked_records": [str(r.verdict) for r in session.records]}


def backward_thread(device: str) -> Result:
    """Which thread runs the device's backward: another than the caller's."""
    seen: list[str] = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(threading.current_thread().name)
            return grad * 2

    with check() as session:
        Noting.apply(torch.ones(3, device=device, requires_grad=True)).sum().backward()
    return {**summary(session), "other_thread": seen != [threading.main_thread().name]}


# ---- through the registrar ----------------------------------------------------------------------


def registered(*config: Any, **options: Any) -> AbstractContextManager[Any]:
    return registering.registered(*config, **options)


def run_library(device: str) -> None:
    for call in kernels.calls(kernels.make_inputs(device)).values():
        call()


def correct_library(device: str) -> Result:
    log = LOGS / "correct.log"
    with registered(*kernels.CONFIG) as register, registering.enabled(path=log):
        run_library(device)
    coverage = opcheck.coverage()
    return {
        "reg_key": register.reg_key,
        "device": register.get_current_device(),
        "failed_to_register": register.failed,
        "log": registering.log_lines(log),
        "errors": coverage.errors,
        "skipped": {str(reason): count for reason, count in coverage.skipped.items()},
        "checked": sorted({count.op for count in coverage.calls if count.checked}),
        "references": sorted({record["reference"] for record in registering.json_lines(log)}),
    }


def one_wrong_kernel_at_a_time(device: str) -> Result:
    found: Result = {}
    for key in kernels.KERNELS:
        log = LOGS / "wrong" / f"{key}.log"
        config = {**kernels.KERNELS, key: kernels.spoiled(kernels.KERNELS[key])}
        with registered(*config.items()), registering.enabled(path=log):
            run_library(device)
        found[key] = registering.logged_ops(log)
    return found


def kernels_of_the_cpu_are_left_alone(device: str) -> Result:
    log = LOGS / "cpu.log"
    with registered(*kernels.CONFIG), registering.enabled(path=log):
        run_library("cpu")
    return {"seen": opcheck.coverage().seen}


def registrar_hears_the_backward_thread(device: str) -> Result:
    log = LOGS / "backward.log"
    workload = on_device(models.mlp, device)()
    wrong = kernels.spoiled(kernels.mm)
    with registered(("mm", wrong)), registering.enabled(path=log, log_once=False):
        workload.step()
    records = registering.json_lines(log)
    return {"phases": sorted({r["phase"] for r in records}), "log": registering.logged_ops(log)}


def session_hears_of_a_kernel_once(device: str) -> Result:
    workload = on_device(models.transformer, device)()
    with check(workload.model) as plain:
        workload.step()
    with registered(("mm", kernels.mm), ("addmm", kernels.addmm)), check(workload.model) as session:
        workload.step()
    return {**summary(session), "seen_without": plain.coverage.seen}


def session_finds_a_wrong_registered_kernel(device: str) -> Result:
    workload = on_device(models.transformer, device)()
    with (
        registered(("native_layer_norm", kernels.spoiled(kernels.layer_norm))),
        check(workload.model) as session,
    ):
        workload.step()
    return summary(session)


def undeclared_write(device: str) -> Result:
    def mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = kernels.product(a, b)
        b.zero_()
        return out

    x = torch.ones(3).to(device)
    with registered(("mul.Tensor", mul)), check() as session:
        x * (x + 1)
    return summary(session)


def recorded_for_elsewhere(device: str) -> Result:
    workload = on_device(models.transformer, device)()
    options = {"record": "all", "record_dir": "recorded", "repro_dir": "repros"}
    with (
        planted("aten::gelu", device, lambda out: out * 1.001),
        check(workload.model, **options) as session,
    ):
        workload.step()
    return {
        **summary(session),
        "folder": str(Path("recorded").resolve()),
        "repros": [str(path.resolve()) for path in session.repros],
        "report": session.report(),
    }


SCENARIOS = [
    step_is_unchanged, step_of_a_convolution_net, wrong_forward, wrong_backward,
    wrong_on_the_device_alone, backward_thread, correct_library, one_wrong_kernel_at_a_time,
    kernels_of_the_cpu_are_left_alone, registrar_hears_the_backward_thread,
    session_hears_of_a_kernel_once, session_finds_a_wrong_registered_kernel, undeclared_write,
    recorded_for_elsewhere,
]  # fmt: skip


def attempt(scenario: Callable[[str], Result], device: str) -> Result:
    """What a scenario gives, or the traceback of what it raises."""
    try:
        return scenario(device)
    except BaseException:  # noqa: BLE001 - shown by the test of the scenario
        return {"raised": traceback.format_exc()}


def main(device: str, out: str) -> None:
    """Run every scenario."""
    if device == second_device.NAME:
        second_device.activate()
    results = {scenario.__name__: attempt(scenario, device) for scenario in SCENARIOS}
    Path(out).write_text(json.dumps(results), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # the autograd thread of the device would abort the interpreter's end


if __name__ == "__main__":
    main(*sys.argv[1:])
