"""Steps that the device skips while the host does not yet know that a gradient is not finite: the bits of steps that the host skips."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run

NOT_FINITE = (0, 3)  # numbers of steps; until the first update there is no state, and the host waits


def _train(
    run: Run, late: bool, clip_inside: bool, one_waits: bool = False, replaced: tuple[str, list[int]] = ("", [])
) -> tuple[list[Any], list[torch.Tensor], int]:
    """Return for each step what scripts read, the masters and steps of all states, and the number of updates that the device might skip."""
    import hf_zero
    from hf_zero.core.optimizer.state_store import StateStore
    from hf_zero.core.step import step as steps

    case = CASES["gpt2"]
    model = case.build().to(ranks.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def replace_step() -> None:
        step = optimizer.step

        def counted_step(*args: Any, **kwargs: Any) -> Any:
            replaced[1].append(1)
            return step(*args, **kwargs)

        optimizer.step = counted_step  # type: ignore[method-assign]

    if replaced[0] == "replaced before":
        replace_step()
    config = {**run.config(), "zero_allow_untested_optimizer": True}
    config.pop("optimizer", None)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]
    if replaced[0] == "replaced after":
        replace_step()
    if one_waits and ranks.rank() == 0:
        optimizer.register_step_post_hook(lambda *_: None)
    seen, flags, culprits = [], [], []
    skipped_unless, culprit_of = StateStore.skipped_unless, steps.Stepper.culprit_of
    # One gradient alone, so that its name is known only if those of the others are finite when it is looked for.
    engine.module.transformer.ln_f.bias.register_hook(lambda grad: grad * float("nan") if len(seen) in NOT_FINITE else grad)

    def counted(store: StateStore, finite: torch.Tensor | None) -> Any:
        flags.append(finite is not None)
        return skipped_unless(store, finite)

    def named(stepper: Any, shards: Any) -> str:
        culprits.append(culprit_of(stepper, shards))
        return culprits[-1]

    with (
        mock.patch.object(steps, "_READ_AT_ONCE", () if late else (ranks.device().type,)),
        mock.patch.object(StateStore, "skipped_unless", counted),
        mock.patch.object(steps.Stepper, "culprit_of", named),
    ):
        for step in range(6):
            loss = case.forward(engine, case.rows(step, 0, ranks.rank()))
            engine.backward(loss)
            if clip_inside:
                torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
            engine.step()
            scale = engine.loss_scale() if run.dtype == "fp16" else 1.0
            seen.append((float(engine.get_global_grad_norm()), engine.skipped_steps, engine.optimizer.overflow, scale))
    assert clip_inside or culprits == ["transformer.ln_f.bias"] * len(NOT_FINITE), culprits  # clipping by NaN spoils every gradient
    tensors = [unit.master.clone() for unit in engine.units]
    tensors += [state[name].clone() for state in engine.optimizer.inner.state.values() for name in ("step", "exp_avg", "exp_avg_sq")]
    engine.destroy()
    return seen, tensors, sum(flags)


def same_steps(dtype: str, clip_inside: bool) -> None:
    for stage in range(4):
        for clip in (0.0, 0.1):
            run = Run(stage, dtype=dtype, clip=clip)
            expected, found = (_train(run, late, clip_inside) for late in (False, True))
            label = f"stage {stage}, {dtype}, clip {clip}"
            assert found[2] == 4 and not expected[2], f"{label}: {found[2]} updates may be skipped by the device"
            assert str(found[0]) == str(expected[0]) and found[0][-1][1] == len(NOT_FINITE), f"{label}: {found[0]}, {expected[0]}"
            assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True)), label


def _one_rank_waits(extra: dict[str, Any]) -> None:
    for stage in (0, 3):
        run = Run(stage, dtype="bf16", clip=0.1, extra=extra if stage == 3 else {})
        expected, found = (_train(run, late, False, one_waits=True) for late in (False, True))
        assert not found[2], "the ranks have not decided alike"
        assert str(found[0]) == str(expected[0]) and found[0][-1][1] == len(NOT_FINITE)
        assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True)), stage
        expected, found = (_train(run, late, False) for late in (False, True))
        assert found[2] == 4, found[2]
        assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True)), stage


@pytest.mark.parametrize(("world", "extra"), [(2, {}), (4, {"zero_optimization": {"zero_hpz_partition_size": 2}})])
def test_a_hook_on_one_rank_lets_all_ranks_wait(world: int, extra: dict[str, Any]) -> None:
    """Ranks that keep copies of weights (hpZ) drop them together."""
    ranks.run_ranks(_one_rank_waits, world, extra)


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
            _train(Run(1, dtype="bf16"), late, False, replaced=(way, calls))
            if handle is not None:
                handle.remove()
        assert counted[0] == counted[1] and counted[0], f"{way}: {counted}"


def test_what_a_script_adds_to_steps_sees_steps_that_are_taken() -> None:
    ranks.run_ranks(_calls_of_a_script, 1)


@pytest.mark.parametrize(("dtype", "clip_inside"), [("bf16", False), ("fp16", False), ("bf16", True)])
def test_the_device_skips_what_the_host_would(dtype: str, clip_inside: bool) -> None:
    ranks.run_ranks(same_steps, 1, dtype, clip_inside)
