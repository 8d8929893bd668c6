"""Forwards of a transformers model over parts of sequences under context parallelism: whole batches go in, and their loss comes out.

[Note: whole batches] The ranks of a group are given the same whole batch. A hook cuts it ([Note: head and tail]), with labels that were
shifted before; the loss that the model returns is that of whole sequences on every rank, and without labels its outputs per token are
whole again. So a script computes as on one rank. Where the caller has cut the batch itself (``sliced_step``: accelerate's
``maybe_context_parallel`` and Trainer) outputs stay parts, and so does a loss over ``num_items_in_batch``. In evaluation mode sequences
stay whole.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from hf_zero.comm.collectives import Collectives
from hf_zero.errors import ConfigError, HfZeroError, StateError, UnsupportedError
from hf_zero.observe import warn_once
from hf_zero.sequence_parallel.attention import sliced_attention
from hf_zero.sequence_parallel.batches import IGNORED, LABELS, Batch, counted_by_adapter, is_medium, is_slice, mark_slice, whole_batch
from hf_zero.sequence_parallel.forward import BoundForwards, Randomness, SliceSettings, bound_forwards
from hf_zero.sequence_parallel.gathered import ContextAttention
from hf_zero.sequence_parallel.joining import Layout, given_to_all, join_loss, join_tokens
from hf_zero.sequence_parallel.masks import RowMasks
from hf_zero.sequence_parallel.positions import OwnPositions, WholeRotary, require_even_temperature
from hf_zero.sequence_parallel.ring import RingAttention, require_ring
from hf_zero.sequence_parallel.sliceable import (
    NO_ROUTERS,
    ROUTERS,
    has_own_forward,
    require_dividable,
    sees_later_tokens,
    shifts_labels,
)
from hf_zero.sequence_parallel.whole_results import WholeLoss, keep_tokens, tokens_to_keep, whole_loss_of, without_labels

_PER_TOKEN = ("logits", "last_hidden_state", "hidden_states")  # outputs (batch, tokens, ...), or tuples of such
_cut_by_caller: ContextVar[tuple[int, ...]] = ContextVar("hf_zero cut sequences", default=())


@contextmanager
def sliced_step(*tokens: int) -> Iterator[None]:
    """Say for a while that batches of so many tokens are this rank's parts of sequences."""
    token = _cut_by_caller.set((*_cut_by_caller.get(), *tokens))
    try:
        yield
    finally:
        _cut_by_caller.reset(token)


def in_sliced_step() -> bool:
    """Return whether batches are this rank's parts at the moment, because their caller has cut them."""
    return bool(_cut_by_caller.get())


class _OwnPositions(OwnPositions):
    """Positions of models that count in their own way, over the parts of ``layout``."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__(model, layout.collectives)
        self._layout = layout

    def _join(self, value: torch.Tensor, what: str) -> torch.Tensor:
        return self._layout.join(value, -1, what)

    def _slice(self, whole: torch.Tensor) -> torch.Tensor:
        return self._layout.cut(whole, 1)


class DividedForwards(BoundForwards):
    """Hooks around the forward of one model, which cut whole batches.

    Attributes:
        layout: The division of sequences.
        inside: Class name of the script's model, if only a part of it is divided (`sliceable.divided_part`); else "".
    """

    def __init__(
        self, model: nn.Module, layout: Layout, across: Collectives, inside: Collectives | None, settings: SliceSettings, strategy: str
    ) -> None:
        super().__init__(settings)
        implementation = require_dividable(model, layout.inside, settings.implementation)
        if strategy == "alltoall":
            require_ring(model, implementation)
        self.layout = layout
        self.inside = ""
        settings.prepare(implementation)
        kind = RingAttention if strategy == "alltoall" else ContextAttention
        self.attention = kind(model, layout, across, inside)
        self._shifts, self._sees_later = shifts_labels(model), sees_later_tokens(model)
        self._names = _arguments_of(model)
        self._masks = RowMasks(model, layout)
        self._positions = _OwnPositions(model, layout)
        self._rotary = WholeRotary(model, self.attention)
        self._randomness = Randomness(layout.collectives)
        self._compared = False
        self._labels: torch.Tensor | None = None
        self._is_mean = self._joins_loss = True
        self._tokens = 0  # of the parts
        self._length = 0  # of whole sequences that this hook has cut; 0 where the caller has
        self._whole_loss: WholeLoss | None = None
        self._kept: int | torch.Tensor | None = None  # tokens whose logits are wanted
        self._alone: list[nn.Module] = []  # parts of the model under way, called by themselves
        self.bind(model)
        for part in model.modules():
            if part is not model and hasattr(part, "get_input_embeddings"):  # a model of transformers
                self._hooks.append(part.register_forward_pre_hook(self._begin_alone, prepend=True))
                self._hooks.append(part.register_forward_hook(self._end_alone, always_call=True))

    def be_inside(self, model: nn.Module) -> None:
        """Record that this is the divided part of ``model``, whose outputs and loss are computed with whole sequences on every rank."""
        self.inside = type(model).__name__
        if has_own_forward(model):
            warn_once(
                f"context parallelism: the forward of {self.inside} is its own, and may compute any loss: the sequences of the model "
                "inside are divided, and the rest, as logits and the loss, is computed for whole sequences on every rank. Results are "
                "exact. To divide the rest too, compute the loss as a mean over the shift_labels that are not -100, or pass **kwargs of "
                "the forward to self.loss_function"
            )

    def remove(self) -> None:
        """Remove the hooks; sequences are whole again."""
        super().remove()
        self._rotary.remove()

    def _begin_alone(self, part: nn.Module, _args: Any) -> None:
        """Make a part of the model that is called alone compute whole sequences, on every rank."""
        attention = sliced_attention(part)
        if self._open or attention is not self.attention:  # inside the model, or in a copy of it
            return
        name = type(part).__name__
        if in_sliced_step():
            raise UnsupportedError(
                f"context parallelism: {name} was called alone inside maybe_context_parallel, with this rank's part of the tokens. "
                "Call the whole model there, or call this part outside, with whole sequences"
            )
        warn_once(
            f"context parallelism: {name} was called outside of the forward of the whole model, so each rank computes whole "
            "sequences. Results are exact, but the work is not divided. To divide it, call the whole model with labels"
        )
        self._alone.append(part)
        self.attention.alone += 1

    def _end_alone(self, part: nn.Module, _args: Any, output: Any) -> None:
        if self._alone and self._alone[-1] is part:
            self._alone.pop()
            self.attention.alone -= 1
            self._announce(output, sliced=False)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        tokens = _tokens_of(given)
        by_caller = tokens is not None and tokens in _cut_by_caller.get()
        self.attention.sliced = by_caller or model.training
        if not self.attention.sliced:
            return None
        if by_caller and self.inside:
            raise UnsupportedError(
                f"context parallelism: the loss of {self.inside} needs whole sequences, and its batch was cut by maybe_context_parallel. "
                "Call the model outside of maybe_context_parallel, with whole batches, which are divided inside of it"
            )
        _require_plain(model, given)
        self._whole_loss = whole_loss_of(model, given)
        if by_caller and self._whole_loss is not None:
            warn_once(
                f"context parallelism: {type(model).__name__} has a loss_function or an ignore_index of its own, and each rank computes it "
                "for its part of the tokens; parts are joined as means over labels that are not -100, which may be another loss. Call the "
                "model without labels, outside of maybe_context_parallel, and compute the loss from its logits"
            )
            self._whole_loss = None
        given = given if self._whole_loss is None else without_labels(given)
        self._kept = None if by_caller or given.get("labels") is not None else tokens_to_keep(given, self._names)
        try:
            batch = self._completed(given) if by_caller else self.parts_of(self._with_gradients(given))
        except HfZeroError as error:
            raise as_context_error(error) from None
        self._length = 0 if by_caller else int(tokens or 0)
        require_even_temperature(model, self._length)
        batch["position_ids"] = self._positions.of((), batch)
        self._labels = batch.get("shift_labels", batch.get("labels")) if batch.get("labels") is not None else None
        self._is_mean = batch.get("num_items_in_batch") is None
        # accelerate's scripts and Trainer scale a part of a sum by all ranks, as that of a rank with samples of its own.
        self._joins_loss = self._is_mean or not by_caller
        self.attention.called = False
        self._tokens = int(batch["position_ids"].shape[-1])
        self._masks.enter(self._tokens)
        self._randomness.enter(model.training)
        self._open = True
        return (), batch

    def _with_gradients(self, given: Batch) -> Batch:
        """Return a forward's arguments; tensors that require a gradient get it from the parts of all ranks."""
        if not torch.is_grad_enabled():
            return given
        needs = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and value.requires_grad}
        return {**given, **{name: given_to_all(self.layout.collectives, value) for name, value in needs.items()}}

    def parts_of(self, given: Batch) -> Batch:
        """Return this rank's parts of a whole batch; collective the first time.

        Args:
            given: Arguments of a forward, by name.

        Raises:
            ConfigError: Something in it has no dimension of tokens.
            StateError: The ranks were given different batches.
        """
        if is_slice((), given):
            raise StateError(
                "context parallelism: the batch was cut by UlyssesSPDataLoaderAdapter, which cuts for sequence parallelism; give all ranks "
                "of a group the same whole batch"
            )
        media = [name for name, value in given.items() if is_medium(name) and isinstance(value, torch.Tensor)]
        if media:
            raise UnsupportedError(f"context parallelism: {', '.join(media)} of a batch cannot be divided; text models are supported")
        if not self._compared and not self.layout.collectives.pretended:
            self._compare(given)
        _require_mask(given)
        small = {name: value for name, value in given.items() if _is_no_sequence(value)}
        rows = {name: value for name, value in given.items() if name == "attention_mask" and getattr(value, "dim", lambda: 0)() == 4}
        whole = {name: value for name, value in given.items() if name not in small and name not in rows}
        counted = whole.get("position_ids") is None
        tensors, rest, extra = whole_batch(whole, self.layout.multiple, self._shifts)
        tensors.pop(LABELS, None)
        if extra and not rows and self._sees_later and "attention_mask" not in tensors:
            ones = torch.ones_like(tensors["position_ids"])
            ones[:, ones.shape[1] - extra :] = 0
            tensors["attention_mask"] = ones  # no token may see those at the end
        batch: Batch = {**rest, **small, **{name: self.layout.cut(value, 1) for name, value in tensors.items()}}
        for name, value in rows.items():
            batch[name] = self._rows_of(value, extra)
        if "shift_labels" in batch:
            batch["labels"] = batch["shift_labels"]
        mark_slice(batch, counted)
        return batch

    def _rows_of(self, mask: torch.Tensor, extra: int) -> torch.Tensor:
        """Return the rows of this place of a mask (batch, heads, tokens, tokens); of one row that stands for all if it has one."""
        if extra:
            raise UnsupportedError(
                f"context parallelism: an attention_mask of four dimensions {tuple(mask.shape)} needs sequences of a multiple of "
                f"{self.layout.multiple} tokens; pad them (pad_to_multiple_of={self.layout.multiple})"
            )
        whole = mask.expand(-1, -1, mask.shape[3], -1)
        return whole.index_select(2, self.layout.tokens_of_place(whole.shape[2]).to(mask.device))

    def _completed(self, given: Batch) -> Batch:
        """Return parts that the caller has cut, with the positions and shifted labels that the whole would have."""
        batch = dict(given)
        part = _tokens_of(given) or 0
        length, first = part * self.layout.collectives.world, next(iter(batch[name] for name in _FIRST if batch.get(name) is not None))
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == length and name != "attention_mask":
                batch[name] = self.layout.cut(value, 1)
        mask = batch.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape[-1] == length:
            batch["attention_mask"] = self.layout.cut(mask, 1) if mask.dim() == 2 else self._rows_of(mask, 0)
        positions = batch.get("position_ids")
        counted = positions is None or counted_by_adapter(positions) is True
        if positions is None:
            batch["position_ids"] = self.layout.tokens(length).to(first.device).expand(first.shape[0], -1)
        labels = batch.get("labels")
        if self._shifts and labels is not None and batch.get("shift_labels") is None:
            whole = self.layout.join(labels, 1, "labels")
            batch["shift_labels"] = self.layout.cut(nn.functional.pad(whole[:, 1:], (0, 1), value=IGNORED), 1)
        mark_slice(batch, counted)
        return batch

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        if not self._open:
            return None
        self._open = False
        self._masks.leave()
        self._randomness.leave()
        if output is None:
            return None
        if not self.attention.called:
            raise UnsupportedError(
                f"context parallelism: {type(model).__name__} did not call its attention through transformers' attention interface, so "
                "each rank attended to its part only; this model is not supported with this version of transformers"
            )
        if self._labels is not None:
            return self._with_joined_loss(model, output) if self._joins_loss else None
        return self._with_whole_tokens(model, output) if self._length else None

    def _with_joined_loss(self, model: nn.Module, output: Any) -> Any:
        """Return ``output`` with the loss of whole sequences."""
        loss = output[0] if isinstance(output, tuple) else output.get("loss")
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise UnsupportedError(f"context parallelism: {type(model).__name__} returns no loss of one number for its labels")
        assert self._labels is not None
        joined = join_loss(self.layout.collectives, loss, (self._labels != IGNORED).sum(), self._is_mean)
        if isinstance(output, tuple):
            return joined, *output[1:]
        output["loss"] = joined
        return output

    def _with_whole_tokens(self, model: nn.Module, output: Any) -> Any:
        """Return ``output`` with its values per token joined to whole sequences, without the tokens that were added."""

        def whole(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(whole(part) for part in value)
            if not (isinstance(value, torch.Tensor) and value.dim() >= 3):
                return value
            if value.shape[1] != self._tokens:
                raise UnsupportedError(
                    f"context parallelism: {type(model).__name__} returned {tuple(value.shape)} for a part of {self._tokens} tokens, "
                    "so it cannot be joined to whole sequences. Return values of every token, (batch, tokens, ...)"
                )
            return join_tokens(self.layout, value)[:, : self._length]

        if isinstance(output, tuple):
            output = whole(output)
        else:
            for name in _PER_TOKEN:
                if output.get(name) is not None:
                    output[name] = whole(output[name])
        output = output if self._kept is None else keep_tokens(output, self._kept)
        return output if self._whole_loss is None else self._whole_loss.add_to(output)

    def _compare(self, given: Batch) -> None:
        """Refuse different batches on the ranks of a group, once; collective."""
        self._compared = True
        mine = {name: _checksum(value) for name, value in given.items() if isinstance(value, torch.Tensor)}
        everyone = self.layout.collectives.gather_objects(mine, "batches")
        if any(other != everyone[0] for other in everyone):
            names = sorted({name for other in everyone for name in other if other.get(name) != everyone[0].get(name)})
            raise StateError(
                f"context parallelism: the {self.layout.collectives.world} ranks that share sequences were given different "
                f"{', '.join(names) or 'arguments'} in the first step, but must have the same whole batch. Give the data loader one "
                "sampler per group: num_replicas = engine.dp_world_size, rank = the group's number (accelerate does it in prepare)"
            )


_FIRST = ("input_ids", "inputs_embeds")


def _tokens_of(given: Batch) -> int | None:
    first = next((given[name] for name in _FIRST if isinstance(given.get(name), torch.Tensor)), None)
    return int(first.shape[1]) if first is not None and first.dim() >= 2 else None


def _is_no_sequence(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() < 2


def _require_mask(given: Batch) -> None:
    """Raise if the attention mask of a whole batch has another shape than the library takes.

    Raises:
        ConfigError: It has other dimensions than 2 and 4, or one of four dimensions does not fit the tokens.
    """
    mask, tokens = given.get("attention_mask"), _tokens_of(given)
    if not isinstance(mask, torch.Tensor) or tokens is None or mask.dim() < 2:
        return
    fits = mask.dim() == 2 or (mask.dim() == 4 and mask.shape[3] == tokens and mask.shape[2] in (1, tokens))  # of two: `whole_batch`
    if not fits:
        raise ConfigError(
            f"context parallelism: attention_mask of a batch has shape {tuple(mask.shape)}, and its sequences have {tokens} tokens; a mask "
            f"(batch, {tokens}), or (batch, heads, {tokens}, {tokens}) with 1 in place of heads or rows, is allowed"
        )


def _require_plain(model: nn.Module, given: Batch) -> None:
    if given.get("output_attentions"):
        raise UnsupportedError("context parallelism: output_attentions=True is not supported, no rank has all rows of an attention")
    if given.get(ROUTERS, getattr(model.config, ROUTERS, False)):
        raise as_context_error(UnsupportedError(NO_ROUTERS))


def _arguments_of(model: nn.Module) -> list[str]:
    """Return the names of the arguments that a forward takes by position; of the model inside an adapter that passes all on."""
    own, inside = inspect.signature(model.forward).parameters, getattr(model, "get_base_model", None)
    passes_on = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in own.values())
    return list(inspect.signature(inside().forward).parameters if passes_on and inside is not None else own)


def _checksum(value: torch.Tensor) -> tuple[list[int], str]:
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return list(value.shape), hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()


def as_context_error(error: HfZeroError) -> HfZeroError:
    """Return ``error``, from a check that both kinds share, with "sequence parallelism" replaced by "context parallelism"."""
    return type(error)(str(error).replace("sequence parallelism", "context parallelism").replace("sequence-parallel", "context-parallel"))


def divided_forwards(model: nn.Module) -> DividedForwards | None:
    """Return the hooks around the forwards of ``model``, or of the part of it that is divided; None if it has none."""
    found = (bound_forwards(part) for part in model.modules())
    return next((forwards for forwards in found if isinstance(forwards, DividedForwards)), None)
