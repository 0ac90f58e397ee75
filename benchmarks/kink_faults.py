"""What passes as `at a kink`: correct steps whose gradient jumps, and faults planted beside a kink.

    OMP_NUM_THREADS=1 python -m benchmarks.kink_faults --rounds 20

A block is built so that some elements lie within rounding of a corner (relu, clamp, maximum, amax,
where, ...). The compiled side runs a correct backend with another rounding (every op in float64,
then rounded), so that now and then it takes the other branch. Then faults are planted in one
gradient. See the README beside this file.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate
from torch.nn import functional

from modulecheck import PrecisionChecker
from modulecheck.kink_rule import AT_A_KINK

ROWS, WIDTH, HIDDEN, NUM_NEAR = 24, 16, 32, 4
Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, tuple[Activation, float]] = {
    "relu": (torch.relu, 0.0),
    "relu6": (functional.relu6, 6.0),
    "clamp": (lambda z: z.clamp(-0.5, 0.5), 0.5),
    "leaky_relu": (functional.leaky_relu, 0.0),
    "hardswish": (functional.hardswish, 3.0),
    "abs": (torch.abs, 0.0),
    "where": (lambda z: torch.where(z > 0.25, z * 2 - 0.25, z), 0.25),
    "maximum": (lambda z: torch.maximum(z, z.flip(-1)), 0.0),
    "amax": (lambda z: z.view(*z.shape[:-1], -1, 2).amax(-1).repeat(1, 2), 0.0),
    "max_pool": (lambda z: functional.max_pool1d(z, 2).repeat(1, 2), 0.0),
}
PAIRED = {"maximum": lambda column: HIDDEN - 1 - column, "amax": lambda column: column ^ 1,
          "max_pool": lambda column: column ^ 1}  # fmt: skip
"""The column that an element is held against."""


class KinkBlock(nn.Module):
    """Two layers and what is between them."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.activation(self.up(hidden)))


class OtherRounding(torch.fx.Interpreter):
    """A correct kernel for every op, with other roundings than torch's."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        def wide(value: Any) -> Any:
            is_narrow = isinstance(value, Tensor) and value.dtype == torch.float32
            return value.double() if is_narrow else value

        def narrow(value: Any) -> Any:
            is_wide = isinstance(value, Tensor) and value.dtype == torch.float64
            return value.float() if is_wide else value

        out = target(*map_aggregate(args, wide), **map_aggregate(kwargs, wide))
        return map_aggregate(out, narrow)


Edit = Callable[[list[Tensor]], None]


def other_backend(edit: Edit | None = None, interpreter: Any = OtherRounding) -> Any:
    """A correct backend that computes as the interpreter does; `edit` spoils its gradients."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def forward(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(lambda *args: interpreter(graph).run(*args))

    def backward(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            out = list(interpreter(graph).run(*args))
            if edit is not None:
                edit([item for item in out if isinstance(item, Tensor)])
            return out

        return make_boxed_func(run)

    made = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    return lambda graph, inputs: made(graph, inputs)


def build(name: str, seed: int) -> tuple[KinkBlock, Tensor]:
    """A block of which NUM_NEAR elements lie within rounding of a corner."""
    torch.manual_seed(seed)
    activation, corner = ACTIVATIONS[name]
    block, hidden = KinkBlock(activation), torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        for place in range(NUM_NEAR):
            row, column = place * 5, place * 2
            before = block.up(hidden)
            target = before[row, PAIRED[name](column)] if name in PAIRED else corner
            block.up.bias[column] -= before[row, column] - target
    return block, hidden


def _off_by(share: float) -> Edit:
    def edit(grads: list[Tensor]) -> None:
        grads[0].view(-1)[7] += share * grads[0].square().mean().sqrt()

    return edit


def _noise(grads: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(3)
    grads[0].mul_(1 + 0.01 * torch.randn(grads[0].shape, generator=generator))


FAULTS: dict[str, Edit] = {
    "element +1 rms": _off_by(1.0),
    "element +0.1 rms": _off_by(0.1),
    "element +0.01 rms": _off_by(0.01),
    "row zero": lambda grads: grads[0][3].zero_(),
    "row x1.01": lambda grads: grads[0][3].mul_(1.01),
    "all x1.01": lambda grads: grads[0].mul_(1.01),
    "all x1.001": lambda grads: grads[0].mul_(1.001),
    "noise 1%": _noise,
}
SPREAD = ("all x1.01", "all x1.001", "noise 1%")


@dataclass(frozen=True)
class Outcome:
    """Of one checked step."""

    verdict: str
    at_a_kink: bool


def check(name: str, seed: int, edit: Edit | None) -> Outcome:
    """One step of one block."""
    torch._dynamo.reset()
    block, hidden = build(name, seed)
    checker = PrecisionChecker(backend=other_backend(edit))
    checker.wrap(block)
    with checker.installed(block):
        loss = block(hidden.requires_grad_()).square().mean()
        loss.backward()
    result = checker.collect(loss)
    (diff,) = result.diffs
    rows = [*(diff.grad_input or ()), *(diff.param_grads or ())]
    return Outcome(str(result.verdict), any(AT_A_KINK in row.notes for row in rows))


def measure(names: list[str], rounds: int) -> dict[str, Counter[str]]:
    """Counts by fault ("none" among them): steps, those passed, those passed as at a kink."""
    found: dict[str, Counter[str]] = {}
    for name in names:
        for fault, edit in {"none": None, **FAULTS}.items():
            counts = found.setdefault(fault, Counter())
            for seed in range(rounds):
                outcome = check(name, seed, edit)
                counts["steps"] += 1
                counts["passed"] += outcome.verdict == "PASS"
                counts["kink"] += outcome.verdict == "PASS" and outcome.at_a_kink
                counts[f"{name} passed"] += outcome.verdict == "PASS"
                counts[f"{name} kink"] += outcome.verdict == "PASS" and outcome.at_a_kink
    return found


def main() -> int:
    """Print the table; exit status 1 when a correct step fails or a spread fault passes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--activations", default=",".join(ACTIVATIONS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = args.activations.split(",")
    found = measure(names, args.rounds)
    print(f"{'planted':18s} {'steps':>6s} {'passed':>7s} {'as at a kink':>13s}  by activation")
    for fault, counts in found.items():
        by_name = " ".join(f"{name} {counts[f'{name} passed']}/{counts[f'{name} kink']}"
                           for name in names if counts[f"{name} passed"])  # fmt: skip
        print(f"{fault:18s} {counts['steps']:6d} {counts['passed']:7d} {counts['kink']:13d}"
              f"  {by_name}")  # fmt: skip
    clean = found["none"]
    return int(clean["passed"] < clean["steps"] or any(found[name]["passed"] for name in SPREAD))


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    sys.exit(main())
