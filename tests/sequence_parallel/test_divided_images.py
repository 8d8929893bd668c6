"""Images of a batch over the ranks of a group: each rank encodes a part, and gradients are those of one rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.errors import StateError, UnsupportedError
from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
from hf_zero.sequence_parallel.batches import UlyssesSPDataLoaderAdapter
from hf_zero.sequence_parallel.forward import bound_forwards
from hf_zero.sequence_parallel.images import parts_of
from hf_zero.sequence_parallel.masks import WholeMasks
from tests.support import multimodal, ranks
from tests.support.models import Batch
from tests.support.sequences import loss_over_slices

pytest.importorskip("transformers", minversion="5.20")

GRIDS = [[1, 4, 4], [1, 8, 4], [1, 4, 4]]  # two images in the first row, one in the second


def uneven(generator: torch.Generator) -> Batch:
    """Return a batch of Qwen2.5-VL with images of other sizes: 4, 8 and 4 tokens."""
    tokens = torch.randint(20, multimodal.VOCAB, (2, 24), generator=generator)
    for row, first, count in ((0, 2, 4), (0, 10, 8), (1, 5, 4)):
        tokens[row, first - 1] = multimodal.VISION_START
        tokens[row, first : first + count] = multimodal.IMAGE_TOKEN
    kinds = (tokens == multimodal.IMAGE_TOKEN).int()
    pixels = torch.randn(sum(t * h * w for t, h, w in GRIDS), 3 * 2 * 4 * 4, generator=generator)
    facts = {"pixel_values": pixels, "image_grid_thw": torch.tensor(GRIDS), "mm_token_type_ids": kinds}
    return {"input_ids": tokens, "labels": tokens.clone(), "attention_mask": torch.ones_like(tokens), **facts}


def encoded(kind: str, checkpointing: bool, times: int = 1) -> tuple[list[int], float]:
    """Return the rows of pixels that this rank's tower got in each call, and the largest difference of a gradient from one rank's."""
    make, batch_of, tower = multimodal.MODELS[kind]
    generator = torch.Generator().manual_seed(4)
    batch = uneven(generator) if kind == "qwen2_5_vl" else {**batch_of(generator, True), "attention_mask": torch.ones(2, 16).long()}
    plain, model = multimodal.seeded(make), multimodal.seeded(make)
    expected = multimodal.loss(plain, batch)
    expected.backward()
    if checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    for _ in range(times):
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, None, ranks.world(), 2)
    assert mpu is not None
    rows: list[int] = []
    model.get_submodule(tower).register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(args[0] if args else kwargs["pixel_values"])), with_kwargs=True
    )
    group = mpu.get_sequence_parallel_group()
    part = next(iter(UlyssesSPDataLoaderAdapter([batch], ranks.rank(), group, ranks.world(), "cpu")))
    loss = loss_over_slices(model, part, group)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    loss.backward()
    worst = 0.0
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        mine = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        dist.all_reduce(mine)
        whole = torch.zeros_like(other) if other.grad is None else other.grad
        worst = max(worst, float((mine / ranks.world() - whole).abs().max() / whole.abs().max().clamp(min=1e-3)))
    calls = len(rows)
    if ranks.rank() == 0:  # a script's own call, by one rank alone, is for all images
        facts = {name: batch[name] for name in ("pixel_values", "image_grid_thw") if name in batch}
        found: Any = model.get_image_features(**facts)  # type: ignore[operator]
        wanted: Any = plain.get_image_features(**facts)  # type: ignore[operator]
        for mine, other in zip(found.pooler_output, wanted.pooler_output, strict=True):
            torch.testing.assert_close(mine, other)
    return rows[:calls], worst


@pytest.mark.parametrize(
    ("kind", "world", "checkpointing", "rows"),
    [
        ("qwen2_5_vl", 2, False, [[16], [48]]),
        ("qwen2_5_vl", 4, True, [[16], [16], [32], [16]]),  # the second rank has no image of its own
        ("llava", 2, False, [[1], [1]]),
    ],
)
def test_each_rank_encodes_a_part_of_the_images(kind: str, world: int, checkpointing: bool, rows: list[list[int]]) -> None:
    found = ranks.run_ranks(encoded, world, kind, checkpointing)
    assert [mine for mine, _ in found] == rows
    assert max(worst for _, worst in found) < 2e-4


def test_a_model_that_is_prepared_again_is_divided_as_before() -> None:
    """The methods between layers, and those that encode images, belong to the second preparation; removing the first one leaves them."""
    found = ranks.run_ranks(encoded, 2, "qwen3_vl", False, 2)
    assert [mine for mine, _ in found] == [[16], [16]]
    assert max(worst for _, worst in found) < 2e-4


def ill_fitting() -> str:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    model = multimodal.seeded(multimodal.llava)
    UlyssesSPAttentionHF.register_with_transformers(model, None, ranks.world(), 2)
    forwards: Any = bound_forwards(model)
    result = BaseModelOutputWithPooling(pooler_output=torch.ones(2, 3 + ranks.rank(), 4))
    with pytest.raises(UnsupportedError) as raised:
        forwards._images._joined(result, "Padded.get_image_features", True)
    return str(raised.value)


def test_features_that_do_not_fit_together_are_one_error_on_all_ranks() -> None:
    first, second = ranks.run_ranks(ill_fitting, 2)
    assert first == second
    assert "got from Padded.get_image_features" in first
    assert "[2] rows of [3, 4]" in first
    assert "[2] rows of [4, 4]" in first


def fails_on_one_rank() -> str:
    """Return the error of a forward whose tower fails on rank 1 alone."""
    make, _, tower = multimodal.MODELS["qwen2_5_vl"]
    model = multimodal.seeded(make)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, None, ranks.world(), 2)
    assert mpu is not None

    def fail(*_: Any) -> None:
        if ranks.rank() == 1:
            raise ValueError("a corrupt image")

    model.get_submodule(tower).register_forward_pre_hook(fail)
    batch, group = uneven(torch.Generator().manual_seed(4)), mpu.get_sequence_parallel_group()
    part = next(iter(UlyssesSPDataLoaderAdapter([batch], ranks.rank(), group, ranks.world(), "cpu")))
    with pytest.raises((StateError, ValueError)) as raised:
        loss_over_slices(model, part, group)
    return str(raised.value)


def test_a_rank_whose_images_fail_is_named_on_the_others() -> None:
    other, own = ranks.run_ranks(fails_on_one_rank, 2)
    assert own == "a corrupt image"
    assert "get_image_features failed for the images of rank 1 of the group" in other and "ValueError: a corrupt image" in other


def test_arguments_of_masks_keep_older_names() -> None:
    """transformers renames arguments in a decorator, which a model's own code may still call by the older name."""

    def create(config: str, inputs_embeds: None, cache: str | None) -> tuple[str, str | None]:
        return config, cache

    @functools.wraps(create)
    def renaming(*args: Any, **kwargs: Any) -> Any:
        return create(*args, **{"cache" if name == "past_key_values" else name: value for name, value in kwargs.items()})

    masks = WholeMasks.__new__(WholeMasks)
    make = masks._whole("create_causal_mask", renaming)
    assert make("c", None, past_key_values=None) == make("c", None, None) == make("c", inputs_embeds=None, cache=None) == ("c", None)
    with pytest.raises(TypeError, match="cache"):
        make("c", None)


def test_parts_have_whole_images_and_about_the_same_number_of_rows() -> None:
    pixels, sizes = torch.zeros(5, 3, 2, 2), torch.ones(5, 2)
    parts = parts_of({"pixel_values": pixels, "image_sizes": sizes, "vision_feature_layer": [-1, -2]}, 2)
    assert parts is not None
    assert (parts.images, parts.rows, parts.kept) == ([(0, 2), (2, 5)], [(0, 2), (2, 5)], [2, 3])
    assert parts.cut(pixels, 1).shape == (3, 3, 2, 2)
    assert parts.cut([-1, -2], 1) == [-1, -2]
    grid = torch.tensor([[1, 8, 8], [1, 2, 2], [2, 2, 2], [1, 4, 4]])
    parts = parts_of({"pixel_values": torch.zeros(92, 6), "image_grid_thw": grid}, 3)
    assert parts is not None
    assert (parts.images, parts.rows, parts.kept) == ([(0, 1), (0, 1), (1, 4)], [(0, 64), (0, 64), (64, 92)], [0, 1, 3])
    assert parts.cut(grid, 2).tolist() == grid[1:].tolist()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"pixel_values": torch.zeros(1, 3, 2, 2)},
        {"pixel_values": torch.zeros(4, 3, 2, 2), "batch_num_images": torch.ones(2)},  # crops of images
        {"pixel_values": torch.zeros(9, 6), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 2]])},
    ],
)
def test_calls_whose_images_are_unknown_stay_whole(given: dict[str, Any]) -> None:
    assert parts_of(given, 2) is None
