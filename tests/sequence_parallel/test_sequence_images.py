"""Vision-language models over slices: images are whole on every rank of a group, and their features land in the right slices."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
from hf_zero.sequence_parallel.batches import UlyssesSPDataLoaderAdapter, is_medium
from tests.sequence_parallel import loops
from tests.sequence_parallel.compared import PAGE, each_of
from tests.sequence_parallel.vl_breadth import START, STOP, WORLDS, batches, build, measure, saved, table
from tests.support import multimodal, parity, ranks, zoo
from tests.support.models import Batch
from tests.support.parity import Run
from tests.support.sequences import Data, Result, compare, loss_over_slices
from tests.support.trainers import clean_state

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


@pytest.mark.fast_rows("qwen3_vl-3-2")
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


@pytest.mark.slow  # fast: `test_training_with_images_on_some_ranks`
def test_some_are_what_was_published() -> None:
    assert [row.name for row in ranks.run_ranks(partial(each_of, measure), 2, SOME)[0] if not row.exact] == []


def by_trainer(folder: str, kind: str, sizes: dict[str, int]) -> list[float]:
    """Losses and norms that Trainer logs for a batch with images (or padded on the left) and one of text; on one rank without ``sizes``."""
    from accelerate.utils import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    with clean_state():
        if kind == "opt":  # counts positions by the mask
            model, data = zoo.build("OPTForCausalLM"), [Data(length=16, padding="left").batch(step) for step in range(2)]
            data = [{name: value for name, value in batch.items() if name != "position_ids"} for batch in data]
        else:  # counts them by images
            model = build("Qwen2_5_VLForConditionalGeneration")
            data = list(batches(model))
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=1, max_steps=2, learning_rate=0.0, logging_steps=1, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", seed=3, remove_unused_columns=False, deepspeed=loops.config(1, 1) if sizes else None,
            parallelism_config=ParallelismConfig(**sizes) if sizes else None,
        )  # fmt: skip
        trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=lambda rows: dict(rows[0]))  # type: ignore[arg-type]
        trainer.train()
        return [float(entry[name]) for entry in trainer.state.log_history if "loss" in entry for name in ("loss", "grad_norm")]


def by_trainers(folder: str, divided: bool) -> list[list[float]]:
    return [by_trainer(folder, kind, sizes if divided else {}) for kind, sizes in (("opt", {"cp_size": 2}), ("images", {"sp_size": 2}))]


def test_positions_in_trainer_are_those_of_the_model(tmp_path: Path) -> None:
    """Trainer copies batches to "cpu:0"; the copies must still be known as slices whose positions nobody has given."""
    expected = ranks.run_ranks(by_trainers, 1, str(tmp_path), False)[0]
    for found in ranks.run_ranks(by_trainers, 2, str(tmp_path), True):
        assert found == [pytest.approx(values, rel=5e-6) for values in expected]
