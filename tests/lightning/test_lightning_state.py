"""What Lightning puts into a checkpoint beside the weights comes back: loops, callbacks, hyper-parameters, schedules, data modules."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support import ranks

pytest.importorskip("lightning", reason="Lightning is not installed (extra: lightning)")

BATCHES = 4
HYPER_PARAMETERS = {
    "width": 8,
    "betas": (0.9, 0.99),
    "names": ["a", None],
    "nested": {"lr": 1e-2, "dtype": torch.bfloat16, 3: "three"},
    "path": Path("data"),
}


def test_state_of_lightning_comes_back(tmp_path: Path) -> None:
    ranks.run_ranks(check_state, 2, str(tmp_path), group=False)


def test_hyper_parameters_that_need_pickle_are_refused_by_name(tmp_path: Path) -> None:
    ranks.run_ranks(check_refusal, 2, str(tmp_path), group=False)


def make(folder: str, steps: int, **more: Any) -> tuple[Any, Any, Any, Any]:
    """Trainer, module, data module and the callback of the test's own."""
    import lightning
    from lightning.pytorch import callbacks

    from hf_zero.integrations import ZeroStrategy

    class Own(callbacks.Callback):
        """Every kind of value that a callback may keep."""

        def __init__(self) -> None:
            self.kept: dict[str, Any] = {}

        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            self.kept = {
                "draws": np.random.default_rng(3).normal(size=(2, 3)),
                "python": random.Random(4).getstate(),
                "torch": torch.Generator().manual_seed(5).get_state(),
                "recent": deque([1.5, float("inf")], maxlen=3),
                "counts": Counter({"x": 2}),
                "ordered": OrderedDict([((1, "a"), {2, 3})]),
                "took": timedelta(seconds=2),
                "average": {"weight": torch.arange(6.0).bfloat16().reshape(2, 3)},
                "step": np.int64(7),
            }

        def state_dict(self) -> dict[str, Any]:
            return self.kept

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.kept = state_dict

    class Data(lightning.LightningDataModule):
        """Counts what it has given."""

        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"shards": ("a", "b")})
            self.given = 0

        def train_dataloader(self) -> Any:
            rows = torch.randn(BATCHES, 8, generator=torch.Generator().manual_seed(0))
            return torch.utils.data.DataLoader(list(rows), batch_size=1)

        def state_dict(self) -> dict[str, Any]:
            return {"given": self.given, "order": [1, (2,)]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.given = state_dict["given"]
            assert state_dict["order"] == [1, (2,)]

    class Module(lightning.LightningModule):
        """One linear layer; keeps something of its own in the checkpoint."""

        def __init__(self, **hyper_parameters: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(8, 8)
            self.own: Any = None
            self.seen: dict[str, Any] = {}

        def training_step(self, batch: Any, index: int) -> Any:
            self.trainer.datamodule.given += 1
            loss = self.layer(batch).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = {"ema": torch.full((3,), 0.5, dtype=torch.float64), "when": (1, "a")}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = dict(checkpoint)

    own = Own()
    kept = callbacks.ModelCheckpoint(f"{folder}/all", "{step}", monitor="loss", save_top_k=2, every_n_train_steps=1, save_last=True)
    stop = callbacks.EarlyStopping("loss", patience=50, check_on_train_epoch_end=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ZeroStrategy(stage=2),
        default_root_dir=folder,
        max_steps=steps,
        callbacks=[own, kept, stop, callbacks.Timer(duration=timedelta(hours=1))],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    return trainer, Module(**HYPER_PARAMETERS, **more), Data(), own


def check_state(folder: str) -> None:
    trainer, module, data, own = make(folder, 3)
    trainer.fit(module, datamodule=data)
    path = f"{folder}/whole"
    trainer.save_checkpoint(path)
    expected = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    assert not [file for file in Path(path).rglob("*") if file.suffix in (".pt", ".pth", ".pkl", ".bin")]

    again, fresh, more_data, more_own = make(folder, 5)
    again.fit(fresh, datamodule=more_data, ckpt_path=path, weights_only=False)
    seen = fresh.seen
    for key in ("loops", "callbacks", "hyper_parameters", "datamodule_hyper_parameters", "lr_schedulers", "own", "epoch", "global_step"):
        assert key in seen and same(seen[key], expected[key]), (key, seen.get(key), expected.get(key))
    assert same(more_own.kept, own.kept)
    assert same(seen["hyper_parameters"], HYPER_PARAMETERS)
    assert more_data.given == 5 and again.global_step == 5
    assert fresh.lr_schedulers().last_epoch == 5
    trainer.model.destroy()
    again.model.destroy()


def check_refusal(folder: str) -> None:
    trainer, module, data, _ = make(folder, 1, activation=nn.functional.gelu)
    trainer.callbacks = [callback for callback in trainer.callbacks if type(callback).__name__ != "ModelCheckpoint"]
    trainer.fit(module, datamodule=data)
    with pytest.raises(Exception, match=r"client_state\['hyper_parameters'\]\['activation'\] is a "):
        trainer.save_checkpoint(f"{folder}/refused")
    assert not list(Path(folder).rglob("*.safetensors"))
    trainer.model.destroy()


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, bit for bit, at every depth."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)
