"""``generate()`` of a model whose layers are divided over stages: each rank gets the layers of all other stages for the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.core.generation import WrappedGenerate
from hf_zero.core.units.marks import is_elsewhere, own_shape
from hf_zero.observe import warn_once
from hf_zero.pipeline.buffers import share_buffers
from hf_zero.pipeline.forward import PipelinedForward
from hf_zero.system.sizes import size_text


class WholeGeneration(WrappedGenerate):
    """Wrapper of the ``generate`` methods inside a divided module.

    [Note: generation in a pipeline] A token passes all stages before the next one can begin, so a pipeline would leave all but one of
    its ranks waiting. The whole model on each rank generates as fast as that rank can, with keys and values kept; it takes the memory
    of the other stages' parameters during the call.

    Args:
        forward: The pipeline that replaces the module's forward.
        module: The user's module.
        pipe: The ranks of the pipeline.
        synced: Ranks hold experts for each other and so run their forwards together.
    """

    def __init__(self, forward: PipelinedForward, module: nn.Module, pipe: Collectives, synced: bool = False) -> None:
        super().__init__()
        self.synced = synced
        self._forward = forward
        self._module = module
        self._pipe = pipe
        self._here = False

    def run(self, module: nn.Module, generate: Callable[[], Any]) -> Any:
        """Call ``generate``, which runs ``module``, with all layers on every rank; collective over the pipeline."""
        if self._here:
            return generate()
        with self.whole():
            return generate()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Give every rank the parameters of all stages inside the context; collective over the pipeline. Changes to parameters of other
        stages are lost.
        """
        brought = self._bring()
        share_buffers(self._module)
        self._here = self._forward.whole = True
        try:
            yield
        finally:
            self._here = self._forward.whole = False
            for param, empty in brought:
                param.data = empty

    def _bring(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Fill the parameters of other stages; return them with their former values."""
        params = [(name, param) for name, param in self._module.named_parameters() if param.dim() > 0]
        own = {name: tuple(own_shape(param)) for name, param in params if not is_elsewhere(param)}
        held = self._pipe.gather_objects(own, "parameters of each stage")
        brought, numel = [], 0
        for name, param in params:
            source = next(rank for rank, shapes in enumerate(held) if name in shapes)
            if all(name in shapes for shapes in held):
                continue
            mine = name in own
            value = param.data.contiguous() if mine else param.data.new_empty(held[source][name])
            if value.numel():  # an expert that another rank holds has no values
                self._pipe.broadcast(value.view(-1), source, name)
            if not mine:
                brought.append((param, param.data))
                param.data, numel = value, numel + value.nbytes
        size = size_text(numel, ".0f", "MiB")
        warn_once(f"generate() over a pipeline brings the layers of the other stages to each rank for the call: {size} here")
        return brought
