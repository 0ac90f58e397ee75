"""Small errors planted in inductor's lowerings and decompositions, and a model to find them in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

aten = torch.ops.aten
ERROR = 1.001
"""0.1 per cent."""
OPS = {
    "erf": aten.erf.default,
    "rsqrt": aten.rsqrt.default,
    "sum": aten.sum.dim_IntList,
    "exp": aten.exp.default,
    "tanh": aten.tanh.default,
    "sigmoid": aten.sigmoid.default,
}
MARK = 36
"""A width that no other layer has: by it a lowering knows the block where it is to go wrong."""


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, hidden: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.attend(self.norm_1(x)))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(batch, length, width)


class Transformer(nn.Module):
    def __init__(self, width: int = 16, num_layers: int = 2, num_tokens: int = 40) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, width)
        self.blocks = nn.ModuleList(Block(width, 2, 4 * width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def transformer() -> tuple[nn.Module, Tensor]:
    """A model of two layers, and one batch."""
    torch.manual_seed(0)
    return Transformer(), torch.randint(0, 40, (2, 9))


def _times(lowerings: Any, value: Any) -> Any:
    return lowerings[aten.mul.Tensor](value, ERROR)


def _is_made_here(value: Any) -> bool:
    """The input of the lowering is no buffer yet: it will be fused."""
    from torch._inductor import ir

    data = value.data
    return isinstance(data, ir.StorageBox) and isinstance(data.data, (ir.Pointwise, ir.Reduction))


def _is_marked(value: Any) -> bool:
    return MARK in [int(size) for size in value.get_size()]


@contextlib.contextmanager
def wrong_lowering(
    name: str, *, when: Callable[[Any], bool] = lambda value: True
) -> Iterator[None]:
    """One lowering is off by 0.1 per cent, for the inputs that `when` picks."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from torch._inductor import lowering

    table, op = lowering.lowerings, OPS[name]
    right = table[op]

    def wrong(value: Any, *args: Any, **kwargs: Any) -> Any:
        result = right(value, *args, **kwargs)
        return _times(table, result) if when(value) else result

    torch._dynamo.reset()
    table[op] = wrong
    try:
        with (
            inductor_config.patch(fx_graph_cache=False),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            yield
    finally:
        table[op] = right
        torch._dynamo.reset()


def wrong_when_fused() -> contextlib.AbstractContextManager[None]:
    """`erf` is off only where its input is computed in the same kernel."""
    return wrong_lowering("erf", when=_is_made_here)


def wrong_in_marked(name: str) -> contextlib.AbstractContextManager[None]:
    """Only the block whose hidden width is MARK is wrong."""
    return wrong_lowering(name, when=_is_marked)


@contextlib.contextmanager
def wrong_decomposition(op: Any = aten.gelu.default) -> Iterator[None]:
    """One entry of the table is off by 0.1 per cent."""
    from torch._inductor import decomposition

    right = decomposition.decompositions[op]
    torch._dynamo.reset()
    decomposition.decompositions[op] = lambda *args, **kwargs: right(*args, **kwargs) * ERROR
    decomposition.fast_random_decomps.cache_clear()
    try:
        yield
    finally:
        decomposition.decompositions[op] = right
        decomposition.fast_random_decomps.cache_clear()
        torch._dynamo.reset()


def mark_gpt2(block: nn.Module) -> None:
    """Its hidden width becomes MARK."""
    from transformers.pytorch_utils import Conv1D

    width = block.ln_1.weight.numel()
    block.mlp.c_fc, block.mlp.c_proj = Conv1D(MARK, width), Conv1D(width, MARK)


def mark_llama(block: nn.Module) -> None:
    """Its hidden width becomes MARK."""
    width, mlp = block.input_layernorm.weight.numel(), block.mlp
    mlp.gate_proj, mlp.up_proj = (nn.Linear(width, MARK, bias=False) for _ in range(2))
    mlp.down_proj = nn.Linear(MARK, width, bias=False)


def mark_resnet(block: nn.Module) -> None:
    """It has MARK channels inside."""
    given, made = block.conv1.in_channels, block.conv2.out_channels
    block.conv1 = nn.Conv2d(given, MARK, 3, block.conv1.stride, 1, bias=False)
    block.bn1 = nn.BatchNorm2d(MARK)
    block.conv2 = nn.Conv2d(MARK, made, 3, 1, 1, bias=False)
