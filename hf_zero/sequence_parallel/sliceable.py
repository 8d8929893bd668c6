"""Checks that a model of transformers can be trained over slices."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.sequence_parallel.exchange import require_even_heads
from hf_zero.sequence_parallel.masks import modules_of

ROUTERS = "output_router_logits"
NO_ROUTERS = (
    "sequence parallelism: output_router_logits=True adds a loss of all tokens of a batch, and each rank would take it of its slice; "
    "leave it out (config.output_router_logits = False)"
)
_TABLE, _LIBRARY = "ALL_ATTENTION_FUNCTIONS", "transformers.modeling_utils"
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention", "dense", "sparse", "global_attention")


def require_sliceable(model: nn.Module, ranks: int, implementation: str | None, causal: bool = True) -> str:
    """Return the attention implementation of a transformers model that can be trained over slices.

    Args:
        model: The model, or an adapter around it.
        ranks: Size of the sequence-parallel group.
        implementation: What the script asks for; None takes the model's.
        causal: Refuse models that are not causal.

    Raises:
        ConfigError: The model has another implementation, or heads that do not divide.
        UnsupportedError: It is of a kind that cannot be sliced.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedError(f"sequence parallelism: {type(model).__name__} is no model of transformers; use DistributedAttention")
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"sequence parallelism: {name} is an encoder-decoder; causal language models are supported")
    if config.get_text_config() is not config:
        raise UnsupportedError(f"sequence parallelism: {name} has other towers beside its text model; text models are supported")
    recurrent = sorted({kind for kind in getattr(config, "layer_types", None) or [] if kind not in _ATTENTION_LAYERS})
    if recurrent:
        raise UnsupportedError(
            f"sequence parallelism: {name} has layers of type {', '.join(recurrent)}; only layers that see other tokens through attention "
            f"alone can be sliced ({', '.join(_ATTENTION_LAYERS)})"
        )
    found = getattr(config, "_attn_implementation", None)
    if implementation is not None and found != implementation:
        raise ConfigError(
            f"sequence parallelism: core_attn_implementation (sp_attn_implementation) is {implementation!r} and the model was made with "
            f"attn_implementation={found!r}; make them equal"
        )
    if found is None:
        raise UnsupportedError(f"sequence parallelism: {name} names no attention implementation")
    _require_interface(model)
    if causal:
        _require_causal(model)
    _require_alike(name, config)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        require_even_heads(heads, ranks)
    return str(found)


def _inside(model: nn.Module) -> Any:
    """Return the model in an adapter, or itself."""
    inside: Any = getattr(model, "get_base_model", None)
    return model if inside is None else inside()


def _require_causal(model: nn.Module) -> None:
    """Refuse models that are not causal: labels are shifted, and sequences padded at the end. A script's own classes may be of any kind."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as mapping

    base = _inside(model)
    name = type(base).__name__
    causal = {found for names in mapping.values() for found in ([names] if isinstance(names, str) else names)}
    own = [kind for kind in type(base).__mro__ if kind.__module__.startswith("transformers.models.")]
    if own and not own[0].__name__.endswith("PreTrainedModel") and not any(kind.__name__ in causal for kind in own):
        raise UnsupportedError(
            f"sequence parallelism: {name} is not a causal language model (...ForCausalLM), which is needed because labels "
            "are shifted by one token"
        )
    if any(getattr(part, "is_decoder", None) is False for part in base.modules()) or getattr(base.config, "is_causal", True) is False:
        raise UnsupportedError(
            f"sequence parallelism: attention of {name} sees later tokens, also those put at the end of sequences; make it with is_decoder="
            "True (is_causal=True)"
        )


def _require_alike(name: str, config: Any) -> None:
    """Refuse settings that each rank would apply in another way, or to its slice alone."""
    for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        value = getattr(config, key, None)
        if isinstance(value, (int, float)) and value > 0:
            raise UnsupportedError(
                f"sequence parallelism: {key} of {name} is {value}: the ranks of a group would skip different layers and wait for "
                f"each other; set config.{key} = 0"
            )
    if getattr(config, ROUTERS, False):
        raise UnsupportedError(NO_ROUTERS)


def _require_interface(model: nn.Module) -> None:
    """Refuse a model that takes no positions, or does not attend through transformers' table of attention functions."""
    base = _inside(model)
    name = type(base).__name__
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise UnsupportedError(f"sequence parallelism: {name}.forward takes no position_ids, so each rank would count its slice from 0")
    tables = [vars(module)[_TABLE] for module in modules_of(base) if _TABLE in vars(module) and module.__name__ != _LIBRARY]
    shared = getattr(sys.modules.get(_LIBRARY), _TABLE, None)
    if not tables or any(table is not shared for table in tables):
        raise UnsupportedError(
            f"sequence parallelism: {name} does not call its attention through transformers' table of attention functions, which is where "
            "slices are put together; use a model that does, or DistributedAttention in one of your own"
        )
