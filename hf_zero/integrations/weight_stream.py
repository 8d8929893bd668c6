"""``iter_full_params``: whole weights under Hugging Face's names, bucket by bucket, for inference engines and other receivers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_zero.checkpoint.model.export import expert_axis_of, model_axis_of
from hf_zero.checkpoint.model.stream import WeightStream
from hf_zero.errors import ConfigError, StateError
from hf_zero.integrations.adapters import merged_pieces, plain_pieces

if TYPE_CHECKING:
    from hf_zero.core.engine import Engine


def iter_full_params(
    engine: Engine,
    bucket_bytes: int = 1 << 30,
    merge_adapters: bool = True,
    dtype: torch.dtype | None = None,
    rank0_only: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole parameters, one after the other, in the order and under the names of the Hugging Face checkpoint; collective.

    Every rank must take all of them (``for _ in iter_full_params(...): pass`` where it needs none). A unit of parameters is gathered once,
    while the bucket before it is used, and let go of with the next: at most two buckets, the largest layer and what the first and last
    layers share are whole at a time. A tensor that the caller keeps stays as it is; at stages 0 to 2 and without ``dtype`` it is the
    parameter itself, until the next step. They are there to be read: what is written to them changes a whole parameter, or nothing.

    Args:
        engine: Of ``initialize``; its weights stay as they are.
        bucket_bytes: Bytes of gathered parameters in a bucket.
        merge_adapters: Merge peft's active adapters, layer by layer, and name what comes as the base model does. False: every parameter
            of the model as it stands, adapters included.
        dtype: Of floating-point tensors; None leaves each in its own.
        rank0_only: Ranks other than the first of the data-parallel axis get nothing, but take part.

    Yields:
        (name, value): a tied parameter once, under its first name.

    Raises:
        StateError: A forward or backward is under way, or a step was taken since the first was asked for.
        ConfigError: ``bucket_bytes`` is not positive.
        UnsupportedError: Adapters that cannot be merged layer by layer.
    """
    if not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
        raise ConfigError(f"iter_full_params: bucket_bytes is {bucket_bytes!r}; a positive number of bytes is allowed")
    model, expert = model_axis_of(engine.collectives), expert_axis_of(engine.collectives)
    pieces = merged_pieces(engine.module, split=model is not None) if merge_adapters else plain_pieces(engine.module)
    steps = engine.progress.global_steps

    def check() -> None:
        if engine.runtime.backward.begun or any(block.open for block in (engine.runtime.root, *engine.runtime.blocks)):
            raise StateError("iter_full_params: a forward or backward is under way; stream weights between step() and the next forward")
        if engine.progress.global_steps != steps:
            raise StateError("iter_full_params: step() was called before all weights had come, so they would be those of two steps")

    check()
    return _values(engine, WeightStream(pieces, model, bucket_bytes, check, expert), merge_adapters, dtype, rank0_only)


def _values(
    engine: Engine, stream: WeightStream, merged: bool, dtype: torch.dtype | None, rank0_only: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    gives = not rank0_only or engine.collectives.data.rank == 0
    for bucket in stream:
        named = _names_of_checkpoint(engine.module, bucket) if merged else list(bucket)
        bucket.clear()
        while gives and named:
            name, value = named.pop(0)
            yield name, value.to(dtype) if dtype is not None and value.is_floating_point() else value
            del value
        named.clear()


def _names_of_checkpoint(module: nn.Module, bucket: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """``bucket`` as the model's checkpoint has it: transformers 5 keeps some weights in other shapes and under other names in memory."""
    loading: Any = sys.modules.get("transformers.core_model_loading")
    inner: Any = getattr(module, "get_base_model", lambda: module)()
    if loading is None or not isinstance(inner, sys.modules["transformers.modeling_utils"].PreTrainedModel):
        return list(bucket)
    return list(loading.revert_weight_conversion(inner, dict(bucket)).items())
