"""Elastic batch sizes: against a search that tries everything, DeepSpeed's published example, and in a configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.config.elastic import (
    SCHEDULER_VARIABLE,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
    compute_elastic_config,
)
from hf_zero.config.resolve import resolve
from hf_zero.errors import ConfigError
from tests.support import ranks

SECTION = {"enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32, "max_gpus": 1500}


def config(**changes: Any) -> dict[str, Any]:
    return {"elasticity": {**SECTION, "version": 0.1, **changes}}


def test_a_batch_that_many_numbers_of_ranks_share() -> None:
    total, ranks = compute_elastic_config(config())
    assert total == 9792 and len(ranks) == 23
    assert all(any(total % (size * count) == 0 for size in SECTION["micro_batch_sizes"]) for count in ranks)
    assert compute_elastic_config(config(), world_size=64) == (9792, ranks, 17)


# The least common multiple of 1, 2, 3 and 7 is 42: a batch that 7 ranks could share, and larger than the maximum.
@pytest.mark.parametrize(("micro", "world_size", "expected"), [([2, 4], 3, 4), ([2, 4], 7, None), ([1, 2, 3, 7], 7, None)])
def test_micro_batch(micro: list[int], world_size: int, expected: int | None) -> None:
    wanted = config(max_train_batch_size=32, micro_batch_sizes=micro, min_gpus=1)
    if expected is None:
        with pytest.raises(ElasticityIncompatibleWorldSize, match="7 data-parallel ranks cannot share a batch of 24"):
            compute_elastic_config(wanted, world_size=world_size)
    else:
        assert compute_elastic_config(wanted, world_size=world_size)[-1] == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(12, 300), st.integers(1, 4), st.integers(4, 64), st.booleans())
def test_ranks_are_all_that_fit(micro: list[int], largest: int, fewest: int, most: int, larger: bool) -> None:
    wanted = config(max_train_batch_size=largest, micro_batch_sizes=micro, min_gpus=fewest, max_gpus=most, prefer_larger_batch=larger)
    total, ranks = compute_elastic_config(wanted)
    assert total <= largest
    assert ranks == [count for count in range(fewest, most + 1) if any(total % (size * count) == 0 for size in micro)]
    for count in ranks:
        micro_now = compute_elastic_config(wanted, world_size=count)[-1]
        assert micro_now in micro and total % (micro_now * count) == 0


@pytest.mark.parametrize(("larger", "expected"), [(True, 4), (False, 2)])
def test_of_two_micro_batches_that_fit_the_larger_one_is_taken(larger: bool, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the preference chooses the batch alone, as in DeepSpeed, if the caller knows the number of ranks."""
    nodes = config(version=0.2, num_gpus_per_node=8, max_train_batch_size=64, micro_batch_sizes=[2, 4], min_gpus=8, max_gpus=16)
    nodes["elasticity"]["prefer_larger_batch"] = larger
    total, ranks, micro = compute_elastic_config(nodes, world_size=16)
    assert 16 in ranks and total // 16 % 4 == 0 and micro == 4
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert compute_elastic_config(nodes, return_microbatch=True) == (total, ranks, expected)
    assert resolve(nodes, world_size=16).batch.micro == 4


def test_a_batch_of_nodes_stays_below_the_maximum() -> None:
    nodes = config(version=0.2, num_gpus_per_node=8, max_train_batch_size=100, micro_batch_sizes=[2, 3, 5], min_gpus=8, max_gpus=64)
    for larger in (True, False):
        nodes["elasticity"]["prefer_larger_batch"] = larger
        for world_size in range(8, 51):
            total, _, micro = compute_elastic_config(nodes, world_size=world_size)
            assert 0 < total <= 100 and total % (world_size * micro) == 0
        with pytest.raises(ElasticityIncompatibleWorldSize, match="51 data-parallel ranks take 102 samples .* max_train_batch_size 100"):
            compute_elastic_config(nodes, world_size=51)


def test_whole_nodes_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = config(version=0.2, num_gpus_per_node=8, model_parallel_size=4)
    monkeypatch.setenv("WORLD_SIZE", "64")
    total, ranks, micro = compute_elastic_config(nodes, return_microbatch=True)
    assert all(count % 2 == 0 for count in ranks) and 16 in ranks
    assert total % (micro * 16) == 0
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ElasticityConfigError, match="WORLD_SIZE"):
        compute_elastic_config(nodes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"enabled": False}, "enabled is false"),
        ({"micro_batch_sizes": [1, 4, -1, 2]}, "micro_batch_sizes is"),
        ({"micro_batch_sizes": 5}, "micro_batch_sizes is 5"),
        ({"micro_batch_sizes": ["a", None, 0.5]}, "micro_batch_sizes.0 is 'a'"),
        ({"micro_batch_sizes": [20000]}, "larger than max_train_batch_size"),
        ({"min_gpus": -1}, "min_gpus is -1"),
        ({"max_gpus": 3}, "max_gpus is 3"),
        ({"version": 0.3}, "version is 0.3"),
        ({"model_parallel_size": 4, "num_gpus_per_node": 8}, "model_parallel_size is 4; allowed: 1 with elasticity.version"),
        ({"model_parallel_size": 16, "num_gpus_per_node": 8, "version": 0.2}, "no multiple of model_parallel_size 16"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ElasticityError, match=text):
        compute_elastic_config(config(**changes), world_size=2)


@pytest.mark.parametrize("section", [{}, {"elasticity": {"enabled": True}}, {"elasticity": {"enabled": True, "micro_batch_sizes": [2]}}])
def test_missing_values(section: dict[str, Any]) -> None:
    with pytest.raises(ElasticityConfigError, match="elasticity"):
        compute_elastic_config(section)


def test_the_configuration_takes_it() -> None:
    source = {"elasticity": {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4], "version": 0.1}}
    for world_size in (1, 2, 4, 8):
        batch = resolve(source, world_size=world_size).batch
        assert (batch.total, batch.micro) == (48, 4 if world_size <= 4 else 2)
        assert batch.micro * batch.accumulation * world_size == 48
    first = resolve(source, world_size=2)
    assert resolve(first.resolved, world_size=2).resolved == first.resolved


def test_other_batch_keys_contradict_it() -> None:
    source: dict[str, Any] = {"train_batch_size": 10, "elasticity": {"enabled": True, "max_train_batch_size": 64, "version": 0.1}}
    with pytest.raises(ElasticityConfigError, match="`train_batch_size` is 10, and elasticity makes it 48"):
        resolve(source, world_size=2)
    source["elasticity"]["ignore_non_elastic_batch_info"] = True
    assert resolve(source, world_size=2).batch.total == 48
    with pytest.raises(ConfigError, match="7 data-parallel ranks cannot share"):
        resolve(source, world_size=7)


def test_the_scheduler_counts_by_the_same_section(monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"elasticity": {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4], "version": 0.1}}
    monkeypatch.setenv(SCHEDULER_VARIABLE, json.dumps(source["elasticity"]))
    assert resolve(source, world_size=2).batch.total == 48
    monkeypatch.setenv(SCHEDULER_VARIABLE, json.dumps(source["elasticity"] | {"max_train_batch_size": 27}))
    with pytest.raises(ElasticityConfigError, match=f"max_train_batch_size is 64, and {SCHEDULER_VARIABLE} says 27"):
        resolve(source, world_size=2)
    monkeypatch.setenv(SCHEDULER_VARIABLE, "yes")
    with pytest.raises(ElasticityConfigError, match="is no elasticity section in JSON"):
        resolve(source, world_size=2)


def test_versions_before_elasticity_are_too_old() -> None:
    assert compute_elastic_config(config(), target_deepspeed_version="0.19.6+unknown") == compute_elastic_config(config())
    with pytest.raises(ElasticityConfigError, match=r"target_deepspeed_version is '0\.2'; allowed: from 0\.3\.8 on"):
        compute_elastic_config(config(), target_deepspeed_version="0.2")


def test_a_micro_batch_needs_a_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ElasticityConfigError, match="return_microbatch needs the number of ranks"):
        compute_elastic_config(config(), return_microbatch=True)
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert compute_elastic_config(config(), return_microbatch=True) == compute_elastic_config(config(), world_size=64)


def _of_engine() -> tuple[int, int, int, bool, bool]:
    import hf_zero

    section = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4], "version": 0.1}
    found = []
    for source in ({"elasticity": section}, {"train_batch_size": 2}):
        model = torch.nn.Linear(2, 1)
        engine, *_ = hf_zero.initialize(model=model, config={**source, "optimizer": {"type": "AdamW"}})
        found.append(engine.elasticity_enabled())
        if source.get("elasticity"):
            sizes = engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    return (*sizes, *found)


def test_an_engine_takes_it() -> None:
    assert ranks.run_ranks(_of_engine, 2) == [(48, 4, 6, True, False)] * 2
