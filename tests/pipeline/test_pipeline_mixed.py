"""Pipelines, tensor and data parallelism together, and what reads all weights of such an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hf_zero
from tests.pipeline.pipelines import check, replica, train, with_stages
from tests.support import parity, ranks
from tests.support.models import CASES
from tests.support.parity import Run
from tests.support.tp_training import zoo_case

TIED = {"num_hidden_layers": 4, "tie_word_embeddings": True}
RUN = Run(1, clip=0.1, extra={"train_micro_batch_size_per_gpu": 2})
REPLICAS = 2


def check_mixed(folder: str) -> list[float]:
    """Trains over 2 stages of 2 ranks a layer, 2 replicas of each; then losses of two steps behind a checkpoint in ``folder``."""
    case = zoo_case("LlamaForCausalLM", TIED)
    check(case, Run(2, accumulation=2, clip=0.1), 2, tp=2)
    check(CASES["llama"], Run(1, "bf16", clip=0.1), 2, tp=2)
    engine = train(case, RUN, 2, 2)[-1]
    engine.save_checkpoint(folder, tag="mixed")
    return _two_steps(engine, 2, 2)


def _two_steps(engine: object, stages: int, tp: int) -> list[float]:
    """Losses on the rows of both replicas, whoever trains them."""
    case, found = zoo_case("LlamaForCausalLM", TIED), []
    for step in range(RUN.steps, RUN.steps + 2):
        rows = [parity.prepare(case.rows(step, 0, index), torch.float32) for index in range(REPLICAS)]
        here = ranks.world() // (stages * tp)
        batch = rows[replica(stages, tp)] if here == REPLICAS else parity.concatenate(rows)
        found.append(parity.mean_over_ranks([parity.micro_step(engine, batch, case.forward, 0)]))
    return found


def check_loaded(folder: str, stages: int) -> list[float]:
    engine = parity.initialize(zoo_case("LlamaForCausalLM", TIED).build(), with_stages(RUN, stages) if stages > 1 else RUN)
    engine.load_checkpoint(folder, tag="mixed")
    return _two_steps(engine, stages, 1)


@pytest.mark.slow
def test_stages_layers_and_data_over_eight_ranks(tmp_path: Path) -> None:
    expected = ranks.run_ranks(check_mixed, 8, str(tmp_path), timeout=250)[0]
    for world, stages in ((1, 1), (2, 2), (4, 2)):
        found = ranks.run_ranks(check_loaded, world, str(tmp_path), stages)
        assert found == [pytest.approx(expected, rel=1e-5)] * world, (world, stages)


def check_groups() -> None:
    """Shard groups beside stages: a weight that two stages hold is added up over these and over the groups."""
    for stage in (1, 2):
        extra = {"zero_optimization": {"mics_shard_size": ranks.world() // 4}}
        check(zoo_case("LlamaForCausalLM", TIED), Run(stage, accumulation=2, clip=0.1, extra=extra), 2)


def test_shard_groups_beside_stages() -> None:
    ranks.run_ranks(check_groups, 4)


@pytest.mark.slow
def test_shard_groups_of_two_beside_stages() -> None:
    ranks.run_ranks(check_groups, 8)


def check_streamed(stages: int, tp: int) -> None:
    """Every rank is given every weight, whole, once, in the model's order."""
    case = zoo_case("LlamaForCausalLM", TIED)
    wanted = dict(case.build().named_parameters())
    engine = parity.initialize(case.build(), with_stages(Run(1), stages, tp))
    found = {name: value.clone() for name, value in hf_zero.utils.iter_full_params(engine, bucket_bytes=4096)}
    assert list(found) == list(wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_all_weights_of_two_stages() -> None:
    ranks.run_ranks(check_streamed, 2, 2, 1)


@pytest.mark.slow
def test_all_weights_of_stages_and_layers() -> None:
    ranks.run_ranks(check_streamed, 4, 2, 2)
