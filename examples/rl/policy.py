"""Load the model with which both server and trainer start."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

TOY = "toy"
VOCABULARY = 64


def load_policy(name: str) -> PreTrainedModel:
    """Return a causal language model by folder or hub name; ``toy`` is a Llama of 100,000 parameters with fixed random weights."""
    if name != TOY:
        return AutoModelForCausalLM.from_pretrained(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes))
    model.generation_config.eos_token_id = 2
    return model
