"""Buffers of another shape are refused like parameters of one, strict or not; those not in the checkpoint stay."""

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
