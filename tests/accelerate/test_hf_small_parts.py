"""A part of a stage-3 model whose parameters are small enough to stay gathered, called by one rank alone."""

from __future__ import annotations

import torch

from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run, initialize, micro_step

GPT2 = CASES["gpt2"]


def _one_rank_calls_the_last_norm() -> None:
    """PEFT computes a prompt on the rank that saves it; there is nothing to gather for it."""
    model = GPT2.build()
    for name, param in model.named_parameters():
        param.requires_grad_("ln_f" in name)
    norm = model.transformer.ln_f
    size = norm.weight.numel() + norm.bias.numel()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 2 * size, "stage3_max_reuse_distance": 0}
    engine = initialize(model, Run(stage=3, extra={"zero_optimization": zero}))
    assert any(unit.state.name == "SHARDED" for unit in engine.units)
    hidden = torch.randn(2, norm.weight.numel())
    for number in range(2):
        micro_step(engine, GPT2.rows(number, 0, ranks.rank()), GPT2.forward, 0)
        if ranks.rank() == 0:
            expected = torch.nn.functional.layer_norm(hidden, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
            assert torch.equal(norm(hidden), expected)
    assert engine.global_steps == 2
    engine.destroy()


def test_one_rank_may_call_what_is_always_whole() -> None:
    ranks.run_ranks(_one_rank_calls_the_last_norm, 2)
