"""Scripts that call ``loss.backward()`` themselves, or several backwards over one forward, as DeepSpeed from 0.18 on allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.parity import Forward, Run, check_bitwise, check_training, initialize, train
from tests.support.rows import slow_but

STAGES = (0, 1, 2, 3)
CASE = CASES["gpt2"]
# So small that nothing stays gathered between forward and backward.
TIGHT = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1}


def own_backward(engine: Any, batch: Batch, forward: Forward, _micro: int) -> float:
    """The loop of a script that knows ``loss.backward()`` only; ``scale`` does nothing without a loss scale."""
    loss = forward(engine, batch)
    engine.scale(loss).backward()
    engine.step()
    return loss.item()


def _own_backward(run: Run) -> None:
    check_training(CASE.build, CASE.rows, CASE.forward, run, micro_step=own_backward, label="loss.backward()")


TRAINED = [Run(stage, accumulation=2, clip=1.0) for stage in STAGES] + [Run(1, "fp16"), Run(3, "fp16")]


@pytest.mark.parametrize("run", slow_but(TRAINED, TRAINED[0], TRAINED[2], Run(3, "fp16")), ids=str)
def test_a_backward_of_the_user_trains(run: Run) -> None:
    ranks.run_ranks(_own_backward, 2, run)


class _Kept:
    """Forward of a loss that is made of what a hook on a module inside a block has kept, and of no output of the model."""

    def __init__(self, inside: str) -> None:
        self._inside = inside

    def __call__(self, model: Any, batch: Batch) -> Tensor:
        kept: list[Any] = []
        module = getattr(model, "module", model).get_submodule(self._inside)
        handle = module.register_forward_hook(lambda _module, _args, output: kept.append(output))
        CASE.forward(model, batch)
        handle.remove()
        value = kept[0] if isinstance(kept[0], Tensor) else kept[0][0]
        return value.float().pow(2).mean()


def _kept_inside(run: Run, inside: str) -> None:
    check_training(CASE.build, CASE.rows, _Kept(inside), run, micro_step=own_backward, label=inside)


@pytest.mark.fast_rows("transformer.h.1.attn.c_attn", "transformer.ln_f")
@pytest.mark.parametrize("inside", ["transformer.h.1.attn.c_attn", "transformer.h.0.mlp.c_fc", "transformer.h.1.mlp", "transformer.ln_f"])
def test_a_loss_of_what_a_hook_has_kept_trains(inside: str) -> None:
    ranks.run_ranks(_kept_inside, 2, Run(3, accumulation=2, extra={"zero_optimization": TIGHT}), inside)


def _forgotten_scale() -> None:
    engine = initialize(CASE.build(), Run(3, "fp16"))
    for _ in range(2):  # the refusal leaves the engine as it was
        loss = CASE.forward(engine, CASE.rows(0, 0, ranks.rank()))
        with pytest.raises(RuntimeError, match=r"engine.scale\(loss\).backward\(\)"):
            loss.backward()
    engine.scale(loss := CASE.forward(engine, CASE.rows(0, 0, ranks.rank()))).backward()
    engine.step()
    assert engine.global_steps == 1 and engine.was_step_applied(), loss


def test_a_backward_without_loss_scale_is_refused() -> None:
    ranks.run_ranks(_forgotten_scale, 2)


class _Breaks(nn.Module):
    """Passes values on; its backward raises while ``on``."""

    on = False

    def forward(self, value: Tensor) -> Tensor:
        value = value.clone()
        value.register_hook(self._raise)
        return value

    def _raise(self, grad: Tensor) -> None:
        if self.on:
            raise ValueError("broke off")


def _broken_backward(stage: int, by_script: bool) -> None:
    """Half the parameters have their gradient when the backward breaks off; what is left of the step may not be taken for whole."""

    def run(batch: Tensor, breaks: bool) -> None:
        breaker.on = breaks
        loss = engine(batch).square().mean()
        if by_script:
            loss.backward()
        else:
            engine.backward(loss)

    def weights() -> list[Tensor]:
        with engine_gathered(engine):
            return [param.detach().clone() for param in engine.module.parameters()]

    breaker, results = _Breaks(), []
    for broken in (False, True):
        torch.manual_seed(0)
        engine = initialize(nn.Sequential(nn.Linear(4, 8), breaker, nn.Linear(8, 4)), Run(stage, accumulation=2, clip=0.0))
        batches = [torch.randn(2, 4) for _ in range(3)]
        if broken:
            run(batches[2], False)
            engine.step()
            with pytest.raises(ValueError, match="broke off"):
                run(batches[0], True)
            with pytest.raises(RuntimeError, match="gradients of 1 earlier backward.*restart the accumulation window"):
                engine.step()
            with pytest.raises(RuntimeError, match="restart the accumulation window"):
                engine(batches[0])
            engine.zero_grad()
            with pytest.raises(ValueError, match="broke off"):  # the first of its step: nothing else is lost
                run(batches[0], True)
            with pytest.raises(RuntimeError, match="there are no gradients"):
                engine.step()
        for batch in batches[:2]:
            run(batch, False)
            engine.step()
        assert engine.global_steps == 1
        results.append(weights())
        engine.destroy()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def engine_gathered(engine: Any) -> Any:
    import hf_zero

    return hf_zero.zero.GatheredParameters(list(engine.module.parameters()))


def _broken_backwards(stage: int) -> None:
    for by_script in (False, True):
        _broken_backward(stage, by_script)


@pytest.mark.parametrize("stage", slow_but([0, 2, 3], 2, 3))
def test_a_backward_that_breaks_off_is_not_half_a_step(stage: int) -> None:
    ranks.run_ranks(_broken_backwards, 2, stage)


def _no_scalar() -> None:
    engine = initialize(CASE.build(), Run(1))
    with pytest.raises(AssertionError, match=r"the loss, a scalar tensor, not one of shape \(2,\)"):
        engine.scale(torch.ones(2, requires_grad=True))


def test_the_loss_scale_is_for_a_scalar() -> None:
    ranks.run_ranks(_no_scalar, 1)


def _checkpointed(run: Run, reentrant: bool) -> None:
    case = CASES["llama"]

    def build() -> nn.Module:
        model: Any = case.build()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    check_training(build, case.rows, case.forward, run, micro_step=own_backward, label="recomputation")


@pytest.mark.fast_rows("0-True", "3-False")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_recomputed_blocks_in_a_backward_of_the_user(stage: int, reentrant: bool) -> None:
    ranks.run_ranks(_checkpointed, 2, Run(stage, accumulation=2, steps=2), reentrant)


class Layers(nn.Module):
    """Two blocks and two losses over one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum(), x.square().sum()


def layers(seed: int) -> Layers:
    torch.manual_seed(seed)
    return Layers()


def points(step: int, rank: int) -> Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    import hf_zero

    found = {name: hf_zero.utils.safe_get_full_grad(param) for name, param in model.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def expected_gradients(model: nn.Module, which: int, world: int) -> dict[str, Tensor]:
    loss = torch.stack([model(points(0, rank))[which] for rank in range(world)]).mean()
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def _two_losses(stage: int, own: bool) -> None:
    engine = initialize(layers(0), Run(stage))
    losses = engine(points(0, ranks.rank()))
    for which in (0, 1):
        engine.zero_grad()
        if own:
            engine.scale(losses[which], retain_graph=which == 0).backward(retain_graph=which == 0)
        else:
            engine.backward(losses[which], retain_graph=which == 0)
        torch.testing.assert_close(gradients(engine.module), expected_gradients(layers(0), which, ranks.world()))
    engine.step()
    assert (engine.global_steps, engine.micro_steps) == (1, 1)


@pytest.mark.parametrize("own", [False, True], ids=["engine", "own"])
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_two_backwards_over_one_forward_and_zero_grad_between(stage: int, own: bool) -> None:
    ranks.run_ranks(_two_losses, 2, stage, own)


def _sum_of_two_backwards(stage: int) -> None:
    engine = initialize(layers(0), Run(stage))
    first, second = engine(points(0, ranks.rank()))
    engine.backward(first, retain_graph=True)
    engine.backward(second)
    wanted = [expected_gradients(layers(0), which, ranks.world()) for which in (0, 1)]
    torch.testing.assert_close(gradients(engine.module), {name: grad + wanted[1][name] for name, grad in wanted[0].items()})


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_two_backwards_over_one_forward_add_up(stage: int) -> None:
    ranks.run_ranks(_sum_of_two_backwards, 2, stage)


def _two_engines(run: Run, how: str) -> None:
    """Loss of two engines; both must learn the same from the sum as each alone from its part."""
    engines = [initialize(layers(seed), run) for seed in (1, 2)]
    alone = [initialize(layers(seed), run) for seed in (1, 2)]
    for step in range(2 * run.accumulation):
        x = points(step, ranks.rank()).to(torch.float16 if run.dtype == "fp16" else torch.float32)
        losses = [engine(x)[1] for engine in engines]
        if how == "own":
            sum(losses).backward()
        else:
            engines[0].backward(sum(losses))
        for engine in engines:
            engine._backward_epilogue()  # older scripts call it
            engine.step()
            engine.optimizer.zero_grad()
        for engine in alone:
            engine.backward(engine(x)[1])
            engine.step()
    for engine, single in zip(engines, alone, strict=True):
        assert engine.global_steps == 2
        check_bitwise(*(train(each, CASE.rows, CASE.forward, Run(steps=0)) for each in (engine, single)), label=how)


@pytest.mark.fast_rows("run0-own", "run2-engine")
@pytest.mark.parametrize(
    ("run", "how"), [(Run(2, accumulation=2), "own"), (Run(3), "own"), (Run(3, accumulation=2), "engine"), (Run(1, "fp16"), "engine")]
)
def test_one_backward_through_two_engines(run: Run, how: str) -> None:
    ranks.run_ranks(_two_engines, 2, run, how)
