"""Helpers of `deepspeed.*` that scripts import: loaders, memory logs, leaf modules, gradients edited as a whole."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from hf_zero.errors import ConfigError
from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run, initialize

MLP = CASES["mlp"]


def test_repeating_loader_starts_again_and_tells_the_sampler() -> None:
    from hf_zero.deepspeed.served.helpers import RepeatingLoader

    data = list(range(8))
    sampler: DistributedSampler[int] = DistributedSampler(data, num_replicas=1, rank=0)  # type: ignore[arg-type]
    loader = RepeatingLoader(DataLoader(data, batch_size=4, sampler=sampler))  # type: ignore[arg-type]
    batches = [next(loader).tolist() for _ in range(6)]
    passes = [sum(batches[i : i + 2], []) for i in (0, 2, 4)]
    assert len(loader) == 2 and loader.epoch == 2 and [sorted(one) for one in passes] == [data] * 3
    assert passes[0] != passes[1] != passes[2], "the sampler was not told of the new epoch"
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))


def test_a_loader_that_a_script_makes_gives_this_ranks_batches() -> None:
    from hf_zero.deepspeed.served.helpers import DeepSpeedDataLoader

    data, started = list(range(10)), []
    timer = SimpleNamespace(start=lambda: started.append(1))
    sampler: DistributedSampler[int] = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    loader = DeepSpeedDataLoader(data, batch_size=2, local_rank=1, pin_memory=True, tput_timer=None, data_sampler=sampler)
    assert [batch.tolist() for batch in loader] == [[1, 3], [5, 7], [9]] and len(loader) == 3 and loader.data_sampler is sampler
    one, other = (
        DeepSpeedDataLoader(data, 5, False, 0, timer, data_parallel_world_size=2, data_parallel_rank=rank, dataloader_drop_last=True)
        for rank in (0, 1)
    )
    assert sorted([*next(iter(one)).tolist(), *next(iter(other)).tolist()]) == data and len(started) == 2
    assert sorted(next(iter(DeepSpeedDataLoader(data, 10, False, -1, None))).tolist()) == data
    with pytest.raises(ConfigError, match="CurriculumScheduler"):
        DeepSpeedDataLoader(data, 2, False, 0, None, deepspeed_dataloader_config={"curriculum_learning": True})


def test_memory_is_logged_when_forced(caplog: pytest.LogCaptureFixture) -> None:
    from hf_zero.deepspeed.served.logs import see_memory_usage
    from hf_zero.observe import logger

    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger="hf_zero"):
            see_memory_usage("not now")
            see_memory_usage("after the model", force=True)
            see_memory_usage("elsewhere", force=True, ranks=[7])
    finally:
        logger.removeHandler(caplog.handler)
    lines = {record.getMessage() for record in caplog.records}
    assert len(lines) == 1 and "after the model: host max" in lines.pop()


def _collectives() -> None:
    import deepspeed.comm as comm

    rank, world = ranks.rank(), ranks.world()
    told = {"prof": True, "log_name": "mine", "debug": "here"}
    own, every = torch.tensor([float(rank)]), torch.arange(float(world))
    for gather in (comm.all_gather_into_tensor, comm.allgather_fn):
        whole = torch.zeros(world)
        assert gather(whole, input_tensor=own, **told) is None and torch.equal(whole, every)
    whole = torch.zeros(world)
    work = comm.all_gather_into_tensor(output_tensor=whole, tensor=own, async_op=True)
    work.wait()
    assert isinstance(work, comm.Work) and torch.equal(whole, every)
    for scatter in (comm.reduce_scatter_tensor, comm.reduce_scatter_fn):
        for sums in ({"output_tensor": (part := torch.zeros(1)), "tensor": every}, {"output": (other := torch.zeros(1)), "input": every}):
            scatter(**sums, op=comm.ReduceOp.SUM, **told)
        assert part.item() == other.item() == rank * world
    exchanged = torch.zeros(world)
    comm.all_to_all_single(exchanged, tensor=torch.full((world,), float(rank)), **told)
    assert torch.equal(exchanged, every)
    for reduce in (comm.all_reduce, comm.inference_all_reduce):
        reduce(total := own.clone(), comm.ReduceOp.MAX, **told)
        assert total.item() == world - 1
    comm.broadcast(first := own.clone(), src=0, **told)
    comm.all_gather_object(objects := [None] * world, rank, **told)
    comm.barrier(**told)
    assert first.item() == 0 and objects == [0, 1]
    assert [comm.get_global_rank(None, 1), comm.get_global_rank(comm.get_world_group(), 1), comm.get_global_rank()] == [1, 1, 0]
    with pytest.raises(TypeError, match="nothing"):
        comm.all_reduce(own, nothing=1)


def test_collectives_take_the_argument_names_of_both_libraries() -> None:
    ranks.run_ranks(_collectives, 2)


def _names() -> None:
    # The module first: importing it must not hide the function of the same name.
    module = importlib.import_module("deepspeed.utils.z3_leaf_module")
    import deepspeed
    from deepspeed.runtime.dataloader import RepeatingLoader
    from deepspeed.runtime.utils import see_memory_usage  # noqa: F401
    from deepspeed.utils import z3_leaf_module
    from deepspeed.utils.tensor_fragment import safe_get_full_grad

    assert deepspeed.utils.RepeatingLoader is RepeatingLoader and deepspeed.utils.safe_get_full_grad is safe_get_full_grad
    version = f"{deepspeed.__version_major__}.{deepspeed.__version_minor__}.{deepspeed.__version_patch__}"
    assert version == deepspeed.__version__
    model = MLP.build()
    assert module.z3_leaf_module is z3_leaf_module and not z3_leaf_module(model)
    module.set_z3_leaf_modules(model, [type(model)])
    assert z3_leaf_module(model)


def test_helpers_are_found_under_deepspeeds_names() -> None:
    ranks.run_ranks(_names, 1)


def _edited_gradients(stage: int) -> None:
    import hf_zero

    engine = initialize(MLP.build(), Run(stage))
    engine.backward(MLP.forward(engine, MLP.rows(0, 0, ranks.rank())))
    params = list(engine.module.parameters())
    before = [hf_zero.utils.safe_get_full_grad(param) for param in params]
    hf_zero.utils.safe_update_full_grad_vectorized(params, lambda grad, param: 2 * grad)
    for param, grad in zip(params, before, strict=True):
        assert grad is not None and torch.equal(hf_zero.utils.safe_get_full_grad(param), 2 * grad)
    engine.step()
    hf_zero.utils.safe_update_full_grad_vectorized(params, lambda grad, param: pytest.fail("there is no gradient after a step"))


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_edited_between_backward_and_step(stage: int) -> None:
    ranks.run_ranks(_edited_gradients, 2, stage)
