"""DeepSpeed's memory estimates with hf_zero's numbers: against the bytes that an engine holds; and `OnDevice`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.deepspeed.served import memory_needs as needs
from hf_zero.deepspeed.served.construction import OnDevice
from hf_zero.errors import ConfigError
from tests.support import ranks


def _layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))


def _held_bytes(stage: int) -> int:
    """Weights, masters, moments and gradient shards of this rank between backward and step."""
    import hf_zero

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    model = _layers()
    engine, optimizer, *_ = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum())
        held = [entry.shard for entry in engine.stepper.reducer.gradients]
        gradients = sum(shard.nbytes for shard in held if shard is not None)
        engine.step()
    weights = sum(unit.shard.nbytes if stage == 3 else unit.full.nbytes for unit in engine.units)
    states = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
    return weights + gradients + states + sum(unit.master.nbytes for unit in engine.units)


@pytest.mark.parametrize("stage", [2, 3])
def test_estimate_is_what_an_engine_holds(stage: int) -> None:
    total, largest = 8 * 64 * 64, 64 * 64
    if stage == 2:
        _, device = needs.estimate_zero2_model_states_mem_needs(total, num_gpus_per_node=2, cpu_offload=False)
    else:
        _, device, layers = needs.estimate_zero3_model_states_mem_needs(total, largest, 2, cpu_offload=False, cpu_offload_params=False)
        device -= layers
    assert ranks.run_ranks(_held_bytes, 2, stage) == [device, device]


def test_offload_moves_bytes_to_the_host() -> None:
    host, device, layers = needs.estimate_zero3_model_states_mem_needs(1_000_000, 1000, 2, additional_buffer_factor=1.0)
    assert (host, device) == (18_000_000, layers)
    host, device = needs.estimate_zero2_model_states_mem_needs(1_000_000, 2, additional_buffer_factor=1.0)
    assert (host, device) == (16_000_000, 2_000_000)


def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    needs.estimate_zero3_model_states_mem_needs_all_live(_layers(), num_gpus_per_node=2)
    needs.estimate_zero2_model_states_mem_needs_all_cold(3_000_000_000, num_gpus_per_node=8, num_nodes=2)
    text = capsys.readouterr().out
    assert "ZeRO-3" in text and "zero_init" in text
    assert "3,000M parameters" in text and "8.38 GiB" in text  # 2 bytes a parameter and 16 / 16


def test_on_device() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = nn.Linear(3, 3)
    assert (layer.weight.dtype, layer.weight.is_meta) == (torch.bfloat16, True)
    with OnDevice(dtype=torch.float16, enabled=False):
        assert nn.Linear(3, 3).weight.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32 and not torch.zeros(1).is_meta
    with pytest.raises(ConfigError, match=r"dtype is torch.int8"):
        OnDevice(dtype=torch.int8)
