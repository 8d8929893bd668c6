"""Small models, engines and adapters whose weights are taken elsewhere, for the tests of streams and gathers."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero
from tests.support import ranks

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama() -> LlamaForCausalLM:
    """The same on every rank."""
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **LLAMA))


def engine_of(model: nn.Module, stage: int, **config: Any) -> Any:
    """An engine with AdamW; ``config``: further sections."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    sections = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero,
        **config,
    }
    return hf_zero.initialize(model=model, config=sections)[0]


def train(engine: Any) -> None:
    """One step."""
    tokens = torch.arange(8).view(1, 8) + ranks.rank()
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def lora(model: nn.Module, **settings: Any) -> Any:
    """The model with adapters, none of them zero."""
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"], **settings}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(11)
    for name, param in adapted.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            nn.init.normal_(param, std=0.1)
    return adapted
