"""Test `engine.offload_states`: memory of an idle engine is moved to the host and back, and nothing runs in between."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.core.offloaded_states import KINDS, Storages
from hf_zero.core.schedule.gathered_parameters import GatheredParameters
from hf_zero.core.units.unit import full_shape
from hf_zero.deepspeed.safe_values import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_grad,
    safe_set_full_fp32_param,
)
from hf_zero.deepspeed.served.helpers import get_state_devices
from hf_zero.deepspeed.served.settings import OffloadDeviceEnum, OffloadStateTypeEnum
from hf_zero.errors import ConfigError, StateError
from hf_zero.memory.buffers import HostMemory, HostPool
from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run, initialize

MLP = CASES["mlp"]


def test_views_of_one_memory_move_once_and_stay_views() -> None:
    whole = torch.arange(8.0)
    half, other = whole[4:], torch.ones(3, dtype=torch.bfloat16)
    moved = Storages([half, whole, other], HostPool(HostMemory(torch.device("cpu"))))
    assert moved.nbytes == 38 and whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    moved.copy_back()
    assert half.tolist() == [4, 5, 6, 7] and other.tolist() == [1, 1, 1] and moved.nbytes == 0
    whole[7] = 0
    assert half[3] == 0


def test_what_waits_in_a_larger_block_comes_back_in_its_own_size() -> None:
    pool, tensor = HostPool(HostMemory(torch.device("cpu"))), torch.arange(4.0)
    pool.give(pool.take(100))
    moved = Storages([tensor], pool)
    assert moved.nbytes == 16
    moved.copy_back()
    assert tensor.tolist() == [0, 1, 2, 3] and tensor.untyped_storage().nbytes() == 16


def batch_of(engine: Any, step: int) -> dict[str, torch.Tensor]:
    dtype = engine.precision.param_dtype or torch.float32
    rows = MLP.rows(step, 0, ranks.rank())
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in rows.items()}


def train(engine: Any, steps: range) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        losses.append(MLP.forward(engine, batch_of(engine, step)))
        engine.backward(losses[-1])
        engine.step()
    return losses


def _moved(stage: int, kinds: tuple[str, ...]) -> None:
    plain, moved = (initialize(MLP.build(), Run(stage, "bf16")) for _ in range(2))
    expected = train(plain, range(4))
    first = train(moved, range(2))
    masters = [unit.own.master for unit in moved.units if unit.own.master is not None]
    moved.offloaded_states.move(kinds, pin_memory=False)
    held = sum(master.untyped_storage().nbytes() for master in masters)
    assert (held == 0) is ("hp_params" in kinds)
    with pytest.raises(StateError, match=r"reload_states\(\) first"):
        train(moved, range(2, 3))
    with pytest.raises(StateError, match="saving or loading a checkpoint while"):
        moved.save_checkpoint("never_written")
    moved.optimizer.reload_states(non_blocking=True)
    moved.reload_states()  # nothing is left to do
    for one, other in zip(expected, first + train(moved, range(2, 4)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.fast_rows("3-kinds0", "2-kinds1", "0-kinds0")
@pytest.mark.parametrize("kinds", [KINDS, ("optim_states",), ("hp_params", "contiguous_grad_buffer")])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_training_goes_on_with_the_same_bits(stage: int, kinds: tuple[str, ...]) -> None:
    ranks.run_ranks(_moved, 2, stage, kinds)


def _refused(run: Run, folder: str) -> None:
    plain, moved = (initialize(MLP.build(), run) for _ in range(2))
    train(plain, range(1))
    train(moved, range(1))
    params = list(moved.module.parameters())
    whole = {name: torch.zeros(full_shape(param)) for name, param in moved.module.named_parameters()}
    moved.offloaded_states.move(("hp_params", "lp_params"), pin_memory=False)
    moved.offloaded_states.move(KINDS, pin_memory=False)  # what is away already stays as it is
    for refused in (
        GatheredParameters(params).__enter__,
        moved.units[0].unshard,
        partial(moved.load_module_state_dict, whole),
        partial(moved.save_16bit_model, folder),
        moved.module.state_dict,
        moved.optimizer.state_dict,
        partial(safe_get_full_fp32_param, params[0]),
        partial(safe_set_full_fp32_param, params[0], torch.zeros(full_shape(params[0]))),
        partial(safe_get_full_grad, params[0]),
        partial(safe_get_local_grad, params[0]),
        partial(safe_get_full_optimizer_state, params[0], "exp_avg"),
        partial(next(iter(moved.module.children())), torch.zeros(2, 2)),
        *(param.sum for param in params),  # a read finds no missing memory
    ):
        with pytest.raises(StateError, match=r"reload_states\(\) first"):
            refused()
    assert all(param.numel() == 0 for param in params)
    moved.reload_states()
    for one, other in zip(train(plain, range(1, 3)), train(moved, range(1, 3)), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(plain.module.parameters(), params, strict=True):
        assert torch.equal(safe_get_full_fp32_param(one), safe_get_full_fp32_param(other))


@pytest.mark.parametrize(("stage", "dtype", "small"), [(1, "bf16", 0), (3, "fp32", 0), (3, "bf16", 100_000)])
def test_every_way_to_values_that_are_away_is_refused(stage: int, dtype: str, small: int, tmp_path: Path) -> None:
    ranks.run_ranks(
        _refused, 2, Run(stage, dtype, extra={"zero_optimization": {"stage3_param_persistence_threshold": small}}), str(tmp_path)
    )
    assert not list(tmp_path.iterdir())


def _weights_stay(stage: int) -> None:
    engine = initialize(MLP.build(), Run(stage, "bf16"))
    train(engine, range(1))
    batch = batch_of(engine, 1)
    params = list(engine.module.parameters())
    with torch.no_grad():
        expected = MLP.forward(engine, batch)
        engine.offloaded_states.move(("optim_states", "hp_params"), pin_memory=False)
        assert torch.equal(MLP.forward(engine, batch), expected)
    with GatheredParameters(params):
        assert all(param.shape == full_shape(param) for param in params)
    with pytest.raises(StateError, match=r"reload_states\(\) first"), GatheredParameters(params, modifier_rank=0):
        pass
    engine.reload_states()
    with GatheredParameters(params, modifier_rank=0), torch.no_grad():
        params[0].add_(1)
    train(engine, range(1, 2))


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_stay_are_read_while_masters_and_moments_are_away(stage: int) -> None:
    ranks.run_ranks(_weights_stay, 2, stage)


def _busy(stage: int) -> None:
    engine = initialize(MLP.build(), Run(stage))
    batch = MLP.rows(0, 0, ranks.rank())
    loss = MLP.forward(engine, batch)
    with pytest.raises(StateError, match=r"offload_states\(\) was called during a forward"):
        engine.offload_states()
    raised = []

    def in_backward(grad: torch.Tensor) -> None:
        with pytest.raises(StateError, match=r"offload_states\(\) was called during a forward"):
            engine.offload_states()
        raised.append(True)

    loss.register_hook(in_backward)
    engine.backward(loss)
    assert raised
    engine.offload_states()
    engine.reload_states()
    engine.step()
    MLP.forward(engine, batch)  # its graph is gone: no backward can come
    engine.offload_states()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_under_way_or_to_come_is_not_robbed(stage: int) -> None:
    ranks.run_ranks(_busy, 1, stage)


def test_nothing_is_lost_when_a_copy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, made = [torch.ones(4), torch.ones(5)], []
    memory = HostMemory(torch.device("cpu"))
    empty = memory.empty

    def fails(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(args)
        if len(made) == 2:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(memory, "empty", fails)
    with pytest.raises(OSError, match="Cannot allocate"):
        Storages(tensors, HostPool(memory))
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 4, [1.0] * 5]


class Nested(torch.optim.SGD):
    """An optimizer that keeps its state in lists, as second-order optimizers keep their preconditioners."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"step": torch.tensor(1.0), "factors": [torch.ones(3), {"basis": (torch.ones(2, 2),)}]}


def _nested() -> None:
    module = MLP.build()
    engine = initialize(module, Run(0), optimizer=Nested(module.parameters(), lr=0.1))
    train(engine, range(1))
    states = list(engine.optimizer.state.values())
    engine.offloaded_states.move(("optim_states",), pin_memory=False)
    assert states
    for state in states:
        factors, steps = (state["factors"][0], state["factors"][1]["basis"][0]), state["step"]
        assert [tensor.untyped_storage().nbytes() for tensor in (*factors, steps)] == [0, 0, 4]
    engine.reload_states()
    assert all(state["factors"][1]["basis"][0].tolist() == [[1, 1], [1, 1]] for state in states)


def test_moments_inside_lists_move_too() -> None:
    ranks.run_ranks(_nested, 1)


def _on_a_host() -> None:
    engine = initialize(MLP.build(), Run(3, "bf16"))
    engine.offload_states(include=[OffloadStateTypeEnum.optim_states], device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True)
    engine.optimizer.offload_states()
    train(engine, range(1))  # everything was in host memory, and has stayed
    engine.reload_states()
    assert [len(get_state_devices(engine, kind)) for kind in OffloadStateTypeEnum] == [1, 1, 1, 0, 0]
    engine.backward(MLP.forward(engine, batch_of(engine, 1)))
    assert get_state_devices(engine, "lp_grads") == {torch.device("cpu")}
    engine.step()
    with pytest.raises(ConfigError, match=r"'weights'\): not a kind of state; allowed are optim_states"):
        get_state_devices(engine, "weights")
    with pytest.raises(ConfigError, match=r"'weights' is not a kind of state; allowed are optim_states"):
        engine.offload_states(include=["weights"])
    with pytest.raises(ConfigError, match="can be moved to 'cpu' only"):
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


def _throughput() -> None:
    engine = initialize(MLP.build(), Run(1, accumulation=2))
    timer = engine.tput_timer
    assert timer.batch_size == engine.train_batch_size() and not (timer.initialized or timer.started or timer.start_time)
    train(engine, range(8))
    assert engine.tput_timer is timer and (timer.micro_step_count, timer.global_step_count) == (8, 4)
    counted = timer.batch_size * (4 - timer.start_step) / timer.total_elapsed_time
    assert timer.avg_samples_per_sec() == counted and 0 < timer.end_time - timer.start_time <= timer.total_elapsed_time
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)


def test_the_throughput_of_an_engine_is_counted_from_the_first_look_on() -> None:
    ranks.run_ranks(_throughput, 1)


def test_timers_monitor_and_configuration_of_an_engine() -> None:
    ranks.run_ranks(_objects, 1)
