"""Define the flags of ``hf-zero plan``, and run the command."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.config.problems import show
from hf_zero.errors import ConfigError, HfZeroError, printable
from hf_zero.plan import fit
from hf_zero.plan.progress import shown

if TYPE_CHECKING:
    from hf_zero.plan.prediction import Prediction

_WHERE = "The model's code or hf_zero raised this error: set HF_ZERO_LOG_LEVEL=DEBUG for the traceback"
_MICRO = "train_micro_batch_size_per_gpu"
_LEFT_OUT = (
    "wall_clock_breakdown", "memory_breakdown", "flops_profiler", "comms_logger", "tensorboard", "wandb", "comet", "csv_monitor",
    "scheduler",
)  # fmt: skip
_MODEL = "folder or file with a config.json, an ID on the Hub, a model_type of transformers, or python:FILE.py:FUNCTION"
_AUTO = 'value of a training argument that replaces "auto", such as bf16=true; may be given several times'
_FROM = "FSDP settings (accelerate's YAML, Trainer's arguments, transformers' DistributedConfig): print the equivalent configuration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``hf-zero plan`` to ``parser``."""
    parser.add_argument("model", nargs="?", help=_MODEL)
    parser.add_argument("--config", help="DeepSpeed configuration: JSON file, JSON text or base64 text")
    parser.add_argument("--source", dest="sources", action="append", default=[], metavar="NAME=VALUE", help=_AUTO)
    parser.add_argument("--from", dest="source", metavar="FILE", help=_FROM)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="replace a value of the model's configuration")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="number of ranks over all nodes (default 1)")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="ranks of one node (default: all)")
    parser.add_argument("--memory", metavar="SIZE", help="memory of one device, such as 80GiB; with --device cpu: of one node")
    parser.add_argument("--host-memory", metavar="SIZE", help="memory of one node, shared by its ranks, such as 1TiB")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="samples per rank and micro-step (default: the configuration's)")
    parser.add_argument("--sequence", type=int, metavar="N", help="tokens per sample (default 1024, or the model's positions if fewer)")
    parser.add_argument("--trainable", default="all", metavar="WHAT", help="all, lora:r=16, or match:REGEX of parameter names")
    parser.add_argument("--checkpoint-activations", action="store_true", help="recompute activations in backward")
    parser.add_argument(
        "--every-n-layers", type=int, default=1, metavar="N", help="with --checkpoint-activations: recompute only 1 in N blocks (default 1)"
    )
    parser.add_argument("--offload-activations", action="store_true", help="keep activations (or layer inputs) on the host until backward")
    parser.add_argument("--attention", choices=("sdpa", "flash", "eager"), default="sdpa", help="attention kernel (default sdpa)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device on which ranks compute (default cuda)")
    parser.add_argument("--link", metavar="RATE", help="bandwidth of a rank to other nodes, such as 400Gbit")
    parser.add_argument("--node-link", metavar="RATE", help="bandwidth of a rank inside its node, such as 3200Gbit")
    parser.add_argument("--tflops", type=float, metavar="N", help="10^12 floating-point operations per second that a rank reaches")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a picture of memory over one step: .png, .svg, .pdf, or .html with tooltips"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    fit.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Plan one configuration, search for one (``--fit``), or translate FSDP settings (``--from``), and print the result.

    Returns:
        The exit status: 0 if the configuration fits (or FSDP settings were translated), 1 if it does not, 2 for wrong input.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns about a world without peers
    try:
        if options.source is not None:
            return _translate_fsdp(options)
        if options.model is None:
            raise ConfigError("usage: give MODEL with --config FILE, MODEL with --fit, or --from FILE")
        inputs = _inputs(options)
        if options.fit:
            fit.require_flags(options, inputs)
            return fit.run(options, inputs)
        fit.refuse_without_fit(options)
        with shown("hf-zero plan", "one optimizer step of a rank"):
            prediction = _predict(options, inputs)
        if options.plot is not None:
            _draw(prediction, options)
    except HfZeroError as error:
        print(f"hf-zero plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except Exception as error:  # of the user's model or of hf_zero; exit status 1 would mean "it does not fit"
        logging.getLogger("hf_zero").debug("planning ended with an error", exc_info=True)
        text = " ".join(str(error).split())[:300]
        print(printable(f"hf-zero plan: the step cannot be planned: {type(error).__name__}: {text}. {_WHERE}"), file=sys.stderr)
        return 2
    from hf_zero.plan.report import text_of

    print(json.dumps(prediction.to_dict(), indent=2) if options.json else text_of(prediction))
    return 0 if prediction.fits else 1


def _draw(prediction: Prediction, options: argparse.Namespace) -> None:
    from hf_zero.plan.report import draw, write_page
    from hf_zero.system.pictures import is_page

    title = f"{options.model} on {options.ranks} rank(s)"
    if is_page(options.plot):
        write_page(prediction, options.plot, title)
    else:
        draw(prediction, options.plot, title)


def _translate_fsdp(options: argparse.Namespace) -> int:
    from hf_zero.plan import from_fsdp

    if options.model is not None or options.config is not None or options.fit:
        raise ConfigError(
            "--from translates FSDP settings: leave MODEL, --config and --fit out; --write DIR writes a ds.json to plan with --config"
        )
    _refuse_unread(options, {"source", "ranks", "ranks_per_node", "json", "write"})
    from_fsdp.run(options.source, options.ranks if options.ranks > 1 else None, options.ranks_per_node, options.json, options.write)
    return 0


def _refuse_unread(options: argparse.Namespace, read: set[str]) -> None:
    """Raise if a flag that ``--from`` does not read has another value than its default.

    Raises:
        ConfigError: Names the flags.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    unread = [name for name, default in vars(parser.parse_args([])).items() if name not in read and getattr(options, name) != default]
    if unread:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unread)
        raise ConfigError(
            f"--from translates FSDP settings and does not read {names}: plan the configuration in a second command. `hf-zero plan --from "
            f"... --write DIR` writes it, and `hf-zero plan MODEL --config DIR/ds.json {' '.join(names.split(', '))}` plans it"
        )


def _inputs(options: argparse.Namespace) -> fit.PlanInputs:
    """Return the inputs of a plan that the flags describe: model, ranks and hardware."""
    from hf_zero.config.auto import checked_sources
    from hf_zero.plan.inputs import Cluster, Hardware, ModelWish, bytes_per_second_of
    from hf_zero.system.sizes import bytes_of

    for flag in ("ranks", "ranks_per_node", "micro_batch", "sequence", "tflops", "every_n_layers"):
        value = getattr(options, flag)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{flag.replace('_', '-')} is {value}; a number above 0 is allowed")
    near = options.ranks_per_node or options.ranks
    if options.ranks % near and options.ranks > near:
        raise ConfigError(f"--ranks {options.ranks} is not a multiple of --ranks-per-node {near}; all nodes need equally many ranks")
    hardware = Hardware(
        memory=bytes_of(options.memory, "--memory") if options.memory else None,
        host_memory=bytes_of(options.host_memory, "--host-memory") if options.host_memory else None,
        flops=options.tflops * 1e12 if options.tflops else None,
        link=bytes_per_second_of(options.link, "--link") if options.link else None,
        node_link=bytes_per_second_of(options.node_link, "--node-link") if options.node_link else None,
    )
    if options.every_n_layers > 1 and not options.checkpoint_activations:
        raise ConfigError("--every-n-layers chooses the blocks that are recomputed: give --checkpoint-activations too")
    activations = options.every_n_layers if options.checkpoint_activations else 0, options.offload_activations
    model = ModelWish(options.model, _pairs(options.set, "--set"), options.attention, options.trainable, *activations)
    sources = checked_sources(_pairs(options.sources, "--source"))
    for name, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if sources.get(name) is True:
            sources.setdefault(other, False)  # Trainer refuses both
    if options.config is not None:
        _require_valid(options.config, sources)
    return fit.PlanInputs(model, Cluster(options.ranks, near, options.device == "cpu"), hardware, settled, sources)


def _require_valid(source: str, sources: Mapping[str, Any]) -> None:
    """Raise for a mistake in the sections that a plan leaves out: it would stop a run.

    Raises:
        ConfigError: Names the mistakes.
    """
    from hf_zero.config.auto import filled
    from hf_zero.config.read import read_config
    from hf_zero.config.resolve import resolve

    config = filled(read_config(source), sources)
    resolve({_MICRO: 1, **{name: config[name] for name in _LEFT_OUT if name in config}})


def _pairs(texts: Sequence[str], flag: str) -> dict[str, Any]:
    """Return names and values of all NAME=VALUE of ``flag``."""
    from hf_zero.config.auto import source_of

    try:
        return dict(map(source_of, texts))
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from None


def _predict(options: argparse.Namespace, inputs: fit.PlanInputs) -> Prediction:
    from hf_zero.config.auto import hidden_size_of
    from hf_zero.config.mesh import claims_of_config, solve
    from hf_zero.plan.inputs import Load
    from hf_zero.system.pictures import is_page, require_folder, require_place

    if options.config is None:
        raise ConfigError("--config is missing: give the configuration to plan, or --fit to search for one")
    config = settled(options.config, options.micro_batch, options.ranks, inputs.sources)
    if options.plot is not None:
        (require_folder if is_page(options.plot) else require_place)(options.plot, "--plot")
    # These imports load torch and transformers; they come last, so that messages about wrong flags appear at once.
    import torch

    from hf_zero.core.holdings import taken
    from hf_zero.plan.models import build_model, sequence_of
    from hf_zero.plan.workers import plan_step

    imports = taken(torch.device("cpu"))
    model = build_model(inputs.model)
    sources = {"hidden_size": hidden_size_of(model.module), **inputs.sources}
    config = settled(options.config, options.micro_batch, options.ranks, sources)
    load = Load(config[_MICRO], sequence_of(options.sequence, model.positions))
    prediction = plan_step(model, config, inputs.cluster, load, inputs.hardware, options.attention)
    replicas = solve(claims_of_config(config), options.ranks).replicas
    tokens = replicas * load.micro_batch * prediction.observation.accumulation * load.sequence
    return replace(prediction, tokens=tokens, imports=imports)


def settled(
    source: Mapping[str, Any] | str,
    micro_batch: int | None = None,
    ranks: int | None = None,
    sources: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the configuration to plan: without "auto" values, monitors and schedulers, and with a micro-batch size and an optimizer.

    Args:
        source: The configuration, in each form that ``initialize`` accepts.
        micro_batch: Micro-batch size that replaces the configuration's. If ``gradient_accumulation_steps`` is set, ``train_batch_size`` is
            removed; otherwise the engine derives the accumulation from ``train_batch_size``.
        ranks: Number of ranks, with which a micro-batch size that the configuration leaves open is derived as a run does, from
            ``train_batch_size`` or from ``elasticity``.
        sources: Values that replace "auto", by the names of training arguments; without one, the default applies.

    Raises:
        ConfigError: The configuration cannot be read or is wrong, or it has a ``train_batch_size`` and no micro-batch size is known.
    """
    from hf_zero.config.auto import filled
    from hf_zero.config.read import read_config

    config = filled(read_config(source), sources or {})
    for name in _LEFT_OUT:  # they observe a run and do not change it; a scheduler may need the number of steps of a run
        config.pop(name, None)
    if micro_batch is not None:
        if "gradient_accumulation_steps" in config:
            config.pop("train_batch_size", None)
        config[_MICRO] = micro_batch
    elif ranks is not None and (_MICRO not in config or "elasticity" in config):
        config[_MICRO] = _derived(config, ranks)
    if _MICRO not in config and "train_batch_size" in config:
        raise ConfigError(f"--micro-batch is missing: the configuration sets train_batch_size, but not {_MICRO}")
    config[_MICRO] = _samples(config.get(_MICRO, 1))
    config.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-3}})
    own = config.get("hf_zero")
    config["hf_zero"] = {**(own if isinstance(own, dict) else {}), "offload_overlap": "none"}
    return config


def _derived(config: Mapping[str, Any], ranks: int) -> int:
    """Return the micro-batch size that a run of ``config`` on ``ranks`` ranks has."""
    from hf_zero.config.mesh import claims_of_config, solve
    from hf_zero.config.resolve import resolve

    found = resolve(config, world_size=solve(claims_of_config(config), ranks).replicas).config
    assert found.train_micro_batch_size_per_gpu is not None
    return found.train_micro_batch_size_per_gpu


def _samples(value: Any) -> int:
    """Return the micro-batch size from a value of the configuration: a number or a text.

    Raises:
        ConfigError: ``value`` is not a whole number of at least 1.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if isinstance(value, bool) or number < 1 or not number.is_integer():
        raise ConfigError(f"`{_MICRO}` is {show(value)}; a whole number of at least 1 is allowed")
    return int(number)
