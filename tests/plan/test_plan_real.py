"""A plan beside a real job of ranks: bytes held, sent and saved are equal, to the last one."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.plan.inputs import Cluster, Hardware
from hf_zero.plan.prediction import predict
from tests.plan.plan_cases import BF16, FP16, LISTED, case
from tests.support import planned
from tests.support.versions import TRANSFORMERS_5

EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}, **BF16}
STAGES = {"pipeline": {"stages": 2}, **BF16}
SLICES = {"sequence_parallel_size": 2, **BF16}
PARTS = {"hf_zero": {"context_parallel_size": 2}, **BF16}
RING = {"hf_zero": {"context_parallel_size": 2, "context_parallel_strategy": "alltoall"}, **BF16}
FAST = [
    case("mixtral", 1, saves=True, **EXPERTS),
    case("llama", 1, steps=2, saves=True, **STAGES),
    case("llama", 1, wish={"trainable": "match:layers.1"}, saves=True, tensor_parallel={"autotp_size": 2}, **BF16),
    case("gpt2", 3, saves=True),
]
SLOW = [
    case("llama", 1, **SLICES),
    case("t5", 3, saves=True, **FP16),  # a third of it stays in fp32
    case("llama", 3, wish={"checkpointing": True}, **RING),
    case(LISTED, 1, saves=True, **EXPERTS),
    case(LISTED, 3, steps=2, **EXPERTS),
    case(LISTED, 2, saves=True, **BF16),
    case("mixtral", 3, steps=2, saves=True, **EXPERTS),
    case("mixtral", 2, wish={"checkpointing": True}, saves=True, **EXPERTS),
    case("gpt2", 0, saves=True, **STAGES),  # its embeddings are tied: both stages hold them
    case("llama", 2, wish={"checkpointing": True}, saves=True, **STAGES),
    case("llama", 1, saves=True, pipeline={"stages": 2, "micro_batches": 1}),
    case("llama", 3, saves=True, **BF16),
    case("llama", 0, wish={"trainable": "lora:r=4"}, saves=True, **BF16),
    case("llama", 3, wish={"checkpointing": True}, **SLICES),
    case("llama", 1, **PARTS),
    case("llama", 0, **BF16),
    case("llama", 1, steps=2, **BF16),
    case("gpt2", 2, steps=5, **BF16),
    case("llama", 3, steps=2, **BF16),
    case("gpt2", 2, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}),
    case("llama", 3, wish={"checkpointing": True}, **BF16),
    case("llama", 3, wish={"trainable": "lora:r=4"}, **BF16),
    case("llama", 1, wish={"trainable": "match:layers.1"}, **BF16),
    case("llama", 3, steps=2, zero={"mics_shard_size": 1}, **BF16),
    case("llama", 2, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
]
FOUR = [
    case("llama", 1, saves=True, **STAGES),
    case("mixtral", 2, saves=True, **EXPERTS),
    case("llama", 1, saves=True, tensor_parallel={"autotp_size": 2}, **STAGES),
]


def pairs_of(cases: list[dict[str, Any]], world: int) -> list[tuple[dict[str, Any], list[Any], Any]]:
    """Each case with what its ranks have, and what its plan says."""
    told = [planned.plan(**{name: value for name, value in one.items() if name != "saves"}, world=world) for one in cases]
    return list(zip(cases, [list(ones) for ones in zip(*planned.run_all(cases, world), strict=True)], told, strict=True))


def require_equal(one: dict[str, Any], ranks: list[Any], told: Any) -> None:
    """Every rank has what the plan of its stage says; step counts, one for each segment that a rank has, are those of the first."""
    cluster, each = Cluster(len(ranks), len(ranks), on_host=True), len(ranks) // len(told.stages)
    # Before transformers 5, experts are modules of a list. Those without a token have no moments, and the plan counts moments for all.
    all_move = TRANSFORMERS_5 or "expert_parallel" not in one["config"]
    for rank, held in enumerate(ranks):
        stage = predict([told.stages[rank // each]], cluster, Hardware())
        sent, kinds = stage.observation.per_step().sent, stage.by_kind()
        for kind in ("parameters", "masters", *(["moments"] if rank % each == 0 and all_move else [])):
            assert kinds[kind] == held[kind], f"{kind} of rank {rank} of {planned.key(one)}"
        assert (sent.node, sent.network) == (held["sent"], 0), f"rank {rank} of {planned.key(one)}"
        assert held["sent"] > 0
    if one["saves"]:
        assert told.checkpoint_bytes == ranks[0]["saved"], planned.key(one)


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest) -> list[tuple[dict[str, Any], list[Any], Any]]:
    return pairs_of(FAST + SLOW if request.config.getoption("--slow") else FAST, 2)


def test_each_rank_has_what_its_plan_says(pairs: Any) -> None:
    for one, ranks, told in pairs:
        require_equal(one, ranks, told)


def test_what_is_assumed_is_said(pairs: Any) -> None:
    experts, stages, plain = (" ".join(told.reasons) for _, _, told in pairs[:3])
    assert "evenly over experts" in experts and "stage" not in experts
    worst = pairs[1][2].stage
    assert f"pipeline stage {worst} of 2" in stages and f"stage {1 - worst} " in stages and "losses of its micro-batches" in stages
    assert "assumed" not in plain


def test_a_checkpoint_holds_masters_and_moments(pairs: Any) -> None:
    parameters, trained = pairs[3][2].observation.parameters
    assert parameters == trained
    assert 12 * parameters <= pairs[3][2].checkpoint_bytes < 12 * parameters + 200_000


def test_stages_wait_for_each_other(pairs: Any) -> None:
    told = pairs[1][2]
    timed = predict(told.stages, told.cluster, Hardware(flops=1e9))
    parts = told.stages[0].parts
    assert parts == 2  # samples of a micro-step
    slowest = max(one.per_step().work.flops for one in told.stages) / 1e9
    assert timed.seconds_per_step() == pytest.approx(slowest * (1 + 1 / parts))


@pytest.mark.slow
def test_four_ranks() -> None:
    for one, ranks, told in pairs_of(FOUR, 4):
        require_equal(one, ranks, told)
