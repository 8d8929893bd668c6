"""What differentiates through the model: a backward that hands gradients to parameters, one for inputs alone, or torch.func."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch


def transforming() -> bool:
    """Whether a transform of torch.func (``grad``, ``jacrev``, ``vmap``, ...) runs now."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> AbstractContextManager[None]:
    """A context in which tensors are plain ones: inside a transform every new tensor is a wrapper without memory of its own."""
    return torch._C._DisableFuncTorch() if transforming() else nullcontext()


def reaches(params: Iterable[torch.Tensor]) -> bool:
    """Whether the backward that runs adds to ``param.grad`` of any of ``params``; for hooks of tensors in the graph.

    It does not in ``torch.autograd.grad``, whatever that asks for, nor in a transform of torch.func, nor where the graph has none
    of them. Parameters inside a module under reentrant checkpointing are not part of the graph yet.
    """
    return not transforming() and any(_accumulates(param) for param in params if param.requires_grad)


def _accumulates(param: torch.Tensor) -> bool:
    node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad with respect to this parameter: it goes to the caller
        return False
