"""Test that stage 3's limits (reuse distance, prefetch, live and persistent parameters) and overlap change the timing, never the result."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run, check, check_bitwise, initialize, reference_case, train
from tests.support.recomputation import Checkpointed
from tests.support.rows import slow_but

REUSE = (0, 3000, 1_000_000_000)
PREFETCH = (0, 1500, 50_000_000)
LIVE = (0, 1_000_000_000)
PERSISTENT = (0, 100, 100_000)


def _limits(reuse: int, prefetch: int, live: int, persistent: int) -> dict[str, int]:
    return {
        "stage3_max_reuse_distance": reuse,
        "stage3_prefetch_bucket_size": prefetch,
        "stage3_max_live_parameters": live,
        "stage3_param_persistence_threshold": persistent,
    }


def _train(name: str, stage: int, zero: dict[str, Any], checkpointing: str | None = None) -> Any:
    run = Run(stage=stage, accumulation=2, clip=0.1, extra={"zero_optimization": zero})
    case = CASES[name]
    engine = initialize(Checkpointed(checkpointing) if checkpointing else case.build(), run)
    trace = train(engine, case.rows, case.forward, run)
    engine.destroy()
    return trace


def _every_limit(name: str, every: bool) -> None:
    """Try each reuse distance with each prefetch size, each with one number of live parameters in turn, or with ``every`` one."""
    run = Run(stage=3, accumulation=2, clip=0.1)
    chosen = list(itertools.product(REUSE, PREFETCH, LIVE, PERSISTENT[:1]))
    if not every:  # two in a row share all but the last axis
        chosen = [chosen[2 * index + index % 2] for index in range(len(chosen) // 2)]
    traces = {limits: _train(name, 3, _limits(*limits)) for limits in chosen}
    first = next(iter(traces.values()))
    for limits, trace in traces.items():
        check_bitwise(trace, first, f"{name}, reuse, prefetch, live, persistent = {limits}")
    # Resident parameters form units of their own, so the norm is summed in another order.
    resident = [_train(name, 3, _limits(0, 1500, 1_000_000_000, persistent)) for persistent in PERSISTENT[1:]]
    if ranks.rank() == 0:
        expected = reference_case(name, run, ranks.world())
        for trace in (first, *resident):
            check(trace, expected, run, name)


def _checkpointed(mode: str, *limits: tuple[int, ...]) -> None:
    traces = []
    for reuse, prefetch, live in itertools.product(*limits, LIVE):
        torch.manual_seed(0)
        traces.append(_train("mlp", 3, _limits(reuse, prefetch, live, 0), checkpointing=mode))
    for trace in traces[1:]:
        check_bitwise(trace, traces[0], f"checkpointing {mode}")


def _overlap_and_buckets(stage: int) -> None:
    """Check that keys that DeepSpeed users tune for speed do not change the result."""
    settings = [
        {},
        {"overlap_comm": True},
        {"overlap_comm": False},
        {"contiguous_gradients": False, "reduce_scatter": False},
        {"reduce_bucket_size": 500, "allgather_bucket_size": 500},
        {"round_robin_gradients": True},
    ]
    traces = [_train("gpt2", stage, setting) for setting in settings]
    for setting, trace in zip(settings[1:], traces[1:], strict=True):
        check_bitwise(trace, traces[0], f"stage {stage}, {setting}")


def test_limits_of_stage_3_are_bitwise_neutral() -> None:
    ranks.run_ranks(_every_limit, 2, "gpt2", False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bart", "odd_mlp"])
def test_all_limits_of_stage_3_are_bitwise_neutral(name: str) -> None:
    ranks.run_ranks(_every_limit, 2, name, True)


@pytest.mark.slow  # fast: `test_limits_of_stage_3_are_bitwise_neutral`
@pytest.mark.fast_rows("not reentrant-1500")
@pytest.mark.parametrize(("mode", "prefetch"), [("reentrant", PREFETCH[0]), ("not reentrant", PREFETCH[1])])
def test_limits_with_checkpointing_are_bitwise_neutral(mode: str, prefetch: int) -> None:
    ranks.run_ranks(_checkpointed, 2, mode, (REUSE[0], REUSE[-1]), (prefetch,))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reentrant", "not reentrant"])
def test_all_limits_with_checkpointing_are_bitwise_neutral(mode: str) -> None:
    ranks.run_ranks(_checkpointed, 2, mode, REUSE, PREFETCH[:2])


@pytest.mark.slow  # fast: test_trace.py has the order of what is sent
@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 0, 3))
def test_overlap_and_bucket_sizes_are_bitwise_neutral(stage: int) -> None:
    ranks.run_ranks(_overlap_and_buckets, 2, stage)
