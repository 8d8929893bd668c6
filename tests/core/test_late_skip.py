"""Steps that the device skips while the host does not yet know that a gradient is not finite: the bits of steps that the host skips."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import ranks
from tests.support.late_skips import NOT_FINITE, STEPS, same_steps, train
from tests.support.parity import Run


def _one_rank_waits(stages: tuple[int, ...], extra: dict[str, Any]) -> None:
    for stage in stages:
        run = Run(stage, dtype="bf16", clip=0.1, extra=extra)
        expected, found = (train(run, late, False, one_waits=True) for late in (False, True))
        assert not found[2], "the ranks have not decided alike"
        assert str(found[0]) == str(expected[0]) and found[0][-1][1] == len(NOT_FINITE)
        assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True)), stage
        expected, found = (train(run, late, False) for late in (False, True))
        assert found[2] == 4, found[2]
        assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True)), stage


@pytest.mark.parametrize(
    ("world", "stages", "extra"), [(2, (0, 3), {}), (4, (3,), {"zero_optimization": {"zero_hpz_partition_size": 2}})], ids=["plain", "hpZ"]
)
def test_a_hook_on_one_rank_lets_all_ranks_wait(world: int, stages: tuple[int, ...], extra: dict[str, Any]) -> None:
    """Ranks that keep copies of weights (hpZ) drop them together."""
    ranks.run_ranks(_one_rank_waits, world, stages, extra)


def _zeros_of_a_script() -> None:
    """A skipped step writes nothing: the sign of a zero that a script has written stays."""
    import hf_zero
    from hf_zero.core.step import step as steps

    model = torch.nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    config = Run(1, dtype="fp16").config()
    config.pop("optimizer", None)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config={**config, "zero_allow_untested_optimizer": True})[0]
    with mock.patch.object(steps, "_READ_AT_ONCE", ()):
        for value in (1.0, float("inf")):
            engine.backward(engine(torch.full((2, 8), value, dtype=torch.float16)).sum())
            if value > 1.0:
                for zero in (0.0, -0.0):  # the master takes the first; the second equals it
                    model.weight.data.fill_(zero)
                    assert not torch.signbit(hf_zero.utils.safe_get_full_fp32_param(model.weight)).any()
                before = model.weight.clone()
            engine.step()
    assert engine.skipped_steps == 1 and torch.equal(model.weight.view(torch.int16), before.view(torch.int16)), model.weight
    engine.destroy()


def test_a_skipped_step_changes_no_bit() -> None:
    ranks.run_ranks(_zeros_of_a_script, 1)


def _calls_of_a_script() -> None:
    """Hooks on all optimizers, and a ``step`` that a script has replaced, see the steps that are taken."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    for way in ("hook", "replaced before", "replaced after"):
        counted = []
        for late in (False, True):
            calls: list[int] = []
            counted.append(calls)
            handle = register_optimizer_step_post_hook(lambda *_, calls=calls: calls.append(1)) if way == "hook" else None
            train(Run(1, dtype="bf16"), late, False, replaced=(way, calls))
            if handle is not None:
                handle.remove()
        assert counted[0] == counted[1] and counted[0], f"{way}: {counted}"


def test_what_a_script_adds_to_steps_sees_steps_that_are_taken() -> None:
    ranks.run_ranks(_calls_of_a_script, 1)


@pytest.mark.parametrize(("dtype", "clip_inside"), STEPS)
def test_the_device_skips_what_the_host_would(dtype: str, clip_inside: bool) -> None:
    ranks.run_ranks(same_steps, 1, dtype, clip_inside)
