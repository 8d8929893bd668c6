"""What TRL's trainers are given in these tests: a tokenizer, texts, adapters and arguments, the same under DDP and under every stage."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.support import trainers

STEPS = 4


def tokenizer() -> Any:
    """Words ``w0`` to ``w56`` and the special tokens of the tiny models."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<2>", "<3>", "<4>", "<s>", "</s>"]
    words = {word: index for index, word in enumerate(special + [f"w{index}" for index in range(trainers.VOCAB - len(special))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def texts(count: int, words: int, seed: int) -> list[str]:
    """Texts of about ``words`` random words."""
    source = random.Random(seed)
    return [" ".join(f"w{source.randrange(50)}" for _ in range(words + index % 3)) for index in range(count)]


def pairs() -> Any:
    """Prompts with an answer that is preferred and one that is not."""
    from datasets import Dataset

    chosen, rejected = ([f" {text}" for text in texts(48, 4, seed)] for seed in (2, 3))
    return Dataset.from_dict({"prompt": texts(48, 4, 1), "chosen": chosen, "rejected": rejected})


def options(folder: Path, config: Any, cls: Any, **changes: Any) -> Any:
    """Training arguments of class ``cls``."""
    common = {"max_steps": STEPS, "bf16": False, "gradient_checkpointing": False, "gradient_accumulation_steps": 1}
    return trainers.arguments(folder, config, cls, **(common | changes))


def lora() -> Any:
    """Adapters on every linear layer."""
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
