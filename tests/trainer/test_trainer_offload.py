"""Trainer and Accelerator with an offloading configuration: the same logs and weights as without, and swap files that go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ranks, trainers


def _trainer(models: Path, folder: Path) -> None:
    with trainers.clean_state():
        expected = trainers.train_with(models, folder, trainers.zero_config(3))
        for stage in (2, 3):
            blocks: dict[str, Any] = {"offload_optimizer": {"device": "nvme", "nvme_path": str(folder / "nvme"), "pipeline_read": True}}
            if stage == 3:
                blocks = {
                    "offload_optimizer": {"device": "cpu", "pin_memory": True},
                    "offload_param": {"device": "cpu", "pin_memory": True},
                }
            offloaded = trainers.zero_config(stage)
            offloaded["zero_optimization"].update(blocks)
            trainer = trainers.train_with(models, folder, offloaded)
            trainers.assert_close(trainers.logs_of(expected), trainers.logs_of(trainer), f"stage {stage}")
            trainers.assert_same_weights(trainers.weights_of(expected.model), trainers.weights_of(trainer.model), f"stage {stage}")
            torch.distributed.barrier()
            assert len(list((folder / "nvme").iterdir())) == (2 if stage == 2 else 0), "one folder per rank"
            torch.distributed.barrier()
            trainer.deepspeed.destroy()
        torch.distributed.barrier()
        assert not list((folder / "nvme").iterdir())


@pytest.mark.slow  # fast: `test_the_plugin_offloads_with_the_native_adam`, test_parity_offload.py
def test_trainer_logs_and_learns_the_same(trainer_models: Path, tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    ranks.run_ranks(_trainer, 2, trainer_models, tmp_path)


def _accelerator(models: Path, offload: str) -> tuple[str, list[float]]:
    from accelerate import Accelerator

    from hf_zero import ZeroPlugin

    with trainers.clean_state():
        plugin = ZeroPlugin(stage=2, offload_optimizer=offload, gradient_clipping=1.0, mixed_precision="bf16")
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
        accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16")
        model = trainers.load(models, "gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        losses = []
        for step in range(3):
            ids = torch.randint(7, trainers.VOCAB, (2, 8), generator=torch.Generator().manual_seed(2 * step + ranks.rank()))
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        return type(model.optimizer.inner).__name__, losses


def test_the_plugin_offloads_with_the_native_adam(trainer_models: Path) -> None:
    """accelerate puts DeepSpeed's host Adam in place of the user's, which is the native one here."""
    for (plain_kind, plain), (kind, losses) in zip(
        ranks.run_ranks(_accelerator, 2, trainer_models, "none"), ranks.run_ranks(_accelerator, 2, trainer_models, "cpu"), strict=True
    ):
        assert (plain_kind, kind) == ("AdamW", "DeepSpeedCPUAdam")
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain), rtol=1e-3, atol=1e-3)
