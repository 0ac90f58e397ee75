"""Gradients that jump at a corner: what is excused, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.kink_faults import ACTIVATIONS, FAULTS, check, other_backend
from modulecheck import PrecisionChecker
from modulecheck.corners import corners_of, hides_corners
from modulecheck.flips import CornerScan, FlipMode
from modulecheck.kink_rule import AT_A_KINK
from modulecheck.pairing import Pairs
from tests.compiled import DYNAMO_WARNS, assert_pass, checked_step, needs_compiler, real_model

pytestmark = [DYNAMO_WARNS, pytest.mark.usefixtures("fresh_dynamo")]


# ---- corners ------------------------------------------------------------------------------------

TINY = 1e-9
OPS: dict[str, Any] = {
    **{name: activation for name, (activation, _) in ACTIVATIONS.items()},
    "max_pool": lambda z: functional.max_pool1d(z[None], 2),
    "relu_in_place": lambda z: (z * 1).relu_(),
    "threshold": lambda z: functional.threshold(z, 0.0, 0.0),
    "clamp_tensor": lambda z: z.clamp(min=torch.zeros(())),
    "prelu": lambda z: functional.prelu(z, torch.full((1,), 0.3, dtype=z.dtype)),
    "softshrink": functional.softshrink,
    "hardsigmoid": functional.hardsigmoid,
    "max_dim": lambda z: z.view(2, -1).max(0).values,
    "amin": lambda z: z.amin(-1),
    "max": torch.max,
    "max_pool2d": lambda z: functional.max_pool2d(z.view(1, 2, 4, 4), 3, 2, 1),
    "max_pool2d_ceil": lambda z: functional.max_pool2d(z.view(1, 2, 4, 4), 3, 2, ceil_mode=True),
    "comparison": lambda z: z * (z > 0),
}
CORNERS = {"relu6": 6.0, "clamp": 0.5, "hardswish": 3.0, "where": 0.25, "softshrink": 0.5,
           "hardsigmoid": 3.0}  # fmt: skip


def near_a_corner(name: str) -> Tensor:
    values = torch.randn(32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    corner = CORNERS.get(name, 0.0)
    if name == "maximum":
        corner = float(values[-6])
    elif name == "max_dim":
        corner = float(values[5 + 16])
    elif name in ("amax", "max_pool"):
        corner = float(values[4])
    elif name in ("max", "max_pool2d", "max_pool2d_ceil"):
        values[9] = 4.0
        values[10], corner = 3.0, 4.0
    elif name == "amin":
        values[9], corner = -4.0, -4.0
    values[10 if name.startswith("max_pool2d") else 5] = corner + TINY
    return values


class Rounding(CornerScan):
    """As the eager run of another dtype would be: everything a little off."""

    def _note(self, corner: Any) -> None:
        self._gaps.append((corner.gap + 2 * TINY, 0.0))


@pytest.mark.parametrize("name", OPS)
def test_every_corner_is_found_and_can_be_crossed(name: str) -> None:
    values = near_a_corner(name)

    def run(mode: Any = None) -> tuple[Tensor, Tensor]:
        leaf = values.clone().requires_grad_()
        inside = leaf * 1.0
        if mode is None:
            out = OPS[name](inside)
        else:
            with mode:
                out = OPS[name](inside)
        weights = torch.arange(1.0, out.numel() + 1, dtype=out.dtype).view(out.shape)
        return out.detach(), torch.autograd.grad((out * weights).sum(), leaf)[0]

    eager = Rounding()
    run(eager)
    golden = CornerScan(eager)
    out, grad = run(golden)
    assert golden.flips, "no element near a corner was found"
    assert golden.lines_up()
    assert not golden.hidden
    plain = run()
    assert torch.equal(out, plain[0])
    assert torch.equal(grad, plain[1])
    stays, stays_grad = run(FlipMode(golden.flips))
    assert torch.equal(stays, out)
    assert torch.equal(stays_grad, grad)
    crossed, crossed_grad = run(FlipMode(golden.flips, frozenset({0})))
    assert (crossed - out).abs().max() < 100 * TINY
    assert (crossed_grad - grad).abs().max() > 0.01


def test_elements_far_from_the_corner_are_none() -> None:
    values = torch.linspace(0.5, 1, 32)
    eager = CornerScan()
    with eager:
        torch.relu(values)
    golden = CornerScan(eager)
    with golden:
        torch.relu(values.double())
    assert golden.lines_up()
    assert golden.flips == []


def test_ops_whose_corners_cannot_be_reached_are_known() -> None:
    aten = torch.ops.aten
    assert hides_corners(aten.sort.default)
    assert hides_corners(aten.adaptive_max_pool2d.default)
    assert not hides_corners(aten.relu.default)
    assert corners_of(aten.mul.Tensor, (torch.ones(2), torch.ones(2)), {}) == []


# ---- whole steps --------------------------------------------------------------------------------

SHORT = ("relu", "amax")


@pytest.mark.parametrize("name", SHORT)
def test_correct_steps_at_a_kink_pass(name: str) -> None:
    found = [check(name, seed, None) for seed in range(4)]
    assert {item.verdict for item in found} == {"PASS"}
    assert any(item.at_a_kink for item in found)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SHORT)
def test_fault_beside_a_kink_is_found(name: str, fault: str) -> None:
    assert check(name, 0, FAULTS[fault]).verdict == "FAIL"


def kinks(result: Any) -> list[Any]:
    return [item for diff in result.diffs for _, _, item in diff.tensors()
            if AT_A_KINK in item.notes]  # fmt: skip


class WideBlock(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.relu(self.up(hidden)))


class SplitSums(torch.fx.Interpreter):
    """Products summed up in two halves: as good as eager's, and never the same."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.addmm.default:
            return split_product(args[1], args[2]) + args[0]
        if target is torch.ops.aten.mm.default:
            return split_product(*args)
        return super().call_function(target, args, kwargs)


def split_product(left: Tensor, right: Tensor) -> Tensor:
    return left[:, ::2] @ right[::2] + left[:, 1::2] @ right[1::2]


def wide_block_with_a_kink() -> tuple[WideBlock, Tensor]:
    """Nothing is put near a corner: among two million elements some are."""
    for seed in range(60):
        block, hidden = WideBlock(seed), torch.randn(2048, 64)
        up = block.up
        exact = functional.linear(hidden.double(), up.weight.double(), up.bias.double()) > 0
        split = split_product(hidden, up.weight.t()) + up.bias > 0
        if torch.equal(up(hidden) > 0, exact) and not torch.equal(split, exact):
            return block, hidden.requires_grad_()
    pytest.fail("no element took another branch by rounding alone in 60 blocks")


def test_kink_that_nobody_made_passes_and_fails_without_the_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block, hidden = wide_block_with_a_kink()

    def checked() -> Any:
        torch._dynamo.reset()
        checker = PrecisionChecker(backend=other_backend(interpreter=SplitSums))
        checker.wrap(block)
        return checker.compare(lambda model: backward_of(model(hidden)), block)

    result = checked()
    assert_pass(result)
    assert kinks(result)
    assert any("took the other branch" in note for item in kinks(result) for note in item.notes)
    monkeypatch.setattr(Pairs, "_look_for_kinks", lambda *args: None)
    assert str(checked().verdict) == "FAIL"


def backward_of(output: Tensor) -> Tensor:
    loss = output.square().mean()
    loss.backward()
    return loss


@pytest.mark.slow
@needs_compiler
def test_resnet18_under_inductor_shows_a_kink(monkeypatch: pytest.MonkeyPatch) -> None:
    build, block = real_model("resnet18")
    result, _ = checked_step(build(), block, "inductor")
    assert_pass(result)
    assert kinks(result), "no element took the other branch: this test shows nothing"
    monkeypatch.setattr(Pairs, "_look_for_kinks", lambda *args: None)
    result, _ = checked_step(build(), block, "inductor")
    assert str(result.verdict) == "FAIL"
