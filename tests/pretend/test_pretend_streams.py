"""Gradients that are computed on several streams, on the pretend accelerator, which complains of what is read too early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import pretend
from tests.pretend import network
from tests.support import ranks
from tests.support.parity import Run, full_masters, initialize

pytestmark = pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())

WIDTH = 8


class Branches(nn.Module):
    """A block of two branches, the second on a stream of its own where ``aside``."""

    def __init__(self, aside: bool) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.aside = aside
        self.stream: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.aside:
            return self.near(inputs) + self.far(inputs)
        module: Any = torch.get_device_module(inputs.device)
        self.stream = self.stream or module.Stream(inputs.device)
        here = module.current_stream(inputs.device)
        self.stream.wait_stream(here)
        with module.stream(self.stream):
            far = self.far(inputs)
        near = self.near(inputs)
        here.wait_stream(self.stream)
        far.record_stream(here)
        inputs.record_stream(self.stream)
        return near + far


class Model(nn.Module):
    def __init__(self, aside: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branches(aside) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs).tanh()
        return inputs.square().mean()


def _masters(stage: int, aside: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = initialize(Model(aside), Run(stage=stage))
    for step in range(2):
        generator = torch.Generator().manual_seed(step * 2 + ranks.rank())
        engine.backward(engine(torch.randn(2, WIDTH, generator=generator).to(ranks.device())))
        engine.step()
    found = full_masters(engine)
    engine.destroy()
    return found


def _compare(stage: int) -> None:
    expected, found = _masters(stage, False), _masters(stage, True)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.fast_rows("1", "3")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_of_several_streams(stage: int) -> None:
    env = {"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": network.NAME}
    ranks.run_ranks(_compare, 2, stage, env=env, timeout=200.0)
