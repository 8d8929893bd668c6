"""Which ranks hold one model together: adjacent ones, a group the script made, or those of an ``mpu`` object."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.comm.axes import model_parallel_group
from hf_zero.deepspeed.served import groups
from hf_zero.errors import ConfigError
from hf_zero.tensor_parallel.plan import TpPlan
from hf_zero.tensor_parallel.planner import make_plan
from hf_zero.tensor_parallel.split import tp_model_init
from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import micro_step
from tests.support.processes import MOST_SECONDS
from tests.support.rows import slow_but
from tests.tensor_parallel.mpu import Mpu, made

CASE = CASES["gpt2"]


def config(ranks_together: int | None, **extra: Any) -> dict[str, Any]:
    section = {} if ranks_together is None else {"tensor_parallel": {"autotp_size": ranks_together}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **section,
        **extra,
    }


def train(engine: Any, place: int) -> list[float]:
    return [micro_step(engine, CASE.rows(step, 0, place), CASE.forward, 0) for step in range(2)]


def far_apart(how: str) -> tuple[list[float], int, int]:
    """Losses where ranks 0 and 2, and 1 and 3, hold a model together; data rank, first rank of the group."""
    model, group = CASE.build(), made([[0, 2], [1, 3]])
    if how == "tp_group":
        tp_model_init(model, 2, torch.float32, tp_group=group)
        engine = hf_zero.initialize(model=model, config=config(2, data_parallel_size=2))[0]
    elif how == "tp_group, no section":
        tp_model_init(model, 2, tp_group=group)
        engine = hf_zero.initialize(model=model, config=config(None))[0]
    else:
        mpu = Mpu(group, made([[0, 1], [2, 3]]))
        if how == "tp_group and mpu":
            tp_model_init(model, 2, tp_group=group)
        engine = hf_zero.initialize(model=model, config=config(2), mpu=mpu)[0]
    return train(engine, dist.get_rank() % 2), groups.get_data_parallel_rank(), groups.get_tensor_model_parallel_src_rank()


def adjacent(section: bool) -> list[float]:
    model = tp_model_init(CASE.build(), 2)
    engine = hf_zero.initialize(model=model, config=config(2 if section else None))[0]
    return train(engine, dist.get_rank() // 2)


@functools.cache
def adjacent_on_four() -> list[list[float]]:
    return ranks.run_ranks(adjacent, 4, True)


@pytest.mark.parametrize("how", slow_but(["tp_group", "tp_group, no section", "mpu", "tp_group and mpu"], "tp_group, no section", "mpu"))
def test_ranks_that_are_not_adjacent(how: str) -> None:
    expected = adjacent_on_four()
    found = ranks.run_ranks(far_apart, 4, how)
    assert [losses for losses, *_ in found] == [expected[0], expected[2], expected[1], expected[3]]  # bit for bit
    if how != "mpu":
        assert [(data, first) for _, data, first in found] == [(0, 0), (1, 1), (0, 0), (1, 1)]


def test_a_split_model_needs_no_section() -> None:
    assert ranks.run_ranks(adjacent, 2, False) == ranks.run_ranks(adjacent, 2, True)


def edited(path: str) -> list[float]:
    engine = hf_zero.initialize(model=tp_model_init(CASE.build(), 2, plan=TpPlan.load(path)), config=config(2))[0]
    return train(engine, dist.get_rank() // 2)


@pytest.mark.slow  # fast: `test_edited_plan_is_followed` of test_tp_plan.py
def test_saved_and_edited_plan_is_followed(tmp_path: Path) -> None:
    plan = make_plan(CASE.build(), 2)
    plan.modules["transformer.h.0.mlp.c_fc"].split = "whole"
    plan.modules["transformer.h.1.mlp.c_proj"].split = "column"
    data = plan.to_dict() | {"digest": make_plan(CASE.build(), 2).to_dict()["digest"]}  # as a user's editor leaves it
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    expected = ranks.run_ranks(adjacent, 2, True)
    for losses, whole in zip(ranks.run_ranks(edited, 2, str(path)), expected, strict=True):
        assert losses == pytest.approx(whole, rel=1e-5)
    make_plan(CASE.build(), 4).save(path)
    for outcome in ranks.observe_ranks(edited, 2, str(path), grace=MOST_SECONDS):
        assert "the plan is for 4 ranks, tensor_parallel.autotp_size is 2" in outcome.text


def errors() -> list[str]:
    found = []

    def expect(call: Any) -> None:
        with pytest.raises(ConfigError) as error:
            call()
        found.append(str(error.value))

    world, alone = made([[0, 1]]), made([[0], [1]])
    expect(lambda: tp_model_init(CASE.build(), 4, tp_group=world))
    expect(lambda: hf_zero.initialize(model=CASE.build(), config=config(2), mpu=Mpu(alone, world)))
    split = tp_model_init(CASE.build(), 2)
    expect(lambda: hf_zero.initialize(model=split, config=config(1)))
    expect(lambda: hf_zero.initialize(model=split, config=config(None), mpu=Mpu(alone, world)))
    return found


def test_what_disagrees_is_named() -> None:
    first, second = ranks.run_ranks(errors, 2)
    assert first[:3] == second[:3]
    assert "tp_size is 4, and tp_group has 2 ranks" in first[0]
    assert "- tensor_parallel.autotp_size: tp 2" in first[1] and "get_model_parallel_group()): tp 1" in first[1]
    assert "the model is split over 2 ranks, but tensor_parallel.autotp_size is 1" in first[2]
    assert "- tp_model_init: tp 2" in first[3] and "get_model_parallel_group()): tp 1" in first[3]


def adapters_after_the_split() -> str:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tp_model_init(CASES["llama"].build(), 2), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError) as error:
        hf_zero.initialize(model=model, config=config(2))
    return str(error.value)


def test_layers_that_are_wrapped_after_the_split_are_named() -> None:
    for text in ranks.run_ranks(adapters_after_the_split, 2):
        assert "layers.0.self_attn.q_proj.base_layer was split by tp_model_init and wrapped in Linear after it" in text


def not_ours() -> int:
    """An mpu object of a model that is model-parallel by itself, and no autotp_size: nothing is split."""
    model = CASE.build()
    mpu = Mpu(made([[0, 1]]), made([[0], [1]]))
    engine = hf_zero.initialize(model=model, config=config(None), mpu=mpu)[0]
    return sum(param.numel() for param in engine.module.parameters())


def test_models_that_are_parallel_by_themselves_stay_as_they_are() -> None:
    assert ranks.run_ranks(not_ours, 2) == [sum(param.numel() for param in CASE.build().parameters())] * 2


def test_an_mpu_that_counts_one_rank_names_no_group() -> None:
    mpu = SimpleNamespace(get_model_parallel_group=lambda: "group", get_model_parallel_world_size=lambda: 1)
    assert model_parallel_group(mpu) is None
    mpu.get_model_parallel_world_size = lambda: 2
    assert model_parallel_group(mpu) == "group"
