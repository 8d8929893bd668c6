"""Typed arguments laid over a DeepSpeed configuration: dotted keys, and which values contradict each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def get(config: Mapping[str, Any], dotted: str) -> Any:
    """Return the value under a dotted key, None where there is none."""
    node: Any = config
    for part in dotted.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def put(config: dict[str, Any], dotted: str, value: Any) -> None:
    """Writes ``value`` under a dotted key, making the sections on the way."""
    *sections, last = dotted.split(".")
    node = config
    for part in sections:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[last] = value


def same(found: Any, value: Any) -> bool:
    """Return whether a value of the JSON means the same as a typed one; sloppy files write ``"true"`` and ``"2"``."""
    if isinstance(found, str):
        return found.strip().lower() == str(value).lower()
    return bool(found == value)


def lay_over(config: dict[str, Any], values: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Writes typed values where ``config`` has none or "auto"; None values are not given.

    Returns:
        The contradictions: dotted key, value of the configuration, typed value.
    """
    section = config.setdefault("zero_optimization", {})
    if not isinstance(section, dict):  # the old spelling of stages 1 and 0, which accelerate cannot read
        config["zero_optimization"] = {"stage": int(same(section, True))}
    conflicts = []
    for key, value in values.items():
        if value is None:
            continue
        found = get(config, key)
        if found is None or found == "auto":
            put(config, key, value)
        elif not same(found, value):
            conflicts.append((key, found, value))
    return conflicts


def config_of_launcher() -> str | None:
    """Return the configuration file that `accelerate config` was told, if it was."""
    source = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    return None if source == "none" else source
