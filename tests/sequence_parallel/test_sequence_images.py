"""Vision-language models over slices: images are whole on every rank of a group, and their features land in the right slices."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
from hf_zero.sequence_parallel.batches import UlyssesSPDataLoaderAdapter, is_medium
from tests.sequence_parallel.compared import PAGE, each_of
from tests.sequence_parallel.vl_breadth import START, STOP, WORLDS, measure, saved, table
from tests.support import multimodal, parity, ranks
from tests.support.models import Batch
from tests.support.parity import Run
from tests.support.sequences import Result, compare, loss_over_slices

pytest.importorskip("transformers", minversion="5.20")

SOME = ["Gemma3ForConditionalGeneration", "Qwen3_5ForConditionalGeneration"]


def batch_of(kind: str, step: int, place: int) -> Batch:
    """What rank ``place`` of the group loads: an image on one of them, another in each step, and a padded row."""
    _, make, _ = multimodal.MODELS[kind]
    batch = make(torch.Generator().manual_seed(10 * step + place), place == step % ranks.world())
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, -3:] = 0
    batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


def trained(kind: str, stage: int) -> None:
    run, make, size = Run(stage=stage, clip=0.5, accumulation=ranks.world(), weight_decay=0.0), multimodal.MODELS[kind][0], ranks.world()
    expected, model = multimodal.seeded(make), multimodal.seeded(make)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=run.lr, betas=(0.9, 0.99), eps=run.eps, weight_decay=run.weight_decay)
    plain, mine = Result([], [], {}), Result([], [], {})
    for step in range(run.steps):
        losses = [multimodal.loss(expected, batch_of(kind, step, place)) for place in range(size)]
        torch.stack(losses).mean().backward()
        plain.norms.append(float(torch.nn.utils.clip_grad_norm_(expected.parameters(), run.clip)))
        optimizer.step()
        optimizer.zero_grad()
        plain.losses.append(float(torch.stack(losses).mean().detach()))
    plain.weights = {name: value.detach().float() for name, value in expected.state_dict().items()}
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, None, size, 2)
    assert mpu is not None
    engine = hf_zero.initialize(model=model, config=run.config(), mpu=mpu)[0]
    group = mpu.get_sequence_parallel_group()
    for step in range(run.steps):
        found = []
        for part in UlyssesSPDataLoaderAdapter([batch_of(kind, step, ranks.rank())], ranks.rank(), group, size, "cpu"):
            loss = loss_over_slices(engine, part, group)
            found.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        mine.losses.append(parity.mean_over_ranks(found))
        mine.norms.append(parity.as_float(engine.get_global_grad_norm()))
    mine.weights = {name: value.float() for name, value in (engine._consolidated_16bit_state_dict() or {}).items()}
    compare(mine, plain, f"{kind} at stage {stage}", factor=5.0)


@pytest.mark.parametrize(("kind", "stage", "world"), [("llava", 0, 2), ("qwen3_vl", 3, 2), ("qwen2_5_vl", 3, 4)])
def test_training_with_images_on_some_ranks(kind: str, stage: int, world: int) -> None:
    ranks.run_ranks(trained, world, kind, stage)


def given() -> list[tuple[int, ...]]:
    batch = {"input_ids": torch.arange(8)[None], **({"pixel_values": torch.ones(3, 2, 2)} if ranks.rank() == 1 else {})}
    slices = UlyssesSPDataLoaderAdapter([batch], ranks.rank(), dist.group.WORLD, 2, "cpu")  # type: ignore[arg-type]
    return [tuple(part["pixel_values"].shape) if "pixel_values" in part else () for part in slices]


def test_pixels_reach_all_ranks_whole() -> None:
    assert ranks.run_ranks(given, 2) == [[(), (3, 2, 2)]] * 2
    assert is_medium("image_grid_thw") and not is_medium("input_ids") and not is_medium("mm_token_type_ids")


def test_published_results_are_on_the_page() -> None:
    rows = saved()
    for world in WORLDS:
        assert sum(row.exact for row in rows if row.world == world) >= 20
    assert [row for row in rows if not (row.exact or row.refused)] == []
    assert table(rows) == START + PAGE.read_text(encoding="utf-8").split(START)[1].split(STOP)[0] + STOP


def test_some_are_what_was_published() -> None:
    assert [row.name for row in ranks.run_ranks(partial(each_of, measure), 2, SOME)[0] if not row.exact] == []
