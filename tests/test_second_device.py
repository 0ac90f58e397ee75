"""Steps on another device than the CPU: a small one built from C++, and a real one where it is.

The steps run once, in a process of their own (`tests/second_device/scenarios.py`); the tests look
at what they gave.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from opcheck.cli import main
from tests import kernel_library as kernels
from tests import second_device

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def accelerator() -> str:
    device = torch.accelerator.current_accelerator(check_available=True)
    return "" if device is None else device.type


def run_scenarios(device: str, folder: Path) -> dict[str, Any]:
    out = folder / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.second_device.scenarios", device, str(out)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", params=["second", pytest.param("real", marks=pytest.mark.gpu)])
def results(request, tmp_path_factory) -> dict[str, Any]:
    device = accelerator() if request.param == "real" else second_device.NAME
    if not device:
        pytest.skip("no accelerator")
    if device == second_device.NAME and second_device.why_not():
        pytest.skip(second_device.why_not())
    return {**run_scenarios(device, tmp_path_factory.mktemp("device")), "device": device}


def of(results: dict[str, Any], scenario: str) -> dict[str, Any]:
    found = results[scenario]
    assert "raised" not in found, found["raised"]
    return found


@pytest.mark.parametrize("scenario", ["step_is_unchanged", "step_of_a_convolution_net"])
def test_step_is_bit_for_bit_unchanged_and_passes(results, scenario):
    found = of(results, scenario)
    assert found["failures"] == []
    assert found["verdict"] == "PASS"
    assert found["errors"] == 0
    assert found["adds_up"]
    assert found["unchecked"] == []
    assert "cpu kernel" in found["references"]


def test_backward_has_modules_although_it_runs_in_another_thread(results):
    assert of(results, "backward_thread")["other_thread"]
    places = of(results, "step_is_unchanged")["places"]
    for module in ("blocks.0.mlp.act", "blocks.1.norm2", "blocks.1.attention", "head"):
        assert [module, "forward"] in places
        assert [module, "backward"] in places


def test_wrong_forward_kernel_is_found_at_its_modules(results):
    found = of(results, "wrong_forward")
    assert found["failures"] == [
        ["aten.gelu.default", f"blocks.{i}.mlp.act", "forward"] for i in (0, 1)
    ]


def test_wrong_backward_kernel_is_found_at_its_modules(results):
    found = of(results, "wrong_backward")
    assert found["failures"] == [
        ["aten.gelu_backward.default", f"blocks.{i}.mlp.act", "backward"] for i in (1, 0)
    ]


def test_kernel_that_is_wrong_on_the_device_passes_on_the_cpu(results):
    found = of(results, "wrong_on_the_device_alone")
    assert found["checked_records"] == ["PASS", "FAIL"]


def test_registrar_registers_for_the_present_accelerator(results):
    found = of(results, "correct_library")
    device = results["device"]
    expected = "PrivateUse1" if device == second_device.NAME else device.upper()
    assert (found["reg_key"], found["device"]) == (expected, device)
    assert found["failed_to_register"] == {}


def test_correct_library_is_silent(results):
    found = of(results, "correct_library")
    assert (found["log"], found["errors"], found["skipped"]) == ([], 0, {})
    assert len(found["checked"]) == len(kernels.KERNELS)
    assert found["references"] == ["cpu kernel"]


@pytest.mark.parametrize("key", kernels.KERNELS)
def test_one_wrong_kernel_is_found(results, key):
    assert of(results, "one_wrong_kernel_at_a_time")[key] == [key]


def test_cpu_kernels_are_left_alone(results):
    assert of(results, "kernels_of_the_cpu_are_left_alone")["seen"] == 0


def test_registrar_checks_the_backward_thread(results):
    found = of(results, "registrar_hears_the_backward_thread")
    assert found["phases"] == ["backward"]
    assert set(found["log"]) == {"mm"}


def test_session_hears_of_a_registered_kernel_once(results):
    found = of(results, "session_hears_of_a_kernel_once")
    assert found["verdict"] == "PASS"
    assert found["seen"] == found["seen_without"]


def test_session_finds_a_wrong_registered_kernel(results):
    found = of(results, "session_finds_a_wrong_registered_kernel")
    assert {op for op, _, _ in found["failures"]} == {"aten.native_layer_norm.default"}
    assert found["failures"][0][1:] == ["blocks.0.norm1", "forward"]


def test_undeclared_write_on_the_device_is_found(results):
    assert "was changed" in of(results, "undeclared_write")["reasons"][0]


def test_without_a_compiler_the_reason_is_told(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in second_device.why_not()


def test_calls_recorded_on_the_device_are_judged_without_it(results, capsys):
    found = of(results, "recorded_for_elsewhere")
    assert main(["replay", found["folder"]]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = [line.split()[1:3] for line in lines if line.startswith("FAIL")]
    assert failed == [["aten.gelu.default", f"blocks.{i}.mlp.act"] for i in (0, 1)]
    judged = [line for line in lines if line.startswith(("PASS", "FAIL"))]
    assert len(judged) == found["checked"]
    assert f"recorded: {found['checked']} calls in recorded" in found["report"]


def test_reproducer_of_the_device_names_its_kernel(results):
    found = of(results, "recorded_for_elsewhere")
    assert len(found["repros"]) == 2, found["report"]
    text = Path(found["repros"][0]).read_text(encoding="utf-8")
    key = "PrivateUse1" if results["device"] == second_device.NAME else results["device"].upper()
    assert f"# aten::gelu ({key}): registered at" in text
    assert f"default={results['device']!r}" in text
