"""All stages of a pipeline in one process, one after the other: what a plan says is enough, or a number is NaN."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.pipeline.own_stages import OwnStages, Run
from hf_zero.pipeline.partition import replan
from hf_zero.pipeline.plan import PipelinePlan, Placement
from hf_zero.pipeline.templates import Templates
from hf_zero.tensor_parallel.skeleton import skeleton

SEED = 3  # of every forward: some models draw numbers without dropout


@dataclass
class Outcome:
    """Of a forward and backward. Gradients are summed over the stages that hold a parameter; None where no stage has one."""

    loss: Tensor
    grads: dict[str, Tensor | None]


def run_plain(model: nn.Module, call: Mapping[str, Any]) -> Outcome:
    """The model as it is."""
    torch.manual_seed(SEED)
    loss = model(**copy.deepcopy(dict(call))).loss
    loss.backward()
    return Outcome(loss.detach(), {name: param.grad for name, param in model.named_parameters()})


def run_stages(model: nn.Module, plan: PipelinePlan, call: Mapping[str, Any]) -> Outcome:
    """Each stage with a copy of the model, in which parameters that it does not hold are NaN."""
    paths = list(dict.fromkeys(item.path for item in plan.calls))
    whole = skeleton(model)
    replan(whole, plan, call)  # as an engine does for each kind of call: some models change their modules for it
    templates = Templates(whole)
    placement = Placement(plan.stages, plan.stages)
    stages = []
    for index in range(plan.stages):
        part = copy.deepcopy(model)
        for name, param in part.named_parameters():
            if index not in plan.holders[name]:
                param.data = torch.full_like(param, float("nan")) if param.is_floating_point() else torch.zeros_like(param)
        stages.append(OwnStages(part, placement, index, paths, (), templates, torch.device("cpu")))
    runs = _forward(stages, plan, call)
    loss = runs[-1].result.loss
    _backward(runs, loss)
    return Outcome(loss.detach(), _summed(stages, plan))


def _forward(stages: Sequence[OwnStages], plan: PipelinePlan, call: Mapping[str, Any]) -> list[Run]:
    runs: list[Run] = []
    for stage in stages:
        sent = iter(runs[-1].sent if runs else [])

        def receive(metas: Sequence[Tensor], sent: Any = sent) -> list[Tensor]:
            found = []
            for meta in metas:
                tensor = next(sent).detach().clone()
                assert (tensor.shape, tensor.dtype) == (meta.shape, meta.dtype), f"{tensor.shape} arrives where {meta.shape} is expected"
                found.append(tensor.requires_grad_(tensor.is_floating_point()))
            return found

        torch.manual_seed(SEED)
        runs.append(stage.run(plan, stage.rank, receive, stage.model.forward, copy.deepcopy(dict(call))))
        assert next(sent, None) is None, "something was sent that nobody took"
    return runs


def _backward(runs: Sequence[Run], loss: Tensor) -> None:
    ends, grads = [loss], [torch.ones_like(loss)]
    for run in reversed(runs):
        pairs = [(end, grad) for end, grad in zip(ends, grads, strict=True) if end.requires_grad and grad is not None]
        if pairs:
            torch.autograd.backward([end for end, _ in pairs], [grad for _, grad in pairs])
        grads = [tensor.grad for tensor in run.received]
        ends = runs[runs.index(run) - 1].sent if run is not runs[0] else []


def _summed(stages: Sequence[OwnStages], plan: PipelinePlan) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for stage in stages:
        for name, param in stage.model.named_parameters():
            assert stage.rank in plan.holders[name] or param.grad is None, f"{name} has a gradient on stage {stage.rank}"
            if param.grad is not None:
                before = found.get(name)
                found[name] = param.grad if before is None else before + param.grad
            else:
                found.setdefault(name, None)
    return found
