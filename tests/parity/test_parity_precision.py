"""Test precision settings beyond the matrix: torch_autocast, the dtypes of messages and of accumulation, scaling before the sum."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.parity import (
    DRIFT,
    Run,
    Trace,
    check,
    check_bitwise,
    difference,
    initialize,
    micro_step,
    reference,
    reference_case,
    train,
)
from tests.support.rows import slow_but, thinned

STAGES = (0, 1, 2, 3)
CASE = CASES["gpt2"]


def _train(run: Run) -> Trace:
    engine = initialize(CASE.build(), run)
    trace = train(engine, CASE.rows, CASE.forward, run)
    engine.destroy()
    return trace


def _autocast(stage: int, dtype: str) -> None:
    """Check fp32 parameters with 16-bit arithmetic inside forward, as with ``torch.autocast`` around the plain model."""
    extra: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": dtype}}
    run = Run(stage=stage, accumulation=2, clip=0.1, extra=extra)
    trace = _train(run)
    assert {weight.dtype for weight in trace.weights.values()} == {torch.float32}

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast(ranks.device().type, dtype=getattr(torch, dtype)):
            return CASE.forward(model, batch)

    if ranks.rank() == 0:
        expected = reference(CASE.build(), CASE.rows, forward, run, ranks.world())
        check(trace, expected, run, f"autocast {dtype}", limit=DRIFT)
        plain = reference_case("gpt2", run, ranks.world())
        assert abs(plain.norms[0] - trace.norms[0]) > 1e-6, "autocast changed nothing"


def _outer_autocast_is_ignored(stage: int) -> None:
    """Check that an autocast region of the caller is switched off inside the engine, as by DeepSpeed, unless ``torch_autocast`` is set."""
    engine = initialize(CASE.build(), Run(stage=stage))
    batch = CASE.rows(0, 0, ranks.rank())
    alone = CASE.forward(engine, batch).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert CASE.forward(engine, batch).item() == alone
    engine.destroy()


def _wire(stage: int, dtype: str) -> None:
    """Check that fp32 messages give the same sums, and that 16-bit messages lose only what 16 bit cannot represent."""
    run = Run(stage=stage, dtype=dtype)
    exact = _train(Run(**{**vars(run), "extra": {"communication_data_type": "fp32"}}))
    coarse = _train(Run(**{**vars(run), "extra": {"communication_data_type": "bf16"}}))
    if ranks.rank() == 0:
        expected = reference_case("gpt2", run, ranks.world())
        check(exact, partial(reference_case, "gpt2", run, ranks.world()), run, "communication_data_type fp32")
        found = difference(coarse, expected)
        assert found.norm < 0.02 and found.masters < 0.05, found
        if dtype == "fp32":
            assert found.norm > 1e-6, "bf16 on the wire changed nothing"


def _accumulation_dtype(stage: int) -> None:
    """Check that bf16 runs accumulate in fp32 by default; ``grad_accum_dtype: fp32`` sets this explicitly."""
    run = Run(stage=stage, dtype="bf16", accumulation=4)
    explicit = _train(Run(**{**vars(run), "extra": {"data_types": {"grad_accum_dtype": "fp32"}}}))
    check_bitwise(explicit, _train(run), "grad_accum_dtype fp32")
    if ranks.rank() == 0:
        check(explicit, partial(reference_case, "gpt2", run, ranks.world()), run, "grad_accum_dtype fp32")


def _prescale(stage: int, dtype: str) -> None:
    """Check that dividing before the sum, completely or in part, gives the same mean."""
    for extra in ({"prescale_gradients": True}, {"prescale_gradients": True, "gradient_predivide_factor": 2.0}):
        run = Run(stage=stage, dtype=dtype, accumulation=2, clip=0.1, extra=extra)
        trace = _train(run)
        if ranks.rank() == 0:
            check(trace, partial(reference_case, "gpt2", run, ranks.world()), run, str(extra))


def _clipping_defaults_to_one(stage: int) -> None:
    """Check that a configuration without clipping clips at 1.0, and that 0 switches it off."""
    case = CASES["t5"]
    for extra, clip in (({"gradient_clipping": None}, 1.0), ({"gradient_clipping": 0}, 0.0)):
        engine = initialize(case.build(), Run(stage=stage, extra=extra))
        trace = train(engine, case.rows, case.forward, Run(stage=stage))
        engine.destroy()
        if ranks.rank() == 0:
            run = Run(stage=stage, clip=clip)
            expected = reference_case("t5", run, ranks.world())
            assert expected.norms[0] > 1.2
            check(trace, expected, run, f"clipping {extra}")


def _moved_and_switched(stage: int) -> None:
    """Check that ``to``, ``cpu``, ``train`` and ``eval`` between steps, on the engine and on the module, change nothing."""

    def calls(engine: Any, batch: Batch, forward: Any, micro: int) -> float:
        engine.to("cpu")
        engine.module.cpu()
        engine.module.eval()
        engine.module.train()
        return micro_step(engine, batch, forward, micro)

    run = Run(stage=stage, accumulation=2, clip=0.1)
    engine = initialize(CASE.build(), run)
    trace = train(engine, CASE.rows, CASE.forward, run, calls)
    engine.destroy()
    check_bitwise(trace, _train(run), "moved and switched")


def _parameters_read_right_after_a_step(stage: int) -> None:
    """Read the module right after a step, when all-gathers may still be running: the new weights must be visible."""
    import hf_zero

    run = Run(stage=stage, dtype="bf16", extra={"zero_optimization": {"overlap_comm": True}})
    for way in ("parameters", "state_dict", "submodule", "gathered") if stage < 3 else ("submodule", "gathered"):
        engine = initialize(CASE.build(), run)
        block = engine.module.transformer.h[1]
        hidden = torch.randn(1, 4, 16, dtype=torch.bfloat16)
        for step in range(2):
            engine.backward(CASE.forward(engine, CASE.rows(step, 0, ranks.rank())))
            engine.step()
        if way == "parameters":
            seen = [parameter.detach().clone() for parameter in engine.parameters()]
        elif way == "state_dict":
            seen = [engine.module.state_dict()[name].clone() for name, _ in engine.module.named_parameters()]
        elif way == "submodule":
            with torch.no_grad():
                seen = [block(hidden)[0].clone()]
        else:
            with hf_zero.zero.GatheredParameters(engine.parameters()):
                seen = [parameter.detach().clone() for parameter in engine.parameters()]
        if way == "submodule":
            with torch.no_grad():
                expected = [block(hidden)[0]]
        else:
            masters = [hf_zero.utils.safe_get_full_fp32_param(parameter) for parameter in engine.parameters()]
            expected = [master.to(torch.bfloat16) for master in masters]
        if stage < 3 or way in ("gathered", "submodule"):
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(seen, expected, strict=True)), way
        engine.destroy()


@pytest.mark.fast_rows("3-bfloat16")
@thinned(stage=STAGES, dtype=["bfloat16", "float16"])
def test_torch_autocast(stage: int, dtype: str) -> None:
    ranks.run_ranks(_autocast, 2, stage, dtype)


@pytest.mark.parametrize("stage", [0, 3])
def test_autocast_around_the_engine_is_ignored(stage: int) -> None:
    ranks.run_ranks(_outer_autocast_is_ignored, 2, stage)


@pytest.mark.fast_rows("3-bf16")
@thinned(stage=STAGES, dtype=["fp32", "bf16"])
def test_communication_data_type(stage: int, dtype: str) -> None:
    ranks.run_ranks(_wire, 3, stage, dtype)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_gradients_accumulate_in_fp32(stage: int) -> None:
    ranks.run_ranks(_accumulation_dtype, 2, stage)


@pytest.mark.fast_rows("3-fp32")
@thinned(stage=STAGES, dtype=["fp32", "bf16"])
def test_prescaled_gradients(stage: int, dtype: str) -> None:
    ranks.run_ranks(_prescale, 2, stage, dtype)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_parameters_read_right_after_a_step(stage: int) -> None:
    ranks.run_ranks(_parameters_read_right_after_a_step, 3, stage)


@pytest.mark.fast_rows("0")
@pytest.mark.parametrize("stage", [0, 3])
def test_clipping_defaults_to_one(stage: int) -> None:
    ranks.run_ranks(_clipping_defaults_to_one, 2, stage)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_moving_and_switching_between_steps(stage: int) -> None:
    ranks.run_ranks(_moved_and_switched, 2, stage)
