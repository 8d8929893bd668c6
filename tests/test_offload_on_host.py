"""Without an accelerator the training device is host memory: offloading to "cpu" asks for what is the case, and changes no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import ranks
from tests.models import CASES


def _train(stage: int, blocks: dict[str, Any]) -> list[tuple[float, float]]:
    import hf_zero

    torch.manual_seed(0)
    case = CASES["mlp"]
    model = case.build()
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **blocks}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": zero}
    engine, *_ = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)
    seen = []
    for step in range(3):
        loss = case.forward(engine, case.rows(step, 0, engine.collectives.rank))
        engine.backward(loss)
        engine.step()
        seen.append((float(loss), engine.get_global_grad_norm()))
    return seen


@pytest.mark.parametrize(("stage", "names"), [(2, ["offload_optimizer"]), (3, ["offload_optimizer", "offload_param"])])
def test_offloading_to_cpu_changes_nothing(stage: int, names: list[str]) -> None:
    blocks = {name: {"device": "cpu", "pin_memory": True} for name in names}
    assert ranks.run_ranks(_train, 2, stage, blocks) == ranks.run_ranks(_train, 2, stage, {})


def test_nvme_is_refused_by_name(tmp_path: Any) -> None:
    blocks = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with pytest.raises(ranks.RankError, match=r"zero_optimization\.offload_optimizer\.device"):
        ranks.run_ranks(_train, 2, 2, blocks)
