"""Steps that the device skips while the host does not yet know that a gradient is not finite, and steps that the host skips."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tests.support import ranks
from tests.support.models import CASES
from tests.support.parity import Run

STEPS = (("bf16", False), ("fp16", False), ("bf16", True))  # type, and whether the script clips
NOT_FINITE = (0, 3)  # numbers of steps; until the first update there is no state, and the host waits


def train(
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
    updates_only_if, name_of_non_finite = StateStore.updates_only_if, steps.Stepper.name_of_non_finite
    # One gradient alone, so that its name is known only if those of the others are finite when it is looked for.
    engine.module.transformer.ln_f.bias.register_hook(lambda grad: grad * float("nan") if len(seen) in NOT_FINITE else grad)

    def counted(store: StateStore, finite: torch.Tensor | None) -> Any:
        flags.append(finite is not None)
        return updates_only_if(store, finite)

    def named(stepper: Any, shards: Any) -> str:
        culprits.append(name_of_non_finite(stepper, shards))
        return culprits[-1]

    with (
        mock.patch.object(steps, "_READ_AT_ONCE", () if late else (ranks.device().type,)),
        mock.patch.object(StateStore, "updates_only_if", counted),
        mock.patch.object(steps.Stepper, "name_of_non_finite", named),
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
            expected, found = (train(run, late, clip_inside) for late in (False, True))
            label = f"stage {stage}, {dtype}, clip {clip}"
            assert found[2] == 4 and not expected[2], f"{label}: {found[2]} updates may be skipped by the device"
            assert str(found[0]) == str(expected[0]) and found[0][-1][1] == len(NOT_FINITE), f"{label}: {found[0]}, {expected[0]}"
            assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True)), label
