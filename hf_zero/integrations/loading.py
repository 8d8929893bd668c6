"""Adapt ``zero.Init`` and ``GatheredParameters`` to transformers' ``from_pretrained`` and ``from_config`` at stage 3."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import metadata
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.random import fork_rng

from hf_zero.config.read import read_config
from hf_zero.core.model_init import ConstructorAccess
from hf_zero.core.schedule import gathered_parameters as gathered
from hf_zero.core.units.marks import is_expert
from hf_zero.core.units.unit import find_unit, full_shape, is_sharded
from hf_zero.core.units.values import show_as_built
from hf_zero.deepspeed import zero_init as init
from hf_zero.errors import ConfigError, StateError
from hf_zero.integrations import callers, methods
from hf_zero.observe import warn_once

ALLOW_VARIABLE = "HF_ZERO_ALLOW_MISSING_WEIGHTS"
_SHOWN = 5
_SECTION, _SIZE = "tensor_parallel", "autotp_size"


class Init(init.Init):
    """``hf_zero.zero.Init`` that also supports a load at stage 3 together with tensor parallelism.

    [Note: loading under tensor parallelism] transformers 5 does not convert names of a checkpoint if the configuration has ``autotp_size``,
    because with DeepSpeed the layers would already be split. Here the layers are not split before ``initialize``: a load at stage 3 fills
    shards over all ranks, and ``initialize`` splits one parameter at a time. So the function that converts names reads ``autotp_size`` 1;
    all other code reads the user's value.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = kwargs.get("config_dict_or_path")
        if isinstance(config, dict) and isinstance(config.get(_SECTION), dict):
            config[_SECTION] = _Section(config[_SECTION])


class MiCSInit(Init):
    """``Init`` over the shard groups of ``zero_optimization.mics_shard_size``; DeepSpeed's ``zero.MiCS_Init``.

    ``Init`` reads the key too; this class requires it.

    Args:
        module: An existing module to shard at once.
        data_parallel_group: Process group to divide into shard groups; None is all ranks.
        **arguments: Further arguments of ``Init``.

    Raises:
        ConfigError: The configuration has no ``mics_shard_size``, or one that does not divide the ranks.
    """

    def __init__(self, module: nn.Module | None = None, data_parallel_group: Any = None, **arguments: Any) -> None:
        source = arguments.get("config_dict_or_path") or arguments.get("config")
        zero = read_config(source).get("zero_optimization") if source is not None else None
        if arguments.get("enabled", True) and (not isinstance(zero, dict) or zero.get("mics_shard_size", -1) == -1):
            raise ConfigError(
                "MiCS_Init needs a configuration with zero_optimization.mics_shard_size, the ranks of a shard group: pass it as "
                "config_dict_or_path=, or use zero.Init to shard over all ranks"
            )
        super().__init__(module, data_parallel_group, **arguments)


class _Section(dict[str, Any]):
    """The section ``tensor_parallel`` of the configuration; see [Note: loading under tensor parallelism]."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key``; ``autotp_size`` is 1 for the function of transformers that converts names."""
        if key == _SIZE and callers.running(methods.CONVERSIONS):
            return 1
        return super().get(key, default)


class GatheredParameters(gathered.GatheredParameters):
    """``hf_zero.zero.GatheredParameters`` that also checks how many parameters ``from_pretrained`` found in the checkpoint.

    Training from mostly random weights is the most costly failure of stage 3, and the loader only warns. If more than half of the
    parameters, by number and by elements, were not in the checkpoint, every rank raises before the missing parameters are gathered.
    HF_ZERO_ALLOW_MISSING_WEIGHTS=1 turns this check off. Missing parameters are gathered in the order of the model, which is the same on
    every rank, and all ranks draw their values ([Note: same seed, same model]).

    Raises:
        StateError: More than half of the parameters are missing.
    """

    def __init__(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
        call = _running_load()
        model: nn.Module | None = call.caller if call is not None else None
        if model is not None:
            _require_most_weights(model)
            # transformers 4 passes detached copies, which are not parameters; 5 passes a set, whose order differs between ranks.
            params = [param for param in model.parameters() if not getattr(param, "_is_hf_initialized", False)]
        self._missing = model is not None
        # Of weights that are not missing: transformers 4, which passes the missing names, initialises before it loads.
        self._around, self._access = ExitStack(), ConstructorAccess(shows_values=call is None or "missing_keys" not in call.given)
        super().__init__(params, *args, **kwargs)

    def __enter__(self) -> GatheredParameters:
        super().__enter__()
        if self._missing:  # draw missing values as in an unsharded load
            for unit in self.gathered:
                show_as_built(unit)
            self._around.enter_context(configuration_hidden())
            self._around.enter_context(self._access)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._around.close()
        if error is not None:
            self._access.abandon(error)
        self._access.close()
        super().__exit__(kind, error, trace)


@contextmanager
def configuration_hidden() -> Iterator[None]:
    """Return a context in which transformers sees no DeepSpeed configuration: at stage 3 its models have code that only rank 0 runs."""
    from transformers.integrations import deepspeed

    reference: Any = deepspeed._hf_deepspeed_config_weak_ref
    shown = reference()
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed.set_hf_deepspeed_config(shown)


def build(method: Any, model_class: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``PreTrainedModel._from_config``: at stage 3 build the model like without stage 3, but inside ``zero.Init``.

    [Note: same seed, same model] At stage 3 transformers 5 would disable random initialisation in constructors and let only rank 0 draw the
    weights afterwards. The weights would differ from those without sharding, and the random generators would differ between ranks from then
    on. Some models also have code for stage 3 that only rank 0 runs. So the configuration is hidden from the library while it builds the
    model.

    Args:
        method: The replaced method.
        model_class: Class of the model.
        config: Configuration of the model.
        *args: Further arguments of the method.
        **kwargs: Further arguments of the method.
    """
    from transformers import modeling_utils
    from transformers.integrations import deepspeed

    quantized = getattr(config, "quantization_config", None) is not None
    if not deepspeed.is_deepspeed_zero3_enabled() or modeling_utils._is_ds_init_called or quantized:
        return method(model_class, config, *args, **kwargs)
    _tell_that_it_shards()
    with Init(config_dict_or_path=deepspeed.deepspeed_config()), configuration_hidden():
        return method(model_class, config, *args, **kwargs)


def contexts_of_load(method: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Replace ``PreTrainedModel.get_init_context``, the contexts in which ``from_pretrained`` builds a model: add ``zero.Init`` at stage 3.

    transformers 5 builds a model on the meta device before it loads values, so constructors draw no random numbers for its weights. At
    stage 3 it would build the model with values instead, which would draw random numbers. transformers 4 always builds with values.

    Classes of other libraries and of scripts are built with values: their constructors may be the only code that gives buffers values,
    which no checkpoint has. Classes of transformers give them values in ``_init_weights``.

    Args:
        method: The replaced method.
        *args: Arguments of the method.
        **kwargs: Arguments of the method.
    """
    from transformers.integrations import deepspeed

    given = inspect.signature(method).bind(*args, **kwargs).arguments
    if not deepspeed.is_deepspeed_zero3_enabled() or given["is_quantized"] or given["_is_ds_init_called"] or "dtype" not in given:
        return method(*args, **kwargs)  # type: ignore[no-any-return]
    if not given["cls"].__module__.startswith("transformers."):
        return [_draws_undone(), *method(*args, **kwargs)]
    _tell_that_it_shards()
    init = Init(config_dict_or_path=deepspeed.deepspeed_config())
    init.inner.fills_meta = True
    with configuration_hidden():
        contexts = method(*args, **kwargs)
    return [init, configuration_hidden(), *contexts]


def _draws_undone() -> Any:
    """Return a context that restores torch's random states at its end."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return fork_rng([]) if accelerator is None else fork_rng([torch.accelerator.current_device_index()], device_type=accelerator.type)


def _tell_that_it_shards() -> None:
    """Log, by the library's own logger, that a model is built as shards: scripts and tests look for the beginning of this line."""
    from transformers.utils import logging

    logging.get_logger("transformers.modeling_utils").info("Detected DeepSpeed ZeRO-3: hf_zero shards this model as it is built")


def tie_weights(method: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace ``PreTrainedModel.tie_weights``: gather tied weights first, because it compares them if a checkpoint has both names.

    Args:
        method: The replaced method.
        model: The model.
        *args: Arguments of the method.
        **kwargs: Arguments of the method.
    """
    loads = (args[0] if args else kwargs.get("missing_keys")) is not None
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items() if loads else ()
    modules = dict(model.named_modules()) if pairs else {}
    # The module's other parameters too: the method pads a bias to the length of its weight.
    holders = [modules[path] for pair in pairs for name in pair if (path := name.rpartition(".")[0]) in modules]
    params = [param for module in holders for param in module.parameters(recurse=False)]
    with gathered.GatheredParameters([param for param in params if is_sharded(param)]):
        return method(model, *args, **kwargs)


def resize_token_embeddings(
    method: Any, model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Replace ``PreTrainedModel.resize_token_embeddings``: change the same tensors at stage 3 as without it, and warn of lost rows.

    [Note: resized vocabularies] At stage 3 transformers replaces embeddings and head even if their size stays. This draws random numbers (a
    later LoRA would begin with other weights), and frozen ones would train from then on. A sharded weight shows 0 rows: without
    ``new_num_tokens`` it would be padded to 0 rows, and a script that resizes if ``len(tokenizer) > weight.shape[0]`` always resizes, so a
    vocabulary that is padded beyond its tokenizer loses rows that plain PyTorch keeps. A script may also want that, so it is a warning.

    Args:
        method: The replaced method.
        model: The model.
        new_num_tokens: Rows to have; None for those that are there.
        pad_to_multiple_of: The number of rows is rounded up to a multiple of it.
        *args: Further arguments of the method.
        **kwargs: Further arguments of the method.

    Returns:
        The embeddings that the method returns.
    """
    from transformers.integrations import deepspeed

    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    ends = [end for end in ends if isinstance(getattr(end, "weight", None), nn.Parameter)]
    hidden = [end.weight for end in ends if is_sharded(end.weight)]
    if not hidden or ends[0] is not model.get_input_embeddings() or not deepspeed.is_deepspeed_zero3_enabled():
        return method(model, new_num_tokens, pad_to_multiple_of, *args, **kwargs)
    sizes = [full_shape(end.weight)[0] for end in ends]
    if new_num_tokens is None and pad_to_multiple_of is not None:
        new_num_tokens = sizes[0]
    rows = sizes[0] if new_num_tokens is None else -(-new_num_tokens // (pad_to_multiple_of or 1)) * (pad_to_multiple_of or 1)
    if all(size == rows for size in sizes):
        with gathered.GatheredParameters(hidden), configuration_hidden():
            return method(model, new_num_tokens, pad_to_multiple_of, *args, **kwargs)
    trains = [end.weight.requires_grad for end in ends]
    with _drawing_once(model, len(ends) == 2 and ends[0].weight is ends[1].weight):
        embeddings = method(model, new_num_tokens, pad_to_multiple_of, *args, **kwargs)
    for end, trained in zip((model.get_input_embeddings(), model.get_output_embeddings()), trains, strict=False):
        end.requires_grad_(trained)
    if rows < sizes[0]:
        warn_once(
            f"resize_token_embeddings removed rows of the vocabulary of {type(model).__name__}: it had {sizes[0]} and has {rows} now. At "
            "stage 3 weight.shape[0] of a sharded embedding is 0, so a script that resizes if len(tokenizer) is larger always "
            "resizes. If the rows should stay, compare len(tokenizer) with model.config.get_text_config().vocab_size"
        )
    return embeddings


@contextmanager
def _drawing_once(model: Any, tied: bool) -> Iterator[None]:
    """Keep the random state where a ``tied`` head is resized: without stage 3 the resized embeddings are its weight already."""
    if not tied:
        yield
        return
    resize, device = model._get_resized_lm_head, model.get_output_embeddings().weight.device

    def resize_head(*args: Any, **kwargs: Any) -> Any:
        with fork_rng([] if device.type == "cpu" else [device], device_type="cuda" if device.type == "cpu" else device.type):
            return resize(*args, **kwargs)

    model._get_resized_lm_head = resize_head
    try:
        yield
    finally:
        del model._get_resized_lm_head


def fill_sharded(method: Any, model: nn.Module, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Replace ``_load_state_dict_into_zero3_model``, which fills a sharded model from a checkpoint; collective.

    It prevents a hang, and it keeps only the conversions of names that the checkpoint needed. transformers would keep all of them and undo
    them in ``save_pretrained``: a BERT's ``LayerNorm.weight`` would be saved as ``LayerNorm.gamma``.

    [Note: values that a module adds as it loads] Only rank 0 loads a module; then all ranks broadcast the buffers in the state dict. A
    module may add values to it that its checkpoint lacks (a batch norm adds ``num_batches_tracked``), and only rank 0 would broadcast them.
    So they are removed from the state dict again. They are then missing on every rank, and initialised like all missing values.

    [Note: buffers of a checkpoint] Before transformers 5.15 the function loaded buffers only on rank 0, and only of modules that have
    parameters, too: the running statistics of a batch norm stayed at their initial values on the other ranks. So all buffers that the state
    dict has are copied here, on each rank. Later versions have meta tensors in the state dict of the other ranks, and broadcast.

    Args:
        method: The replaced function.
        model: The model.
        state_dict: Names and values of the checkpoint.
        *args: Further arguments of the function.
        **kwargs: Further arguments of the function.
    """
    if not (args or kwargs):  # transformers 4, which loads into tied weights under each name; without stage 3 the first name counts
        others = {name for same in _shared_names(model) for name in [name for name in same if name in state_dict][1:]}
        state_dict = {name: value for name, value in state_dict.items() if name not in others}
    adding = [module for module in model.modules() if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict]
    for module in adding:
        _without_additions(module)
    try:
        found = method(model, state_dict, *args, **kwargs)
    finally:
        for module in adding:
            del module.__dict__["_load_from_state_dict"]
    loaded = _load_buffers(model, state_dict)
    _share_originals(model)
    if hasattr(model, "_adjust_tied_keys_with_tied_pointers"):
        setattr(model, "_adjust_tied_keys_with_tied_pointers", partial(_note_shared, model))  # noqa: B010 - nn.Module's type
    if isinstance(found, tuple):  # transformers 5 returns the missing names too
        found[1].difference_update(loaded)
        _require_all_loaded(model, state_dict, found[1])
    conversions: Any = model.__dict__.get("_weight_conversions")
    if conversions is not None:
        model.__dict__["_weight_conversions"] = [conversion for conversion in conversions if _was_used(conversion, state_dict)]
    return found


def _shared_names(model: nn.Module) -> Iterable[list[str]]:
    """Return the names of each parameter of ``model``, in the order of the modules."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return names.values()


def _note_shared(model: Any, missing: Iterable[str]) -> None:
    """Add the names of shared parameters to ``model.all_tied_weights_keys``, and put the class's method in its place again; local.

    It stands for a method of transformers 5.2.0, which finds shared weights by the addresses of their values. Shards have none.
    """
    del model._adjust_tied_keys_with_tied_pointers
    for names in _shared_names(model):
        if not model.all_tied_weights_keys.keys() & set(names) and not set(names) <= set(missing):
            model.all_tied_weights_keys.update(dict.fromkeys(names[1:], names[0]))


@torch.no_grad()
def _load_buffers(model: Any, state_dict: dict[str, Any]) -> set[str]:
    """Copy the values of ``state_dict`` to persistent buffers, and return the names of these buffers."""
    loaded, within = set(), _within(model)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            value = state_dict.get(name, state_dict.get(name.removeprefix(within)))  # a checkpoint of the base model has no prefix
            if name.rpartition(".")[2] in module._non_persistent_buffers_set or not isinstance(value, torch.Tensor) or value.is_meta:
                continue
            if value.shape == buffer.shape:
                buffer.copy_(value)
                buffer._is_hf_initialized = True
                loaded.add(name)
    return loaded


@torch.no_grad()
def _share_originals(model: nn.Module) -> None:
    """Give all ranks rank 0's values of the originals of parametrizations, which transformers loads on rank 0 only; collective.

    They stay unsharded until ``initialize``.
    """
    owners = (find_unit(param) for param in model.parameters() if not is_expert(param))
    unit = next((owner[0] for owner in owners if owner is not None), None)
    for name, module in model.named_modules():
        for param in module.parameters() if isinstance(module, ParametrizationList) else ():
            if unit is not None and find_unit(param) is None:
                unit.collectives.data.broadcast(param, 0, name)


def _require_all_loaded(model: Any, state_dict: dict[str, Any], missing: set[str]) -> None:
    """Raise if weights are ``missing`` that the checkpoint has under their own names: transformers 5.0.0 loses them if it fuses experts."""
    within, params = _within(model), dict(model.named_parameters(remove_duplicate=False))
    lost = sorted(name for name in missing & params.keys() if name in state_dict or name.removeprefix(within) in state_dict)
    if lost:
        raise StateError(
            f"transformers {metadata.version('transformers')} did not load {len(lost)} weights at stage 3 that the checkpoint has, and "
            f"training would start from random numbers: {_some(lost)}. Version 5.0.0 does this for models with experts: use 5.1 or later"
        )


def _within(model: Any) -> str:
    """Return the prefix that names of this model have and a checkpoint of its base model lacks."""
    return f"{getattr(model, 'base_model_prefix', '')}."


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _was_used(conversion: Any, names: Iterable[str]) -> bool:
    """Return whether a checkpoint with these names needed ``conversion``; transformers before 5.20 does not record it."""
    recorded, pattern = getattr(conversion, "was_used", None), getattr(conversion, "compiled_sources", None)
    if recorded is not None or pattern is None:
        return bool(recorded is None or recorded())
    return any(pattern.search(name) for name in names)


def _without_additions(module: nn.Module) -> None:
    load = module._load_from_state_dict

    def loads(state_dict: dict[str, Any], *args: Any) -> None:
        before = len(state_dict)
        load(state_dict, *args)
        while len(state_dict) > before:
            state_dict.popitem()  # removes the entry that was added last

    module.__dict__["_load_from_state_dict"] = loads


@contextmanager
def zero3_init_context_manager(method: Any, plugin: Any, enable: bool = False) -> Iterator[None]:
    """Replace accelerate's `DeepSpeedPlugin.zero3_init_context_manager`: make ``enable=False`` effective.

    With ``enable=False`` scripts load models that only run forward and are never prepared (diffusers' examples do). accelerate stores the
    flag, but transformers still sees the configuration. At stage 3 the model would be sharded, and never gathered.

    Args:
        method: The replaced method.
        plugin: The plugin.
        enable: Whether ``from_pretrained`` shards models inside the context.
    """
    from transformers.integrations import deepspeed

    with method(plugin, enable):
        if enable:
            yield
            return
        deepspeed.unset_hf_deepspeed_config()
        try:
            yield
        finally:
            if getattr(plugin, "dschf", None) is not None:
                deepspeed.set_hf_deepspeed_config(plugin.dschf)


@contextmanager
def unwrap_model_for_generation(model: nn.Module) -> Iterator[nn.Module]:
    """Return a context in which all parameters of ``model`` are unsharded, so that any rank may generate alone; collective.

    The context yields ``model``, an engine or a module. The engine's hooks stay: they find every block unsharded and do nothing.
    """
    with GatheredParameters(model.parameters()):
        yield model


def _running_load() -> callers.Call | None:
    """Return the call that initialises missing weights of the model ``caller``; None from the second query of the same load on."""
    call = next(iter(callers.running(methods.MISSING_KEYS)), None)
    if call is None or call.answered or call.given.get("is_quantized"):
        return None
    call.answered = True
    return call


def _require_most_weights(model: nn.Module) -> None:
    if os.environ.get(ALLOW_VARIABLE, "0") not in ("0", ""):
        return
    params = {name: param for name, param in model.named_parameters() if not _is_tied(model, name)}
    missing = [name for name, param in params.items() if not getattr(param, "_is_hf_initialized", False)]
    elements = {name: full_shape(param).numel() for name, param in params.items()}
    lost = sum(elements[name] for name in missing)
    if 2 * len(missing) <= len(params) or 2 * lost <= sum(elements.values()):
        return
    source = getattr(getattr(model, "config", None), "name_or_path", None) or "the given weights"
    raise StateError(
        f"from_pretrained({str(source)!r}) into {type(model).__name__}: only {len(params) - len(missing)} of {len(params)} parameters "
        f"are in the checkpoint, and training would start from random numbers. Missing: {_some(missing)}. Either the checkpoint belongs to "
        "another architecture, or its names carry a prefix (module., _orig_mod., base_model.), or its tensors were saved empty at "
        f"stage 3 without a gather. To begin with random weights use from_config, or set {ALLOW_VARIABLE}=1"
    )


def _is_tied(model: Any, name: str) -> bool:
    """Return whether a parameter gets its values from another one after the load."""
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied is not None:
        return name in tied
    patterns = getattr(model, "_tied_weights_keys", None) or []
    return any(re.search(pattern, name) for pattern in patterns)
