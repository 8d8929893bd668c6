"""Signals to the ranks of Lightning's Trainer: the batch at which they agree is saved; the resumed run is the one that never stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.support import ranks, signalled

pytest.importorskip("lightning", reason="Lightning is not installed (extra: lightning)")

STEPS, BATCHES = 5, 4


class Loader:
    """Batches that can be resumed in the middle of an epoch, as Lightning asks of loaders."""

    def __init__(self) -> None:
        self.rows = torch.randn(BATCHES, 3, 8, generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
        self.given = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Any:
        while self.given < BATCHES:
            self.given += 1
            yield self.rows[self.given - 1]
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def _fit(
    folder: str, to: dict[int, tuple[int, ...]], number: int = signal.SIGTERM, resume: str | None = None, slurm: bool = False
) -> tuple[Any, list[float]]:
    """The module after a training, and the first number of each batch; ``to``: ranks that get the signal in the middle of a batch."""
    import lightning
    from lightning.fabric.plugins.environments import SLURMEnvironment

    from hf_zero.integrations import ZeroStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers, self.seen = nn.Linear(8, 1), []

        def training_step(self, batch: Any, index: int) -> Any:
            signalled.send(*to.get(index, ()), number=number)
            self.seen.append(float(batch[0, 0]))
            return self.layers(batch).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", self.layers(batch).mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=ZeroStrategy(stage=2), max_steps=STEPS, default_root_dir=folder, logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, val_check_interval=2, num_sanity_val_steps=0,
        enable_checkpointing=False, plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR2)] if slurm else None,
    )  # fmt: skip
    module = Module()
    ended = signalled.preempted(lambda: trainer.fit(module, Loader(), Loader(), ckpt_path=resume))
    assert ended == bool(to)
    return module, module.seen


def _cases(folder: str) -> None:
    former = signal.getsignal(signal.SIGTERM)
    with signalled.new_process():
        whole, all_batches = _fit(folder, {})
    weights = whole.layers.weight.clone()
    for to in ((1,), (0, 1)):
        place = f"{folder}/{to}"
        with signalled.new_process():
            _, first = _fit(place, {1: to})
        assert signal.getsignal(signal.SIGTERM) is former
        with signalled.new_process():
            resumed, rest = _fit(place, {}, resume="hpc")
        assert len(first) == 2 and first + rest == all_batches
        assert torch.equal(resumed.layers.weight, weights)


@pytest.mark.slow  # fast: test_trainer_preemption.py: one mechanism
def test_a_resumed_run_is_the_whole_one(tmp_path: Path) -> None:
    ranks.run_ranks(_cases, 2, str(tmp_path), group=False)


def _slurm(folder: str) -> None:
    """Slurm's own signal: saved at the end of a batch, not inside the handler, and rank 0 has the job run again."""
    asked: list[list[str]] = []
    variables = {
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NAME": "job",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": os.environ["RANK"],
        "SLURM_NNODES": "1",
    }
    variables |= {"SLURM_LOCALID": os.environ["RANK"], "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "127.0.0.1"}
    target = "lightning.pytorch.trainer.connectors.signal_connector.call"
    with mock.patch.dict(os.environ, variables), signalled.new_process():
        with mock.patch(target, lambda command: asked.append(command) or 0):
            _fit(folder, {2: (1,)}, signal.SIGUSR2, slurm=True)
    assert asked == ([["scontrol", "requeue", "7"]] if os.environ["RANK"] == "0" else [])
    with mock.patch.dict(os.environ, variables), signalled.new_process():
        _, rest = _fit(folder, {}, slurm=True)  # found without being named
    assert len(rest) == STEPS - 3


@pytest.mark.slow
def test_slurm_runs_the_job_again(tmp_path: Path) -> None:
    ranks.run_ranks(_slurm, 2, str(tmp_path), group=False)
