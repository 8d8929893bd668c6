"""A plan of context parallelism takes the path that a run on a GPU takes."""

from __future__ import annotations

import pytest

from hf_zero.plan.command import settled
from hf_zero.plan.inputs import Cluster, Load, ModelWish
from tests.support import ranks
from tests.support.planned import LLAMA

pytest.importorskip("transformers", minversion="5.0")
TOKENS, RANKS = 8192, 2


def largest_activations() -> dict[str, int]:
    """Elements of the largest tensor that a plan of each strategy has on the device."""
    from hf_zero.plan.models import build_model
    from hf_zero.plan.run import observe_step

    found = {}
    for strategy in ("allgather", "alltoall"):
        parts = {"context_parallel_size": RANKS, "context_parallel_strategy": strategy}
        config = settled({"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "hf_zero": parts}, 1)
        model = build_model(ModelWish("llama", {**LLAMA, "max_position_embeddings": TOKENS}, checkpointing=True))
        changes = observe_step(model, config, Cluster(RANKS, RANKS), Load(1, TOKENS)).changes
        sizes = [change.nbytes // change.storage.dtype.itemsize for change in changes if change.storage.tier == "device"]
        found[strategy] = max(sizes)
    return found


def test_no_mask_has_a_row_of_keys_for_each_token() -> None:
    """Without padding a run on a GPU needs no mask; logits and activations of a rank's tokens are smaller than one of half of them."""
    rows = TOKENS // RANKS // 2
    for strategy, elements in ranks.run_alone(largest_activations).items():
        assert TOKENS // RANKS * LLAMA["vocab_size"] <= elements < rows * TOKENS // 2, strategy
