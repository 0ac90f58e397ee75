"""What does checking a large call cost, what does it find, and does it ever cry wolf?

One run prints, for each op, its own time, the time of its check as a share of that, the memory that
the check takes beside it, and the verdict; then the false alarms on correct results computed in
other orders, and the planted faults that were found. See the README beside this file.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_large
    OMP_NUM_THREADS=1 python -m benchmarks.bench_large --size 2048 --parts cost
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import opcheck
from benchmarks.measuring import peak_mib, reset_peak
from opcheck.calls import Call, Site, traits_of
from opcheck.large import judge_large
from opcheck.outside import outside_everything
from opcheck.sampled import Criterion

PRODUCT_LIMIT = 0.06
"""Cost of checking a 4096^3 product, as a share of it."""
ELEMENTS = 1 << 24
SEEDS = 5
TRIALS = 60
"""For single elements, which are found by luck of place and sample."""
MANY_ROWS = 1024
"""Rows of the products that single elements are planted in: what is seen of one depends on the
columns and on K, which are those of the large product, and not on the number of rows."""

Case = tuple[str, Callable[[], object]]
Fault = Callable[[Tensor, int], None]
"""(result, seed): spoils the result."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values that depend on shape and seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def products(size: int) -> Iterator[Case]:
    """Square products; float16 is slow on most CPUs and stays small."""
    for dtype in (torch.float32, torch.bfloat16):
        for n in (1024, 2048, 4096):
            if n <= size:
                a, b = randn(n, n, dtype=dtype), randn(n, n, dtype=dtype, seed=1)
                yield f"mm {n}^3 {_short(dtype)}", lambda a=a, b=b: a @ b
    a = randn(1024, 1024, dtype=torch.float16)
    yield "mm 1024^3 fp16", lambda: a @ a
    wide, narrow = randn(512, 768), randn(768, 50257, seed=1)
    yield "mm 512x768x50257 fp32", lambda: wide @ narrow
    q, k = randn(96, 1024, 64), randn(96, 64, 1024, seed=1)
    yield "bmm 96x1024x64x1024 fp32", lambda: torch.bmm(q, k)


def others() -> Iterator[Case]:
    """Attention, convolution, rows, reductions, elements."""
    q = randn(1, 16, 4096, 64)
    yield (
        "attention 16 heads, L=4096 fp32",
        lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
    )
    x, w = randn(32, 64, 56, 56), randn(64, 64, 3, 3, seed=1) * 0.05
    yield "convolution 32x64x56x56 fp32", lambda: F.conv2d(x, w, None, 1, 1)
    grad = randn(32, 64, 56, 56, seed=2)
    arguments = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    yield (
        "convolution_backward fp32",
        lambda: torch.ops.aten.convolution_backward(grad, x, w, *arguments),
    )
    rows = randn(4096, 4096)
    yield "softmax 4096x4096 fp32", lambda: rows.softmax(-1)
    yield "layer_norm 4096x4096 fp32", lambda: F.layer_norm(rows, (4096,))
    yield "sum(0) 4096x4096 fp32", lambda: rows.sum(0)
    yield "sum() 16M fp32", lambda: rows.sum()
    flat, other = randn(ELEMENTS), randn(ELEMENTS, seed=1)
    yield "add 16M fp32", lambda: flat + other
    yield "gelu 16M fp32", lambda: F.gelu(flat)
    half = flat.bfloat16()
    yield "gelu 16M bf16", lambda: F.gelu(half)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


# ---- cost ---------------------------------------------------------------------------------------


def cost(size: int, rounds: int) -> bool:
    """Print the table of costs; True when the limit of 4096^3 products holds."""
    print(
        f"{'op':34}{'op ms':>9}{'first ms':>10}{'check ms':>10}{'share':>8}{'MiB':>7}"
        "  verdict, strategy"
    )
    holds = True
    for name, step in (*products(size), *others()):
        step()
        plain, firsts, checks = [], [], []
        for _ in range(rounds):
            start = time.perf_counter()
            step()
            plain.append(time.perf_counter() - start)
            session, first, memory = _checked(step)
            firsts.append(first)
            checks.append(session.coverage.check_seconds - first)
        op, check = statistics.median(plain), statistics.median(checks)
        record = session.records[0]
        strategy = record.sample.strategy if record.sample is not None else "all"
        print(
            f"{name:34}{1e3 * op:9.1f}{1e3 * statistics.median(firsts):10.1f}{1e3 * check:10.1f}"
            f"{100 * check / op:7.1f}%{memory:7.0f}  {record.verdict}, {strategy}"
        )
        if "4096^3" in name and check > PRODUCT_LIMIT * op:
            holds = False
    print(f"4096^3 products at most {100 * PRODUCT_LIMIT:.0f}%: {'yes' if holds else 'NO'}")
    return holds


def _checked(step: Callable[[], object]) -> tuple[opcheck.Session, float, float]:
    """A session around two calls, what the first check took, and by how many MiB the peak rose.

    The first check of a session also maps the memory that later ones find.
    """
    with tempfile.TemporaryDirectory() as folder:
        step()
        reset_peak()
        step()
        alone = peak_mib()
        reset_peak()
        with opcheck.check(log_dir=Path(folder), quiet=True, max_checks=None) as session:
            step()
            first = session.coverage.check_seconds
            step()
        return session, first, max(0.0, peak_mib() - alone)


# ---- verdicts on results made by hand -----------------------------------------------------------


def judged(a: Tensor, b: Tensor, y: Tensor, seed: int, *, device: str = "") -> bool:
    """Whether `y` passes as `a @ b`; `device` is the kind that it is said to come from."""
    func = torch.ops.aten.mm.default
    call = Call(
        func=func, traits=traits_of(func), args=(a, b), kwargs={}, site=Site("", "other"),
        index=seed, step=0, occurrence=0, source="", out_dtype=y.dtype,
        on_device=bool(device), device_type=device,
        signature=(func, a.dtype, "contiguous", b.dtype, "contiguous"),
    )  # fmt: skip
    criterion = Criterion(name="calibrated", rtol=1e-4, atol=1e-5, seed=seed)
    with outside_everything():
        found = judge_large(call, y, criterion)
    if isinstance(found, opcheck.SkipReason):
        raise TypeError(f"the product was skipped: {found}")
    return found.found.passed


def _wide(x: Tensor) -> Tensor:
    return x.float()


VARIANTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as it is": lambda a, b: _wide(a) @ _wide(b),
    "transposed": lambda a, b: (_wide(b).t() @ _wide(a).t()).t(),
    "blocked": lambda a, b: torch.cat([_wide(a) @ part for part in _wide(b).split(384, 1)], 1),
    "split-K": lambda a, b: sum(
        left @ right
        for left, right in zip(_wide(a).split(512, 1), _wide(b).split(512), strict=True)
    ),
    "rounded float64": lambda a, b: a.double() @ b.double(),
}


def _in_its_own_dtype(parts: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Split-K that keeps partial sums in the dtype of the factors."""

    def compute(a: Tensor, b: Tensor) -> Tensor:
        step = a.shape[1] // parts
        found = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
        for left, right in zip(a.split(step, 1), b.split(step), strict=True):
            found += (_wide(left) @ _wide(right)).to(a.dtype)
        return found

    return compute


def _cut_to_tf32(x: Tensor) -> Tensor:
    """To 10 bits of mantissa, as tensor cores may."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def _rounded_to_tf32(x: Tensor) -> Tensor:
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


HALF_ON_DEVICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f"split-K of {parts}, partial sums in 16 bit": _in_its_own_dtype(parts) for parts in (2, 4, 16)
}
TF32_ON_DEVICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "TF32, rounded": lambda a, b: _rounded_to_tf32(a) @ _rounded_to_tf32(b),
    "TF32, cut": lambda a, b: _cut_to_tf32(a) @ _cut_to_tf32(b),
}

DATA: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "normal": lambda n: (randn(n, n), randn(n, n, seed=1)),
    "positive": lambda n: (randn(n, n).relu(), randn(n, n, seed=1).relu()),
    "large mean": lambda n: (randn(n, n) + 10.0, randn(n, n, seed=1) + 10.0),
    # sums of terms of size 10 that cancel to the size of their spread
    "cancelling": lambda n: (
        randn(n, n) + 10.0,
        randn(n, n, seed=1) - randn(n, n, seed=1).mean(0),
    ),
}


def false_alarms(size: int) -> bool:
    """Correct products in other orders; True when none failed."""
    print(f"\ncorrect products of {size}, failed of judged")
    total = failed = 0
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True  # of the products that are said to come from CUDA
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        on_devices = TF32_ON_DEVICES if dtype is torch.float32 else HALF_ON_DEVICES
        for data, make in DATA.items():
            a, b = (x.to(dtype) for x in make(size))
            for device, variants in (("", VARIANTS), ("cuda", on_devices)):
                for name, compute in variants.items():
                    y = compute(a, b).to(dtype)
                    bad = sum(not judged(a, b, y, seed, device=device) for seed in range(SEEDS))
                    total, failed = total + SEEDS, failed + bad
                    if bad:
                        print(f"  {_short(dtype)} {data} {name}: {bad} of {SEEDS}", flush=True)
    torch.backends.cuda.matmul.allow_tf32 = allowed
    print(f"  {failed} of {total}")
    return failed == 0


def _element(share: float) -> Fault:
    def change(y: Tensor, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        row, column = (int(torch.randint(size, (1,), generator=draw)) for size in y.shape)
        y[row, column] += (-1) ** seed * share * y.float().square().mean().sqrt()

    return change


def _zero(*place: slice | int) -> Fault:
    def change(y: Tensor, seed: int) -> None:
        y[place] = 0

    return change


def _times(factor: float) -> Fault:
    def change(y: Tensor, seed: int) -> None:
        y.copy_((y.double() * factor).to(y.dtype))

    return change


def _swap(y: Tensor, seed: int) -> None:
    y[:, [40, 41]] = y[:, [41, 40]]


ELEMENTS_OFF: dict[str, Fault] = {
    f"one element, {share} rms": _element(share) for share in (0.1, 0.3, 0.5)
}
FAULTS: dict[str, Fault] = {
    "zero tile 16x16": _zero(slice(640, 656), slice(256, 272)),
    "zero row": _zero(77),
    "zero column": _zero(slice(None), 901),
    "swapped columns": _swap,
    "x1.01": _times(1.01),
    "x1.001": _times(1.001),
}


def faults(size: int) -> None:
    """Planted faults that were found, of `TRIALS` or `SEEDS` choices of sample and place."""
    print(f"\nplanted in products of {size}, found of {SEEDS}; single elements of {TRIALS}")
    print(f"  {'fault':24}{'fp32':>6}{'bf16':>6}{'fp16':>6}")
    found: dict[str, list[int]] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b = (randn(size, size, seed=seed).to(dtype) for seed in (0, 1))
        right = (a.float() @ b.float()).to(dtype)
        rows = min(size, MANY_ROWS)
        for name, change in ELEMENTS_OFF.items():
            counted = _num_found(a[:rows], b, right[:rows], change, TRIALS)
            found.setdefault(name, []).append(counted)
        for name, change in FAULTS.items():
            found.setdefault(name, []).append(_num_found(a, b, right, change, SEEDS))
        short = (a[:, :-16].float() @ b[:-16].float()).to(dtype)
        counted = _num_found(a, b, short, lambda y, seed: None, SEEDS)
        found.setdefault("last 16 of K missing", []).append(counted)
    for name, counts in found.items():
        print(f"  {name:24}" + "".join(f"{count:6}" for count in counts))


def _num_found(a: Tensor, b: Tensor, right: Tensor, change: Fault, trials: int) -> int:
    found = 0
    for seed in range(trials):
        y = right.clone()
        change(y, seed)
        found += not judged(a, b, y, seed)
    return found


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--size", type=int, default=4096, help="largest side of products")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default="cost,alarms,faults")
    chosen = parser.parse_args()
    parts = chosen.parts.split(",")
    good = True
    if "cost" in parts:
        good = cost(chosen.size, chosen.rounds) and good
    if "alarms" in parts:
        good = false_alarms(min(chosen.size, 2048)) and good
    if "faults" in parts:
        faults(chosen.size)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
