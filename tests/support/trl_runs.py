"""Inputs of TRL's trainers in these tests: a tokenizer, texts, adapters and arguments, the same under DDP and under every stage."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import trainers

STEPS = 4


def tokenizer() -> Any:
    """Return a tokenizer with the words ``w0`` to ``w56`` and the special tokens of the tiny models."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<2>", "<3>", "<4>", "<s>", "</s>"]
    words = {word: index for index, word in enumerate(special + [f"w{index}" for index in range(trainers.VOCAB - len(special))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def texts(count: int, words: int, seed: int) -> list[str]:
    """Return texts of about ``words`` random words."""
    source = random.Random(seed)
    return [" ".join(f"w{source.randrange(50)}" for _ in range(words + index % 3)) for index in range(count)]


def pairs() -> Any:
    """Return prompts with a preferred answer and another one."""
    from datasets import Dataset

    chosen, rejected = ([f" {text}" for text in texts(48, 4, seed)] for seed in (2, 3))
    return Dataset.from_dict({"prompt": texts(48, 4, 1), "chosen": chosen, "rejected": rejected})


def options(folder: Path, config: Any, cls: Any, **changes: Any) -> Any:
    """Return training arguments of class ``cls``."""
    if config is not None:
        from hf_zero.integrations import callers

        callers.watch()  # modules of TRL that a run without ZeRO has imported in this process
    common = {"max_steps": STEPS, "bf16": False, "gradient_checkpointing": False, "gradient_accumulation_steps": 1}
    return trainers.arguments(folder, config, cls, **(common | changes))


def lora() -> Any:
    """Return a configuration of adapters on every linear layer."""
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")


def _sft(models: Path, folder: Path, config: Any, adapter: Any = None, **changes: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    args = options(folder, config, SFTConfig, max_length=16, **changes)
    data = Dataset.from_dict({"text": texts(48, 8, 0)})
    return SFTTrainer(
        model=trainers.load(models, "llama"), args=args, train_dataset=data, processing_class=tokenizer(), peft_config=adapter
    )


def _dpo(models: Path, folder: Path, config: Any, adapter: Any = None, **changes: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    args = options(folder, config, DPOConfig, max_length=16, **changes)
    reference = None if adapter is not None else trainers.load(models, "llama")
    return DPOTrainer(
        model=trainers.load(models, "llama"),
        ref_model=reference,
        args=args,
        train_dataset=_on_disk(pairs(), folder),
        processing_class=tokenizer(),
        peft_config=adapter,
    )


def _kto(models: Path, folder: Path, config: Any) -> Any:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    args = options(folder, config, KTOConfig, max_length=16, precompute_ref_log_probs=True)
    answers = [f" {text}" for text in texts(48, 4, 2)]
    data = Dataset.from_dict({"prompt": texts(48, 4, 1), "completion": answers, "label": [index % 3 > 0 for index in range(48)]})
    data = _on_disk(data, folder)
    return KTOTrainer(model=trainers.load(models, "llama"), args=args, train_dataset=data, processing_class=tokenizer())


def _on_disk(data: Any, folder: Path) -> Any:
    """Return ``data``, read from a folder of the run where all ranks find the results that one of them stores beside it."""
    import torch.distributed as dist
    from datasets import load_from_disk

    if dist.get_rank() == 0:
        data.save_to_disk(folder / "data")
    dist.barrier()
    return load_from_disk(folder / "data")


def _reward(models: Path, folder: Path, config: Any) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    args = options(folder, config, RewardConfig, max_length=16)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(models / "llama", num_labels=1)
    return RewardTrainer(model=model, args=args, train_dataset=pairs(), processing_class=tokenizer())


def _grpo(models: Path, folder: Path, config: Any, gather: bool = True) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    args = options(
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
        train_dataset=pairs().select_columns(["prompt"]),
        processing_class=tokenizer(),
    )


KINDS: dict[str, Callable[[Path, Path, Any], Any]] = {
    "sft": _sft,
    "sft_lora": lambda models, folder, config: _sft(models, folder, config, lora(), learning_rate=1e-2),
    "sft_checkpointing": lambda models, folder, config: _sft(models, folder, config, gradient_checkpointing=True),
    "dpo": _dpo,
    "dpo_lora": lambda models, folder, config: _dpo(models, folder, config, lora(), learning_rate=1e-2),
    "dpo_precomputed": lambda models, folder, config: _dpo(models, folder, config, precompute_ref_log_probs=True),
    "kto_precomputed": _kto,
    "reward": _reward,
    "grpo": _grpo,
    "grpo_block_by_block": lambda models, folder, config: _grpo(
        models, folder, config and config | {"hf_zero": {"gather_for_generation": False}}, gather=False
    ),
}
