"""Trains tiny vision-language models over slices of sequences, images on some ranks only, and compares them with whole sequences.

python -m tests.sequence_parallel.vl_breadth                                  # over 2 ranks and over 4; writes the table of the page
python -m tests.sequence_parallel.vl_breadth LlavaForConditionalGeneration    # prints its row

Rank 0 loads rows with an image that lies across slices, and the last row padded; the others load text. Each group so trains on as many
batches as it has ranks, one with an image.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.sequence_parallel.compared import Compared, Losses, compare, measure_all, publish, published
from tests.support import ranks, zoo
from tests.support.sequences import loss_over_slices
from tests.tensor_parallel.breadth import perturb

RESULTS = Path(__file__).resolve().parents[1] / "data" / "vl_breadth.json"
START, STOP = "<!-- images: made by python -m tests.sequence_parallel.vl_breadth -->", "<!-- end of images -->"
WORLDS = (2, 4)
AFTER = 12  # text tokens behind an image
MULTIPLE = 8  # of the length of sequences

# Constraints that a field's name does not tell, by model type.
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "mistral3": {"vision_config": {"image_size": 32}},  # of one image of one token transformers drops the dimension
    "mistral_large4": {"vision_config": {"image_size": 32}},
    "paligemma": {"projection_dim": 32, "vision_config": {"projection_dim": 32}},
    "qwen2_5_vl": {"vision_config": {"fullatt_block_indexes": [1], "window_size": 32}},
    "vipllava": {"vision_feature_layers": [-1, -2]},
}
PLAIN = ("LlavaForConditionalGeneration",)  # take sizes of images, and need none


@dataclass
class Row(Compared):
    """One model over so many ranks."""

    world: int = 0


def build(name: str) -> nn.Module:
    """A tiny model of a class, weights by a fixed seed."""
    import transformers

    cls = getattr(transformers, name)
    kind = cls.config_class.model_type
    config = zoo.shrink(cls.config_class, {**zoo.OVERRIDES.get(kind, {}), **OVERRIDES.get(kind, {})})
    fit(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config).train()
    perturb(model)
    return model


def fit(config: Any) -> None:
    """Sizes of one part that follow from those of another: the tower's results, and sections of rotary embeddings of heads of 8."""
    text = config.get_text_config()
    vision: Any = getattr(config, "vision_config", None)
    if getattr(vision, "out_hidden_size", None) is not None:
        vision.out_hidden_size = text.hidden_size
    if getattr(vision, "deepstack_visual_indexes", None) is not None:
        vision.deepstack_visual_indexes = [0]
    if name_has_axes(config.model_type):
        text.rope_parameters = {**(getattr(text, "rope_parameters", None) or {}), **_ROPE}


def name_has_axes(kind: str) -> bool:
    """Whether a type of model counts time, height and width in its rotary embeddings."""
    return kind != "glm4v_moe" and kind.startswith(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm46v", "glm_ocr",
                            "cosmos3", "hunyuan_vl", "paddleocr"))  # fmt: skip


def media(model: nn.Module, generator: torch.Generator, images: int) -> dict[str, torch.Tensor]:
    """Pixels of images for a model, and what it takes beside them."""
    config: Any = model.config
    vision = getattr(config, "vision_config", config)
    names = inspect.signature(model.forward).parameters
    patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
    if "image_grid_thw" in names:
        merge = getattr(vision, "spatial_merge_size", 2)
        merge = merge if isinstance(merge, int) else 2
        channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None) or 3
        width = channels * getattr(vision, "temporal_patch_size", 1) * patch * patch
        found = {
            "pixel_values": torch.randn(images * 4 * merge * merge, width, generator=generator),
            "image_grid_thw": torch.tensor([[1, 2 * merge, 2 * merge]] * images),
        }
        return found | ({"image_merge_sizes": torch.tensor([merge] * images)} if "image_merge_sizes" in names else {})
    side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    several = name_of(model) in SEVERAL
    shape = (images, SEVERAL[name_of(model)], 3, side, side) if several else (images, 3, side, side)
    found = {"pixel_values": torch.randn(*shape, generator=generator)}
    return found | (
        {"image_sizes": torch.tensor([[side, side]] * images)} if "image_sizes" in names and name_of(model) not in PLAIN else {}
    )


SEVERAL = {"Idefics2ForConditionalGeneration": 1, "Idefics3ForConditionalGeneration": 1, "SmolVLMForConditionalGeneration": 1,
           "LlavaNextForConditionalGeneration": 2, "LlavaOnevisionForConditionalGeneration": 2}  # fmt: skip


def name_of(model: nn.Module) -> str:
    """The name of its class."""
    return type(model).__name__


def features(model: Any, pixels: dict[str, torch.Tensor]) -> int:
    """Number of tokens of one image."""
    owner = model if hasattr(model, "get_image_features") else model.model
    taken = inspect.signature(owner.get_image_features).parameters
    rows = len(pixels.get("image_grid_thw", pixels["pixel_values"]))
    with torch.no_grad():
        found = owner.get_image_features(**{name: value for name, value in pixels.items() if name in taken})
    found = getattr(found, "pooler_output", found)
    parts = list(found) if isinstance(found, (list, tuple)) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts) // rows


def batches(model: nn.Module, seed: int = 5) -> tuple[dict[str, Any], dict[str, Any]]:
    """A batch with an image in each row, and one of text."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = model.config
    token = next(getattr(config, name) for name in ("image_token_id", "image_token_index") if getattr(config, name, None) is not None)
    pixels = media(model, generator, 2)
    count = features(model, pixels)
    length = -(-(count + AFTER + 2) // MULTIPLE) * MULTIPLE
    found = []
    for image in (True, False):
        tokens = torch.randint(zoo.FIRST_TOKEN, zoo.VOCAB, (2, length), generator=generator)
        tokens[tokens == token] -= 1
        labels, mask = tokens.clone(), torch.ones_like(tokens)
        kinds = torch.zeros_like(tokens)
        if image:
            start = length - count - AFTER
            tokens[:, start : start + count] = token
            labels[:, start : start + count] = -100
            kinds[:, start : start + count] = 1
            opening = getattr(config, "vision_start_token_id", None)
            if isinstance(opening, int):
                tokens[:, start - 1] = opening
        mask[1, -3:] = 0
        labels[1, -3:] = -100
        batch: dict[str, Any] = {"input_ids": tokens, "labels": labels, "attention_mask": mask, **(pixels if image else {})}
        names = inspect.signature(model.forward).parameters
        batch |= {name: kinds for name in ("mm_token_type_ids", "token_type_ids") if name in names}
        found.append(batch)
    return found[0], found[1]


def measure(name: str) -> Row:
    """One model, on this rank of the group."""
    from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
    from hf_zero.sequence_parallel.batches import UlyssesSPDataLoaderAdapter

    row = Row(name, world=ranks.world())
    try:
        whole, divided = build(name), build(name)
        both = batches(whole)
    except Exception as error:  # noqa: BLE001 - to be told
        row.error = f"whole sequences end with {type(error).__name__}: {str(error).strip().splitlines()[0][:90] if str(error) else ''}"
        return row

    def expect() -> Losses:
        losses = []
        for place in range(ranks.world()):
            losses.append(whole(**both[min(place, 1)]).loss)
            losses[-1].backward()
        assert any(
            param.grad is not None and param.grad.any() for path, param in whole.named_parameters() if "vi" in path or "image" in path
        ), "the image does not matter"
        return losses

    def bind() -> Any:
        return None if row.error else UlyssesSPAttentionHF.register_with_transformers(divided, None, ranks.world(), 2)

    def train(state: Any) -> Losses:
        losses, group = [], state.get_sequence_parallel_group()
        for part in UlyssesSPDataLoaderAdapter([both[min(ranks.rank(), 1)]], ranks.rank(), group, ranks.world(), "cpu"):
            losses.append(loss_over_slices(divided, part, group))
            losses[-1].backward()
        return losses

    return compare(row, whole, divided, expect, bind, train)


def candidates() -> list[str]:
    """Every class of the mapping of image and text to text whose configuration names an image token."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = dict.fromkeys(
        name
        for value in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
        for name in ([value] if isinstance(value, str) else value)
    )
    return [name for name in names if hasattr(transformers, name) and "pixel_values" in inspect.signature(
        getattr(transformers, name).forward).parameters]  # fmt: skip


def main() -> None:
    """Measures, prints, and publishes if all were measured; models that do not train on one rank with such batches are left out."""
    found = []
    for world in WORLDS:
        names = sys.argv[1:] or candidates()
        found += measure_all(measure, names, lambda name, world=world: Row(name, world=world), world, 4, group_timeout=60.0)
    found = [row for row in found if not row.error.startswith("whole sequences end")]
    if not sys.argv[1:]:
        publish(found, RESULTS, table(found))


def saved() -> list[Row]:
    """The published results."""
    return published(Row, RESULTS)


def table(rows: list[Row]) -> str:
    """The generated part of the page."""
    exact = [row.name for row in rows if row.world == WORLDS[0] and row.exact]
    exact = [name for name in exact if all(row.exact for row in rows if row.name == name)]
    refused = {row.name: row.refused for row in rows if row.refused}
    lines = [
        START,
        f"{len(exact)} vision-language models, tiny, on {' and '.join(map(str, WORLDS))} gloo ranks, fp32, are exact (loss and every "
        "gradient, those of the",
        "tower too); rank 0 loads rows with an image that lies across slices, the others load text, and rows are padded:",
        "",
        ", ".join(sorted(name.removesuffix("ForConditionalGeneration") for name in exact)) + ".",
        *(["", "| refused | because |", "|---|---|"] if refused else []),
        *(f"| {name} | {told.removeprefix('sequence parallelism: ').replace('|', '/')} |" for name, told in sorted(refused.items())),
    ]
    return "\n".join([*lines, STOP])


if __name__ == "__main__":
    main()
