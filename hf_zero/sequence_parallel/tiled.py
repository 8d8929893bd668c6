"""Layers and losses computed tile by tile along the sequence, so that intermediate tensors exist for one tile at a time.

Arctic Long Sequence Training (arXiv 2506.13996) calls it sequence tiling. Every tile is recomputed in backward by torch's activation
checkpointing, inside one graph: autograd adds up a parameter's gradients over the tiles before it hands them over, so each arrives once,
at every stage, and nothing needs to be told which parameters take part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_zero.errors import ConfigError

_SEQUENCE_DIM = 1
_REDUCTIONS = ("mean", "sum")
_IGNORED = -100


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor | None],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[torch.Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Apply ``fn`` to tiles of a sequence.

    Args:
        fn: Called with a tile of each of ``kwargs_to_shard`` and all of ``kwargs_to_pass``, by name.
        seqlen: Elements along the sequence, dimension 1 of all that is tiled.
        shards: Number of tiles; each has ``ceil(seqlen / shards)`` elements, the last one the rest.
        kwargs_to_shard: Tensors of shape (batch, seqlen, ...).
        kwargs_to_pass: Anything else.
        grad_requiring_tensor_key: Which of the tiled tensors needs a gradient; DeepSpeed's, autograd knows.
        compute_params: Parameters that ``fn`` uses; DeepSpeed's, nothing here asks for them.
        output_unshard_dimension: Where outputs are put together; 0: each is a scalar, and ``output_reduction`` makes them one.
        output_reduction: "mean" (of the tiles' values, also where tiles differ in length) or "sum"; None keeps a scalar per tile.

    Raises:
        ConfigError: A tensor has another length, the number of tiles is not positive, or a reduction is unknown.
    """
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise ConfigError(f"grad_requiring_tensor_key is {grad_requiring_tensor_key!r}; allowed: {', '.join(kwargs_to_shard)}")
    for name, value in kwargs_to_shard.items():
        if value is not None and (value.dim() <= _SEQUENCE_DIM or value.shape[_SEQUENCE_DIM] != seqlen):
            raise ConfigError(f"{name} has shape {tuple(value.shape)}; dimension {_SEQUENCE_DIM} must have seqlen {seqlen} elements")
    tiles = [_tiles(value, shards, _SEQUENCE_DIM) for value in kwargs_to_shard.values()]
    count = next(len(parts) for parts in tiles if parts is not None)
    outputs = []
    for index in range(count):
        named = {name: None if parts is None else parts[index] for name, parts in zip(kwargs_to_shard, tiles, strict=True)}
        outputs.append(_recomputed(fn, **named, **kwargs_to_pass))
    if output_unshard_dimension == 0:
        return _reduced(outputs, output_reduction)
    return torch.cat(outputs, dim=output_unshard_dimension)


class SequenceTiledCompute:
    """``sequence_tiled_compute`` with its tensors one after the other, as DeepSpeed's function for autograd takes them."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        grad_requiring_tensor_key_index: int,
        compute_params: Sequence[torch.Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """Return the result of ``sequence_tiled_compute``; ``args`` are the values of ``keys_to_shard`` and then of ``keys_to_pass``."""
        sharded = dict(zip(keys_to_shard, args[: len(keys_to_shard)], strict=True))
        passed = dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True))
        return sequence_tiled_compute(
            fn, seqlen, shards, sharded, passed, grad_requiring_tensor_key, compute_params, output_unshard_dimension, output_reduction
        )


class TiledMLP:
    """A feed-forward layer tile by tile."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return ``fn(self, x)``, computed for one tile of ``x`` at a time.

        Args:
            fn: The layer's forward, given the layer and a tile.
            self: The layer.
            x: (..., seqlen, hidden).
            shards: Number of tiles.
            compute_params: DeepSpeed's, nothing here asks for them.

        Raises:
            ConfigError: The number of tiles is not positive.
        """
        return torch.cat([_recomputed(fn, self, tile) for tile in _tiles(x, shards, -2) or ()], dim=-2)


class TiledFusedLogitsLoss:
    """A loss over a vocabulary whose logits exist for one tile of tokens at a time."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None = None,
        output_reduction: str = "mean",
    ) -> torch.Tensor:
        """Return the scalar ``fn(self, x, y)``, or ``fn(self, x, y, mask)`` with a mask, from tiles of all three.

        Args:
            fn: Gives the loss of a tile, a scalar, from x (tokens, hidden), y (tokens, ...) and mask (tokens, ...), as DeepSpeed does.
            self: Whatever ``fn`` computes with: the model, say.
            x: Hidden states (batch, seqlen, hidden).
            y: Targets (batch, seqlen, ...).
            mask: (batch, seqlen, ...), or None.
            shards: Number of tiles.
            compute_params: DeepSpeed's, nothing here asks for them.
            output_reduction: "mean" of the tiles' losses, right where all tiles have equally many tokens that count; else let ``fn``
                give sums and take "sum".

        Raises:
            ConfigError: Shapes do not fit, the number of tiles is not positive, or the reduction is unknown.
        """
        if output_reduction not in _REDUCTIONS:
            raise ConfigError(f"output_reduction is {output_reduction!r}; allowed: {', '.join(_REDUCTIONS)}")
        for name, value in (("y", y), ("mask", mask)):
            if x.dim() < 2 or (value is not None and value.shape[:2] != x.shape[:2]):
                found = None if value is None else tuple(value.shape)
                raise ConfigError(f"x has shape {tuple(x.shape)} and {name} {found}; both begin with (batch, seqlen)")
        # Functions for DeepSpeed may call ``view(-1)`` of a tile, and get tokens in one dimension there.
        parts = [_tiles(value.flatten(0, 1), shards, 0) for value in (x, y, mask) if value is not None]
        return _reduced([_recomputed(fn, self, *tile) for tile in zip(*(part or () for part in parts), strict=True)], output_reduction)


class TiledLoss:
    """A mean loss over tokens from existing logits, so that the loss's intermediate tensors exist for one tile at a time."""

    @staticmethod
    def apply(
        loss_fn: Callable[..., torch.Tensor], logits: torch.Tensor, vocab_size: int, shift_labels: torch.Tensor, shards: int
    ) -> torch.Tensor:
        """Return the mean of ``loss_fn`` over all labels that count, each tile's weighted with how many it has; 0 where none does.

        Args:
            loss_fn: Called by name with ``logits`` and ``shift_labels`` of a tile, ``vocab_size``, and ``labels`` None; gives the mean over
                the labels that are not -100. Tiles without any are left out.
            logits: (batch, seqlen, vocabulary).
            vocab_size: Size of the vocabulary.
            shift_labels: (batch, seqlen), already shifted; -100 does not count.
            shards: Number of tiles.

        Raises:
            ConfigError: The shapes do not fit, or the number of tiles is not positive.
        """
        if logits.dim() < 2 or shift_labels.shape != logits.shape[:2]:
            found = tuple(shift_labels.shape)
            raise ConfigError(f"logits have shape {tuple(logits.shape)} and shift_labels {found}; both begin with (batch, seqlen)")
        parts = [_tiles(value, shards, _SEQUENCE_DIM) or () for value in (logits, shift_labels)]
        counts = torch.stack([(labels != _IGNORED).sum() for labels in parts[1]]).tolist()  # the host waits for a device once
        total = sum(counts)
        losses = [
            _recomputed(loss_fn, logits=tile, labels=None, vocab_size=vocab_size, shift_labels=labels) * (count / total)
            for tile, labels, count in zip(*parts, counts, strict=True)
            if count
        ]
        return _reduced(losses, "sum") if losses else logits[:, :0].sum()


def _tiles(value: torch.Tensor | None, shards: int, dim: int) -> tuple[torch.Tensor, ...] | None:
    if not isinstance(shards, int) or shards <= 0:
        raise ConfigError(f"shards is {shards!r}; a positive number of tiles is allowed")
    return None if value is None else torch.chunk(value, shards, dim=dim)


def _recomputed(fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    result: torch.Tensor = checkpoint(fn, *args, use_reentrant=False, **kwargs)
    return result


def _reduced(outputs: Sequence[torch.Tensor], reduction: str | None) -> torch.Tensor:
    values = torch.stack(list(outputs))
    if reduction is None:
        return values
    if reduction not in _REDUCTIONS:
        raise ConfigError(f"output_reduction is {reduction!r}; allowed: {', '.join(_REDUCTIONS)} or None")
    return values.mean() if reduction == "mean" else values.sum()
