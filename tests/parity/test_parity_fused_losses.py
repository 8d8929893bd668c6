"""Test that losses that never build the complete logits train like ordinary ones: at every stage, over slices of sequences, and with split
heads.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.support import fused_losses, parity, ranks
from tests.support.parity import Run
from tests.support.sequences import Data, Result, build, compare, sliced, whole
from tests.support.versions import has

# So small that nothing stays gathered between forward and backward.
TIGHT = {"stage3_max_live_parameters": 1000, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1000}
ZERO = {0: {}, 1: {}, 2: {}, 3: TIGHT}
DATA = Data(padding="right", prompt=3)


def _trained(kind: str, tied: bool, large: bool, run: Run) -> Result:
    engine = parity.initialize(build(partial(fused_losses.model, kind, tied, large)), run)
    losses, norms = [], []
    for step in range(run.steps):
        parts = []
        for micro in range(run.accumulation):
            loss = engine(**DATA.batch(step, micro, ranks.rank())).loss
            parts.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        losses.append(parity.mean_over_ranks(parts))
        norms.append(parity.as_float(engine.get_global_grad_norm()))
    assert not large or tied or run.stage < 3 or any("head" in unit.name for unit in engine.units)
    weights = engine._consolidated_16bit_state_dict()
    engine.destroy()
    return Result(losses, norms, {name: value.float() for name, value in (weights or {}).items()})


# Tied or not, a large vocabulary or not, micro-steps, stages.
SMALL = ((False, False, 1, (0, 3)), (False, False, 2, (1, 2, 3)), (True, False, 1, (0, 3)))
LARGE = ((False, True, 2, (3,)), (True, True, 1, (3,)))


def _every_stage(kind: str, rows: tuple[tuple[bool, bool, int, tuple[int, ...]], ...]) -> None:
    for tied, large, accumulation, stages in rows:
        runs = [Run(stage, accumulation=accumulation, clip=0.5, extra={"zero_optimization": ZERO[stage]}) for stage in stages]
        expected = whole(partial(fused_losses.model, None, tied, large), runs[0], DATA, ranks.world())
        for run in runs:
            compare(_trained(kind, tied, large, run), expected, f"{kind}, tied {tied}, large {large}, {run}")


def _require(kind: str) -> None:
    if kind == "trl" and not has("trl", "1.16"):
        pytest.skip("trl before 1.16 has no fused head")


@pytest.mark.fast_rows("trl-large", "liger-small")
@pytest.mark.parametrize("rows", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", list(fused_losses.KINDS))
def test_every_stage(kind: str, rows: tuple[tuple[bool, bool, int, tuple[int, ...]], ...]) -> None:
    _require(kind)
    ranks.run_ranks(_every_stage, 2, kind, rows)


def _slices(kind: str) -> None:
    for run in (Run(stage=1, accumulation=2, clip=0.5), Run(stage=3, extra={"zero_optimization": TIGHT})):
        found = sliced(partial(fused_losses.model, kind), run, DATA, 2, None)
        compare(found, whole(partial(fused_losses.model, None), run, DATA, 1), f"{kind}, {run}")


@pytest.mark.fast_rows("tiled")
@pytest.mark.parametrize("kind", list(fused_losses.KINDS))
def test_slices_of_sequences(kind: str) -> None:
    _require(kind)
    ranks.run_ranks(_slices, 2, kind)
