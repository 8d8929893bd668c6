"""Test several engines in a process: policy and reference, no optimizer, two on one module, one after another."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.errors import StateError
from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.parity import (
    SMALL_MODEL,
    Run,
    Trace,
    check,
    check_case,
    collect,
    initialize,
    mean_over_ranks,
    micro_step,
    reference,
    reference_case,
    train,
)
from tests.support.rows import slow_but, thinned

STAGES = (0, 1, 2, 3)
CASE = CASES["gpt2"]
SEQUENCE = CASES["bart"]


def _inference_engine(model: nn.Module, stage: int, dtype: str = "fp32") -> Any:
    """Return an engine as trl makes it: ``initialize(model=, config=)`` with neither optimizer nor parameters."""
    import hf_zero

    config = Run(stage=stage, dtype=dtype).config()
    del config["optimizer"]
    return hf_zero.initialize(model=model.to(ranks.device()), config=config)[0]


def _no_optimizer(stage: int, dtype: str) -> None:
    """Check that outputs equal the plain model's, and that there is no optimizer and no master."""
    model = CASE.build()
    plain = CASE.build().to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    engine = _inference_engine(model, stage, dtype)
    engine.eval()
    batch = CASE.rows(0, 0, ranks.rank())
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(engine(**batch).logits, plain(**batch).logits)
    assert all(unit.master is None or dtype == "fp32" for unit in engine.units)
    engine.destroy()


def _policy_and_reference(stage: int, reference_stage: int) -> None:
    """Train on a loss of both engines' outputs; the reference model must not change."""
    policy_model, reference_model, plain_reference = CASE.build(0), CASE.build(1), CASE.build(1)

    def distance(policy: nn.Module, teacher: nn.Module, batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=batch["input_ids"]).logits
        return (policy(input_ids=batch["input_ids"]).logits - wanted).pow(2).mean()

    run = Run(stage=stage, accumulation=2)
    teacher = _inference_engine(reference_model, reference_stage)
    teacher.eval()
    engine = initialize(policy_model, run)
    trace = train(engine, CASE.rows, lambda model, batch: distance(model, teacher, batch), run)
    engine.destroy()
    left = collect_weights(teacher)
    teacher.destroy()
    assert all(torch.equal(left[name], weight) for name, weight in plain_reference.state_dict().items() if name in left)
    if ranks.rank() == 0:
        expected = reference(
            CASE.build(0), CASE.rows, lambda model, batch: distance(model, plain_reference.eval(), batch), run, ranks.world()
        )
        check(trace, expected, run, "policy and reference")


def collect_weights(engine: Any) -> dict[str, Tensor]:
    import hf_zero

    named = list(engine.module.named_parameters())
    with hf_zero.zero.GatheredParameters([parameter for _, parameter in named]):
        return {name: parameter.detach().clone() for name, parameter in named}


def _two_trained_engines(stage: int) -> None:
    """Train different models with two engines in turns (actor and critic); neither disturbs the other's collectives."""
    run = Run(stage=stage)
    first, second = initialize(CASE.build(), run), initialize(SEQUENCE.build(), run)
    traces = [Trace(), Trace()]
    for step in range(run.steps):
        for engine, case, trace in ((first, CASE, traces[0]), (second, SEQUENCE, traces[1])):
            loss = micro_step(engine, case.rows(step, 0, ranks.rank()), case.forward, 0)
            trace.losses.append(mean_over_ranks([loss]))
            trace.norms.append(float(engine.get_global_grad_norm()))
            trace.skipped.append(False)
    for engine, name, trace in ((first, "gpt2", traces[0]), (second, "bart", traces[1])):
        collect(engine, trace)
        if ranks.rank() == 0:
            check(trace, partial(reference_case, name, run, ranks.world()), run, name)
    first.destroy()
    second.destroy()


def _two_on_one_module(stage: int, destroy_first: bool) -> None:
    """Make an engine without optimizer on the policy, as trl does, then Trainer's own; both stay in use."""
    run = Run(stage=stage)
    model = CASE.build()
    frozen_view = _inference_engine(model, stage)
    batch = CASE.rows(7, 7, ranks.rank())
    with torch.no_grad():
        before = CASE.forward(frozen_view, batch).item()
    if destroy_first:
        frozen_view.destroy()
    engine = initialize(model, run)
    trace = train(engine, CASE.rows, CASE.forward, run)
    with torch.no_grad():
        after = CASE.forward(engine, batch).item()
        assert after != before
        if not destroy_first:
            assert CASE.forward(frozen_view, batch).item() == after, "the first engine does not see the trained weights"
    engine.destroy()
    if ranks.rank() == 0:
        check(trace, partial(reference_case, "gpt2", run, ranks.world()), run, "second engine on one module")


def _train_after_inference(stage: int) -> None:
    """Evaluate with an engine without optimizer before training (Trainer), destroy it, and train the same module."""
    _two_on_one_module(stage, destroy_first=True)


def _destroy_leaves_a_usable_module(stage: int) -> None:
    """Check that after destroy the module is an ordinary one, with the trained weights, and can be prepared again."""
    run = Run(stage=stage)
    engine = initialize(CASE.build(), run)
    trace = train(engine, CASE.rows, CASE.forward, run)
    module = engine.module
    engine.destroy()
    engine.destroy()  # free_memory may come twice
    again = initialize(module, run)
    batch = CASE.rows(5, 5, ranks.rank())
    plain = CASE.build()
    plain.load_state_dict(trace.weights, strict=False)
    plain.tie_weights()
    with torch.no_grad():
        assert CASE.forward(again, batch).item() == pytest.approx(CASE.forward(plain, batch).item(), rel=1e-6)
    again.backward(CASE.forward(again, batch))
    again.step()
    again.destroy()


@thinned(stage=STAGES, dtype=["fp32", "bf16"])
def test_engine_without_optimizer(stage: int, dtype: str) -> None:
    ranks.run_ranks(_no_optimizer, 2, stage, dtype)


@pytest.mark.fast_rows("3-3")
@pytest.mark.parametrize(("stage", "reference_stage"), [(0, 0), (1, 0), (2, 0), (3, 3), (3, 0)])
def test_policy_and_reference_engine(stage: int, reference_stage: int) -> None:
    ranks.run_ranks(_policy_and_reference, 2, stage, reference_stage)


@pytest.mark.slow  # fast: `test_two_engines_that_share_an_encoder`
@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_two_trained_engines(stage: int) -> None:
    ranks.run_ranks(_two_trained_engines, 2, stage)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_two_engines_on_one_module(stage: int) -> None:
    ranks.run_ranks(_two_on_one_module, 2, stage, False)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_training_after_an_inference_engine(stage: int) -> None:
    ranks.run_ranks(_train_after_inference, 2, stage)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_destroy_leaves_a_usable_module(stage: int) -> None:
    ranks.run_ranks(_destroy_leaves_a_usable_module, 2, stage)


def _back_ends_by_device(run: Run) -> None:
    from hf_zero.comm.direct_exchange import GlooCollectives

    engine = initialize(CASES["mlp"].build(), run)
    assert isinstance(engine.collectives, GlooCollectives), "sums are taken in the order of ranks, whatever the group is called"
    engine.destroy()
    check_case("mlp", run)


@pytest.mark.fast_rows("cpu:gloo,cuda:gloo")
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:gloo", "undefined"])
def test_a_group_with_a_back_end_per_device(backend: str) -> None:
    ranks.run_ranks(_back_ends_by_device, 2, Run(stage=3, dtype="bf16"), env={"HF_ZERO_TEST_BACKEND": backend})


class _Shares(nn.Module):
    """An actor or a critic: a head of its own over an encoder that both share."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(8, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.encoder(x))).square().mean()
        return out


def _two_heads() -> tuple[_Shares, _Shares]:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    return _Shares(encoder, 2).to(ranks.device()), _Shares(encoder, 1).to(ranks.device())


def _sgd(model: nn.Module, whole: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters() if whole else model.head.parameters(), lr=0.1)  # type: ignore[union-attr]


# Who does what: a and c are forward and backward of actor and critic, A and C their steps, x and y their zero_grad().
_SEQUENCES = ("xaAycC", "aAxcCy", "acACxy", "caCAxy")


def _with_one_trainer(stage: int, actor_trains: bool, sequence: str) -> None:
    """Put the encoder into one of the two optimizers, which trains it with the gradients of both losses, as in plain PyTorch."""
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage, **SMALL_MODEL}}
    models, plain = _two_heads(), _two_heads()
    optimizers = [_sgd(model, whole) for model, whole in zip(models, (actor_trains, not actor_trains), strict=True)]
    steppers = [_sgd(model, whole) for model, whole in zip(plain, (actor_trains, not actor_trains), strict=True)]
    engines = [
        hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0] for model, optimizer in zip(models, optimizers, strict=True)
    ]
    x = torch.linspace(-1, 1, 8).reshape(2, 4).to(ranks.device())
    for _ in range(3):
        for action in sequence:
            index = "acACxy".index(action) % 2
            if action in "ac":
                engines[index].backward(engines[index](x))
                plain[index](x).backward()
            elif action in "AC":
                engines[index].step()
                steppers[index].step()
            else:
                engines[index].zero_grad()
                steppers[index].zero_grad()
    for model, expected in zip(models, plain, strict=True):
        with hf_zero.zero.GatheredParameters(list(model.parameters())):
            torch.testing.assert_close(list(model.parameters()), list(expected.parameters()), rtol=0, atol=2e-6)
    for engine in engines:
        engine.destroy()


def _shared_by_two_engines(stages: tuple[int, ...]) -> None:
    for stage in stages:
        for actor_trains in (True, False):
            for sequence in _SEQUENCES:
                _with_one_trainer(stage, actor_trains, sequence)
        # Both would train it: the engine that has lost it says so at its first backward; one that is used no more does not matter.
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, **SMALL_MODEL}}
        actor, critic = _two_heads()
        first = hf_zero.initialize(model=actor, optimizer=_sgd(actor, True), config=config)[0]
        second = hf_zero.initialize(model=critic, optimizer=_sgd(critic, True), config=config)[0]
        x = torch.ones(2, 4, device=ranks.device())
        second.backward(second(x))
        second.step()
        assert (second.global_steps, first.global_steps, first.micro_steps) == (1, 0, 0)
        loss = first(x)
        for use in (lambda: first.backward(loss), first.step, lambda: loss.backward()):  # noqa: B023
            with pytest.raises(StateError, match=r"parameters encoder\.0\.weight, encoder\.0\.bias, .*leave them out of the optimizer"):
                use()
        first.destroy()
        second.destroy()


@pytest.mark.parametrize("stages", [(0, 3), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_two_engines_that_share_an_encoder(stages: tuple[int, ...]) -> None:
    ranks.run_ranks(_shared_by_two_engines, 2, stages)
