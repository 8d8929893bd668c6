"""transformers' Trainer with ``deepspeed=``: its logs, evaluations, predictions and weights equal those of the same run under DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ranks, trainers
from tests.support.rows import slow_but

# -- train, evaluate, predict ----------------------------------------------------------------------------------------------


def _train_evaluate_predict(models: Path, folder: Path, stages: tuple[int, ...]) -> None:
    with trainers.clean_state():
        options = {"eval_strategy": "steps", "eval_steps": 2, "name": "llama"}
        plain = trainers.train_with(models, folder, None, **options)
        weights = trainers.weights_of(plain.model)
        expected = plain.predict(trainers.rows(trainers.EVAL, 2))
        for stage in stages:
            trainer = trainers.train_with(models, folder, trainers.zero_config(stage), **options)
            what = f"stage {stage}"
            trainers.assert_close(trainers.logs_of(plain), trainers.logs_of(trainer), what)
            trainers.assert_same_weights(weights, trainers.weights_of(trainer.model), what)
            assert trainer.state.total_flos == plain.state.total_flos > 0, what  # counts the parameters, which are empty at stage 3
            for options_of_count in ({}, {"only_trainable": True, "exclude_embeddings": True}):
                assert trainer.model.num_parameters(**options_of_count) == plain.model.num_parameters(**options_of_count)
            assert trainer.model.get_memory_footprint() == plain.model.get_memory_footprint()
            found = trainer.predict(trainers.rows(trainers.EVAL, 2))
            assert found.predictions.shape == (trainers.EVAL, trainers.LENGTH, trainers.VOCAB)
            torch.testing.assert_close(torch.tensor(found.predictions), torch.tensor(expected.predictions), rtol=1e-3, atol=1e-4)
            assert abs(found.metrics["test_loss"] - expected.metrics["test_loss"]) < 1e-4
            assert abs(trainer.evaluate()["eval_loss"] - expected.metrics["test_loss"]) < 1e-4


def test_train_evaluate_predict(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_train_evaluate_predict, 2, trainer_models, tmp_path, trainers.STAGES)


# -- options of TrainingArguments --------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "checkpointing and clipping": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "max_grad_norm": 0.05,
    },
    "reentrant checkpointing and label smoothing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "label_smoothing_factor": 0.1,
    },
    "accumulation_3": {"gradient_accumulation_steps": 3, "num_train_epochs": 1, "max_steps": -1},
    "no_clipping": {"max_grad_norm": 0.0},
    "tokens_per_rank": {"average_tokens_across_devices": False},
    "group_by_length": {"ragged": True, "group_by_length": True},
    "cosine": {"lr_scheduler_type": "cosine"},
    "sgd": {"optim": "sgd", "learning_rate": 0.1},
    "input_tokens_seen": {"include_num_input_tokens_seen": True},
    "compile": {"torch_compile": True, "torch_compile_backend": "eager"},
}
FAST = {"checkpointing and clipping": (3,), "reentrant checkpointing and label smoothing": (2, 3), "group_by_length": (2,)}


def _option(models: Path, folder: Path, options: dict[str, Any], stages: tuple[int, ...]) -> None:
    from transformers import TrainingArguments

    if "group_by_length" in options and "group_by_length" not in TrainingArguments.__dataclass_fields__:
        options = {"train_sampling_strategy": "group_by_length", "ragged": True}
    with trainers.clean_state():
        plain = trainers.logs_of(trainers.train_with(models, folder, None, **options))
        for stage in stages:
            found = trainers.logs_of(trainers.train_with(models, folder, trainers.zero_config(stage), **options))
            trainers.assert_close(plain, found, f"stage {stage}")


@pytest.mark.slow  # fast: `test_train_evaluate_predict`, test_parity_checkpointing.py
@pytest.mark.fast_rows("reentrant checkpointing and label smoothing")
@pytest.mark.parametrize("name", FAST)
def test_option(name: str, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_option, 2, trainer_models, tmp_path, OPTIONS[name], FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name: str, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_option, 2, trainer_models, tmp_path, OPTIONS[name], (2, 3))


# -- optimizer and scheduler from the JSON or from Trainer ----------------------------------------------------------------------

OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": 0.0}}
SCHEDULER: dict[str, Any] = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
        "warmup_type": "linear",
    },
}


def _sources(models: Path, folder: Path, in_json: tuple[str, ...], stages: tuple[int, ...], sparse: bool = False) -> None:
    """No decay, as the JSON has one group for all parameters; ``sparse``: sections of the JSON lack values that the arguments have.

    A schedule that the engine steps has moved on when Trainer logs it, as with DeepSpeed: it shows the rate of the next step.
    """
    sections: dict[str, Any] = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}
    options: dict[str, Any] = {"weight_decay": 0.0, "warmup_steps": 2, "max_steps": 6}
    if sparse:
        kept = {name: value for name, value in SCHEDULER["params"].items() if name != "warmup_max_lr"}
        sections = {"optimizer": {"type": "AdamW"}, "scheduler": SCHEDULER | {"params": kept}}
        options |= {"learning_rate": 3e-3, "adam_beta1": 0.7, "adam_epsilon": 1e-5}
    with trainers.clean_state():
        expected = trainers.logs_of(trainers.train_with(models, folder, None, schedule="scheduler" in in_json, **options))
        if in_json:
            for entry, following in zip(expected, expected[1:], strict=False):
                entry["learning_rate"] = following["learning_rate"]
            del expected[-1]["learning_rate"]
        for stage in stages:
            path = folder / f"ds_{stage}_{ranks.rank()}.json"
            path.write_text(json.dumps(trainers.zero_config(stage, **{name: sections[name] for name in in_json})))
            found = trainers.logs_of(trainers.train_with(models, folder, str(path), **options))
            if in_json:
                del found[-1]["learning_rate"]
            trainers.assert_close(expected, found, f"stage {stage}, {in_json} in the JSON")


SOURCES = [((), 3), (("optimizer",), 3), (("scheduler",), 3), (("optimizer", "scheduler"), 3), (("optimizer",), 2), (("scheduler",), 2)]


@pytest.mark.parametrize(
    ("in_json", "stage"), [pytest.param(*source, marks=() if source == SOURCES[3] else pytest.mark.slow) for source in SOURCES]
)
def test_optimizer_and_scheduler_sources(in_json: tuple[str, ...], stage: int, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_sources, 2, trainer_models, tmp_path, in_json, (stage,))


def test_arguments_fill_sections_that_lack_values(trainer_models: Path, tmp_path: Path) -> None:
    """The optimizer's default rate of 0.001 took the place of `learning_rate`, without a word."""
    ranks.run_ranks(_sources, 2, trainer_models, tmp_path, ("optimizer", "scheduler"), (3,), True)


# -- mixed precision -------------------------------------------------------------------------------------------------------------


def _mixed_precision(models: Path, folder: Path, precision: str) -> None:
    """Each stage trains in 16 bit, and stages agree bit for bit."""
    found: dict[int, tuple[trainers.Logs, dict[str, torch.Tensor]]] = {}
    with trainers.clean_state():
        plain = trainers.logs_of(trainers.train_with(models, folder, None))
        changes = {"fp16": {"enabled": "auto", "initial_scale_power": 8}} if precision == "fp16" else {}
        for stage in (1, 3):
            trainer = trainers.train_with(models, folder, trainers.zero_config(stage, **changes), use_cpu=True, **{precision: True})
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
            assert {param.dtype for param in trainer.model.parameters()} == {dtype}
            found[stage] = (trainers.logs_of(trainer), trainers.weights_of(trainer.model))
            trainers.assert_close(plain, found[stage][0], f"stage {stage}", rel=0.05)
    assert found[3][0] == found[1][0]
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[3][1].items())


@pytest.mark.parametrize("precision", slow_but(["bf16", "fp16"], "bf16"))
def test_mixed_precision(precision: str, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_mixed_precision, 2, trainer_models, tmp_path, precision)


# -- callbacks ---------------------------------------------------------------------------------------------------------------------


def _callbacks(models: Path, folder: Path) -> None:
    """Callbacks get the user's model; whole parameters come from a gather, and equal what plain training has at that step."""
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, float, float]] = []

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
            total = sum(value.double().sum().item() for name, value in trainers.weights_of(model).items() if "c_attn.bias" not in name)
            self.seen.append((type(model).__name__, total, optimizer.param_groups[0]["lr"]))

    with trainers.clean_state():
        plain = Watcher()
        trainers.train_with(models, folder, None, callbacks=[plain])
        watcher = Watcher()
        options = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
        trainers.train_with(models, folder, trainers.zero_config(3), callbacks=[watcher], **options)
        for (kind, total, rate), (name, found, found_rate) in zip(plain.seen, watcher.seen, strict=True):
            assert name == kind == "GPT2LMHeadModel"
            assert abs(total - found) < 1e-2
            assert abs(rate - found_rate) < 1e-9


@pytest.mark.slow  # fast: test_ds_gathered.py
def test_callbacks_read_parameters(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_callbacks, 2, trainer_models, tmp_path)


# -- a smaller batch after running out of memory -------------------------------------------------------------------------------------


def _auto_batch_size(models: Path, folder: Path) -> None:
    from transformers import Trainer

    class TooLarge(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self._train_batch_size > 1:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    with trainers.clean_state():
        plain = trainers.train_with(models, folder, None, per_device_train_batch_size=1)
        trainers.forget()
        args = trainers.arguments(folder, trainers.zero_config(2), auto_find_batch_size=True)
        trainer = TooLarge(model=trainers.load(models), args=args, train_dataset=trainers.rows(trainers.TRAIN, 1))
        trainer.train()
        assert trainer._train_batch_size == 1
        trainers.assert_close(trainers.logs_of(plain), trainers.logs_of(trainer), "batch size 1")


def test_auto_find_batch_size(trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_auto_batch_size, 2, trainer_models, tmp_path)
