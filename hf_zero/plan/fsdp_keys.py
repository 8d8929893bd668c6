"""Map each value of each FSDP key to DeepSpeed settings, or to the reason why it has none.

``hf-zero plan --from`` reads these tables. ``python -m hf_zero.plan.fsdp_keys --write docs/coming-from-fsdp.md`` writes them into the
page; a test fails if the page is outdated.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_zero.config.problems import show
from hf_zero.config.spelling import boolean_of
from hf_zero.system import own_files
from hf_zero.system.text_file import LIMIT_BYTES, read_text

Fate = Literal["set", "nothing", "script", "none"]
FATES: Mapping[Fate, str] = {"set": "", "nothing": "nothing to set", "script": "the script", "none": "no counterpart"}
ZERO = "zero_optimization."
STAGE = f"{ZERO}stage"
STAGES = "pipeline.stages"
HERE = "<value>"  # in a setting: stands for the value of the FSDP key
GROUP = "<ranks of a shard group>"  # in a setting: stands for the size of a shard group
_ALL = (0, 1, 2, 3)


@dataclass(frozen=True)
class Setting:
    """One key of a DeepSpeed configuration with its value.

    Attributes:
        path: Dotted name of the key.
        value: Value of the key; ``HERE`` and ``GROUP`` are placeholders for values from the file.
        stages: ZeRO stages at which the setting takes effect.
    """

    path: str
    value: Any
    stages: tuple[int, ...] = _ALL

    def text(self) -> str:
        """Return the setting as text, ``path: value``."""
        return f"{self.path}: {self.value if self.value in (HERE, GROUP) else show(self.value)}"


@dataclass(frozen=True)
class Case:
    """Translation of one value of an FSDP key.

    Attributes:
        fate: A key of ``FATES``: translated to settings, needs no setting, is done by the script, or has no counterpart.
        why: Reason in a few words.
        settings: The settings that replace the key.
    """

    fate: Fate
    why: str
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True)
class FsdpKey:
    """One key of FSDP with its translations.

    Attributes:
        names: Spellings of the key, without ``fsdp_``; the page shows the first.
        read: Function that normalises a value; raises ValueError with the allowed values.
        cases: Translations by normalised value; ``None`` is for all other values.
        versions: Versions of FSDP that read the key.
    """

    names: tuple[str, ...]
    read: Callable[[Any], Any]
    cases: Mapping[Any, Case]
    versions: tuple[int, ...] = (1, 2)

    def case_of(self, value: Any) -> Case:
        """Return the translation of ``value``, which ``read`` has normalised."""
        hashable = None if isinstance(value, (dict, list)) else value
        return self.cases[hashable] if hashable in self.cases else self.cases[None]


# -- values -----------------------------------------------------------------------------------------------------------


def boolean(value: Any) -> bool:
    """Return a truth value from a spelling of YAML or of environment variables; raise ValueError for others."""
    found = boolean_of(value)
    if found is None:
        raise ValueError("true or false")
    return found


def whole(value: Any) -> int:
    """Return a whole number of at least 0; raise ValueError for others."""
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdigit():
        raise ValueError("a whole number from 0 on")
    return int(text)


def size(value: Any) -> int:
    """Return a number of ranks; 1 for None, which means "not given"."""
    number = 1 if value is None else whole(value)
    if number < 1:
        raise ValueError("a number of ranks, from 1 on")
    return number


def one_of(*names: str, numbered: bool = False) -> Callable[[Any], str]:
    """Return a function that reads one of ``names`` in any letter case; with ``numbered`` also its position, counted from 1."""

    def read(value: Any) -> str:
        text = str(value).strip()
        if numbered and not isinstance(value, bool) and text.isdigit() and 1 <= int(text) <= len(names):
            return names[int(text) - 1]
        found = next((name for name in names if name.lower() == text.lower()), None)
        if found is None:
            raise ValueError(f"one of {', '.join(names)}")
        return found

    return read


def anything(value: Any) -> Any:
    """Return ``value`` unchanged."""
    return value


def off_or_on(value: Any) -> bool:
    """Return whether ``value`` enables a feature: neither empty, false nor "none"."""
    return bool(value) and boolean_of(value) is not False and value != "none"


# -- fsdp_config of accelerate and of Trainer -------------------------------------------------------------------------

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_ONCE = Setting(f"{ZERO}stage3_max_reuse_distance", 0, (3,))
_FULL = Case(
    "set",
    "parameters, gradients and optimizer states sharded; a block is gathered for forward and again for backward",
    (Setting(STAGE, 3), _ONCE),
)
_GRADIENTS = Case(
    "set",
    "gradients and optimizer states sharded; parameters unsharded in forward and backward, as in FSDP, and between steps",
    (Setting(STAGE, 2),),
)
_IN_NODE = Setting(f"{ZERO}mics_shard_size", GROUP)
_SHARDING = {
    "FULL_SHARD": _FULL,
    "SHARD_GRAD_OP": _GRADIENTS,
    "NO_SHARD": Case("set", "nothing sharded; gradients reduced once per step", (Setting(STAGE, 0),)),
    "HYBRID_SHARD": Case("set", "like FULL_SHARD inside each node, with a replica in every node", (Setting(STAGE, 3), _ONCE, _IN_NODE)),
    "HYBRID_SHARD_ZERO2": Case("set", "like SHARD_GRAD_OP inside each node, with a replica in every node", (Setting(STAGE, 2), _IN_NODE)),
}
_OFFLOAD = (
    Setting(f"{ZERO}offload_optimizer.device", "cpu"),
    Setting(f"{ZERO}offload_param.device", "cpu", (3,)),
)
_BLOCKS = "the engine finds repeated blocks, large embeddings and heads, and gathers them one by one"
_AHEAD = "the next block is always gathered ahead; stage3_prefetch_bucket_size sets how many more elements"
_RANK_0 = "stage 3: from_pretrained reads only each rank's shard (zero3_init_flag); stages 0 to 2: all ranks take rank 0's values"
_ELASTIC = "checkpoints are sharded and load on any number of ranks"
_OFF = Case("nothing", "off in both")
_XLA = "XLA is not supported: ranks are PyTorch processes on CUDA or CPU"


def _strategy_or_boolean(value: Any) -> bool | str:
    found = boolean_of(value) if not (isinstance(value, (int, str)) and str(value).strip().isdigit()) else None
    if found is not None:
        return found
    try:
        return one_of(*STRATEGIES, numbered=True)(value)
    except ValueError as error:
        raise ValueError(f"true or false (FSDP2), or {error} (FSDP1)") from None


SHARDING = FsdpKey(("reshard_after_forward",), _strategy_or_boolean, {True: _FULL, False: _GRADIENTS, **_SHARDING})
FSDP_KEYS: tuple[FsdpKey, ...] = (
    FsdpKey(("version",), one_of("1", "2"), {None: Case("nothing", "settings of both versions are translated")}),
    SHARDING,
    FsdpKey(("sharding_strategy",), one_of(*STRATEGIES, numbered=True), _SHARDING, (1,)),
    FsdpKey(
        ("offload_params", "cpu_offload"),
        boolean,
        {
            True: Case("set", "shards are kept and updated on the host; each of both settings works alone, and with nvme", _OFFLOAD),
            False: _OFF,
        },
    ),
    FsdpKey(("auto_wrap_policy",), one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"), {None: Case("nothing", _BLOCKS)}),
    FsdpKey(
        ("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"),
        anything,
        {None: Case("nothing", _BLOCKS)},
    ),
    FsdpKey(("min_num_params",), whole, {None: Case("nothing", _BLOCKS)}),
    FsdpKey(
        ("state_dict_type",),
        one_of("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", numbered=True),
        {
            "FULL_STATE_DICT": Case(
                "set",
                f"unsharded weights when a model is saved; {_ELASTIC}",
                (Setting(f"{ZERO}stage3_gather_16bit_weights_on_model_save", True, (3,)),),
            ),
            None: Case("nothing", _ELASTIC),
        },
    ),
    FsdpKey(("cpu_ram_efficient_loading",), boolean, {None: Case("nothing", _RANK_0)}),
    FsdpKey(("sync_module_states",), boolean, {None: Case("nothing", "all ranks take rank 0's values")}, (1,)),
    FsdpKey(
        ("activation_checkpointing",),
        boolean,
        {
            True: Case("script", "model.gradient_checkpointing_enable(), or Trainer's gradient_checkpointing"),
            False: _OFF,
        },
    ),
    FsdpKey(
        ("activation_checkpointing_offload",),
        boolean,
        {
            True: Case(
                "script",
                "also call model._set_gradient_checkpointing(True, deepspeed.checkpointing.checkpoint) in the script",
                (Setting("activation_checkpointing.cpu_checkpointing", True),),
            ),
            False: _OFF,
        },
        (2,),
    ),
    FsdpKey(
        ("ignored_modules",),
        off_or_on,
        {True: Case("none", "the engine manages every parameter of the model: keep this module outside the model"), False: _OFF},
    ),
    FsdpKey(
        ("backward_prefetch", "backward_prefetch_policy"),
        one_of("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", numbered=True),
        {None: Case("nothing", _AHEAD), "NO_PREFETCH": Case("none", _AHEAD)},
        (1,),
    ),
    FsdpKey(("forward_prefetch",), boolean, {None: Case("nothing", _AHEAD)}, (1,)),
    FsdpKey(
        ("use_orig_params",),
        boolean,
        {None: Case("nothing", "the optimizer keeps the script's parameters and groups; frozen and trained parameters may be mixed")},
        (1,),
    ),
    FsdpKey(
        ("limit_all_gathers",),
        boolean,
        {None: Case("nothing", "gathers have a fixed order, and stage3_max_live_parameters limits the gathered elements")},
    ),
    FsdpKey(("xla",), boolean, {True: Case("none", _XLA), False: _OFF}),
    FsdpKey(("xla_fsdp_v2",), boolean, {True: Case("none", _XLA), False: _OFF}),
    FsdpKey(("xla_fsdp_grad_ckpt",), boolean, {True: Case("none", _XLA), False: _OFF}),
    FsdpKey(("xla_fsdp_settings",), off_or_on, {True: Case("none", _XLA), False: _OFF}),
)

# -- keys beside fsdp_config ------------------------------------------------------------------------------------------

_HALF = "16-bit parameters and communication; fp32 masters and moments in the optimizer's shards"
_BF16, _FP16 = Setting("bf16.enabled", True), Setting("fp16.enabled", True)
_SCRIPT = (Setting("bf16.enabled", "auto"), Setting("fp16.enabled", "auto"))
_PRECISION = {
    "bf16": Case("set", _HALF, (_BF16,)),
    "fp16": Case("set", f"{_HALF}; the engine scales the loss", (_FP16,)),
    "fp8": Case("set", f"{_HALF}; keep accelerate's mixed_precision fp8 for torchao's products in float8", (_BF16,)),
    "no": Case("set", "fp32, or the precision of the script or the training arguments", _SCRIPT),
}
ACCELERATE_KEYS: tuple[FsdpKey, ...] = (
    FsdpKey(("mixed_precision",), lambda value: one_of(*_PRECISION)("no" if value in (None, False) else value), _PRECISION),
)
TRAINER_KEYS: tuple[FsdpKey, ...] = (
    FsdpKey(("bf16",), boolean, {True: Case("set", _HALF, (_BF16,)), False: _OFF}),
    FsdpKey(("fp16",), boolean, {True: _PRECISION["fp16"], False: _OFF}),
)

_ONE = Case("nothing", "one rank")
_TENSOR = Case("set", "layers are split over this number of ranks", (Setting("tensor_parallel.autotp_size", HERE),))
_HYBRID = Case("set", "shard groups of this size; each group holds all states", (_IN_NODE,))
MESH_KEYS: tuple[FsdpKey, ...] = (
    FsdpKey(("dp_replicate_size",), size, {1: _ONE, None: _HYBRID}),
    FsdpKey(("dp_shard_size",), size, {None: Case("nothing", "all ranks shard; with dp_replicate_size, groups of this number of ranks")}),
    FsdpKey(("tp_size",), size, {1: _ONE, None: _TENSOR}),
    FsdpKey(
        ("cp_size",),
        size,
        {
            1: _ONE,
            None: Case(
                "set", "keys and values are gathered per layer, or sent around the ranks", (Setting("hf_zero.context_parallel_size", HERE),)
            ),
        },
    ),
    FsdpKey(("sp_size",), size, {1: _ONE, None: Case("set", "Ulysses", (Setting("sequence_parallel_size", HERE),))}),
)
_RULES = "{...}"
NO_RULES = "{}"  # a tp_plan that splits no layer
_EP_WAYS = ("auto", "all_to_all", "all_reduce", "deepgemm_megamoe")
_FOUND = Case("nothing", "the engine finds experts from the structure of the model")
DISTRIBUTED_KEYS: tuple[FsdpKey, ...] = (
    FsdpKey(("fsdp_size",), size, {1: _ONE, None: _FULL}),
    FsdpKey(("dp_replicate_size",), size, {1: _ONE, None: _HYBRID}),
    FsdpKey(("fsdp_plan",), anything, {None: Case("nothing", _BLOCKS)}),
    FsdpKey(
        ("fsdp_cpu_offload",),
        boolean,
        {True: Case("set", "shards are kept and updated on the host", _OFFLOAD), False: _OFF},
    ),
    FsdpKey(
        ("fsdp_mixed_precision",),
        boolean,
        {
            True: Case("set", "bf16 parameters, gradients reduced in fp32", (_BF16, Setting("communication_data_type", "fp32"))),
            False: Case("set", "fp32, or the precision of the training arguments", _SCRIPT),
        },
    ),
    FsdpKey(("tp_size",), size, {1: _ONE, None: _TENSOR}),
    FsdpKey(
        ("tp_plan",),
        lambda value: "auto" if not isinstance(value, dict) else _RULES if value else NO_RULES,
        {
            _RULES: Case("none", "layers are split by the model's data flow; put own rules into tensor_parallel.partition_config"),
            None: Case("nothing", "layers are split by the model's data flow"),
        },
    ),
    FsdpKey(
        ("ep_size",),
        size,
        {
            1: _ONE,
            None: Case(
                "set",
                "the experts are divided over this number of ranks",
                (Setting("expert_parallel.enabled", True), Setting("expert_parallel.autoep_size", HERE)),
            ),
        },
    ),
    FsdpKey(("ep_plan",), anything, {None: _FOUND}),
    FsdpKey(
        ("ep_implementation",),
        one_of(*_EP_WAYS),
        {
            "all_reduce": Case("none", "tokens are sent to their experts by all-to-all; all ranks train on different samples"),
            "deepgemm_megamoe": Case("none", "tokens are sent to their experts by all-to-all"),
            None: Case("nothing", "tokens are sent to their experts by all-to-all"),
        },
    ),
    FsdpKey(("enable_expert_parallel",), boolean, {None: Case("nothing", "an old spelling of ep_size = tp_size; translated like it")}),
    FsdpKey(("enable_sequence_parallel",), boolean, {None: Case("nothing", "transformers ignores it, too")}),
    FsdpKey(
        ("pp_size",),
        size,
        {
            1: _ONE,
            None: Case("set", "layers are divided over this number of pipeline stages; ZeRO stages 0 to 2 only", (Setting(STAGES, HERE),)),
        },
    ),
)
TABLES: Mapping[str, tuple[str, tuple[FsdpKey, ...]]] = {
    "fsdp": ("`fsdp_config` of accelerate and of Trainer (each name with or without `fsdp_`)", FSDP_KEYS),
    "accelerate": ("other keys of accelerate's YAML", ACCELERATE_KEYS),
    "trainer": ("other arguments of Trainer", TRAINER_KEYS),
    "mesh": ("`parallelism_config` (each name with or without `parallelism_config_`)", MESH_KEYS),
    "distributed": ("transformers' `DistributedConfig`", DISTRIBUTED_KEYS),
}

# -- the page ---------------------------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- keys: written by python -m hf_zero.plan.fsdp_keys -->", "<!-- keys: end -->"


def page(text: str) -> str:
    """Return the page ``text`` with the current tables between its two marks.

    Raises:
        ValueError: ``text`` does not contain both marks.
    """
    before, found, rest = text.partition(_BEGIN)
    _, ended, after = rest.partition(_END)
    if not (found and ended):
        raise ValueError(f"the page has no lines {_BEGIN!r} and {_END!r}")
    return f"{before}{_BEGIN}\n{_tables()}{_END}{after}"


def _tables() -> str:
    parts = []
    for title, keys in TABLES.values():
        parts.append(f"\n| {title} | here | |\n|---|---|---|\n")
        said: dict[Case, list[str]] = {}
        for key in keys:
            for value, case in key.cases.items():
                said.setdefault(case, []).append(_label(key, value))
        parts += [f"| {', '.join(labels)} | {_here(case)} | {case.why} |\n" for case, labels in said.items() if case not in (_OFF, _ONE)]
    return "".join(parts) + "\n"


def _label(key: FsdpKey, value: Any) -> str:
    """Return the text for a key with one of its values in the page."""
    if value is None or key.read is off_or_on:
        others = value is None and any(case not in (_OFF, _ONE) for other, case in key.cases.items() if other is not None)
        return ", ".join(f"`{name}`" for name in key.names) + (" otherwise" if others else "")
    return f"`{key.names[0]}: {value if isinstance(value, str) else show(value)}`"


def _here(case: Case) -> str:
    return "; ".join(part for part in (FATES[case.fate], _written(case)) if part)


def _written(case: Case) -> str:
    parts = [f"`{setting.text()}`{_at(setting, case)}" for setting in case.settings]
    return ", ".join(parts)


def _at(setting: Setting, case: Case) -> str:
    """Return " (stage 3)" for a setting that takes effect only there, unless the case sets the stage."""
    return " (stage 3)" if setting.stages == (3,) and all(other.path != STAGE for other in case.settings) else ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the current tables into the page that ``--write`` names."""
    parser = argparse.ArgumentParser(prog="python -m hf_zero.plan.fsdp_keys", description="Tables of docs/coming-from-fsdp.md.")
    parser.add_argument("--write", metavar="FILE", type=Path, required=True, help="the page")
    target: Path = parser.parse_args(arguments).write
    own_files.write_text(target, page(read_text(target, LIMIT_BYTES)))


if __name__ == "__main__":
    main()
