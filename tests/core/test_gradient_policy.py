"""Test how the division for the mean over ranks is split before and after the sum, so that an fp16 sum does not overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.assembly import networks
from hf_zero.assembly.policies import gradient_policy, precision_policy
from hf_zero.comm.back_end import NativeCollectives
from hf_zero.config.resolve import resolve
from hf_zero.core.stages import stage_policy
from tests.support import ranks
from tests.support.parity import Run, initialize

FP16, BF16 = {"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}
# Ranks -> divided by before the sum in fp16; by the rest after it.
HEADROOM = {1: 1, 2: 2, 3: 2, 4: 2, 5: 4, 6: 4, 8: 4, 12: 4, 16: 4, 17: 8, 64: 8, 100: 16, 512: 32}


def _scales(world: int, sharers: int = 1, stage: int = 2, **keys: Any) -> tuple[float, float]:
    config = resolve({"train_micro_batch_size_per_gpu": 1, **keys}, world_size=world).config
    policy = gradient_policy(config, precision_policy(config), stage_policy(stage), world, sharers)
    return policy.pre_scale, policy.post_scale


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", HEADROOM)
def test_fp16_is_divided_on_both_sides_of_the_sum(world: int, stage: int) -> None:
    pre = HEADROOM[world]
    for keys in (FP16, {**BF16, "communication_data_type": "fp16"}, {"communication_data_type": "fp16"}):
        assert _scales(world, stage=stage, **keys) == (1 / pre, (1 / world) / (1 / pre))


@pytest.mark.parametrize("world", HEADROOM)
def test_other_types_and_settings_are_divided_as_they_say(world: int) -> None:
    mean = 1 / world
    assert _scales(world) == _scales(world, **FP16, communication_data_type="fp32") == (mean, 1.0)
    assert _scales(world, **BF16) == (1.0, mean)
    for keys in (FP16, BF16, {}):
        assert _scales(world, **keys, gradient_allreduce_op="sum") == (1.0, 1.0)
        assert _scales(world, **keys, prescale_gradients=True) == (mean, 1.0)
        if world > 1:
            assert _scales(world, **keys, gradient_predivide_factor=2.0) == (0.5, 2 * mean)
    assert _scales(world, sharers=2, **FP16, gradient_allreduce_op="sum")[0] == (1 / HEADROOM[world] if world > 1 else 1.0)


class Constant(nn.Module):
    """A module whose gradients equal its input times the loss scale: (n,) -> ()."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).float().sum()


def _near_the_largest_number(stage: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, bool]:
    """Use a gradient of 20000 on every rank: the plain sum in fp16 overflows at 4 ranks, the mean does not."""
    monkeypatch.setattr(networks, "open_collectives", NativeCollectives)  # sums in the type of the message, as NCCL does
    extra = {"fp16": {"loss_scale": 1.0}, "gradient_clipping": 0.0}
    engine = initialize(Constant(), Run(stage, "fp16", extra=extra))
    assert isinstance(engine.stepper.reducer.exchange.collectives, NativeCollectives)
    engine.backward(engine(torch.full((4,), 20000.0, dtype=torch.float16)))
    engine.step()
    answer = float(engine.get_global_grad_norm()), engine.was_step_applied()
    engine.destroy()
    return answer


def _sum_on_the_network(stage: int) -> tuple[float, bool]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return _near_the_largest_number(stage, monkeypatch)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_sum_over_ranks_does_not_overflow_where_the_mean_does_not(stage: int) -> None:
    assert ranks.run_ranks(_sum_on_the_network, 4, stage) == [(40000.0, True)] * 4
