"""Architectures of the transformers library, tiny and with random weights, each with a batch.

One row a model: its classes, its sizes, what it is fed, and the class of its repeated block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests import models
from tests.models import Batch, Workload

VOCABULARY, LENGTH, BATCH_SIZE = 97, 12, 2
WIDTH, IMAGE_SIZE, LABELS, MEL_BINS = 32, 16, 5, 8


@dataclass(frozen=True)
class Architecture:
    """How to build one model.

    Attributes:
        kind: encoder, decoder, encoder-decoder, MoE, state space, vision, audio or two towers.
        model: name of the model class in `transformers`.
        config: name of the configuration class.
        sizes: what the configuration is given.
        feeds: makes the batch and says how the loss comes out of it.
        block: name of the class that the model repeats.
        can_checkpoint: the library runs its blocks again in backward, when asked.
        static: compile with fixed shapes.
    """

    kind: str
    model: str
    config: str
    sizes: Mapping[str, Any]
    feeds: Callable[[], tuple[Batch, models.LossFunction]]
    block: str
    can_checkpoint: bool = True
    static: bool = False

    def build(self, *, checkpointing: bool = False) -> Workload:
        """Make the model, in train mode, with its batch."""
        transformers = models._import_transformers()
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.sizes)
        model = getattr(transformers, self.model)(config).train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        batch, loss = self.feeds()
        return Workload(self.model, model, batch, loss)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules that the model repeats."""
        return [item for item in model.modules() if type(item).__name__ == self.block]


# ---- what they are fed --------------------------------------------------------------------------


def _draw(high: int, *shape: int) -> Tensor:
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(3))


def _next_tokens() -> tuple[Batch, models.LossFunction]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        (ids,) = batch
        return model(input_ids=ids, labels=ids, use_cache=False).loss.float()

    return (_draw(VOCABULARY, BATCH_SIZE, LENGTH),), loss


def _masked_tokens() -> tuple[Batch, models.LossFunction]:
    ids = _draw(VOCABULARY, BATCH_SIZE, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids, mask = batch
        return model(input_ids=ids, attention_mask=mask, labels=ids).loss.float()

    return (ids, mask), loss


def _two_sequences() -> tuple[Batch, models.LossFunction]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids, labels = batch
        return model(input_ids=ids, labels=labels, use_cache=False).loss.float()

    return (_draw(VOCABULARY, BATCH_SIZE, LENGTH), _draw(VOCABULARY, BATCH_SIZE, LENGTH - 2)), loss


def _images() -> tuple[Batch, models.LossFunction]:
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return model(pixel_values=images, labels=labels).loss.float()

    return (images, _draw(LABELS, BATCH_SIZE)), loss


def _sound_and_text() -> tuple[Batch, models.LossFunction]:
    generator = torch.Generator().manual_seed(5)
    spectrum = torch.randn(BATCH_SIZE, MEL_BINS, 2 * LENGTH, generator=generator)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        spectrum, labels = batch
        return model(input_features=spectrum, labels=labels, use_cache=False).loss.float()

    return (spectrum, _draw(VOCABULARY, BATCH_SIZE, LENGTH - 2)), loss


def _waveforms() -> tuple[Batch, models.LossFunction]:
    generator = torch.Generator().manual_seed(6)
    sound = torch.randn(BATCH_SIZE, 160, generator=generator)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        sound, labels = batch
        return model(input_values=sound, labels=labels).loss.float()

    return (sound, _draw(LABELS, BATCH_SIZE, 3)), loss


def _images_and_text() -> tuple[Batch, models.LossFunction]:
    (images, _), _ = _images()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids, images = batch
        return model(input_ids=ids, pixel_values=images, return_loss=True).loss.float()

    return (_draw(VOCABULARY, BATCH_SIZE, LENGTH), images), loss


# ---- the models ---------------------------------------------------------------------------------

_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_LAYERS = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 2 * WIDTH,
}  # fmt: skip
_ROTARY = _TOKENS | _LAYERS | {"num_key_value_heads": 2, "max_position_embeddings": 32}
_BART = _TOKENS | {
    "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "max_position_embeddings": 32, "decoder_start_token_id": 0, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = _TOKENS | {
    "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
_STATE_SPACE = _TOKENS | {"hidden_size": WIDTH, "state_size": 8, "num_hidden_layers": 2}

ARCHITECTURES = {
    "bert": Architecture(
        "encoder", "BertForMaskedLM", "BertConfig",
        _TOKENS | _LAYERS | {"max_position_embeddings": 32}, _masked_tokens, "BertLayer",
    ),
    "distilbert": Architecture(
        "encoder", "DistilBertForMaskedLM", "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": WIDTH, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
        _masked_tokens, "TransformerBlock",
    ),
    "deberta-v2": Architecture(
        "encoder", "DebertaV2ForMaskedLM", "DebertaV2Config",
        _TOKENS | _LAYERS | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                             "max_position_embeddings": 32},
        _masked_tokens, "DebertaV2Layer",
    ),
    "gpt2": Architecture(
        "decoder", "GPT2LMHeadModel", "GPT2Config",
        _TOKENS | {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 32},
        _next_tokens, "GPT2Block",
    ),
    "gpt-neox": Architecture(
        "decoder", "GPTNeoXForCausalLM", "GPTNeoXConfig",
        _TOKENS | _LAYERS | {"max_position_embeddings": 32}, _next_tokens, "GPTNeoXLayer",
    ),
    "llama": Architecture(
        "decoder", "LlamaForCausalLM", "LlamaConfig", _ROTARY, _next_tokens, "LlamaDecoderLayer"
    ),
    "gemma2": Architecture(
        "decoder", "Gemma2ForCausalLM", "Gemma2Config",
        _ROTARY | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
        _next_tokens, "Gemma2DecoderLayer",
    ),
    "bloom": Architecture(
        "decoder", "BloomForCausalLM", "BloomConfig",
        _TOKENS | {"hidden_size": WIDTH, "n_layer": 2, "n_head": 4}, _next_tokens, "BloomBlock",
    ),
    "t5": Architecture(
        "encoder-decoder", "T5ForConditionalGeneration", "T5Config", _T5, _two_sequences, "T5Block"
    ),
    "bart": Architecture(
        "encoder-decoder", "BartForConditionalGeneration", "BartConfig", _BART, _two_sequences,
        "BartEncoderLayer",
    ),
    "mixtral": Architecture(
        "MoE", "MixtralForCausalLM", "MixtralConfig",
        _ROTARY | {"num_local_experts": 4, "num_experts_per_tok": 2}, _next_tokens,
        "MixtralDecoderLayer",
    ),
    "qwen2-moe": Architecture(
        "MoE", "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        _ROTARY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                   "shared_expert_intermediate_size": 32},
        _next_tokens, "Qwen2MoeDecoderLayer",
    ),
    "mamba": Architecture(
        "state space", "MambaForCausalLM", "MambaConfig", _STATE_SPACE, _next_tokens, "MambaBlock"
    ),
    "mamba2": Architecture(
        "state space", "Mamba2ForCausalLM", "Mamba2Config",
        _STATE_SPACE | {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
        _next_tokens, "Mamba2Block",
    ),
    "vit": Architecture(
        "vision", "ViTForImageClassification", "ViTConfig",
        _LAYERS | {"image_size": IMAGE_SIZE, "patch_size": 4, "num_labels": LABELS}, _images,
        "ViTLayer",
    ),
    "convnext": Architecture(
        "vision", "ConvNextForImageClassification", "ConvNextConfig",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2,
         "num_labels": LABELS}, _images, "ConvNextLayer", can_checkpoint=False,
    ),
    "swin": Architecture(
        "vision", "SwinForImageClassification", "SwinConfig",
        # of two stages: once Dynamo makes the sizes symbols, its solver takes a minute or more for
        # the windows, checker or not
        {"image_size": IMAGE_SIZE, "patch_size": 2, "embed_dim": 8, "depths": [2, 2],
         "num_heads": [2, 2], "window_size": 2, "num_labels": LABELS}, _images, "SwinLayer",
        static=True,
    ),
    "whisper": Architecture(
        "audio", "WhisperForConditionalGeneration", "WhisperConfig",
        _BART | {"num_mel_bins": MEL_BINS, "max_source_positions": LENGTH,
                 "max_target_positions": 16}, _sound_and_text, "WhisperDecoderLayer",
    ),
    "wav2vec2": Architecture(
        "audio", "Wav2Vec2ForCTC", "Wav2Vec2Config",
        _LAYERS | {"vocab_size": LABELS, "conv_dim": [16, 16], "conv_kernel": [4, 4],
                   "conv_stride": [2, 2], "num_feat_extract_layers": 2, "layerdrop": 0.0,
                   "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
                   "mask_time_length": 2}, _waveforms, "Wav2Vec2EncoderLayer",
    ),
    "clip": Architecture(
        "two towers", "CLIPModel", "CLIPConfig",
        {"text_config": _TOKENS | _LAYERS | {"max_position_embeddings": 32},
         "vision_config": _LAYERS | {"image_size": IMAGE_SIZE, "patch_size": 4},
         "projection_dim": 16}, _images_and_text, "CLIPEncoderLayer",
    ),
}  # fmt: skip
