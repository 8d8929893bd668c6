"""Test 1-bit Adam against its single-process reference: the same bits over 200 steps, across the freeze, at 1 to 4 ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero.deepspeed
from hf_zero.errors import ConfigError, UnsupportedError
from tests.parity import onebit_reference as reference
from tests.support import ranks
from tests.support.logged import messages_of_log
from tests.support.models import CASES, Batch, TwoBlocks, cast_floats, class_loss
from tests.support.parity import DTYPES, Run, full_masters, initialize, mean_over_ranks, train

FREEZE = 60
STEPS = 200


def one_bit(stage: int, steps: int = STEPS, freeze: Any = FREEZE, **extra: Any) -> Run:
    params = {"lr": 1e-2, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.05, "freeze_step": freeze, **extra.pop("params", {})}
    return Run(stage=stage, steps=steps, extra={"optimizer": {"type": "OneBitAdam", "params": params}, **extra})


def train_case(name: str, run: Run) -> Any:
    """Train, and return on rank 0 the trace and the layout of the parameters."""
    case = CASES[name]

    def feed(step: int, micro: int, rank: int) -> Batch:
        return case.rows(step % 8, micro, rank)

    engine = initialize(case.build(), run)
    trace = train(engine, feed, case.forward, run)
    places = [[(slot.name, slot.offset, slot.numel) for slot in unit.layout.slots] for unit in engine.units if unit.trainable]
    engine.destroy()
    return (trace, places) if ranks.rank() == 0 else None


def expected(name: str, run: Run, world: int, places: reference.Places) -> reference.Outcome:
    case = CASES[name]
    freeze = run.extra["optimizer"]["params"]["freeze_step"]
    settings = reference.Settings(world, run.steps, freeze, max_norm=run.clip, accumulation=run.accumulation)
    return reference.run(
        case.build(), lambda model, step, micro, rank: case.forward(model, case.rows(step % 8, micro, rank)), settings, places
    )


@pytest.mark.fast_rows("1-3")
@pytest.mark.parametrize(
    ("stage", "world"),
    [(0, 2), (1, 3)],
)
def test_equals_the_reference_bit_for_bit(stage: int, world: int) -> None:
    _equals_the_reference(world, one_bit(stage, steps=24, freeze=10))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1])
def test_equals_the_reference_over_200_steps(stage: int, world: int) -> None:
    _equals_the_reference(world, one_bit(stage))


def _equals_the_reference(world: int, run: Run) -> None:
    trace, places = ranks.run_ranks(train_case, world, "odd_mlp", run)[0]
    wanted = expected("odd_mlp", run, world, places)
    assert trace.losses == wanted.losses
    assert trace.norms == pytest.approx(wanted.norms, rel=1e-5)
    different = [name for name, weight in trace.weights.items() if not torch.equal(weight, wanted.weights[name])]
    assert not different
    assert sum(trace.losses[-8:]) < sum(trace.losses[:8])  # batches come again after 8 steps


@pytest.mark.slow  # fast: `test_equals_the_reference_bit_for_bit`
def test_accumulation_sums_locally_and_communicates_at_the_boundary() -> None:
    run = replace(one_bit(0, steps=16, freeze=7), accumulation=2)
    trace, places = ranks.run_ranks(train_case, 2, "odd_mlp", run)[0]
    wanted = expected("odd_mlp", run, 2, places)
    assert trace.losses == pytest.approx(wanted.losses, rel=1e-5)
    for name, weight in trace.weights.items():
        torch.testing.assert_close(weight, wanted.weights[name], rtol=1e-3, atol=1e-4)


def test_clipping_scales_by_the_root_mean_square_of_local_norms() -> None:
    """Check that ``max_grad_norm`` is ``gradient_clipping``, and that the reported norm is the one that is clipped."""
    run = replace(one_bit(1, steps=12, freeze=5, params={"max_grad_norm": 0.5}), clip=0.5)
    run.extra["gradient_clipping"] = 0.0
    trace, places = ranks.run_ranks(train_case, 2, "odd_mlp", run)[0]
    wanted = expected("odd_mlp", run, 2, places)
    assert min(trace.norms) > 0.5  # every step was clipped
    assert trace.norms == pytest.approx(wanted.norms, rel=1e-4)
    assert trace.losses == pytest.approx(wanted.losses, rel=1e-4)


def _low_precision(stage: int, dtype: str) -> list[float]:
    """Check that weights are the cast masters, and alike on all ranks; return the losses."""
    engine = initialize(CASES["mlp"].build(), replace(one_bit(stage, freeze=10, params={"lr": 3e-3}), dtype=dtype))
    losses = []
    for step in range(40):
        batch = cast_floats(CASES["mlp"].rows(step % 4, 0, ranks.rank()), DTYPES[dtype])
        loss = class_loss(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks([loss.item()]))
    assert engine.optimizer.compresses
    masters = full_masters(engine)
    for name, param in engine.module.named_parameters():
        assert torch.equal(param.detach(), masters[name].to(param.dtype)), name
    sums = [float(param.detach().double().sum()) for param in engine.module.parameters()]
    assert engine.collectives.gather_objects(sums, "test") == [sums] * ranks.world()
    return losses


@pytest.mark.fast_rows("1-fp16")
@pytest.mark.parametrize(("stage", "dtype"), [(0, "bf16"), (1, "fp16")])
def test_16_bit_training(stage: int, dtype: str) -> None:
    losses = ranks.run_ranks(_low_precision, 2, stage, dtype)[0]
    assert sum(losses[-8:]) < 0.9 * sum(losses[8:16]) < 0.9 * sum(losses[:8])


def _overflow(stage: int) -> None:
    """Produce an infinity on one rank: nothing changes on any rank, including errors and momentum; the next step updates."""
    engine = initialize(CASES["mlp"].build(), replace(one_bit(stage, freeze=2), dtype="fp16"))
    optimizer = engine.optimizer

    def state() -> list[torch.Tensor]:
        states = [optimizer.inner.state[segment.tensor]["exp_avg"] for segment in optimizer.segments]
        errors = [vector for vectors in optimizer.rank_states().values() for vector in vectors.values()]
        return [tensor.clone() for tensor in (*(unit.master for unit in engine.units), *states, *errors)]

    for step in range(6):
        batch = CASES["mlp"].rows(step, 0, ranks.rank())
        inputs = batch["inputs"].half()
        if step == 4 and ranks.rank() == 1:
            inputs[0, 0] = math.inf
        before = state() if step > 3 else []
        engine.backward(class_loss(engine, {**batch, "inputs": inputs}))
        engine.step()
        assert engine.optimizer.overflow == (step == 4)
        if step > 3:
            same = [torch.equal(one, other) for one, other in zip(before, state(), strict=True)]
            assert all(same) if step == 4 else not any(same)
    assert engine.skipped_steps == 1
    assert optimizer.one_bit.steps_taken() == 5


@pytest.mark.parametrize("stage", [0, 1])
def test_overflow_leaves_the_errors_untouched(stage: int) -> None:
    ranks.run_ranks(_overflow, 2, stage)


class LateBranch(nn.Module):
    """A model with a branch that is used only after the warm-up, on one rank only, and a layer with an input that is always zero."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 24)
        self.late = nn.Linear(24, 24)
        self.head = nn.Linear(24, 2)

    def forward(self, inputs: torch.Tensor, late: bool) -> torch.Tensor:
        hidden = torch.tanh(self.body(inputs))
        return self.head(hidden + self.late(hidden) if late else hidden).square().mean()


def _late_branch(stage: int) -> None:
    torch.manual_seed(0)
    engine = initialize(LateBranch(), one_bit(stage, freeze=5, params={"weight_decay": 0.0}))
    initial = engine.module.late.weight.detach().clone()
    for step in range(12):
        generator = torch.Generator().manual_seed(step + 100 * ranks.rank())
        inputs = torch.randn(4, 8, generator=generator)
        inputs[:, 0] = 0.0  # the first column of body.weight never has a gradient
        engine.backward(engine(inputs, step > 7 and ranks.rank() == 0))
        engine.step()
    assert torch.equal(engine.module.late.weight, initial)
    column = engine.module.body.weight[:, 0].detach()
    torch.manual_seed(0)
    assert torch.equal(column, LateBranch().body.weight[:, 0])
    assert not torch.equal(engine.module.body.weight[:, 1], LateBranch().body.weight[:, 1])
    for param in engine.module.parameters():
        assert torch.isfinite(param).all()
    for unit in engine.units:  # gaps and padding
        outside = torch.ones(unit.layout.padded_numel, dtype=torch.bool)
        for slot in unit.layout.slots:
            outside[slot.range.start : slot.range.stop] = False
        assert not unit.full[outside].any()


@pytest.mark.parametrize("stage", [0, 1])
def test_what_had_no_gradient_in_the_warm_up_stays(stage: int) -> None:
    ranks.run_ranks(_late_branch, 3, stage)


def _bytes_per_step(stage: int) -> tuple[float, float]:
    """Return the bytes this rank sends in a step, per parameter: in the warm-up, and in the compressed phase."""
    torch.manual_seed(0)
    engine = initialize(nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), one_bit(stage, freeze=2))
    sent = []
    for _ in range(4):
        before = engine.collectives.sent_bytes
        engine.backward(engine(torch.randn(2, 512)).square().mean())
        engine.step()
        sent.append((engine.collectives.sent_bytes - before) / sum(param.numel() for param in engine.module.parameters()))
    return sent[1], sent[3]


def test_bytes_on_the_wire() -> None:
    """Check two ranks: each sends half of 4 bytes twice in the warm-up, and half of an eighth of a byte twice afterwards."""
    warm_up, compressed = ranks.run_ranks(_bytes_per_step, 2, 0)[0]
    assert 4.0 <= warm_up < 4.1
    assert 0.125 < compressed < 4.0 / 30
    assert ranks.run_ranks(_bytes_per_step, 2, 1)[0][1] == pytest.approx(compressed + 2.0, rel=0.01)  # the weights are spread in fp32


def _auto() -> tuple[int | None, list[str]]:
    """Train with the same gradient in every step, so that the variance converges."""
    engine = initialize(nn.Linear(24, 8), one_bit(1, freeze="auto", params={"betas": [0.9, 0.9]}))
    inputs = torch.randn(4, 24, generator=torch.Generator().manual_seed(ranks.rank()))
    with messages_of_log() as messages:
        for _ in range(60):
            engine.backward(engine(inputs).sum())
            engine.step()
    return engine.optimizer.one_bit.frozen_at, [message for message in messages if "variance is stable" in message]


def test_auto_ends_the_warm_up_alike_on_all_ranks() -> None:
    """Check the end of the warm-up: the variance's norm after step n is 1 - 0.9 ** n of its limit, and grows by less than 4 % in ten
    steps.
    """
    outcomes = ranks.run_ranks(_auto, 3)
    expected = next(step for step in range(11, 60) if (1 - 0.9 ** (step - 10)) / (1 - 0.9**step) >= 0.96)
    assert [step for step, _ in outcomes] == [expected] * 3
    logged = [message for _, messages in outcomes for message in messages]
    assert len(logged) == 1 and f"after step {expected} " in logged[0]


def _gradients(stage: int) -> None:
    """Check that ``safe_get_full_grad`` returns the average of the ranks' gradients, and that ``safe_set_full_grad`` sets it on all
    ranks.
    """
    import hf_zero

    engine = initialize(CASES["mlp"].build(), one_bit(stage, freeze=1))
    weight = engine.module.blocks[0].up.weight
    for step in range(3):
        engine.backward(class_loss(engine, CASES["mlp"].rows(step, 0, ranks.rank())))
        mean = hf_zero.utils.safe_get_full_grad(weight)
        assert mean.shape == weight.shape
        everywhere = engine.collectives.gather_objects(mean.tolist(), "test")
        assert everywhere[0] == everywhere[1]
        if step == 2:
            hf_zero.utils.safe_set_full_grad(weight, torch.zeros_like(weight))
            assert not hf_zero.utils.safe_get_full_grad(weight).any()
        engine.step()


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_can_be_read_and_set(stage: int) -> None:
    ranks.run_ranks(_gradients, 2, stage)


def _refused_stage(stage: int) -> None:
    import hf_zero
    from hf_zero.optim import OneBitAdam

    with pytest.raises(UnsupportedError, match="whole gradient.*stage.*use stage 0 or 1"):
        initialize(CASES["mlp"].build(), one_bit(stage))
    model = CASES["mlp"].build()
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}}
    with pytest.raises(UnsupportedError, match="the traffic that 1-bit Adam avoids"):
        hf_zero.initialize(model=model, optimizer=OneBitAdam(model.parameters()), config=config)


@pytest.mark.parametrize("stage", [2, 3])
def test_stages_that_shard_gradients_are_refused(stage: int) -> None:
    ranks.run_ranks(_refused_stage, 1, stage)


def _two_limits() -> None:
    run = one_bit(0, params={"max_grad_norm": 0.5})
    run.extra["gradient_clipping"] = 1.0
    with pytest.raises(ConfigError, match="gradient_clipping is 1 and optimizer.params.max_grad_norm is 0.5"):
        initialize(CASES["mlp"].build(), run)


def test_two_limits_that_differ_are_refused() -> None:
    ranks.run_ranks(_two_limits, 1)


def _deepspeed_class() -> None:
    hf_zero.deepspeed.install_as_deepspeed()
    from deepspeed.runtime.fp16.onebit.adam import OnebitAdam

    model = CASES["mlp"].build()
    optimizer = OnebitAdam(model.parameters(), None, 1e-2, 2, True, (0.9, 0.99))
    engine = initialize(model, one_bit(0), optimizer=optimizer)
    for step in range(4):
        engine.backward(class_loss(engine, CASES["mlp"].rows(step, 0, 0)))
        engine.step()
    assert engine.optimizer.one_bit is optimizer and optimizer.adam_freeze_key
    engine.destroy()


def test_the_deepspeed_class() -> None:
    ranks.run_ranks(_deepspeed_class, 1)


def _labels() -> list[str]:
    """Return the labels of one update in the compressed phase."""
    from hf_zero.observe import record_labels

    engine = initialize(TwoBlocks(), one_bit(0, freeze=1))
    for _ in range(3):
        engine.backward(engine(torch.randn(2, 8)))
        with record_labels() as labels:
            engine.step()
    return list(labels)


def test_messages_travel_while_the_next_unit_is_packed() -> None:
    labels = ranks.run_ranks(_labels, 2)[0]
    short = [label.removeprefix("hf_zero::").replace(": momentum", "") for label in labels]
    own = [label for label in short if label.split(" ")[0] in ("pack", "exchange", "average", "all_gather", "move")]
    root, first, second = "(root)", "(layers.0)", "(layers.1)"
    assert own == [
        *(f"pack {root}", f"exchange {root}"),
        *(f"pack {first}", f"exchange {first}", f"average {root}", f"all_gather {root}"),
        *(f"pack {second}", f"exchange {second}", f"average {first}", f"all_gather {first}", f"move {root}"),
        *(f"average {second}", f"all_gather {second}", f"move {first}", f"move {second}"),
    ]
