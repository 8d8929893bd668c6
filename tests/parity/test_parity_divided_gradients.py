"""Gradients, masters and moments that a script reads and changes where tensor parallelism or experts divide parameters: they are whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import observe
from hf_zero.errors import StateError
from hf_zero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from tests.support import parity, ranks, zoo
from tests.support.experts import build, mixed, with_experts, with_split_layers
from tests.support.logged import messages_of_log
from tests.support.parity import Run

DENSE, EXPERTS = "Qwen3ForCausalLM", "MixtralForCausalLM"
STEPS = 2


def edit(model: nn.Module, step: int) -> None:
    """Change gradients by numbers and noise that depend on whole tensors."""
    torch.manual_seed(step)
    for place, param in enumerate(model.parameters()):
        grad = param.grad
        assert grad is not None
        if place % 4 == 0:
            param.grad = grad / grad.abs().max()  # assigned
        elif grad.dim() > 1:
            grad.sub_(grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True))  # centralized
        else:
            grad.mul_((0.05 / grad.norm()).clamp(max=1))  # clipped by tensor
        param.grad.add_(torch.randn(param.grad.shape) * 0.01)


def _optimizer(params: Any, run: Run) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=run.lr, betas=(0.9, 0.99), eps=run.eps, weight_decay=run.weight_decay)


def reference(name: str, run: Run, worlds: int, change: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and optimizer of a run in plain PyTorch with the batches of ``worlds`` data-parallel ranks."""
    model = build(name)
    optimizer = _optimizer(model.parameters(), run)
    feed = mixed(name)
    for step in range(STEPS):
        for rank in range(worlds):
            (zoo.loss(model, feed(step, 0, rank)) / worlds).backward()
        change(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _run(stage: int, split: int, experts: int, **own: Any) -> Run:
    run = Run(stage, extra={"hf_zero": own})
    run = with_split_layers(run, split) if split > 1 else run
    return with_experts(run, experts) if experts > 1 else run


def _close(found: Tensor | None, wanted: Tensor, label: str) -> None:
    assert found is not None, label
    assert found.shape == wanted.shape, label
    torch.testing.assert_close(found.cpu(), wanted.detach(), atol=2e-5, rtol=2e-5, msg=lambda text: f"{label}: {text}")


def each(check: Any, name: str, cells: list[tuple[int, int, int]]) -> None:
    """Call ``check`` for each cell: stage, ranks of a layer, ranks of the experts."""
    for cell in cells:
        check(name, *cell)


def shown(name: str, stage: int, split: int, experts: int) -> None:
    run = _run(stage, split, experts, show_gradients=True)
    engine, feed = parity.initialize(build(name), run), mixed(name)
    for step in range(STEPS):
        engine.backward(zoo.loss(engine, feed(step, 0, ranks.rank() // split)))
        edit(engine.module, step)
        engine.step()
    weights = parity.collect(engine, parity.Trace()).weights
    plain, _ = reference(name, run, ranks.world() // split, edit)
    for key, wanted in plain.named_parameters():
        _close(weights[key], wanted, f"{key} {run}")


@pytest.mark.parametrize(
    ("name", "world", "cells"),
    [
        (DENSE, 2, [(0, 2, 1), (1, 2, 1), (3, 2, 1)]),
        (DENSE, 4, [(2, 2, 1)]),
        (EXPERTS, 2, [(0, 1, 2), (3, 1, 2)]),
        (EXPERTS, 4, [(1, 2, 2)]),
    ],
)
def test_shown_gradients_are_whole(name: str, world: int, cells: list[tuple[int, int, int]]) -> None:
    ranks.run_ranks(each, world, shown, name, cells)


def written(name: str, stage: int, split: int, experts: int) -> None:
    """Read and write gradients, masters and moments of all parameters by their functions, in a training of two steps."""
    run = _run(stage, split, experts)
    engine, feed = parity.initialize(build(name), run), mixed(name)
    named = dict(engine.module.named_parameters())
    read: dict[str, dict[str, Tensor | None]] = {}
    for step in range(STEPS):
        engine.backward(zoo.loss(engine, feed(step, 0, ranks.rank() // split)))
        for key, param in named.items():
            grad = safe_get_full_grad(param)
            assert grad is not None
            read.setdefault(key, {})["grad"] = grad
            safe_set_full_grad(param, grad / grad.norm())
        engine.step()
    for key, param in named.items():
        read[key] |= {"master": safe_get_full_fp32_param(param), "exp_avg": safe_get_full_optimizer_state(param, "exp_avg")}

    grads: dict[str, Tensor] = {}

    def normalize(model: nn.Module, _step: int) -> None:
        for key, param in model.named_parameters():
            assert param.grad is not None
            grads[key] = param.grad.clone()
            param.grad /= param.grad.norm()

    plain, optimizer = reference(name, run, ranks.world() // split, normalize)
    for key, wanted in plain.named_parameters():
        _close(read[key]["grad"], grads[key], f"{key}.grad {run}")
        _close(read[key]["master"], wanted, f"{key} {run}")
        _close(read[key]["exp_avg"], optimizer.state[wanted]["exp_avg"], f"exp_avg of {key} {run}")
    _write_values(named, plain)


def _write_values(named: dict[str, nn.Parameter], plain: nn.Module) -> None:
    """Write each master and moment from a generator, and read it back; refuse other shapes."""
    for key, wanted in plain.named_parameters():
        value = torch.randn(wanted.shape)
        safe_set_full_fp32_param(named[key], value)
        safe_set_full_optimizer_state(named[key], 2 * value, "exp_avg")
        _close(safe_get_full_fp32_param(named[key]), value, key)
        _close(safe_get_full_optimizer_state(named[key], "exp_avg"), 2 * value, key)
        for write in (safe_set_full_fp32_param, safe_set_full_grad, lambda *given: safe_set_full_optimizer_state(*given, "exp_avg")):
            with pytest.raises(StateError, match="shape"):
                write(named[key], value[:-1])


@pytest.mark.parametrize(
    ("name", "world", "cells"),
    [(DENSE, 2, [(0, 2, 1), (3, 2, 1)]), (EXPERTS, 2, [(1, 1, 2), (3, 1, 2)]), (EXPERTS, 4, [(2, 2, 2)])],
)
def test_functions_read_and_write_whole_tensors(name: str, world: int, cells: list[tuple[int, int, int]]) -> None:
    ranks.run_ranks(each, world, written, name, cells)


def warns() -> None:
    engine, feed = parity.initialize(build(DENSE), _run(0, 2, 1)), mixed(DENSE)
    engine.backward(zoo.loss(engine, feed(0, 0, 0)))
    whole = engine.module.model.norm.weight
    part = engine.module.model.layers[0].self_attn.q_proj.weight
    observe._warned.clear()
    with messages_of_log() as found:
        assert whole.grad.norm() > 0
        part.grad.mul_(2).clamp_(-1, 1)
        assert not found
        torch.linalg.vector_norm(part.grad)
        torch.nn.utils.get_total_norm([whole.grad, part.grad])
    assert ranks.rank() or any("q_proj.weight.grad covers only this rank's part" in text and "show_gradients" in text for text in found), (
        found
    )
    engine.step()


def test_stage_0_warns_of_norms_of_parts() -> None:
    ranks.run_ranks(warns, 2)


def refuses() -> None:
    engine, feed = parity.initialize(build(DENSE), _run(1, 2, 1, show_gradients=True)), mixed(DENSE)
    engine.backward(zoo.loss(engine, feed(0, 0, 0)))
    part = engine.module.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(StateError, match="q_proj.weight.grad was given a gradient of shape"):
        part.grad = torch.zeros(part.data.shape)
    norm = engine.module.model.norm.weight
    if ranks.rank() == 0:
        norm.grad = torch.ones_like(norm)  # of a parameter that both ranks have whole
    with pytest.raises(StateError, match=r"norm.weight.grad was written by the script on rank\(s\) 0 of 2 only"):
        engine.step()


def refuses_reads() -> None:
    engine, feed = parity.initialize(build(DENSE), _run(1, 2, 1, show_gradients=True)), mixed(DENSE)
    engine.backward(zoo.loss(engine, feed(0, 0, 0)))
    part = engine.module.model.layers[0].self_attn.q_proj.weight
    if ranks.rank() == 0:
        with pytest.raises(StateError, match=r"read .*q_proj.weight.grad"):
            part.grad.norm()
    else:
        with pytest.raises(StateError):
            engine.step()


def test_one_rank_alone_and_parts_are_refused() -> None:
    ranks.run_ranks(refuses, 2)
    ranks.run_ranks(refuses_reads, 2)
