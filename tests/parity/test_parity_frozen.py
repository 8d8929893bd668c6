"""Test frozen parameters: layers, complete blocks, LoRA by hand and with peft on a frozen 16-bit base."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.support import ranks
from tests.support.models import CASES, Mlp, class_loss
from tests.support.parity import Run, Trace, check_training, initialize, train
from tests.support.rows import slow_but, thinned

STAGES = (0, 1, 2, 3)
FROZEN = {
    "first block": ("blocks.0.",),
    "all but the head": ("entry.", "blocks."),
    "every bias": (".bias",),
    "one matrix in every block": (".up.weight",),
}


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + hidden @ self.down.T @ self.up.T


def _freeze(which: str, run: Run) -> Trace:
    def build() -> nn.Module:
        model = CASES["mlp"].build()
        for name, parameter in model.named_parameters():
            if any(part in name for part in FROZEN[which]):
                parameter.requires_grad_(False)
        return model

    trace = check_training(build, CASES["mlp"].rows, class_loss, run, label=f"frozen: {which}")
    _check_frozen_untouched(build(), trace)
    return trace


def _check_frozen_untouched(model: nn.Module, trace: Trace) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert torch.equal(trace.weights[name], parameter.detach().to(trace.weights[name].dtype)), f"{name} is frozen and moved"
            assert name not in trace.masters


def _build_lora_by_hand() -> nn.Module:
    torch.manual_seed(0)
    model = Mlp().requires_grad_(False)
    for block in model.blocks:
        block.up = LoraLinear(block.up)
        block.down = LoraLinear(block.down)
    return model


def _lora_by_hand(run: Run) -> None:
    trace = check_training(_build_lora_by_hand, CASES["mlp"].rows, class_loss, run, label="LoRA by hand")
    _check_frozen_untouched(_build_lora_by_hand(), trace)


def _build_peft() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = CASES["llama"].build()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return get_peft_model(
            model, LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], bias="none")
        ).train()


def _peft(run: Run) -> None:
    case = CASES["llama"]
    trace = check_training(_build_peft, case.rows, case.forward, run, label="peft LoRA")
    _check_frozen_untouched(_build_peft(), trace)
    assert all("lora" in name for name in trace.masters)


def _frozen_base_has_no_state(stage: int) -> None:
    """Check that frozen parameters get neither master nor moments, and that at stage 3 only a shard of them is kept."""
    run = Run(stage=stage, dtype="bf16")
    model = _build_lora_by_hand()
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    engine = initialize(model, run)
    train(engine, CASES["mlp"].rows, class_loss, run)
    held = [unit for unit in engine.units if not unit.trainable]
    assert sum(unit.layout.numel for unit in held) == (frozen if stage == 3 else 0), "below stage 3 frozen parameters need no unit"
    assert all(unit.master is None for unit in held)
    masters = sum(unit.master.numel() for unit in engine.units if unit.trainable)
    share = ranks.world() if stage else 1
    padding = sum(unit.layout.padded_numel - unit.layout.numel for unit in engine.units)
    assert trainable <= masters * share <= trainable + padding, (masters, trainable, padding)
    engine.destroy()


@pytest.mark.fast_rows("0-first block-fp32", "2-all but the head-bf16", "3-every bias-fp32", "3-one matrix in every block-bf16")
@thinned(stage=STAGES, which=list(FROZEN), dtype=["fp32", "bf16"])
def test_frozen_parts_of_a_model(which: str, stage: int, dtype: str) -> None:
    ranks.run_ranks(_freeze, 2, which, Run(stage=stage, dtype=dtype, accumulation=2, clip=0.1))


@pytest.mark.fast_rows("3-fp16", "2-bf16")
@thinned(stage=STAGES, dtype=["fp32", "bf16", "fp16"])
def test_lora_by_hand(stage: int, dtype: str) -> None:
    ranks.run_ranks(_lora_by_hand, 3, Run(stage=stage, dtype=dtype, accumulation=2))


@pytest.mark.fast_rows("0-fp32", "3-bf16")
@thinned(stage=STAGES, dtype=["fp32", "bf16"])
def test_peft_lora(stage: int, dtype: str) -> None:
    pytest.importorskip("peft")
    ranks.run_ranks(_peft, 2, Run(stage=stage, dtype=dtype, accumulation=2))


@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_frozen_base_has_no_optimizer_state(stage: int) -> None:
    ranks.run_ranks(_frozen_base_has_no_state, 2, stage)
