"""Run the first exchange of ``initialize``: all ranks must have the same configuration and the same versions of hf_zero and torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_zero import __version__
from hf_zero.assembly.axes import count_samples
from hf_zero.assembly.mesh import mesh_of
from hf_zero.comm.axes import model_parallel_group
from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.own_groups import own_topology
from hf_zero.comm.topology import axis_over, build_topology
from hf_zero.config.auto import hidden_size_of
from hf_zero.config.keys import all_keys, default_of, extra_of, nested_of
from hf_zero.config.read import read_config
from hf_zero.config.resolve import analyse
from hf_zero.config.schema.fields import Section
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.core.step.agreement import differing, fact, ranks_by_facts
from hf_zero.errors import HfZeroError, StateError
from hf_zero.system.secrets import hidden_under, without_credentials

_PLACES = ("_path", "_folder", "_file", "_dir")
_TELLING = frozenset(
    (
        "tensorboard", "wandb", "comet", "csv_monitor", "trackio", "flops_profiler", "comms_logger", "timers", "aio",
        "log_level", "dump_state", "steps_per_print", "wall_clock_breakdown", "memory_breakdown",
        "activation_checkpointing.profile", "hf_zero.trace_step", "hf_zero.peak_tflops",
    )
)  # fmt: skip
_CALL, _SOURCE = "the call that ranks are in", "the configuration"


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


def everyone_of(mpu: Any) -> Collectives:
    """Return the ranks that ``initialize`` with ``mpu`` combines into one engine: all ranks, or the data-parallel group of ``mpu``
    (its model-parallel group if the data-parallel one has one rank).
    """
    joint = getattr(mpu, "get_sequence_data_parallel_group", None) or getattr(mpu, "get_data_parallel_group", None)
    data = joint() if joint is not None else None
    if data is not None:
        model = model_parallel_group(mpu)
        return open_collectives(axis_over(model if model is not None and data.size() == 1 else data))
    return open_collectives(own_topology(build_topology(None)))


def require_same_settings(
    source: Any, mpu: Any = None, mesh_param: Any = None, model: nn.Module | None = None, call: str = "initialize"
) -> None:
    """Raise unless all ranks have the same resolved configuration and the same versions of hf_zero and torch; collective.

    A rank with another stage, precision or accumulation would wait for messages that the others never send; a rank with another clipping
    norm would train differently. So this is called before any collective that depends on a setting. A rank whose configuration is refused
    takes part too, because the others would wait for it. ``zero.Init``, which only stage 3 enters, makes the same exchange, which then also
    detects ranks that are in ``initialize`` already.

    Args:
        source: The configuration as the user gave it.
        mpu: The argument ``mpu`` of ``initialize``.
        mesh_param: The argument ``mesh_param`` of ``initialize``.
        model: The user's module.
        call: Name of the call whose first exchange this is.

    Raises:
        StateError: Settings differ; on every rank, with each differing key, its values and their ranks.
    """
    everyone = everyone_of(mpu)
    if everyone.world == 1:
        return
    error: HfZeroError | None = None
    try:
        settings = {_SOURCE: "read", **_settings(source, mpu, mesh_param, model, everyone.world)}
    except HfZeroError as refused:
        settings, error = {_SOURCE: f"refused ({refused})"}, refused
    versions = {"version of hf_zero": __version__, "version of torch": ".".join(torch.__version__.split(".")[:2])}
    facts = {_CALL: repr(call), **versions, **settings}
    kinds = ranks_by_facts([fact(key, value) for key, value in facts.items()], everyone, "settings")
    if len(kinds) > 1:
        clauses = differing(kinds, default_text)
        if clauses and clauses[0].startswith(_CALL):  # zero.Init does not know the batch
            clauses = [clause for clause in clauses if clause.startswith((_CALL, "zero_optimization.stage is"))]
        told = "; ".join([clause for clause in clauses if clause.startswith(_SOURCE)] or clauses)  # an unreadable configuration has no keys
        raise StateError(
            f"the ranks were given different settings: {told}. Give every rank the same configuration file (check that no "
            "node has an edited copy) and the same versions of the packages"
        ) from error


def _settings(source: Any, mpu: Any, mesh_param: Any, model: nn.Module | None, world: int) -> Mapping[str, str]:
    """Return every key that must be the same on all ranks, with its value, and any error of the configuration.

    Raises:
        ConfigError: The configuration cannot be read.
    """
    data, wrong = read_config(source), []
    try:
        if mpu is None:
            mesh = mesh_of(data, None, mesh_param, model)
            data, world = count_samples(data, mesh), mesh.replicas
    except HfZeroError as error:
        wrong.append(str(error))
    hidden_size = hidden_size_of(model) if model is not None else None
    analysis = analyse(data, world_size=world, sources={"hidden_size": hidden_size} if hidden_size else None)
    if analysis.problems.found:
        wrong.append(analysis.problems.report())
    return {**settings_of(analysis.resolved), **({"what is wrong with it": "\n".join(wrong)} if wrong else {})}
