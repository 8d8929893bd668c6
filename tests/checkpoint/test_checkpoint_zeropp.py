"""Checkpoints of ZeRO++: masters are exact, and LoCo's errors come back at the same number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import ranks
from tests.support.checkpoints import differences, full_state, start, steps


def begin(stage: int, dtype: str, seed: int = 0) -> Any:
    keys: dict[str, Any] = {"zero_quantized_gradients": True, "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 6}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **keys, **({"zero_quantized_weights": True} if stage == 3 else {})}
    return start(stage, dtype, seed, zero_optimization=zero)


def _interrupted(folder: str, stage: int, dtype: str) -> None:
    engine = begin(stage, dtype)
    steps(engine, 0, 4, dtype)
    engine.save_checkpoint(folder, tag="t")
    saved = engine.optimizer.rank_states()["loco_error"]
    lost = [name for name, vector in saved.items() if not name.startswith("(") and bool(vector.any())]
    assert len(lost) > 1 and any("second hop" in name for name in lost) == (ranks.world() == 4)
    expected = steps(engine, 4, 5, dtype)  # errors start anew after the second of them
    end = full_state(engine)
    engine.destroy()

    engine = begin(stage, dtype, seed=5)
    steps(engine, 7, 5, dtype)  # with errors of its own
    engine.load_checkpoint(folder, tag="t")
    assert steps(engine, 4, 5, dtype) == expected
    assert differences(full_state(engine), end) == []
    engine.destroy()


@pytest.mark.fast_rows("3-bf16")
@pytest.mark.parametrize(("stage", "dtype"), [(3, "bf16"), (1, "fp16")])
def test_resumed_run_is_the_uninterrupted_one(tmp_path: Path, stage: int, dtype: str) -> None:
    ranks.run_ranks(_interrupted, 2, str(tmp_path), stage, dtype)


@pytest.mark.slow  # fast: `test_resumed_run_is_the_uninterrupted_one`
def test_resumed_run_over_two_nodes(tmp_path: Path) -> None:
    """The codes of both hops have errors."""
    ranks.run_ranks(_interrupted, 4, str(tmp_path), 3, "fp16", env={"LOCAL_WORLD_SIZE": "2"})


def _save(folder: str) -> dict[str, Any]:
    engine = begin(3, "bf16")
    steps(engine, 0, 3, "bf16")
    for _ in range(3):  # each replaces the one before, whose files of errors are ours to remove
        engine.save_checkpoint(folder, tag="t")
    return full_state(engine)


def _load(folder: str, quantized: bool) -> tuple[dict[str, Any], list[str]]:
    engine = begin(3, "bf16", seed=3) if quantized else start(2, "bf16", seed=3)
    engine.load_checkpoint(folder, tag="t")
    state, kept = full_state(engine), list(engine.optimizer.rank_states().get("loco_error", {}))
    steps(engine, 3, 1, "bf16")
    return state, kept


@pytest.mark.fast_rows("3-True")
@pytest.mark.parametrize(("world", "quantized"), [(3, True), (2, False)])
def test_elsewhere_masters_are_exact_and_errors_start_from_zero(tmp_path: Path, world: int, quantized: bool) -> None:
    """At another number of ranks, and in an engine without ZeRO++."""
    saved = ranks.run_ranks(_save, 2, str(tmp_path))[0]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".t")]
    state, kept = ranks.run_ranks(_load, world, str(tmp_path), quantized)[0]
    assert differences(state, saved) == []
    assert kept == (["(steps)", "(parts)"] if quantized else [])
