"""Optimizers that keep parameters of the model outside of their param groups: plain PyTorch's numbers, or one error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.core.optimizer.held_params import describe_other_holders, replace_parameters, single_in
from hf_zero.errors import UnsupportedError
from hf_zero.optim.elementwise import needs_whole_tensors
from tests.support import ranks


class Keeping(torch.optim.Optimizer):
    """Momentum over parameters that attributes hold: a list, tables by parameter and by id, and a table of moments."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        own = [param for group in self.param_groups for param in group["params"]]
        self.walked = {"all": own}
        self.rates = {param: 1.0 + index % 2 for index, param in enumerate(own)}
        self.signs = {id(param): -1.0 if index == 1 else 1.0 for index, param in enumerate(own)}
        self.moments: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.walked["all"]:
            if param.grad is not None:
                moment = self.moments.setdefault(param, torch.zeros_like(param)).mul_(0.5).add_(param.grad)
                param.sub_(moment, alpha=self.param_groups[0]["lr"] * self.rates[param] * self.signs[id(param)])


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def _trains(zero: dict[str, Any]) -> None:
    model, plain = _model(), _model()
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero}
    params = list(model.parameters())
    own: Any = Keeping(params)
    engine: Any = hf_zero.initialize(model=model, optimizer=own, config=config)[0]
    assert params == list(model.parameters())  # a list of the script stays as it was
    optimizer = Keeping(plain.parameters())
    for step in range(3):
        engine.backward(_loss(engine, step, ranks.rank()))
        engine.step()
        for rank in range(ranks.world()):
            (_loss(plain, step, rank) / ranks.world()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for param, wanted in zip(engine.parameters(), plain.parameters(), strict=True):
        with hf_zero.zero.GatheredParameters(param):
            torch.testing.assert_close(param.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1}, {"stage": 3, "offload_optimizer": {"device": "cpu"}}], ids=str)
def test_parameters_in_attributes_are_trained(zero: dict[str, Any]) -> None:
    ranks.run_ranks(_trains, 2, zero)


def _optimizer(**attributes: Any) -> Any:
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(2)) for _ in range(3)], 0.1)
    vars(optimizer).update(attributes)
    return optimizer


def test_containers_are_made_anew_and_others_stay() -> None:
    optimizer = _optimizer(plain=[1, {"a": (2,)}])
    first, second, third = optimizer.param_groups[0]["params"]
    other = nn.Parameter(torch.zeros(2))
    mine, plain = {"x": [(first, 1), second], first: 2, id(second): third}, optimizer.plain
    optimizer.mine, optimizer.same, optimizer.groups = mine, mine, optimizer.param_groups
    assert describe_other_holders(optimizer) == "keeps parameters of the model in its attribute 'mine'"
    replace_parameters(optimizer, {id(first): [other], id(second): [], id(third): []})
    assert optimizer.mine is optimizer.same and optimizer.mine is not mine and mine["x"][0][0] is first
    assert optimizer.mine == {"x": [(other, 1)], other: 2}
    assert optimizer.plain is plain and optimizer.groups is optimizer.param_groups and optimizer.groups[0]["params"][0] is first


def test_attributes_that_ranks_cannot_divide_are_errors() -> None:
    optimizer = _optimizer()
    params = optimizer.param_groups[0]["params"]
    optimizer.mine, optimizer.weights = list(params), [1.0, 2.0, 3.0]
    assert single_in(optimizer) == "weights"
    del optimizer.weights
    assert single_in(optimizer) == ""
    optimizer.first = params[0]
    assert single_in(optimizer) == "first"


def test_optimizers_that_cannot_have_whole_tensors_are_refused() -> None:
    params = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))]
    assert needs_whole_tensors(Keeping(params))
    with pytest.raises(UnsupportedError, match="keeps parameters of the model in its attribute 'walked', but the engine"):
        needs_whole_tensors(Keeping(params), shards_only=True)
    optimizer: Any = Keeping(params)
    optimizer.head = params[0]
    with pytest.raises(UnsupportedError, match="its attribute 'head' has values for single parameters"):
        needs_whole_tensors(optimizer)
    assert needs_whole_tensors(optimizer, all_here=True)
