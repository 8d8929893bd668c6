"""Test the exact sequence of phases and the bytes sent in one step over two shard groups of two ranks, for every stage that shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import ranks
from tests.support.models import STEP_VOTE_BYTES, TwoBlocks

pytestmark = pytest.mark.quick

_FORWARD = ["pre_forward (root)", "pre_forward (layers.0)", "pre_forward (layers.1)", "backward"]
_SENT = ["reduce_scatter (layers.1)", "reduce_scatter (layers.0)", "reduce_scatter (root)"]
_SPREAD = ["all_gather (root)", "all_gather (layers.0)", "all_gather (layers.1)", "spread"]
_STEP = ["all_reduce (micro-steps)", "finish_reduce", "norm", "all_reduce (gradient norm)", "clip", "update"]
# A unit goes to the replicas when the reducer waits for its sum: when the next one was sent, or at the end.
_REPLICAS = [*_SENT[:2], "all_reduce (layers.1)", _SENT[2], "all_reduce (layers.0)", "end_backward", "all_reduce (late gradients)"]
_REPLICAS += ["all_reduce (root)"]


def _one_step(stage: int, accumulation: int, dtype: str) -> tuple[list[list[str]], dict[str, int], int, int]:
    """Return of the second step: labels of each micro-step, bytes that this rank sent by network, and elements of the units and of the
    root.
    """
    import hf_zero
    from hf_zero.observe import record_labels

    model = TwoBlocks()
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "mics_shard_size": 2}
    zero["stage3_prefetch_bucket_size"] = 1  # one block ahead
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    config["gradient_accumulation_steps"] = accumulation
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    engine, *_ = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)
    exchange, entries = engine.stepper.reducer.exchange, engine.stepper.reducer.gradients
    networks = {
        "gathers": engine.collectives,
        "reductions": exchange.collectives,
        "replicas": entries[0].total.replicas,
        "votes": engine.collectives.data,
    }
    before: dict[str, int] = {}
    labels: list[list[str]] = []
    for step in range(2):
        before, labels = {name: network.sent_bytes for name, network in networks.items()}, []
        for _ in range(accumulation):
            with record_labels() as seen:
                engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)))
                engine.step()
            labels.append([label.removeprefix("hf_zero::") for label in seen])
        assert engine.global_steps == step + 1
    sent = {name: network.sent_bytes - before[name] for name, network in networks.items()}
    if networks["gathers"] is networks["reductions"]:
        del sent["gathers"]
    root = sum(unit.layout.padded_numel for unit in engine.runtime.root.units)
    total = sum(unit.layout.padded_numel for unit in engine.units)
    engine.destroy()
    return labels, sent, total, root


@pytest.mark.parametrize("stage", [1, 2])
def test_sequence_of_stages_1_and_2(stage: int) -> None:
    for labels, *_ in ranks.run_ranks(_one_step, 4, stage, 2, "fp32"):
        first, last = labels
        assert first == [*_FORWARD, *_SENT, "end_backward"], "nothing leaves the shard group off the boundary"
        assert last == [*_FORWARD, *_REPLICAS, *_STEP, *_SPREAD]


def test_sequence_of_stage_3() -> None:
    for labels, *_ in ranks.run_ranks(_one_step, 4, 3, 1, "fp32"):
        last = labels[-1]
        sent = [label for label in last if label.startswith(("reduce_scatter", "all_reduce (layers", "all_reduce (root"))]
        assert sent == [label for label in _REPLICAS if label not in ("end_backward", "all_reduce (late gradients)")]
        assert last.index("all_gather (layers.0)") < last.index("reduce_scatter (layers.1)")


@pytest.mark.fast_rows("1-3-bf16", "2-3-fp32", "3-1-fp32")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_of_a_step(stage: int, accumulation: int, dtype: str) -> None:
    """Check the bytes with S = 2 ranks in a group and R = 2 groups, P elements of b bytes.

    Inside the group: a reduce-scatter of (S-1)/S P b per micro-step; stages 1 and 2 gather updates, (S-1)/S P b; stage 3 gathers in forward
    and, except for the root, in backward. Between the groups: one all-reduce of shards per step, 2 (R-1)/R P/S, in the dtype of the
    message, or in fp32 for a sum over micro-steps. Between all: votes, to each of three ranks.
    """
    for _, sent, total, root in ranks.run_ranks(_one_step, 4, stage, accumulation, dtype):
        element = 4 if dtype == "fp32" else 2
        half = total * element // 2
        norm, late, passes = 8, 4 * (2 + 3), 4 * (3 + 1)
        assert sent["replicas"] == total // 2 * (element if accumulation == 1 else 4)
        if stage < 3:
            assert sent["reductions"] == accumulation * half + half + norm
            assert sent["votes"] == 3 * (STEP_VOTE_BYTES + late)
        else:
            assert sent["reductions"] == accumulation * half
            assert sent["gathers"] == accumulation * (2 * half - root * element // 2) + norm
            assert sent["votes"] == 3 * (STEP_VOTE_BYTES + accumulation * (late + passes))
