"""The part of a configuration that must be equal on all ranks, as text to compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_zero.config.keys import all_keys, default_of, extra_of, nested_of
from hf_zero.config.schema.fields import Section
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.system.secrets import hidden_under, without_credentials

_PLACES = ("_path", "_folder", "_file", "_dir")
_TELLING = frozenset(
    (
        "tensorboard", "wandb", "comet", "csv_monitor", "trackio", "flops_profiler", "comms_logger", "timers", "aio",
        "log_level", "dump_state", "steps_per_print", "wall_clock_breakdown", "memory_breakdown",
        "activation_checkpointing.profile", "hf_zero.trace_step", "hf_zero.peak_tflops",
    )
)  # fmt: skip


def settings_of(resolved: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that differ from their default, with their values as text, sorted by dotted path.

    Secrets and keys in which ranks may differ are left out.

    Args:
        resolved: Nested values with canonical names, like ``ResolvedConfig.resolved``.
    """
    return {path: text for path, text in sorted(_set(resolved, ZeroConfig, "")) if not is_ranks_own(path)}


def default_text(path: str) -> str:
    """Return the default, as text, of a key that ``settings_of`` leaves out."""
    key = all_keys().get(path)
    return _text(key.default) if key is not None else "not there"


def is_ranks_own(path: str) -> bool:
    """Return whether ranks may have different values of a key: paths on a machine, and reports about a run."""
    return path.partition(".")[0] in _TELLING or path in _TELLING or path.rpartition(".")[2].endswith(_PLACES)


def _set(block: Mapping[str, Any], section: type[Section] | None, path: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of the keys set below ``path``; ``section`` is None where the user chooses the keys."""
    for name, value in block.items():
        here = f"{path}.{name}" if path else str(name)
        field = section.model_fields.get(name) if section is not None else None
        nested = nested_of(section, name) if section is not None and field is not None else None
        if isinstance(value, Mapping):
            yield from _set(value, nested.section if nested is not None and nested.kind == "one" else None, here)
        elif field is None:
            yield here, _text(hidden_under(name, value))
        elif not extra_of(field).get("secret") and _text(value) != _text(default_of(field)):
            yield here, _text(value)


def _text(value: Any) -> str:
    """Return a value as text that is equal on every rank; for an object its class name."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key}: {_text(item)}' for key, item in value.items()))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        value = without_credentials(value)
    return "null" if value is None else repr(value) if isinstance(value, (str, bool, int, float)) else type(value).__name__
