"""transformers' ZeRO-3 construction in a process of its own (a notebook, a test): nothing is sharded, everything else is the same."""

from __future__ import annotations

import torch

from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run
from tests.support.zero3 import transformers_zero3

GPT2 = CASES["gpt2"]


def _type_of_the_config() -> None:
    import transformers

    config = GPT2.build().config
    with transformers_zero3(Run(stage=3, dtype="bf16")):
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
        assert model.transformer.wte.weight.numel() == config.vocab_size * config.hidden_size
        assert model.lm_head.weight is model.transformer.wte.weight
    with transformers_zero3(Run(stage=3)):
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_parameters_have_the_type_of_the_config_on_one_rank() -> None:
    ranks.run_ranks(_type_of_the_config, 1)
