"""Recompute a function in backward instead of keeping its activations: ``checkpoint(function, *args)``.

``torch.utils.checkpoint`` (not reentrant) recomputes. It saves the inputs through torch's saved-tensor hooks; hooks of this module move
them to the host or divide them over ranks. It also takes one context for forward and one for recomputation; contexts of this module restore
the named random states, synchronise the device and measure the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import Parameter

from hf_zero.activation_checkpointing.host_activations import HostActivations
from hf_zero.activation_checkpointing.random_states import random_states
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.process_groups import default_device
from hf_zero.config.schema.storage import ActivationCheckpointing
from hf_zero.observe import log_rank0, span


@dataclass
class SavedPart:
    """One rank's part of a saved input: shape and number of elements of the input, and the padded part (or its copy on the host)."""

    shape: torch.Size
    numel: int
    part: Any  # Tensor, or the result of HostActivations.save


def is_saved_unchanged(tensor: Tensor) -> bool:
    """Return whether an input is saved unchanged: parameters stay in memory anyway; integers and single numbers are too small."""
    return isinstance(tensor, Parameter) or not tensor.is_floating_point() or tensor.numel() < 2


class DividedInputs:
    """A pair of saved-tensor hooks that keeps this rank's part of each input; ranks of the axis have equal inputs, gathered in backward.

    Args:
        collectives: Collectives of the model axis.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def save(self, tensor: Tensor) -> Any:
        """Return the tensor itself if ``is_saved_unchanged``, else a ``SavedPart`` with a copy of this rank's part."""
        if is_saved_unchanged(tensor) or tensor.numel() < self.collectives.world:
            return tensor
        world, rank = self.collectives.world, self.collectives.rank
        length = -(-tensor.numel() // world)
        own = tensor.detach().reshape(-1)[rank * length : (rank + 1) * length]
        part = own.new_zeros(length)  # memory of its own: a view would keep the whole
        part[: own.numel()] = own
        return SavedPart(tensor.shape, tensor.numel(), part)

    def load(self, saved: Any) -> Tensor:
        """Return the whole input; collective over the axis."""
        if not isinstance(saved, SavedPart):
            whole: Tensor = saved
            return whole
        full = saved.part.new_empty(saved.part.numel() * self.collectives.world)
        self.collectives.all_gather(full, saved.part, "saved activation").wait()
        return full[: saved.numel].view(saved.shape)


class _Checkpointing:
    """Checkpointing settings of this process, and the hooks that save inputs accordingly."""

    def __init__(self, settings: ActivationCheckpointing, collectives: Collectives | None) -> None:
        self.settings = settings
        self.host = HostActivations() if settings.cpu_checkpointing else None
        axis = collectives if settings.partition_activations and collectives is not None and collectives.world > 1 else None
        self.divided = DividedInputs(axis) if axis is not None else None

    @property
    def moves_inputs(self) -> bool:
        return self.host is not None or self.divided is not None

    def save(self, tensor: torch.Tensor) -> Any:
        saved: Any = self.divided.save(tensor) if self.divided is not None else tensor
        if self.host is None:
            return saved
        if isinstance(saved, SavedPart):
            saved.part = self.host.save(saved.part)
            return saved
        return self.host.save(saved)

    def load(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, SavedPart) and self.divided is not None:
            if self.host is not None:
                saved = SavedPart(saved.shape, saved.numel, self.host.load(saved.part))
            return self.divided.load(saved)
        tensor: torch.Tensor = self.host.load(saved) if self.host is not None else saved
        return tensor


_present = _Checkpointing(ActivationCheckpointing(), None)
_configured = False
_by_script = False


def configure(settings: ActivationCheckpointing, collectives: Collectives | None = None, *, by_script: bool = True) -> None:
    """Set how ``checkpoint`` saves inputs from now on; calls that are already checkpointed keep their settings.

    Args:
        settings: The section ``activation_checkpointing`` of the configuration.
        collectives: The model axis over which ``partition_activations`` divides inputs; None or one rank divides nothing.
        by_script: Whether a script calls. An engine passes False, which does not replace settings of a script.
    """
    global _present, _configured, _by_script
    if by_script or not _by_script:
        _present, _configured, _by_script = _Checkpointing(settings, collectives), True, by_script


def is_configured() -> bool:
    """Return whether ``configure`` was called, by a script or by an engine with an ``activation_checkpointing`` section."""
    return _configured


def reset() -> None:
    """Free the device memory of inputs that are being copied to the host; for iterations that do not run backward."""
    if _present.host is not None:
        _present.host.forget()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)``, and recompute it in backward with bitwise the same result.

    Recomputation draws the same random numbers, from the default generators and from the named states (``random_states``).
    """
    here = _present
    contexts = _Contexts(here.settings, getattr(function, "__qualname__", type(function).__name__))
    with ExitStack() as stack:
        if here.host is not None:
            here.host.advance()
        if here.moves_inputs:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(here.save, here.load))
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def checkpoint_on_host(host: HostActivations, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``torch.utils.checkpoint.checkpoint``; ``host`` keeps the inputs that it saves in host memory until backward."""
    host.advance()
    with torch.autograd.graph.saved_tensors_hooks(host.save, host.load):
        return torch.utils.checkpoint.checkpoint(function, *args, **kwargs)


class _Contexts:
    """Factory of the two contexts of one checkpointed call: for forward and for recomputation."""

    def __init__(self, settings: ActivationCheckpointing, name: str) -> None:
        self.settings = settings
        self.name = name
        self.states = random_states().get_states()

    def __call__(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return self._observed("forward"), self._recomputation()

    @contextmanager
    def _recomputation(self) -> Iterator[None]:
        states = random_states()
        now = states.get_states()
        states.set_states(self.states)
        try:
            with self._observed("recompute"):
                yield
        finally:
            states.set_states(now)

    @contextmanager
    def _observed(self, phase: str) -> Iterator[None]:
        settings = self.settings
        if settings.synchronize_checkpoint_boundary or settings.profile:
            _synchronize()
        start = time.perf_counter()
        try:
            with span(f"checkpoint_{phase}", self.name):
                yield
        finally:
            if settings.synchronize_checkpoint_boundary or settings.profile:
                _synchronize()
            if settings.profile:
                log_rank0("checkpointed %s: %s took %.3f ms", self.name, phase, 1e3 * (time.perf_counter() - start))


def _synchronize() -> None:
    device = default_device()
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
