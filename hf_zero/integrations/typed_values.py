"""Merge typed arguments into a DeepSpeed configuration by dotted keys, and list the values that contradict each other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def get(config: Mapping[str, Any], dotted: str) -> Any:
    """Return the value of a dotted key such as "zero_optimization.stage"; None if the key is absent."""
    node: Any = config
    for part in dotted.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def put(config: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a dotted key to ``value``; create missing sections."""
    *sections, last = dotted.split(".")
    node = config
    for part in sections:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[last] = value


def same(found: Any, value: Any) -> bool:
    """Return whether a value from JSON equals a typed one; strings such as ``"true"`` and ``"2"`` equal the values that they spell."""
    if isinstance(found, str):
        return found.strip().lower() == str(value).lower()
    return bool(found == value)


def fill_missing(config: dict[str, Any], values: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Set each key of ``values`` that ``config`` lacks or has on "auto"; values that are None are skipped.

    Returns:
        The contradictions, as tuples of dotted key, value of the configuration and typed value.
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
    """Return the configuration file named in the answers of `accelerate config`, from the environment; None if there is none."""
    source = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    return None if source == "none" else source
