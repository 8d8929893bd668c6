"""torch's schedules over the stages of a model: each trains like plain PyTorch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.pipeline import schedules
from hf_zero.pipeline.train import InPlaceCollector, backward_of
from tests.pipeline.pipelines import check, check_schedule, train_by_schedule, with_stages
from tests.support import parity, ranks
from tests.support.models import CASES, Batch, ModelCase
from tests.support.parity import Run
from tests.support.tp_training import zoo_case

FOUR = {"num_hidden_layers": 4, "tie_word_embeddings": True}


def check_single(zero: int) -> None:
    case = zoo_case("LlamaForCausalLM", FOUR)
    for name in ("1F1B", "GPipe"):
        check_schedule(case, Run(zero, accumulation=4, clip=0.1), 2, name)
    check_schedule(CASES["llama"], Run(zero, "fp16", accumulation=2, clip=0.1), 2, "1F1B")
    check_in_place(case, Run(zero, accumulation=4))
    if zero == 0:
        check_kept_memory(case)


def check_in_place(case: ModelCase, run: Run) -> None:
    """What autograd adds to the flat buffer by itself is what hooks would add, bit for bit; nothing of it stays in ``param.grad``."""
    begin, begun = InPlaceCollector._begin_in_place, []

    def counting(places: InPlaceCollector, found: Mapping[int, Tensor]) -> None:
        begun.extend(found)
        begin(places, found)

    with patch.object(InPlaceCollector, "_begin_in_place", counting):
        losses, norms, weights, engine = train_by_schedule(case, run, 2)
    held = [param for entry in engine.stepper.reducer.gradients for param in entry.unit.params]
    assert len(begun) >= run.steps * len(held) and all(param.grad is None for param in held)
    engine.destroy()
    with patch.object(InPlaceCollector, "_begin_in_place", lambda places, found: None):
        *others, engine = train_by_schedule(case, run, 2)
    engine.destroy()
    assert others[:2] == [losses, norms]
    if weights is not None:
        assert all(torch.equal(weights[name], value) for name, value in others[2].items())


def check_kept_memory(case: ModelCase) -> None:
    """The next step's gradients take up the memory of this one's, but not that of a gradient which the script still has."""
    engine = parity.initialize(case.build(), with_stages(Run(0, accumulation=2), 2))
    entry = engine.stepper.reducer.gradients[-1]
    param = entry.unit.params[0]

    def gradient(step: int) -> Tensor:
        backward_of(engine, [case.rows(step, micro, 0) for micro in range(2)])
        return param.grad

    places = [gradient(0).data_ptr()]
    engine.step()
    held = gradient(1)
    places.append(held.data_ptr())
    value = held.clone()
    engine.step()
    places.append(gradient(2).data_ptr())
    assert torch.equal(held, value) and not torch.equal(held, param.grad)
    assert places[0] == places[1] != places[2]
    engine.destroy()


def check_data() -> None:
    """Data that ends on one rank ends the batch on all; stages must be given the same samples, micro-batches the same arguments."""
    case = zoo_case("LlamaForCausalLM", FOUR)
    engine = parity.initialize(case.build(), with_stages(Run(1, accumulation=2), 2))
    own = ranks.rank() % 2

    def batches(count: int, replica: int = own) -> list[Batch]:
        return [case.rows(0, micro, replica) for micro in range(count)]

    with pytest.raises(StateError, match="were given different input_ids"):
        engine.train_batch(iter(batches(2, ranks.rank())))
    with pytest.raises(StopIteration, match="rank 1 has no data for this batch|^$"):
        engine.train_batch(iter(batches(1 if ranks.rank() == 1 else 2)))
    with pytest.raises(ConfigError if ranks.rank() == 2 else StateError, match="data_iter is a list"):
        engine.train_batch(batches(2) if ranks.rank() == 2 else iter(batches(2)))
    first, second = batches(2)
    with pytest.raises(UnsupportedError, match="micro-batches of one train_batch differ"):
        engine.train_batch(iter([first, {**second, "position_ids": torch.arange(second["input_ids"].shape[1])[None]}]))
    assert torch.isfinite(engine.train_batch(iter(batches(2)))) and engine.global_steps == 1
    engine.destroy()
    loss = []
    for stages in (1, 2):  # the same call without a pipeline
        engine = parity.initialize(case.build(), with_stages(Run(1, accumulation=4 // stages), stages))
        rows = [case.rows(0, micro, 0) for micro in range(4 // stages)]
        loss.append(float(engine.train_batch(iter(rows))) if stages == 2 else float(engine.train_batch(iter(rows[:2] * 2))))
        engine.destroy()
    assert loss[0] == pytest.approx(loss[1], rel=1e-6)


def test_data_of_a_batch() -> None:
    ranks.run_ranks(check_data, 4, ordered=False)  # errors end batches in the middle


def check_several(zero: int, names: tuple[str, ...]) -> None:
    case = zoo_case("LlamaForCausalLM", FOUR)
    for name in names:
        if name not in schedules.FOLDED or schedules.passes_on_its_rank(name):
            check_schedule(case, Run(zero, accumulation=4, clip=0.1), 2, name, each=2)
    if not schedules.passes_on_its_rank("DualPipeV"):  # torch 2.8
        return
    with pytest.raises(ConfigError, match="DualPipeV of 2 part.* gradient_accumulation_steps"):
        check_schedule(case, Run(zero, accumulation=2), 2, "DualPipeV", each=2)
    check(case, Run(zero, clip=0.1), 2, schedule="ZBVZeroBubble", stages_per_rank=2)


@pytest.mark.slow  # fast: `test_two_stages_a_rank`, test_pipeline_training.py
def test_one_stage_a_rank() -> None:
    ranks.run_ranks(check_single, 2, 1)


@pytest.mark.parametrize(
    "names",
    [("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"), pytest.param(("LoopedBFS", "InterleavedZeroBubble"), marks=pytest.mark.slow)],
)
def test_two_stages_a_rank(names: tuple[str, ...]) -> None:
    ranks.run_ranks(check_several, 2, 1, names)


@pytest.mark.parametrize("name", schedules.FOLDED)
def test_torch_whose_ranks_send_to_themselves_is_named(name: str) -> None:
    with patch.object(schedules, "get_schedule_class", return_value=schedules.PipelineScheduleMulti):  # as in torch 2.8
        with pytest.raises(ConfigError, match=f"schedule {name} .* the schedules of torch {re.escape(torch.__version__)} cannot: install"):
            schedules.check_schedule(name, 2)
    with patch.object(schedules, "get_schedule_class", side_effect=ValueError), pytest.raises(ConfigError, match="install a newer torch"):
        schedules.check_schedule(name, 2)
