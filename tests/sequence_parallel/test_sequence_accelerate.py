"""Sequence parallelism through accelerate and Trainer, with unchanged scripts: ParallelismConfig(sp_size=...)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.sequence_parallel.loops import ROWS, close, config, samples
from tests.support import parity, ranks, zoo
from tests.support.sequences import LENGTH, Result, build, compare, llama, loss_over_slices, mixtral
from tests.support.trainers import clean_state, rows

pytest.importorskip("accelerate", minversion="1.12")
pytest.importorskip("transformers", minversion="5.0")


def parallelism(size: int, data: int = 1, **handler: Any) -> Any:
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    settings = DeepSpeedSequenceParallelConfig(**{"sp_attn_implementation": "sdpa", **handler})
    return ParallelismConfig(sp_size=size, sp_backend="deepspeed", dp_shard_size=data, sp_handler=settings)


def hybrid() -> Any:
    """A model with layers of linear attention, which accelerate refuses under ``sp_size``."""
    return zoo.build("Qwen3NextForCausalLM")


def whole_loop(accumulation: int, size: int, world: int, length: int, make: Any, count: int) -> Result:
    """One process with whole sequences, in the order in which the groups train on the ranks' batches."""
    model = build(make)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    batches = list(DataLoader(samples(length)[-count:], batch_size=2))
    groups, losses, norms = world // size, [], []
    for micro in range(len(batches) // groups):
        turn, place = divmod(micro, size)
        for group in range(groups):
            loss = model(**batches[turn * world + group * size + place]).loss
            losses.append(float(loss.detach()))
            (loss / groups / accumulation).backward()
        if (micro + 1) % accumulation == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    means = [sum(losses[start : start + groups]) / groups for start in range(0, len(losses), groups)]
    return Result(means, norms, {name: value.detach() for name, value in model.state_dict().items()})


def loop(stage: int, accumulation: int, size: int, length: int, make: Any = llama, count: int = ROWS, factor: float = 1.0) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import send_to_device
    from deepspeed.utils import groups as sequence_groups

    with clean_state():
        world = ranks.world()
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(stage, accumulation)),
            gradient_accumulation_steps=accumulation,
            parallelism_config=parallelism(size, world // size),
        )
        model = build(make)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(length)[-count:], batch_size=2))
        assert model.train_batch_size() == 2 * accumulation * world // size
        assert model.sequence_parallel_size == size == sequence_groups._get_sequence_parallel_world_size()
        assert len(loader) == count // 2 // world * size
        group = sequence_groups._get_sequence_parallel_group()
        losses, norms = [], []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_over_slices(model, send_to_device(batch, model.device), group)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(parity.as_float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(parity.mean_over_ranks([float(loss.detach())]))
        state = model._consolidated_16bit_state_dict()
        expected = whole_loop(accumulation, size, world, length, make, count)
        compare(Result(losses, norms, state or {}), expected, f"stage {stage}", factor)
        accelerator.free_memory()


def both(stage: int, accumulation: int, length: int) -> None:
    loop(stage, accumulation, 2, length)
    loop(stage, accumulation, 2, length, hybrid, 8)


@pytest.mark.parametrize(("stage", "accumulation", "length"), [pytest.param(2, 1, LENGTH, marks=pytest.mark.slow), (3, 2, LENGTH - 1)])
def test_accelerate_loop_over_two_ranks(stage: int, accumulation: int, length: int) -> None:
    ranks.run_ranks(both, 2, stage, accumulation, length)


@pytest.mark.slow  # fast: `test_accelerate_loop_over_two_ranks`
@pytest.mark.parametrize(("stage", "size"), [(1, 2), pytest.param(3, 4, marks=pytest.mark.slow)])
def test_accelerate_loop_over_four_ranks(stage: int, size: int) -> None:
    ranks.run_ranks(loop, 4, stage, 2, size, LENGTH)


def trainer_run(folder: str, stage: int | None, size: int, resume: bool = False, experts: int = 0, **extra: Any) -> dict[str, list[float]]:
    """Losses and norms of a Trainer, and an evaluation; whole sequences without ``stage``, a mixture over ``experts`` ranks if not 0."""
    from transformers import Trainer, TrainingArguments

    with clean_state():
        for name in [name for name in os.environ if name.startswith("PARALLELISM_CONFIG_")]:
            del os.environ[name]
        accumulation = extra.get("gradient_accumulation_steps", 1)
        shared = {"expert_parallel": {"enabled": True, "autoep_size": experts}} if experts > 1 else {}
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, max_steps=6, learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True,
            disable_tqdm=True, seed=3, lr_scheduler_type="constant", save_strategy="steps", save_steps=3,
            deepspeed={**config(stage, accumulation), **shared} if stage is not None else None,
            parallelism_config=parallelism(size, ranks.world() // size) if size > 1 else None, **extra,
        )  # fmt: skip
        data = rows(20, 1, masked=accumulation == 1)
        trainer = Trainer(model=build(mixtral if experts else llama), args=args, train_dataset=data, eval_dataset=rows(32, 2, masked=False))
        trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3") if resume else None)
        history = trainer.state.log_history
        found = {name: [float(entry[name]) for entry in history if name in entry] for name in ("loss", "grad_norm")}
        found["eval_loss"] = [trainer.evaluate()["eval_loss"]]
        return found


@pytest.mark.fast_rows("2-3-2")
@pytest.mark.parametrize(("world", "stage", "accumulation"), [pytest.param(2, 1, 1, marks=pytest.mark.slow), (2, 3, 2), (4, 2, 1)])
def test_trainer_trains_and_evaluates_like_one_rank(tmp_path: Path, world: int, stage: int, accumulation: int) -> None:
    extra = {"gradient_accumulation_steps": accumulation}
    expected = ranks.run_ranks(_plain, 1, str(tmp_path / "whole"), accumulation)[0]
    for found in ranks.run_ranks(_over_slices, world, str(tmp_path / "slices"), stage, extra):
        close(found, expected)


@pytest.mark.slow  # fast: test_expert_trainer.py
def test_trainer_shares_experts_among_the_ranks_of_a_sequence(tmp_path: Path) -> None:
    """Long sequences of a mixture: slices of a sequence over the ranks that have its experts."""
    expected = ranks.run_ranks(_plain, 1, str(tmp_path / "whole"), 1, 1)[0]
    for found in ranks.run_ranks(_over_slices, 2, str(tmp_path / "slices"), 3, {"experts": 2}):
        close(found, expected)


def _plain(folder: str, accumulation: int, experts: int = 0) -> dict[str, list[float]]:
    return trainer_run(folder, None, 1, experts=experts, gradient_accumulation_steps=accumulation)


def _over_slices(folder: str, stage: int, extra: dict[str, Any]) -> dict[str, list[float]]:
    return trainer_run(folder, stage, ranks.world(), **extra)


def _twice(folder: str) -> list[float]:
    """Losses of a Trainer that trains again, with its model as it is; whole sequences on one rank."""
    from transformers import Trainer, TrainingArguments

    with clean_state():
        size = ranks.world()
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, max_steps=2, learning_rate=1e-2, logging_steps=1, report_to=[], use_cpu=True,
            disable_tqdm=True, save_strategy="no", deepspeed=config(1, 1),
            parallelism_config=parallelism(size) if size > 1 else None,
        )  # fmt: skip
        trainer = Trainer(model=build(llama), args=args, train_dataset=rows(20, 1))
        losses = []
        for _ in range(2):
            trainer.train()
            losses += [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
        return losses


@pytest.mark.slow  # fast: `test_trainer_trains_and_evaluates_like_one_rank`
def test_trainer_trains_again(tmp_path: Path) -> None:
    expected = ranks.run_ranks(_twice, 1, str(tmp_path))[0]
    assert len(expected) == 4
    for found in ranks.run_ranks(_twice, 2, str(tmp_path)):
        assert found == pytest.approx(expected, rel=2e-5)


def _resumed(folder: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    return trainer_run(folder, 2, 2), trainer_run(folder, 2, 2, resume=True)


@pytest.mark.slow  # fast: the same of test_context_accelerate.py
def test_trainer_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    whole, resumed = ranks.run_ranks(_resumed, 2, str(tmp_path))[0]
    assert resumed["loss"] == whole["loss"] and resumed["grad_norm"] == whole["grad_norm"] and resumed["eval_loss"] == whole["eval_loss"]
