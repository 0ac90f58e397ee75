"""Shared fixtures; what is checked after every test is in `nothing_left_behind`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# the same examples in every run; `pytest --hypothesis-profile=explore` draws new and more of them
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, derandomize=False, max_examples=1000)
hypothesis.settings.load_profile("repeatable")


def _global_state() -> dict[str, Any]:
    """Describe what a test may not change for the next one; imports nothing by itself."""
    state: dict[str, Any] = {}
    loguru = sys.modules.get("loguru")
    if loguru is not None:
        state["loguru sinks"] = set(loguru.logger._core.handlers)
    if "torch" in sys.modules:
        import torch

        from tests.step_equality import active_modes, global_hooks

        state["dispatch modes"] = len(active_modes())
        state["global hooks"] = global_hooks()
        state["grad mode"] = torch.is_grad_enabled()
        state["default dtype"] = torch.get_default_dtype()
        state["threads"] = torch.get_num_threads()
    return state


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a mode, a global hook, a log sink or a changed setting behind."""
    before = _global_state()
    yield
    after = _global_state()
    # a module that the test was the first to import has nothing to compare with
    changed = {name: (value, after[name]) for name, value in before.items() if after[name] != value}
    assert not changed, f"left behind (before, after): {changed}"


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing that was compiled before is there, nor afterwards."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
