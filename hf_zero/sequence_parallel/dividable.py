"""Check that a model of transformers can be trained under context parallelism, and whether its loss shifts labels."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from hf_zero.errors import HfZeroError, UnsupportedError
from hf_zero.sequence_parallel.exchange import require_even_heads
from hf_zero.sequence_parallel.sliceable import attention_of, reason_to_cut_layers, require_made_with

_SERVED = ("sdpa", "eager")
_TOKEN_TASKS = ("ForMaskedLM", "ForTokenClassification", "Model")  # endings of the names of models with one output per token


def require_dividable(model: nn.Module, inside: int, implementation: str | None) -> str:
    """Return the attention implementation of a transformers model that can be trained over parts of sequences.

    Args:
        model: The model, or an adapter around it.
        inside: Ranks that trade heads inside each place; 1 without sequence parallelism.
        implementation: What the script asks for; None takes the model's.

    Raises:
        ConfigError: The model has another implementation, or heads that ``inside`` does not divide.
        UnsupportedError: It is of a kind that cannot be divided.
    """
    base = _inside(model)
    config: Any = getattr(model, "config", None)
    name = type(base).__name__
    try:
        found, reason = attention_of(model), reason_to_cut_layers(model)
        require_made_with(found, implementation)
        if not reason and isinstance(getattr(config, "num_attention_heads", None), int):
            require_even_heads(config.num_attention_heads, inside)
    except HfZeroError as error:
        raise type(error)(str(error).replace("sequence parallelism", "context parallelism")) from None
    if reason:
        raise UnsupportedError(
            f"context parallelism: {name} cannot be divided, because {reason}; sequence parallelism (sequence_parallel_size) may serve it"
        )
    if found not in _SERVED:
        raise UnsupportedError(
            f"context parallelism: attention of {name} is computed by {found!r}; make the model with attn_implementation='sdpa' or 'eager'"
        )
    if not shifts_labels(model) and not _classes(base)[0].__name__.endswith(_TOKEN_TASKS):
        raise UnsupportedError(
            f"context parallelism: the loss of {name} is not one of each token, or is not known to be (causal and masked language models "
            "and token classification are supported), so losses of parts of sequences cannot be joined"
        )
    if any(getattr(part, "pooler", None) is not None for part in base.modules()):
        raise UnsupportedError(f"context parallelism: {name} pools one token of whole sequences; make it with add_pooling_layer=False")
    return found


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the model predicts the token after each: its loss shifts ``labels`` by one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as mapping

    causal = {found for names in mapping.values() for found in ([names] if isinstance(names, str) else names)}
    return any(kind.__name__ in causal for kind in _classes(_inside(model)))


def sees_later_tokens(model: nn.Module) -> bool:
    """Return whether attention of the model, or of parts of it, is not causal."""
    base = _inside(model)
    decoders = [part.is_decoder for part in base.modules() if isinstance(getattr(part, "is_decoder", None), bool)]
    return not shifts_labels(model) or not all(decoders) or getattr(base.config, "is_causal", True) is False


def _inside(model: nn.Module) -> Any:
    inside: Any = getattr(model, "get_base_model", None)
    return model if inside is None else inside()


def _classes(base: nn.Module) -> list[type]:
    return [kind for kind in inspect.getmro(type(base)) if kind.__module__.startswith("transformers.models.")] or [type(base)]
