"""Many ranks on gloo: reductions by all-to-all have the bits of direct exchange, and groups connect on use."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero.comm import back_end, process_groups
from hf_zero.comm.direct_exchange import AllToAllCollectives, GlooCollectives
from hf_zero.comm.topology import build_topology
from tests.support import ranks
from tests.support.small_blocks import WIDTH, Model


def _same_bits() -> tuple[int, int]:
    axis = build_topology()
    direct, swapped = GlooCollectives(axis), AllToAllCollectives(axis)
    generator = torch.Generator().manual_seed(axis.rank)
    for dtype, summed in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.float16)):
        full = (100 * torch.randn(axis.world * 48, generator=generator)).to(dtype)
        before = full.clone()
        sums = [network.reduce_scatter(full, summed, "unit").received() for network in (direct, swapped)]
        assert torch.equal(*sums) and sums[1].dtype == summed and torch.equal(full, before), dtype
        messages = full.view(axis.world, 48)
        rows = [network.exchange(messages, "unit").received() for network in (direct, swapped)]
        assert torch.equal(*rows), dtype
    return direct.sent_bytes, swapped.sent_bytes


@pytest.mark.parametrize("world", [2, 3, 5])
def test_an_all_to_all_gives_the_bits_of_a_direct_exchange(world: int) -> None:
    for direct, swapped in ranks.run_ranks(_same_bits, world):
        assert direct == swapped > 0


def _choices() -> list[str]:
    axis = build_topology()
    return [type(back_end.build_collectives(replace(axis, world=world))).__name__ for world in (2, 16, 17, 4096)]


def test_the_rule() -> None:
    assert ranks.run_ranks(_choices, 2)[0] == ["GlooCollectives"] * 2 + ["AllToAllCollectives"] * 2


def _weights(most: int, stage: int, dtype: str) -> tuple[str, list[torch.Tensor], list[str | None]]:
    """After two steps where groups of more than ``most`` ranks count as large; and what was set while groups were made."""
    import hf_zero

    asked: list[str | None] = []
    new_group = dist.new_group

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(os.environ.get("TORCH_GLOO_LAZY_INIT"))
        return new_group(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for module in (back_end, process_groups):
            patch.setattr(module, "MOST_CONNECTED", most)
        patch.setattr(dist, "new_group", noted)
        patch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
        torch.manual_seed(0)
        model = Model(2)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "bf16": {"enabled": dtype == "bfloat16"},
            "gradient_clipping": 0.1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
        }
        engine = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    generator = torch.Generator().manual_seed(ranks.rank())
    for _ in range(2):
        engine.backward(engine(torch.randn(3, WIDTH, generator=generator).to(getattr(torch, dtype))))
        engine.step()
    found = type(engine.stepper.reducer.exchange.collectives).__name__, [unit.master.clone() for unit in engine.units], asked
    engine.destroy()
    return found


def _all_weights(most: int, dtype: str) -> list[tuple[str, list[torch.Tensor], list[str | None]]]:
    return [_weights(most, stage, dtype) for stage in (0, 1, 2, 3)]


def _compare(world: int, few: int, dtype: str) -> None:
    direct, swapped = (ranks.run_ranks(_all_weights, world, most, dtype, timeout=300.0) for most in (64, few))
    for mine, theirs in zip(direct, swapped, strict=True):
        for (kind, weights, eager), (other_kind, others, lazy) in zip(mine, theirs, strict=True):
            assert (kind, other_kind) == ("GlooCollectives", "AllToAllCollectives")
            assert all(map(torch.equal, weights, others))
            assert set(eager) <= {None} and set(lazy) <= {"1"}
        assert mine[0][2] and theirs[0][2], "the first engine makes groups"


@pytest.mark.fast_rows("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_has_the_same_bits_on_both_sides_of_the_rule(dtype: str) -> None:
    _compare(4, 2, dtype)


@pytest.mark.slow
def test_seventeen_ranks() -> None:
    _compare(17, 16, "bfloat16")
