"""Optimizers whose step reads more than the engine's tensors: options with an entry for each parameter, and parameters in closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import UnsupportedError
from hf_zero.optim.elementwise import needs_whole_tensors
from hf_zero.optim.step_reads import require_own_reads
from tests.support import ranks


class Scaled(torch.optim.Optimizer):
    """SGD with a number for each parameter of a group, or one for all of them."""

    def __init__(self, params: Any, lr: float = 0.1, scales: Any = 1.0, betas: Any = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "scales": scales, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, _ = group["betas"]
            scales = group["scales"] if isinstance(group["scales"], (list, tuple)) else [group["scales"]] * len(group["params"])
            for param, scale in zip(group["params"], scales, strict=False):
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] * scale * first)


class Named(Scaled):
    """Keeps a momentum by the name of a parameter, which an option of a group has, as does LoRA-FA of PEFT."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param, name in zip(group["params"], group["names"], strict=False):
                state = self.state[name]
                state["moment"] = param.grad + 0.5 * state.get("moment", torch.zeros_like(param))
                param.sub_(state["moment"], alpha=group["lr"])


def _closured(
    params: list[nn.Parameter], read: Callable[[], None], base: type[torch.optim.Optimizer] = torch.optim.SGD
) -> torch.optim.Optimizer:
    class Closured(base):  # type: ignore[valid-type,misc]
        """An optimizer whose step calls a function that has parameters of the model in its closure."""

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            read()
            return super().step(closure)

    return Closured(params, lr=0.1)


class _Pairs:
    """Scales the gradients of parameters by the norm of the next one."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.pairs = list(zip(params, params[1:], strict=False))

    @torch.no_grad()
    def read(self) -> None:
        for first, second in self.pairs:
            if first.grad is not None:
                first.grad.mul_(second.norm())


def _pairing(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return _closured(params, _Pairs(params).read)


def _pairing_whole(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return _closured(params, _Pairs(params).read, torch.optim.Adafactor)


def _looking(model: nn.Module) -> torch.optim.Optimizer:
    return _closured(list(model.parameters()), lambda: print(sum(param.numel() for param in model.parameters() if param.requires_grad)))


def _scaled_apart(model: nn.Module) -> torch.optim.Optimizer:
    return Scaled([{"params": [param], "scales": 1.0 + index} for index, param in enumerate(model.parameters())])


def _scaled_by_list(model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    return Scaled([{"params": params, "scales": [1.0 + index for index in range(len(params))]}])


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean()


def _config(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
    return {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero | more.pop("zero", {}), **more}


def _trains(make: Callable[[nn.Module], torch.optim.Optimizer], config: dict[str, Any]) -> None:
    model, plain = _model(), _model()
    count, norm = config.get("gradient_accumulation_steps", 1), config["gradient_clipping"]
    engine: Any = hf_zero.initialize(model=model, optimizer=make(model), config=config)[0]
    optimizer = make(plain)
    for step in range(3 * count):
        engine.backward(_loss(engine, step, ranks.rank()))
        engine.step()
        for rank in range(ranks.world()):
            (_loss(plain, step, rank) / ranks.world() / count).backward()
        if (step + 1) % count == 0:
            if norm:
                nn.utils.clip_grad_norm_(plain.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
    for param, wanted in zip(engine.parameters(), plain.parameters(), strict=True):
        with hf_zero.zero.GatheredParameters(param):
            torch.testing.assert_close(param.detach(), wanted.detach(), rtol=1e-5, atol=1e-6)
    engine.destroy()


def _is_refused(make: Callable[[nn.Module], torch.optim.Optimizer], config: dict[str, Any], text: str) -> None:
    model = _model()
    with pytest.raises(UnsupportedError, match=text):
        hf_zero.initialize(model=model, optimizer=make(model), config=config)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_group_for_each_value_trains(stage: int) -> None:
    ranks.run_ranks(_trains, 2, _scaled_apart, _config(stage))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_lists_by_parameter_are_refused_on_all_ranks(stage: int) -> None:
    ranks.run_ranks(_is_refused, 2, _scaled_by_list, _config(stage), "Scaled reads one entry of 'scales' for each of the 4 parameters")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_read_through_a_closure_are_refused(stage: int, world: int) -> None:
    ranks.run_ranks(_is_refused, world, _pairing, _config(stage), "Closured reads the gradients of the model's parameters without")


@pytest.mark.parametrize("more", [{}, {"gradient_accumulation_steps": 2}, {"gradient_clipping": 0.01}], ids=str)
@pytest.mark.parametrize("make", [_pairing, _pairing_whole])
def test_gradients_read_through_a_closure_at_stage_0(make: Any, more: dict[str, Any]) -> None:
    ranks.run_ranks(_trains, 2, make, _config(0) | more)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_closure_that_only_looks_at_sizes_trains(stage: int) -> None:
    ranks.run_ranks(_trains, 2, _looking, _config(stage))


def test_stage_0_with_offload_is_refused() -> None:
    config = _config(0, zero={"offload_optimizer": {"device": "cpu"}})
    ranks.run_ranks(_is_refused, 1, _pairing, config, "reads the gradients of the model's parameters")


def _params(number: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 3)) for _ in range(number)]


def test_lists_that_are_no_entries_by_parameter_are_allowed() -> None:
    assert not needs_whole_tensors(Scaled([{"params": _params(), "label": ["a", "b"], "betas": (0.8, 0.9)}]))
    assert not needs_whole_tensors(Scaled([("a", param) for param in _params()]))  # param_names of torch
    assert not needs_whole_tensors(Scaled(_params(3), scales=2.0))


@pytest.mark.parametrize("number", [2, 20])
def test_entries_by_parameter_are_refused_wherever_they_come_from(number: int) -> None:
    scales = [1.0 + index for index in range(number)]
    with pytest.raises(UnsupportedError, match="reads one entry of 'scales'"):
        needs_whole_tensors(Scaled(_params(number), lr=0.0, scales=scales), allow_untested=True, all_here=True)
    names = [f"layer{index}" for index in range(number)]
    with pytest.raises(UnsupportedError, match="Named reads one entry of 'names' for each"):
        needs_whole_tensors(Named([{"params": _params(number), "names": names}]), allow_untested=True)


def test_values_are_read_where_they_are_whole() -> None:
    params = _params()

    def read() -> None:
        params[0].norm()

    require_own_reads(_closured(params, read), False, False)
    with pytest.raises(UnsupportedError, match="reads values of the model's parameters"):
        require_own_reads(_closured(params, read), False, True)

    def write() -> None:
        params[0].detach().clone()
        with torch.no_grad():
            params[1].mul_(1.0)

    with pytest.raises(UnsupportedError, match="changes the model's parameters"):
        require_own_reads(_closured(params, write), False, False)


def _lora(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    peft, optimizers = pytest.importorskip("peft"), pytest.importorskip("peft.optimizers")

    def make(model: nn.Module) -> torch.optim.Optimizer:
        torch.manual_seed(6)
        config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        if name == "fa":
            return optimizers.create_lorafa_optimizer(adapted, r=2, lora_alpha=8, lr=1e-2)
        return optimizers.create_riemannian_optimizer(adapted, torch.optim.AdamW, lr=1e-2)

    return make


def _lora_is_refused(name: str, stage: int, text: str) -> None:
    _is_refused(_lora(name), _config(stage), text)


def _riemannian_trains() -> None:
    _trains(_lora("riemannian"), _config(0))


@pytest.mark.parametrize(("name", "stage", "text"), [("fa", 0, "LoRA.*trains here"), ("fa", 3, "LoRA"), ("riemannian", 1, "a closure")])
def test_optimizers_of_lora_that_cannot_run_are_refused(name: str, stage: int, text: str) -> None:
    pytest.importorskip("peft.optimizers")
    ranks.run_ranks(_lora_is_refused, 2, name, stage, text)


def test_riemannian_lora_trains_at_stage_0() -> None:
    pytest.importorskip("peft.optimizers")
    ranks.run_ranks(_riemannian_trains, 2)
