"""Hooks that run a plan's collectives at the boundaries of modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hf_zero.core.schedule.torch_internals import give_number
from hf_zero.core.units.tp_shard import Wholes, mark_whole_reader
from hf_zero.system.trees import convert_inside
from hf_zero.tensor_parallel import functions
from hf_zero.tensor_parallel.call_arguments import argument_names, convert_arguments
from hf_zero.tensor_parallel.functions import ModelGroup, Part
from hf_zero.tensor_parallel.logits import VocabularyLogits
from hf_zero.tensor_parallel.plan import Boundary, SplitParameter, TpPlan
from hf_zero.tensor_parallel.same_data import own_random
from hf_zero.tensor_parallel.solve import COPY, GATHER, GATHER_BOTH, LOGITS, NORM, REDUCE, REDUCE_BOTH, SLICE

_Convert = Callable[[torch.Tensor], torch.Tensor]
_HOOK = -1  # number of these hooks on every module


class BoundaryCollectives:
    """Collectives at the inputs and outputs of one module of a split model.

    Attributes:
        path: Path of the module in the model.
    """

    def __init__(self, module: nn.Module, path: str, plan: TpPlan, group: ModelGroup) -> None:
        self.path = path
        self.group = group
        self._names = argument_names(module)
        self._inputs: dict[str, list[_Convert]] = {}
        self._outputs: dict[str, list[_Convert]] = {}
        self._delays_bias = path in plan.rows and getattr(module, "bias", None) is not None
        self._draws = path in plan.random
        self._bias: list[Any] = []
        self._random: list[Any] = []
        self._masks: list[torch.Tensor] = []
        self._own: dict[str, Part] = {}
        self._running = 0  # number of forwards of the module that are running
        for boundary in plan.borders.get(path, ()):
            self._add(boundary)
        self._only_copies = all(boundary.kind == COPY for boundary in plan.borders.get(path, ()) if boundary.side == "in")
        give_number(module.register_forward_pre_hook(self.before, with_kwargs=True), _HOOK)
        give_number(module.register_forward_hook(self.after, with_kwargs=True, always_call=True), _HOOK)

    def __str__(self) -> str:
        return self.path

    def _add(self, boundary: Boundary) -> None:
        group, label, kind = self.group, self, boundary.kind
        part = Part(boundary.dim, boundary.ranges, boundary.full) if boundary.ranges else None
        inputs = self._inputs.setdefault(boundary.key, []) if boundary.side == "in" else []
        outputs = self._outputs.setdefault(boundary.key, []) if boundary.side == "out" else []
        if kind == COPY:
            inputs.append(lambda tensor: functions.copy(tensor, group, label))
        elif kind in (REDUCE, REDUCE_BOTH):
            outputs.append(lambda tensor: functions.reduce(tensor, group, label, kind == REDUCE_BOTH))
        elif part is None:
            raise ValueError(f"plan: border {kind!r} of {self.path} has no ranges")
        elif kind == SLICE:
            inputs.append(lambda tensor: functions.take(tensor, group, part, label))
        elif kind in (GATHER, GATHER_BOTH):
            outputs.append(lambda tensor: functions.gather(tensor, group, part, label, kind == GATHER_BOTH))
        elif kind == LOGITS:
            outputs.append(lambda tensor: VocabularyLogits(tensor, group, part, self.path))
        elif kind == NORM:
            inputs.append(lambda tensor: functions.gather(tensor, group, part, label, both=True))
            self._outputs.setdefault("", []).append(lambda tensor: functions.take(tensor, group, part, label, partial=True))
        elif kind in ("vocabulary", "vocabulary both"):
            inputs.append(lambda ids: self._local_ids(ids, part))
            self._outputs.setdefault("", []).append(lambda rows: self._sum_rows(rows, kind.endswith("both")))
        else:
            raise ValueError(f"plan: unknown border {kind!r} of {self.path}")

    def _local_ids(self, ids: torch.Tensor, part: Part) -> torch.Tensor:
        start, stop = part.ranges[self.group.rank][0]
        elsewhere = (ids < start) | (ids >= stop)
        self._masks.append(elsewhere)
        return (ids - start).masked_fill(elsewhere, 0)

    def _sum_rows(self, rows: torch.Tensor, both: bool) -> torch.Tensor:
        elsewhere = self._masks.pop()
        return functions.reduce(rows.masked_fill(elsewhere.unsqueeze(-1), 0), self.group, self, both)

    def read_whole(self, module: nn.Module, own: Mapping[str, SplitParameter]) -> None:
        """Give code that reads the parameters ``own`` (names in ``module``) outside the module's forward the whole parameters.

        [Note: whole reads] Losses that never make the logits multiply with ``lm_head.weight`` instead of calling ``lm_head``, often only
        when labels are given, which the trace does not see. All other operands of the product are whole. So the gradient of the weight is
        whole on every rank, and each rank takes its part of it.
        """
        self._own = {name: Part(entry.dim, entry.ranges, entry.shape[entry.dim]) for name, entry in own.items()}
        mark_whole_reader(module, self._whole)

    def _whole(self, name: str, part: torch.Tensor, kept: Wholes) -> torch.Tensor | None:
        if self._running or name not in self._own:
            return None
        key = (id(part), torch.is_grad_enabled())
        if key not in kept:
            kept[key] = whole = functions.gather(part, self.group, self._own[name], f"{self.path}.{name}")
            # Libraries look on the whole parameter, too, for the attributes they have set (such as DeepSpeed's ds_status).
            whole.__dict__.update({known: value for known, value in vars(part).items() if not known.startswith("_")})
        return kept[key]

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Convert arguments, remove a bias that is added after the sum, and give this rank its own random numbers."""
        self._running += 1
        if self._delays_bias:
            bias = module._parameters["bias"]
            self._bias.append(bias)
            # A linear layer runs without a bias; Conv1D's fused product needs one.
            module._parameters["bias"] = None if isinstance(module, nn.Linear) else torch.zeros_like(bias)  # type: ignore[assignment,arg-type]
        if self._draws and module.training:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            self._random.append(own_random(self.group.rank, tensors[0].device if tensors else torch.device("cpu")))
        if not self._inputs:
            return None
        done: dict[tuple[int, int], torch.Tensor] = {}  # one tensor passed as query, key and value is converted once

        def once(tensor: torch.Tensor, work: list[_Convert]) -> torch.Tensor:
            key = (id(tensor), len(work)) if self._only_copies else (len(done), -1)
            if key not in done:
                done[key] = _apply(tensor, work)
            return done[key]

        return convert_arguments(args, kwargs, self._names, self._inputs, once)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Undo the changes of ``before``, and convert results."""
        self._running -= 1
        if self._random:
            self._random.pop()()
        bias = None
        if self._delays_bias:
            bias = self._bias.pop()
            module._parameters["bias"] = bias
        if output is None:
            return None
        for key, work in self._outputs.items():
            output = convert_inside(output, key, work, _apply)
        return output if bias is None else output + bias


def _apply(tensor: torch.Tensor, work: list[_Convert]) -> torch.Tensor:
    for convert in work:
        tensor = convert(tensor)
    return tensor
