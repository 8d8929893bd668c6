"""Provide the hostfile functions of DeepSpeed's launcher, for programs that start jobs themselves."""

from __future__ import annotations

import base64
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_zero.launch import hosts
from hf_zero.launch.hosts import Host
from hf_zero.observe import logger


def fetch_hostfile(hostfile_path: str | os.PathLike[str]) -> OrderedDict[str, int] | None:
    """Return the hosts in a hostfile with their numbers of slots; None, with a warning, if the file does not exist.

    Raises:
        ConfigError: The file is wrong; the error is also a ``ValueError``, and its message names file and line.
    """
    if not os.path.isfile(hostfile_path):
        logger.warning(f"there is no hostfile {hostfile_path}; using this machine alone")
        return None
    return _counts(hosts.read_hostfile(os.fspath(hostfile_path)))


def _parse_hostfile(hostfile_lines: Iterable[str]) -> OrderedDict[str, int]:
    """Return the hosts in the lines of a hostfile with their numbers of slots, like ``fetch_hostfile``."""
    return _counts(hosts.parse_hostfile(hostfile_lines, "hostfile"))


def _counts(found: Sequence[Host]) -> OrderedDict[str, int]:
    return OrderedDict((host.name, len(host.slots)) for host in found)


def parse_resource_filter(host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = "") -> Mapping[str, Any]:
    """Return the hosts and slots that remain after a filter.

    Args:
        host_info: Indices of the slots by host.
        include_str: Hosts to use, ``worker-0@worker-1:0,2``: a host without slots is used with all slots; a host may occur several times.
        exclude_str: Hosts to exclude, in the same notation.

    Returns:
        An OrderedDict like ``host_info`` and in its order, without hosts that have no slots left; ``host_info`` itself without filters.

    Raises:
        ConfigError: Both filters are given, or a host or slot does not exist; the error is also a ``ValueError``.
    """
    if not include_str and not exclude_str:
        return host_info
    if include_str and exclude_str:
        raise hosts.both_filters()
    known = [Host(name, tuple(slots)) for name, slots in host_info.items()]
    text = _joined(include_str or exclude_str)
    left = {host.name: host for host in (hosts.include(known, text) if include_str else hosts.exclude(known, text))}
    return OrderedDict((name, list(left[name].slots)) for name in host_info if name in left and left[name].slots)


def _joined(text: str) -> str:
    """Return an equivalent filter that names each host once; if a host occurs with and without slots, the slots apply."""
    slots: dict[str, list[str]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.partition(":")
        slots.setdefault(name, []).extend([numbers] if colon else [])
    return "@".join(f"{name}:{','.join(numbers)}" if numbers else name for name, numbers in slots.items())


def parse_inclusion_exclusion(resource_pool: Mapping[str, int], inclusion: str, exclusion: str) -> Mapping[str, Any]:
    """Return the result of ``parse_resource_filter`` for numbers of slots by host, as ``fetch_hostfile`` returns them."""
    return parse_resource_filter(OrderedDict((name, list(range(count))) for name, count in resource_pool.items()), inclusion, exclusion)


def encode_world_info(world_info: Any) -> str:
    """Return hosts and their slots as one command-line argument: JSON in URL-safe base64."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()
