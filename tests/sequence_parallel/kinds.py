"""Models, masks and stages that training over parts of sequences is tried with."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from tests.support.examples import EXAMPLES
from tests.support.models import VOCAB
from tests.support.parity import Run
from tests.support.sequences import Data, llama


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, use_cache=False
    )
    config._attn_implementation = "sdpa"
    return GPT2LMHeadModel(config)


def mistral(window: int = 5) -> nn.Module:
    """Every token sees the last ``window``; the window crosses the borders of slices."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=window, max_position_embeddings=64, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    return MistralForCausalLM(config)


def recomputing(reentrant: bool) -> nn.Module:
    model = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # type: ignore[operator]
    return model


MASKS: dict[str, tuple[Callable[[], nn.Module], Run, Data]] = {
    "plain": (llama, Run(stage=0), Data()),
    "padding right, prompt": (llama, Run(stage=1, accumulation=2, clip=0.5), Data(padding="right", prompt=13)),
    "padding left": (partial(llama, kv_heads=1), Run(stage=2, clip=0.5), Data(padding="left")),
    "packed": (llama, Run(stage=3, accumulation=2), Data(packed=True)),
    "packed eager": (partial(llama, implementation="eager"), Run(stage=2), Data(packed=True)),
    "eager padding": (partial(llama, implementation="eager"), Run(stage=1), Data(padding="left")),
    "sliding window packed": (mistral, Run(stage=1), Data(packed=True)),
    "heads that share keys across ranks": (partial(llama, heads=6, kv_heads=3), Run(stage=1), Data()),
    "recomputed": (partial(recomputing, False), Run(stage=3, accumulation=2), Data(padding="right")),
    "recomputed, reentrant": (partial(recomputing, True), Run(stage=3), Data(packed=True)),
}


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))  # type: ignore[arg-type]


def tiled() -> nn.Module:
    """The Llama of the example of long sequences, in tiles of 5 tokens."""
    script = runpy.run_path(str(EXAMPLES / "minimal" / "long_sequences.py"))
    with torch.device("meta"):
        config = llama().config
    model: nn.Module = script["TiledLlama"](config)
    type(model).forward.__globals__.update(TILE=5, LOSS_TILE=5)
    return model


def adapted_in_four_bit(base: str) -> nn.Module:
    """Adapters, the same on every rank, on the model in the folder ``base``, loaded as scripts do it for QLoRA."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    kind = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=kind, dtype=torch.float32)
    model = prepare_model_for_kbit_training(model)
    adapters = LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return get_peft_model(model, adapters).train()
