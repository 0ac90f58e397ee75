"""Llama written once more, compactly and under other names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NAMES = [
    (r"^tok\b", "model.embed_tokens"),
    (r"^blocks\b", "model.layers"),
    (r"\bn1\b", "input_layernorm"),
    (r"\bn2\b", "post_attention_layernorm"),
    (r"\battn\b", "self_attn"),
    (r"\bw([qkvo])\b", r"\1_proj"),
    (r"\bffn\b", "mlp"),
    (r"\bw1\b", "gate_proj"),
    (r"\bw2\b", "down_proj"),
    (r"\bw3\b", "up_proj"),
    (r"^out_norm\b", "model.norm"),
    (r"^out\b", "lm_head"),
    (r"\bgain\b", "weight"),
]
"""(pattern, replacement): from the names here to those of transformers."""
NO_COUNTERPART = [
    "model",
    "model_*",
    "*rotary_emb*",
    "*act_fn*",
    "*_input_attention_mask",
    "*_input_position_*",
    "*_input_cache_position",
    "*.layers.?_input_[!0]*",
]
"""Globs over tags: what only one of the two has modules or arguments for."""


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions on (B, H, T, D / H), halves of the head as the two components."""
    length, width = x.shape[-2:]
    rates = theta ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, self.heads = config.hidden_size, config.num_attention_heads
        self.key_heads = config.num_key_value_heads
        self.theta = config.rope_parameters["rope_theta"]
        key_width = width // self.heads * self.key_heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, key_width, bias=False)
        self.wv = nn.Linear(width, key_width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor]:
        batch, length, _ = hidden_states.shape

        def heads(x: Tensor, count: int) -> Tensor:
            return x.view(batch, length, count, -1).transpose(1, 2)

        query = rotate(heads(self.wq(hidden_states), self.heads), self.theta)
        key = rotate(heads(self.wk(hidden_states), self.key_heads), self.theta)
        value = heads(self.wv(hidden_states), self.key_heads)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return (self.wo(mixed.transpose(1, 2).reshape(batch, length, -1)),)


class FeedForward(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.n1 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config)
        self.n2 = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(hidden_states=self.n1(x))[0]
        return x + self.ffn(self.n2(x))


class CompactLlama(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.tok = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.out_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.out = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.tok(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.out(self.out_norm(x))}
