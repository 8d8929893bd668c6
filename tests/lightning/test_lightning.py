"""Lightning's Trainer and Fabric on CPU ranks: the numbers of plain PyTorch, checkpoints and resume."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.errors import ConfigError, StateError
from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.parity import Run, mean_over_ranks, reference

pytest.importorskip("lightning", reason="Lightning is not installed (extra: lightning)")

STEPS = 4
EPOCH = 4  # batches: two steps
LR = 1e-2
AVERAGE_DECAY = 0.5
SHARD_ALL = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_trainer_trains_checkpoints_and_resumes(stage: int, tmp_path: Path) -> None:
    ranks.run_ranks(check_trainer, 2, str(tmp_path), stage, group=False)


@pytest.mark.fast_rows("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_fabric_trains_checkpoints_and_resumes(stage: int, tmp_path: Path) -> None:
    ranks.run_ranks(check_fabric, 2, str(tmp_path), stage, group=False)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_trainer_in_16_bit(precision: str, tmp_path: Path) -> None:
    ranks.run_ranks(check_precision, 2, str(tmp_path), precision, group=False)


def test_trainer_validates_tests_and_predicts_sharded(tmp_path: Path) -> None:
    ranks.run_ranks(check_evaluation, 2, str(tmp_path), group=False)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_weight_averaging(stage: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="Lightning before 2.6")
    ranks.run_ranks(check_averages, 2, str(tmp_path), stage, group=False)


def test_schedule_and_manual_optimization(tmp_path: Path) -> None:
    """Lightning steps the scheduler, once per step; in manual optimization the script calls backward and step."""
    ranks.run_ranks(check_manual, 2, str(tmp_path), group=False)


def test_arguments() -> None:
    from hf_zero.integrations import FabricZeroStrategy, ZeroStrategy

    strategy = ZeroStrategy(stage=3, offload_optimizer=True)
    zero = strategy.config["zero_optimization"]
    assert zero["stage"] == 3 and zero["offload_optimizer"] == {"device": "cpu"} and "offload_param" not in zero
    assert "aio" not in strategy.config and "activation_checkpointing" not in strategy.config
    strategy = ZeroStrategy(stage=3, offload_parameters="nvme", nvme_path="/tmp/x", cpu_checkpointing=True)
    assert strategy.config["zero_optimization"]["offload_param"] == {"device": "nvme", "nvme_path": "/tmp/x"}
    assert strategy.config["activation_checkpointing"]["cpu_checkpointing"] is True
    assert FabricZeroStrategy(config={"zero_optimization": {"stage": 1}}).config["zero_optimization"] == {"stage": 1}
    assert "zero_optimization" not in ZeroStrategy(zero_optimization=False).config
    assert FabricZeroStrategy(zero_optimization=False, logging_batch_size_per_gpu=3).config["train_micro_batch_size_per_gpu"] == 3
    for wrong, text in (
        ({"stage": 4}, "stage is 4; allowed are 0, 1, 2, 3"),
        ({"stage": 3, "zero_optimization": False}, "zero_optimization=False turns ZeRO off"),
        ({"offload_optimizer": True, "zero_optimization": False}, "zero_optimization=False turns ZeRO off"),
        ({"offload_optimizer": "disk"}, "offload_optimizer is 'disk'"),
        ({"offload_parameters": "nvme"}, 'is "nvme", but no folder is set'),
        ({"stage": 3, "config": {}}, "stage would be ignored, because config= is given"),
    ):
        for cls in (ZeroStrategy, FabricZeroStrategy):
            with pytest.raises(ConfigError, match=text):
                cls(**wrong)
    with pytest.raises(ConfigError, match="Lightning's Trainer takes no snapshots"):
        ZeroStrategy(config={"hf_zero": {"spike_action": "rewind"}}).setup_environment()


# ------------------------------------------------------------------------------------------------ jobs of the ranks


def check_trainer(folder: str, stage: int) -> None:
    """Accumulation 2 and clipping; then the second half again from a checkpoint, bit for bit."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    every = ModelCheckpoint(dirpath=f"{folder}/all", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    whole = fit(folder, stage, callbacks=[every])
    expected = reference_losses(STEPS)
    close(mean_over_all(whole.losses), expected.losses, 1e-5)
    close(whole.norms, expected.norms, 1e-4)
    close_weights(whole.weights, expected.weights)
    checkpoint = Path(folder, "all", "step=2.ckpt")
    assert checkpoint.is_dir() and (checkpoint / "checkpoint" / "complete").exists()
    again = fit(folder, stage, ckpt_path=str(checkpoint))
    assert (again.losses, again.norms) == (whole.losses[EPOCH:], whole.norms[2:]), f"{again.losses}, expected {whole.losses[EPOCH:]}"
    assert all(torch.equal(again.weights[name], weight) for name, weight in whole.weights.items())
    if ranks.rank() == 0:
        check_single_file(checkpoint.parent / f"step={STEPS}.ckpt", whole.weights)


def check_single_file(checkpoint: Path, weights: dict[str, Tensor]) -> None:
    """Lightning's own conversion to one file works, without a pickle in the checkpoint."""
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    assert not list(checkpoint.rglob("*.pt"))
    target = checkpoint.parent / "whole.ckpt"
    convert_zero_checkpoint_to_fp32_state_dict(checkpoint, target)
    found = torch.load(target, weights_only=False)
    assert found["state_dict"].keys() == weights.keys() and found["global_step"] == STEPS
    assert all(torch.equal(found["state_dict"][name], weight) for name, weight in weights.items())
    module = make_module_class().load_from_checkpoint(target)
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())


def check_precision(folder: str, precision: str) -> None:
    trained = fit(folder, 3, precision=precision)
    expected = reference_losses(STEPS)
    close(mean_over_all(trained.losses), expected.losses, 2e-2)
    assert {weight.dtype for weight in trained.weights.values()} == {torch.bfloat16 if precision.startswith("bf16") else torch.float16}


def check_evaluation(folder: str) -> None:
    """``validate``, ``test`` and ``predict`` on a sharded model, before and after ``fit``; ``configure_model`` shards at construction."""
    import lightning as lightning_package

    module = make_module_class()(late=True)
    trainer = make_trainer(folder, 3, max_steps=2)
    trainer.fit(module, loader(), val_dataloaders=loader())
    after = trainer.validate(module, loader(), verbose=False)[0]["val_loss"]
    assert trainer.test(module, loader(), verbose=False)[0]["test_loss"] == pytest.approx(after, rel=1e-6)
    plain = CASES["gpt2"].build()
    weights = full_weights(trainer)
    plain.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()}, strict=False)
    batches = list(loader(rank=0)) + list(loader(rank=1))
    with torch.no_grad():
        expected = sum(plain.eval()(**batch).loss.item() for batch in batches) / len(batches)
    assert after == pytest.approx(expected, rel=1e-5)
    predicted = trainer.predict(module, loader())
    assert len(predicted) == len(list(loader())) and predicted[0].shape[-1] == 64
    assert isinstance(trainer.strategy, lightning_package.pytorch.strategies.DeepSpeedStrategy)


def check_fabric(folder: str, stage: int) -> None:
    """Train, save in the middle, and continue from there in a new Fabric."""
    from lightning.fabric import Fabric

    from hf_zero.integrations import FabricZeroStrategy

    def start() -> tuple[Any, Any, Any]:
        config = {"zero_optimization": {"stage": stage, **(SHARD_ALL if stage == 3 else {})}, "zero_allow_untested_optimizer": True}
        fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricZeroStrategy(config=config))
        fabric.launch()
        model = CASES["gpt2"].build()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.05))
        return fabric, model, optimizer

    def train(fabric: Any, model: Any, optimizer: Any, batches: list[Batch]) -> list[float]:
        losses = []
        for batch in batches:
            loss = model(**batch).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    fabric, model, optimizer = start()
    batches = [row(step) for step in range(STEPS)]
    losses = train(fabric, model, optimizer, batches[:2])
    state = {"model": model, "optimizer": optimizer, "step": 2}
    fabric.save(f"{folder}/fabric", state)
    losses += train(fabric, model, optimizer, batches[2:])
    expected = reference(CASES["gpt2"].build(), lambda step, _micro, rank: row(step, rank), CASES["gpt2"].forward, settings(1), 2)
    close(mean_over_all(losses), expected.losses, 1e-5)

    fabric, model, optimizer = start()
    state = {"model": model, "optimizer": optimizer, "step": 0}
    remainder = fabric.load(f"{folder}/fabric", state)
    assert state["step"] == 2 and list(remainder) == ["ds_version"]  # of DeepSpeed's entries the one that scripts read
    assert train(fabric, model, optimizer, batches[2:]) == losses[2:]


# ------------------------------------------------------------------------------------------------ parts


def check_manual(folder: str) -> None:
    class Manual(make_module_class()):  # type: ignore[misc]
        """Two steps by hand, the rate halved after the first."""

        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.rates: list[float] = []

        def training_step(self, batch: Batch, index: int) -> None:
            optimizer = self.optimizers()
            loss = self(batch).loss
            self.losses.append(loss.item())
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.rates.append(optimizer.param_groups[0]["lr"])
            self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    module = Manual()
    trainer = make_trainer(folder, 3, max_steps=STEPS, enable_checkpointing=False)
    trainer.fit(module, loader(STEPS))
    assert module.rates == [LR, LR / 2, LR / 4, LR / 8]
    case = CASES["gpt2"]
    run = Run(steps=1, lr=LR)
    expected = reference(case.build(), lambda step, _micro, rank: row(step, rank), case.forward, run, 2)
    close(mean_over_all(module.losses[:1]), expected.losses, 1e-5)
    close(module.norms[:1], expected.norms, 1e-4)
    plain = case.build()
    with torch.no_grad():
        plain.load_state_dict(expected.weights, strict=False)
        following = [case.forward(plain, row(1, rank)).item() for rank in range(2)]
    close(mean_over_all(module.losses[1:2]), [sum(following) / 2], 1e-5)


def check_averages(folder: str, stage: int) -> None:
    """Right where weights are whole, and an error that says what serves at stage 3."""
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging

    from hf_zero.zero import GatheredParameters

    averages: list[dict[str, Tensor]] = []

    class Watcher(Callback):
        """Averages whole weights after each step, as the callback's formula says."""

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            with GatheredParameters(list(module.parameters())):
                now = {name: param.detach().clone() for name, param in module.named_parameters()}
            if averages:
                now = {name: AVERAGE_DECAY * averages[-1][name] + (1 - AVERAGE_DECAY) * value for name, value in now.items()}
            averages.append(now)

    module = make_module_class()()
    callbacks = [Watcher(), EMAWeightAveraging(decay=AVERAGE_DECAY)]
    trainer = make_trainer(folder, stage, max_steps=3, callbacks=callbacks, enable_checkpointing=False)
    if stage == 3:
        with pytest.raises(StateError, match=r"is divided .* use hf_zero\.utils\.AveragedWeights"):
            trainer.fit(module, loader(EPOCH))
        return
    trainer.fit(module, loader(EPOCH), loader(EPOCH))
    assert len(averages) == 3
    for name, param in trainer.lightning_module.named_parameters():
        assert torch.equal(param, averages[-1][name]), f"stage {stage}: {name}"


class Outcome:
    """What a fit leaves: the losses of this rank's micro-steps, the norms of the steps, the whole weights."""

    def __init__(self, losses: list[float], norms: list[float], weights: dict[str, Tensor]) -> None:
        self.losses = losses
        self.norms = norms
        self.weights = weights


def make_module_class() -> Any:
    import lightning as lightning_package

    class Module(lightning_package.LightningModule):
        """A tiny GPT-2. ``late``: built in ``configure_model``, where the strategy shards."""

        def __init__(self, late: bool = False) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model: nn.Module | None = None if late else CASES["gpt2"].build()
            self.losses: list[float] = []
            self.norms: list[float] = []

        def configure_model(self) -> None:
            if self.model is None:
                self.model = CASES["gpt2"].build()

        def forward(self, batch: Batch) -> Tensor:
            return self.model(**batch)  # type: ignore[misc]

        def training_step(self, batch: Batch, index: int) -> Tensor:
            loss = self(batch).loss  # type: ignore[attr-defined]
            self.losses.append(loss.item())
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
            if (index + 1) % self.trainer.accumulate_grad_batches == 0:
                self.norms.append(self.trainer.model.get_global_grad_norm())

        def validation_step(self, batch: Batch, index: int) -> None:
            self.log("val_loss", self(batch).loss, sync_dist=True)  # type: ignore[attr-defined]

        def test_step(self, batch: Batch, index: int) -> None:
            self.log("test_loss", self(batch).loss, sync_dist=True)  # type: ignore[attr-defined]

        def predict_step(self, batch: Batch, index: int) -> Tensor:
            return self(batch).logits  # type: ignore[attr-defined]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LR, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.05)

    return Module


def make_trainer(folder: str, stage: int, **options: Any) -> Any:
    import lightning as lightning_package

    from hf_zero.integrations import ZeroStrategy

    strategy = ZeroStrategy(stage=stage, offload_optimizer=stage == 3)
    if stage == 3:
        strategy.config["zero_optimization"].update(SHARD_ALL)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": stage == 3, "use_distributed_sampler": False}
    return lightning_package.Trainer(accelerator="cpu", devices=2, strategy=strategy, default_root_dir=folder, **quiet, **options)


def fit(folder: str, stage: int, ckpt_path: str | None = None, **options: Any) -> Outcome:
    options.setdefault("enable_checkpointing", "callbacks" in options)
    module = make_module_class()()
    trainer = make_trainer(folder, stage, max_steps=STEPS, accumulate_grad_batches=2, gradient_clip_val=0.1, **options)
    trainer.fit(module, loader(EPOCH), ckpt_path=ckpt_path, **({"weights_only": False} if ckpt_path else {}))
    return Outcome(module.losses, module.norms, full_weights(trainer))


def full_weights(trainer: Any) -> dict[str, Tensor]:
    import hf_zero

    module = trainer.lightning_module
    with hf_zero.zero.GatheredParameters(list(module.parameters())):
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def row(step: int, rank: int | None = None) -> Batch:
    return CASES["gpt2"].rows(step, 0, ranks.rank() if rank is None else rank)


def loader(count: int = 4, rank: int | None = None) -> Any:
    import os

    own = int(os.environ["RANK"]) if rank is None else rank
    rows = [row(step, own) for step in range(count)]
    return torch.utils.data.DataLoader(rows, batch_size=1, collate_fn=itemgetter(0))  # Lightning's own strategy asks for a batch size


def settings(accumulation: int) -> Run:
    return Run(accumulation=accumulation, clip=0.1 if accumulation > 1 else 0.0, steps=STEPS, lr=LR)


def reference_losses(steps: int) -> Any:
    """Plain PyTorch on the same micro-steps; losses per micro-step, like Lightning's."""
    case = CASES["gpt2"]
    losses: list[float] = []

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        loss = case.forward(model, batch)
        losses.append(loss.item())
        return loss

    trace = reference(case.build(), lambda step, micro, rank: row((2 * step + micro) % EPOCH, rank), forward, settings(2), 2)
    trace.losses = [(one + other) / 2 for one, other in zip(losses[::2], losses[1::2], strict=True)]
    return trace


def mean_over_all(losses: list[float]) -> list[float]:
    return [mean_over_ranks([loss]) for loss in losses]


def close(found: list[float], expected: list[float], relative: float) -> None:
    assert found == pytest.approx(expected, rel=relative), f"{found}, expected {expected}"


def close_weights(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, weight in expected.items():
        torch.testing.assert_close(weights[f"model.{name}"], weight, rtol=1e-4, atol=1e-5)


def test_config_of_the_trainer_reaches_the_engine(tmp_path: Path) -> None:
    """A JSON file: the Trainer's accumulation and clipping are written into it, a key of its own is refused by Lightning."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}))
    assert ranks.run_ranks(settings_of_engine, 2, str(path), group=False) == [(2, 3, 0.5)] * 2


def settings_of_engine(path: str) -> tuple[int, int, float]:
    import lightning as lightning_package

    from hf_zero.integrations import ZeroStrategy

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    quiet["use_distributed_sampler"] = False
    trainer = lightning_package.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ZeroStrategy(config=path),
        max_steps=1,
        accumulate_grad_batches=3,
        gradient_clip_val=0.5,
        **quiet,
    )
    trainer.fit(make_module_class()(), loader(3))
    engine = trainer.strategy.deepspeed_engine
    return engine.zero_optimization_stage(), engine.gradient_accumulation_steps(), engine.gradient_clipping()


def test_stock_strategy_says_that_it_needs_a_gpu() -> None:
    """Through the alias Lightning finds DeepSpeed; on a CPU it is Lightning that refuses."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert ranks.run_ranks(refusal_of_lightning, 1, group=False) == [True]


def refusal_of_lightning() -> bool:
    import lightning as lightning_package

    trainer = lightning_package.Trainer(
        accelerator="cpu", devices=1, strategy="deepspeed_stage_3", logger=False, enable_checkpointing=False
    )
    try:
        trainer.fit(make_module_class()(), loader(1))
    except RuntimeError as error:
        return "only supported on CUDA GPUs" in str(error)
    return False


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["deepspeed_stage_2", "deepspeed_stage_3", "deepspeed_stage_3_offload"])
def test_stock_strategy_on_a_gpu(strategy: str, tmp_path: Path) -> None:
    ranks.run_ranks(train_on_gpu, 1, strategy, str(tmp_path), group=False)


def train_on_gpu(strategy: str, folder: str) -> None:
    import lightning as lightning_package

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    for attempt in (strategy, "zero"):
        if attempt == "zero":
            from hf_zero.integrations import ZeroStrategy

            attempt = ZeroStrategy(stage=3)  # type: ignore[assignment]
        trainer = lightning_package.Trainer(
            accelerator="gpu", devices=1, strategy=attempt, max_steps=2, precision="bf16-mixed", default_root_dir=folder, **quiet
        )
        module = make_module_class()()
        trainer.fit(module, loader(2))
        assert len(module.losses) == 2 and all(loss > 0 for loss in module.losses)
        trainer.save_checkpoint(f"{folder}/{attempt if isinstance(attempt, str) else 'zero'}.ckpt")
