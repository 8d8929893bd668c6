"""``LightningModule.clip_gradients`` clips as under DistributedDataParallel; Lightning's DeepSpeed precision leaves it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support import ranks

pytest.importorskip("lightning")

CLIP = 0.05


def make_module(manual: bool, algorithm: str = "norm") -> Any:
    import lightning

    class Module(lightning.LightningModule):
        """A small network that clips by itself: in its own loop, or in ``configure_gradient_clipping``."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            self.losses: list[float] = []

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            if self.automatic_optimization:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, CLIP, algorithm)
            optimizer.step()
            return None

        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
            self.clip_gradients(optimizer, CLIP, algorithm)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=1.0)

    return Module()


def train(module: Any, folder: str, strategy: Any, samples: int, **options: Any) -> list[float]:
    """Return the losses of a fit of ``module`` on random data; ``options`` are the Trainer's."""
    import lightning

    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(samples, 4, generator=generator), torch.randn(samples, 2, generator=generator))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, default_root_dir=folder, **quiet, **options)
    trainer.fit(module, DataLoader(data, batch_size=2))
    return list(module.losses)


def fit(folder: str, strategy: Any, manual: bool, algorithm: str = "norm", accumulation: int = 1) -> list[float]:
    options = {"max_epochs": 1, "accumulate_grad_batches": accumulation}
    return train(make_module(manual, algorithm), folder, strategy, 24, **options)


def check_clipping(folder: str) -> None:
    from hf_zero.integrations import ZeroStrategy

    for manual, accumulation in ((True, 1), (False, 1), (False, 2)):
        expected = fit(folder, "ddp", manual, accumulation=accumulation)
        for stage in (0, 2, 3):
            found = fit(folder, ZeroStrategy(stage=stage), manual, accumulation=accumulation)
            assert found == pytest.approx(expected, rel=1e-5), f"manual {manual}, accumulation {accumulation}, stage {stage}"
        expected = fit(folder, "ddp", manual, "value", accumulation)
        found = fit(folder, ZeroStrategy(stage=2), manual, "value", accumulation)
        assert found == pytest.approx(expected, rel=1e-5), f"by value, manual {manual}, accumulation {accumulation}"


def fit_with_a_number(folder: str, strategy: Any, way: str) -> list[float]:
    """Return the losses of a fit whose Trainer has a number, and whose module, callback or engine decides by epoch which one counts."""
    import lightning

    by_engine = way == "engine" and strategy != "ddp"

    class Module(type(make_module(False))):  # type: ignore[misc]
        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
            if not by_engine and (way in ("first epoch", "larger") or self.current_epoch > 0):
                self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    class Changes(lightning.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if by_engine and trainer.current_epoch > 0:
                trainer.strategy.model.optimizer.clip_grad = 20 * CLIP
            elif way != "second epoch" and trainer.current_epoch > 0:
                trainer.gradient_clip_val = None if way == "first epoch" else 20 * CLIP

    return train(Module(), folder, strategy, 16, max_epochs=2, gradient_clip_val=CLIP, callbacks=[Changes()])


def check_numbers(folder: str) -> None:
    from hf_zero.integrations import ZeroStrategy

    for way, stage in (("second epoch", 3), ("first epoch", 2), ("larger", 0), ("engine", 1)):
        expected = fit_with_a_number(folder, "ddp", way)
        assert fit_with_a_number(folder, ZeroStrategy(stage=stage), way) == pytest.approx(expected, rel=1e-5), f"{way}, stage {stage}"


def test_the_number_of_the_trainer_counts_in_the_steps_that_the_module_clips(tmp_path: Path) -> None:
    ranks.run_ranks(check_numbers, 2, str(tmp_path), group=False)


def plain_module() -> Any:
    """Return the network in a module that leaves clipping to the Trainer."""
    import lightning

    class Module(type(make_module(False))):  # type: ignore[misc]
        configure_gradient_clipping = lightning.LightningModule.configure_gradient_clipping

    return Module()


def check_trainer_by_value(folder: str) -> None:
    from hf_zero.integrations import ZeroStrategy

    by_value = {"max_epochs": 1, "gradient_clip_val": CLIP, "gradient_clip_algorithm": "value"}
    expected = train(plain_module(), folder, "ddp", 16, **by_value)
    assert expected != pytest.approx(train(plain_module(), folder, "ddp", 16, **by_value | {"gradient_clip_algorithm": "norm"}), rel=1e-3)
    assert train(plain_module(), folder, ZeroStrategy(stage=3), 16, **by_value) == pytest.approx(expected, rel=1e-5)


def test_the_trainers_number_for_clipping_by_value_is_no_norm(tmp_path: Path) -> None:
    ranks.run_ranks(check_trainer_by_value, 2, str(tmp_path), group=False)


def test_clipping_of_the_module_is_that_of_ddp(tmp_path: Path) -> None:
    ranks.run_ranks(check_clipping, 2, str(tmp_path), group=False)
