"""Test the host's work in a step: linear in the number of blocks, and no operation per small gradient. Counted, not timed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_zero
from tests.support import ranks
from tests.support.small_blocks import WIDTH, Model

PACKAGE = str(Path(hf_zero.__file__).parent)
FEW, MANY = 24, 96
GROWTH = 4.4  # for four times the blocks: what is done once per step makes it less, a look at all blocks from each of them more
RESHARD = {"stage3_max_reuse_distance": 0}


class Operations(TorchDispatchMode):
    """A mode that counts torch's operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _engine(blocks: int, zero: dict[str, Any], world: int) -> Any:
    """Return an engine on one rank of a pretended world, in which collectives move nothing and never wait."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    model = Model(blocks)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    for _ in range(2):  # the first learns the order and makes the moments
        _step(engine)
    return engine


def _step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)))
    engine.step()


def _calls(blocks: int, zero: dict[str, Any]) -> int:
    """Return the number of calls of this package's functions in one step."""
    engine = _engine(blocks, zero, world=8)
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(count)
    try:
        _step(engine)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.fast_rows("2", "3-reshard")
@pytest.mark.parametrize(
    ("zero", "calls"),
    [
        ({"stage": 0}, 205),
        ({"stage": 1}, 163),
        ({"stage": 2}, 163),
        ({"stage": 3}, 372),
        ({"stage": 3, **RESHARD}, 452),
        ({"stage": 3, "stage3_max_live_parameters": 0}, 455),
    ],
    ids=["0", "1", "2", "3", "3-reshard", "3-no-prefetch"],
)
def test_work_grows_as_the_model(zero: dict[str, Any], calls: int) -> None:
    """Check that a step's calls grow with the number of blocks, and are at most ``calls`` per block of 4 parameters."""
    # Not ordered: one process stands for all ranks, and has nobody to be compared with.
    few, many = (ranks.run_ranks(_calls, 1, blocks, zero, group=False, ordered=False)[0] for blocks in (FEW, MANY))
    assert many / few <= GROWTH, f"{few} calls with {FEW} blocks, {many} with {MANY}"
    assert many / MANY <= calls, f"{many / MANY:.0f} calls per block"


def _copies(blocks: int) -> Counter[str]:
    engine = _engine(blocks, {"stage": 2}, world=8)
    with Operations() as operations:
        engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)))
    return operations.seen


def test_small_gradients_of_a_unit_are_copied_together() -> None:
    seen = ranks.run_ranks(_copies, 1, 6, group=False, ordered=False)[0]
    assert seen["_foreach_copy_"] == 7, seen  # once per block and once for the root
    assert seen["copy_"] == 0, seen


def _weights(most_kept: int, stage: int, dtype: str) -> list[torch.Tensor]:
    """Return the weights after two steps of two micro-steps, where gradients are kept until they take ``most_kept`` bytes."""
    from hf_zero.core.schedule import gradients

    before, gradients._KEPT_ON_HOST = gradients._KEPT_ON_HOST, most_kept
    try:
        torch.manual_seed(0)
        model = Model(2)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "bf16": {"enabled": dtype == "bf16"},
            "prescale_gradients": True,  # on their way into the flat buffer, in 16 bit too
            "zero_optimization": {"stage": stage},
        }
        engine = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    finally:
        gradients._KEPT_ON_HOST = before
    generator = torch.Generator().manual_seed(ranks.rank())
    for _ in range(4):
        x = torch.randn(3, WIDTH, generator=generator)
        engine.backward(engine(x.bfloat16() if dtype == "bf16" else x))
        engine.step()
    return [unit.master.clone() for unit in engine.units]


@pytest.mark.fast_rows("fp32-0", "bf16-2")
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kept_gradients_are_those_copied_at_once(stage: int, dtype: str) -> None:
    """Check that bits do not depend on which gradients are copied together: all of a unit, those below some size, or each by itself."""
    together, some, alone = (ranks.run_ranks(_weights, 2, most_kept, stage, dtype) for most_kept in (1 << 18, 100, 0))
    for other in (some, alone):
        for rank, weights in enumerate(together):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, other[rank], strict=True))
