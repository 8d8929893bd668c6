"""``Trainer(optimizers=(optimizer, None))``: the optimizer that a script gives trains, with layers frozen and unfrozen by a callback."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import UnsupportedError
from hf_zero.integrations import trainer_optimizers
from tests.support import ranks

LAYERS = 4


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            rows = rows + torch.tanh(layer(rows))
        return {"loss": (rows - labels).square().mean()}


def _rows() -> list[dict[str, torch.Tensor]]:
    draws = (torch.Generator().manual_seed(index) for index in range(24))
    return [{"rows": torch.randn(8, generator=draw), "labels": torch.randn(8, generator=draw)} for draw in draws]


def _pick(model: nn.Module, step: int) -> None:
    chosen = random.Random(step).sample(range(LAYERS), 2)
    for index, layer in enumerate(model.layers):
        layer.requires_grad_(index in chosen)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, weight_decay=0.1)


def _plain(steps: int, batch: int) -> dict[str, torch.Tensor]:
    model, data = _Layers(), _rows()
    optimizer = _optimizer(model)
    for step in range(steps):
        _pick(model, step)
        rows = data[step * batch : (step + 1) * batch]
        model(**{key: torch.stack([row[key] for row in rows]) for key in rows[0]})["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.detach() for key, value in model.named_parameters()}


def _trained(folder: str) -> None:
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import hf_zero
    from hf_zero.errors import ConfigError

    class Chooses(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            _pick(model, state.global_step)

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    expected = _plain(5, 2 * ranks.world())
    for stage in (1, 3):
        config: dict[str, Any] = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        config |= dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping"), "auto")
        args = TrainingArguments(
            folder, per_device_train_batch_size=2, max_steps=5, max_grad_norm=0.5, lr_scheduler_type="constant", deepspeed=config,
            report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        model = _Layers()
        trainer = InOrder(model=model, args=args, train_dataset=_rows(), callbacks=[Chooses()], optimizers=(_optimizer(model), None))
        trainer.train()
        with hf_zero.zero.GatheredParameters(list(model.parameters())):
            for key, value in model.named_parameters():
                torch.testing.assert_close(value.detach(), expected[key], rtol=1e-4, atol=1e-6, msg=f"stage {stage}: {key}")
        with pytest.raises(ConfigError, match="trains a second time"):
            trainer.train()
    both = {**config, "optimizer": {"type": "AdamW"}}
    args = TrainingArguments(folder, max_steps=1, deepspeed=both, report_to=[], save_strategy="no", disable_tqdm=True)
    model = _Layers()
    with pytest.raises(ConfigError, match="optimizers=.RMSprop"):
        Trainer(model=model, args=args, train_dataset=_rows(), optimizers=(_optimizer(model), None)).train()


def test_the_scripts_optimizer_trains(tmp_path: Any) -> None:
    ranks.run_ranks(_trained, 2, str(tmp_path))


def _trainer_of_4(config: dict[str, Any], max_grad_norm: float) -> tuple[Any, Any]:
    """Return what Trainer of transformers 4 has when it is about to build an engine: itself and the configuration."""
    fp16 = config.get("fp16", {}).get("enabled", False)
    holder = SimpleNamespace(config=config, _dtype=torch.float16, is_true=lambda key: fp16 and key == "fp16.enabled")
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(hf_ds_config=holder))
    return SimpleNamespace(accelerator=SimpleNamespace(state=state), args=SimpleNamespace(max_grad_norm=max_grad_norm)), holder


@pytest.mark.parametrize("fp16", [True, False])
def test_inputs_keep_fp32_without_a_section_for_fp16(fp16: bool) -> None:
    """transformers 4 assumes fp16 if the configuration says nothing, and casts pixels and sounds for a model in fp32."""
    trainer, holder = _trainer_of_4({"fp16": {"enabled": True}} if fp16 else {}, 1.0)
    trainer_optimizers.with_own_optimizer(lambda *_: None, trainer, 1, inference=True)
    assert holder._dtype is (torch.float16 if fp16 else torch.float32)


@pytest.mark.parametrize(
    ("written", "max_grad_norm", "clips_at"), [({}, 0.0, 0.0), ({}, 0.5, None), ({"gradient_clipping": 2.0}, 0.0, 2.0)]
)
def test_no_clipping_counts_without_a_key(written: dict[str, Any], max_grad_norm: float, clips_at: float | None) -> None:
    """transformers 4 asks for no norm if ``max_grad_norm`` is 0, so the default of the key would clip at 1."""
    trainer, holder = _trainer_of_4(dict(written), max_grad_norm)
    trainer_optimizers.with_own_optimizer(lambda *_: None, trainer, 1, inference=True)
    assert holder.config.get("gradient_clipping") == clips_at


@dataclass
class _Arguments:
    optim: str = "adamw_torch"
    lr_scheduler_type: str = "linear"
    max_grad_norm: float = 1.0


@pytest.mark.parametrize("section", ["", "optimizer", "scheduler"])
def test_the_version_that_prepares_no_model_is_refused(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer of transformers 5.1.0 calls ``prepare`` only where it has a scheduler of the configuration; the bare model would run."""
    trainer, _ = _trainer_of_4({section: {"type": "Any"}} if section else {}, 1.0)
    vars(trainer).update(optimizer=None, lr_scheduler=None, optimizer_cls_and_kwargs=None)
    trainer.args = _Arguments()
    made = lambda *_: ("optimizer", "scheduler")  # noqa: E731
    monkeypatch.setattr(trainer_optimizers.metadata, "version", lambda name: "5.2.0")
    assert trainer_optimizers.with_own_optimizer(made, trainer, 1) == made()
    monkeypatch.setattr(trainer_optimizers.metadata, "version", lambda name: "5.1.0")
    if section:
        assert trainer_optimizers.with_own_optimizer(made, trainer, 1) == made()
    else:
        with pytest.raises(UnsupportedError, match=r"^transformers 5\.1\.0 prepares no model .* Install transformers 5\.2 or later"):
            trainer_optimizers.with_own_optimizer(made, trainer, 1)
