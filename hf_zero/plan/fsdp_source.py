"""Read a file with FSDP settings of accelerate, Trainer or transformers: find its kind, and check and normalise each key."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal

from hf_zero.config.problems import nearest, show
from hf_zero.errors import ConfigError
from hf_zero.plan import fsdp_keys
from hf_zero.plan.fsdp_keys import TABLES, FsdpKey
from hf_zero.system.reading import require_few_values
from hf_zero.system.text_file import read_text_file, read_yaml

Kind = Literal["accelerate", "trainer", "fsdp_config", "distributed"]
KINDS: Mapping[Kind, str] = {
    "accelerate": "a configuration of accelerate",
    "trainer": "arguments of Trainer",
    "fsdp_config": "an fsdp_config of Trainer",
    "distributed": "a DistributedConfig of transformers",
}
_WANTED = (
    "give accelerate's YAML with distributed_type FSDP, Trainer's arguments with fsdp and fsdp_config, an fsdp_config alone, or the "
    "fields of transformers' DistributedConfig, as JSON or YAML"
)
_PREFIXES = {"fsdp": "fsdp_", "mesh": "parallelism_config_"}
_ONLY_DISTRIBUTED = ("fsdp_size", "tp_size", "tp_plan", "dp_replicate_size", "fsdp_plan", "pp_size", "ep_size", "ep_plan")
_LIMIT_BYTES = 1 << 20
_NOT_SIZES = (
    "cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One known key of a file, with its value.

    Attributes:
        name: Name of the key in the file, with its block.
        table: Name of the key's table in ``fsdp_keys.TABLES``.
        key: The key's row of this table.
        written: The value in the file.
        value: The value as ``key.read`` normalised it.
    """

    name: str
    table: str
    key: FsdpKey
    written: Any
    value: Any


@dataclass
class FsdpSource:
    """Content of a file with FSDP settings.

    Attributes:
        kind: One of ``KINDS``.
        entries: The known keys, in the order of the file.
        launcher: The other keys of accelerate's YAML: processes, machines, ports, ...
        others: Names of Trainer's arguments that do not concern sharding.
    """

    kind: Kind
    entries: list[Entry]
    launcher: dict[str, Any] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def value(self, table: str, name: str, otherwise: Any = None) -> Any:
        """Return the value of the key whose first spelling is ``name``; ``otherwise`` if the file does not contain it."""
        return next((one.value for one in self.entries if one.table == table and one.key.names[0] == name), otherwise)


def read_source(path: str) -> FsdpSource:
    """Return the content of a file with FSDP settings.

    Args:
        path: Path of a JSON or YAML file.

    Raises:
        ConfigError: The file cannot be read, has no FSDP settings, or has unknown keys or wrong values; the message names all of them.
    """
    content = _load(path)
    where = f"{path!r}"
    if "distributed_type" in content or "compute_environment" in content:
        return _accelerate(content, where)
    if "zero_optimization" in content or "train_micro_batch_size_per_gpu" in content:
        raise ConfigError(f"{where} is a DeepSpeed configuration already: pass it with --config")
    if "fsdp" in content or "fsdp_config" in content:
        return _trainer(content, where, Path(path).parent)
    inner = content.get("distributed_config")
    if isinstance(inner, dict):
        return _distributed(inner, where)
    if any(name in content for name in _ONLY_DISTRIBUTED):
        return _distributed(content, where)
    names = {name for key in TABLES["fsdp"][1] for name in key.names}
    if not any(isinstance(name, str) and (name.removeprefix("fsdp_") in names) for name in content):
        raise ConfigError(f"{where} has no settings of FSDP (its keys: {_first_names(content)}); {_WANTED}")
    return _fsdp_config(content, where)


def _load(path: str, pipe: bool = True) -> dict[str, Any]:
    import yaml

    text = read_text_file(path, "file of --from", _LIMIT_BYTES, pipe)
    try:
        require_few_values(text)
        content = json.loads(text) if text.lstrip().startswith("{") else read_yaml(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path!r} is not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        raise ConfigError(f"{path!r} is neither JSON nor YAML: {getattr(error, 'problem', None) or error}{place}; {_WANTED}") from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{path!r} holds {'nothing' if not content else f'a {type(content).__name__}'}; {_WANTED}")
    return content


# -- kinds of files ---------------------------------------------------------------------------------------------------


def _accelerate(content: dict[str, Any], where: str) -> FsdpSource:
    from accelerate.commands.config.config_args import ClusterConfig

    found = content.get("distributed_type")
    if content.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        raise ConfigError(f"{where}: compute_environment is {show(content['compute_environment'])}; LOCAL_MACHINE is allowed")
    if found != "FSDP":
        instead = "pass its deepspeed_config_file with --config" if found == "DEEPSPEED" else _WANTED
        raise ConfigError(f"{where}: distributed_type is {show(found)}; FSDP is allowed. {instead}")
    faults: list[str] = []
    entries = [
        *_read({"mixed_precision": content.get("mixed_precision")}, "accelerate", "", faults),
        *_read(_block(content, "fsdp_config", faults), "fsdp", "fsdp_config.", faults),
        *_mesh(content, faults),
    ]
    _check_ranks(content, entries, faults)
    known = ClusterConfig.__dataclass_fields__
    faults += [_unknown(name, known) for name in content if name not in known]
    _raise_faults(faults, where)
    dropped = ("fsdp_config", "mixed_precision", "distributed_type", "fp8_config", "deepspeed_config", "megatron_lm_config")
    return FsdpSource("accelerate", entries, {name: value for name, value in content.items() if name not in dropped})


def _check_ranks(content: Mapping[str, Any], entries: Iterable[Entry], faults: list[str]) -> None:
    """Append an error to ``faults`` if ranks or nodes are no positive numbers, or the mesh's size is not the number of ranks."""
    for name in ("num_processes", "num_machines"):
        found = content.get(name, 1)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            faults.append(f"{name} is {show(found)}; a whole number from 1 on is allowed")
            return
    sizes = {one.key.names[0]: one.value for one in entries if one.table == "mesh"}
    made, ranks = prod(sizes.values()), content.get("num_processes")
    if made > 1 and ranks is not None and made != ranks:
        parts = " x ".join(f"{name} {size}" for name, size in sizes.items())
        faults.append(f"parallelism_config: {parts} makes {made} ranks, but num_processes is {ranks}; make both equal")


def _trainer(content: dict[str, Any], where: str, folder: Path) -> FsdpSource:
    faults: list[str] = []
    config = content.get("fsdp_config")
    if isinstance(config, str):
        file = next((found for found in (Path(config), folder / config) if os.path.lexists(found)), folder / config)
        config = _load(str(file), pipe=False)  # a path inside a file must not name a pipe
    elif config is not None and not isinstance(config, dict):
        faults.append(f"fsdp_config is {show(config)}; a block, or the path of a JSON file, is allowed")
        config = {}
    words = _flag_words(content.get("fsdp", True), faults)
    if words is None:
        raise ConfigError(f"{where}: fsdp is {show(content['fsdp'])}, so these arguments do not use FSDP: there is nothing to translate")
    entries = [
        *_read(words, "fsdp", "fsdp: ", faults),  # fsdp_config overrides the same keys
        *_read(config or {}, "fsdp", "fsdp_config.", faults),
        *_read({name: content[name] for name in ("bf16", "fp16") if content.get(name) is not None}, "trainer", "", faults),
        *_mesh(content, faults),
    ]
    read = {"fsdp", "fsdp_config", "bf16", "fp16", "parallelism_config"}
    faults += [_unknown(name, read) for name in content if name not in read and str(name).startswith("fsdp")]
    if content.get("deepspeed"):
        faults.append(f"deepspeed is {show(content['deepspeed'])} beside fsdp; remove one of them")
    _raise_faults(faults, where)
    return FsdpSource("trainer", entries, others=[str(name) for name in content if name not in read])


def _flag_words(given: Any, faults: list[str]) -> dict[str, Any] | None:
    """Return Trainer's ``fsdp`` (true, or words such as ``full_shard auto_wrap``) as keys of ``fsdp_config``; None if FSDP is off."""
    off = given is None or given in (False, "", []) or (isinstance(given, str) and given.strip().lower() == "false")
    if off:
        return None
    if given is True or (isinstance(given, str) and given.strip().lower() == "true"):
        return {}
    words = given.split() if isinstance(given, str) else list(given) if isinstance(given, list) else []
    if not words:
        faults.append(f"fsdp is {show(given)}; true, or words such as full_shard auto_wrap offload, are allowed")
    found: dict[str, Any] = {}
    for word in words:
        name = str(word).lower()
        if name == "offload":
            found["offload_params"] = True
        elif name == "auto_wrap":
            found["auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        elif name.upper() in fsdp_keys.STRATEGIES:
            found["reshard_after_forward"] = name.upper()
        else:
            allowed = ", ".join([*(strategy.lower() for strategy in fsdp_keys.STRATEGIES), "offload", "auto_wrap"])
            faults.append(f"fsdp has the word {show(word)}; {allowed} are allowed")
    return found


def _fsdp_config(content: dict[str, Any], where: str) -> FsdpSource:
    faults: list[str] = []
    entries = list(_read(content, "fsdp", "", faults))
    _raise_faults(faults, where)
    return FsdpSource("fsdp_config", entries)


def _distributed(content: dict[str, Any], where: str) -> FsdpSource:
    faults: list[str] = []
    entries = list(_read(content, "distributed", "", faults))
    _raise_faults(faults, where)
    return FsdpSource("distributed", entries)


# -- keys -------------------------------------------------------------------------------------------------------------


def _block(content: Mapping[str, Any], name: str, faults: list[str]) -> dict[str, Any]:
    block = content.get(name) or {}
    if not isinstance(block, dict):
        faults.append(f"{name} is {show(block)}; a block of keys is allowed")
        return {}
    return block


def _mesh(content: Mapping[str, Any], faults: list[str]) -> Iterator[Entry]:
    block = _block(content, "parallelism_config", faults)
    sizes = {name: value for name, value in block.items() if str(name).removeprefix(_PREFIXES["mesh"]) not in _NOT_SIZES}
    yield from _read(sizes, "mesh", "parallelism_config.", faults)


def _read(block: Mapping[str, Any], table: str, place: str, faults: list[str]) -> Iterator[Entry]:
    known = {name: key for key in TABLES[table][1] for name in key.names}
    seen: dict[str, str] = {}
    for written, value in block.items():
        name = str(written).removeprefix(_PREFIXES[table]) if table in _PREFIXES else str(written)
        key = known.get(name)
        if key is None:
            faults.append(_unknown(written, known, place, _PREFIXES.get(table, "")))
            continue
        if value is None and table != "accelerate":
            continue
        first = key.names[0]
        if first in seen:
            faults.append(f"{place}{written} and {place}{seen[first]} are two names of one key; keep one")
            continue
        seen[first] = str(written)
        try:
            yield Entry(f"{place}{written}", table, key, value, key.read(value))
        except ValueError as error:
            faults.append(f"{place}{written} is {show(value)}; {error} is allowed")


def _unknown(name: Any, known: Iterable[str], place: str = "", prefix: str = "") -> str:
    names, written = list(known), str(name)
    guess = nearest(written.removeprefix(prefix), names)
    if guess is not None and prefix and written.startswith(prefix):
        guess = f"{prefix}{guess}"
    guess = guess or nearest(written, [f"{prefix}{other}" for other in names])
    return f"{place}{written} is unknown; " + (f"did you mean {guess}?" if guess else f"known keys: {', '.join(names)}")


def _raise_faults(faults: list[str], where: str) -> None:
    if faults:
        raise ConfigError(where + ": " + "; ".join(faults))


def _first_names(content: Mapping[Any, Any]) -> str:
    names = [str(name) for name in content]
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
