"""The pictures of the pages are those that the committed code draws, and what they say of memory is so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import figures
from tests.support import ranks
from tests.support.processes import REPO
from tools import pictures
from tools.svg import ticks


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_the_committed_picture_is_the_one_that_is_drawn(name: str, tmp_path: Path) -> None:
    pictures.DRAWN[name]().write(tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == (pictures.FOLDER / f"{name}.svg").read_text(), "python -m tools.pictures"


@pytest.mark.fast_rows("zeropp_convergence", "mingpt_lightning")
@pytest.mark.parametrize("name", figures.DRAWN)
def test_each_result_with_a_figure_can_be_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = json.loads((REPO / "benchmarks" / "results" / f"{name}.json").read_text())
    assert (REPO / "docs" / result["figure"]).is_file()
    figures.DRAWN[name](result, tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 10_000


@pytest.mark.parametrize("most", [0.424, 0.9, 1, 7.3, 40.6, 80, 149, 1001])
def test_ticks_begin_at_0_and_reach_the_most(most: float) -> None:
    found = ticks(most)
    assert found[0] == 0 and most <= found[-1] < 2 * most and 3 <= len(found) <= 9
    assert all(abs(later - earlier - found[1]) < 1e-9 for earlier, later in zip(found, found[1:], strict=False))


def _bytes_between_backward_and_step(stage: int) -> float:
    """Bytes that this rank holds for each parameter, moments included, after a backward."""
    import torch

    import hf_zero
    from hf_zero.core import holdings

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    numel = sum(parameter.numel() for parameter in model.parameters())
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    engine, *_ = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)
    for last in (False, True):
        engine.backward(engine(torch.ones(1, 64, dtype=torch.bfloat16)).float().sum())
        if not last:
            engine.step()
    kinds = {"parameters", "gradients", "masters", "moments"}
    found = sum(nbytes for (_, kind), nbytes in holdings.alive(engine).items() if kind in kinds)
    engine.destroy()
    return found / numel


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_holds_the_bytes_that_the_picture_of_the_stages_says(stage: int) -> None:
    for found in ranks.run_ranks(_bytes_between_backward_and_step, 2, stage):
        assert found == pytest.approx(pictures.bytes_per_parameter(stage, 2), rel=0.01)
