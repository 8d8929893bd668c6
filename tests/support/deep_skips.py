"""Models with many blocks of which ranks skip some: more gathers and reductions are in flight than in models of two to four blocks.

These are jobs of ranks, for every device (``tests/support/device_jobs.py`` lists them).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.support import multimodal, ranks
from tests.support.models import CASES, Batch
from tests.support.parity import Run, check_training
from tests.support.skipped_blocks import Chosen, TwoTowers, loss_of_choice

TOWER, TEXT, EXPERTS = 12, 8, 16


def _in_turns(step: int, micro: int, rank: int) -> list[int]:
    """Return a choice with pixels on one rank only, another rank each time."""
    return [0] if (step + micro + rank) % 2 else []


def _own_order(step: int, micro: int, rank: int) -> list[int]:
    """Return half of the experts, a different half in a different order on each rank."""
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
    return order[: EXPERTS // 2].tolist()


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int, int], list[int]]]] = {
    "towers": (lambda: TwoTowers(TOWER, TEXT), _in_turns),
    "experts": (lambda: Chosen(blocks=EXPERTS), _own_order),
}


def skipped_blocks() -> None:
    """Train towers that ranks skip in turns, and experts in a different order per rank, at the stages that reduce in backward."""
    for kind, (model, choice) in KINDS.items():

        def build(model: Callable[[], nn.Module] = model) -> nn.Module:
            torch.manual_seed(0)
            return model()

        def feed(step: int, micro: int, rank: int, choice: Callable[[int, int, int], list[int]] = choice) -> Batch:
            chosen = choice(step, micro, rank)
            return {**CASES["mlp"].rows(step, micro, rank), "choice": torch.tensor(chosen, dtype=torch.long)}

        for stage in (1, 2, 3):
            check_training(build, feed, loss_of_choice, Run(stage, accumulation=2, clip=0.1), label=f"{kind}, stage {stage}")


def images_on_some_ranks() -> None:
    """Train LLaVA with ten vision and eight text blocks, where some micro-steps of a rank have an image."""
    feed = multimodal.feed_of(multimodal.llava_batch)

    def on_device(step: int, micro: int, rank: int) -> Batch:
        return {name: value.to(ranks.device()) for name, value in feed(step, micro, rank).items()}

    for stage in (2, 3):
        check_training(
            lambda: multimodal.seeded(_llava),
            on_device,
            multimodal.loss,
            Run(stage, accumulation=2, clip=0.1),
            label=f"llava, stage {stage}",
        )


def _llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    size, pixels = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}, multimodal.PIXELS
    vision = CLIPVisionConfig(num_hidden_layers=10, image_size=pixels, patch_size=pixels // 2, **size)
    text = LlamaConfig(**{**multimodal.TEXT, "num_hidden_layers": TEXT})
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=multimodal.IMAGE_TOKEN, vision_feature_layer=-1)
    )
