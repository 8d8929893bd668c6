"""`engine.offload_states`: memory of an idle engine goes and comes back, and nothing runs in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_zero.compat.settings import OffloadDeviceEnum, OffloadStateTypeEnum
from hf_zero.engine.set_aside import KINDS, Storages, set_aside
from hf_zero.errors import ConfigError, StateError
from tests import ranks
from tests.models import CASES
from tests.parity import Run, initialize

MLP = CASES["mlp"]


def test_views_of_one_memory_move_once_and_stay_views() -> None:
    whole = torch.arange(8.0)
    half, other = whole[4:], torch.ones(3, dtype=torch.bfloat16)
    aside = Storages([half, whole, other], pin_memory=True)
    assert aside.nbytes == 38 and whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    aside.bring_back()
    assert half.tolist() == [4, 5, 6, 7] and other.tolist() == [1, 1, 1] and aside.nbytes == 0
    whole[7] = 0
    assert half[3] == 0


def train(engine: Any, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        batch = {name: value.bfloat16() if value.is_floating_point() else value for name, value in MLP.rows(step, 0, ranks.rank()).items()}
        losses.append(MLP.forward(engine, batch))
        engine.backward(losses[-1])
        engine.step()
    return losses


def _moved(stage: int, kinds: tuple[str, ...]) -> None:
    plain, moved = (initialize(MLP.build(), Run(stage, "bf16")) for _ in range(2))
    expected = train(plain, range(4))
    first = train(moved, range(2))
    set_aside(moved, kinds, pin_memory=False)
    held = sum(unit.own.master.untyped_storage().nbytes() for unit in moved.units if unit.own.master is not None)
    assert (held == 0) is ("hp_params" in kinds)
    with pytest.raises(StateError, match=r"reload_states\(\) first"):
        train(moved, range(2, 3))
    with pytest.raises(StateError, match="saving or loading a checkpoint while"):
        moved.save_checkpoint("never_written")
    moved.optimizer.reload_states(non_blocking=True)
    moved.reload_states()  # nothing is left to do
    for one, other in zip(expected, first + train(moved, range(2, 4)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kinds", [KINDS, ("optim_states",), ("hp_params", "contiguous_grad_buffer")])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_goes_on_with_the_same_bits(stage: int, kinds: tuple[str, ...]) -> None:
    ranks.run_ranks(_moved, 2, stage, kinds)


def _on_a_host() -> None:
    engine = initialize(MLP.build(), Run(3, "bf16"))
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True)
    engine.optimizer.offload_states()
    train(engine, range(1))  # everything was in host memory, and has stayed
    engine.reload_states()
    with pytest.raises(ConfigError, match=r"'weights' is no kind of state; there are optim_states"):
        engine.offload_states(include=["weights"])
    with pytest.raises(ConfigError, match="goes to 'cpu' only"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)


def test_there_is_nothing_to_move_on_a_host() -> None:
    ranks.run_ranks(_on_a_host, 1)


def _objects() -> None:
    engine = initialize(MLP.build(), Run(1))
    engine.timers("own").start()
    engine.timers("own").stop()
    assert list(engine.timers.get_timers()) == ["own"] and not engine.monitor.enabled
    engine.monitor.write_events([("own", 1.0, 1)])
    assert engine._config.zero_config.stage == 1 and engine._config.train_batch_size == engine.train_batch_size()


def test_timers_monitor_and_configuration_of_an_engine() -> None:
    ranks.run_ranks(_objects, 1)
