"""Check that the ranks that hold one model have the same samples, in the first training step, and the same random numbers, in each step.

Also give such ranks random streams of their own where they compute different parts.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import StateError
from hf_zero.system.trees import named_arguments

TENSOR_GROUP_TEXT: Final = "Data inconsistency within the TP group. Please check the Dataloader implementation to ensure consistency."


class SameData:
    """Check, once, that the ranks of a group get the same arguments of the model; also make their random states equal.

    Seeds that a script sets per rank after the model was split, and states restored from a checkpoint of other groups, would give the ranks
    of a group different dropout masks for tensors that all of them hold.

    Attributes:
        collectives: The group.
        tensor_only: The ranks of the group divide layers only, not stages of a pipeline. Then the error has DeepSpeed's text for this
            case, which scripts compare; the ranks and the argument are in a note below it.
    """

    def __init__(self, module: nn.Module, collectives: Collectives, tensor_only: bool = False) -> None:
        self.collectives = collectives
        self.tensor_only = tensor_only
        self._handle: Any = module.register_forward_pre_hook(self.look, with_kwargs=True, prepend=True)

    def look(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Check the arguments of a training call of ``module``, once, before it runs.

        Raises:
            StateError: Arguments differ between ranks.
        """
        if self.collectives.pretended or not (module.training and torch.is_grad_enabled()):
            return
        self._handle.remove()
        mine = {name: checksum(tensor) for name, tensor in named_arguments(module, args, kwargs)}
        gathered = self.collectives.gather_objects((mine, random_state(self.collectives.topology.device)), "same data")
        everyone = [data for data, _ in gathered]
        if len({state for _, state in gathered}) > 1:
            equal_random_state(self.collectives)
        if all(other == everyone[0] for other in everyone):
            return
        shared = [name for name in mine if all(name in other for other in everyone)]
        name = next((name for name in shared if len({other[name] for other in everyone}) > 1), "")
        groups: dict[Any, list[int]] = defaultdict(list)
        for rank, other in zip(self.collectives.topology.ranks, everyone, strict=True):
            groups[other.get(name) if name else tuple(other)].append(rank)
        sides = " and ".join(f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}" for ranks in groups.values())
        raise self._error(
            f"{sides} were given different {name or 'arguments'} in the first step, but they hold one model together (tensor_parallel."
            "autotp_size, pipeline.stages) and must see the same samples. Give the data loader one sampler per model: num_replicas = "
            f"ranks / {self.collectives.world}, rank = (global rank % (ranks / pipeline.stages)) // tensor_parallel.autotp_size"
        )

    def _error(self, details: str) -> StateError:
        """Return the error to raise; ``details`` are a Python note, printed below the text, because scripts compare the text."""
        if not self.tensor_only:
            return StateError(details)
        error = StateError(TENSOR_GROUP_TEXT)
        if not hasattr(error, "add_note"):  # Python 3.10
            return StateError(f"{TENSOR_GROUP_TEXT} {details}")
        error.add_note(details)
        return error


class SameDraws:
    """Comparison of the random numbers that the ranks of a model axis draw in the forwards of a step.

    A script may seed its ranks differently after the first step, or draw numbers on one rank only. Then each rank of a group would drop
    other elements of the tensors that all of them hold, and train other copies of their weights, without a word. So each rank computes a
    checksum of its random state before each forward that may train, and the ranks compare the checksums when they vote on a step.

    Args:
        module: The model.
        collectives: The group.
    """

    def __init__(self, module: nn.Module, collectives: Collectives) -> None:
        self._module, self._collectives = module, collectives
        self._number, self._before, self.drew = 0, -1, False

    def look(self, begins: bool) -> None:
        """Record the random state at the beginning or the end of a forward of the model; local."""
        if self._collectives.pretended or not torch.is_grad_enabled():
            return
        if begins and any(True for _ in _waiting(self._module)):  # makes the states equal
            self._before = -1
            return
        state = random_state(self._collectives.topology.device)
        if begins:
            self._number, self._before = zlib.crc32(state.to_bytes(4, "big"), self._number), state
        else:
            self.drew |= self._before not in (-1, state)

    def require_same(self, drawn: bool, everyone: Collectives) -> None:
        """Raise if forwards since the last call had different random states on the ranks of a group; makes these states equal. Collective
        if ``drawn``.

        Args:
            drawn: Whether one of the ranks has drawn random numbers in these forwards; the same on all ranks.
            everyone: Network of all ranks of the engine.

        Raises:
            StateError: On all ranks.
        """
        number, self._number, self.drew = self._number & 0xFFFFFF, 0, False  # a vote has 24 bits
        if not drawn or self._collectives.pretended:
            return
        most, least = self._collectives.largest_of([number, -number], "random states")
        differs = most != -least
        if differs:
            equal_random_state(self._collectives)
        if not everyone.any_rank(differs, "random states"):
            return
        groups: list[tuple[int, ...]] = everyone.gather_objects(self._collectives.topology.ranks if differs else (), "random states")
        ranks = ", ".join(map(str, next(filter(None, groups))))
        raise StateError(
            f"the ranks {ranks}, which hold layers together (tensor_parallel.autotp_size), had different random states in a forward of "
            "this step, which drew random numbers (dropout), so they would train different models. Give the ranks of a group the same seed "
            "(global rank // autotp_size may be a part of it, the global rank may not), and draw numbers on all of them alike. Their "
            "states are equal again now"
        )


def random_state(device: torch.device) -> int:
    """Return a checksum of the states of the random generators of the host and of ``device``, 32 bits."""
    found = zlib.crc32(torch.get_rng_state().numpy().tobytes())
    if device.type != "cpu":
        found = zlib.crc32(getattr(torch, device.type).get_rng_state(device).cpu().numpy().tobytes(), found)
    return found


def _waiting(module: nn.Module) -> Iterator[SameData]:
    """Yield the checks of the next training forward of ``module``."""
    for hook in list(module._forward_pre_hooks.values()):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, SameData):
            yield owner


def look(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of a call of ``module`` for a schedule that calls only its parts; collective the first time."""
    for check in _waiting(module):
        check.look(module, (), kwargs)


def equal_random_state(collectives: Collectives) -> None:
    """Give the ranks of the group the random state of its first rank, so that dropout outside split tensors is equal; collective."""
    if collectives.pretended:
        return
    state = torch.get_rng_state()
    device = collectives.topology.device
    shared = state.to(device)
    collectives.broadcast(shared, 0, "random state")
    torch.set_rng_state(shared.cpu())
    if device.type != "cpu":
        module = getattr(torch, device.type)
        shared = module.get_rng_state(device).to(device)
        collectives.broadcast(shared, 0, "random state")
        module.set_rng_state(shared.cpu(), device)


def checksum(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the shape, the sum, and the sum weighted by position."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return (*tensor.shape,)
    values = flat.double() if flat.is_floating_point() or flat.dtype == torch.bool else flat.long()
    weights = torch.arange(1, flat.numel() + 1, device=flat.device).to(values.dtype) % 1009
    return (*tensor.shape, float(values.sum()), float((values * weights).sum()))


def own_random(rank: int, device: torch.device) -> Callable[[], None]:
    """Give this rank a random stream of its own until the returned function is called.

    [Note: random numbers in split modules] The seed is drawn from the common stream: every rank draws the same number, so the common stream
    stays equal on all ranks. Activation checkpointing restores that stream before it recomputes, so recomputation draws the same masks.

    Args:
        rank: Position among the ranks of the model axis.
        device: Device on which random numbers will be drawn.
    """
    seed = int(torch.randint(2**62, (), dtype=torch.long)) + rank + 1
    if device.type == "cpu":
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        return lambda: torch.set_rng_state(state)
    module = getattr(torch, device.type)
    device_state = module.get_rng_state(device)
    module.manual_seed(seed)
    return lambda: module.set_rng_state(device_state, device)
