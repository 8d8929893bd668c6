"""``hf-zero plan --from``: settings of FSDP as a configuration of ours, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_zero.config.problems import show
from hf_zero.errors import ConfigError
from hf_zero.plan.fsdp_keys import FATES, GROUP, HERE, NO_RULES, SHARDING, STAGE, STAGES, Case, Setting
from hf_zero.plan.fsdp_source import KINDS, FsdpSource, Said, read_source
from hf_zero.plan.written import places, write_files

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
_CLIPPING = Case(
    "script",
    'the engine clips: "auto" is Trainer\'s max_grad_norm, and 1.0 in a loop of accelerate; write the number that the script gives '
    "clip_grad_norm_, 0 for none",
    (Setting("gradient_clipping", "auto"),),
)
_PRECISION = Case(
    "script",
    "fp32, or what the training arguments ask for",
    (Setting("bf16.enabled", "auto"), Setting("fp16.enabled", "auto")),
)
_EXPERTS_ALONE = (
    "no layers are split over these ranks, which share experts: they train on samples of their own, and stage 3 shards the layers"
)


@dataclass(frozen=True)
class Row:
    """One key of the file.

    Attributes:
        key: Where it stands.
        value: As JSON.
        fate: One of ``fsdp_keys.FATES``.
        here: What is set, or that nothing is.
        why: Why so, or why not.
    """

    key: str
    value: str
    fate: str
    here: str
    why: str


@dataclass(frozen=True)
class Translation:
    """Settings of FSDP as ours.

    Attributes:
        source: The file.
        rows: Key by key.
        config: The configuration.
    """

    source: FsdpSource
    rows: tuple[Row, ...]
    config: dict[str, Any]

    def launcher(self, ranks: int | None, file: Path) -> dict[str, Any] | None:
        """accelerate's YAML that starts with ``file``; None where nobody says how many ranks there are.

        Args:
            ranks: Of all nodes, where the source does not say it.
            file: The configuration.
        """
        kept = dict(self.source.launcher)
        kept.setdefault("num_processes", ranks)
        if kept["num_processes"] is None:
            return None
        slices = self.config.get("sequence_parallel_size") or (self.config.get("hf_zero") or {}).get("context_parallel_size")
        mesh = kept.pop("parallelism_config", None) or {}
        if slices:  # accelerate cuts what loaders give by it, and scripts ask for it
            kept["parallelism_config"] = {name: value for name, value in mesh.items() if "sp_" in name or "cp_" in name}
        answers: dict[str, Any] = {
            "deepspeed_config_file": str(file),
            "zero3_init_flag": self.config["zero_optimization"]["stage"] == 3,
        }
        if kept.setdefault("num_machines", 1) > 1:
            answers["deepspeed_multinode_launcher"] = "standard"
        return {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", **kept, "deepspeed_config": answers}

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {"kind": self.source.kind, "keys": [vars(row) for row in self.rows], "config": self.config}


def translate(source: FsdpSource, ranks_per_node: int | None = None) -> Translation:
    """Return the configuration that is equal to ``source``.

    Args:
        source: What a file says.
        ranks_per_node: Where it does not say that itself.

    Raises:
        ConfigError: A value does not go with the version of FSDP, or the ranks of a node are wanted and not known.
    """
    cases = list(_cases(source))
    settings = [setting for said, case in cases for setting in _valued(said, case)]
    grouped = any(setting.value == GROUP for setting in settings)
    group = _group(source, ranks_per_node) if grouped else None
    stage = _stage(settings, group)
    rows = [_row(said, case, stage, group) for said, case in cases]
    config: dict[str, Any] = dict.fromkeys(_BATCH, "auto")
    for setting in [Setting(STAGE, stage), *_active(settings, stage, group)]:
        _put(config, setting.path, setting.value)
    if not {"bf16", "fp16"} & config.keys():
        for name in ("bf16", "fp16"):
            _put(config, f"{name}.enabled", "auto")
        rows.append(_unsaid("(precision)", _PRECISION))
    rows.append(_unsaid("(clip_grad_norm_)", _CLIPPING))
    return Translation(source, tuple(rows), config)


# -- which case holds -------------------------------------------------------------------------------------------------


def _cases(source: FsdpSource) -> Iterator[tuple[Said, Case]]:
    if source.kind == "distributed":
        yield from _distributed_cases(source)
        return
    if source.value("trainer", "bf16") and source.value("trainer", "fp16"):
        raise ConfigError("bf16 and fp16 are both true; they exclude each other, set one to false")
    version, sharded = _version(source), False
    for said in source.said:
        unread = _why_unread(said, source, version)
        yield said, Case("nothing", unread) if unread else said.key.case_of(said.value)
        sharded |= not unread and _is_sharding(said)
    if not sharded:
        value = "FULL_SHARD" if version == 1 else True
        yield Said("(reshard_after_forward)", "fsdp", SHARDING, value, value), SHARDING.case_of(value)


def _is_sharding(said: Said) -> bool:
    return said.table == "fsdp" and said.key.names[0] in ("reshard_after_forward", "sharding_strategy")


def _is_strategy(said: Said) -> bool:
    return said.table == "fsdp" and said.key.names[0] == "sharding_strategy"


def _version(source: FsdpSource) -> int:
    """Of FSDP: what the file says, else what its reader takes, else the one whose words it uses."""
    found = source.value("fsdp", "version")
    if found is not None:
        return int(found)
    words = any(_is_sharding(said) and isinstance(said.value, str) for said in source.said)
    return 1 if words or source.kind == "accelerate" else 2


def _why_unread(said: Said, source: FsdpSource, version: int) -> str:
    """Why FSDP does not read a key; "" where it does."""
    if said.table != "fsdp":
        return ""
    if version not in said.key.versions:
        return f"FSDP{version} does not read it"
    word = said.name.startswith("fsdp:")
    if word and any(other is not said and other.key is said.key or _is_strategy(other) and said.key is SHARDING for other in source.said):
        return "fsdp_config says it"
    if said.key is not SHARDING:
        return ""
    if word:
        if version == 2 and said.value not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            raise ConfigError(
                f"fsdp is {show(said.value)}, which FSDP1 alone has, and fsdp_config.version is 2; full_shard or shard_grad_op is allowed"
            )
        return ""
    if version == 2 and isinstance(said.value, str):
        raise ConfigError(f"{said.name} is {show(said.written)}, a strategy of FSDP1, and the version is 2; true or false is allowed")
    if version == 1 and source.value("fsdp", "sharding_strategy") is not None:
        return "sharding_strategy says it"
    return "FSDP1 reads a strategy" if version == 1 and isinstance(said.value, bool) else ""


def _distributed_cases(source: FsdpSource) -> Iterator[tuple[Said, Case]]:
    def number(name: str) -> int:
        return int(source.value("distributed", name, 1))

    old = bool(source.value("distributed", "enable_expert_parallel", False)) and number("ep_size") == 1 and number("tp_size") > 1
    experts = number("tp_size") if old else number("ep_size")
    alone = experts > 1 and (old or source.value("distributed", "tp_plan") == NO_RULES)
    for said in source.said:
        name = said.key.names[0]
        case = said.key.case_of(said.value)
        if old and name == "enable_expert_parallel":
            settings = (Setting("expert_parallel.enabled", True), Setting("expert_parallel.autoep_size", experts))
            case = Case("set", "an old form of ep_size = tp_size", settings)
        elif name == "tp_size" and said.value > 1 and alone:
            case = Case("none", _EXPERTS_ALONE, (Setting(STAGE, 3),))
        yield said, case


# -- what it becomes --------------------------------------------------------------------------------------------------


def _group(source: FsdpSource, ranks_per_node: int | None) -> int | None:
    """Ranks of a shard group; None where all ranks are one."""
    if source.kind == "distributed":
        return int(source.value("distributed", "fsdp_size", 1))
    if source.value("mesh", "dp_replicate_size", 1) > 1:
        sizes = [source.value("mesh", f"{axis}_size", 1) for axis in ("dp_shard", "cp", "sp")]
        return int(sizes[0] * sizes[1] * sizes[2])
    ranks, nodes = source.launcher.get("num_processes"), source.launcher.get("num_machines", 1)
    if ranks_per_node is None and ranks is None:
        raise ConfigError("HYBRID_SHARD shards inside each node, and nothing says how many ranks a node has: give --ranks-per-node N")
    if ranks is not None and ranks % nodes:
        raise ConfigError(f"num_processes is {ranks}, and num_machines {nodes} does not divide it: nodes are alike")
    if ranks_per_node is not None and ranks is not None and ranks_per_node != ranks // nodes:
        raise ConfigError(
            f"--ranks-per-node is {ranks_per_node}, and num_processes {ranks} over num_machines {nodes} makes {ranks // nodes}"
        )
    if ranks is not None and nodes == 1:
        return None
    return ranks_per_node or ranks // nodes


def _stage(settings: Sequence[Setting], group: int | None) -> int:
    if group == 1:  # a rank that holds everything alone shards nothing
        return 0
    found = max((setting.value for setting in settings if setting.path == STAGE), default=0)
    return min(found, 2) if any(setting.path == STAGES for setting in settings) else found  # a stage of a pipeline keeps its layers whole


def _active(settings: Sequence[Setting], stage: int, group: int | None) -> Iterator[Setting]:
    """Those that mean something at ``stage``, with their values."""
    for setting in settings:
        if setting.value == GROUP:
            if group is not None and stage:
                yield replace(setting, value=group)
        elif stage in setting.stages:
            yield replace(setting, value=stage) if setting.path == STAGE else setting


def _row(said: Said, case: Case, stage: int, group: int | None) -> Row:
    here = ", ".join(setting.text() for setting in _active(_valued(said, case), stage, group))
    here = "; ".join(part for part in (FATES[case.fate], here) if part)
    return Row(said.name, show(said.written), case.fate, here, case.why)


def _unsaid(name: str, case: Case) -> Row:
    return Row(name, "", case.fate, ", ".join(setting.text() for setting in case.settings), case.why)


def _valued(said: Said, case: Case) -> list[Setting]:
    return [replace(setting, value=said.value) if setting.value == HERE else setting for setting in case.settings]


def _put(config: dict[str, Any], path: str, value: Any) -> None:
    *blocks, name = path.split(".")
    for block in blocks:
        config = config.setdefault(block, {})
    config[name] = value


# -- the command ------------------------------------------------------------------------------------------------------


def run(path: str, ranks: int | None, ranks_per_node: int | None, as_json: bool, folder: Path | None) -> None:
    """Reads, prints, and writes where a folder is given.

    Args:
        path: The file of FSDP's.
        ranks: Of all nodes, where it does not say that.
        ranks_per_node: Where it does not say that.
        as_json: Print one object.
        folder: Where ``ds.json`` and ``accelerate.yaml`` go.

    Raises:
        ConfigError: What is read is wrong, or what would be written is there.
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
        print(f"\nstay as they are: {', '.join(found.source.others)}")
    print(f"\n{json.dumps(found.config, indent=2)}")
    missing = [row.key for row in found.rows if row.fate == "none"]
    print(f"\nno counterpart: {', '.join(missing)}" if missing else "\nevery setting was translated")
    if found.source.kind in ("trainer", "fsdp_config"):
        print('to use it: TrainingArguments(deepspeed="ds.json") in place of fsdp and fsdp_config')
