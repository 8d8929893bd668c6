"""Buffers of another shape are refused like parameters of one, strict or not; whole models are written with buffers unrounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import ranks


class Counted(nn.Linear):
    """A layer with a buffer of ``length`` elements."""

    def __init__(self, length: int) -> None:
        super().__init__(4, 4)
        self.register_buffer("seen", torch.arange(float(length)))


def _engine(length: int):  # type: ignore[no-untyped-def]
    import hf_zero

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}}
    return hf_zero.initialize(model=Counted(length), config=config)[0]


def _another_shape(folder: str) -> None:
    from hf_zero.errors import CheckpointError

    first = _engine(3)
    first.module.seen.mul_(2)
    first.save_checkpoint(folder, "t")
    first.destroy()
    other = _engine(5)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"buffer seen has shape \(5,\) in this model and \(3,\) in the checkpoint"):
            other.load_checkpoint(folder, "t", load_module_strict=strict)
    assert torch.equal(other.module.seen, torch.arange(5.0))
    other.destroy()


def test_a_buffer_of_another_shape_is_refused(tmp_path: Path) -> None:
    ranks.run_ranks(_another_shape, 2, str(tmp_path))


BUFFERS = {"table": torch.float32, "exact": torch.float64, "coarse": torch.bfloat16}


def _written(folder: str) -> None:
    """Saves a model in fp16 whose buffers have three types, each with values that a narrower type would round."""
    import hf_zero

    model = nn.Linear(4, 4)
    for name, dtype in BUFFERS.items():
        model.register_buffer(name, torch.full((3,), 1 / 3, dtype=dtype))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True},
    }
    engine = hf_zero.initialize(model=model, config=config)[0]
    engine.save_checkpoint(folder, "t")
    engine.save_16bit_model(f"{folder}/whole", "model.safetensors")
    engine.destroy()


def test_whole_models_are_written_with_buffers_unrounded(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from hf_zero.checkpoint.convert.run import Conversion, convert
    from hf_zero.checkpoint.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict, get_fp32_state_dict_from_zero_checkpoint

    ranks.run_ranks(_written, 2, str(tmp_path))
    convert(Conversion(tmp_path, tmp_path / "converted", dtype="bf16", quiet=True))
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "coarse", dtype="bf16")
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "fine")
    wide = {**BUFFERS, "coarse": torch.float32}
    for found, weights, buffers in (
        (load_file(tmp_path / "whole" / "model.safetensors"), torch.float16, BUFFERS),
        (load_file(tmp_path / "converted" / "model.safetensors"), torch.bfloat16, BUFFERS),
        (load_file(tmp_path / "coarse" / "model.safetensors"), torch.bfloat16, BUFFERS),
        (load_file(tmp_path / "fine" / "model.safetensors"), torch.float32, wide),
        (get_fp32_state_dict_from_zero_checkpoint(tmp_path), torch.float32, wide),
    ):
        assert found["weight"].dtype == weights
        assert {name: found[name].dtype for name in BUFFERS} == buffers
        assert all(torch.equal(found[name], torch.full((3,), 1 / 3, dtype=dtype).to(buffers[name])) for name, dtype in BUFFERS.items())


class Statistics(nn.Module):
    """Layers whose buffers belong together and differ between ranks: statistics, a queue and its pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(3))
        self.queues = nn.ModuleList(Counted(length) for length in (3, 17))
        for queue in self.queues:
            queue.register_buffer("pointer", torch.zeros(1, dtype=torch.int16))
        self.register_buffer("odd", torch.arange(3, dtype=torch.int32).to(torch.uint16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            inputs = norm(self.layer(inputs))
        return inputs


def _one_rank_for_a_module(stage: int, folder: str) -> None:
    import hf_zero

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage}}
    model = Statistics()
    model.queues[0].pointer.fill_(300 + ranks.rank())
    engine = hf_zero.initialize(model=model, config=config)[0]
    assert int(model.queues[0].pointer) == 300, "rank 0's buffers, of every type"
    for buffer in model.buffers():
        buffer.copy_(torch.full_like(buffer, ranks.rank() + 1))
    engine.save_checkpoint(folder, f"t{stage}")
    engine.load_checkpoint(folder, f"t{stage}")
    ones = {rank + 1 for rank in range(ranks.world())}
    for name, module in model.named_modules():
        values = {float(value) for buffer in module._buffers.values() for value in buffer.reshape(-1).float()}
        assert len(values) <= 1 and values <= ones, f"{name}: buffers of several ranks {values}"
    engine.destroy()


def test_buffers_of_one_module_come_from_one_rank(tmp_path: Path) -> None:
    for stage in (1, 3):
        ranks.run_ranks(_one_rank_for_a_module, 3, stage, str(tmp_path))
