"""Find the values of keys that are "auto" in the configuration: from the training arguments, which must agree with it, and the model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.config.problems import nearest
from hf_zero.errors import ConfigError
from hf_zero.system.reading import parse_json
from hf_zero.system.text_file import LIMIT_BYTES, read_bytes

_ZERO = "zero_optimization"
_NAMES = ("hidden_size", "hidden_sizes", "d_model", "n_embd", "dim", "model_dim")
_INNER = ("text_config", "language_config", "llm_config", "text_encoder", "decoder", "encoder", "generator", "thinker_config")


@dataclass(frozen=True)
class AutoRule:
    """Rule that fills a key set to "auto".

    Attributes:
        sources: Names of the source values; all are needed.
        fill: Function that computes the value from them, in that order.
        must_match: A value in the file must equal the source's; otherwise both are reported as a mismatch.
    """

    sources: tuple[str, ...]
    fill: Callable[..., Any] = lambda value: value
    must_match: bool = False

    def value(self, sources: Mapping[str, Any]) -> Any:
        """Return the value from `sources`, or None when one of them is missing."""
        given = [sources.get(name) for name in self.sources]
        return None if any(value is None for value in given) else self.fill(*given)

    def label(self) -> str:
        """Return the names of the sources as text for messages."""
        return " + ".join(self.sources) or "constant"


AUTO_RULES: dict[str, AutoRule] = {
    "train_micro_batch_size_per_gpu": AutoRule(("per_device_train_batch_size",), must_match=True),
    "gradient_accumulation_steps": AutoRule(("gradient_accumulation_steps",), must_match=True),
    "gradient_clipping": AutoRule(("max_grad_norm",), must_match=True),
    "optimizer.params.lr": AutoRule(("learning_rate",), must_match=True),
    "optimizer.params.betas": AutoRule(("adam_beta1", "adam_beta2"), lambda beta1, beta2: [beta1, beta2], must_match=True),
    "optimizer.params.eps": AutoRule(("adam_epsilon",), must_match=True),
    "optimizer.params.weight_decay": AutoRule(("weight_decay",), must_match=True),
    "scheduler.params.warmup_min_lr": AutoRule((), lambda: 0),
    "scheduler.params.warmup_max_lr": AutoRule(("learning_rate",), must_match=True),
    "scheduler.params.warmup_num_steps": AutoRule(("warmup_num_steps",), lambda steps: max(1, int(steps)), must_match=True),
    "scheduler.params.total_num_steps": AutoRule(("total_num_steps",), must_match=True),
    "fp16.enabled": AutoRule(("fp16",), bool, must_match=True),
    "bf16.enabled": AutoRule(("bf16",), bool, must_match=True),
    f"{_ZERO}.reduce_bucket_size": AutoRule(("hidden_size",), lambda hidden: hidden * hidden),
    f"{_ZERO}.stage3_prefetch_bucket_size": AutoRule(("hidden_size",), lambda hidden: int(0.9 * hidden * hidden)),
    f"{_ZERO}.stage3_param_persistence_threshold": AutoRule(("hidden_size",), lambda hidden: 10 * hidden),
    f"{_ZERO}.stage": AutoRule(("zero_stage",)),
    f"{_ZERO}.stage3_gather_16bit_weights_on_model_save": AutoRule(("zero3_save_16bit_model",), bool),
    f"{_ZERO}.offload_optimizer.device": AutoRule(("offload_optimizer_device",)),
    f"{_ZERO}.offload_optimizer.nvme_path": AutoRule(("offload_optimizer_nvme_path",)),
    f"{_ZERO}.offload_param.device": AutoRule(("offload_param_device",)),
    f"{_ZERO}.offload_param.nvme_path": AutoRule(("offload_param_nvme_path",)),
}
"""Dotted key -> rule. `train_batch_size` has no rule: it follows from the batch identity."""

SOURCE_NAMES: frozenset[str] = frozenset(name for rule in AUTO_RULES.values() for name in rule.sources) | {"world_size"}
"""Every name that `resolve(sources=...)` understands."""


def filled(config: Mapping[str, Any], sources: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return ``config`` without values "auto": each is replaced by the value of its source, or dropped if ``sources`` lacks it.

    Args:
        config: A configuration, or the block of it at ``path``.
        sources: Values by the names in ``SOURCE_NAMES``.
        path: Dotted key of the block; "" for a whole configuration.

    Raises:
        ConfigError: ``enabled`` of a block is "auto" and its source is not given: whether it is on has no default to fall back on.
    """
    kept: dict[str, Any] = {}
    for key, value in config.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, Mapping):
            kept[key] = filled(value, sources, here)
        elif value != "auto":
            kept[key] = value
        elif (found := AUTO_RULES[here].value(sources) if here in AUTO_RULES else None) is not None:
            kept[key] = found
        elif key == "enabled":
            name = AUTO_RULES[here].label() if here in AUTO_RULES else ""
            remedy = f"give --source {name}=true (or false)" if name else "write true or false"
            raise ConfigError(f'`{here}` is "auto", which Trainer replaces by its argument; there are no training arguments here: {remedy}')
    return kept


def source_of(text: str) -> tuple[str, Any]:
    """Return name and value of ``text``, a NAME=VALUE from the command line; a value that is no JSON is a text.

    Raises:
        ConfigError: ``text`` has no name or no "=".
    """
    name, found, value = text.partition("=")
    if not found or not name.strip():
        raise ConfigError(f"{text!r} is not NAME=VALUE")
    try:
        return name.strip(), json.loads(value)
    except json.JSONDecodeError:
        return name.strip(), value


def checked_sources(sources: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``sources``.

    Raises:
        ConfigError: A name is not in ``SOURCE_NAMES``.
    """
    for name in sources:
        if name not in SOURCE_NAMES:
            guess = nearest(name, SOURCE_NAMES)
            hint = f"did you mean {guess!r}?" if guess else f"known: {', '.join(sorted(SOURCE_NAMES))}"
            raise ConfigError(f'sources[{name!r}] is no source of an "auto" value; {hint}')
    return dict(sources)


def hidden_size_of(model_or_config: Any) -> int | None:
    """Return the hidden size of a model: the largest if layers differ, and the text part's if there are several parts.

    Args:
        model_or_config: A module with `.config`, a transformers config, or a config as a mapping.

    Returns:
        The size, or None if no usual name of it is found.
    """
    config = getattr(model_or_config, "config", None)
    config = model_or_config if config is None or isinstance(model_or_config, Mapping) else config
    for name in _NAMES:
        size = _largest(_read(config, name))
        if size is not None:
            return size
    for name in _INNER:
        inner = _read(config, name)
        size = None if inner is None or inner is config else hidden_size_of(inner)
        if size is not None:
            return size
    return None


def _read(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _largest(value: Any) -> int | None:
    """Return the number, or the largest of a list of numbers; None for other values."""
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, int) for item in value):
        return int(max(value))
    return int(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def infer_sources_from_model(model: Any) -> dict[str, Any]:
    """Return a model's values for `resolve(sources=...)`.

    Args:
        model: A module, a transformers config, a folder or file with a config.json, or an ID on the Hub.

    Returns:
        `{"hidden_size": ...}`, empty if the model has no hidden size under a known name.

    Raises:
        ConfigError: The path or ID cannot be loaded.
    """
    if isinstance(model, (str, Path)):
        model = _load(str(model))
    size = hidden_size_of(model)
    return {} if size is None else {"hidden_size": size}


def read_model_config(place: str, pipe: bool = False) -> dict[str, Any] | None:
    """Return the values in config.json of a model on this machine; None if ``place`` is neither a folder nor a file.

    Args:
        place: A folder with a config.json, or such a file.
        pipe: The file may be a pipe, because the user names it.

    Raises:
        ConfigError: The file cannot be read, or is no JSON block.
    """
    path = Path(place).expanduser()
    try:
        if not path.exists():
            return None
        named = not path.is_dir()
        file = path if named else path / "config.json"
        content = parse_json(read_bytes(file, LIMIT_BYTES, pipe=pipe and named).decode("utf-8"))
    except RecursionError as error:
        raise ConfigError(f"the model {place!r}: its config.json is nested too deep") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model {place!r}: its config.json cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"the model {place!r}: its config.json holds a {type(content).__name__}, and a block {{...}} is expected")
    return content


def require_bounded_config(name: str) -> None:
    """Refuse a config.json that transformers would read without bounds: not a regular file, too large, or nested too deep.

    Args:
        name: Name of a model as users write it; if there is no such file, transformers reports it.

    Raises:
        ConfigError: The file is one of these.
    """
    path = Path(name).expanduser()
    if os.path.lexists(path / "config.json" if path.is_dir() else path):
        read_model_config(name)


def _load(name: str) -> Any:
    require_bounded_config(name)
    from transformers import AutoConfig  # a slow import, only needed here

    try:
        return AutoConfig.from_pretrained(name)
    except Exception as error:  # a broken config.json can make transformers raise any error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"The model {name!r} is no local config and no ID that could be loaded: {reason}") from error
