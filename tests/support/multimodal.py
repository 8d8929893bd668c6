"""Tiny vision-language models and batches with and without an image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import ranks
from tests.support.models import Batch

VOCAB = 96


LENGTH = 16


PIXELS = 16


IMAGE_TOKEN = 5


VISION_START = 6


TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().train()


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, use_cache=False).loss


def feed_of(batch_of: Callable[[torch.Generator, bool], Batch]) -> Callable[[int, int, int], Batch]:
    """Return a feed with images on rank 0 in the first micro-step, on another rank in the second, on none in the last step."""

    def feed(step: int, micro: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
        return batch_of(generator, step < 2 and rank == (micro + step) % ranks.world())

    return feed


def llava(layers: int = 2) -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2, image_size=PIXELS, patch_size=PIXELS // 2
    )
    text = LlamaConfig(**{**TEXT, "num_hidden_layers": layers})
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config)


def llava_batch(generator: torch.Generator, image: bool) -> Batch:
    tokens = torch.randint(20, VOCAB, (2, LENGTH), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if image:
        tokens[:, 1:5] = IMAGE_TOKEN
        batch["pixel_values"] = torch.randn(2, 3, PIXELS, PIXELS, generator=generator)
    return batch


def qwen2_5_vl() -> nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "window_size": 8,
        "out_hidden_size": 32,
    }
    vision |= {"fullatt_block_indexes": [1]}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**qwen_settings(vision)))


def qwen3_vl() -> nn.Module:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    settings = qwen_settings(vision)
    settings["text_config"] |= {"head_dim": 8}
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(**settings))


def qwen_settings(vision: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": 7, "vision_start_token_id": VISION_START, "vision_end_token_id": 8}
    return {"vision_config": vision, "text_config": {**TEXT, "rope_parameters": rope}, **tokens}


def qwen_batch(generator: torch.Generator, image: bool) -> Batch:
    """Return a batch with one image of 4 x 4 patches per row: 4 tokens after merging."""
    tokens = torch.randint(20, VOCAB, (2, LENGTH), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens.clone(), "mm_token_type_ids": torch.zeros_like(tokens, dtype=torch.int)}
    if image:
        tokens[:, 1] = VISION_START
        tokens[:, 2:6] = IMAGE_TOKEN
        batch["mm_token_type_ids"][:, 2:6] = 1
        batch["pixel_values"] = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 4]] * 2)
    return batch


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator, bool], Batch], str]] = {
    "llava": (llava, llava_batch, "model.vision_tower"),
    "qwen2_5_vl": (qwen2_5_vl, qwen_batch, "model.visual"),
    "qwen3_vl": (qwen3_vl, qwen_batch, "model.visual"),
}
