"""How often a training step makes the host wait for its device, counted on the pretend accelerator.

While the host waits nothing is queued, and the device runs dry when it gets there. A step may wait once: for the answer whether its
gradients are finite.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests import pretend
from tests.pretend import network
from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import DTYPES, Run, initialize, prepare
from tests.support.rows import slow_but

pytestmark = pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())

STEPS = 3
Waits = list[tuple[str, str]]


def on_devices(*args: object) -> list[list[Waits]]:
    env = {"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": network.NAME}
    return ranks.run_ranks(_waits_by_step, 2, *args, env=env, timeout=200.0)


def _waits_by_step(run: Run) -> list[Waits]:
    """What the host waited for in each step behind the first two, in which states are made and the order of blocks is learnt."""
    case = CASES["mlp"]
    engine = initialize(case.build(), run)
    steps = []
    for step in range(2 + STEPS):
        batches = [prepare(case.rows(step, micro, ranks.rank()), DTYPES[run.dtype]) for micro in range(run.accumulation)]
        with pretend.host_waits() as waits:
            for batch in batches:
                engine.backward(case.forward(engine, batch))
                engine.step()
        steps.append(waits)
    engine.destroy()
    return steps[2:]


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but([0, 1, 2, 3], 2, 3))
def test_a_step_in_bf16_waits_once_at_most(stage: int) -> None:
    for steps in on_devices(Run(stage=stage, dtype="bf16", accumulation=2, clip=1.0)):
        for waits in steps:
            assert len(waits) <= 1, "\n".join(f"{what}: {where}" for what, where in waits)


def _votes_of_a_split_model() -> Waits:
    """All ranks of a model that two hold together vote, for a step and for a save, while the device is busy."""
    engine = initialize(CASES["gpt2"].build(), Run(stage=1, extra={"tensor_parallel": {"autotp_size": 2}}))
    steps, saves = engine.stepper.everyone, engine.checkpoints.state_of(engine).everyone
    assert steps.world == saves.world == 2 and steps.topology.group is saves.topology.group is not dist.group.WORLD
    with pretend.host_waits() as waits:
        torch.ones(64, device=ranks.device()).mul_(2)
        assert all(everyone.any_rank(ranks.rank() == 1, "a vote") for everyone in (steps, saves))
    engine.destroy()
    return waits


def test_ranks_that_hold_one_model_vote_on_the_host() -> None:
    env = {"HF_ZERO_TEST_DEVICE": pretend.NAME, "HF_ZERO_TEST_BACKEND": network.NAME}
    assert ranks.run_ranks(_votes_of_a_split_model, 2, env=env, timeout=200.0) == [[], []]


def _one_of_each() -> Waits:
    values = torch.arange(4.0, device=ranks.device())
    module = torch.get_device_module(pretend.NAME)
    event = module.Event()
    with pretend.host_waits() as waits:
        (values + 1).mul_(2)[1:]
        torch.zeros(4).pin_memory().copy_(values, non_blocking=True)
        event.record()
        assert waits == []
        values.sum().item()
        bool(values.any())
        values.tolist()
        torch.tensor(1.0, device=values.device)
        torch.equal(values, values)
        values[values > 2]
        values[values > 2] = torch.ones(1, device=values.device)
        values.unique()
        event.synchronize()
        module.current_stream().synchronize()
        module.synchronize()
    values.sum().item()
    return waits


def test_all_that_makes_a_host_wait_is_counted() -> None:
    env = {"HF_ZERO_TEST_DEVICE": pretend.NAME}
    waits = ranks.run_ranks(_one_of_each, 1, env=env, group=False)[0]
    assert [what for what, _ in waits] == [
        "item", "item", "a copy to the host", "a copy from the host", "aten::equal", "aten::nonzero", "aten::_index_put_impl_",
        "aten::_unique2", "an event", "a stream", "a device",
    ]  # fmt: skip
    assert {where.split(":")[0] for _, where in waits} == {"tests/pretend/test_host_waits.py"}
