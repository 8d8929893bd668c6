"""Ulysses sequence parallelism for transformers: the attention functions of models that are trained over slices."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_zero.comm.topology import sequence_topology
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.sequence_parallel.forward import SliceSettings
from hf_zero.sequence_parallel.state import SequenceParallel
from hf_zero.sequence_parallel.table import standing_in, trade_in_attention


class UlyssesSPAttentionHF:
    """DeepSpeed's name for what makes transformers' attention work over slices of sequences; used through its class method."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(
            "UlyssesSPAttentionHF is not built by hand: call UlyssesSPAttentionHF.register_with_transformers(...), or wrap attention of "
            "your own in deepspeed.sequence.layer.DistributedAttention"
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
        """Makes the forwards of a model forwards over slices of sequences; collective.

        Args:
            model_name_or_path: The model. With a name or a path, which stand for a model that is made later, ``initialize(mpu=...)`` does
                it for the one it is given.
            core_attn_implementation: "sdpa", "eager", "flash_attention_2", ...; the model's own; None takes that.
            sequence_parallel_size: Ranks that share their samples; 1 does nothing.
            micro_batch_size: Accepted; any batch size is taken as it comes.
            seq_length: Tokens of every whole sequence, where they do not vary.
            seq_length_is_variable: False refuses sequences of another length.
            disable_in_eval: Forwards in evaluation mode are over whole sequences, unless the tokens come from an adapter.
            max_length: Older name of ``seq_length``.

        Returns:
            The groups, to be passed to ``initialize`` as ``mpu``; None for a size of 1.

        Raises:
            ConfigError: The size does not fit the ranks or the model's heads, or the attention implementations differ.
            UnsupportedError: The model is of a kind that cannot be sliced.
        """
        if sequence_parallel_size == 1:
            return None
        # A module is looked at when it is bound; this is something around one, or in its place, that has its configuration.
        own = getattr(getattr(model_name_or_path, "config", None), "_attn_implementation", None)
        if not isinstance(model_name_or_path, nn.Module) and own is not None and core_attn_implementation not in (None, own):
            raise ConfigError(
                f"core_attn_implementation {core_attn_implementation!r} does not match model config attn_implementation {own!r}; "
                "make them equal"
            )
        length = seq_length if seq_length is not None else max_length
        if not seq_length_is_variable and length is None:
            raise ConfigError("seq_length_is_variable is False and seq_length is not given: give the length, or allow it to vary")
        if not seq_length_is_variable and length is not None and length % sequence_parallel_size:
            raise ConfigError(f"seq_length is {length}, which {sequence_parallel_size} ranks (sequence_parallel_size) do not divide")
        fixed = None if seq_length_is_variable else length
        settings = SliceSettings(core_attn_implementation, disable_in_eval, fixed, trade_in_attention, standing_in)
        state = SequenceParallel(sequence_topology(sequence_parallel_size), settings)
        if isinstance(model_name_or_path, nn.Module):
            state.bind(model_name_or_path)
        return state
