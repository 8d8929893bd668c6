"""transformers' ZeRO-3 construction in a process of its own (a notebook, a test): the one rank owns all, everything else is the same."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run
from tests.support.zero3 import transformers_zero3

GPT2 = CASES["gpt2"]


def _type_of_the_config(folder: str) -> None:
    import transformers

    import hf_zero

    config = GPT2.build().config
    with transformers_zero3(Run(stage=3, dtype="bf16")):
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
        assert model.transformer.wte.weight.ds_shape == (config.vocab_size, config.hidden_size)
        assert model.lm_head.weight is model.transformer.wte.weight
    with transformers_zero3(Run(stage=3)):
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert {param.dtype for param in model.parameters()} == {torch.float32}
    plain = GPT2.build()
    plain.save_pretrained(folder)
    with transformers_zero3(Run(stage=3)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert all(param.numel() == 0 for param in model.parameters())
    with hf_zero.zero.GatheredParameters(model.parameters()):
        for (name, value), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(value, expected), name


def test_parameters_have_the_type_and_values_of_several_ranks(tmp_path: Path) -> None:
    ranks.run_ranks(_type_of_the_config, 1, str(tmp_path))
