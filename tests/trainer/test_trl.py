"""TRL's trainers at stages 2 and 3: the numbers of plain DDP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks, trainers, trl_runs

LOGGED = ("loss", "grad_norm", "rewards/margins", "logps/chosen", "accuracy", "reward")


# The reference model of DPO is a second engine.
@pytest.mark.parametrize(("kind", "stage"), [("sft", 3), ("dpo", 3), ("reward", 2)])
def test_same_numbers(kind: str, stage: int, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_same_numbers, 2, trainer_models, tmp_path, kind, (stage,), timeout=200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward", "sft_lora", "sft_checkpointing", "dpo_lora", "grpo", "grpo_block_by_block"])
def test_same_numbers_at_both_stages(kind: str, trainer_models: Path, tmp_path: Path) -> None:
    ranks.run_ranks(_same_numbers, 2, trainer_models, tmp_path, kind, (2, 3), timeout=250)


def _same_numbers(models: Path, folder: Path, kind: str, stages: tuple[int, ...]) -> None:
    with trainers.clean_state():
        expected = None
        for stage in (None, *stages):
            trainers.forget()
            trainer = KINDS[kind](models, folder / f"{kind}{stage}", None if stage is None else trainers.zero_config(stage))
            trainer.train()
            found = [{key: entry[key] for key in LOGGED if key in entry} for entry in trainer.state.log_history if "loss" in entry]
            assert len(found) == trl_runs.STEPS and all("grad_norm" in entry for entry in found)
            if expected is None:
                expected = found
            else:
                trainers.assert_close(expected, found, f"{kind}, stage {stage}", rel=1e-3)
            trainer.save_model(str(folder / f"final{stage}"))
            trainer.accelerator.wait_for_everyone()


# ------------------------------------------------------------------------------------------------ trainers


def _sft(models: Path, folder: Path, config: Any, adapter: Any = None, **changes: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = trl_runs.options(folder, config, SFTConfig, max_length=16, **changes)
    data = Dataset.from_dict({"text": trl_runs.texts(48, 8, 0)})
    return SFTTrainer(
        model=trainers.load(models, "llama"), args=args, train_dataset=data, processing_class=trl_runs.tokenizer(), peft_config=adapter
    )


def _dpo(models: Path, folder: Path, config: Any, adapter: Any = None, **changes: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    args = trl_runs.options(folder, config, DPOConfig, max_length=16, **changes)
    reference = None if adapter is not None else trainers.load(models, "llama")
    return DPOTrainer(
        model=trainers.load(models, "llama"),
        ref_model=reference,
        args=args,
        train_dataset=trl_runs.pairs(),
        processing_class=trl_runs.tokenizer(),
        peft_config=adapter,
    )


def _reward(models: Path, folder: Path, config: Any) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    args = trl_runs.options(folder, config, RewardConfig, max_length=16)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(models / "llama", num_labels=1)
    return RewardTrainer(model=model, args=args, train_dataset=trl_runs.pairs(), processing_class=trl_runs.tokenizer())


def _grpo(models: Path, folder: Path, config: Any, gather: bool = True) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    args = trl_runs.options(
        folder,
        config,
        GRPOConfig,
        num_generations=2,
        max_completion_length=5,
        temperature=1e-3,
        beta=0.1,
        use_vllm=False,
        ds3_gather_for_generation=gather,
    )
    return GRPOTrainer(
        model=trainers.load(models, "llama"),
        reward_funcs=lambda completions, **_: [len(set(text.split())) + 0.1 * index for index, text in enumerate(completions)],
        args=args,
        train_dataset=trl_runs.pairs().select_columns(["prompt"]),
        processing_class=trl_runs.tokenizer(),
    )


KINDS: dict[str, Callable[[Path, Path, Any], Any]] = {
    "sft": _sft,
    "sft_lora": lambda models, folder, config: _sft(models, folder, config, trl_runs.lora(), learning_rate=1e-2),
    "sft_checkpointing": lambda models, folder, config: _sft(models, folder, config, gradient_checkpointing=True),
    "dpo": _dpo,
    "dpo_lora": lambda models, folder, config: _dpo(models, folder, config, trl_runs.lora(), learning_rate=1e-2),
    "reward": _reward,
    "grpo": _grpo,
    "grpo_block_by_block": lambda models, folder, config: _grpo(
        models, folder, config and config | {"hf_zero": {"gather_for_generation": False}}, gather=False
    ),
}
