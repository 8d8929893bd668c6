"""Calls are divided evenly over the stages of a pipeline by what is asked for; what does not fit is said with what would."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.pipeline.partition import balanced_runs, make_plan, replan
from hf_zero.pipeline.plan import PipelinePlan
from hf_zero.tensor_parallel.skeleton import skeleton
from tests.support import zoo


def test_the_heaviest_run_is_as_light_as_can_be() -> None:
    chance = random.Random(0)
    for _ in range(50):
        count = chance.randint(1, 8)
        weights, runs = [chance.randint(0, 9) for _ in range(count)], chance.randint(1, count)
        found = balanced_runs(weights, runs)
        assert [place for run in found for place in run] == list(range(count))
        assert all(found)

        def cost(ends: tuple[int, ...], weights: list[int] = weights) -> tuple[int, int]:
            sums = [sum(weights[start:stop]) for start, stop in itertools.pairwise(ends)]
            return max(sums), sum(item**2 for item in sums)

        best = min(cost((0, *cuts, count)) for cuts in itertools.combinations(range(1, count), runs - 1))
        assert cost((0, *(run.stop for run in found))) == best


def blocks_of(plan: PipelinePlan) -> list[int]:
    """How many layers each stage has."""
    calls = [call for call in plan.calls if ".layers." in call.path or ".block." in call.path]
    return [sum(call.stage == stage for call in calls) for stage in range(plan.stages)]


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return zoo.build("LlamaForCausalLM", changes={"num_hidden_layers": 6, "vocab_size": 2048})


def test_each_method_balances_what_it_says(llama: nn.Module) -> None:
    assert blocks_of(make_plan(llama, 3, "uniform")) == [2, 2, 2]
    # An embedding and a head of 2048 x 32 elements each are as heavy as six layers.
    assert blocks_of(make_plan(llama, 3)) == [1, 4, 1]
    # The head alone multiplies: as much as six layers.
    assert blocks_of(make_plan(llama, 2, "operations")) == [5, 1]
    assert blocks_of(make_plan(llama, 2, "type:DECODER")) == [3, 3]
    assert blocks_of(make_plan(llama, 2, "type:rmsnorm|linear|decoder")) == [4, 2]


class Labelled(nn.Module):
    """A model that cannot be called without labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it is not called without labels")


def test_what_does_not_fit_is_said_with_what_would(llama: nn.Module) -> None:
    with pytest.raises(
        ConfigError, match="7 stages does not fit LlamaForCausalLM: it has 6 calls of blocks .6 of LlamaDecoderLayer.*At most 6"
    ):
        make_plan(llama, 7)
    with pytest.raises(ConfigError, match="partition_method is 'best'; allowed are parameters, uniform"):
        make_plan(llama, 2, "best")
    with pytest.raises(ConfigError, match=r"no class that LlamaForCausalLM calls matches: Embedding, LlamaDecoderLayer"):
        make_plan(llama, 2, "type:Bert")
    with pytest.raises(ConfigError, match=r"'\(' is no regular expression"):
        make_plan(llama, 2, "type:(")
    with pytest.raises(ConfigError, match=r"At most 0 stages fit|calls none of its repeated blocks"):
        make_plan(nn.Linear(2, 2), 2, inputs={"input": torch.zeros(1, 2)})
    with pytest.raises(
        ConfigError, match=r"requires labels, and hf_zero does not know which values to pass. Give the parameter a default \(labels=None\)"
    ):
        make_plan(Labelled(), 2)


def test_shared_keys_and_values_stay_in_one_stage() -> None:
    changes = {"num_hidden_layers": 8, "layer_types": ["sliding_attention", "full_attention"] * 4, "intermediate_size": [64] * 8}
    model = zoo.build("Gemma3nForCausalLM", changes={**changes, "activation_sparsity_pattern": [0.0] * 8})
    plan = make_plan(model, 2, "uniform")  # layers 6 and 7 read what 4 and 5 have kept
    assert blocks_of(plan) == [4, 4]
    with pytest.raises(UnsupportedError, match=r"at most 5 stages fit, because .*layers.4 \(Gemma3nTextDecoderLayer\) keeps a tensor"):
        make_plan(model, 6, "uniform")


def test_auxiliary_losses_made_inside_of_blocks_are_refused() -> None:
    model = zoo.build("MixtralForCausalLM", changes={"output_router_logits": True})
    with pytest.raises(UnsupportedError, match=r"layers.0 \(MixtralDecoderLayer\) keeps a tensor .* what the model returns reads it"):
        make_plan(model, 2, "uniform")
    quiet = zoo.build("MixtralForCausalLM")
    plan, call = make_plan(quiet, 2, "uniform"), zoo.batch("MixtralForCausalLM", torch.Generator())
    assert replan(skeleton(quiet), plan, call).crossings == plan.crossings
    with pytest.raises(UnsupportedError, match="layers.0"):
        replan(skeleton(quiet), plan, {**call, "output_router_logits": True})
