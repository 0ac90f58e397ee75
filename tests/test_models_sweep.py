"""Architectures of every kind pass, step unchanged bit for bit, under both checkers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models_sweep import MODELS, WAYS, measure
from tests.compiled import DYNAMO_WARNS

pytestmark = DYNAMO_WARNS

SHORT = {
    "distilbert": "checkpoint", "gemma2": "bf16", "bart": "eval", "mixtral": "fused",
    "mamba2": "eval-bf16", "vit": "train", "gru": "train",
}  # fmt: skip
"""One of each kind of model, and every way to run a step."""


def test_the_short_form_has_every_way_and_kind() -> None:
    assert set(SHORT.values()) == set(WAYS)
    kinds = {MODELS[name].kind for name in SHORT}
    assert kinds >= {"encoder", "decoder", "encoder-decoder", "MoE", "state space", "vision", "RNN"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_step_passes_and_is_unchanged(name: str, tmp_path: Path) -> None:
    outcomes = list(measure(name, SHORT[name], tmp_path))
    assert [outcome.checker for outcome in outcomes] == ["opcheck", "PrecisionChecker"]
    for outcome in outcomes:
        assert (outcome.differences, outcome.failures) == ([], []), outcome
        assert outcome.verdict == "PASS", outcome
        assert outcome.clean
