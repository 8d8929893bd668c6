"""Checkpoints of a ``PipelineModule`` load over any number of stages; what is saved whole has the values of all stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_zero.deepspeed.pipe.building import LayerSpec
from tests.pipeline.ds_pipelines import Block, build, compare, expected, feed, halve, replica_of, tied_layers
from tests.support import parity, ranks
from tests.support.parity import Run


def steps(engine: object, run: Run, stages: int, first: int, count: int) -> tuple[list[float], list[float]]:
    batches = feed(run, replica_of(stages), first, count)
    losses, norms = [], []
    for _ in range(count):
        losses.append(float(engine.train_batch(batches)))  # type: ignore[attr-defined]
        norms.append(parity.as_float(engine.get_global_grad_norm()))  # type: ignore[attr-defined]
    return losses, norms


def check_resumed(folder: str, counts: list[int]) -> None:
    """Two steps over the first number of stages and a checkpoint; over each, two more from there are those of plain PyTorch."""
    run = Run(1, accumulation=3, clip=0.1, steps=4)
    engine = parity.initialize(build(counts[0]), run)
    begun = steps(engine, run, counts[0], 0, 2)
    engine.save_checkpoint(folder, tag="two")
    engine.destroy()
    for stages in counts:
        engine = parity.initialize(build(stages), run)
        engine.load_checkpoint(folder, tag="two")
        assert engine.global_steps == 2
        losses, norms = steps(engine, run, stages, 2, 2)
        weights = engine._consolidated_16bit_state_dict()
        engine.destroy()
        if ranks.world() // stages == ranks.world() // counts[0] and ranks.rank() == 0:
            compare(run, begun[0] + losses, begun[1] + norms, weights, expected(run, ranks.world() // stages), stages)
        dist.barrier()


@pytest.mark.fast_rows("4-counts1")
@pytest.mark.parametrize(("world", "counts"), [(2, [2, 2, 1]), (4, [2, 4, 2])])
def test_resumed_over_other_stages(tmp_path: Path, world: int, counts: list[int]) -> None:
    ranks.run_ranks(check_resumed, world, str(tmp_path), counts)


def check_resumed_alike(folder: str) -> None:
    """From four stages to two and to one with the samples of one replica: the losses are those of the four."""
    run = Run(0, accumulation=2)
    losses = {}
    for stages in (4, 2, 1):
        engine = parity.initialize(build(stages), run)
        if stages == 4:
            steps(engine, run, 4, 0, 2)
            engine.save_checkpoint(folder, tag="four")
        else:
            engine.load_checkpoint(folder, tag="four")
        losses[stages] = [float(engine.train_batch(feed(run, 0, 2, 1)))]  # every replica the same samples
        engine.destroy()
        dist.barrier()
    assert losses[2] == pytest.approx(losses[4], rel=1e-6) and losses[1] == pytest.approx(losses[4], rel=1e-6)


@pytest.mark.slow  # fast: `test_resumed_over_other_stages`
def test_the_same_step_after_loading_over_fewer_stages(tmp_path: Path) -> None:
    ranks.run_ranks(check_resumed_alike, 4, str(tmp_path))


class Counting(Block):
    """A layer with running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.statistics = nn.BatchNorm1d(width)

    def forward(self, parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, mask = super().forward(parts)
        return self.statistics(hidden.transpose(1, 2)).transpose(1, 2), mask


def counting_layers() -> list[object]:
    first, *_, last = tied_layers()
    return [first, LayerSpec(Counting, 8), halve, LayerSpec(Counting, 8), last]


def check_statistics(folder: str) -> None:
    run = Run(0, accumulation=3)
    engine = parity.initialize(build(2, counting_layers), run)
    steps(engine, run, 2, 0, 2)
    state = engine._consolidated_16bit_state_dict()
    engine.save_checkpoint(folder, tag="statistics")
    engine.destroy()
    alone = parity.initialize(build(1, counting_layers), run)
    alone.load_checkpoint(folder, tag="statistics")
    if ranks.rank() == 0:
        for place in (1, 3):
            assert state[f"{place}.statistics.num_batches_tracked"] == 6
            loaded = alone.module.get_buffer(f"{place}.statistics.running_mean")
            assert loaded.abs().max() > 0 and torch.equal(loaded, state[f"{place}.statistics.running_mean"])
    alone.destroy()


def test_running_statistics_of_all_stages_are_saved(tmp_path: Path) -> None:
    ranks.run_ranks(check_statistics, 2, str(tmp_path))
