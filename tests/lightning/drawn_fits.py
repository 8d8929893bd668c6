"""A fit of Lightning's Trainer with drawn options: its module, callbacks and loaders, and all that a user sees of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn

from tests.lightning import drawn_parts as parts
from tests.lightning.drawn_options import Drawn

SEEN = ("loss", "lr", "read", "hook", "norm")
CLIP = 0.1


class Kept(Logger):
    """A logger that keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.entries.append({**{key: float(value) for key, value in metrics.items()}, "step": float(step or 0)})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Ignore them."""


class Module(lightning.LightningModule):
    """A module whose hooks are those of the drawn options."""

    def __init__(self, run: Drawn, sharded: bool) -> None:
        super().__init__()
        if run["hyper"]:
            self.save_hyperparameters()
        self.run, self.sharded = run, sharded
        self.automatic_optimization = not run["manual"]
        self.net: Any = None if run["late"] else self._built()
        self.seen: dict[str, list[Any]] = {name: [] for name in SEEN}
        self.example = self.updates = 0

    def _built(self) -> nn.Module:
        net = parts.network_of(self.run)
        parts.freeze(self.run, net, self.sharded, wrapped=False)
        return net

    def configure_model(self) -> None:
        if self.net is None:
            self.net = self._built()

    def on_fit_start(self) -> None:
        parts.freeze(self.run, self.net, self.sharded, wrapped=True)

    def forward(self, rows: Tensor) -> Tensor:
        return self.net(rows)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        found = parts.optimizers_of(self.run, self.net)
        scheduler = parts.scheduler_of(self.run, found[0])
        if scheduler is None:
            return found
        interval = "step" if self.run["scheduler"] == "step" else "epoch"
        config = {"scheduler": scheduler, "interval": interval, "frequency": self.run["frequency"], "monitor": "val_loss"}
        return found, [config]

    # -- steps

    def training_step(self, batch: Any, index: int) -> Any:
        rows, labels = batch
        loss = parts.loss_of(self(rows), labels)
        self.seen["loss"].append(self._mean(loss))
        if self.run["logs"]:
            where = {"on_step": self.run["logs"] != "epoch", "on_epoch": self.run["logs"] != "step"}
            self.log("train_loss", loss, sync_dist=True, **where)
        if self.run["manual"]:
            return self._by_hand(batch, loss, index)
        if self.run["returns"] == "none" and index == 1:
            return None
        return {"loss": loss, "more": loss.detach()} if self.run["returns"] == "dict" else loss

    def _mean(self, value: Tensor) -> float:
        return float(self.trainer.strategy.reduce(value.detach().float().clone(), reduce_op="mean"))

    def _by_hand(self, batch: Any, loss: Tensor, index: int) -> None:
        kind = self.run["manual"]
        found: Any = self.optimizers()
        optimizers = found if isinstance(found, list) else [found]
        if kind == "closure":
            for optimizer in optimizers:

                def closure(optimizer: Any = optimizer) -> Tensor:
                    again = parts.loss_of(self(batch[0]), batch[1])
                    optimizer.zero_grad()
                    self.manual_backward(again)
                    return again

                optimizer.step(closure)
        else:
            every = 2 if kind == "accumulates" else 1
            for optimizer in optimizers:
                if kind == "toggles":
                    self.toggle_optimizer(optimizer)
                if kind != "accumulates":
                    optimizer.zero_grad()
            self.manual_backward(loss / every)
            if (index + 1) % every:
                return
            for optimizer in optimizers:
                if self.run["clip"]:
                    self._clip(optimizer)
                optimizer.step()
                optimizer.zero_grad()
                if kind == "toggles":
                    self.untoggle_optimizer(optimizer)
        schedulers: Any = self.lr_schedulers()
        if self.run["scheduler"] == "step":
            schedulers.step()
        elif self.run["scheduler"] and self.trainer.is_last_batch:
            schedulers.step(*([self.seen["loss"][-1]] if self.run["scheduler"] == "plateau" else []))

    def _clip(self, optimizer: Any) -> None:
        kind = self.run["clip"]
        self.clip_gradients(optimizer, 0.01 if kind == "hook value" else CLIP, "value" if kind == "hook value" else "norm")

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", parts.loss_of(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", parts.loss_of(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    # -- hooks

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.seen["lr"].append([group["lr"] for group in self.trainer.optimizers[0].param_groups])
        if self.trainer.global_step == self.updates:
            return
        self.updates = self.trainer.global_step
        run = self.run
        parts.freeze_between(run, self.net, self.updates)
        if run["change"] == "lr" and self.updates == 2:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] *= 0.5
        if run["change"] == "weights" and self.updates == 2:
            parts.shrink(self.net)
        if run["reads"] == "norms":
            self.seen["read"].append({name: float(value.norm()) for name, value in parts.weights_of(self.net).items()})
        if run["reads"] == "state":
            self.seen["read"].append({name: float(value.float().norm()) for name, value in self.state_dict().items()})


def _optimizer_step(self: Any, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
    optimizer.step(closure=closure)
    if self.trainer.global_step < 3:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (self.trainer.global_step + 1)


def _before_step(self: Any, optimizer: Any) -> None:
    if self.run["reads"] == "gradients":
        self.seen["hook"].append(parts.gradient_norms(self.net, self.sharded))
    else:
        from lightning.pytorch.utilities import grad_norm

        self.seen["hook"].append({name: float(value) for name, value in grad_norm(self.net, norm_type=2).items()})


def _backward(self: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    loss.backward()
    self.seen["hook"].append("backward")


def _zero_grad(self: Any, epoch: int, index: int, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=True)
    self.seen["hook"].append(index)


def _lr_scheduler_step(self: Any, scheduler: Any, metric: Any) -> None:
    scheduler.step() if metric is None else scheduler.step(metric)
    self.seen["hook"].append([group["lr"] for group in self.trainer.optimizers[0].param_groups])


def _after_backward(self: Any) -> None:
    self.seen["hook"].append(self.trainer.global_step)


def _configure_clipping(self: Any, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
    self._clip(optimizer)


HOOKS = {
    "optimizer_step": ("optimizer_step", _optimizer_step),
    "before step": ("on_before_optimizer_step", _before_step),
    "after backward": ("on_after_backward", _after_backward),
    "backward": ("backward", _backward),
    "zero_grad": ("optimizer_zero_grad", _zero_grad),
    "lr_scheduler_step": ("lr_scheduler_step", _lr_scheduler_step),
    "batch end": ("on_train_batch_start", lambda self, batch, index: -1 if index == 3 else None),
}


def module_class(run: Drawn) -> Any:
    """Return the class with the hook that the options name: Lightning looks at which methods a class overrides."""
    methods = dict([HOOKS[run["hook"]]] if run["hook"] else [])
    if run["clip"] in ("hook", "hook value") and not run["manual"]:
        methods["configure_gradient_clipping"] = _configure_clipping
    return type("Drawn", (Module,), methods)


class Finetuning(callbacks.BaseFinetuning):
    """Freeze the first layer, and train it from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net.first)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.first, optimizer, lr=1e-3)


def callbacks_of(run: Drawn, folder: Path) -> list[Any]:
    kind = run["callback"]
    found: list[Any] = []
    if run["resume"] or kind == "best":
        more = {"monitor": "val_loss", "save_top_k": 1} if kind == "best" else {"save_top_k": -1, "every_n_train_steps": 2}
        found.append(callbacks.ModelCheckpoint(folder / "all", "{step}", **more))
    if kind == "average":
        found.append(EMAWeightAveraging(decay=0.5))
    if kind == "swa":
        found.append(callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=1))
    if kind == "accumulation":
        found.append(callbacks.GradientAccumulationScheduler({0: 2, 1: 1}))
    if kind == "finetuning":
        found.append(Finetuning())
    if kind == "early":
        found.append(callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.5))
    if kind == "monitor":
        found.append(callbacks.LearningRateMonitor("step"))
    return found


def trainer_of(run: Drawn, folder: Path, sharded: bool, logger: Kept) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    unused = run["frozen"] in ("freezes", "unfreezes") or run["callback"] == "finetuning" or run["manual"] == "toggles"
    strategy = parts.strategy_of(run) if sharded else DDPStrategy(find_unused_parameters=unused)
    kept = callbacks_of(run, folder)
    options: dict[str, Any] = {"enable_checkpointing": any(isinstance(one, callbacks.ModelCheckpoint) for one in kept)}
    if run["clip"] in ("norm", "value"):
        options |= {"gradient_clip_val": CLIP if run["clip"] == "norm" else 0.01, "gradient_clip_algorithm": run["clip"]}
    if run["validation"] == "steps":
        options["val_check_interval"] = 2
    options |= {"max_epochs": run["epochs"]} if run["length"] == "epochs" else {"max_steps": 5}
    if run["limit"]:
        options["limit_train_batches"] = run["limit"]
    return lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, precision=run["precision"], default_root_dir=folder, logger=logger,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, callbacks=kept, num_sanity_val_steps=0,
        accumulate_grad_batches=run["accumulation"], use_distributed_sampler=run["loader"] != "no sampler", **options,
    )  # fmt: skip


def data_of(run: Drawn, rank: int) -> dict[str, Any]:
    train = parts.loader_of(run["rows"], 1, iterable=run["loader"] == "iterable", rank=rank)
    held = parts.loader_of(7, 2, train=False) if run["validation"] else None
    if run["loader"] != "data module":
        return {"train_dataloaders": train, "val_dataloaders": held}

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            return train

    if held is not None:
        Data.val_dataloader = lambda self: held  # type: ignore[method-assign,assignment]
    return {"datamodule": Data()}


def result_of(run: Drawn, folder: Path, sharded: bool) -> dict[str, Any]:
    """Fit, resume if the run says so, use the model; return everything that a user sees."""
    import os

    rank = int(os.environ["RANK"])
    lightning.seed_everything(3, verbose=False)
    logger, module = Kept(), module_class(run)(run, sharded)
    trainer = trainer_of(run, folder, sharded, logger)
    trainer.fit(module, **data_of(run, rank))
    if run["resume"]:
        place = folder / "all" / "step=2.ckpt"
        if run["resume"] == "starts again":
            logger, module = Kept(), module_class(run)(run, sharded)
            trainer = trainer_of(run, folder, sharded, logger)
        trainer.fit(module, **data_of(run, rank), ckpt_path=str(place), weights_only=False)
    found: dict[str, Any] = {**module.seen, "steps": trainer.global_step, "epoch": trainer.current_epoch, "logged": logger.entries}
    found["metrics"] = {key: float(value) for key, value in trainer.callback_metrics.items()}
    found["weights"] = parts.weights_of(module.net)
    held = parts.loader_of(7, 2, train=False)
    if run["after"] in ("test", "validate"):
        if run["after"] == "validate" and not run["validation"]:
            trainer.validate(module, held, verbose=False)
        found["after"] = getattr(trainer, run["after"])(module, held, verbose=False)
    elif run["after"] == "predict":
        found["after"] = trainer.predict(module, held)
    elif run["after"] == "twice":
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = run["epochs"] + 1, -1
        trainer.fit(module, **data_of(run, rank))
        found["after"] = parts.weights_of(module.net)
    elif run["after"] == "load_from_checkpoint":
        found["after"] = _loaded(run, folder, sharded, trainer)
    return found


def _loaded(run: Drawn, folder: Path, sharded: bool, trainer: Any) -> dict[str, Tensor]:
    """Save one checkpoint, convert a sharded one to one file, and load it into a module without Trainer."""
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    path = folder / "last.ckpt"
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    if sharded and trainer.is_global_zero:
        convert_zero_checkpoint_to_fp32_state_dict(path, folder / "whole.ckpt")
    trainer.strategy.barrier()
    loaded = module_class(run).load_from_checkpoint(
        folder / "whole.ckpt" if sharded else path, run={**run, "late": False}, sharded=sharded, weights_only=False
    )
    return {name: value.float() for name, value in loaded.net.named_parameters()}
