"""Test that gradients accumulated in 16 bit are cast for the update in runs of segments, with the same update."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero.core.optimizer import state_store
from tests.support import ranks
from tests.support.models import CASES
from tests.support.offload_runs import blocks_of, sections, state_of, ways
from tests.support.parity import Run, initialize, train

CASE = CASES["odd_mlp"]
KINDS: dict[str, Any] = {"torch": torch.optim.AdamW, "host": None}


def _train(stage: int, kind: str, limit: int, way: str, hook: bool) -> tuple[dict[str, torch.Tensor], list[int], int]:
    """Train two steps; return the state, the number of segments in each step of an inner optimizer, and the number of calls of the hook."""
    with blocks_of(ways(stage)[way] if way else (False, {})) as blocks, mock.patch.object(state_store, "_CAST_NUMEL", limit):
        extra = {**sections(stage, blocks), "data_types": {"grad_accum_dtype": "bf16"}}
        run = Run(stage=stage, dtype="bf16", clip=0.05, steps=3, extra=extra)
        model = CASE.build()
        make = KINDS[kind]
        client = {"optimizer": make(model.parameters(), lr=1e-2, foreach=False)} if make else {}
        engine = initialize(model, run, **client)
        calls: list[int] = []
        if hook:
            engine.optimizer.inner.register_step_post_hook(lambda *_: calls.append(1))
        sizes: list[int] = []
        original = state_store.SubGroupStepper.step

        def step(self: Any, segments: Any, *args: Any, **keywords: Any) -> None:
            sizes.append(sum(segment.range.numel for segment in segments))
            original(self, segments, *args, **keywords)

        with mock.patch.object(state_store.SubGroupStepper, "step", step):
            train(engine, lambda step, micro, rank: CASE.rows(step, micro, rank), CASE.forward, run)
        found = state_of(engine)
        engine.destroy()
    return found, sizes, len(calls)


def _compare(stage: int, kind: str, way: str) -> None:
    torch.set_num_threads(1)
    limit = 64
    # A world of one gathers nothing, so that the update of all at once is taken.
    whole, at_once, _ = _train(stage, kind, 1 << 25, way, False)
    runs, sizes, _ = _train(stage, kind, limit, way, False)
    assert len(sizes) > len(at_once) and sum(sizes) >= sum(at_once), (sizes, at_once)
    assert all(torch.equal(runs[name], value) for name, value in whole.items())
    if not way:
        hooked, _, calls = _train(stage, kind, limit, way, True)
        assert calls == 3 and all(torch.equal(hooked[name], value) for name, value in whole.items())


@pytest.mark.parametrize(("kind", "way"), [("torch", ""), ("host", ""), ("torch", "cpu, half, apart")])
def test_gradients_in_16_bit_are_cast_a_run_at_a_time(kind: str, way: str) -> None:
    ranks.run_ranks(_compare, 1, 1, kind, way)
