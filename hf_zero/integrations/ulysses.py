"""Provide Ulysses sequence parallelism for transformers under DeepSpeed's name: models train on slices of sequences."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_zero.comm.topology import sequence_topology
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.sequence_parallel.attention import attention_replaced, exchange_heads_in_attention
from hf_zero.sequence_parallel.forward import SliceSettings
from hf_zero.sequence_parallel.state import SequenceParallel


class UlyssesSPAttentionHF:
    """Entry point, under DeepSpeed's name, of sequence parallelism for transformers; it is used through its class method only."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "UlyssesSPAttentionHF cannot be instantiated: call UlyssesSPAttentionHF.register_with_transformers(...), or wrap your own "
            "attention in deepspeed.sequence.layer.DistributedAttention"
        )

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str | None,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> SequenceParallel | None:
        """Make the forward of a model run on slices of sequences, one slice per rank; collective.

        Args:
            model_name_or_path: The model. If it is a name or a path, ``initialize(mpu=...)`` changes the model that it receives later.
            core_attn_implementation: The model's attention implementation: "sdpa", "eager", "flash_attention_2", ...; None reads it from
                the model.
            sequence_parallel_size: Number of ranks that share their samples; 1 changes nothing.
            micro_batch_size: Accepted and ignored; every batch size works.
            seq_length: Number of tokens of every complete sequence, if all have the same length.
            seq_length_is_variable: Whether sequences may have other lengths than ``seq_length``.
            disable_in_eval: Whether forwards in evaluation mode use complete sequences, unless the tokens come from an adapter.
            max_length: Older name of ``seq_length``.

        Returns:
            The groups, to be passed to ``initialize`` as ``mpu``; None for a size of 1.

        Raises:
            ConfigError: The size does not fit the ranks or the model's heads, or the attention implementations differ.
            UnsupportedError: The model's forward cannot run on slices.
        """
        if sequence_parallel_size == 1:
            return None
        # ``bind`` checks a module; this checks other objects with a model's configuration, for example a wrapper.
        own = getattr(getattr(model_name_or_path, "config", None), "_attn_implementation", None)
        if not isinstance(model_name_or_path, nn.Module) and own is not None and core_attn_implementation not in (None, own):
            raise ConfigError(
                f"core_attn_implementation {core_attn_implementation!r} does not match model config attn_implementation {own!r}; "
                "make them equal"
            )
        length = seq_length if seq_length is not None else max_length
        if not seq_length_is_variable and length is None:
            raise ConfigError(
                "seq_length_is_variable is False, but seq_length is not given. Set seq_length, or set seq_length_is_variable=True"
            )
        if not seq_length_is_variable and length is not None and length % sequence_parallel_size:
            raise ConfigError(
                f"seq_length is {length}, not a multiple of sequence_parallel_size {sequence_parallel_size}; pad to a multiple"
            )
        fixed = None if seq_length_is_variable else length
        settings = SliceSettings(core_attn_implementation, disable_in_eval, fixed, exchange_heads_in_attention, attention_replaced)
        state = SequenceParallel(sequence_topology(sequence_parallel_size), settings)
        if isinstance(model_name_or_path, nn.Module):
            state.bind(model_name_or_path)
        return state
