"""Training loaders of data modules and modules: they are asked for only in a fit, and draw there what they draw under DDP."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from tests.support import ranks

pytest.importorskip("lightning", reason="Lightning is not installed (extra: lightning)")

BATCH = 2


def rows_of(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(12, 4, generator=generator), torch.randn(12, 1, generator=generator))


def parts_of(owner: str) -> tuple[Any, Any]:
    """Return a module and a data module, or a module that has the methods of a data module; ``setup`` makes the rows of its stage."""
    import lightning

    class Loaders:
        rows: dict[str, TensorDataset]

        def setup(self, stage: str) -> None:
            self.rows = {"fit": {"fit": rows_of(1), "validate": rows_of(2)}, "validate": {"validate": rows_of(2)}}.get(stage, {})
            if stage == "test":
                self.rows = {"test": rows_of(3)}

        def train_dataloader(self) -> Any:
            chosen, _ = random_split(self.rows["fit"], [8, 4])
            self.drawn = random.random(), float(numpy.random.rand())
            return DataLoader(chosen, batch_size=BATCH)

        def val_dataloader(self) -> Any:
            return DataLoader(self.rows["validate"], batch_size=BATCH)

        def test_dataloader(self) -> Any:
            return DataLoader(self.rows["test"], batch_size=BATCH)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.losses = nn.Linear(4, 1), list[float]()
            with torch.no_grad():
                self.layer.weight.fill_(0.1)

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = (nn.functional.dropout(self.layer(batch[0]), 0.2) - batch[1]).square().mean()
            self.losses.append(float(loss))
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("held", (self.layer(batch[0]) - batch[1]).square().mean(), sync_dist=True)

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    if owner == "data module":
        return Module(), type("Data", (Loaders, lightning.LightningDataModule), {})()
    return type("Both", (Loaders, Module), {})(), None


def used(folder: str, owner: str, strategy: Any) -> dict[str, Any]:
    """Validate, fit and test with one Trainer, and return all numbers."""
    import lightning

    lightning.seed_everything(5, verbose=False)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, default_root_dir=folder, num_sanity_val_steps=0, **quiet
    )
    module, data = parts_of(owner)
    before = trainer.validate(module, datamodule=data, verbose=False)
    trainer.fit(module, datamodule=data)
    drawn = (module if data is None else data).drawn
    size = getattr(trainer.model, "train_micro_batch_size_per_gpu", lambda: BATCH)()
    after = trainer.test(module, datamodule=data, verbose=False)
    return {"before": before, "losses": module.losses, "after": after, "drawn": drawn, "size": size}


def check_data(folder: str, owner: str, stage: int) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    from hf_zero.integrations import ZeroStrategy

    expected, found = (used(folder, owner, strategy) for strategy in (DDPStrategy(), ZeroStrategy(stage=stage)))
    assert found["size"] == BATCH and found["drawn"] == expected["drawn"]
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=1e-6)
    for name in ("before", "after"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("owner", "stage"), [("data module", 2), ("module", 3)])
def test_training_loaders_are_those_of_ddp(owner: str, stage: int, tmp_path: Path) -> None:
    ranks.run_ranks(check_data, 2, str(tmp_path), owner, stage, group=False)
