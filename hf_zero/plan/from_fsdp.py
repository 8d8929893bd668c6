"""Translate FSDP settings to a DeepSpeed configuration, key by key: ``hf-zero plan --from``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_zero.config.problems import show
from hf_zero.errors import ConfigError
from hf_zero.plan.fsdp_keys import FATES, GROUP, HERE, NO_RULES, SHARDING, STAGE, STAGES, Case, Setting
from hf_zero.plan.fsdp_source import KINDS, Entry, FsdpSource, read_source
from hf_zero.plan.written import places, write_files

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_CLIPPING = Case(
    "script",
    'the engine clips; "auto" means Trainer\'s max_grad_norm, or 1.0 in a loop of accelerate; write the number that the script passes to '
    "clip_grad_norm_, or 0 for no clipping",
    (Setting("gradient_clipping", "auto"),),
)
_PRECISION = Case(
    "script",
    "fp32, or the precision of the training arguments",
    (Setting("bf16.enabled", "auto"), Setting("fp16.enabled", "auto")),
)
_EXPERTS_ALONE = (
    "these ranks divide only the experts and do not split layers: they train on different samples, and stage 3 shards the layers"
)


@dataclass(frozen=True)
class Row:
    """Translation of one key of the file.

    Attributes:
        key: Dotted name of the key in the file.
        value: Its value as JSON; "" for a row that no key of the file causes.
        fate: One of ``fsdp_keys.FATES``.
        here: The DeepSpeed settings that replace the key, or a text that says there are none.
        why: Reason for the translation.
    """

    key: str
    value: str
    fate: str
    here: str
    why: str


@dataclass(frozen=True)
class Translation:
    """FSDP settings, translated.

    Attributes:
        source: Content of the file.
        rows: Translations of single keys.
        config: The DeepSpeed configuration.
    """

    source: FsdpSource
    rows: tuple[Row, ...]
    config: dict[str, Any]

    def launcher(self, ranks: int | None, file: Path) -> dict[str, Any] | None:
        """Return the content of accelerate's YAML that trains with ``file``; None if the number of ranks is unknown.

        Args:
            ranks: Number of ranks over all nodes; used if the source does not contain it.
            file: Path of the DeepSpeed configuration.
        """
        kept = dict(self.source.launcher)
        kept.setdefault("num_processes", ranks)
        if kept["num_processes"] is None:
            return None
        slices = self.config.get("sequence_parallel_size") or (self.config.get("hf_zero") or {}).get("context_parallel_size")
        mesh = kept.pop("parallelism_config", None) or {}
        if slices:  # accelerate splits the batches of loaders by it, and scripts read it
            kept["parallelism_config"] = {name: value for name, value in mesh.items() if "sp_" in name or "cp_" in name}
        answers: dict[str, Any] = {
            "deepspeed_config_file": str(file),
            "zero3_init_flag": self.config["zero_optimization"]["stage"] == 3,
        }
        if kept.setdefault("num_machines", 1) > 1:
            answers["deepspeed_multinode_launcher"] = "standard"
        return {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", **kept, "deepspeed_config": answers}

    def to_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {"kind": self.source.kind, "keys": [vars(row) for row in self.rows], "config": self.config}


def translate(source: FsdpSource, ranks_per_node: int | None = None) -> Translation:
    """Return the DeepSpeed configuration that is equivalent to ``source``.

    Args:
        source: Content of a file with FSDP settings.
        ranks_per_node: Ranks of one node; used if the source does not contain it.

    Raises:
        ConfigError: A value contradicts the version of FSDP, or ``HYBRID_SHARD`` needs the number of ranks per node and it is unknown.
    """
    cases = list(_cases(source))
    settings = [setting for entry, case in cases for setting in _with_values(entry, case)]
    grouped = any(setting.value == GROUP for setting in settings)
    group = _group(source, ranks_per_node) if grouped else None
    stage = _stage(settings, group)
    rows = [_row(entry, case, stage, group) for entry, case in cases]
    config: dict[str, Any] = dict.fromkeys(_BATCH, "auto")
    for setting in [Setting(STAGE, stage), *_settings_at(settings, stage, group)]:
        _put(config, setting.path, setting.value)
    if not {"bf16", "fp16"} & config.keys():
        for name in ("bf16", "fp16"):
            _put(config, f"{name}.enabled", "auto")
        rows.append(_derived_row("(precision)", _PRECISION))
    rows.append(_derived_row("(clip_grad_norm_)", _CLIPPING))
    return Translation(source, tuple(rows), config)


# -- cases ------------------------------------------------------------------------------------------------------------


def _cases(source: FsdpSource) -> Iterator[tuple[Entry, Case]]:
    if source.kind == "distributed":
        yield from _distributed_cases(source)
        return
    if source.value("trainer", "bf16") and source.value("trainer", "fp16"):
        raise ConfigError("bf16 and fp16 are both true; they exclude each other, set one to false")
    version, sharded = _version(source), False
    for entry in source.entries:
        unread = _reason_unread(entry, source, version)
        yield entry, Case("nothing", unread) if unread else entry.key.case_of(entry.value)
        sharded |= not unread and _is_sharding(entry)
    if not sharded:
        value = "FULL_SHARD" if version == 1 else True
        yield Entry("(reshard_after_forward)", "fsdp", SHARDING, value, value), SHARDING.case_of(value)


def _is_sharding(entry: Entry) -> bool:
    return entry.table == "fsdp" and entry.key.names[0] in ("reshard_after_forward", "sharding_strategy")


def _is_strategy(entry: Entry) -> bool:
    return entry.table == "fsdp" and entry.key.names[0] == "sharding_strategy"


def _version(source: FsdpSource) -> int:
    """Return the version of FSDP: the file's; else 1 for accelerate's YAML or a strategy name of FSDP1; else 2."""
    found = source.value("fsdp", "version")
    if found is not None:
        return int(found)
    words = any(_is_sharding(entry) and isinstance(entry.value, str) for entry in source.entries)
    return 1 if words or source.kind == "accelerate" else 2


def _reason_unread(entry: Entry, source: FsdpSource, version: int) -> str:
    """Return why FSDP ignores ``entry``; "" if FSDP reads it."""
    if entry.table != "fsdp":
        return ""
    if version not in entry.key.versions:
        return f"FSDP{version} does not read it"
    word = entry.name.startswith("fsdp:")
    others = [other for other in source.entries if other is not entry]
    if word and any(other.key is entry.key or _is_strategy(other) and entry.key is SHARDING for other in others):
        return "fsdp_config overrides it"
    if entry.key is not SHARDING:
        return ""
    if word:
        if version == 2 and entry.value not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            raise ConfigError(
                f"fsdp is {show(entry.value)}, which FSDP1 alone has, but fsdp_config.version is 2; full_shard or shard_grad_op is allowed"
            )
        return ""
    if version == 2 and isinstance(entry.value, str):
        raise ConfigError(f"{entry.name} is {show(entry.written)}, a strategy of FSDP1, but the version is 2; true or false is allowed")
    if version == 1 and source.value("fsdp", "sharding_strategy") is not None:
        return "sharding_strategy overrides it"
    return "FSDP1 reads the name of a strategy instead" if version == 1 and isinstance(entry.value, bool) else ""


def _distributed_cases(source: FsdpSource) -> Iterator[tuple[Entry, Case]]:
    def number(name: str) -> int:
        return int(source.value("distributed", name, 1))

    old = bool(source.value("distributed", "enable_expert_parallel", False)) and number("ep_size") == 1 and number("tp_size") > 1
    experts = number("tp_size") if old else number("ep_size")
    alone = experts > 1 and (old or source.value("distributed", "tp_plan") == NO_RULES)
    for entry in source.entries:
        name = entry.key.names[0]
        case = entry.key.case_of(entry.value)
        if old and name == "enable_expert_parallel":
            settings = (Setting("expert_parallel.enabled", True), Setting("expert_parallel.autoep_size", experts))
            case = Case("set", "an old spelling of ep_size = tp_size", settings)
        elif name == "tp_size" and entry.value > 1 and alone:
            case = Case("none", _EXPERTS_ALONE, (Setting(STAGE, 3),))
        yield entry, case


# -- settings ---------------------------------------------------------------------------------------------------------


def _group(source: FsdpSource, ranks_per_node: int | None) -> int | None:
    """Return the number of ranks in a shard group; None if all ranks form one group."""
    if source.kind == "distributed":
        return int(source.value("distributed", "fsdp_size", 1))
    if source.value("mesh", "dp_replicate_size", 1) > 1:
        sizes = [source.value("mesh", f"{axis}_size", 1) for axis in ("dp_shard", "cp", "sp")]
        return int(sizes[0] * sizes[1] * sizes[2])
    ranks, nodes = source.launcher.get("num_processes"), source.launcher.get("num_machines", 1)
    if ranks_per_node is None and ranks is None:
        raise ConfigError("HYBRID_SHARD shards inside each node, but the file has no number of ranks per node: give --ranks-per-node N")
    if ranks is not None and ranks % nodes:
        raise ConfigError(f"num_processes is {ranks}, which num_machines {nodes} does not divide; all nodes need equally many ranks")
    if ranks_per_node is not None and ranks is not None and ranks_per_node != ranks // nodes:
        raise ConfigError(
            f"--ranks-per-node is {ranks_per_node}, but num_processes {ranks} / num_machines {nodes} is {ranks // nodes}: leave it out"
        )
    if ranks is not None and nodes == 1:
        return None
    return ranks_per_node or ranks // nodes


def _stage(settings: Sequence[Setting], group: int | None) -> int:
    if group == 1:  # a group of one rank shards nothing
        return 0
    found = max((setting.value for setting in settings if setting.path == STAGE), default=0)
    has_pipeline = any(setting.path == STAGES for setting in settings)
    return min(found, 2) if has_pipeline else found  # stage 3 cannot be combined with a pipeline


def _settings_at(settings: Sequence[Setting], stage: int, group: int | None) -> Iterator[Setting]:
    """Yield the settings that take effect at ZeRO ``stage``, with the final values of the stage and of the shard group."""
    for setting in settings:
        if setting.value == GROUP:
            if group is not None and stage:
                yield replace(setting, value=group)
        elif stage in setting.stages:
            yield replace(setting, value=stage) if setting.path == STAGE else setting


def _row(entry: Entry, case: Case, stage: int, group: int | None) -> Row:
    here = ", ".join(setting.text() for setting in _settings_at(_with_values(entry, case), stage, group))
    here = "; ".join(part for part in (FATES[case.fate], here) if part)
    return Row(entry.name, show(entry.written), case.fate, here, case.why)


def _derived_row(name: str, case: Case) -> Row:
    return Row(name, "", case.fate, ", ".join(setting.text() for setting in case.settings), case.why)


def _with_values(entry: Entry, case: Case) -> list[Setting]:
    return [replace(setting, value=entry.value) if setting.value == HERE else setting for setting in case.settings]


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    *blocks, name = path.split(".")
    for block in blocks:
        config = config.setdefault(block, {})
    config[name] = value


# -- the command ------------------------------------------------------------------------------------------------------


def run(path: str, ranks: int | None, ranks_per_node: int | None, as_json: bool, folder: Path | None) -> None:
    """Translate a file with FSDP settings, print the translation, and write the configuration if ``folder`` is given.

    Args:
        path: The file with FSDP settings.
        ranks: Number of ranks over all nodes; used if the file does not contain it.
        ranks_per_node: Ranks of one node; used if the file does not contain it.
        as_json: Whether to print one JSON object.
        folder: Folder for ``ds.json`` and ``accelerate.yaml``; None writes nothing.

    Raises:
        ConfigError: The file has unknown keys or wrong values, or a file to write exists.
    """
    found = translate(read_source(path), ranks_per_node)
    written = [] if folder is None else write_files(folder, found.config, found.launcher(ranks, places(folder)[0]))
    if as_json:
        print(json.dumps({**found.to_dict(), "written": [str(file) for file in written]}, indent=2))
        return
    _print(found, path)
    for file in written:
        print(f"written: {file}")


def _print(found: Translation, path: str) -> None:
    print(f"{path}: {KINDS[found.source.kind]}\n")
    for row in found.rows:
        print(f"{row.key}: {row.value}" if row.value else row.key)
        print(f"    {row.here or 'nothing to set'}\n      {row.why}")
    if found.source.others:
        print(f"\nunchanged arguments: {', '.join(found.source.others)}")
    print(f"\n{json.dumps(found.config, indent=2)}")
    missing = [row.key for row in found.rows if row.fate == "none"]
    print(f"\nno counterpart: {', '.join(missing)}" if missing else "\nevery setting was translated")
    if found.source.kind in ("trainer", "fsdp_config"):
        print('to use it: TrainingArguments(deepspeed="ds.json") in place of fsdp and fsdp_config')
