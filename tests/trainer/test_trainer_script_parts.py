"""Trainers whose script gives parts of its own: a scheduler, a clipping norm that changes, a raw backward, an optimizer in any form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import ranks, trainers
from tests.support.rows import slow_but

STEPS, BATCH, MICRO_STEPS = 5, 2, 2
NORMS = (0.5, 0.05, 0.0, 0.02, 0.0)  # 0 is off
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto"}}


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layers(rows) - labels).square().mean()}


def _rows() -> list[dict[str, torch.Tensor]]:
    draws = (torch.Generator().manual_seed(index) for index in range(3 * BATCH * MICRO_STEPS * ranks.world()))
    return [{"rows": torch.randn(8, generator=draw), "labels": torch.randn(8, generator=draw)} for draw in draws]


def _own(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def _plain(norms: tuple[float, ...]) -> list[torch.Tensor]:
    model, data = _Layers(), _rows()
    optimizer, scheduler = _own(model)
    size = BATCH * MICRO_STEPS * ranks.world()
    for step, norm in enumerate(norms):
        rows = data[step * size % len(data) :][:size]
        model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]})["loss"].backward()
        if norm:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def _trainer(folder: str, config: dict[str, Any], kind: Any = None, options: dict[str, Any] | None = None, **given: Any) -> Any:
    """A Trainer that takes its rows in their order; ``kind`` is mixed into its class, ``options`` are training arguments."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    keys = ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping")
    args = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, gradient_accumulation_steps=MICRO_STEPS, report_to=[], disable_tqdm=True,
        deepspeed={**dict.fromkeys(keys, "auto"), **config}, **{"max_steps": STEPS, "save_strategy": "no", **(options or {})},
    )  # fmt: skip
    model = _Layers()
    if given.get("optimizers") is _own:
        given["optimizers"] = _own(model)
    return (InOrder if kind is None else type("Mixed", (kind, InOrder), {}))(model=model, args=args, train_dataset=_rows(), **given)


class _Raw:
    """The training step of a script that calls ``loss.backward()``, and divides the loss itself."""

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = self.compute_loss(model, self._prepare_inputs(inputs)) / MICRO_STEPS
        loss.backward()
        return loss.detach()


def _weights(trainer: Any) -> list[torch.Tensor]:
    from hf_zero.zero import GatheredParameters

    params = list(trainer.model.parameters())
    with GatheredParameters(params):
        return [param.detach().cpu().clone() for param in params]


def _close(trainer: Any, expected: list[torch.Tensor], label: str) -> None:
    torch.testing.assert_close(_weights(trainer), expected, rtol=1e-4, atol=1e-6, msg=lambda text: f"{label}: {text}")


def _parts(folder: str, stage: int) -> None:
    from transformers import TrainerCallback

    class Norms(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            args.max_grad_norm = NORMS[state.global_step]

    config = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    expected = _plain(NORMS)
    for kind in (None, _Raw):
        with trainers.clean_state():
            trainer = _trainer(folder, config, kind, optimizers=_own, callbacks=[Norms()])
            trainer.train()
            assert type(trainer.lr_scheduler).__name__ == "StepLR"
            _close(trainer, expected, f"stage {stage}, {kind}")
    saves = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.5}
    with trainers.clean_state():
        _trainer(folder, config, options=saves | {"max_steps": 2}, optimizers=_own).train()
    with trainers.clean_state():
        trainer = _trainer(folder, config, options=saves, optimizers=_own)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        _close(trainer, _plain((0.5,) * STEPS), f"stage {stage}, resumed")
    with trainers.clean_state():  # both assigned after the constructor
        trainer = _trainer(folder, config, options={"max_grad_norm": 0.5})
        trainer.optimizer, trainer.lr_scheduler = _own(trainer.model)
        trainer.train()
        _close(trainer, _plain((0.5,) * STEPS), f"stage {stage}, assigned")


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but((0, 1, 2, 3), 0, 3))
def test_a_schedule_and_norms_of_the_script_train_as_without_the_engine(stage: int, tmp_path: Any) -> None:
    ranks.run_ranks(_parts, 2, str(tmp_path), stage)


class _Builds:
    def create_optimizer(self: Any, *_: Any) -> Any:
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
        return self.optimizer


class _Schedules:
    def create_scheduler(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return self.lr_scheduler


class _Adds:
    """Overrides the method, and makes no optimizer: TRL's and other libraries' way to look at the groups."""

    def create_optimizer(self: Any, *args: Any) -> Any:
        self.seen = super().create_optimizer(*args)  # type: ignore[misc]
        return self.seen


def _both(folder: str) -> None:
    from hf_zero.errors import ConfigError

    optimizer, scheduler = {"optimizer": OPTIMIZER}, {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}}
    chosen = {"optimizer_cls_and_kwargs": (torch.optim.NAdam, {"lr": 1e-2})}
    alone = {"optimizers": (None, _own(_Layers())[1])}
    for config, kind, given, message in (
        (optimizer, None, {"optimizers": _own}, r"optimizers=\(SGD, ...\) and .* section `optimizer` too \(AdamW\)"),
        (optimizer, _Builds, {}, r"a create_optimizer\(\) of its own \(_Builds\) and .* section `optimizer` too \(AdamW\)"),
        (optimizer, None, chosen, r"optimizer_cls_and_kwargs=\(NAdam, ...\) and .* section `optimizer` too \(AdamW\)"),
        (optimizer, None, alone, r"optimizers=\(None, StepLR\) and .* optimizer section \(AdamW\), whose learning rate"),
        (scheduler, _Schedules, {}, r"a create_scheduler\(\) of its own \(_Schedules\) and .* section `scheduler` too \(WarmupLR\)"),
        (scheduler, None, {"optimizers": _own}, r"optimizers=\(..., StepLR\) and .* section `scheduler` too \(WarmupLR\)"),
    ):
        with trainers.clean_state(), pytest.raises(ConfigError, match=message):
            _trainer(folder, {"zero_optimization": {"stage": 2}, **config}, kind, **given).train()
    for kind, optim in ((_Adds, "adamw_torch"), (None, "sgd")):
        with trainers.clean_state():
            trainer = _trainer(folder, {"zero_optimization": {"stage": 2}, **optimizer}, kind, {"optim": optim, "learning_rate": 1e-3})
            trainer.train()
            assert trainer.model_wrapped.optimizer_name() == "adamw"


def test_an_optimizer_of_the_script_beside_that_of_the_configuration_is_an_error(tmp_path: Any) -> None:
    ranks.run_ranks(_both, 1, str(tmp_path))


@pytest.mark.parametrize(
    ("section", "name", "silent", "value", "kind"),
    [
        ("an optimizer", "optim", "adamw_torch", "sgd", "AdamW"),
        ("a scheduler", "lr_scheduler_type", "linear", "cosine", "WarmupLR"),
    ],
)
def test_an_argument_without_effect_is_a_warning(
    section: str, name: str, silent: str, value: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import TrainingArguments

    from hf_zero.integrations import trainer_optimizers

    said: list[str] = []
    monkeypatch.setattr(trainer_optimizers, "warn_once", said.append)
    source = SimpleNamespace(config={section.split()[1]: {"type": kind, "params": {}}})
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(hf_ds_config=source))
    for chosen in (silent, value):
        with trainers.clean_state():
            args = TrainingArguments("out", use_cpu=True, report_to=[], **{name: chosen})
        trainer = SimpleNamespace(args=args, accelerator=SimpleNamespace(state=state), optimizer=None, lr_scheduler=None)
        trainer_optimizers.with_own_optimizer(lambda *_: (None, None), trainer, 1)
    assert len(said) == 1
    assert said[0].startswith(f"TrainingArguments({name}='{value}') has no effect: the configuration has {section} section ({kind})")


@pytest.mark.parametrize(
    ("written", "argument", "frozen", "warns"),
    [
        ({"weight_decay": 0.1}, 0.0, False, True),
        ({"weight_decay": "0.1"}, 0.0, False, True),
        ({}, 0.1, False, True),
        ({"weight_decay": 0.0}, 0.1, False, False),
        ({}, 0.0, False, False),
        ({"weight_decay": 0.1}, 0.0, True, False),
    ],
)
def test_weight_decay_of_a_section_for_biases_and_norms_is_a_warning(
    written: dict[str, Any], argument: float, frozen: bool, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer's own optimizer leaves biases and norms without decay; with a section transformers passes one list of all parameters."""
    from transformers import Trainer, TrainingArguments

    from hf_zero.integrations import trainer_optimizers

    said: list[str] = []
    monkeypatch.setattr(trainer_optimizers, "warn_once", said.append)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.LayerNorm(2))
    model[1].requires_grad_(not frozen)
    with trainers.clean_state():
        args = TrainingArguments("out", weight_decay=argument, use_cpu=True, report_to=[])
        trainer = Trainer(model, args)
        monkeypatch.setattr(trainer_optimizers, "_own_scheduler", lambda _trainer: None)
        source = SimpleNamespace(config={"optimizer": {"type": "AdamW", "params": {"lr": 0.1, **written}}})
        monkeypatch.setattr(
            trainer, "accelerator", SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(hf_ds_config=source)))
        )
        trainer_optimizers.with_own_optimizer(lambda *_: (None, None), trainer, 1)
    assert len(said) == warns
    if warns:
        assert said[0].startswith("weight_decay 0.1 of the optimizer section holds for all trainable parameters")
        assert "leaves 2 of them without decay (biases and norms, such as 1.weight)" in said[0]
