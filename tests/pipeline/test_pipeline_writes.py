"""Values that a script writes to parameters of a pipeline: the stages that hold a parameter compare them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero
from hf_zero import observe
from hf_zero.errors import StateError
from tests.support import parity, ranks
from tests.support.logged import messages_of_log
from tests.support.models import CASES
from tests.support.parity import Run
from tests.support.ranks import RankError, run_ranks

TIED, PIPELINE = "transformer.wte.weight", {"pipeline": {"stages": 2}}


def initialize(**arguments: Any) -> Any:
    return parity.initialize(CASES["gpt2"].build(), Run(1, extra=PIPELINE), **arguments)


def backward(engine: Any) -> None:
    engine.backward(engine(**CASES["gpt2"].rows(0, 0, 0)).loss)


def tied_write(everywhere: bool) -> None:
    """Write the table, which both stages hold, on all ranks or on rank 0 alone."""
    engine = initialize()
    param = engine.module.get_parameter(TIED)
    with hf_zero.zero.GatheredParameters([param]), torch.no_grad():
        if everywhere or ranks.rank() == 0:
            param.mul_(0.5)
    backward(engine)
    engine.step()


def second_optimizer(by_rank: bool) -> None:
    """Update the tied table, which is in no group of the engine, by an optimizer of the script's own."""
    model = CASES["gpt2"].build()
    rest = [param for name, param in model.named_parameters() if name != TIED]
    engine = parity.initialize(model, Run(1, extra=PIPELINE), model_parameters=rest)
    param = engine.module.get_parameter(TIED)
    own = torch.optim.SGD([param], lr=0.1)
    backward(engine)
    param.grad = torch.full_like(param, 0.1 * (ranks.rank() if by_rank else 1))
    own.step()
    engine.step()


@pytest.mark.parametrize(("job", "same"), [(tied_write, True), (second_optimizer, False)])
def test_write_that_differs_between_stages_is_an_error_on_all_ranks(job: Any, same: bool) -> None:
    run_ranks(job, 2, same)
    with pytest.raises(RankError) as error:
        run_ranks(job, 2, not same)
    assert all(f"parameter {TIED} was written on rank(s)" in outcome.text for outcome in error.value.outcomes)


def tied_gradient() -> None:
    """Read the gradient of the table, to which both stages add: as plain PyTorch has it when the step's backwards are done, before that an
    error.
    """
    engine = parity.initialize(CASES["gpt2"].build(), Run(1, accumulation=2, extra=PIPELINE))
    param, plain = engine.module.get_parameter(TIED), CASES["gpt2"].build().to(ranks.device())
    for micro in range(2):
        batch = CASES["gpt2"].rows(0, micro, 0)
        (CASES["gpt2"].forward(plain, batch) / 2).backward()
        engine.backward(CASES["gpt2"].forward(engine, batch))
        if micro == 0:
            with pytest.raises(StateError, match="several stages of the pipeline hold this parameter"):
                hf_zero.utils.safe_get_full_grad(param)
        else:
            torch.testing.assert_close(hf_zero.utils.safe_get_full_grad(param), plain.get_parameter(TIED).grad, atol=1e-6, rtol=1e-5)
        engine.step()


def test_gradient_of_a_tied_weight_is_that_of_all_stages() -> None:
    run_ranks(tied_gradient, 2)


def hooked_gradient() -> list[str]:
    """Return the warnings of a training with a hook on a parameter's gradient."""
    engine = initialize()
    observe._warned.clear()
    engine.module.get_parameter("transformer.h.0.mlp.c_fc.weight").register_hook(lambda grad: grad / grad.norm())
    with messages_of_log() as lines:
        for _ in range(2):
            backward(engine)
            engine.step()
    return [line for line in lines if "runs for each of the 2 micro-batches" in line]


def test_hooks_on_gradients_get_a_warning() -> None:
    (line,) = run_ranks(hooked_gradient, 2)[0]
    assert "h.0.mlp.c_fc.weight: its hook" in line


def refused_write(folder: str) -> None:
    """Save after a write that only the first stage refuses: two of its parameters were given the same memory."""
    engine = initialize()
    block = engine.module.transformer.h[0]
    if block.ln_1.weight.numel():
        block.ln_1.weight.data = block.ln_2.weight.data
    engine.save_checkpoint(folder)


def test_write_that_one_stage_refuses_is_an_error_on_all_ranks_at_a_save(tmp_path: Path) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(refused_write, 2, str(tmp_path))
    assert all("was given the memory of transformer.h.0.ln_2.weight" in outcome.text for outcome in error.value.outcomes)


def loads_whole() -> int:
    """Load the values of all stages on every rank; return the number of warnings that all ranks must do so."""
    engine = initialize()
    observe._warned.clear()
    values = {name: torch.zeros_like(param) for name, param in CASES["gpt2"].build().named_parameters()}
    with messages_of_log() as lines:
        engine.module.load_state_dict(values, strict=False)
    assert not any(param.any() for param in engine.module.parameters())
    return sum("every rank must call it" in line for line in lines)


def test_a_whole_state_dict_loads_with_a_warning() -> None:
    assert run_ranks(loads_whole, 2) == [1, 0]
