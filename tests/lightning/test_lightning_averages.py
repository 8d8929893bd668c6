"""Averages of Lightning's ``WeightAveraging`` in checkpoints: they come back in a fit, and are evaluated, as under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ranks

pytest.importorskip("lightning", reason="Lightning is not installed (extra: lightning)")
pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="this version of Lightning has no WeightAveraging")

BATCHES = 3


@pytest.mark.parametrize("stage", [0, 2])
def test_averages_come_back_from_a_checkpoint(stage: int, tmp_path: Path) -> None:
    ranks.run_ranks(check_averages, 2, str(tmp_path), stage, group=False)


def test_masters_and_averages_come_back_in_bf16(tmp_path: Path) -> None:
    ranks.run_ranks(check_masters, 2, str(tmp_path), group=False)


def batch_of(index: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * index + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)


def make(folder: str, strategy: Any, epochs: int, averages: bool, precision: Any = "32-true", seed: int = 1) -> tuple[Any, Any]:
    """Make a Trainer that saves after each epoch, and a module with weights of ``seed``."""
    import lightning
    from lightning.pytorch import callbacks
    from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))

        def training_step(self, batch: Any, index: int) -> Tensor:
            rows, wanted = batch
            return (self.net(rows) - wanted).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.training_step(batch, index), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=5e-2, eps=1e-3)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([batch_of(index, ranks.rank()) for index in range(BATCHES)], batch_size=None)

        val_dataloader = train_dataloader

    found: list[Any] = [callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]
    if averages:
        found.append(EMAWeightAveraging(decay=0.5))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision=precision,
        max_epochs=epochs,
        limit_val_batches=0 if epochs else 1.0,
        callbacks=found,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    torch.manual_seed(seed)
    return trainer, Module()


def fit(folder: str, strategy: Any, epochs: int, averages: bool = True, path: str | None = None, precision: Any = "32-true") -> Any:
    """Train to the end of epoch ``epochs``; return the weights, in whose place the callback leaves the averages."""
    trainer, module = make(folder, strategy, epochs, averages, precision, seed=2 if path else 1)
    trainer.fit(module, ckpt_path=path, **({"weights_only": False} if path else {}))
    return {name: param.detach().clone() for name, param in module.net.named_parameters()}


def validated(folder: str, strategy: Any, path: str) -> float:
    trainer, module = make(folder, strategy, 0, True, seed=2)
    (result,) = trainer.validate(module, ckpt_path=path, verbose=False, weights_only=False)
    return float(result["val_loss"])


def check_averages(folder: str, stage: int) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    from hf_zero.integrations import ZeroStrategy

    results = []
    for name, strategy in (("ddp", DDPStrategy), ("zero", lambda: ZeroStrategy(stage=stage))):
        own, late = f"{folder}/{name}", f"{folder}/{name}-late"
        fit(own, strategy(), 1)
        resumed = fit(own, strategy(), 2, path=f"{own}/epoch=0.ckpt")
        fit(late, strategy(), 1, averages=False)
        began = fit(late, strategy(), 2, path=f"{late}/epoch=0.ckpt")
        results.append((resumed, began, validated(own, strategy(), f"{own}/epoch=0.ckpt")))
    (expected, expected_late, expected_loss), (resumed, began, loss) = results
    for name, value in expected.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(began[name], expected_late[name], rtol=1e-5, atol=1e-6)
        assert not torch.allclose(value, expected_late[name], rtol=1e-3)
    assert loss == pytest.approx(expected_loss, rel=1e-5)


def check_masters(folder: str) -> None:
    from hf_zero.integrations import ZeroStrategy

    whole = fit(f"{folder}/a", ZeroStrategy(stage=2), 2, precision="bf16-true")
    fit(f"{folder}/b", ZeroStrategy(stage=2), 1, precision="bf16-true")
    resumed = fit(f"{folder}/b", ZeroStrategy(stage=2), 2, path=f"{folder}/b/epoch=0.ckpt", precision="bf16-true")
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name
