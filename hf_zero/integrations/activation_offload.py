"""Serve ``offload`` of transformers' ``gradient_checkpointing_kwargs`` (5.17 and later) for the model of an engine.

transformers wraps each checkpointed call in ``torch.autograd.graph.save_on_cpu``, which copies in the stream that computes, and which
fails where there is no accelerator. The inputs are saved before any hook of the layer runs, so the function that a layer checkpoints
with is replaced by one that does the same with the engine's hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_zero.activation_checkpointing.host_activations import HostActivations
from hf_zero.core.engine import Engine

_ATTRIBUTE = "_gradient_checkpointing_func"  # of a layer: what it calls with its forward and its inputs
_OFFLOADING = "_activation_checkpointing_enable.<locals>.checkpoint_func"


def serve_offload(engine: Engine) -> None:
    """Let the layers of the engine's model move their inputs with the engine's hooks, where they are to move them."""
    for module in engine.module.modules():
        function = module.__dict__.get(_ATTRIBUTE)
        if isinstance(function, partial) and getattr(function.func, "__qualname__", "").endswith(_OFFLOADING):
            moving = partial(checkpoint_on_host, engine.runtime.saved.host)
            setattr(module, _ATTRIBUTE, partial(moving, *function.args, **function.keywords))


def checkpoint_on_host(host: HostActivations, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``torch.utils.checkpoint.checkpoint``; what it saves of the inputs waits for backward in the memory of ``host``."""
    host.advance()
    with torch.autograd.graph.saved_tensors_hooks(host.save, host.load):
        return checkpoint(function, *args, **kwargs)
