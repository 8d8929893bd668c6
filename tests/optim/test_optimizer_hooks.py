"""The engine's optimizer takes the hooks that every torch optimizer takes: once for each real step, in torch's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.support import parity, ranks
from tests.support.logged import messages_of_log
from tests.support.models import CASES, class_loss
from tests.support.parity import Run, initialize

MLP = CASES["mlp"]


def _steps(engine: Any, optimizer: Any, steps: int, accumulation: int) -> None:
    for step in range(steps):
        for micro in range(accumulation):
            engine.backward(class_loss(engine, MLP.rows(step, micro, ranks.rank())))
            engine.step()


def _hooks_at(stage: int) -> None:
    engine = initialize(MLP.build(), Run(stage, accumulation=2))
    optimizer, seen = engine.optimizer, []

    def before(found: Any, args: Any, kwargs: Any) -> None:
        seen.append("before")
        assert found is optimizer and args == (optimizer,) and kwargs == {}
        found.param_groups[0]["lr"] = 0.0 if len(seen) > 2 else 0.1

    weight = engine.module.head.bias
    values = []

    def after(found: Any, args: Any, kwargs: Any) -> None:
        from hf_zero.utils import safe_get_full_fp32_param

        seen.append("after")
        values.append(safe_get_full_fp32_param(weight).clone())

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    _steps(engine, optimizer, 3, 2)
    assert seen == ["before", "after"] * 3
    assert torch.equal(values[1], values[2]), "the learning rate that a hook sets is that of its step"
    for handle in handles:
        handle.remove()
    _steps(engine, optimizer, 1, 2)
    assert len(seen) == 6
    with pytest.raises(RuntimeError, match="other arguments"):
        optimizer.register_step_pre_hook(lambda *_: ((), {"closure": None}))
        _steps(engine, optimizer, 1, 2)
    engine.destroy()


def _hooks() -> None:
    for stage in (0, 1, 3):
        _hooks_at(stage)


def _hooks_of_states() -> None:
    engine = initialize(MLP.build(), Run(1))
    optimizer, seen = engine.optimizer, []
    _steps(engine, optimizer, 1, 1)
    optimizer.register_state_dict_pre_hook(lambda found: seen.append("save"))
    optimizer.register_state_dict_post_hook(lambda found, state: {**state, "mine": 1})
    state = optimizer.state_dict()
    assert state["mine"] == 1 and seen == ["save"]

    def without_mine(found: Any, given: dict[str, Any]) -> dict[str, Any]:
        seen.append("load")
        return {key: value for key, value in given.items() if key != "mine"}

    optimizer.register_load_state_dict_pre_hook(without_mine)
    optimizer.register_load_state_dict_post_hook(lambda found: seen.append("loaded"))
    optimizer.load_state_dict(state)
    assert seen == ["save", "load", "loaded"] and "mine" in state
    engine.destroy()


def _no_step_no_hook() -> None:
    engine = initialize(MLP.build(), Run(1, dtype="fp16"))
    seen: list[int] = []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(0))
    engine.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    batch = MLP.rows(0, 0, ranks.rank())
    loss = class_loss(engine, {**batch, "inputs": batch["inputs"].half()})
    engine.backward(loss * float("inf"))
    engine.step()
    assert not seen, "a step that overflows is none"
    engine.destroy()


def test_step_hooks_are_called_once_for_each_real_step() -> None:
    ranks.run_ranks(_hooks, 2)
    ranks.run_ranks(_no_step_no_hook, 2)


def test_hooks_of_state_dicts() -> None:
    ranks.run_ranks(_hooks_of_states, 2)


class _ScheduleFree(torch.optim.Optimizer):
    """SGD whose parameters are the mean of all values in its evaluation mode, as in schedule-free optimizers; by element, or by tensor."""

    def __init__(self, params: Any, lr: float = 0.1, whole: bool = False) -> None:
        super().__init__(params, {"lr": lr, "mode": "train", "count": 0, "whole": whole})

    def _swap(self, mode: str) -> None:
        for group in self.param_groups:
            if group["mode"] != mode:
                group["mode"] = mode
                for param in group["params"]:
                    last, mean = self.state[param]["last"], self.state[param]["mean"]
                    param.data.copy_(mean if mode == "eval" else last)

    def train(self) -> None:
        self._swap("train")

    def eval(self) -> None:
        self._swap("eval")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                scale = 1.0 + float(group["whole"]) / (1.0 + float(param.grad.norm()))
                param.sub_(group["lr"] * scale * param.grad)
                state = self.state[param]
                mean = state.setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param, 1.0 / group["count"])
                state["last"] = param.clone()


def _own_object(stage: int, dtype: str, whole: bool) -> None:
    """The script's own optimizer object steps, is set to modes, and is one of two: as in plain PyTorch, or an error that says so."""
    import hf_zero
    from hf_zero.errors import StateError
    from tests.support.parity import DTYPES, cast_model

    models = [MLP.build().to(ranks.device()) for _ in range(2)]
    cast_model(models[0], DTYPES[dtype], ())
    masters = [param.detach().float().clone() for param in models[0].parameters()]
    plain = _ScheduleFree(masters, whole=whole)
    mine = _ScheduleFree(models[1].parameters(), whole=whole)
    mine.state[next(models[1].parameters())]  # as schedule-free optimizers look in train(), before there is an engine
    config = Run(stage, dtype).config()
    del config["optimizer"]
    engine = hf_zero.initialize(model=models[1], optimizer=mine, config={**config, "zero_allow_untested_optimizer": True})[0]

    def same(label: str) -> None:
        with hf_zero.zero.GatheredParameters(list(engine.parameters())):
            for (name, param), expected in zip(models[1].named_parameters(), masters, strict=True):
                wanted = expected.to(param.dtype)
                limits = {"rtol": 1e-5, "atol": 1e-6} if dtype == "fp32" else {"rtol": 2**-7, "atol": 4e-3}
                torch.testing.assert_close(param.data, wanted, **limits, msg=lambda text, at=name: f"{label}, {at}: {text}")

    for step in range(3):
        parts = [MLP.rows(step, 0, rank) for rank in range(ranks.world())]
        for part in parts:
            batch = {key: value.to(DTYPES[dtype]) if value.is_floating_point() else value for key, value in part.items()}
            (class_loss(models[0], batch) / ranks.world()).backward()
            if part is parts[ranks.rank()]:
                class_loss(engine, batch).backward()
        for param, master in zip(models[0].parameters(), masters, strict=True):
            master.grad, param.grad = param.grad.float(), None
        plain.step()
        mine.step()
        mine.zero_grad()
        (mine if step else engine.optimizer).eval()
        plain.eval()
        same(f"stage {stage}, {dtype}, averaged in step {step}")
        mine.train()
        plain.train()
        same(f"stage {stage}, {dtype}, step {step}")
        with torch.no_grad():
            for param, master in zip(models[0].parameters(), masters, strict=True):
                param.copy_(master)
    mine.state.clear()  # begins anew, as in plain PyTorch
    with pytest.raises(StateError, match=r"optimizer.state was used with head.bias"):
        mine.state[models[1].head.bias]  # a state that is not there
    with pytest.raises(StateError, match=r"optimizer.state was used with head.bias"):
        mine.state.get(models[1].head.bias)
    mine.state[models[1].head.bias] = {}
    class_loss(engine, {key: value.to(DTYPES[dtype]) if value.is_floating_point() else value for key, value in parts[0].items()}).backward()
    with pytest.raises(StateError, match=r"optimizer.state was used with head.bias"):
        mine.step()
    with pytest.raises(StateError, match=r"SGD.step\(\): .* is trained by an engine"):
        torch.optim.SGD(engine.parameters(), lr=0.1).step()
    engine.destroy()
    torch.optim.SGD(models[1].parameters(), lr=0.1).step()


def _own_objects(stages: tuple[int, ...]) -> None:
    for stage in stages:
        for whole in (False, True):
            _own_object(stage, "fp32", whole)
        _own_object(stage, "bf16", False)


@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 2), marks=pytest.mark.slow)])
def test_the_scripts_own_optimizer_object(stages: tuple[int, ...]) -> None:
    ranks.run_ranks(_own_objects, 2, stages)


def _masked(stage: int, dtype: str | None) -> None:
    """Compare a hook on the script's own optimizer, which masks the model's weights after each step and reads them, with plain PyTorch."""
    import hf_zero
    from hf_zero.utils import safe_get_full_fp32_param

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.5), list[float]()

        def mask(found: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            assert found is optimizer
            with torch.no_grad():
                seen.append(sum(float(param.sum()) for param in model.parameters()))
                for param in model.parameters():
                    param.mul_((torch.arange(param.numel()) % 2).view(param.shape))

        optimizer.register_step_post_hook(mask)
        return model, optimizer, seen

    rows = torch.randn(3, 2, 3, 4, generator=torch.Generator().manual_seed(1))
    (plain, expected, wanted), (model, optimizer, seen) = build(), build()
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": stage}} | ({dtype: {"enabled": True}} if dtype else {})
    engine, *_ = hf_zero.initialize(model=model, optimizer=optimizer, config=config)
    for row in rows:
        plain(row.flatten(0, 1)).square().mean().backward()
        expected.step()
        expected.zero_grad()
        engine.backward(engine(row[ranks.rank()].to(engine.optimizer.low_precision_dtype)).square().mean())
        engine.step()
    close = {"rtol": 0, "atol": 0.03 if dtype else 1e-6}
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), **close)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        value = safe_get_full_fp32_param(param)
        torch.testing.assert_close(value, other.detach(), **close)
        assert value[other == 0].eq(0).all()
    engine.destroy()


def _masks() -> None:
    for stage, dtype in ((0, "bf16"), (1, None), (2, "bf16"), (3, None), (3, "bf16")):
        _masked(stage, dtype)


def test_a_hook_on_the_scripts_optimizer_sees_and_changes_the_new_weights() -> None:
    ranks.run_ranks(_masks, 2)


def _gradients_in_hooks(stage: int, offload: bool) -> list[str]:
    """Change gradients by value in pre-step hooks on the engine's optimizer and on torch's, which both see them; norms get a warning."""
    from hf_zero import observe

    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    engine = initialize(MLP.build(), Run(stage, extra={"zero_optimization": zero}))
    plain = MLP.build()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.05)

    def bound(found: Any, _args: Any, _kwargs: Any) -> None:
        grads = [param.grad for group in found.param_groups for param in group["params"]]
        assert grads and all(grad is not None for grad in grads)
        for grad in grads:
            grad.clamp_(-0.02, 0.02)

    def doubled(found: Any, _args: Any, _kwargs: Any) -> None:
        for group in found.param_groups:
            for param in group["params"]:
                param.grad = param.grad * 2

    def measured(found: Any, _args: Any, _kwargs: Any) -> None:
        assert found.param_groups[0]["params"][0].grad.norm() >= 0

    engine.optimizer.register_step_pre_hook(bound)
    engine.optimizer.inner.register_step_pre_hook(doubled)
    reference.register_step_pre_hook(bound)
    reference.register_step_pre_hook(doubled)
    for step in range(2):
        for rank in range(ranks.world()):
            (class_loss(plain, MLP.rows(step, 0, rank)) / ranks.world()).backward()
        reference.step()
        reference.zero_grad()
        engine.backward(class_loss(engine, MLP.rows(step, 0, ranks.rank())))
        engine.step()
    found = parity.collect(engine, parity.Trace()).weights
    for name, wanted in plain.named_parameters():
        torch.testing.assert_close(found[name], wanted.detach(), atol=2e-5, rtol=2e-5)
    observe._warned.clear()
    with messages_of_log() as lines:
        engine.optimizer.register_step_pre_hook(measured)
        engine.backward(class_loss(engine, MLP.rows(0, 0, ranks.rank())))
        engine.step()
    engine.destroy()
    return [line for line in lines if "norm() of a gradient in a step pre-hook covers only a piece of it" in line]


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, False), (2, True), (3, False)])
def test_step_hooks_see_and_change_gradients(stage: int, offload: bool) -> None:
    assert len(ranks.run_ranks(_gradients_in_hooks, 2, stage, offload)[0]) == 1


class _OwnSGD(torch.optim.SGD):
    """A class that is tried on small tensors to find its kind."""


class _Around(torch.optim.SGD):
    """An optimizer that holds another one, which updates its first parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.base = _OwnSGD(self.param_groups[0]["params"][:1], lr)

    def step(self, closure: Any = None) -> Any:
        self.base.step()
        return super().step(closure)


def _no_hooks_in_trials(stage: int, offload: bool) -> None:
    """Hooks that a script has registered before initialize() see the steps of the training, and no others."""
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    config = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero}
    seen: list[str] = []

    def note(what: str) -> Any:
        return lambda *_: seen.append(what)

    handles = [register_optimizer_step_pre_hook(note("any")), register_optimizer_step_post_hook(note("any"))]
    for make in (_OwnSGD, torch.optim.SGD, torch.optim.Adafactor, _Around):
        seen.clear()
        model = MLP.build()
        given = make(model.parameters(), lr=1e-2)
        for optimizer in (given, *([given.base] if isinstance(given, _Around) else [])):
            optimizer.register_step_pre_hook(note("before"))
            optimizer.register_step_post_hook(note("after"))
        engine = initialize(model, Run(stage, extra=config), optimizer=given)
        assert seen == [], (make, len(seen))
        if make is not _Around:
            _steps(engine, engine.optimizer, 2, 1)
            assert seen == ["any", "before", "after", "any"] * 2, (make, seen)
        engine.destroy()
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, False), (2, True)])
def test_trials_at_initialize_call_no_hooks(stage: int, offload: bool) -> None:
    ranks.run_ranks(_no_hooks_in_trials, 2, stage, offload)
