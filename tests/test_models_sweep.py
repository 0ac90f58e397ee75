"""Architectures of every kind pass, step unchanged bit for bit, under both checkers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks import models_sweep
from benchmarks.models_sweep import CHECKERS, MAIN, MODELS, MORE_FOR, WAYS, in_context, measure
from modulecheck import PrecisionChecker
from tests.compiled import DYNAMO_WARNS
from tests.faults import planted
from tests.step_equality import empty_mode

pytestmark = DYNAMO_WARNS

SHORT = {
    "distilbert": "checkpoint", "gemma2": "bf16", "bart": "eval", "mixtral": "fused",
    "mamba2": "eval-bf16", "vit": "train", "gru": "train", "wav2vec2": "f16",
}  # fmt: skip
"""One of each kind of model, and every way to run a step."""


def test_the_short_form_has_every_way_and_kind() -> None:
    assert set(SHORT.values()) == set(WAYS)
    kinds = {MODELS[name].kind for name in SHORT}
    assert kinds >= {
        "encoder", "decoder", "encoder-decoder", "MoE", "state space", "vision", "RNN", "audio"
    }  # fmt: skip
    assert set(MORE_FOR) <= set(MODELS)
    assert set(MORE_FOR.values()) <= set(WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_step_passes_and_is_unchanged(name: str, tmp_path: Path) -> None:
    outcomes = list(measure(name, SHORT[name], tmp_path))
    assert [outcome.checker for outcome in outcomes] == list(MAIN)
    for outcome in outcomes:
        assert (outcome.differences, outcome.failures) == ([], []), outcome
        assert outcome.verdict == "PASS", outcome
        assert outcome.clean


@pytest.mark.slow
def test_the_other_checkers_pass_too(tmp_path: Path) -> None:
    others = [name for name in CHECKERS if name not in MAIN]
    outcomes = list(measure("gru", "train", tmp_path, others))
    assert [outcome.checker for outcome in outcomes] == others
    assert all(outcome.clean for outcome in outcomes), outcomes


# ---- the sweep would see it ---------------------------------------------------------------------


@contextmanager
def _nudges(model: nn.Module, change: Callable[[nn.Module], object]) -> Iterator[None]:
    yield
    change(model)


@contextmanager
def _changes_outputs(model: nn.Module) -> Iterator[None]:
    """The loss of the step stays as it was: other tensors of the output do not."""
    calls: list[int] = []

    def nudge(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output if len(calls) > 1 else output + torch.zeros_like(output).index_fill_(
            1, torch.tensor(0), 1e-6
        )  # fmt: skip

    handle = model.register_forward_hook(nudge)
    yield
    handle.remove()


@contextmanager
def _writes_optimizer_state(model: nn.Module) -> Iterator[None]:
    """After the last update, so that no parameter shows it."""
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    yield
    handle.remove()
    next(iter(seen[-1].state.values()))["exp_avg"].view(-1)[0] += 1e-9


def _buffer(model: nn.Module) -> Tensor:
    return model.stem[1].running_mean


def _gradient(model: nn.Module) -> Tensor:
    return model.head.weight.grad


SABOTAGE: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "draws": ("RNG state", lambda model: torch.rand(1)),
    "python": ("Python's random state", lambda model: random.random()),
    "numpy": ("NumPy's random state", lambda model: np.random.rand()),  # noqa: NPY002
    "buffer": ("buffer stem.1.running_mean: values", lambda model: _buffer(model)[0].add_(1e-8)),
    "gradient": ("gradient of head.weight: values", lambda model: _gradient(model)[0].add_(1e-6)),
    "parameter": ("parameter head.bias: values", lambda model: model.head.bias.data.add_(1e-6)),
    "version": ("parameter head.bias: version", lambda model: model.head.bias.detach().add_(0.0)),
    "mode": ("training of 'stem.1'", lambda model: model.stem[1].eval()),
    "hook": ("_forward_hooks of ''", lambda model: model.register_forward_hook(lambda *_: None)),
    "attribute": ("attributes of ''", lambda model: setattr(model, "note", 1)),
}
CONTEXTS: dict[str, tuple[str, Callable[[nn.Module], AbstractContextManager[Any]]]] = {
    "output": ("given 0: values", _changes_outputs),
    "optimizer": ("optimizer exp_avg of", _writes_optimizer_state),
    **{
        name: (line, lambda model, change=change: _nudges(model, change))
        for name, (line, change) in SABOTAGE.items()
    },
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_side_effects_are_seen(name: str) -> None:
    line, enter = CONTEXTS[name]
    expected, _ = in_context("resnet", "train", empty_mode)
    assert expected.differences(in_context("resnet", "train", empty_mode)[0]) == []
    actual, _ = in_context("resnet", "train", enter)
    found = [item for item in expected.differences(actual) if not item.startswith("in the next")]
    assert any(item.startswith(line) for item in found), found


def test_wrong_kernel_is_no_clean_outcome(tmp_path: Path) -> None:
    def off(original: Any) -> Any:
        return lambda *args, **kwargs: original(*args, **kwargs).mul_(1.001)

    with planted("aten.relu_.default", off):
        (outcome,) = measure("resnet", "train", tmp_path, ["opcheck"])
    assert outcome.verdict == "FAIL"
    assert outcome.failures
    assert not outcome.clean


def test_exception_is_an_outcome_that_is_not_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(name: str, way: str) -> Any:
        raise RuntimeError("no primitive")

    monkeypatch.setitem(CHECKERS, "opcheck", raises)
    outcome, after = measure("gru", "eval", tmp_path)
    assert (outcome.verdict, outcome.failures) == ("ERROR", ["RuntimeError: no primitive"])
    assert not outcome.clean
    assert after.clean


def test_wrong_compiler_and_a_checker_that_draws_are_no_clean_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(item * 1.001 for item in graph(*args))

    collect = PrecisionChecker.collect

    def draws(*args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        return collect(*args, **kwargs)

    monkeypatch.setattr(PrecisionChecker, "collect", draws)
    (drawn,) = measure("lstm", "eval", tmp_path, ["PrecisionChecker"])
    assert (drawn.verdict, drawn.failures) == ("PASS", [])
    assert "RNG state: values differ" in "".join(drawn.differences)
    monkeypatch.setattr(models_sweep, "BACKEND", off)
    (wrong,) = measure("lstm", "eval", tmp_path, ["PrecisionChecker"])
    assert wrong.verdict == "FAIL"
    assert wrong.failures
