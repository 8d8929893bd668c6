"""Check that a model of transformers can be trained over slices or under context parallelism, and whether its loss shifts labels."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn

from hf_zero.errors import ConfigError, HfZeroError, UnsupportedError
from hf_zero.sequence_parallel.exchange import require_even_heads
from hf_zero.sequence_parallel.masks import modules_of
from hf_zero.sequence_parallel.token_flow import TokenFlow, find_token_flow

ROUTERS = "output_router_logits"
NO_ROUTERS = (
    "sequence parallelism: output_router_logits=True adds a loss of all tokens of a batch, and each rank would take it of its slice; "
    "leave it out (config.output_router_logits = False)"
)
_OTHER = "; context parallelism (cp_size, or hf_zero.context_parallel_size in the configuration) may serve it"
_TABLE, _LIBRARY = "ALL_ATTENTION_FUNCTIONS", "transformers.modeling_utils"
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention", "dense", "sparse", "global_attention")


ReplaceAttention = Callable[[str, Callable[..., Any]], Any]
"""Return a context in which a function stands in the place of an attention implementation of transformers."""
_SERVED = ("sdpa", "eager")
_TOKEN_TASKS = ("ForMaskedLM", "ForTokenClassification", "Model")  # endings of the names of models with one output per token


def require_sliceable(
    model: nn.Module, ranks: int, implementation: str | None, replace_attention: ReplaceAttention
) -> tuple[str, TokenFlow | None]:
    """Return the attention implementation of a transformers model that can be trained over slices, and where its tokens meet.

    That is None for a text model whose tokens meet in attention of the interface alone and that takes positions: its forward can be given
    slices from the start. Others are as [Note: cut layers] has it.

    Args:
        model: The model, or an adapter around it.
        ranks: Size of the sequence-parallel group.
        implementation: What the script asks for; None takes the model's.
        replace_attention: Lets a function stand for attention of the interface.

    Raises:
        ConfigError: The model has another implementation, or heads that do not divide.
        UnsupportedError: It is of a kind that cannot be sliced.
    """
    found = attention_of(model)
    _require_causal(model)
    flow = _token_flow(model, ranks, found, replace_attention) if reason_to_cut_layers(model) else None
    if flow is None or flow.heads:
        require_made_with(found, implementation)
    heads = _heads(model.config)
    if flow is None and heads is not None:
        require_even_heads(heads, ranks, otherwise=_OTHER)
    return found, flow


def _heads(config: Any) -> int | None:
    """Return the number of heads of every attention layer; None without one in the configuration, or where layers differ (then transformers
    raises, and each layer's heads are looked at in its first forward).
    """
    try:
        heads = getattr(config, "num_attention_heads", None)
    except RuntimeError:
        return None
    return heads if isinstance(heads, int) else None


def require_made_with(found: str, implementation: str | None) -> None:
    """Raise unless a model with the attention implementation ``found`` fits the one that the script names."""
    if implementation is not None and found != implementation:
        raise ConfigError(
            f"sequence parallelism: core_attn_implementation (sp_attn_implementation) is {implementation!r} and the model was made with "
            f"attn_implementation={found!r}; make them equal"
        )


def attention_of(model: nn.Module) -> str:
    """Return the attention implementation of a model whose sequences can be divided as far as its configuration says.

    Raises:
        UnsupportedError: It is of a kind that cannot be sliced.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedError(f"sequence parallelism: {type(model).__name__} is no model of transformers; use DistributedAttention")
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"sequence parallelism: {name} is an encoder-decoder; causal language models are supported")
    found = getattr(config.get_text_config(), "_attn_implementation", None)
    if found is None:
        raise UnsupportedError(f"sequence parallelism: {name} names no attention implementation")
    _require_alike(name, config)
    return str(found)


def _token_flow(model: nn.Module, ranks: int, implementation: str, replace_attention: ReplaceAttention) -> TokenFlow:
    """Return where tokens meet; refuse models where slices cannot."""
    base = _inside(model)
    name = type(base).__name__
    try:
        flow = find_token_flow(model, ranks, partial(replace_attention, implementation))
    except Exception as error:  # noqa: BLE001 - whatever the model raises
        raise UnsupportedError(
            f"sequence parallelism: {name} ({reason_to_cut_layers(model)}) cannot be looked into, because it does not run on tensors "
            f"without values: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    if flow.problems:
        raise UnsupportedError(f"sequence parallelism: {name} ({reason_to_cut_layers(model)}) cannot be sliced: {flow.problems[0]}")
    return flow


def reason_to_cut_layers(model: nn.Module) -> str:
    """Return why the forward of ``model`` cannot be given slices from the start; "" if it can."""
    base = _inside(model)
    config: Any = base.config
    if config.get_text_config() is not config:
        return "it has other towers beside its text model"
    others = sorted({kind for kind in getattr(config, "layer_types", None) or [] if kind not in _ATTENTION_LAYERS})
    if others:
        return f"it has layers of type {', '.join(others)}"
    if "position_ids" not in inspect.signature(base.forward).parameters:
        return "its forward takes no position_ids"
    tables = [vars(module)[_TABLE] for module in modules_of(base) if _TABLE in vars(module) and module.__name__ != _LIBRARY]
    shared = getattr(sys.modules.get(_LIBRARY), _TABLE, None)
    if not tables or any(table is not shared for table in tables):
        return "it does not call its attention through transformers' table of attention functions"
    return ""


def _inside(model: nn.Module) -> Any:
    """Return the model in an adapter, or itself."""
    inside: Any = getattr(model, "get_base_model", None)
    return model if inside is None else inside()


_CAUSAL_TASKS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "AUDIO_TEXT_TO_TEXT")


def _require_causal(model: nn.Module) -> None:
    """Refuse models that are not causal: labels are shifted, and sequences padded at the end. A script's own classes may be of any kind."""
    from transformers.models.auto import modeling_auto

    base = _inside(model)
    name = type(base).__name__
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in _CAUSAL_TASKS]
    values = [value for mapping in mappings for value in mapping.values()]
    causal = {found for names in values for found in ([names] if isinstance(names, str) else names)}
    own = [kind for kind in type(base).__mro__ if kind.__module__.startswith("transformers.models.")]
    if own and not own[0].__name__.endswith("PreTrainedModel") and not any(kind.__name__ in causal for kind in own):
        raise UnsupportedError(
            f"sequence parallelism: {name} is not a causal language model (...ForCausalLM), which is needed because labels "
            f"are shifted by one token{_OTHER}"
        )
    config: Any = base.config.get_text_config()
    parts = base.modules() if config is base.config else _text_parts(base)
    if any(getattr(part, "is_decoder", None) is False for part in parts) or getattr(config, "is_causal", True) is False:
        raise UnsupportedError(
            f"sequence parallelism: attention of {name} sees later tokens, also padding at the end of sequences; create it with is_decoder="
            f"True (is_causal=True){_OTHER}"
        )


def _text_parts(base: Any) -> Iterable[nn.Module]:
    """Return the parts of the text model of a model with towers."""
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    return decoder.modules() if isinstance(decoder, nn.Module) and decoder is not base else ()


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


def require_dividable(model: nn.Module, inside: int, implementation: str | None) -> str:
    """Return the attention implementation of a transformers model that can be trained over parts of sequences.

    Args:
        model: The model, or an adapter around it.
        inside: Ranks that exchange heads inside each place; 1 without sequence parallelism.
        implementation: What the script asks for; None takes the model's.

    Raises:
        ConfigError: The model has another implementation, or heads that ``inside`` does not divide.
        UnsupportedError: It is of a kind that cannot be divided.
    """
    base = _inside(model)
    heads, name = _heads(getattr(model, "config", None)), type(base).__name__
    try:
        found, reason = attention_of(model), reason_to_cut_layers(model)
        require_made_with(found, implementation)
        if not reason and heads is not None:
            require_even_heads(heads, inside)
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
    if not _loss_is_of_tokens(base):
        raise UnsupportedError(
            f"context parallelism: the loss of {name} is not one of each token, or is not known to be, so losses of parts of sequences "
            "cannot be joined, and there is no single model of transformers inside whose sequences could be divided in its place"
        )
    if any(getattr(part, "pooler", None) is not None for part in base.modules()):
        raise UnsupportedError(f"context parallelism: {name} pools one token of whole sequences; make it with add_pooling_layer=False")
    return found


def divided_part(model: nn.Module) -> nn.Module:
    """Return the part of ``model`` whose forward can be given parts of sequences under context parallelism.

    It is the model itself if the losses of parts make up the loss of whole sequences. A forward that a script has written may compute any
    loss, and one that classifies sequences needs whole ones: there it is the transformers model inside, and the rest of the forward is
    computed with whole sequences on every rank. Without a single such model it is ``model``, which `require_dividable` refuses.
    """
    base = _inside(model)
    if _is_model(base) and _loss_is_of_tokens(base):
        return model
    inside = getattr(base, "base_model", base) if _is_model(base) else base
    if inside is base:
        found = _outermost(base)
        inside = found[0] if len(found) == 1 else base
    return model if inside is base else divided_part(inside)


def _is_model(part: nn.Module) -> bool:
    return hasattr(part, "get_input_embeddings")


def _outermost(base: nn.Module) -> list[nn.Module]:
    """Return the models of transformers inside ``base`` that lie in no other."""
    return [found for part in base.children() for found in ([part] if _is_model(part) else _outermost(part))]


def _loss_is_of_tokens(base: Any) -> bool:
    """Return whether the loss of a model's forward is a mean over the labels of its tokens, which parts of sequences make up.

    This is known of transformers' own forwards for tasks of one output per token, and taken for granted of others that read
    ``shift_labels`` or pass further arguments to the model's ``loss_function``, as fused losses do.
    """
    if not has_own_forward(base):
        return shifts_labels(base) or _classes(base)[0].__name__.endswith(_TOKEN_TASKS)
    takes_labels = "labels" in inspect.signature(inspect.unwrap(base.forward)).parameters
    return (not takes_labels and _is_base(base)) or reads_shifted_labels(base)


def has_own_forward(model: nn.Module) -> bool:
    """Return whether a script has written the forward of a model, or of the model in an adapter."""
    return not str(getattr(inspect.unwrap(_inside(model).forward), "__module__", "")).startswith("transformers.")


def shifts_slices(model: nn.Module, given: Mapping[str, Any]) -> bool:
    """Return whether a forward of a script's own would shift labels that were shifted before slices were cut.

    Args:
        model: The model, or an adapter around it.
        given: Arguments of its forward, by name.
    """
    if given.get("labels") is None or not has_own_forward(model) or reads_shifted_labels(model):
        return False
    names, passes_on = _read_by_forward(model)
    return not (passes_on and (not names or "super" in names))


def _read_by_forward(model: nn.Module) -> tuple[set[Any], bool]:
    """Return the names and constants in the code of a model's forward, and whether it takes ``**kwargs``, which it may pass on.

    Both are for the forward as written; there are no names if it has no code of Python.
    """
    forward = inspect.unwrap(_inside(model).forward)
    code = getattr(getattr(forward, "__func__", forward), "__code__", None)
    names = set() if code is None else {*code.co_varnames, *code.co_names, *(text for text in code.co_consts if isinstance(text, str))}
    return names, any(given.kind is given.VAR_KEYWORD for given in inspect.signature(forward).parameters.values())


def _is_base(base: nn.Module) -> bool:
    """Return whether a model has no other inside that computes without its head."""
    return getattr(base, "base_model", base) is base and not _outermost(base)


def reads_shifted_labels(model: nn.Module) -> bool:
    """Return whether a forward of a script's own computes its loss with ``shift_labels``, or leaves the loss to ``loss_function``."""
    names, passes_on = _read_by_forward(model)
    return "shift_labels" in names or (passes_on and "loss_function" in names)


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


def _classes(base: nn.Module) -> list[type]:
    return [kind for kind in inspect.getmro(type(base)) if kind.__module__.startswith("transformers.models.")] or [type(base)]
