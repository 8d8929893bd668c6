"""What scripts do with whole parameters of stage 3: keep them, ask their attributes, gather and release them by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import ranks
from tests.models import CASES
from tests.parity import Run, initialize, micro_step

MLP = CASES["mlp"]


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The loop of many scripts; on a CPU nothing in it copies."""
    import hf_zero

    state = {}
    for name, param in model.named_parameters():
        with hf_zero.zero.GatheredParameters(param, modifier_rank=None):
            state[name] = param.detach().cpu()
    return state


def buffer_bytes(engine: Any) -> int:
    return sum(unit._buffer.untyped_storage().nbytes() for unit in engine.units)


def _taken_tensors() -> None:
    import hf_zero

    engine = initialize(MLP.build(), Run(3))
    start = dict(MLP.build().named_parameters())
    by_one = whole(engine.module)
    with hf_zero.zero.GatheredParameters(list(engine.module.parameters())):
        at_once = {name: value.cpu() for name, value in engine.module.state_dict().items()}
    assert buffer_bytes(engine) == 0
    for step in range(2):
        micro_step(engine, MLP.rows(step, 0, ranks.rank()), MLP.forward, 0)
    for name, value in start.items():
        assert torch.equal(by_one[name], value) and torch.equal(at_once[name], value), name
        assert not torch.equal(whole(engine.module)[name], value), name


def test_tensors_taken_out_of_gathered_parameters_keep_their_values() -> None:
    ranks.run_ranks(_taken_tensors, 2)


def _between_forward_and_backward(look: bool) -> dict[str, Tensor]:
    """Trained weights; ``look``: parameters are gathered and left again between forward and backward."""
    import hf_zero

    engine = initialize(MLP.build(), Run(3))
    buffers = [unit._buffer for unit in engine.units]
    for step in range(2):
        loss = MLP.forward(engine, MLP.rows(step, 0, ranks.rank()))
        if look:
            with hf_zero.zero.GatheredParameters(list(engine.module.parameters())):
                pass
        engine.backward(loss)
        engine.step()
    if not look:
        assert all(unit._buffer is buffer for unit, buffer in zip(engine.units, buffers, strict=True)), "a buffer was given away"
    assert buffer_bytes(engine) == 0
    return whole(engine.module)


@pytest.mark.parametrize("world", [2, 3])
def test_gathering_between_forward_and_backward_changes_nothing(world: int) -> None:
    plain = ranks.run_ranks(_between_forward_and_backward, world, False)
    looked = ranks.run_ranks(_between_forward_and_backward, world, True)
    for name, value in plain[0].items():
        assert torch.equal(value, looked[0][name]), name
