"""Triton kernels over ATen ops, run by Triton's interpreter on the CPU; a process of its own.

    TRITON_INTERPRET=1 python -m tests.triton_kernels OUT.json

Each kernel has a variant whose mask in the last block is wrong, as it is when sizes were multiples
of the block in all of its author's tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import opcheck
from tests.registering import enabled, json_lines, log_lines, logged_ops, registered

BLOCK = 64
TILE = 16


@triton.jit
def add_kernel(a, b, out, n, alpha, SHORT: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    there = at < n - SHORT
    total = tl.load(a + at, mask=there, other=0.0) + alpha * tl.load(b + at, mask=there, other=0.0)
    tl.store(out + at, total, mask=mask)


@triton.jit
def softmax_kernel(x, out, n, SHORT: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    start = tl.program_id(0) * n
    at = tl.arange(0, BLOCK)
    row = tl.load(x + start + at, mask=at < n - SHORT, other=-float("inf"))
    weights = tl.exp(row - tl.max(row, axis=0))
    tl.store(out + start + at, weights / tl.sum(weights, axis=0), mask=at < n)


@triton.jit
def layer_norm_kernel(
    x, weight, bias, out, mean_out, rstd_out, n, eps,
    SHORT: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < n
    values = tl.load(x + row * n + at, mask=mask, other=0.0)
    mean = tl.sum(values, axis=0) / n
    # without the mask the padding of the last block counts as -mean each
    centred = tl.where(mask, values - mean, 0.0) if SHORT == 0 else values - mean
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / n + eps)
    scale, shift = tl.load(weight + at, mask=mask), tl.load(bias + at, mask=mask)
    tl.store(out + row * n + at, centred * rstd * scale + shift, mask=mask)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)


@triton.jit
def matmul_kernel(
    a, b, out, m, n, k, SHORT: tl.constexpr, TILE: tl.constexpr  # noqa: N803
):  # fmt: skip
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for start in range(0, k, TILE):
        inner = start + tl.arange(0, TILE)
        left = tl.load(
            a + rows[:, None] * k + inner[None, :],
            mask=(rows[:, None] < m) & (inner[None, :] < k - SHORT), other=0.0,
        )  # fmt: skip
        right = tl.load(
            b + inner[:, None] * n + columns[None, :],
            mask=(inner[:, None] < k) & (columns[None, :] < n), other=0.0,
        )  # fmt: skip
        total += tl.dot(left, right)
    mask = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(out + rows[:, None] * n + columns[None, :], total, mask=mask)


def add(short: int) -> Any:
    def add(a: Tensor, b: Any, *, alpha: float = 1) -> Tensor:
        b = torch.as_tensor(b, dtype=a.dtype).expand_as(a).contiguous()
        out = torch.empty_like(a)
        grid = (triton.cdiv(a.numel(), BLOCK),)
        add_kernel[grid](a.contiguous(), b, out, a.numel(), float(alpha), short, BLOCK)
        return out

    return add


def softmax(short: int) -> Any:
    def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        rows = x.movedim(dim, -1).contiguous()
        out = torch.empty_like(rows)
        n = rows.shape[-1]
        softmax_kernel[(rows.numel() // n,)](rows, out, n, short, triton.next_power_of_2(n))
        return out.movedim(-1, dim)

    return softmax


def layer_norm(short: int) -> Any:
    def layer_norm(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float) -> Any:
        (n,) = shape
        out = torch.empty_like(x)
        mean = torch.empty(*x.shape[:-1], 1)
        rstd = torch.empty_like(mean)
        grid = (x.numel() // n,)
        layer_norm_kernel[grid](
            x.contiguous(), weight, bias, out, mean, rstd, n, eps, short, triton.next_power_of_2(n)
        )
        return out, mean, rstd

    return layer_norm


def matmul(short: int) -> Any:
    def mm(a: Tensor, b: Tensor) -> Tensor:
        m, k = a.shape
        n = b.shape[1]
        out = torch.empty(m, n)
        grid = (triton.cdiv(m, TILE), triton.cdiv(n, TILE))
        matmul_kernel[grid](a.contiguous(), b.contiguous(), out, m, n, k, short, TILE)
        return out

    return mm


LIBRARY = {
    "add.Tensor": add, "_softmax": softmax, "native_layer_norm": layer_norm, "mm": matmul,
}  # fmt: skip


def run() -> None:
    """Sizes that are multiples of no block."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(7, 50, generator=random)
    torch.add(x, x, alpha=2)
    torch.add(x, 0.5)
    torch.softmax(x, 1)
    torch.softmax(x, 0)
    torch.nn.functional.layer_norm(x, (50,), x[0], x[1])
    torch.mm(x, x.t())


def main(out: str) -> None:
    """Check the library correct, and with each kernel's last block wrong."""
    correct = {key: make(0) for key, make in LIBRARY.items()}
    log = Path("correct.log")
    with registered(*correct.items()) as register, enabled(path=log, criterion="calibrated"):
        run()
    found: dict[str, Any] = {
        "registered": register.all_keys,
        "log": log_lines(log),
        "checked": sorted(c.op for c in opcheck.coverage().calls if c.checked),
        "errors": opcheck.coverage().errors,
        "wrong": {},
    }
    for key, make in LIBRARY.items():
        for criterion in ("allclose", "calibrated"):
            log = Path(f"{key}.{criterion}.log")
            config = {**correct, key: make(1)}
            with registered(*config.items()), enabled(path=log, criterion=criterion):
                run()
            failure = [record for record in json_lines(log) if record["verdict"] == "FAIL"]
            found["wrong"][f"{key} {criterion}"] = {
                "log": logged_ops(log),
                "worst_index": failure[0]["metrics"]["worst_index"] if failure else None,
            }
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
