"""Rows that values choose: masks as indices, lists of chosen experts, slices between numbers read from tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_zero.comm.back_end import build_collectives
from hf_zero.comm.topology import build_topology
from hf_zero.tensor_parallel.apply import apply_plan
from hf_zero.tensor_parallel.functions import ModelGroup, Part
from hf_zero.tensor_parallel.planner import make_plan
from tests.support import ranks
from tests.tensor_parallel.breadth import relative

WIDTH, INNER, EXPERTS, VOCAB = 8, 16, 3, 24


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden).relu())


class Masked(nn.Module):
    """Each expert works on the rows of a mask; which experts there are is asked of values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({f"expert_{index}": Expert() for index in range(EXPERTS)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = nn.functional.one_hot(self.router(hidden).argmax(-1), EXPERTS).bool()
        result = torch.zeros_like(hidden)
        for index in chosen.reshape(-1, EXPERTS).sum(0).nonzero(as_tuple=True)[0].tolist():
            result[chosen[..., index]] = self.experts[f"expert_{index}"](hidden[chosen[..., index]])
        return result


class Sliced(nn.Module):
    """Rows in order of their expert, multiplied piece by piece with weights of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 3)

    def product(self, rows: torch.Tensor, weight: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
        result = torch.zeros(rows.shape[0], weight.shape[-1])
        for index in range(EXPERTS):
            start, stop = stops[index], stops[index + 1]
            result[start:stop] = torch.matmul(rows[start:stop], weight[index])
        return result

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, WIDTH)
        order = self.router(rows).argmax(-1)
        stops = torch.cat((torch.zeros(1, dtype=torch.long), torch.cumsum(nn.functional.one_hot(order, EXPERTS).sum(0), 0)))
        places = order.argsort()
        result = self.product(self.product(rows[places], self.up, stops).relu(), self.down, stops)
        return torch.zeros_like(rows).index_copy(0, places, result).view(hidden.shape)


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(VOCAB, WIDTH), kind(), nn.Linear(WIDTH, VOCAB)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        return self.head(self.norm(hidden + self.layer(hidden)))


def largest_error(kind: type[nn.Module]) -> float:
    topology = build_topology(model_parallel=ranks.world())
    assert topology.model is not None
    group = ModelGroup(build_collectives(topology.model))
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(Model(kind))
    whole, split = models
    plan = make_plan(split, group.world)
    apply_plan(split, plan, group)
    assert plan.modules["head"].split != "whole"
    tokens = torch.randint(0, VOCAB, (2, 10), generator=torch.Generator().manual_seed(0))
    outputs = [model(tokens) for model in models]
    for output in outputs:
        output.pow(2).sum().backward()
    errors = [relative(outputs[1].detach(), outputs[0].detach())]
    for (name, param), other in zip(split.named_parameters(), whole.parameters(), strict=True):
        if other.grad is None:
            assert param.grad is None or not param.grad.any()
            continue
        entry = plan.parameters.get(name)
        part = other.grad if entry is None else Part(entry.dim, entry.ranges, entry.shape[entry.dim]).take(other.grad, group.rank)
        assert param.grad is not None
        errors.append(relative(param.grad, part))
    return max(errors)


@pytest.mark.parametrize("kind", [Masked, Sliced])
def test_split_models_compute_what_whole_ones_do(kind: type[nn.Module]) -> None:
    assert max(ranks.run_ranks(largest_error, 2, kind)) < 1e-4


def test_experts_chosen_by_masks_are_split() -> None:
    plan = make_plan(Model(Masked), 2)
    assert {plan.modules[f"layer.experts.expert_{index}.up"].split for index in range(EXPERTS)} == {"column"}
    assert {plan.modules[f"layer.experts.expert_{index}.down"].split for index in range(EXPERTS)} == {"row"}
