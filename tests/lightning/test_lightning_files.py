"""Files of one piece that Lightning's other strategies or plain scripts wrote: weights and optimizer state continue as under DDP."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ranks

pytest.importorskip("lightning", reason="Lightning is not installed (extra: lightning)")

ROWS = 4


@pytest.mark.parametrize("kind", ["adamw", "adamw in groups", "named", "late", "sgd", "adafactor", "offloaded", "adagrad"])
def test_fit_continues_the_optimizer_of_a_file_of_ddp(kind: str, tmp_path: Path) -> None:
    ranks.run_ranks(check_resume, 2, str(tmp_path), kind, group=False)


@pytest.mark.parametrize("kind", ["another class", "another group"])
def test_an_optimizer_that_does_not_fit_gives_one_warning(kind: str, tmp_path: Path) -> None:
    ranks.run_ranks(check_warning, 2, str(tmp_path), kind, group=False)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fabric_loads_plain_files_into_model_and_optimizer(stage: int, tmp_path: Path) -> None:
    ranks.run_ranks(check_raw, 2, str(tmp_path), stage, group=False)


class Net(nn.Module):
    """Layers of different sizes, one of which is frozen; ``late`` takes part in the second epoch only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.frozen, self.late, self.last = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 1)
        self.frozen.requires_grad_(False)

    def forward(self, rows: Tensor, late: bool = True) -> Tensor:
        hidden: Tensor = self.frozen(torch.tanh(self.first(rows)))
        return self.last(torch.tanh(self.late(hidden)) if late else hidden)  # type: ignore[no-any-return]


def rows_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 1, generator=generator)


def optimizer_of(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    params = list(module.parameters())
    if kind == "adamw in groups":
        weights, others = [param for param in params if param.ndim > 1], [param for param in params if param.ndim < 2]
        groups = [{"params": others[::-1], "weight_decay": 0.0, "lr": 2e-2}, {"params": weights[::-1]}]
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, amsgrad=True)
    if kind in ("sgd", "another class"):
        return torch.optim.SGD(params, lr=5e-2, momentum=0.9)
    if kind == "adafactor":
        return torch.optim.Adafactor(params, lr=1e-2)
    if kind == "adagrad":
        return torch.optim.Adagrad(params, lr=1e-2)
    if kind == "another group":
        return torch.optim.AdamW(params[:-1], lr=1e-2, eps=1e-3)
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def fit(folder: str, kind: str, sharded: bool, epochs: int, path: str | None = None) -> tuple[Any, dict[str, Tensor]]:
    """Train to the end of epoch ``epochs``; return the trainer and the whole weights."""
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    from hf_zero.integrations import ZeroStrategy
    from hf_zero.zero import GatheredParameters

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            rows, wanted = batch
            return (self.net(rows, kind != "late" or self.current_epoch > 0) - wanted).square().mean()

        def configure_optimizers(self) -> Any:
            return optimizer_of(kind, self)

        def train_dataloader(self) -> Any:
            batches = [rows_of(step, ranks.rank()) for step in range(3)]
            return torch.utils.data.DataLoader(batches, batch_size=None)

    strategy: Any = DDPStrategy(find_unused_parameters=True)
    if sharded:
        section: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
        if kind == "offloaded":
            section["offload_optimizer"] = {"device": "cpu"}
        config = {"zero_optimization": section, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        strategy = ZeroStrategy(config=config, load_full_weights=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = Module()
    trainer.fit(module, ckpt_path=path, **({"weights_only": False} if path else {}))
    with GatheredParameters(list(module.parameters())):
        return trainer, {name: param.detach().clone() for name, param in module.net.named_parameters()}


def name_parameters(path: str) -> None:
    """Replace the numbers of parameters in the file by names."""
    content = torch.load(path, weights_only=False)
    names = [f"net.{name}" for name, _ in Net().named_parameters()]
    (state,) = content["optimizer_states"]
    state["state"] = {names[number]: value for number, value in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [names[number] for number in group["params"]][::-1]
    torch.save(content, path)


def check_resume(folder: str, kind: str) -> None:
    trainer, _ = fit(folder, kind, False, 1)
    path = f"{folder}/x.ckpt"
    trainer.save_checkpoint(path)
    _, expected = fit(folder, kind, False, 3, path)
    if kind == "named":
        if ranks.rank() == 0:
            name_parameters(path)
        trainer.strategy.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again, found = fit(folder, kind, True, 3, path)
    assert not [one for one in caught if "optimizer state" in str(one.message)]
    assert again.global_step == 9
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{kind}: {name}: {text}")
    again.model.destroy()


def check_warning(folder: str, kind: str) -> None:
    import logging

    trainer, _ = fit(folder, "adamw", False, 1)
    path = f"{folder}/x.ckpt"
    trainer.save_checkpoint(path)
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again, found = fit(folder, kind, True, 2, path)
    texts += [str(one.message) for one in caught]
    said = [text for text in texts if "optimizer state was not loaded" in text]
    assert len(said) == (ranks.rank() == 0), texts
    assert again.global_step == 6
    assert again.optimizers[0].param_groups[0]["lr"] == (5e-2 if kind == "another class" else 1e-2)
    assert all(value.isfinite().all() for value in found.values())
    again.model.destroy()


def _trained_optimizer() -> torch.optim.Optimizer:
    """Return a plain optimizer of ``Net`` after three steps."""
    net = Net()
    optimizer = optimizer_of("adamw", net)
    for step in range(3):
        rows, wanted = rows_of(step, 0)
        (net(rows) - wanted).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def check_raw(folder: str, stage: int) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from hf_zero.integrations import FabricZeroStrategy
    from hf_zero.zero import GatheredParameters

    def train(strategy: Any, path: str, strict: bool) -> dict[str, Tensor]:
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        fabric.barrier()
        net = Net()
        model, optimizer = fabric.setup(net, optimizer_of("adamw", net))
        fabric.load_raw(path, model, strict=strict)
        fabric.load_raw(states, optimizer)
        for step in range(2):
            rows, wanted = rows_of(step, ranks.rank())
            fabric.backward((model(rows) - wanted).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        with GatheredParameters(list(net.parameters())):
            return {name: param.detach().clone() for name, param in net.named_parameters()}

    def sharded() -> Any:
        config = {"zero_optimization": {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}}
        return FabricZeroStrategy(config={**config, "zero_allow_untested_optimizer": True})

    weights = {name: value + 0.5 for name, value in Net().state_dict().items()}
    parts = {**{name: value for name, value in weights.items() if name != "late.bias"}, "other": torch.ones(2)}
    whole, partial, states = (f"{folder}/{name}.pt" for name in ("whole", "partial", "states"))
    if os.environ["RANK"] == "0":
        torch.save(_trained_optimizer().state_dict(), states)
        torch.save(weights, whole)
        torch.save(parts, partial)
    for path, strict in ((whole, True), (partial, False)):
        expected = train(DDPStrategy(), path, strict)
        found = train(sharded(), path, strict)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match=r'(?s)Missing key\(s\) in state_dict: "late.bias".*Unexpected key\(s\) in state_dict: "other"'):
        train(sharded(), partial, True)
