"""Build the model of a plan on the meta device, from a folder, a configuration, a model type or Python code; choose trained parameters."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from hf_zero.assembly.kept_types import named_for_fp32
from hf_zero.config.auto import read_model_config
from hf_zero.config.problems import nearest
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.integrations.plan_table import class_of
from hf_zero.plan.inputs import ModelWish, unknown_model_error
from hf_zero.system.reading import shown
from hf_zero.tensor_parallel.skeleton import argument_names

Batch = Mapping[str, Any]
_PYTHON = "python:"
_HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")  # IDs of models on the Hub
_COUNTS = re.compile(r"(^|_)(layers?|experts|blocks|depths?)($|_(?!size|dim|id))")
_SEQUENCE = 1024  # default of --sequence
_MOST = 4096  # largest number of layers, or of experts of a layer
_MOST_MODULES = 250_000
_PER_SAMPLE_LABELS = ("SequenceClassification", "ImageClassification")
_ALLOWED = "all, lora:r=16 (optional: alpha=32, targets=q_proj+v_proj) or match:REGEX is allowed"


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan, with a function that makes its batches.

    Attributes:
        module: The model, on the meta device.
        batch: Function of (samples, length) that returns keyword arguments of forward, with tensors on torch's default device.
        vocabulary: Size of the last dimension of the logits; 0 if the model has none.
        positions: Length in tokens of the longest sequence that the configuration allows; 0 if it has no limit.
        moves: Whether activations are offloaded to the host between forward and backward.
    """

    module: nn.Module
    batch: Callable[[int, int], Batch]
    vocabulary: int = 0
    positions: int = 0
    moves: bool = False


def build_model(wish: ModelWish) -> PlannedModel:
    """Return the model that ``wish`` describes, on the meta device.

    Raises:
        ConfigError: The model does not exist or cannot be built.
    """
    planned = _from_python(wish) if wish.name.startswith(_PYTHON) else _from_config(wish)
    module = planned.module
    if wish.checkpointing:
        _checkpoint(module, wish.checkpointing)
    return replace(planned, module=choose_trainable(module, wish.trainable), moves=wish.moves)


def sequence_of(asked: int | None, positions: int) -> int:
    """Return the number of tokens per sample.

    Args:
        asked: Value of ``--sequence``; None for 1024, or ``positions`` if that is smaller.
        positions: Longest sequence of the model; 0 if it has no limit.

    Raises:
        ConfigError: ``asked`` exceeds ``positions``.
    """
    if asked is None:
        return min(_SEQUENCE, positions or _SEQUENCE)
    if positions and asked > positions:
        raise ConfigError(
            f"--sequence is {asked}, but the model has {positions} positions (max_position_embeddings): give at most {positions}, or plan "
            f"a model with more positions: --set max_position_embeddings={asked}"
        )
    return asked


# -- sources -------------------------------------------------------------------------------------------------------------


def _from_config(wish: ModelWish) -> PlannedModel:
    config = _configuration(wish.name, dict(wish.settings))
    kind = class_of(config)
    attention = "eager" if wish.attention == "eager" else "sdpa"
    for part in [
        config,
        *(getattr(config, name) for name in getattr(config, "sub_configs", {}) if getattr(config, name, None) is not None),
    ]:
        part.use_cache = False  # like Trainer in training
        if getattr(part, "is_encoder_decoder", False) and getattr(part, "decoder_start_token_id", None) is None:
            part.decoder_start_token_id = 0  # the id does not influence the plan
    with torch.device("meta"):
        try:
            with _bounded_modules():
                module = kind._from_config(config, attn_implementation=attention)
        except ConfigError:
            raise
        except Exception as error:  # a configuration may contain any value
            raise ConfigError(f"{kind.__name__} cannot be built from this configuration: {_error_text(error)}") from error
    # A run loads weights: from_pretrained keeps these in fp32, whatever the dtype of the others.
    for tensor in named_for_fp32(module, module.dtype):
        tensor.data = tensor.data.float()
    module.train()
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(inner, "max_position_embeddings", None)
    known = positions if isinstance(positions, int) and positions > 0 else 0
    return PlannedModel(module, _batch_maker(module), int(getattr(inner, "vocab_size", 0) or 0), known)


def _configuration(name: str, settings: dict[str, Any]) -> Any:
    """Return the transformers configuration of the model ``name``, with ``settings`` in place of its values."""
    import transformers

    found = read_model_config(name, pipe=True)
    if found is not None:
        if "model_type" not in found:
            raise ConfigError(f"the model {name!r}: its configuration has no model_type, so it does not describe a transformers model")
        content = {**found, **settings}
        kind = content.pop("model_type")
        if not isinstance(kind, str):
            raise ConfigError(f"the model {name!r}: its model_type is {shown(kind)}; the name of a transformers model type is allowed")
    elif "/" not in name:
        kind, content = name, settings
    else:
        found = copy.deepcopy(_from_hub(name))
        kind, content = found.pop("model_type"), {**found, **settings}
    _check_counts(content, f"the configuration of {kind}")
    if kind in transformers.CONFIG_MAPPING:
        _require_known_names(kind, transformers.CONFIG_MAPPING[kind], settings)
    try:
        return transformers.AutoConfig.for_model(kind, **content)
    except ValueError as error:
        if kind not in transformers.CONFIG_MAPPING:
            raise ConfigError(_unknown(kind, list(transformers.CONFIG_MAPPING))) from None
        raise ConfigError(f"the configuration of {kind}: {_first_lines(error)}") from error
    except Exception as error:  # transformers checks types with its own library, which has other exceptions
        raise ConfigError(f"the configuration of {kind}: {_error_text(error)}") from error


@functools.cache
def _from_hub(name: str) -> dict[str, Any]:
    """Return the configuration of a model on the Hub, or in the local cache of the Hub.

    Raises:
        ConfigError: The model does not exist, or the Hub cannot be reached.
    """
    import transformers

    if Path(name).parent.is_dir() or not _HUB.fullmatch(name):
        raise unknown_model_error(name)
    try:
        content: dict[str, Any] = transformers.AutoConfig.from_pretrained(name).to_dict()
    except Exception as error:  # of the network, of the Hub, or of a configuration that needs remote code
        reason = _error_text(error)
        raise ConfigError(f"the model {name!r} is not a local file or folder, and cannot be loaded from the Hub: {reason}") from error
    return content


def _check_counts(content: Any, where: str, levels: int = 8) -> None:
    """Raise if a number of layers or experts, in any nested block, is negative or would take hours to build.

    Args:
        content: The configuration.
        where: Description of the configuration for the message.
        levels: Number of levels of nested blocks to check.

    Raises:
        ConfigError: A number is outside of 0 to 4,096.
    """
    if not isinstance(content, dict) or levels <= 0:
        return
    for key, value in content.items():
        _check_counts(value, where, levels - 1)
        if not _COUNTS.search(str(key)):
            continue
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and not isinstance(number, bool) and not 0 <= number <= _MOST:
                raise ConfigError(f"{where}: {key} is {shown(value)}; whole numbers from 0 to {_MOST:,} are allowed")


@contextmanager
def _bounded_modules() -> Iterator[None]:
    """Stop the building of a model inside the ``with`` that has too many modules.

    Raises:
        ConfigError: The model has more than 250,000 modules.
    """
    made = 0

    def count(module: nn.Module, name: str, inner: nn.Module | None) -> None:
        nonlocal made
        made += 1
        if made > _MOST_MODULES:
            raise ConfigError(f"this configuration describes a model of more than {_MOST_MODULES:,} modules; fewer are allowed")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _require_known_names(kind: str, config_class: Any, settings: Mapping[str, Any]) -> None:
    """Raise if ``settings`` has a key that the configuration does not know; transformers would keep it without effect."""
    try:
        config = config_class()
        known = {*dir(config), *getattr(config_class, "attribute_map", {}), "experts_implementation"}
    except Exception:  # a configuration that cannot be built without its parts, which are checked when it is built
        return
    for name in settings:
        if name not in known and f'"{name}"' not in _code_of(config):
            guess = nearest(name, sorted(found for found in known if not found.startswith("_")))
            hint = f"; did you mean {guess}?" if guess else ""
            raise ConfigError(f"--set {name}: the configuration of {kind} has no {name}{hint}")


def _code_of(config: Any) -> str:
    """Return the source code of the model of ``config``, because models may read keys that the configuration class does not list."""
    try:
        return inspect.getsource(sys.modules[class_of(config).__module__])
    except (ConfigError, OSError):
        return ""


def _unknown(kind: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(kind, known, n=3)
    hint = f"; similar names: {', '.join(near)}" if near else ""
    return f"the model {kind!r} is not a file, and transformers has no model_type of this name{hint}"


def _error_text(error: Exception) -> str:
    """Return the message of an error; with its class, ``KeyError: 'gelo'``, unless it is a ValueError or ImportError."""
    return _first_lines(error) if isinstance(error, (ValueError, ImportError)) else f"{type(error).__name__}: {_first_lines(error)}"


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__


def _line_text(error: BaseException, file: str) -> str:
    """Return the text " in line N" for the line of ``file`` that raised ``error``; "" if another file did."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == Path(file)]
    return f" in line {lines[-1]}" if lines else ""


def _from_python(wish: ModelWish) -> PlannedModel:
    file, _, function = wish.name.removeprefix(_PYTHON).rpartition(":")
    if not file or not function:
        raise ConfigError(f"the model {wish.name!r}: write python:FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location("hf_zero_planned_model", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise ConfigError(f"the model {wish.name!r}: there is no file {file}")
    loaded = importlib.util.module_from_spec(spec)
    with torch.device("meta"):
        try:
            spec.loader.exec_module(loaded)
            maker = getattr(loaded, function, None)
            made = maker(**wish.settings) if callable(maker) else None
        except Exception as error:  # any error of the user's code; an uncaught one would exit with 1, "it does not fit"
            raise ConfigError(f"the model {wish.name!r}: {type(error).__name__}{_line_text(error, file)}: {_first_lines(error)}") from error
    if not callable(maker):
        raise ConfigError(f"the model {wish.name!r}: {file} has no function {function}")
    module, batch = made if isinstance(made, tuple) else (made, None)
    if not isinstance(module, nn.Module):
        returned = type(module).__name__
        raise ConfigError(f"the model {wish.name!r}: {function} returned a {returned}; a module, or (module, batch), is allowed")
    if batch is not None and not callable(batch):
        raise ConfigError(
            f"the model {wish.name!r}: {function} returned a {type(batch).__name__} beside the module; a function of (samples, length) "
            "that returns the keyword arguments of forward is allowed"
        )
    return PlannedModel(module, batch or _batch_maker(module), int(getattr(getattr(module, "config", None), "vocab_size", 0) or 0))


def takes_every(module: nn.Module, blocks: int) -> bool:
    """Return whether ``module`` can recompute every n-th of its ``blocks`` only (``every_n_layers`` of transformers)."""
    from transformers import modeling_layers

    kind = getattr(modeling_layers, "GradientCheckpointingLayer", None)
    enable = getattr(module, "activation_checkpointing_enable", None)
    counted = sum(isinstance(part, kind) for part in module.modules()) if kind is not None else 0
    return enable is not None and "every_n_layers" in inspect.signature(enable).parameters and counted == blocks


def _checkpoint(module: nn.Module, every: int) -> None:
    enable = getattr(module, "activation_checkpointing_enable", None) or getattr(module, "gradient_checkpointing_enable", None)
    if enable is None or not getattr(module, "supports_gradient_checkpointing", True):
        raise ConfigError(f"{type(module).__name__} has no gradient_checkpointing_enable(): leave --checkpoint-activations out")
    if every == 1:
        enable()
    elif "every_n_layers" in inspect.signature(enable).parameters:
        enable(every_n_layers=every)
    else:
        raise ConfigError(f"{type(module).__name__} recomputes all blocks or none (it has no every_n_layers): remove --every-n-layers")


# -- batches -------------------------------------------------------------------------------------------------------------


def _batch_maker(module: nn.Module) -> Callable[[int, int], Batch]:
    """Return a function of (samples, length) that makes inputs and labels for ``module``, like Trainer's collators.

    Raises:
        ConfigError: ``forward`` takes neither ``input_ids`` nor ``pixel_values``.
    """
    names, config, kind = argument_names(module), getattr(module, "config", None), type(module).__name__
    labelled = "labels" in names
    per_sample = any(name in kind for name in _PER_SAMPLE_LABELS)
    image = getattr(config, "image_size", None)
    if "input_ids" not in names and not ("pixel_values" in names and image):
        raise ConfigError(
            f"{kind}.forward takes neither input_ids nor pixel_values: let a function of python:FILE.py return (module, batch)"
        )

    def batch(samples: int, length: int) -> Batch:
        tokens = torch.zeros(samples, length, dtype=torch.long)
        if "input_ids" in names:
            made = {"input_ids": tokens}
        else:
            size = image if isinstance(image, (tuple, list)) else (image, image)
            made = {"pixel_values": torch.zeros(samples, getattr(config, "num_channels", 3), *size)}
        if labelled:
            made["labels"] = tokens[:, 0] if per_sample else tokens
        return made

    return batch


def loss_of(outputs: Any) -> torch.Tensor:
    """Return the loss from the result of a forward; without one, the mean of the first floating-point tensor.

    Raises:
        ConfigError: The result has neither.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    from torch.utils._pytree import tree_leaves

    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    found = next(
        (value for value in tree_leaves(list(values) if not isinstance(values, torch.Tensor) else values) if _differentiable(value)), None
    )
    if found is None:
        raise ConfigError("the model's forward returned neither a loss nor a floating-point tensor to compute one from")
    return found if found.ndim == 0 else found.float().mean()


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Replace the meta tensors of ``module`` by empty tensors on ``device``; tied parameters stay tied."""
    made: dict[int, torch.Tensor] = {}

    def here(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            values = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            made[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
        return made[id(tensor)]

    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = here(tensor)  # type: ignore[assignment]


def choose_trainable(module: nn.Module, wish: str) -> nn.Module:
    """Return ``module`` with the other parameters frozen, or with LoRA adapters.

    Args:
        module: The model, on the meta device.
        wish: Value of ``--trainable``: ``all``, ``lora:r=16,alpha=32,targets=q_proj+v_proj``, or ``match:REGEX`` of parameter names.

    Raises:
        ConfigError: ``wish`` has another form, or matches no parameter.
        UnsupportedError: ``wish`` requests LoRA, and PEFT is not installed.
    """
    kind, _, rest = wish.partition(":")
    if wish == "all":
        return module
    if kind == "lora":
        return _with_adapters(module, wish, rest)
    if kind == "match" and rest:
        return _matching(module, rest)
    raise ConfigError(f"--trainable is {wish!r}; {_ALLOWED}")


def _matching(module: nn.Module, pattern: str) -> nn.Module:
    try:
        chosen = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--trainable match:{pattern} is not a regular expression: {error}") from None
    names = [name for name, param in module.named_parameters() if chosen.search(name)]
    if not names:
        raise ConfigError(f"--trainable match:{pattern} matches no parameter of {type(module).__name__}")
    for name, param in module.named_parameters():
        param.requires_grad_(name in set(names))
    return module


def _with_adapters(module: nn.Module, wish: str, rest: str) -> nn.Module:
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        name, found, value = part.partition("=")
        if not found or name not in ("r", "alpha", "targets"):
            raise ConfigError(f"--trainable is {wish!r}, and its part {part!r} is unknown; {_ALLOWED}")
        values[name] = value
    numbers = [values.get("r", "8"), values.get("alpha", "16")]
    if not all(number.isdigit() and int(number) > 0 for number in numbers):
        raise ConfigError(f"--trainable is {wish!r}: r and alpha must be whole numbers of at least 1")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise UnsupportedError(f"--trainable {wish} needs the peft library: pip install peft") from None
    targets = values["targets"].split("+") if "targets" in values else "all-linear"
    try:
        with torch.device("meta"):
            adapted: nn.Module = get_peft_model(module, LoraConfig(r=int(numbers[0]), lora_alpha=int(numbers[1]), target_modules=targets))
    except ValueError as error:
        raise ConfigError(f"--trainable {wish}: {str(error).splitlines()[0][:200]}") from error
    return adapted
