"""Batch sizes and gradients where several ranks share their samples: what counts is groups, wherever a configuration is read."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.assembly import axes
from hf_zero.assembly.axes import count_samples
from hf_zero.assembly.policies import gradient_policy, precision_policy
from hf_zero.config.mesh import Mesh
from hf_zero.config.resolve import resolve
from hf_zero.core.stages import stage_policy
from hf_zero.deepspeed.served import groups
from hf_zero.deepspeed.served.settings import DeepSpeedConfig
from tests.support import ranks


@pytest.mark.parametrize("mesh", [Mesh(dp_shard=2, sp=2), Mesh(dp_shard=2, tp=2), Mesh(dp_replicate=2, tp=2)])
def test_a_total_over_all_ranks_is_counted_over_groups_only_where_nothing_else_explains_it(mesh: Mesh) -> None:
    def count(config: dict[str, Any]) -> dict[str, Any]:
        return count_samples(config, mesh)

    two = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    assert count(two) == two, "two of three keys: accumulation is 2"
    three = {**two, "gradient_accumulation_steps": 1}
    assert count(three) == {**three, "train_batch_size": 8}
    assert count({**three, "gradient_accumulation_steps": 2}) == {**three, "gradient_accumulation_steps": 2}
    assert count({**three, "gradient_accumulation_steps": "auto"})["train_batch_size"] == 16


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, r"gradient_accumulation_steps is 4, .* DeepSpeed .* uses 2\."),
        ({"train_batch_size": 16, "gradient_accumulation_steps": 2}, r"train_micro_batch_size_per_gpu is 4, .* DeepSpeed .* uses 2\."),
        ({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}, None),  # an error with DeepSpeed
        ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, None),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, None),
    ],
)
def test_a_derived_batch_size_that_deepspeed_derives_differently_is_told(
    config: dict[str, Any], warning: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(axes, "warn_once", told.append)
    axes._warn_of_shared_samples(config, Mesh(dp_shard=2, tp=2))
    assert len(told) == (warning is not None)
    assert warning is None or re.match(warning, told[0])


def test_a_sum_over_samples_is_a_mean_over_the_ranks_that_share_them() -> None:
    config = resolve({"train_micro_batch_size_per_gpu": 1, "gradient_allreduce_op": "sum"}, world_size=2).config
    for sharers in (1, 2):
        policy = gradient_policy(config, precision_policy(config), stage_policy(1), 4, sharers)
        assert policy.pre_scale * policy.post_scale == 1 / sharers


def _read() -> None:
    import hf_zero

    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    assert DeepSpeedConfig({**config, "sequence_parallel_size": 2}).train_batch_size == 8
    mpu = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
    assert DeepSpeedConfig(config, mpu=mpu).train_batch_size == 8
    assert DeepSpeedConfig({**config, "train_batch_size": 16}).train_batch_size == 16
    # The size of a ParallelismConfig is not in the file, and a model is built before anything else knows it.
    with hf_zero.zero.Init(config_dict_or_path={**config, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}):
        layer = nn.Sequential(nn.Linear(8, 8))
    assert layer[0].weight.dtype == torch.bfloat16 and layer[0].weight.ds_numel == 64
    group = groups.get_data_parallel_group()
    assert (group.size(), group.rank()) == (groups.get_data_parallel_world_size(), groups.get_data_parallel_rank())


def test_configurations_are_read_for_groups() -> None:
    ranks.run_ranks(_read, 4)
