"""Checkpoints of 1-bit Adam hold its errors: the same bits at the same number of ranks, the same average at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.optim import OneBitAdam
from tests.support import ranks
from tests.support.checkpoints import differences, full_state, start, steps

FREEZE = 3


def one_bit(params: Any, **settings: Any) -> OneBitAdam:
    return OneBitAdam(params, freeze_step=FREEZE, **settings)


def begin(stage: int, dtype: str = "fp32", seed: int = 0) -> Any:
    import hf_zero
    from tests.support.checkpoints import build, config, groups

    model = build(seed)
    return hf_zero.initialize(model=model, optimizer=one_bit(groups(model), lr=0.01, betas=(0.9, 0.98)), config=config(stage, dtype))[0]


def owed(engine: Any) -> dict[str, torch.Tensor]:
    """Per parameter what the average still lacks: the mean of the worker errors, and the server errors. The same on every rank."""
    states = engine.optimizer.rank_states()
    found: dict[str, torch.Tensor] = {}
    for unit in engine.units:
        if not unit.trainable:
            continue
        workers = engine.collectives.gather_objects(states["onebit_worker_error"][unit.name].tolist(), "test")
        servers = engine.collectives.gather_objects(states["onebit_server_error"][unit.name].tolist(), "test")
        mean = torch.stack([torch.tensor(values) for values in workers]).double().mean(0)
        server = torch.cat([torch.tensor(values) for values in servers]).double()
        for slot in unit.layout.slots:
            found[f"worker {slot.name}"] = mean[slot.range.start : slot.range.stop]
            found[f"server {slot.name}"] = server[slot.range.start : slot.range.stop]
    return found


def _interrupted(folder: str, stage: int, dtype: str, saved_at: int) -> None:
    engine = begin(stage, dtype)
    steps(engine, 0, saved_at, dtype)
    engine.save_checkpoint(folder, tag="t")
    expected = steps(engine, saved_at, 4, dtype)
    end = full_state(engine)
    engine.destroy()

    engine = begin(stage, dtype, seed=5)
    steps(engine, 7, 5, dtype)  # compressed, with errors of its own
    engine.load_checkpoint(folder, tag="t")
    assert steps(engine, saved_at, 4, dtype) == expected
    assert differences(full_state(engine), end) == []
    engine.destroy()


SLOW = [pytest.param(*run, marks=pytest.mark.slow) for run in ((0, "fp32", 5), (1, "fp32", 5), (1, "fp32", 3))]


@pytest.mark.fast_rows("1-bf16-6")
@pytest.mark.parametrize(("stage", "dtype", "saved_at"), [(1, "bf16", 6), (0, "fp32", 2), *SLOW])
def test_resumed_run_is_the_uninterrupted_one(tmp_path: Path, stage: int, dtype: str, saved_at: int) -> None:
    """Saved in the compressed phase, in the warm-up, and on the step between them."""
    ranks.run_ranks(_interrupted, 2, str(tmp_path), stage, dtype, saved_at)


def _save(folder: str, stage: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    engine = begin(stage)
    steps(engine, 0, 6)
    engine.save_checkpoint(folder, tag="t")
    state, debts = full_state(engine), owed(engine)
    engine.destroy()
    return state, debts


def _load(folder: str, stage: int) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[float]]:
    engine = begin(stage, seed=3)
    engine.load_checkpoint(folder, tag="t")
    state = full_state(engine)
    engine.optimizer._units()
    debts = owed(engine)
    losses = [loss for loss, _ in steps(engine, 6, 3)]
    engine.destroy()
    return state, debts, losses


MOVED = [pytest.param(*move, marks=pytest.mark.slow) for move in ((2, 0, 3, 0), (2, 1, 4, 0), (3, 0, 1, 1))]


@pytest.mark.parametrize(("saved", "stage", "loaded", "other"), [(3, 1, 2, 1), *MOVED])
def test_at_another_number_of_ranks_the_average_of_the_errors_is_kept(
    tmp_path: Path, saved: int, stage: int, loaded: int, other: int
) -> None:
    state, debts = ranks.run_ranks(_save, saved, str(tmp_path), stage)[0]
    assert any(values.any() for name, values in debts.items() if name.startswith("server"))
    found, kept, losses = ranks.run_ranks(_load, loaded, str(tmp_path), other)[0]
    assert differences(found, state) == []
    assert kept.keys() == debts.keys()
    for name, values in debts.items():
        torch.testing.assert_close(kept[name], values, rtol=1e-5, atol=1e-8, msg=name)
    assert all(loss == loss for loss in losses)


def _adam_to_one_bit(folder: str) -> None:
    engine = start(1)
    steps(engine, 0, 4)
    engine.save_checkpoint(folder, tag="t")
    engine.destroy()
    engine = begin(1, seed=2)
    engine.load_checkpoint(folder, tag="t")
    assert not engine.optimizer.compresses
    steps(engine, 4, 1)
    assert engine.optimizer.one_bit.frozen_at == 5  # the steps of Adam are its warm-up
    steps(engine, 5, 2)
    engine.save_checkpoint(folder, tag="u")
    engine.destroy()
    engine = start(0, seed=4)
    engine.load_checkpoint(folder, tag="u")
    assert all(loss == loss for loss, _ in steps(engine, 7, 2))
    engine.destroy()


@pytest.mark.slow  # fast: `test_resumed_run_is_the_uninterrupted_one`
def test_from_adam_and_back(tmp_path: Path) -> None:
    ranks.run_ranks(_adam_to_one_bit, 2, str(tmp_path))
