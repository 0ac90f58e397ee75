"""`opcheck demo`: a small transformer, one kernel made subtly wrong, and how it is found."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from opcheck import _torch
from opcheck.checking import check
from opcheck.kernel_table import call_kernel, kernels
from opcheck.records import EXIT_STATUS, Verdict

__all__ = ["main"]

_STEPS = 3
_VOCABULARY, _WIDTH, _HEADS, _BLOCKS, _LENGTH = 64, 32, 4, 3, 16


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, _HEADS, width // _HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return joined


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(_WIDTH), _Attention()
        self.norm2, self.mlp = nn.LayerNorm(_WIDTH), _Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(_BLOCKS))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@contextmanager
def _wrong_gelu() -> Iterator[None]:
    """Register a kernel over GELU that takes the tanh formula for the exact one."""
    original = kernels().original("aten::gelu")

    def gelu(x: Tensor, approximate: str = "none") -> Tensor:
        out: Tensor = call_kernel(original, (x,), {"approximate": "tanh"})
        return out

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch notes that a kernel is being replaced
        library.impl("gelu", gelu, "CPU")
    try:
        yield
    finally:
        _torch.destroy_library(library)


def main(*, clean: bool = False, log_dir: str = "logs") -> int:
    """Train a few checked steps and print what was found.

    Args:
        clean: without the planted fault; ends in PASS.
        log_dir: where the logs go.

    Returns:
        0 when the demo shows what it promises, else the exit status of the verdict.
    """
    generator = torch.Generator().manual_seed(0)
    random_state = torch.get_rng_state()
    torch.manual_seed(0)
    model = _Transformer()
    torch.set_rng_state(random_state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, _VOCABULARY, (4, _LENGTH + 1), generator=generator)
    say = sys.stdout.write
    say(
        f"Training a transformer of {_BLOCKS} blocks for {_STEPS} steps on the CPU, "
        + ("every kernel as torch ships it.\n" if clean else "one kernel replaced by a wrong one:\n"
           "aten::gelu computes the tanh approximation where the exact formula was asked for.\n")
    )  # fmt: skip
    with (
        nullcontext() if clean else _wrong_gelu(),
        check(model, log_dir=log_dir, quiet=True) as session,
    ):
        for step in range(_STEPS):
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            say(f"  step {step}  loss {loss.item():.6f}\n")
    say("\nThe loss looks healthy either way. What the checker saw:\n\n")
    say(session.report() + "\n")
    say(f"\nlogs: {session.log_path.with_suffix('.log')} and {session.log_path}\n")
    expected = Verdict.PASS if clean else Verdict.FAIL
    return 0 if session.verdict is expected else EXIT_STATUS[session.verdict] or 3
