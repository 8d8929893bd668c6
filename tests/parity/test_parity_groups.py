"""Test param groups that split a block, client optimizers, learning rates changed by hand, and optimizers that need all tensors
together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError
from hf_zero.utils import safe_get_full_fp32_param
from tests.support import ranks
from tests.support.models import CASES, concatenate
from tests.support.parity import Run, Trace, check, collect, initialize, mean_over_ranks, micro_step
from tests.support.rows import slow_but, thinned

STAGES = (0, 1, 2, 3)
CASE = CASES["gpt2"]
Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, eps=1e-3, weight_decay=0.01),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-3),
    "AdamW amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, amsgrad=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, eps=1e-3, initial_accumulator_value=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, eps=1e-3, momentum=0.9, centered=True),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2, eps=1e-3),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2, eps=1e-3),
    "RAdam": lambda groups: torch.optim.RAdam(groups, lr=1e-2, eps=1e-3),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups, lr=1.0, eps=1e-3),
}
ALL_TENSORS: Optimizers = {
    "LBFGS": lambda groups: torch.optim.LBFGS(groups, lr=1e-2),
}


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the usual two groups: matrices decay, biases and norms do not; both kinds are in every block."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.2},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": 5e-3},
    ]


def plain_training(
    optimizer_of: Callable[[Any], torch.optim.Optimizer], groups_of: Callable[[nn.Module], Any], run: Run, lrs: list[float] | None
) -> Trace:
    """Train in plain PyTorch on the concatenated batch with any optimizer and any groups, fp32."""
    model = CASE.build()
    optimizer = optimizer_of(groups_of(model))
    trace = Trace()
    for step in range(run.steps):
        if lrs:
            for group in optimizer.param_groups:
                group["lr"] = lrs[step]
        loss = CASE.forward(model, concatenate([CASE.rows(step, 0, rank) for rank in range(ranks.world())]))
        loss.backward()
        trace.losses.append(loss.item())
        trace.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip or float("inf")).item())
        trace.skipped.append(False)
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    trace.masters = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    return trace


def engine_training(engine: Any, run: Run, lrs: list[float] | None) -> Trace:
    trace = Trace()
    for step in range(run.steps):
        if lrs:
            for group in engine.optimizer.param_groups:
                group["lr"] = lrs[step]
        loss = micro_step(engine, CASE.rows(step, 0, ranks.rank()), CASE.forward, 0)
        trace.losses.append(mean_over_ranks([loss]))
        trace.norms.append(float(engine.get_global_grad_norm()))
        trace.skipped.append(False)
    return collect(engine, trace)


def _client_optimizer(name: str, run: Run, groups: bool, lrs: list[float] | None = None) -> None:
    groups_of = decay_groups if groups else (lambda model: list(model.parameters()))
    model = CASE.build()
    engine = initialize(model, run, optimizer=OPTIMIZERS[name](groups_of(model)))
    trace = engine_training(engine, run, lrs)
    engine.destroy()
    if ranks.rank() == 0:
        check(trace, plain_training(OPTIMIZERS[name], groups_of, run, lrs), run, name)


def _groups_as_dicts(run: Run, config_optimizer: str) -> None:
    """Pass ``model_parameters`` as group dicts with an optimizer of the configuration."""
    params = {"lr": 1e-2, "eps": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.1}
    model = CASE.build()
    engine = initialize(
        model,
        Run(**{**vars(run), "extra": {"optimizer": {"type": config_optimizer, "params": params}}}),
        model_parameters=decay_groups(model),
    )
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.2, 0.0]
    assert [group["lr"] for group in engine.optimizer.param_groups] == [1e-2, 5e-3]
    trace = engine_training(engine, run, None)
    engine.destroy()
    if ranks.rank() == 0:
        settings = {"lr": 1e-2, "eps": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
        check(trace, plain_training(lambda groups: torch.optim.AdamW(groups, **settings), decay_groups, run, None), run, "groups as dicts")


def _subset_of_parameters(stage: int) -> None:
    """Pass an optimizer over some parameters: the others get no update, although they require gradients."""

    def only_blocks(model: nn.Module) -> list[nn.Parameter]:
        return list(model.transformer.h.parameters())

    run = Run(stage=stage)
    model = CASE.build()
    engine = initialize(model, run, optimizer=torch.optim.AdamW(only_blocks(model), lr=1e-2, eps=1e-3), model_parameters=None)
    for step in range(2):
        engine.backward(CASE.forward(engine, CASE.rows(step, 0, ranks.rank())))
        engine.step()
    named = list(engine.module.named_parameters())
    with hf_zero.zero.GatheredParameters([parameter for _, parameter in named]):
        moved = {name for name, parameter in named if not torch.equal(parameter.detach(), dict(CASE.build().named_parameters())[name])}
    assert moved == {name for name, _ in named if name.startswith("transformer.h.")}, moved
    engine.destroy()


def _scheduler_writes_the_rate(stage: int) -> None:
    """Step a torch scheduler created on the returned optimizer; its learning rates must reach the update."""
    run = Run(stage=stage)
    model = CASE.build()
    engine = initialize(model, run, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
    scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1.0 / (step + 1))
    trace = Trace()
    for step in range(run.steps):
        loss = micro_step(engine, CASE.rows(step, 0, ranks.rank()), CASE.forward, 0)
        scheduler.step()
        trace.losses.append(mean_over_ranks([loss]))
        trace.norms.append(float(engine.get_global_grad_norm()))
        trace.skipped.append(False)
    collect(engine, trace)
    engine.destroy()
    if ranks.rank() == 0:
        rates = [1e-2 / (step + 1) for step in range(run.steps)]
        expected = plain_training(lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-3), lambda m: list(m.parameters()), run, rates)
        check(trace, expected, run, "client scheduler")


def _refused(name: str, stage: int) -> str:
    from hf_zero.errors import UnsupportedError

    torch.distributed.barrier()  # a rank that is done must not leave before the others have connected
    model = CASE.build()
    try:
        initialize(model, Run(stage=stage), optimizer=ALL_TENSORS[name](list(model.parameters())))
    except UnsupportedError as error:
        return str(error)
    return "accepted"


@pytest.mark.fast_rows("3-True-AdamW fused", "1-False-SGD", "2-True-Adadelta", "3-True-NAdam")
@thinned(None, stage=[3, 1, 2], groups=[False, True], name=list(OPTIMIZERS))
def test_client_optimizers(stage: int, groups: bool, name: str) -> None:
    ranks.run_ranks(_client_optimizer, 2, name, Run(stage=stage, clip=0.1), groups)


@pytest.mark.fast_rows("3-SGD momentum")
@thinned(stage=STAGES, name=["AdamW", "SGD momentum"])
def test_groups_that_split_every_block_on_three_ranks(stage: int, name: str) -> None:
    ranks.run_ranks(_client_optimizer, 3, name, Run(stage=stage, clip=0.1), True)


@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_learning_rate_changed_by_hand(stage: int) -> None:
    ranks.run_ranks(_client_optimizer, 2, "AdamW", Run(stage=stage), True, [1e-2, 0.0, 5e-2])


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_scheduler_of_the_caller(stage: int) -> None:
    ranks.run_ranks(_scheduler_writes_the_rate, 2, stage)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_groups_as_dicts_with_a_configured_optimizer(stage: int) -> None:
    ranks.run_ranks(_groups_as_dicts, 2, Run(stage=stage), "AdamW")


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_optimizer_over_a_subset(stage: int) -> None:
    ranks.run_ranks(_subset_of_parameters, 2, stage)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", list(ALL_TENSORS))
def test_optimizers_that_need_all_tensors_together_are_refused(name: str, stage: int) -> None:
    for answer in ranks.run_ranks(_refused, 2, name, stage):
        assert name in answer, answer


def _small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))


@torch.no_grad()
def _shrink(optimizer: torch.optim.Optimizer, through_data: bool) -> None:
    held = [param.data if through_data else param for group in optimizer.param_groups for param in group["params"]]
    torch._foreach_mul_(held, 0.5)


def _writes_to_groups(folder: Path) -> None:
    """Write to the tensors of the groups between backward and step, and after a step: plain PyTorch's losses, or one error."""
    kinds = ((0, False, 0), (0, True, 0), (1, False, 0), (2, True, 0), (3, False, 0), (3, True, 0), (3, False, 10**5))
    offloaded = ((1, True, 0, "cpu"), (3, True, 0, "cpu"), (1, True, 0, "nvme"), (3, False, 0, "nvme"))
    for stage, bf16, persist, device in (*((*kind, "none") for kind in kinds), *offloaded):
        dtype = torch.bfloat16 if bf16 else torch.float32
        model, plain = _small(), _small().to(dtype)
        masters = [nn.Parameter(param.detach().float().clone()) for param in plain.parameters()]
        expected, given = torch.optim.SGD(masters, lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
        run = Run(stage=stage, dtype="bf16" if bf16 else "fp32")
        zero = {"stage": stage, "stage3_param_persistence_threshold": persist}
        zero |= {"offload_optimizer": {"device": device, **({"nvme_path": str(folder)} if device == "nvme" else {})}}
        engine = hf_zero.initialize(model=model, optimizer=given, config={**run.config(), "zero_optimization": zero})[0]
        whole_elsewhere = stage in (1, 2) or persist > 0
        for step in range(4):
            rows = [torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype) for rank in range(2)]
            loss = engine(rows[ranks.rank()]).square().mean()
            losses = [plain(part).square().mean() for part in rows]
            bound = 3e-2 if bf16 else 1e-5
            torch.testing.assert_close(loss.detach().float(), losses[ranks.rank()].detach().float(), rtol=bound, atol=bound)
            engine.backward(loss)
            (sum(losses) / 2).backward()
            for param, master in zip(plain.parameters(), masters, strict=True):
                master.grad, param.grad = param.grad.float(), None
            for optimizer in (given, expected) if step < 2 else ():
                _shrink(optimizer, through_data=step == 0)
            engine.step()
            expected.step()
            for optimizer in (given, expected) if step == 2 else ():
                _shrink(optimizer, through_data=stage == 1)
            if step == 2 and whole_elsewhere:
                break
            with torch.no_grad():
                for param, master in zip(plain.parameters(), masters, strict=True):
                    param.copy_(master)
        if whole_elsewhere:  # the other ranks compute with previous values, and cannot know
            engine.backward(engine(rows[0]).square().mean())
            with pytest.raises(StateError, match=r"optimizer\.param_groups \(unit .*\) after step\(\), and a forward has run"):
                engine.step()
        engine.destroy()


def test_writes_to_the_tensors_of_the_groups(tmp_path: Path) -> None:
    ranks.run_ranks(_writes_to_groups, 2, tmp_path)


def _writes_beside_updates(folder: Path) -> None:
    """Writes to groups and states while updates of the last step still run, or have begun in backward, on the host: as without offload."""
    from hf_zero.ops.host_optimizers import HostAdam

    weights: dict[str, list[torch.Tensor]] = {}
    for name, device, overlap in (("plain", "none", "none"), ("cpu", "cpu", "full"), ("nvme", "nvme", "full")):
        model = _small()
        given = HostAdam(model.parameters(), lr=0.01)
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        zero |= {"offload_optimizer": {"device": device, **({"nvme_path": str(folder)} if device == "nvme" else {})}}
        sections = {**Run(stage=3, dtype="bf16").config(), "zero_optimization": zero, "hf_zero": {"offload_overlap": overlap}}
        sections.pop("optimizer", None)
        engine = hf_zero.initialize(model=model, optimizer=given, config=sections)[0]
        for step in range(6):
            rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + ranks.rank())).to(torch.bfloat16)
            engine.backward(engine(rows).square().mean())
            if step == 1:
                _shrink(given, through_data=False)
            if step == 5:
                _shrink(given, through_data=True)
            engine.step()
            for state in given.state.values() if step in (2, 4) else ():
                state["exp_avg"].mul_(0.5)
                state["exp_avg_sq"] = torch.full_like(state["exp_avg_sq"], 0.25)
            if step == 3:
                _shrink(given, through_data=False)
        weights[name] = [safe_get_full_fp32_param(param).clone() for param in model.parameters()]  # type: ignore[union-attr]
        engine.destroy()
    for name, found in weights.items():
        for value, expected in zip(found, weights["plain"], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")


def test_writes_while_updates_run_on_the_host(tmp_path: Path) -> None:
    ranks.run_ranks(_writes_beside_updates, 2, tmp_path)


def _removed_from_groups() -> None:
    """A list without some tensors, or with some of the model, trained some of them, none or all, depending on the way of the update."""
    for stage, kept in ((0, "biases"), (1, "biases"), (3, "biases"), (1, ""), (3, "")):
        model = _small()
        given = torch.optim.SGD(model.parameters(), lr=0.1)
        sections = {key: value for key, value in Run(stage=stage).config().items() if key != "optimizer"}
        engine = hf_zero.initialize(model=model, optimizer=given, config=sections)[0]
        engine.backward(engine(torch.ones(4, 6)).square().mean())
        engine.step()
        engine.backward(engine(torch.ones(4, 6)).square().mean())
        given.param_groups[0]["params"] = [param for name, param in model.named_parameters() if kept and name.endswith("bias")]
        with pytest.raises(StateError, match=r"removed tensors from lists in optimizer.param_groups"):
            engine.step()
        engine.destroy()


def test_tensors_that_are_removed_from_groups() -> None:
    ranks.run_ranks(_removed_from_groups, 2)
