"""Models that were loaded with the layers of this rank's stages alone, until an engine divides them.

[Note: held stages] The reader of a checkpoint finds the cuts from the model without values, before an engine and its groups exist. A
parameter of another stage becomes a placeholder: its shape, and one NaN in place of all values. The modules themselves record which calls
begin a stage, because the engine may get the model inside another one (an adapter, a class of the script), or a copy of it. The engine's
plan then begins the stages with the same calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.core.units.guards import called_before_engine, guard, release
from hf_zero.core.units.marks import TpShard, mark_tp_shard, unmark_tp_shard
from hf_zero.pipeline.plan import PipelinePlan
from hf_zero.pipeline.templates import placeholder

_NOTE = "_hf_zero_held_stages"  # attribute of a module


@dataclass
class _Note:
    """Record on one module: the stages that begin with a call of it (stage, number of the call), and its parameters of other stages."""

    begins: tuple[tuple[int, int], ...] = ()
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True)
class Held:
    """The layers of a model that one rank has loaded.

    Attributes:
        starts: Path and number of the call that begins each stage except the first.
        missing: Names of parameters without values here.
    """

    starts: tuple[tuple[str, int], ...]
    missing: frozenset[str]


def make_room(model: nn.Module, names: Mapping[str, torch.dtype]) -> None:
    """Replace the parameters ``names`` of ``model`` by placeholders of the given types; local."""
    for name, dtype in names.items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        param = owner.get_parameter(leaf)
        empty = placeholder(torch.empty(param.shape, dtype=dtype, device="meta"), torch.device("cpu"))
        owner._parameters[leaf] = room = nn.Parameter(empty, param.requires_grad)
        room._is_hf_initialized = True  # type: ignore[attr-defined]  # there is nothing to give values to


def hold(model: nn.Module, plan: PipelinePlan, names: Iterable[str]) -> None:
    """Record on ``model``, loaded for ``plan``, that other stages hold the parameters ``names``; refuse its calls until an engine
    exists.
    """
    for stage in range(1, plan.stages):
        first = plan.calls[plan.span(stage).start]
        note = _note(model.get_submodule(first.path))
        note.begins = (*note.begins, (stage, first.nth))
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        note = _note(owner)
        note.elsewhere = (*note.elsewhere, leaf)
        guard(owner, _refuse)
        param = owner.get_parameter(leaf)
        mark_tp_shard(param, TpShard(param.shape, 0, (), elsewhere=True))


def is_held(model: nn.Module) -> bool:
    """Return whether ``model`` was loaded by stages and no engine has divided it yet."""
    return any(_NOTE in module.__dict__ for module in model.modules())


def clear_held(model: nn.Module) -> Held | None:
    """Remove records, marks and guards from ``model``, which an engine now owns. Return None where it was loaded whole."""
    starts: list[tuple[int, str, int]] = []
    missing: set[str] = set()
    for path, module in model.named_modules():
        note = module.__dict__.pop(_NOTE, None)
        if note is None:
            continue
        starts += [(stage, path, nth) for stage, nth in note.begins]
        for leaf in note.elsewhere:
            missing.add(f"{path}.{leaf}".lstrip("."))
            unmark_tp_shard(module.get_parameter(leaf))
        release(module, _refuse)
    return Held(tuple((path, nth) for _, path, nth in sorted(starts)), frozenset(missing)) if starts else None


def _note(module: nn.Module) -> _Note:
    found: _Note = module.__dict__.setdefault(_NOTE, _Note())
    return found


def _refuse(module: nn.Module, *_: Any) -> None:
    """Refuse a call, as the forward pre-hook of a module whose parameters are on other stages.

    Raises:
        StateError: Always.
    """
    raise called_before_engine(module, "the layers of its own stage of the pipeline")
