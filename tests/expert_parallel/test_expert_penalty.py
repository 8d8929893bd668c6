"""Gradient penalties through divided experts: the training of plain PyTorch, also with ranks whose experts get no tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

from tests.support import ranks
from tests.support.experts import ListedBlock, alike, build, with_experts, with_split_layers
from tests.support.models import Batch
from tests.support.parity import Run, check_training

MIXTRAL, WIDTH = "MixtralForCausalLM", 8


def penalized(score: Tensor, rows: Tensor) -> Tensor:
    """Return the score with the penalty of Gulrajani et al. 2017, "Improved Training of Wasserstein GANs", arXiv 1704.00028."""
    (gradient,) = torch.autograd.grad(score, rows, create_graph=True)
    return score + 10 * (gradient.flatten(1).norm(2, dim=1) - 1).square().mean()


def of_layer(model: Any, batch: Batch) -> Tensor:
    rows = batch["rows"].clone().requires_grad_()
    return penalized(model(rows)[0].square().mean(), rows)


def of_model(model: Any, batch: Batch) -> Tensor:
    rows = batch["rows"].clone().requires_grad_()
    return penalized(model(inputs_embeds=rows, use_cache=False).logits.float().square().mean(), rows)


def of_list(model: Any, batch: Batch) -> Tensor:
    rows = batch["rows"].clone().requires_grad_()
    return penalized(model(rows), rows)


class OnRows(nn.Module):
    """Lists of experts, of which rows choose those of the first rank where all sums of the gate have that sign."""

    def __init__(self, one_sided: bool) -> None:
        super().__init__()
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(ListedBlock(WIDTH, 4) for _ in range(2))
        self.one_sided = one_sided

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.begin(rows)
        for block in self.layers:
            hidden = hidden + block(hidden.abs() if self.one_sided else hidden)[0]
        return hidden.square().mean()


def listed(one_sided: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = OnRows(one_sided)
    with torch.no_grad():
        for block in model.layers:
            block.gate.weight.mul_(3)  # type: ignore[union-attr, operator]
            if one_sided:
                block.gate.weight.abs_().mul_(torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None])  # type: ignore[union-attr, operator]
    return model


def deepspeeds() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        model = MoE(WIDTH, expert, num_experts=4, ep_size=2, min_capacity=0, use_rts=False)
        for parameter in model.parameters():
            nn.init.normal_(parameter)  # experts begin alike
    return model


def to_first(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """Send all tokens to the experts of the first rank (a hook of routers): the second has none of any rank."""
    logits, weights, chosen = output
    return logits, weights, torch.arange(chosen.shape[1]).expand_as(chosen).contiguous()


def mixtral(idles: bool) -> nn.Module:
    model: Any = build(MIXTRAL)
    model.set_attn_implementation("eager")  # kernels of attention have no second derivative
    for name, module in model.named_modules():
        if idles and name.endswith("mlp.gate"):
            module.register_forward_hook(to_first)
    return model


def rows_of(width: int) -> Any:
    def feed(step: int, micro: int, rank: int) -> Batch:
        return {"rows": torch.randn(2, 5, width, generator=torch.Generator().manual_seed(1 + step + 10 * micro + 100 * rank))}

    return feed


def check_two(every: bool) -> None:
    for stage in (0, 1, 2, 3) if every else (3,):
        check_training(deepspeeds, rows_of(WIDTH), of_layer, Run(stage, accumulation=2), label="a penalty through DeepSpeed's layer")
        for idles in (False, True):
            run = with_experts(Run(stage), 2)
            check_training(partial(mixtral, idles), rows_of(width(MIXTRAL)), of_model, run, label=f"a penalty, idle: {idles}")
            check_training(partial(listed, idles), rows_of(WIDTH), of_list, run, label=f"a list of experts, idle: {idles}")
        shared = with_split_layers(with_experts(Run(stage), 2), 2)
        check_training(partial(mixtral, False), alike(rows_of(width(MIXTRAL)), 2), of_model, shared, label="split layers")


def width(name: str) -> int:
    return int(build(name).config.hidden_size)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_penalties(every: bool) -> None:
    ranks.run_ranks(check_two, 2, every, timeout=300)
