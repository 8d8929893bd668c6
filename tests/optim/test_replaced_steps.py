"""Test functions of a script around the steps of its torch optimizer: a replaced ``step``, hooks on all optimizers, counters."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import hf_zero
from hf_zero.errors import StateError
from hf_zero.utils import safe_get_full_fp32_param
from tests.support import ranks

# Stage, 16-bit type, and where the states are.
SOME = ((1, None, ""), (3, "bf16", "cpu"))
ALL = (*SOME, (0, "bf16", ""), (1, "bf16", ""), (3, "bf16", ""), (1, "bf16", "cpu"))
# Replaced before or after ``initialize``, or on the class; or hooks on all optimizers. The step that the script calls.
WAYS = {
    ("before", "engine"): SOME,
    ("before", "own"): SOME,
    ("after", "engine"): ALL,
    ("after", "own"): SOME,
    ("after", "optimizer"): SOME,
    ("class", "engine"): SOME,
    ("hooks", "engine"): ALL,
}
STEPS = 4


class _Decaying(torch.optim.Optimizer):
    """SGD with momentum whose rate falls with a count that is an attribute."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.3})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    param.sub_(momentum.mul_(0.5).add_(param.grad), alpha=group["lr"] / self.count)


class _Script:
    """A model, its optimizer, and the functions that were called around its steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer: Any = _Decaying(self.model.parameters())
        self.calls: list[str] = []
        self.handles: list[Any] = []

    def mask(self) -> None:
        with hf_zero.zero.GatheredParameters(list(self.model.parameters())), torch.no_grad():
            for param in self.model.parameters():
                param.mul_((torch.arange(param.numel()) % 2).view(param.shape))

    def replace(self, of_class: bool = False) -> None:
        original = type(self.optimizer).step if of_class else self.optimizer.step

        def step(optimizer: Any, closure: Any = None) -> Any:
            self.calls.append("replaced")
            result = original(optimizer, closure) if of_class else original(closure)
            self.mask()
            return result

        if of_class:
            _Decaying.step = step  # type: ignore[method-assign]
        else:
            self.optimizer.step = MethodType(step, self.optimizer)

    def before(self, given: Any, *_: Any) -> None:
        assert given is self.optimizer
        self.calls.append("before")
        for param in given.param_groups[0]["params"]:
            param.grad.clamp_(-0.02, 0.02)

    def after(self, given: Any, *_: Any) -> None:
        assert given is self.optimizer
        self.calls.append("after")
        self.mask()

    def hook(self) -> None:
        self.handles = [register_optimizer_step_pre_hook(self.before), register_optimizer_step_post_hook(self.after)]
        self.handles.append(self.optimizer.register_step_pre_hook(self.before))


def _train(way: str, end: str, kind: tuple[int, str | None, str] | None) -> tuple[list[torch.Tensor], list[str]]:
    """Train with functions of a script around the steps, under an engine of this ``kind``; None is plain PyTorch."""
    script = _Script()
    model, optimizer = script.model, script.optimizer
    if way == "before":
        script.replace()
    engine: Any = None
    if kind is not None:
        zero = {"stage": kind[0], "offload_optimizer": {"device": kind[2] or "none"}}
        config = {"train_micro_batch_size_per_gpu": 3, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
        engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config | ({kind[1]: {"enabled": True}} if kind[1] else {}))[0]
    if way in ("after", "class"):
        script.replace(of_class=way == "class")
    if way == "hooks":
        script.hook()
    for row in torch.randn(STEPS, 2, 3, 4, generator=torch.Generator().manual_seed(1)):
        if engine is None:
            model(row.flatten(0, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(engine(row[ranks.rank()].to(engine.optimizer.low_precision_dtype)).square().mean())
            {"engine": engine.step, "own": optimizer.step, "optimizer": engine.optimizer.step}[end]()
    for handle in script.handles:
        handle.remove()
    assert optimizer.count == STEPS
    weights = [param.detach().clone() if engine is None else safe_get_full_fp32_param(param) for param in model.parameters()]
    if engine is not None:
        engine.destroy()
    return weights, script.calls  # type: ignore[return-value]


def _around_steps() -> None:
    as_made = _Decaying.step
    for (way, end), kinds in WAYS.items():
        wanted, calls = _train(way, end, None)
        for kind in kinds:
            _Decaying.step = as_made  # type: ignore[method-assign]
            weights, seen = _train(way, end, kind)
            _Decaying.step = as_made  # type: ignore[method-assign]
            label = f"{way}, {end}, {kind}"
            assert seen == calls, f"{label}: {seen}"
            for found, expected in zip(weights, wanted, strict=True):
                torch.testing.assert_close(
                    found, expected, rtol=0, atol=0.02 if kind[1] else 1e-6, msg=lambda text, at=label: f"{at}: {text}"
                )
                assert found[expected == 0].eq(0).all(), label


def test_functions_around_steps_run_once_and_change_the_model() -> None:
    """A step, replaced before or after ``initialize``, and hooks on all optimizers, whose writes to 16-bit weights were lost."""
    ranks.run_ranks(_around_steps, 2)


def _not_once(on: str, stage: int) -> None:
    """Step with a function in place of ``step`` that takes no step on some ranks, or two on all."""
    script = _Script()
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}}
    engine = hf_zero.initialize(model=script.model, optimizer=script.optimizer, config=config)[0]
    owner = engine.optimizer if on == "engine's optimizer, rank 1" else script.optimizer
    original = owner.step
    if on == "twice":
        owner.step = lambda: (original(), original())
    elif on == "all ranks" or ranks.rank() == 1:
        owner.step = lambda: None
    engine.backward(engine(torch.ones(3, 4)).square().mean())
    times = 2 if on == "twice" else 0
    with pytest.raises(
        StateError, match=rf"optimizer.step was replaced by .*, which called the original step {times} times in engine.step()"
    ):
        engine.step()
    engine.destroy()


@pytest.mark.parametrize(("on", "stage"), [("all ranks", 0), ("rank 1", 0), ("rank 1", 3), ("engine's optimizer, rank 1", 1), ("twice", 2)])
def test_a_replaced_step_that_does_not_step_is_an_error_on_all_ranks(on: str, stage: int) -> None:
    ranks.run_ranks(_not_once, 2, on, stage)


def _second_optimizer(early: bool, stage: int) -> None:
    """Train the last layer with an optimizer that no engine knows; ``early``: also in the middle of an accumulation."""
    script = _Script()
    last = list(script.model[2].parameters())
    if ranks.rank() == 0:
        last[1].data += 1  # rank 0's values are used
    zero = {"stage": stage, "stage3_param_persistence_threshold": 20}
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": zero, "gradient_clipping": 0}
    config["gradient_accumulation_steps"] = 2 if early else 1
    frozen = nn.Parameter(torch.ones(100), requires_grad=False)  # sharded at stage 3; the second optimizer finds no gradient of it
    first, second = torch.optim.SGD(script.model[:2].parameters(), lr=0.1), torch.optim.SGD([*last, frozen], lr=0.1)
    script.model[1].register_parameter("frozen", frozen)
    engine = hf_zero.initialize(model=script.model, optimizer=first, config=config)[0]
    for _ in range(3):
        engine.backward(engine(torch.full((3, 4), float(ranks.rank() + 1))).square().mean())
        if early:
            engine.step()
            second.step()
            engine.backward(engine(torch.ones(3, 4)).square().mean())
            with pytest.raises(StateError, match=r"parameter 2\.(weight|bias) was written on rank.*If an optimizer of the script's own"):
                engine.step()
            break
        engine.step()
        second.step()
        second.zero_grad()
    else:
        wanted = _Script().model
        wanted[2].bias.data += 1
        optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1)
        for _ in range(3):
            wanted(torch.tensor([[1.0], [2.0]]).expand(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for layer, other in zip(script.model[::2], wanted[::2], strict=True):
            for name, param in layer.named_parameters():
                value = param if layer is script.model[2] else safe_get_full_fp32_param(param)
                torch.testing.assert_close(value, other.get_parameter(name))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("early", [False, True])
def test_an_optimizer_that_no_engine_knows_must_update_alike_on_all_ranks(early: bool, stage: int) -> None:
    """Its gradients are means over ranks at the end of an accumulation only: the weights of the ranks drifted apart without a word."""
    ranks.run_ranks(_second_optimizer, 2, early, stage)


def _handles() -> None:
    script = _Script()
    engine = hf_zero.initialize(model=script.model, optimizer=script.optimizer, config={"train_micro_batch_size_per_gpu": 3})[0]
    seen: list[int] = []

    def register(*_: Any) -> None:
        script.handles.append(script.optimizer.register_step_post_hook(lambda *_: seen.append(1)))

    first = script.optimizer.register_step_pre_hook(register)
    for step in range(3):
        engine.backward(engine(torch.ones(3, 4)).square().mean())
        engine.step()
        (first if step == 0 else script.handles[0]).remove()
    assert seen == [1, 1]
    engine.destroy()


def test_a_hook_that_is_registered_inside_a_step_can_be_removed() -> None:
    ranks.run_ranks(_handles, 2)


def _without_an_optimizer(stage: int) -> None:
    """A part of a trained chain may have gradients without being trained; the model of a destroyed engine trains again."""
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8}}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = hf_zero.initialize(model=model, config=config)[0]
    late, head = torch.optim.AdamW(model.parameters(), lr=0.1), nn.Linear(4, 1)
    of_head = torch.optim.SGD(head.parameters(), lr=0.1)
    head(engine(torch.full((3, 4), float(ranks.rank() + 1)))).square().mean().backward()
    of_head.step()
    with pytest.raises(StateError, match=r"AdamW.step\(\): 0.(weight|bias) belongs to a model .* without an optimizer"):
        late.step()
    engine.destroy()
    if stage < 3:
        before = model[0].weight.detach().clone()
        late.step()
        assert not torch.equal(before, model[0].weight)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_step_over_an_engine_without_an_optimizer_is_an_error(stage: int) -> None:
    """The weights of the ranks drifted apart without a word."""
    ranks.run_ranks(_without_an_optimizer, 2, stage)
