"""Checks over a whole configuration: refused keys, and combinations of keys that exclude each other."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from typing import Any

from hf_zero.config.keys import default_of, extra_of, nested_of, spellings_of
from hf_zero.config.problems import Problems, nearest, show
from hf_zero.config.schema.fields import Section, asks, is_on
from hf_zero.config.schema.training import OptimizerParams, SchedulerParams
from hf_zero.config.spelling import boolean_of, torch_class

OPTIMIZERS = ("Adam", "AdamW", "Adagrad", "Lion", "SGD", "Lamb", "Muon", "OneBitAdam")
"""Optimizers by config, in any letter case; any class of torch.optim that updates parameters one by one is allowed beside them."""

SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
"""Schedulers by config; any class of torch.optim.lr_scheduler is allowed beside them."""

REFUSED_OPTIMIZERS: dict[str, str] = {
    "zerooneadam": "its local steps are not provided: use OneBitAdam",
    "onebitlamb": "not provided: use Lamb, or OneBitAdam for few bits on the network",
    "muadam": "not provided: pass an optimizer made with the mup package instead",
    "muadamw": "not provided: pass an optimizer made with the mup package instead",
    "musgd": "not provided: pass an optimizer made with the mup package instead",
}

_ALIGNMENT = 2
"""DeepSpeed's `nccl_start_alignment_factor`. Units are aligned for every value, but a file that DeepSpeed refuses is refused, too."""

_ONE_BIT = "only read by OneBitAdam: use that type, or leave it out"
_LAMB = "only read by Lamb: use that type, or leave it out"
_MUON = "only read by Muon: use that type, or leave it out"
ONLY_OF: dict[str, tuple[tuple[str, ...], str]] = {
    "max_grad_norm": (("onebitadam",), "use gradient_clipping at the top level"),
    "freeze_step": (("onebitadam",), _ONE_BIT),
    "eps_inside_sqrt": (("onebitadam", "lamb"), "only read by OneBitAdam and Lamb: use one of these types, or leave it out"),
    "max_coeff": (("lamb",), _LAMB),
    "min_coeff": (("lamb",), _LAMB),
    "muon_lr": (("muon",), _MUON),
    "adam_lr": (("muon",), _MUON),
    "ns_method": (("muon",), _MUON),
}
"""Keys of `optimizer.params` -> the types, in lower case, that accept them, and the advice for all other types."""


_PARAMS: dict[str, type[Section]] = {"optimizer": OptimizerParams, "scheduler": SchedulerParams}


def check_refusals(data: dict[str, Any], section: type[Section], path: str, problems: Problems) -> None:
    """Report every refused key whose value requests the refused feature.

    Args:
        data: Typed values of the block, with canonical names.
        section: Schema of the block.
        path: Dotted path of the block, "" for the root.
        problems: Collector that gets one refusal per such key; keys below a refused one are not listed again.
    """
    if section.switch is not None:
        value, field_extra, default = _switch(data, section)
        if not is_on(default if value is None else value, field_extra.get("passes", ())):
            return
        if field_extra["fate"] == "refused":
            problems.refuse(f"{path}.{section.switch}", default if value is None else value, field_extra["effect"])
            return
    if path == "optimizer" and str(data.get("type")).lower() in REFUSED_OPTIMIZERS:
        problems.refuse("optimizer.type", data["type"], REFUSED_OPTIMIZERS[data["type"].lower()])
        return
    if path == "optimizer":
        for name, value in (data.get("params") or {}).items():
            types, text = ONLY_OF.get(name, ((), ""))
            if types and str(data.get("type")).lower() not in types and is_on(value):
                problems.refuse(f"optimizer.params.{name}", value, text)
    for name, value in data.items():
        if name not in section.model_fields:
            continue
        here = f"{path}.{name}" if path else name
        field = section.model_fields[name]
        extra, nested = extra_of(field), nested_of(section, name)
        if extra["fate"] == "refused":
            if nested or asks(value, default_of(field), extra.get("passes", ())):
                problems.refuse(here, value, extra["effect"])
        elif nested and nested.kind == "one":
            check_refusals(value, nested.section, here, problems)


def _switch(data: dict[str, Any], section: type[Section]) -> tuple[Any, dict[str, Any], Any]:
    """Return value (None if absent), metadata and default of a section's switch, which may be one section deeper."""
    holder: type[Section] = section
    value: Any = data
    steps = (section.switch or "").split(".")
    for step in steps[:-1]:
        nested = nested_of(holder, step)
        holder = nested.section if nested else holder
        value = value.get(step, {})
    field = holder.model_fields[steps[-1]]
    return value.get(steps[-1]), extra_of(field), default_of(field)


def check_values(data: dict[str, Any], problems: Problems) -> None:
    """Report combinations of values that contradict each other. Every finding names all keys involved."""
    fp16, bf16 = data.get("fp16", {}), data.get("bf16", {})
    if fp16.get("enabled") and bf16.get("enabled"):
        problems.error("fp16.enabled", "and `bf16.enabled` are both true; they exclude each other, set one to false")
    _check_patterns(data.get("data_types", {}).get("keep_in_fp32_modules"), problems)
    masters, states = bf16.get("bf16_master_weights_and_grads", False), bf16.get("bf16_optimizer_states", False)
    offload = data.get("zero_optimization", {}).get("offload_optimizer") or {}
    if masters != states and (states or offload.get("device", "none") == "none"):
        text = f"is {show(states)} but `bf16.bf16_master_weights_and_grads` is {show(masters)}"
        remedy = "moments are in bf16 only beside masters in bf16, set both to true or both to false"
        if masters:
            remedy = "fp32 moments beside masters in bf16 are kept by the optimizers of `zero_optimization.offload_optimizer` alone, and "
            remedy += "its `device` is none: set both to true, or offload the optimizer"
        problems.error("bf16.bf16_optimizer_states", f"{text}; {remedy}")
    if fp16.get("enabled") and not fp16.get("loss_scale") and fp16.get("min_loss_scale", 1) <= 0:
        text = f"is {show(fp16['min_loss_scale'])}; with a dynamic scale (`fp16.loss_scale` 0) it must be above 0"
        problems.error("fp16.min_loss_scale", text)
    stage = data.get("zero_optimization", {}).get("stage", 0)
    if stage >= 2 and str(data.get("optimizer", {}).get("type")).lower() == "onebitadam":
        text = "needs each rank's whole gradient, and `zero_optimization.stage` 2 and 3 keep a part of it: use stage 0 or 1, or Adam"
        problems.refuse("optimizer.type", data["optimizer"]["type"], text)
    _check_shard_group(data.get("zero_optimization", {}), data.get("hf_zero", {}).get("param_shard_size"), problems)
    _check_quantization(data, problems)
    _check_replicas(data, problems)
    _check_passes(data.get("compile") or {}, problems)
    _check_rewind(data, problems)
    _check_axes(data, problems)
    bucket = data.get("zero_optimization", {}).get("allgather_bucket_size", 0)
    if stage in (1, 2) and bucket % _ALIGNMENT:
        # DeepSpeed's sentence, complete and last: scripts search for it in the error, which pytest cuts in the middle.
        text = f"is {show(bucket)}: allgather_bucket_size must be a multiple of nccl_start_alignment_factor, {_ALIGNMENT}"
        problems.error("zero_optimization.allgather_bucket_size", text)
    experts = data.get("expert_parallel") or {}
    if experts.get("enabled") and experts.get("autoep_size") is None:
        text = (
            "is missing; using 1: every rank holds all experts, unless an argument or a DistributedConfig gives the number "
            "of expert-parallel ranks"
        )
        problems.warn("expert_parallel.autoep_size", text)
    for name in ("offload_optimizer", "offload_param"):
        block = data.get("zero_optimization", {}).get(name) or {}
        if block.get("device") == "nvme" and not block.get("nvme_path"):
            key = f"zero_optimization.{name}.nvme_path"
            problems.error(key, "is missing, and `device` is nvme; name a folder on a local disk")
    if "optimizer" in data:
        _check_type("optimizer", data["optimizer"].get("type"), OPTIMIZERS, problems)
        _check_optimizer(data, problems)
    if "scheduler" in data:
        _check_type("scheduler", data["scheduler"].get("type"), SCHEDULERS, problems)
        _check_arguments("scheduler", data["scheduler"], problems)


def _check_patterns(patterns: list[str] | str | None, problems: Problems) -> None:
    """Report patterns of names that are no regular expressions."""
    for pattern in patterns if isinstance(patterns, list) else ():
        try:
            re.compile(pattern.replace("*", ".*"))
        except re.error as error:
            text = f"has {show(pattern)}, which is no pattern ({error}); allowed: parts of names, `*` for any characters"
            problems.error("data_types.keep_in_fp32_modules", text)


def _check_passes(section: dict[str, Any], problems: Problems) -> None:
    """Refuse passes of DeepCompile that divide a model over ranks; all other passes only change when work is done."""
    homes = {"autosp": "sequence_parallel_size", "autotp": "tensor_parallel.autotp_size"}
    for name in section.get("passes") or () if section.get("deepcompile") else ():
        if name in homes:
            problems.refuse("compile.passes", name, f"no pass of a compiler divides a model here: set `{homes[name]}`")


def _check_rewind(data: dict[str, Any], problems: Problems) -> None:
    """Check the keys that `hf_zero.spike_action` "rewind" needs, and refuse it for pipelines."""
    own, key = data.get("hf_zero", {}), "hf_zero.spike_action"
    if own.get("spike_action") != "rewind":
        return
    if not own.get("snapshot_steps"):
        text = "is 'rewind' and `hf_zero.snapshot_steps` is 0, so there is no snapshot to restore; set it to a number of steps, such as 50"
        problems.error(key, text)
    if not (own.get("spike_factor") or own.get("loss_spike_factor")):
        text = "is 'rewind', and `hf_zero.spike_factor` and `hf_zero.loss_spike_factor` are 0, so nothing is a spike; set one of them"
        problems.error(key, text)
    stages = (data.get("pipeline") or {}).get("stages")
    if isinstance(stages, int) and stages > 1:
        problems.refuse(key, "rewind", f"and `pipeline.stages` is {stages}: a pipeline cannot restore snapshots; use skip")


def _check_axes(data: dict[str, Any], problems: Problems) -> None:
    """Refuse axes of parallelism that exclude each other or the stage, so that `hf-zero explain` and arguments report them, too."""
    stages = (data.get("pipeline") or {}).get("stages")
    pipeline = stages if isinstance(stages, int) else 1
    sequence, context = data.get("sequence_parallel_size") or 1, data.get("hf_zero", {}).get("context_parallel_size") or 1
    split = (data.get("tensor_parallel") or {}).get("autotp_size") or 1
    stage = data.get("zero_optimization", {}).get("stage", 0)
    if pipeline > 1 and stage == 3:
        text = "a pipeline and `zero_optimization.stage` 3 exclude each other: set the stage to 1 or 2, or leave the pipeline out"
        problems.refuse("pipeline.stages", pipeline, text)
    for name, size in (("sequence_parallel_size", sequence), ("hf_zero.context_parallel_size", context)):
        if pipeline > 1 and size > 1:
            text = f"a pipeline and `{name}` {size} cannot be combined: `tensor_parallel.autotp_size` divides activations in a pipeline"
            problems.refuse("pipeline.stages", pipeline, text)
    if split > 1 and sequence > 1:
        text = f"it and `sequence_parallel_size` {sequence} cannot be combined: `hf_zero.context_parallel_size` divides sequences beside it"
        problems.refuse("tensor_parallel.autotp_size", split, text)


def _check_shard_group(zero: dict[str, Any], inside: int | str | None, problems: Problems) -> None:
    """Check `mics_shard_size`, `zero_hpz_partition_size` and `hf_zero.param_shard_size`, as far as possible without the ranks."""
    size, stage, node = zero.get("mics_shard_size", -1), zero.get("stage", 0), zero.get("zero_hpz_partition_size", 1)
    if inside is not None and stage != 3:
        text = f"is {show(inside)} and `zero_optimization.stage` is {stage}, where parameters stay whole; set that to 3, or leave this out"
        problems.error("hf_zero.param_shard_size", text)
    elif inside is not None and node > 1:
        text = f"is {show(inside)} and `zero_optimization.zero_hpz_partition_size` is {show(node)}: both keep parameters in a node; set one"
        problems.error("hf_zero.param_shard_size", text)
    if node > 1 and stage != 3:  # programs have a size as a default of theirs, and choose a stage
        text = f"is {show(node)} and has no effect: `zero_optimization.stage` is {stage}, where each rank keeps whole parameters anyway"
        problems.warn("zero_optimization.zero_hpz_partition_size", text)
    if size != -1 and size < 1:
        problems.error(
            "zero_optimization.mics_shard_size", f"is {show(size)}; allowed: -1 (one group of all ranks) or a whole number above 0"
        )
    elif size != -1 and stage == 0:
        text = f"is {show(size)} and `zero_optimization.stage` is 0, which shards nothing; set the stage to 1, 2 or 3, or leave the key out"
        problems.error("zero_optimization.mics_shard_size", text)


def _check_quantization(data: dict[str, Any], problems: Problems) -> None:
    """Report keys of ZeRO++ whose value would have no effect, or only a part of the requested effect."""
    zero = data.get("zero_optimization", {})
    stage, here = zero.get("stage", 0), "zero_optimization"
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if zero.get(name) and stage != 3:
            text = f"it is for the all-gathers of stage 3, and `{here}.stage` is {stage}: set that to 3, or leave this out"
            problems.refuse(f"{here}.{name}", True, text)
    if not zero.get("zero_quantized_gradients"):
        if zero.get("zeropp_loco_param") is not None:
            text = (
                f"it keeps the rounding errors of quantized gradients, and `{here}.zero_quantized_gradients` is false: set that "
                "to true, or remove this"
            )
            problems.refuse(f"{here}.zeropp_loco_param", zero["zeropp_loco_param"], text)
        return
    reason = ""
    if stage == 0:
        reason = f"it is for gradients that are reduced to an owner, and `{here}.stage` is 0: use stage 1, 2 or 3"
    elif not (data.get("fp16", {}).get("enabled") or data.get("bf16", {}).get("enabled")) and (
        data.get("data_types", {}).get("param_dtype") in (None, "fp32")
    ):
        reason = (
            "it is for 16-bit training, and this is fp32: enable `bf16` or `fp16`, or set `communication_data_type` to bf16 in its place"
        )
    elif str(data.get("optimizer", {}).get("type")).lower() == "onebitadam":
        reason = "it and `optimizer.type` OneBitAdam, which sends signs itself, exclude each other: use Adam, or leave this out"
    if reason:
        problems.refuse(f"{here}.zero_quantized_gradients", True, reason)


def _check_replicas(data: dict[str, Any], problems: Problems) -> None:
    """Refuse features beside `hf_zero.replicas` that the exchange between replica groups does not serve."""
    own, zero = data.get("hf_zero", {}), data.get("zero_optimization", {})
    if own.get("replicas", "none") == "none":
        return
    offloads = [f"zero_optimization.{name}.device" for name in ("offload_optimizer", "offload_param") if _device(zero.get(name)) != "none"]
    found = {
        **dict.fromkeys(offloads, "not none"),
        "zero_optimization.mics_shard_size": zero.get("mics_shard_size", -1) != -1,
        "zero_optimization.zero_hpz_partition_size": zero.get("zero_hpz_partition_size", 1) > 1,
        "zero_optimization.zero_quantized_gradients": zero.get("zero_quantized_gradients", False),
        "hf_zero.param_shard_size": own.get("param_shard_size") is not None,
        "hf_zero.snapshot_steps": own.get("snapshot_steps", 0) > 0,
        "hf_zero.loss_spike_factor": (own.get("loss_spike_factor") or 0) > 0,  # each group has a loss of its own
        "hf_zero.context_parallel_size": (own.get("context_parallel_size") or 1) > 1,
        "sequence_parallel_size": (data.get("sequence_parallel_size") or 1) > 1,
        "tensor_parallel.autotp_size": ((data.get("tensor_parallel") or {}).get("autotp_size") or 1) > 1,
        "expert_parallel.enabled": (data.get("expert_parallel") or {}).get("enabled", False),
        "gradient_allreduce_op": data.get("gradient_allreduce_op") == "sum",
        "optimizer.type": str((data.get("optimizer") or {}).get("type")).lower() in ("onebitadam", "muon"),
    }
    names = [f"`{key}`" for key, asked in found.items() if asked]
    if names:
        text = f"replica groups are not provided together with {', '.join(names)}: remove the one or the other"
        problems.refuse("hf_zero.replicas", own["replicas"], text)


def _device(block: Any) -> str:
    return str((block or {}).get("device") or "none").lower()


def _check_type(section: str, name: str | None, known: tuple[str, ...], problems: Problems) -> None:
    """Check `type` of the optimizer or scheduler section: a name of hf_zero (any letter case for optimizers) or a torch class."""
    if name is None:
        problems.error(f"{section}.type", f"is missing; a `{section}` section needs a type, for example {known[0]}")
        return
    own = name.lower() in {one.lower() for one in known} | REFUSED_OPTIMIZERS.keys() if section == "optimizer" else name in known
    if own or torch_class(section, name) is not None:
        return
    guess = nearest(name, known)
    hint = f"did you mean {guess}?" if guess else f"allowed: {', '.join(known)} or a class of torch.{_module(section)}"
    problems.error(f"{section}.type", f"is {show(name)}, which is unknown; {hint}")


def _check_optimizer(data: dict[str, Any], problems: Problems) -> None:
    """Report arguments that every optimizer's constructor would refuse, and a rate of 0, by their names in the file."""
    params = data["optimizer"].get("params") or {}
    betas = params.get("betas")
    if isinstance(betas, (list, tuple)) and (
        len(betas) != 2 or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas)
    ):
        problems.error("optimizer.params.betas", f"is {show(betas)}; allowed: two numbers, at least 0 and below 1")
    if params.get("lr") == 0 and "scheduler" not in data:
        problems.warn("optimizer.params.lr", "is 0: no parameter changes, unless a scheduler of the script sets another rate")
    _check_arguments("optimizer", data["optimizer"], problems)


def _check_arguments(section: str, block: dict[str, Any], problems: Problems) -> None:
    """Check arguments of a torch class beyond the keys of the schema, by the type of their defaults; numbers must be finite."""
    params, name = block.get("params") or {}, block.get("type")
    further = sorted(params.keys() - spellings_of(_PARAMS[section]).keys())
    if not further:
        return
    found = torch_class(section, name) if isinstance(name, str) else None
    known = inspect.signature(found).parameters if found else {}
    for key in further:
        value, default = params[key], known[key].default if key in known else None
        wanted = ""
        if any(not math.isfinite(number) for number in _floats(value)):
            wanted = "a finite number"
        elif any(number < 0 for number in _floats(value)) and not (isinstance(default, (int, float)) and default < 0):
            wanted = "a number, at least 0"
        elif isinstance(default, bool) and boolean_of(value) is None:
            wanted = "true or false"
        elif isinstance(default, (int, float)) and not isinstance(default, bool) and _number(value) is None:
            wanted = "a number"
        if wanted:
            problems.error(f"{section}.params.{key}", f"is {show(value)}; allowed: {wanted}")


def _floats(value: Any) -> Iterator[float]:
    """Yield the numbers in a value, including numbers written as text and items of lists."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _floats(item)
    else:
        number = _number(value)
        yield from () if number is None else (number,)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def _module(section: str) -> str:
    return "optim" if section == "optimizer" else "optim.lr_scheduler"
