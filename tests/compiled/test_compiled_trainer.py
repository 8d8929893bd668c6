"""``torch_compile`` of Trainer and ``TorchDynamoPlugin`` of Accelerate: blocks are compiled once, and the numbers are those without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compiled.runs import LAYERS, Case, build, counts, reset, tokens_of
from tests.support import ranks
from tests.support.trainers import Logs, arguments, clean_state, logs_of, rows, zero_config


def _trained(folder: str, stage: int, resume: bool = False, **options: Any) -> tuple[Logs, tuple[int, int]]:
    """A training with evaluations and a checkpoint; the last batch of an evaluation is shorter."""
    from transformers import Trainer

    reset()
    with clean_state():
        args = arguments(
            Path(folder), zero_config(stage), save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, **options
        )
        trainer = Trainer(model=build(Case(stage, use_cache=True)), args=args, train_dataset=rows(32, 1), eval_dataset=rows(5, 2))
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
        return logs_of(trainer), counts()


def _all_of(folder: str, stage: int) -> list[tuple[Logs, tuple[int, int]]]:
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    plain = _trained(f"{folder}/plain", stage)
    return [plain, _trained(f"{folder}/compiled", stage, **compiled), _trained(f"{folder}/compiled", stage, resume=True, **compiled)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_trainer(stage: int, tmp_path: Path) -> None:
    (plain, none), (compiled, made), (resumed, again) = ranks.run_ranks(_all_of, 2, str(tmp_path), stage, timeout=400, group=False)[0]
    assert compiled == plain and none == (0, 0)
    assert resumed == plain[-len(resumed) :]
    assert made[1] == again[1] == 0
    assert made[0] <= 4 and again[0] <= 4  # training, evaluation, and its last batch, which makes sizes variable


def _prepared(stage: int, regional: bool | None) -> tuple[list[float], tuple[int, int]]:
    """A loop of Accelerate with ``ZeroPlugin``; ``regional`` is None without compilation."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    from hf_zero import ZeroPlugin

    reset()
    with clean_state():
        plugin = None if regional is None else TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
        accelerator = Accelerator(deepspeed_plugin=ZeroPlugin(stage=stage), dynamo_plugin=plugin)
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
        model = build(Case(stage))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses = []
        for step in range(4):
            tokens = tokens_of(step, 2, accelerator.process_index)
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, counts()


def _each_way(stage: int) -> list[tuple[list[float], tuple[int, int]]]:
    return [_prepared(stage, regional) for regional in (None, False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_accelerate(stage: int) -> None:
    (plain, none), (blocks, made), (regions, regional) = ranks.run_ranks(_each_way, 2, stage, timeout=400, group=False)[0]
    assert plain == blocks == regions and none == (0, 0)
    assert made == (1, 0) and regional[1] == 0
    assert regional[0] <= LAYERS + 4  # a graph for each module around the blocks
