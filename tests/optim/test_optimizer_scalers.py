"""torch's GradScaler over an engine's optimizer is refused, on all ranks, and works again over the script's optimizer afterwards."""

from __future__ import annotations

import pytest
import torch

from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import Run, initialize

MLP = CASES["mlp"]


class _Wrapper:
    """A library's object around an optimizer, as accelerate makes one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def _refused(stage: int, fused: bool) -> None:
    from hf_zero.errors import StateError

    model = MLP.build()
    own = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    engine = initialize(model, Run(stage), optimizer=own)
    batch = MLP.rows(0, 0, ranks.rank())
    scaler = torch.amp.GradScaler(ranks.device().type)
    scaler.scale(class_loss(engine, batch)).backward()
    for optimizer in (engine.optimizer, own, _Wrapper(engine.optimizer)):
        for method in (scaler.step, scaler.unscale_):
            with pytest.raises(StateError, match="an engine has the gradients of this optimizer.*enabled=False"):
                method(optimizer)
    off = torch.amp.GradScaler(ranks.device().type, enabled=False)
    engine.zero_grad()
    off.scale(class_loss(engine, batch)).backward()
    off.step(engine.optimizer)
    engine.destroy()

    free = torch.nn.Linear(2, 2)
    plain = torch.optim.SGD(free.parameters(), lr=0.1)
    before, scaler = free.weight.detach().clone(), torch.amp.GradScaler("cpu")
    scaler.scale(free(torch.ones(1, 2)).sum()).backward()
    scaler.step(plain)
    assert torch.allclose(free.weight, before - 0.1)


@pytest.mark.parametrize(("stage", "fused"), [(0, True), (3, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_a_scaler_over_an_engines_optimizer_is_refused(stage: int, fused: bool) -> None:
    ranks.run_ranks(_refused, 2, stage, fused)
