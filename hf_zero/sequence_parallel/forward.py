"""Run forwards of a transformers model over slices of sequences: when they are sliced, their inputs and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hf_zero.comm.collectives import Collectives
from hf_zero.core.schedule.torch_internals import call_after_backward
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.sequence_parallel.attention import SlicedAttention
from hf_zero.sequence_parallel.batches import cache_in, is_slice
from hf_zero.sequence_parallel.images import DividedImages
from hf_zero.sequence_parallel.masks import WholeMasks
from hf_zero.sequence_parallel.positions import OwnPositions, WholeRotary, require_even_temperature
from hf_zero.sequence_parallel.sliceable import NO_ROUTERS, ROUTERS, ReplaceAttention, require_sliceable, shifts_slices
from hf_zero.sequence_parallel.whole_inputs import WholeInputs
from hf_zero.sequence_parallel.whole_results import KEPT
from hf_zero.system.trees import tensors_in


class Randomness:
    """[Note: dropout over slices]

    Scripts set one seed on every rank. The ranks of a group would then draw one mask of dropout for all slices of a sequence and for all
    groups of heads. So each rank draws from a stream of its own during the forward, which begins at a number drawn from the common one:
    that goes on alike on all ranks, for whatever the script draws from it, and is what checkpoints hold. Ranks that were seeded
    differently stay so. A forward that draws nothing leaves the common stream as it was: samplers that draw from it give the samples in
    the order of one rank.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._rank = collectives.rank
        self._draws = not collectives.pretended  # a pretended device draws nothing
        self._device = collectives.topology.device
        self._streams: list[_Stream] = []

    def enter(self, training: bool) -> None:
        """Begin the rank's own stream; evaluation draws nothing."""
        if not (training and self._draws):
            return
        host = torch.random
        before = host.get_rng_state()
        seed = int(torch.randint(2**31, ())) * 1024 + self._rank
        self._streams = [_Stream.begin(host.get_rng_state, host.set_rng_state, torch.Generator(), seed, before)]
        if self._device.type != "cpu":
            module = getattr(torch, self._device.type)
            get, put = partial(module.get_rng_state, self._device), partial(module.set_rng_state, device=self._device)
            self._streams.append(_Stream.begin(get, put, torch.Generator(self._device), seed))

    def leave(self) -> None:
        """Continue with the common stream."""
        streams, self._streams = self._streams, []
        drawn = any(stream.has_drawn() for stream in streams)
        for stream in streams:
            stream.put(stream.after if drawn else stream.before)


@dataclass(frozen=True)
class _Stream:
    """One rank's own stream of random numbers on one device, in place of the common one.

    Attributes:
        get: Returns the state of the device's generator.
        put: Sets it.
        before: State of the common stream before the number that the own stream begins at was drawn.
        after: The state after that.
        own: State that the own stream began with.
    """

    get: Callable[[], torch.Tensor]
    put: Callable[[torch.Tensor], None]
    before: torch.Tensor
    after: torch.Tensor
    own: torch.Tensor

    @classmethod
    def begin(
        cls,
        get: Callable[[], torch.Tensor],
        put: Callable[[torch.Tensor], None],
        generator: torch.Generator,
        seed: int,
        before: torch.Tensor | None = None,
    ) -> _Stream:
        """Put the stream of ``generator`` with ``seed`` in the place of the common one; ``before``: the latter's state, if it has moved."""
        after, own = get(), generator.manual_seed(seed).get_state()
        put(own)
        return cls(get, put, after if before is None else before, after, own)

    def has_drawn(self) -> bool:
        """Return whether a number was drawn from the own stream."""
        return not torch.equal(self.get(), self.own)


@dataclass(frozen=True)
class SliceSettings:
    """Settings of a script for its slices.

    Attributes:
        implementation: Attention implementation of transformers; None takes the model's.
        whole_in_eval: Forwards in evaluation mode are over whole sequences, unless the tokens come from an adapter.
        length: Tokens of every whole sequence; None where they vary.
        prepare: Replaces ``implementation``'s attention function by the one that exchanges heads.
        replace_attention: Returns a context in which another function stands there.
    """

    implementation: str | None
    whole_in_eval: bool
    length: int | None
    prepare: Callable[[str], None]
    replace_attention: ReplaceAttention


_bound: WeakKeyDictionary[nn.Module, BoundForwards] = WeakKeyDictionary()


class BoundForwards:
    """Hooks around the forward of one model, which has no others of this kind. On a copy of the model they do nothing.

    [Note: forward of a backward] Activation checkpointing calls layers again in backward. Other forwards of the model may have come since,
    in evaluation mode over whole sequences, or over sequences of another length; and the model's mode may have changed. autograd runs
    through later forwards first, and enters each one at its outputs: hooks there say which forward it is whose layers are called again.

    Attributes:
        settings: Settings of the script.
        attention: State of the model's attention modules.
    """

    attention: SlicedAttention

    def __init__(self, settings: SliceSettings) -> None:
        self.settings = settings
        self._open = False
        self._hooks: list[RemovableHandle] = []

    def bind(self, model: nn.Module) -> None:
        """Register hooks around the forward of ``model``; earlier ones of it or of a model inside it are removed."""
        for part in model.modules():  # prepared again, or inside an adapter since
            before = _bound.pop(part, None)
            if before is not None:
                before.remove()
        _bound[model] = self
        self._hooks.append(model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
        self._hooks.append(model.register_forward_hook(self._leave, always_call=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundForwards:
        return self  # its groups cannot be copied

    def remove(self) -> None:
        """Take the hooks off; the model sees whole sequences again."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if _bound.get(model) is not self:
            return None
        changed = self._before(model, args, kwargs)
        self.attention.outside = False
        return changed

    def _leave(self, model: nn.Module, args: Any, output: Any) -> Any:
        if _bound.get(model) is not self:
            return None
        self.attention.outside = True
        changed = self._after(model, args, output)
        self._announce(output if changed is None else changed, self.attention.sliced)
        return changed

    def _announce(self, output: Any, sliced: bool) -> None:
        """Let backward say when it enters the forward of ``output``; see [Note: forward of a backward]."""
        for _, tensor in tensors_in(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._begin_backward, sliced, self.attention.length))

    def _begin_backward(self, sliced: bool, length: int, _gradient: torch.Tensor) -> None:
        if self.attention.outside:
            call_after_backward(partial(self._end_backward, self.attention.sliced))
        self.attention.outside, self.attention.sliced, self.attention.length = False, sliced, length

    def _end_backward(self, sliced: bool) -> None:
        self.attention.outside, self.attention.sliced = True, sliced

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        raise NotImplementedError

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        raise NotImplementedError


class SlicedForwards(BoundForwards):
    """Hooks around the forward of one model, whose batches are slices.

    Attributes:
        collectives: The sequence-parallel group.
    """

    def __init__(self, model: nn.Module, collectives: Collectives, settings: SliceSettings) -> None:
        super().__init__(settings)
        implementation, flow = require_sliceable(model, collectives.world, settings.implementation, settings.replace_attention)
        self.collectives = collectives
        self.implementation = implementation
        settings.prepare(implementation)
        self.attention = SlicedAttention(model, collectives, implementation not in ("sdpa", "eager"), None if flow is None else flow.heads)
        self._whole = WholeInputs(model, self.attention, flow) if flow is not None else None
        self._images = DividedImages(model, self.attention)
        self._masks = WholeMasks(model, collectives)
        self._positions = OwnPositions(model, collectives)
        self._rotary = WholeRotary(model, self.attention) if flow is None else None
        self._randomness = Randomness(collectives)
        self._compared = False
        self.bind(model)

    def remove(self) -> None:
        """Take the hooks off; the model sees whole sequences again."""
        super().remove()
        for further in (self._rotary, self._whole, self._images):
            if further is not None:
                further.remove()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        attention, settings = self.attention, self.settings
        whole = settings.whole_in_eval or cache_in(kwargs) is not None
        attention.sliced = model.training or not whole or is_slice(args, kwargs)
        if not attention.sliced:
            return None
        if self._whole is not None:
            return self._with_whole_inputs(self._whole, model, args, kwargs)
        length = self._require_positions(kwargs)
        self._refuse_requests(model, kwargs)
        require_even_temperature(model, length * self.collectives.world)
        if not self._compared:
            self._compare(args, kwargs)
        kwargs = {**kwargs, "position_ids": self._positions.of(args, kwargs)}
        attention.called = False
        self._masks.enter(length)
        self._randomness.enter(model.training)
        self._open = True
        return args, kwargs

    def _with_whole_inputs(self, whole: WholeInputs, model: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Begin a forward as [Note: cut layers] has it."""
        self._refuse_requests(model, kwargs)
        if not self._compared:
            self._compare(args, kwargs)
        args, kwargs = whole.enter(args, kwargs)
        self._require_length(whole.layers.length)
        self._randomness.enter(model.training)
        self._open = True
        return args, kwargs

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        if not self._open:
            return None
        self._open = False
        if self._whole is not None:
            self._randomness.leave()
            return self._whole.leave(output)
        self._masks.leave()
        self._randomness.leave()
        if output is not None and not self.attention.called:
            raise UnsupportedError(
                f"sequence parallelism: {type(model).__name__} did not call its attention through transformers' attention interface "
                f"({self.implementation}), so each rank attended to its slice only; this model is not supported with this version of "
                "transformers"
            )
        return None

    def _require_positions(self, kwargs: dict[str, Any]) -> int:
        """Return the number of tokens of the slice.

        Raises:
            StateError: The forward has no positions: each rank would begin to count at 0.
            ConfigError: The sequence is not as long as the script has said.
        """
        positions = kwargs.get("position_ids")
        if positions is None:
            raise StateError(
                "sequence parallelism: the forward got no position_ids, so every rank would count its slice from 0. Iterate over "
                "UlyssesSPDataLoaderAdapter (accelerate adds it to loaders that one call of prepare gets together with the model), or pass "
                "the slice of torch.arange(length) yourself; for a forward over whole sequences call model.eval() and register with "
                "disable_in_eval=True"
            )
        length = int(positions.shape[-1])
        self._require_length(length * self.collectives.world)
        return length

    @staticmethod
    def _refuse_requests(model: nn.Module, kwargs: dict[str, Any]) -> None:
        if kwargs.get("output_attentions"):
            raise UnsupportedError("sequence parallelism: output_attentions=True is not supported, no rank has all heads of its tokens")
        if kwargs.get(ROUTERS, getattr(model.config, ROUTERS, False)):
            raise UnsupportedError(NO_ROUTERS)
        if shifts_slices(model, kwargs):
            raise UnsupportedError(
                f"sequence parallelism: the forward of {type(model).__name__} is its own, got labels, and reads no shift_labels: it would "
                "shift labels inside each slice, which were shifted before. Compute its loss with shift_labels, or pass **kwargs of the "
                "forward to self.loss_function, or use context parallelism (hf_zero.context_parallel_size), which gives it whole sequences"
            )
        for name in KEPT:
            if isinstance(kwargs.get(name), torch.Tensor) or kwargs.get(name):
                raise UnsupportedError(
                    f"sequence parallelism: {name}={kwargs[name]} would choose tokens of each rank's slice, not of the sequence. Leave it "
                    "out, and choose from the logits of the slice"
                )

    def _require_length(self, whole: int) -> None:
        if self.settings.length is not None and whole != self.settings.length:
            raise ConfigError(
                f"sequence parallelism: sequences have {whole} tokens, seq_length says {self.settings.length}; "
                "set seq_length_is_variable (sp_seq_length_is_variable) to True, or bring all batches to that length"
            )

    def _compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse slices that are not of one batch, once: equal names and shapes on all ranks of the group; collective."""
        self._compared = True
        mine = {name: list(value.shape) for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        mine.update({f"argument {place}": list(value.shape) for place, value in enumerate(args) if isinstance(value, torch.Tensor)})
        everyone = self.collectives.gather_objects(mine, "slices")
        if any(other != everyone[0] for other in everyone):
            raise StateError(
                "sequence parallelism: the ranks of a group were given different arguments in the first forward, but must hold slices of "
                "the same batch: " + "; ".join(f"rank {rank} of the group {shapes}" for rank, shapes in enumerate(everyone))
            )


def is_bound(model: nn.Module, settings: SliceSettings) -> bool:
    """Return whether the forwards of ``model`` are over parts of sequences already, as ``settings`` say."""
    return model in _bound and _bound[model].settings is settings


def bound_forwards(model: nn.Module) -> BoundForwards | None:
    """Return the hooks around the forwards of ``model``; None if it has none."""
    return _bound.get(model)
