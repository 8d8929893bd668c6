"""Provide DeepSpeed's two tensor-parallel linear layers, for scripts that put them into a model by hand; the engine does not need them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.topology import axis_over
from hf_zero.core.units.marks import tp_shard_of
from hf_zero.errors import ConfigError
from hf_zero.tensor_parallel.apply import cut_parameter
from hf_zero.tensor_parallel.functions import ModelGroup, Part, copy, gather, reduce
from hf_zero.tensor_parallel.plan import SplitParameter


class _OfKind(type(nn.Module)):  # type: ignore[misc]
    """Metaclass whose ``isinstance`` also accepts a linear layer that the engine has split in the same way, which keeps its own class."""

    def __instancecheck__(cls, instance: object) -> bool:
        if super().__instancecheck__(instance) or not isinstance(instance, nn.Linear):
            return super().__instancecheck__(instance)
        part = tp_shard_of(instance.weight)
        return part is not None and not part.expert and part.dim == getattr(cls, "divided", None)


class _Divided(nn.Linear, metaclass=_OfKind):
    divided: int
    """Dimension along which the weight is divided: 0 for outputs, 1 for inputs."""

    def __init__(self, module: nn.Linear, mp_group: dist.ProcessGroup) -> None:
        nn.Module.__init__(self)
        self.group = ModelGroup(open_collectives(axis_over(mp_group)))
        self.weight, self.bias = module.weight, module.bias
        size = module.weight.shape[self.divided]
        if size % self.group.world:
            side = ("outputs", "inputs")[self.divided]
            raise ConfigError(f"{type(self).__name__}: {size} {side} cannot be divided over {self.group.world} ranks; use a divisor of it")
        width = size // self.group.world
        self.ranges = [[(rank * width, (rank + 1) * width)] for rank in range(self.group.world)]
        for param in (self.weight, self.bias if self.divided == 0 else None):
            if param is not None:
                self._divide(param)
        self.out_features, self.in_features = self.weight.shape

    def _divide(self, param: Any) -> None:
        shape = list(param.shape)
        cut_parameter(param, SplitParameter(shape, self.divided, self.ranges), self.group.rank)
        part = Part(self.divided, self.ranges, shape[self.divided])
        param.tensor_model_parallel = True
        param.gather_params = partial(_join, self.group, part)
        param._tp_partition = partial(_cut, self.group.rank, part)


def _join(group: ModelGroup, part: Part, params: list[torch.Tensor]) -> None:
    """Replace split parameters by complete ones; collective."""
    for param in params:
        param.data = part.join(group.gather(param.detach(), "divided layer"))


def _cut(rank: int, part: Part, params: list[torch.Tensor]) -> None:
    """Replace complete parameters by this rank's part; local."""
    for param in params:
        param.data = part.take(param.detach(), rank).clone(memory_format=torch.contiguous_format)


class LinearLayer(_Divided):
    """A column-parallel linear layer: each rank computes a part of the outputs, from complete inputs.

    Args:
        module: The complete layer, the same on every rank; this layer takes over its parameters.
        mp_group: Ranks that hold the layer together.
        gather_output: Whether every rank gets all outputs.

    Raises:
        ConfigError: The number of outputs is not a multiple of the number of ranks.
    """

    divided = 0

    def __init__(self, module: nn.Linear, mp_group: dist.ProcessGroup, gather_output: bool = False, **_: Any) -> None:
        super().__init__(module, mp_group)
        self.gather_output = gather_output

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs, or all outputs if ``gather_output`` was set."""
        outputs = functional.linear(copy(input, self.group, "divided layer"), self.weight, self.bias)
        part = Part(-1, self.ranges, self.ranges[-1][0][1])
        return gather(outputs, self.group, part, "divided layer") if self.gather_output else outputs


class LinearAllreduce(_Divided):
    """A row-parallel linear layer: each rank has a part of the inputs, and every rank gets the sum of the partial outputs.

    Args:
        module: The complete layer, the same on every rank; this layer takes over its parameters.
        mp_group: Ranks that hold the layer together.

    Raises:
        ConfigError: The number of inputs is not a multiple of the number of ranks.
    """

    divided = 1

    def __init__(self, module: nn.Linear, mp_group: dist.ProcessGroup, **_: Any) -> None:
        super().__init__(module, mp_group)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return all outputs, summed over ranks, from this rank's inputs; collective."""
        outputs = reduce(functional.linear(input, self.weight), self.group, "divided layer")
        return outputs if self.bias is None else outputs + self.bias
