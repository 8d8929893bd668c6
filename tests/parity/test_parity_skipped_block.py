"""Test blocks that a rank never runs: experts, LayerDrop, a tower without input. No hang, and the skipped block adds zeros."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_zero.core.units.layout import UnitState
from hf_zero.core.units.unit import Unit
from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.parity import Run, check_training, initialize
from tests.support.rows import slow_but, thinned
from tests.support.skipped_blocks import Chosen, Nested, Regions, TwoTowers, loss_of_choice, loss_of_two_backwards

STAGES = (0, 1, 2, 3)


def expert_per_rank(step: int, micro: int, rank: int) -> list[int]:
    return [rank % 4]


def rotating_expert(step: int, micro: int, rank: int) -> list[int]:
    return [(step + micro + rank) % 4]


def layer_drop(step: int, micro: int, rank: int) -> list[int]:
    kept = torch.rand(4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)) < 0.5
    return [index for index in range(4) if kept[index]]


def dropped_on_every_rank(step: int, micro: int, rank: int) -> list[int]:
    return [0, 3] if step == 1 else [0, 1, 2, 3]


def reversed_on_odd_ranks(step: int, micro: int, rank: int) -> list[int]:
    return [3, 2, 1, 0] if rank % 2 else [0, 1, 2, 3]


def repeated_on_one_rank(step: int, micro: int, rank: int) -> list[int]:
    return [0, 1, 1, 1, 3, 0] if rank == 0 else [2]


def nothing_on_rank_zero(step: int, micro: int, rank: int) -> list[int]:
    return [] if rank == 0 else [0, 1, 2, 3]


FEEDS = (
    expert_per_rank,
    rotating_expert,
    layer_drop,
    dropped_on_every_rank,
    reversed_on_odd_ranks,
    repeated_on_one_rank,
    nothing_on_rank_zero,
)
CHOICES = {function.__name__: function for function in FEEDS}


def _check(kind: str, choice: str, run: Run) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        if kind == "regions":
            return Regions()
        if kind.startswith("nested"):
            return Nested(reentrant=kind == "nested reentrant")
        return TwoTowers() if kind == "towers" else Chosen(checkpointing=kind == "checkpointed")

    def feed(step: int, micro: int, rank: int) -> Batch:
        return {**CASES["mlp"].rows(step, micro, rank), "choice": torch.tensor(CHOICES[choice](step, micro, rank), dtype=torch.long)}

    loss = loss_of_two_backwards if kind == "two backwards" else loss_of_choice
    check_training(build, feed, loss, run, label=f"{kind} {choice}")


@thinned(stage=STAGES, choice=list(CHOICES))
def test_blocks_skipped_by_some_ranks(choice: str, stage: int) -> None:
    ranks.run_ranks(_check, 2, "blocks", choice, Run(stage=stage, accumulation=2, clip=0.1))


@pytest.mark.fast_rows("3-layer_drop", "0-expert_per_rank")
@thinned(stage=STAGES, choice=["expert_per_rank", "layer_drop"])
def test_skipped_blocks_on_three_ranks_in_16_bit(stage: int, choice: str) -> None:
    ranks.run_ranks(_check, 3, "blocks", choice, Run(stage=stage, dtype="bf16", accumulation=2))


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_skipped_blocks_under_activation_checkpointing(stage: int) -> None:
    ranks.run_ranks(_check, 2, "checkpointed", "layer_drop", Run(stage=stage, accumulation=2))


@pytest.mark.fast_rows("2")
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_a_batch_without_pixels_on_one_rank(stage: int) -> None:
    ranks.run_ranks(_check, 2, "towers", "nothing_on_rank_zero", Run(stage=stage, accumulation=2))


@pytest.mark.parametrize("choice", ["layer_drop", "reversed_on_odd_ranks"])
@pytest.mark.parametrize("stage", slow_but(STAGES, 3))
def test_checkpointed_functions_of_two_blocks(stage: int, choice: str) -> None:
    """The gradient of the second block's output is known before the function runs again, from its first block on."""
    ranks.run_ranks(_check, 2, "regions", choice, Run(stage=stage, accumulation=2))


@pytest.mark.parametrize("kind", ["nested", "nested reentrant"])
@pytest.mark.parametrize("choice", ["layer_drop", "dropped_on_every_rank"])
@pytest.mark.parametrize("stage", slow_but(STAGES, 3))
def test_a_shared_block_in_checkpoints_inside_each_other(stage: int, choice: str, kind: str) -> None:
    """A recomputation runs several blocks before the backward of the first of them, in another order than the pass."""
    ranks.run_ranks(_check, 2, kind, choice, Run(stage=stage, accumulation=2))


@pytest.mark.parametrize("choice", ["reversed_on_odd_ranks", pytest.param("repeated_on_one_rank", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", slow_but(STAGES, 3))
def test_two_backwards_over_one_graph(stage: int, choice: str) -> None:
    ranks.run_ranks(_check, 2, "two backwards", choice, Run(stage=stage))


def _count_unshards() -> None:
    engine, unsharded, start = initialize(Regions(), Run(stage=3)), list[str](), Unit.start_unshard

    def record(unit: Unit, exact: bool = False) -> None:
        if unit.state is UnitState.SHARDED:
            unsharded.append(unit.name)
        start(unit, exact)

    for step in range(2):
        loss = loss_of_choice(engine, {**CASES["mlp"].rows(step), "choice": torch.arange(4)})
        unsharded.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Unit, "start_unshard", record)
            engine.backward(loss)
        engine.step()
        assert len(unsharded) == len(set(unsharded)) >= 4, unsharded


def test_a_checkpointed_function_of_two_blocks_unshards_each_once() -> None:
    ranks.run_ranks(_count_unshards, 2)
