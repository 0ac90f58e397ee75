"""Float64 runs of a module: op by op where it refuses, where both sides agree, under autocast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.kink_faults import other_backend
from modulecheck import CompareResult, PrecisionChecker
from opcheck import Verdict
from tests.compiled import DYNAMO_WARNS, assert_pass, checked_step, explain, real_model

pytestmark = [
    DYNAMO_WARNS,
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings(r"ignore:(?s).*lru_cache"),  # Dynamo, of the models' own code
]


def notes_of(result: CompareResult) -> list[str]:
    return [note for diff in result.diffs for _, _, item in diff.tensors() for note in item.notes]


# ---- op by op -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A language model that does not run in float64, and its modules that refuse."""

    build: Callable[[], nn.Module]
    classes: tuple[Any, ...]
    says: str


def mixtral() -> Model:
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

    config = MixtralConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    return Model(lambda: MixtralForCausalLM(config), (MixtralDecoderLayer,), "got Double")


def mamba() -> Model:
    from transformers import MambaConfig, MambaForCausalLM
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(
        vocab_size=61, hidden_size=32, state_size=4, num_hidden_layers=2, intermediate_size=64
    )
    return Model(lambda: MambaForCausalLM(config), (MambaMixer,), "computes in torch.float32")


def check_model(model: Model, backend: Any, **options: Any) -> CompareResult:
    torch.manual_seed(0)
    built = model.build()
    token_ids = torch.randint(0, 61, (2, 8))
    checker = PrecisionChecker(backend=backend, **options)
    checker.wrap_by_policy(built, model.classes)

    def step(built: nn.Module) -> Tensor:
        loss = built(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        loss.backward()
        return loss

    return checker.compare(step, built)


@pytest.mark.parametrize("make", [mixtral, mamba])
def test_module_that_refuses_float64_is_judged_op_by_op(make: Callable[[], Model]) -> None:
    model = make()
    result = check_model(model, other_backend())
    assert_pass(result)
    said = [note for note in notes_of(result) if note.startswith("judged by float64 op by op")]
    assert said
    assert model.says in said[0]
    assert not any("no float64 run" in note for note in notes_of(result))


@pytest.mark.parametrize("make", [mixtral, mamba])
def test_fault_in_a_module_that_refuses_float64_is_found(make: Callable[[], Model]) -> None:
    def spoil(grads: list[Tensor]) -> None:
        largest = max(grads, key=lambda item: item.numel())
        largest.view(-1)[7] += 1e-3 * largest.abs().max()

    result = check_model(make(), other_backend(spoil))
    assert result.verdict == Verdict.FAIL
    failed = [item for diff in result.diffs for _, _, item in diff.tensors()
              if item.judged == Verdict.FAIL]  # fmt: skip
    assert failed
    assert all("float64" in item.reason for item in failed)
    assert {phase for _, phase in result.suspects} == {"backward"}


class CastsDown(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        narrow = (hidden * 1.7).to(torch.bfloat16)
        return narrow.float() * torch.ones(1, dtype=torch.float32)


def test_cast_that_the_program_wants_is_kept_op_by_op() -> None:
    def drops_the_cast(graph: Any, inputs: Any) -> Any:
        return lambda *args: [args[0] * 1.7]

    model, hidden = CastsDown(), torch.randn(64, 8)
    checker = PrecisionChecker(backend=drops_the_cast)
    checker.wrap(model)
    with torch.no_grad():
        result = checker.compare(lambda model: model(hidden).sum(), model)
    assert result.verdict == Verdict.FAIL
    assert "eager is nearer" in explain(result)


# ---- both sides agree ---------------------------------------------------------------------------


class Variance(nn.Module):
    """In one pass, which cancels all digits where the mean is large, or in two."""

    def __init__(self, *, stable: bool) -> None:
        super().__init__()
        self.stable = stable

    def forward(self, hidden: Tensor) -> Tensor:
        mean = hidden.mean(-1, keepdim=True)
        if self.stable:
            return (hidden - mean).square().mean(-1)
        return hidden.square().mean(-1) - mean[..., 0].square()


@pytest.mark.parametrize(
    ("stable", "golden", "verdict"),
    [
        (False, "always", Verdict.INCONCLUSIVE),
        (False, "auto", Verdict.PASS),
        (True, "always", Verdict.PASS),
    ],
)
def test_program_that_is_wrong_on_both_sides(stable: bool, golden: str, verdict: Verdict) -> None:
    model = Variance(stable=stable)
    hidden = torch.randn(80, 64, generator=torch.Generator().manual_seed(0)) + 1e4
    checker = PrecisionChecker(golden=golden)
    checker.wrap(model)
    result = checker.compare(lambda model: model(hidden).sum(), model)
    assert result.verdict == verdict, explain(result)
    if verdict == Verdict.INCONCLUSIVE:
        assert "both sides agree and are far from float64" in explain(result)
        assert "see opcheck" in explain(result)


class SumOfLogs(nn.Module):
    """Ill-conditioned: what one ulp of the input moves explains the distance."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.log(hidden) * 1e3


def test_distance_that_conditioning_explains_is_no_fault() -> None:
    hidden = 1 + torch.rand(64, 8, generator=torch.Generator().manual_seed(0)) * 1e-5
    model = SumOfLogs()
    checker = PrecisionChecker(golden="always")
    checker.wrap(model)
    assert_pass(checker.compare(lambda model: model(hidden).sum(), model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet"])
def test_clean_models_pass_with_golden_always(name: str, dtype: torch.dtype) -> None:
    build, block = real_model(name)
    workload = build()
    workload.model.to(dtype)
    for tensor in workload.batch:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    result, _ = checked_step(workload, block, "aot_eager", golden="always")
    assert_pass(result)
    judged = [item for diff in result.diffs for kind, _, item in diff.tensors()
              if kind != "fwd_input" and item.metrics and item.metrics.q is not None]  # fmt: skip
    assert len(judged) > 10


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_minilm_passes_with_golden_always(dtype: torch.dtype) -> None:
    build, block = real_model("minilm")
    workload = build()
    workload.model.to(dtype)
    result, _ = checked_step(workload, block, "aot_eager", golden="always")
    assert_pass(result)


# ---- autocast -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("golden", ["auto", "always"])
def test_minilm_passes_under_autocast(golden: str) -> None:
    build, block = real_model("minilm")
    workload = build().with_autocast(torch.bfloat16)
    result, _ = checked_step(workload, block, "aot_eager", golden=golden)
    assert_pass(result)


class Normed(nn.Module):
    """Computes in float32 whatever autocast says."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


def test_float32_op_under_autocast_is_held_to_float32() -> None:
    def scaled(graph: Any, inputs: Any) -> Any:
        return lambda *args: [out * 1.0001 for out in graph(*args)]

    model, hidden = Normed(), torch.randn(64, 32)
    checker = PrecisionChecker(backend=scaled)
    checker.wrap(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        result = checker.compare(lambda model: model(hidden).sum(), model)
    assert result.verdict == Verdict.FAIL
