"""Define the flags of ``hf-zero plan --fit``, run the search, and print its result."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.errors import ConfigError
from hf_zero.plan.progress import SearchBar, shown

if TYPE_CHECKING:
    from hf_zero.plan.costs import Rates
    from hf_zero.plan.inputs import Cluster, Hardware, ModelWish
    from hf_zero.plan.planner import Planner
    from hf_zero.plan.search import Answer, Fitting

LONG = 8192
"""Tokens of a sequence from which on context parallelism is tried without ``--axes``: below it, other axes divide activations enough."""
_EXAMPLES = 4  # excluded candidates that are printed, of each kind of reason
_RATES = ("memory", "host-link", "host-memory", "disk")
Settle = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class PlanInputs:
    """Inputs of a plan or a search, from the flags.

    Attributes:
        model: The user's choices for the model.
        cluster: Number and place of the ranks.
        hardware: Limits and rates of the hardware.
        settle: Function that completes a configuration for a plan: from the configuration, the micro-batch size, and ``sources=``.
        sources: Values that replace "auto" in the configuration, by the names of training arguments.
    """

    model: ModelWish
    cluster: Cluster
    hardware: Hardware
    settle: Settle
    sources: Mapping[str, Any] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a search to ``parser``."""
    group = parser.add_argument_group("search", "with --fit; --config then has the keys that all candidates share, and is optional")
    group.add_argument(
        "--fit", action="store_true", help="find the fastest settings that fit: stage, micro batch, offload, activations, axes"
    )
    group.add_argument("--global-batch", type=int, metavar="N", help="samples per optimizer step over all ranks and micro-steps")
    group.add_argument(
        "--axes",
        metavar="LIST",
        help="parallel axes to try: none, or some of replicas,tensor,sequence,context,experts,pipeline (default: all that may help)",
    )
    group.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help="stop after N minutes, when the plan under way ends, and print the best so far; so does Ctrl-C",
    )
    group.add_argument("--nvme-path", default="", metavar="DIR", help="also try offload to files in this folder, on every node")
    group.add_argument("--measure", action="store_true", help="first measure rates of matrix products, memory and collectives here")
    group.add_argument(
        "--rate",
        action="append",
        default=[],
        metavar="NAME=RATE",
        help="rate of memory, host-link, host-memory or disk, such as memory=12Tbit",
    )
    group.add_argument(
        "--write",
        type=Path,
        metavar="DIR",
        help="write the best (with --from: equivalent) configuration as ds.json and accelerate.yaml",
    )


def refuse_without_fit(options: argparse.Namespace) -> None:
    """Raise if a flag of a search is given without ``--fit``.

    Raises:
        ConfigError: A flag of a search is given.
    """
    for flag in ("global_batch", "axes", "minutes", "nvme_path", "measure", "rate", "write"):
        if getattr(options, flag):
            other = " (or --from FILE)" if flag == "write" else ""
            raise ConfigError(f"--{flag.replace('_', '-')} is a flag of a search: give --fit{other} too")


def require_flags(options: argparse.Namespace, inputs: PlanInputs) -> None:
    """Check the flags of a search, before torch and transformers are imported.

    Raises:
        ConfigError: A flag is missing or wrong.
    """
    if options.global_batch is None or options.global_batch < 1:
        raise ConfigError(
            f"--fit needs --global-batch, the samples per optimizer step; it is {options.global_batch}, a number of at least 1 is allowed"
        )
    if options.minutes is not None and not options.minutes > 0:
        raise ConfigError(f"--minutes is {options.minutes:g}; a number above 0 is allowed")
    if options.plot is not None:
        raise ConfigError("--plot draws one configuration: plan the configuration that --fit --write DIR writes")
    for flag, given in (("offload-activations", options.offload_activations), ("every-n-layers", options.every_n_layers > 1)):
        if given:
            raise ConfigError(f"--fit chooses --{flag}: remove the flag")
    cluster, limits = inputs.cluster, inputs.hardware
    if limits.memory is None and not (cluster.on_host and limits.host_memory is not None):
        raise ConfigError("--fit needs a memory limit: --memory, such as --memory 80GiB" + " (or --host-memory)" * cluster.on_host)
    _axes(options.axes, experts=True, sequence=LONG)
    _given_rates(options)


def run(options: argparse.Namespace, inputs: PlanInputs) -> int:
    """Search, print the result, and write the best configuration if ``--write`` is given.

    Returns:
        The exit status: 0 if a candidate fits, 1 if none does, 130 after Ctrl-C.

    Raises:
        ConfigError: The input is wrong.
    """
    from hf_zero.plan.search import Search
    from hf_zero.plan.written import places, write

    planner = _planner(options, inputs)
    if options.write is not None:
        places(options.write)  # raises before the search, which takes long
    rates = _rates(options, inputs, planner.space.base)
    gc.collect()
    gc.freeze()  # the collector need not scan imported modules after each plan
    if options.minutes is not None:
        planner.until = time.monotonic() + 60 * options.minutes
    with closing(planner.workers):  # ends after plans that still run, which have nothing to say
        with shown("hf-zero plan --fit", "the first plan") as show:
            bar = SearchBar(show)
            planner.on_progress, planner.workers.ended = bar.begin, bar.advance
            answer = Search(planner, rates).run()
        if options.json:
            print(json.dumps(_to_dict(answer, planner, rates), indent=2))
        else:
            print("\n".join(_lines(answer, planner, rates)))
        if answer.best and options.write is not None:
            best = answer.best[0].candidate
            done = write(options.write, planner.space.config(best), inputs.cluster, best.family.recomputes, best.family.moves)
            print("\n".join(done), file=sys.stderr if options.json else sys.stdout)
        sys.stdout.flush()
    return 130 if answer.stopped == "Ctrl-C" else 0 if answer.best else 1


def _planner(options: argparse.Namespace, inputs: PlanInputs) -> Planner:
    from hf_zero.config.auto import filled
    from hf_zero.config.read import read_config
    from hf_zero.plan.candidates import EVERY, Space, layouts_of, require_batch, tiers_of
    from hf_zero.plan.few_blocks import blocks_of
    from hf_zero.plan.models import sequence_of
    from hf_zero.plan.planner import Planner
    from hf_zero.plan.search import SHOWN
    from hf_zero.plan.workers import Workers, processors

    cluster, limits = inputs.cluster, inputs.hardware
    base = read_config(options.config) if options.config is not None else {"bf16": {"enabled": True}}
    filled(base, inputs.sources)  # raises before the model is built; the base keeps "auto", which --write writes
    blocks = blocks_of(inputs.model)
    settle = partial(inputs.settle, sources={"hidden_size": blocks.hidden, **inputs.sources})
    sequence = sequence_of(options.sequence, blocks.positions)
    layouts = layouts_of(base, cluster.ranks, cluster.ranks_per_node, _axes(options.axes, blocks.experts, sequence))
    tiers = tiers_of(cluster.on_host, options.nvme_path)
    recomputes = (*(EVERY if blocks.every else ()), 1)
    asked = options.global_batch, layouts, tiers, options.micro_batch, options.nvme_path
    space = Space(base, cluster.ranks, *asked, not cluster.on_host, recomputes)
    require_batch(space)
    workers = Workers(min(processors(), SHOWN))  # a search never plans more at the same time
    return Planner(space, blocks, cluster, limits, sequence, options.attention, settle, workers=workers)


def _axes(text: str | None, experts: bool, sequence: int) -> list[str]:
    """Return the axes that ``--axes`` names; by default all that may help a model with or without experts on so long sequences."""
    from hf_zero.plan.candidates import AXES

    if text is None:
        useless = {*([] if experts else ["experts"]), *([] if sequence >= LONG else ["context"])}
        return [axis for axis in AXES if axis not in useless]
    axes = [] if text == "none" else text.split(",")
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise ConfigError(f"--axes is {text!r}, and {unknown[0]!r} is unknown; allowed: none, or some of {','.join(AXES)}")
    if "experts" in axes and not experts:
        raise ConfigError(f"--axes is {text!r}, but the model's configuration names no experts: remove experts")
    return axes


def _given_rates(options: argparse.Namespace) -> dict[str, float]:
    from hf_zero.plan.inputs import bytes_per_second_of

    given = {}
    for text in options.rate:
        name, _, value = text.partition("=")
        if name not in _RATES:
            raise ConfigError(f"--rate {text!r} is not NAME=RATE with one of {', '.join(_RATES)}; such as --rate memory=12Tbit")
        given[name] = bytes_per_second_of(value, f"--rate {name}")
    return given


def _rates(options: argparse.Namespace, inputs: PlanInputs, base: Mapping[str, Any]) -> Rates:
    from hf_zero.config.auto import filled
    from hf_zero.plan.costs import rates_of
    from hf_zero.plan.measure import measure

    cluster, limits = inputs.cluster, inputs.hardware
    given = {"tflops": limits.flops and limits.flops / 1e12, "link": limits.link, "node-link": limits.node_link, **_given_rates(options)}
    measured = measure(filled(base, inputs.sources), cluster.ranks_per_node, cluster.on_host) if options.measure else {}
    return rates_of(given, measured, cluster.near, cluster.on_host)


# -- output --------------------------------------------------------------------------------------------------------------


def _to_dict(answer: Answer, planner: Planner, rates: Rates) -> dict[str, object]:
    """Return the object that ``--json`` prints."""
    return {
        "best": [_best(one, planner) for one in answer.best],
        "out": [asdict(one) for one in answer.out],
        "rates": {name: asdict(rate) for name, rate in rates.table.items()},
        "candidates": answer.candidates,
        "planned": answer.planned,
        "stopped": answer.stopped or None,
        "warnings": _warnings(answer, planner),
    }


def _warnings(answer: Answer, planner: Planner) -> list[str]:
    """Return the warnings about keys of the configuration that a run of one of the best candidates logs."""
    from hf_zero.config.resolve import analyse

    found = [analyse(planner.space.config(one.candidate)).problems.warnings for one in answer.best]
    return list(dict.fromkeys(text for texts in found for text in texts))


def _best(one: Fitting, planner: Planner) -> dict[str, object]:
    candidate, costs = one.candidate, one.costs
    return {
        "name": str(candidate),
        "seconds_per_step": one.seconds,
        "tokens_per_second": _tokens(one, planner),
        "peak_bytes_per_rank": {"device": round(costs.device), "host": round(costs.host), "disk": round(costs.disk)},
        "checkpoint_activations": candidate.family.recomputes > 0,
        "every_n_layers": max(1, candidate.family.recomputes),
        "offload_activations": candidate.family.moves,
        "config": planner.space.config(candidate),
    }


def _lines(answer: Answer, planner: Planner, rates: Rates) -> list[str]:
    from hf_zero.system.sizes import size_text

    lines = []
    if answer.best:
        load = f"{planner.space.global_batch} samples of {planner.sequence} tokens per step"
        lines.append(f"the best candidates that fit into {_limits_text(planner)}, {load}:")
    for number, one in enumerate(answer.best, 1):
        costs = one.costs
        tiers = [("device", costs.device), ("host", costs.host), ("disk", costs.disk)]
        held = ", ".join(f"{tier} {size_text(nbytes)}" for tier, nbytes in tiers if nbytes >= 1 << 20 or tier == planner.main_tier)
        lines += [
            f"{number}. {one.candidate}",
            f"   {one.seconds:.4g} s per step, {_tokens(one, planner):,.0f} tokens per second; a rank holds at most: {held}",
        ]
    if answer.stopped:
        lines.append(_stopped_line(answer))
    elif not answer.best:
        lines.append(f"NOTHING FITS into {_limits_text(planner)}")
    lines += [f"- a run warns: {text}" for text in _warnings(answer, planner)]
    lines += _excluded_lines(answer)
    lines += ["", f"{answer.candidates} candidates, {answer.planned} plans. The seconds are based on these rates:"]
    return [*lines, *_rate_lines(rates)]


def _stopped_line(answer: Answer) -> str:
    """Return what a search that was stopped does not say."""
    by = "Ctrl-C" if answer.stopped == "Ctrl-C" else "--minutes"
    if not answer.best:
        return f"STOPPED by {by} before a candidate was found that fits: give it more time, or fewer axes (--axes none)"
    few = "" if all(one.whole for one in answer.best) else "; memory and time are extrapolated from a few blocks"
    return f"STOPPED by {by}: a faster candidate may exist{few}"


def _excluded_lines(answer: Answer) -> list[str]:
    """Return the number of excluded candidates of each kind, with the first few and their reasons."""
    from hf_zero.plan.search import KINDS

    lines = []
    for kind, heading in KINDS.items():
        out = [one for one in answer.out if one.kind == kind]
        if out:
            lines += ["", f"excluded, {heading} ({len(out)}):"]
            lines += [f"- {one.name}: {one.reason}" for one in out[:_EXAMPLES]]
        if len(out) > _EXAMPLES:
            lines.append(f"- and {len(out) - _EXAMPLES} more (--json lists all)")
    return lines


def _tokens(one: Fitting, planner: Planner) -> float:
    """Return the tokens per second of all ranks."""
    return planner.space.global_batch * planner.sequence / one.seconds


def _limits_text(planner: Planner) -> str:
    """Return the memory limits as text."""
    from hf_zero.system.sizes import size_text

    limits = planner.hardware
    of_device = "node" if planner.cluster.on_host else "device"
    parts = [f"{size_text(limits.memory)} of each {of_device}"] if limits.memory is not None else []
    parts += [f"{size_text(limits.host_memory)} of each host"] if limits.host_memory is not None else []
    return " and ".join(parts)


def _rate_lines(rates: Rates) -> list[str]:
    from hf_zero.plan.costs import WHAT

    return [f"- {rate.source}: {name} {rate.value:.4g} ({WHAT[name]})" for name, rate in rates.table.items()]
