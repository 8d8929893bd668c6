"""Folders of ZeRO for ``load_from_checkpoint``, and one file of DDP at every stage: modules, buffers and training as under DDP."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ranks

pytest.importorskip("lightning", reason="Lightning is not installed (extra: lightning)")


@pytest.mark.parametrize(("stage", "averages"), [(3, False), (2, True), (1, False)])
def test_load_from_checkpoint_reads_a_folder(stage: int, averages: bool, tmp_path: Path) -> None:
    ranks.run_ranks(check_load_from_checkpoint, 2, str(tmp_path), stage, averages, group=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_fit_reads_a_file_and_a_folder_at_every_stage(stage: int, tmp_path: Path) -> None:
    ranks.run_ranks(check_both_kinds, 2, str(tmp_path), stage, group=False)


@pytest.mark.parametrize("stage", [2, 3])
def test_fabric_reads_a_file_at_every_stage(stage: int, tmp_path: Path) -> None:
    ranks.run_ranks(check_fabric, 2, str(tmp_path), stage, group=False)


def test_a_second_fit_in_16_bit_says_that_masters_are_dropped(tmp_path: Path) -> None:
    ranks.run_ranks(check_second_fit, 2, str(tmp_path), group=False)


def test_fabric_returns_what_a_mock_of_an_engine_loads(tmp_path: Path) -> None:
    """Lightning's own tests, and those of its users, load with mocks; only a real engine adds its version to the remainder."""
    from unittest.mock import Mock

    from hf_zero.integrations import FabricZeroStrategy

    kind = importlib.import_module("deepspeed").DeepSpeedEngine
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "mp_rank_00_model_states.pt").touch()
    engine = Mock(spec=kind, optimizer=Mock())
    engine.modules.return_value = [engine]
    engine.load_checkpoint.return_value = (None, {"step": 5, "more": "data"})
    state = {"model": engine, "step": 0}
    assert FabricZeroStrategy().load_checkpoint(path=tmp_path, state=state) == {"more": "data"}
    assert state["step"] == 5


def rows_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)


class Net(nn.Module):
    """Layers of different sizes, one of which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 1)
        self.frozen.requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(rows)))))  # type: ignore[no-any-return]


def make_module_class() -> Any:
    """Return the class of a module with hyper-parameters, a buffer, a frozen and a tied weight, and entries of its own."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, width: int, name: str = "none") -> None:
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(width)
            self.net, self.tied = Net(), nn.Linear(6, width)
            self.tied.weight = self.net.first.weight
            self.register_buffer("count", torch.zeros(2))
            self.register_buffer("scale", torch.rand(()) + 0.5)
            self.loaded: Any = None

        def training_step(self, batch: Any, index: int) -> Tensor:
            self.count += 1
            return (self.net(batch[0]) * self.scale - batch[1]).square().mean() + self.tied(batch[0]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([rows_of(step, ranks.rank()) for step in range(3)], batch_size=None)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = {"words": ["a", "b"], "values": torch.arange(3.0)}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.loaded = checkpoint["own"]["words"], checkpoint["own"]["values"].tolist(), checkpoint["global_step"]

    return Module


def ddp() -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy(find_unused_parameters=True)


def sharded(stage: int, **options: Any) -> Any:
    from hf_zero.integrations import ZeroStrategy

    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}}
    return ZeroStrategy(config=config, **options)


def make_trainer(folder: str, strategy: Any, epochs: int, **options: Any) -> Any:
    import lightning

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, default_root_dir=folder, use_distributed_sampler=False,
        **quiet, **options,
    )  # fmt: skip


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def check_load_from_checkpoint(folder: str, stage: int, averages: bool) -> None:
    """A folder gives the module that a file of DDP gives, from the same call."""
    kind, found = make_module_class(), []
    for number, strategy in enumerate((ddp(), sharded(stage))):
        kept = []
        if averages:
            module = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="Lightning before 2.6")
            kept = [module.EMAWeightAveraging(decay=0.5)]
        trainer = make_trainer(folder, strategy, 1, callbacks=kept)
        trainer.fit(kind(7, name="x"))
        path = Path(folder) / f"{number}.ckpt"
        trainer.save_checkpoint(path)
        found.append(kind.load_from_checkpoint(path, map_location=lambda storage, place: storage, name="y", weights_only=False))
    expected, loaded = found
    assert path.is_dir() and dict(loaded.hparams) == dict(expected.hparams) == {"width": 7, "name": "y"}
    assert loaded.loaded == expected.loaded == (["a", "b"], [0.0, 1.0, 2.0], 3)
    assert loaded.tied.weight is loaded.net.first.weight
    same(loaded.state_dict(), expected.state_dict())


def check_both_kinds(folder: str, stage: int) -> None:
    """With ``load_full_weights`` a fit continues a file of DDP and a folder: weights, buffers of each rank, and optimizer."""
    from hf_zero.zero import GatheredParameters

    def fit(strategy: Any, epochs: int, seed: int, path: Any = None) -> tuple[Any, dict[str, Tensor]]:
        module = make_module_class()(7)
        if seed:
            with torch.no_grad():
                for value in (*module.parameters(), module.scale):
                    value.mul_(0.5)
        trainer = make_trainer(folder, strategy, epochs)
        trainer.fit(module, ckpt_path=path, weights_only=False)
        with GatheredParameters(list(module.parameters())):
            return trainer, {name: value.detach().clone() for name, value in (*module.named_parameters(), *module.named_buffers())}

    trainer, _ = fit(ddp(), 1, 0)
    trainer.save_checkpoint(f"{folder}/file.ckpt")
    _, expected = fit(ddp(), 2, 0, f"{folder}/file.ckpt")
    trainer, found = fit(sharded(stage, load_full_weights=True), 2, 1, f"{folder}/file.ckpt")
    same(found, expected)
    trainer.save_checkpoint(f"{folder}/folder.ckpt")
    _, expected = fit(ddp(), 3, 0, f"{folder}/file.ckpt")
    _, found = fit(sharded(stage, load_full_weights=True), 3, 1, f"{folder}/folder.ckpt")
    same(found, expected)
    content = torch.load(f"{folder}/file.ckpt", weights_only=False)
    del content["state_dict"]["net.last.bias"]
    content["state_dict"]["net.frozen.bias"] = torch.zeros(5)
    if ranks.rank() == 0:
        torch.save(content, f"{folder}/other.ckpt")
    trainer.strategy.barrier()
    with pytest.raises(RuntimeError, match=r'(?s)Missing key\(s\) in state_dict: "net.last.bias".*size mismatch for net.frozen.bias'):
        fit(sharded(stage, load_full_weights=True), 2, 1, f"{folder}/other.ckpt")


def check_fabric(folder: str, stage: int) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from hf_zero.integrations import FabricZeroStrategy
    from hf_zero.zero import GatheredParameters

    def train(strategy: Any, start: str = "", end: str = "") -> dict[str, Tensor]:
        torch.manual_seed(3)
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        net = Net()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if start:
            assert fabric.load(start, state)["more"] == "kept"
        for step in range(state["step"], state["step"] + 2):
            rows, wanted = rows_of(step, ranks.rank())
            fabric.backward((model(rows) - wanted).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if end:
            fabric.save(end, {**state, "step": 2, "more": "kept"})
        with GatheredParameters(list(net.parameters())):
            return {name: value.detach().clone() for name, value in net.named_parameters()}

    path, another = f"{folder}/file.ckpt", f"{folder}/folder.ckpt"
    train(DDPStrategy(), end=path)
    zero = {"config": {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}, "load_full_weights": True}
    expected = train(DDPStrategy(), path)
    same(train(FabricZeroStrategy(**zero), path), expected)
    train(FabricZeroStrategy(**zero), end=another)
    same(train(FabricZeroStrategy(**zero), another), expected)


def check_second_fit(folder: str) -> None:
    """A fit that restores a checkpoint has its masters, and so has one in fp32; any other one warns, also after a validation."""
    import logging

    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero").addHandler(handler)
    warned = []
    for precision, ways in (("32-true", ["plain"]), ("bf16-mixed", ["path", "validated"])):
        for way in ways:
            module, options = make_module_class()(7), {}
            trainer = make_trainer(folder, sharded(2), 1, precision=precision)
            trainer.fit(module)
            if way == "path":
                trainer.save_checkpoint(f"{folder}/x.ckpt")
                options = {"ckpt_path": f"{folder}/x.ckpt", "weights_only": False}
            if way == "validated":
                type(module).validation_step = lambda self, batch, index: self.log("held", self.net(batch[0]).mean(), sync_dist=True)
                trainer.validate(module, torch.utils.data.DataLoader([rows_of(5, ranks.rank())], batch_size=None), verbose=False)
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, **options)
            warned.append(sum("the fp32 masters of its earlier fit were dropped" in text for text in texts))
    assert warned == [0, 0, int(ranks.rank() == 0)]
