"""What reads and writes offloaded state from outside: checkpoints, the functions for whole values, state dicts, other optimizers."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero.config.schema.zero import OffloadOptimizer
from hf_zero.memory.buffers import ALIGNMENT, HostMemory
from hf_zero.memory.copies import CopyLane
from hf_zero.offload import file_states, host_states
from hf_zero.offload.file_states import BufferPlan
from hf_zero.ops.host_optimizers import HostAdam
from tests.support import ranks
from tests.support.models import CASES
from tests.support.offload_runs import blocks_of, differing, sections, state_of, ways
from tests.support.parity import Run, collect, initialize, train
from tests.support.rows import slow_but

BOTH = {2: ["cpu, half, apart", "nvme, pipelined, apart"], 3: ["both nvme", "both nvme, some kept, apart"]}


def make(run: Run, blocks: dict[str, Any], **arguments: Any) -> Any:
    torch.manual_seed(3)
    return initialize(CASES["odd_mlp"].build(), Run(**{**vars(run), "extra": sections(run.stage, blocks)}), **arguments)


def steps(engine: Any, run: Run, first: int) -> Any:
    case = CASES["odd_mlp"]
    return train(engine, lambda step, micro, rank: case.rows(first + step, micro, rank), case.forward, run)


def _destroy(engine: Any) -> None:
    engine.destroy()
    del engine
    gc.collect()


# -- checkpoints ------------------------------------------------------------------------------------------------------


def _through_checkpoints(stage: int, folder: str, labels: list[str]) -> list[str]:
    """Saves offloaded, loads plain and the other way round; each time training goes on as if nothing had happened."""
    run = Run(stage=stage, dtype="bf16", clip=0.05, steps=2)
    plain = make(run, {})
    steps(plain, run, 0)
    plain.save_checkpoint(folder, tag="plain")
    steps(plain, run, 2)
    expected = state_of(plain)
    _destroy(plain)
    wrong = []
    for label in labels:
        with blocks_of(ways(stage)[label]) as blocks:
            engine = make(run, blocks)
            steps(engine, run, 0)
            engine.save_checkpoint(folder, tag="offloaded")
            steps(engine, run, 2)
            wrong += [f"{label}: {name} after a save" for name in differing(state_of(engine), expected)]
            # Into an engine that has states, and into one that never stepped.
            engine.load_checkpoint(folder, tag="plain")
            steps(engine, run, 2)
            wrong += [f"{label}: {name} after a load" for name in differing(state_of(engine), expected)]
            _destroy(engine)
            fresh = make(run, blocks)
            fresh.load_checkpoint(folder, tag="plain")
            steps(fresh, run, 2)
            wrong += [f"{label}: {name} after a load into a new engine" for name in differing(state_of(fresh), expected)]
            _destroy(fresh)
            del engine, fresh
            gc.collect()
        back = make(run, {})
        back.load_checkpoint(folder, tag="offloaded")
        steps(back, run, 2)
        wrong += [f"{label}: {name} loaded without offload" for name in differing(state_of(back), expected)]
        _destroy(back)
    return wrong


@pytest.mark.slow  # fast: `test_offloaded_run_resumes` of test_checkpoint_resume.py
@pytest.mark.parametrize(("stage", "labels"), [(3, BOTH[3][1:]), *(pytest.param(*both, marks=pytest.mark.slow) for both in BOTH.items())])
def test_checkpoints_go_from_tier_to_tier(stage: int, labels: list[str], tmp_path: Path) -> None:
    assert ranks.run_ranks(_through_checkpoints, 2, stage, str(tmp_path), labels) == [[], []]


# -- whole values -----------------------------------------------------------------------------------------------------


def _whole_values(stage: int) -> list[str]:
    from hf_zero import utils

    run = Run(stage=stage, dtype="bf16", steps=1)

    def play(engine: Any) -> dict[str, torch.Tensor]:
        steps(engine, run, 0)
        case, found = CASES["odd_mlp"], {}
        parameter = dict(engine.module.named_parameters())["head.weight"]
        batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in case.rows(7, 0, ranks.rank()).items()}
        engine.backward(case.forward(engine, batch))
        found["grad"] = utils.safe_get_full_grad(parameter).clone()
        found["local grad"] = utils.safe_get_local_grad(parameter).clone()
        utils.safe_set_full_grad(parameter, found["grad"] * 0.5)
        found["grad set"] = utils.safe_get_full_grad(parameter).clone()
        engine.step()
        utils.safe_set_full_fp32_param(parameter, utils.safe_get_full_fp32_param(parameter) + 1.0)
        utils.safe_set_full_optimizer_state(parameter, torch.full(found["grad"].shape, 0.25), "exp_avg_sq")
        local = utils.safe_get_local_optimizer_state(parameter, "exp_avg")
        utils.safe_set_local_optimizer_state(parameter, local * 2, "exp_avg")
        utils.safe_set_local_fp32_param(parameter, utils.safe_get_local_fp32_param(parameter) * 2)
        with __import__("hf_zero").zero.GatheredParameters([parameter], modifier_rank=0):
            if ranks.rank() == 0:
                parameter.data[0] = 0.5
        steps(engine, run, 8)
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        steps(engine, run, 9)
        return {**found, **state_of(engine)}

    plain = make(run, {})
    expected = play(plain)
    _destroy(plain)
    wrong = []
    for label in BOTH[stage]:
        with blocks_of(ways(stage)[label]) as blocks:
            engine = make(run, blocks)
            wrong += [f"{label}: {name}" for name in differing(play(engine), expected)]
            _destroy(engine)
            del engine
            gc.collect()
    return wrong


@pytest.mark.slow  # fast: `test_any_element_wise_optimizer_can_be_offloaded`, test_ds_gathered.py
@pytest.mark.parametrize("stage", slow_but([2, 3], 3))
def test_values_can_be_read_and_set(stage: int) -> None:
    assert ranks.run_ranks(_whole_values, 2, stage) == [[], []]


# -- optimizers -------------------------------------------------------------------------------------------------------


class CountingSgd(torch.optim.SGD):
    """SGD whose rate falls with a counter in its group, as schedule-free optimizers keep one."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 0.1 / group["count"]
        return super().step(closure)


class CountedSigns(torch.optim.Optimizer):
    """Steps by the sign of the gradient, longer with a count of signs that each element keeps in one byte."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["count"] = torch.zeros_like(param, dtype=torch.int8)
                state["count"].add_(param.grad.sign().to(torch.int8))
                param.sub_(group["lr"] * param.grad.sign() * (1 + state["count"].abs()))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "AMSGrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "HostAdam": lambda params: HostAdam(params, lr=1e-2, weight_decay=0.1),
    "SGD without state": lambda params: torch.optim.SGD(params, lr=1e-2),
    "counts of one byte": lambda params: CountedSigns(params),
    "counter in the group": lambda params: CountingSgd(params, lr=0.1, momentum=0.9),
}


def _optimizers(stage: int, label: str) -> list[str]:
    from tests.support.parity import Trace

    run = Run(stage=stage, dtype="bf16", steps=3, clip=0.05)

    def play(kind: str, blocks: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
        engine = make(run, blocks, optimizer=OPTIMIZERS[kind])
        schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer.inner, lambda step: 1.0)
        trace = collect(engine, steps(engine, run, 0) or Trace())
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch's, that the optimizer was not stepped before
            schedule.step()
        _destroy(engine)
        del engine
        gc.collect()
        return trace.masters, rates

    wrong = []
    for kind in OPTIMIZERS:
        expected, rates = play(kind, {})
        with blocks_of(ways(stage)[label]) as blocks:
            masters, own_rates = play(kind, blocks)
        wrong += [f"{kind}: {name}" for name in differing(masters, expected)]
        wrong += [f"{kind}: rates {own_rates}, expected {rates}"] if own_rates != rates else []
    return wrong


@pytest.mark.parametrize(("stage", "label"), [(1, "cpu"), pytest.param(2, "nvme, pipelined, apart", marks=pytest.mark.slow)])
def test_any_element_wise_optimizer_can_be_offloaded(stage: int, label: str) -> None:
    assert ranks.run_ranks(_optimizers, 2, stage, label) == [[], []]


def _low_masters(label: str, clip: float) -> list[str]:
    run = Run(stage=2, dtype="bf16", steps=3, clip=clip)
    low = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}

    def masters(blocks: dict[str, Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        engine = initialize(CASES["odd_mlp"].build(), Run(**{**vars(run), "extra": {**sections(run.stage, blocks), **low}}))
        trace = collect(engine, steps(engine, run, 0))
        _destroy(engine)
        return trace.masters

    expected = masters({})
    with blocks_of(ways(2)[label]) as blocks:
        return list(differing(masters(blocks), expected))


def test_the_part_that_stays_on_the_device_is_rounded_as_without_offload() -> None:
    """Gradients of 16 bits are clipped in fp32 where a native pass updates, whichever tier holds the state."""
    assert ranks.run_ranks(_low_masters, 2, "cpu, half, apart, no overlap", 0.05) == [[], []]


@pytest.mark.parametrize("types", [[torch.float32, torch.int8], [torch.bfloat16], [torch.float32, torch.float32], []])
@pytest.mark.parametrize("most", [100, 2048, 5000, 10**6])
def test_sub_groups_in_files_begin_at_pages(types: list[torch.dtype], most: int) -> None:
    """Two sub-groups that share a page would overwrite each other's states, whose writes are under way at the same time."""
    plan = BufferPlan(OffloadOptimizer(device="nvme", pipeline_read=True, pipeline_write=True), most)
    with mock.patch.object(file_states, "LEAST_NUMEL", 0):
        numel = plan.sub_group_numel(40_000, types)
    assert numel == 40_000 or all(numel * dtype.itemsize % ALIGNMENT == 0 for dtype in types)


@pytest.mark.parametrize("most", [0, 1000, 2**20 - 1])
def test_small_sub_groups_are_enlarged_within_the_buffers(most: int) -> None:
    """Published configurations have ``sub_group_size: 0``, which would read and write the states page by page."""
    types = [torch.float32] * 3
    assert BufferPlan(OffloadOptimizer(device="nvme"), most).sub_group_numel(10**7, types) == 2**20
    one = OffloadOptimizer(device="nvme", buffer_count=1)
    assert BufferPlan(one, most).sub_group_numel(2**20, types) < 2**20 // 3  # one buffer of the largest shard's size for three tensors


# -- what goes wrong --------------------------------------------------------------------------------------------------


def _refused(blocks: dict[str, Any], free: int | None) -> str:
    from unittest import mock

    from hf_zero.errors import HfZeroError
    from hf_zero.memory import budget

    known = budget.FreeMemory(free, "the machine has little") if free is not None else None
    with mock.patch.object(budget, "free_memory", lambda: known):
        try:
            engine = make(Run(stage=3, dtype="bf16"), blocks)
        except HfZeroError as error:
            return f"{type(error).__name__}: {error}"
    _destroy(engine)
    return "made"


def test_too_little_host_memory_is_refused_on_every_rank() -> None:
    for text in ranks.run_ranks(_refused, 2, {"offload_optimizer": {"device": "cpu"}}, 10_000):
        assert text.startswith("HostMemoryError: offloading needs ") and "masters and optimizer states" in text
        assert "are free: the machine has little" in text and "offload_optimizer.device: nvme by" in text
    assert ranks.run_ranks(_refused, 2, {"offload_optimizer": {"device": "cpu"}}, 1 << 30) == ["made", "made"]
    assert ranks.run_ranks(_refused, 2, {"offload_optimizer": {"device": "cpu"}}, None) == ["made", "made"]


def test_a_path_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocks = {"offload_optimizer": {"device": "nvme", "nvme_path": os.fspath(tmp_path / "file")}}
    for text in ranks.run_ranks(_refused, 2, blocks, None):
        assert text.startswith("OffloadError: no swap files can be made in nvme_path") and str(tmp_path) in text


def test_gradients_reach_the_host_in_pieces() -> None:
    unit: Any = SimpleNamespace(layout=SimpleNamespace(shard_numel=10), own=SimpleNamespace(settle=lambda: None))
    device, dtype = torch.device("cpu"), torch.float32
    place = host_states.HostGradients(HostMemory(device), device, CopyLane(device))
    first, second = (torch.randn(10, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (0, 1))
    with mock.patch.object(host_states, "_PIECE", 4):
        one = place.add(unit, None, first.clone(), dtype, 1 / 3)
        assert torch.equal(one, first.float() * (1 / 3))
        both = place.add(unit, one, second.clone(), dtype, 1 / 3)
    assert both is one and torch.equal(both, first.float() * (1 / 3) + second.float() * (1 / 3))
