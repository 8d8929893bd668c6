"""``hf-zero plan --fit``: its flags, and what a search says."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_zero.errors import ConfigError

if TYPE_CHECKING:
    from hf_zero.plan.cluster import Cluster, Hardware
    from hf_zero.plan.model_wish import ModelWish
    from hf_zero.plan.planner import Planner
    from hf_zero.plan.rates import Rates
    from hf_zero.plan.search import Answer, Fitting

_RATES = ("memory", "host-link", "host-memory", "disk")
Settle = Callable[[Mapping[str, Any], int], dict[str, Any]]


@dataclass(frozen=True)
class Wish:
    """What is known before a search.

    Attributes:
        model: The model.
        cluster: The ranks.
        hardware: What there is.
        settle: Makes a configuration one that is planned, of it and the samples of a micro-step.
    """

    model: ModelWish
    cluster: Cluster
    hardware: Hardware
    settle: Settle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    group = parser.add_argument_group("search", "with --fit; --config is then what all configurations have in common, and may be left out")
    group.add_argument("--fit", action="store_true", help="find what fits and is fastest: stage, micro batch, offload, activations, axes")
    group.add_argument("--global-batch", type=int, metavar="N", help="samples of an optimizer step, of all ranks and micro-steps together")
    group.add_argument(
        "--axes", metavar="LIST", help="ways to divide ranks: none, or of replicas,tensor,sequence,experts,pipeline (default all)"
    )
    group.add_argument("--nvme-path", default="", metavar="DIR", help="try offload to files in this folder of every node too")
    group.add_argument("--measure", action="store_true", help="time matrix products, memory and collectives on this machine first")
    group.add_argument("--rate", action="append", default=[], metavar="NAME=RATE", help="memory, host-link, host-memory or disk: 12Tbit")
    group.add_argument(
        "--write", type=Path, metavar="DIR", help="write the best one (with --from: the equal one) as ds.json and accelerate.yaml"
    )


def refuse_without_fit(options: argparse.Namespace) -> None:
    """Flags of a search are wrong without one.

    Raises:
        ConfigError: One is there.
    """
    for flag in ("global_batch", "axes", "nvme_path", "measure", "rate", "write"):
        if getattr(options, flag):
            other = " (or --from FILE)" if flag == "write" else ""
            raise ConfigError(f"--{flag.replace('_', '-')} is a flag of a search: give --fit{other} too")


def require_flags(options: argparse.Namespace, wish: Wish) -> None:
    """What can be said of the flags of a search before torch and transformers are imported.

    Raises:
        ConfigError: One is missing, or wrong.
    """
    if options.global_batch is None or options.global_batch < 1:
        raise ConfigError(
            f"--fit needs --global-batch, the samples of an optimizer step; it is {options.global_batch}, 1 and more are allowed"
        )
    if options.plot is not None:
        raise ConfigError("--plot draws one configuration: plan the one that --fit --write DIR has written")
    if options.offload_activations:
        raise ConfigError("--offload-activations is of one configuration: leave it out, a search tries activations on the host by itself")
    cluster, limits = wish.cluster, wish.hardware
    if limits.memory is None and not (cluster.on_host and limits.host_memory is not None):
        raise ConfigError(
            "--fit needs to know what there is to fit into: --memory, such as --memory 80GiB" + " (or --host-memory)" * cluster.on_host
        )
    _axes(options.axes, experts=True)
    _given_rates(options)


def run(options: argparse.Namespace, wish: Wish) -> int:
    """Searches and prints; returns 0 where something fits, 1 where nothing does.

    Raises:
        ConfigError: The input is wrong.
    """
    from hf_zero.plan.search import Search
    from hf_zero.plan.written import places, write

    planner = _planner(options, wish)
    if options.write is not None:
        places(options.write)  # said before the search, which takes long
    rates = _rates(options, wish, planner.space.base)
    gc.collect()
    gc.freeze()  # what is imported need not be looked at after each of many runs
    with _shown(planner), closing(planner.workers):
        answer = Search(planner, rates).run()
    if options.json:
        print(json.dumps(_to_dict(answer, planner, rates), indent=2))
    else:
        print("\n".join(_lines(answer, planner, rates)))
    if answer.best and options.write is not None:
        best = answer.best[0].candidate
        done = write(options.write, planner.space.config(best), wish.cluster, best.family.recomputes, best.family.moves)
        print("\n".join(done), file=sys.stderr if options.json else sys.stdout)
    return 0 if answer.best else 1


def _planner(options: argparse.Namespace, wish: Wish) -> Planner:
    from hf_zero.config.read import read_config
    from hf_zero.plan.candidates import Space, layouts_of, require_batch, tiers_of
    from hf_zero.plan.few_blocks import blocks_of
    from hf_zero.plan.models import sequence_of
    from hf_zero.plan.planner import Planner
    from hf_zero.plan.search import SHOWN
    from hf_zero.plan.workers import Workers, processors

    cluster, limits = wish.cluster, wish.hardware
    base = read_config(options.config) if options.config is not None else {"bf16": {"enabled": True}}
    blocks = blocks_of(wish.model)
    layouts = layouts_of(base, cluster.ranks, cluster.ranks_per_node, _axes(options.axes, blocks.experts))
    tiers = tiers_of(cluster.on_host, options.nvme_path)
    space = Space(base, cluster.ranks, options.global_batch, layouts, tiers, options.micro_batch, options.nvme_path, not cluster.on_host)
    require_batch(space)
    workers = Workers(min(processors(), SHOWN))  # no more plans are ever waited for at once
    sequence = sequence_of(options.sequence, blocks.positions)
    return Planner(space, blocks, cluster, limits, sequence, options.attention, wish.settle, workers=workers)


def _axes(text: str | None, experts: bool) -> list[str]:
    from hf_zero.plan.candidates import AXES

    if text is None:
        return [axis for axis in AXES if experts or axis != "experts"]
    axes = [] if text == "none" else text.split(",")
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise ConfigError(f"--axes is {text!r}, and {unknown[0]!r} in it is not known; none, or some of {','.join(AXES)} are allowed")
    if "experts" in axes and not experts:
        raise ConfigError(f"--axes is {text!r}, and the model's configuration names no experts: leave them out")
    return axes


@contextmanager
def _shown(planner: Planner) -> Iterator[None]:
    """A context in which a terminal shows how far the search is."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=30), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = _Bar(lambda text, done: progress.update(task, description=text, completed=done))
        task = progress.add_task("", total=1.0)
        planner.told, planner.workers.ended = bar.begin, bar.advance
        yield


class _Bar:
    """How far a search is: it knows its parts, and not how many plans one of them takes, so each plan fills some of what is left of it.

    Args:
        show: Shows a text and a share of 1.
    """

    def __init__(self, show: Callable[[str, float], None]) -> None:
        self._show, self._text, self._done, self._next, self._plans = show, "", 0.0, 0.0, 0

    def begin(self, text: str, done: float, after: float) -> None:
        """A part begins at ``done`` of 1 and ends at ``after``; the bar never goes back."""
        self._text, self._done, self._next = text, max(done, self._done), after
        self._say()

    def advance(self) -> None:
        """A plan has ended."""
        self._plans += 1
        self._done += max(0.0, self._next - self._done) / 4
        self._say()

    def _say(self) -> None:
        self._show(f"{self._text}, {self._plans} plans" if self._plans else self._text, self._done)


def _given_rates(options: argparse.Namespace) -> dict[str, float]:
    from hf_zero.plan.quantities import bytes_per_second_of

    given = {}
    for text in options.rate:
        name, _, value = text.partition("=")
        if name not in _RATES:
            raise ConfigError(f"--rate {text!r} is not NAME=RATE with one of {', '.join(_RATES)}; such as --rate memory=12Tbit")
        given[name] = bytes_per_second_of(value, f"--rate {name}")
    return given


def _rates(options: argparse.Namespace, wish: Wish, base: Mapping[str, Any]) -> Rates:
    from hf_zero.plan.measure import measure
    from hf_zero.plan.rates import rates_of

    cluster, limits = wish.cluster, wish.hardware
    given = {"tflops": limits.flops and limits.flops / 1e12, "link": limits.link, "node-link": limits.node_link, **_given_rates(options)}
    measured = measure(base, cluster.ranks_per_node, cluster.on_host) if options.measure else {}
    return rates_of(given, measured, cluster.near, cluster.on_host)


# -- what is said ---------------------------------------------------------------------------------------------------------


def _to_dict(answer: Answer, planner: Planner, rates: Rates) -> dict[str, object]:
    """What ``--json`` prints."""
    return {
        "best": [_best(one, planner) for one in answer.best],
        "out": [asdict(one) for one in answer.out],
        "rates": {name: asdict(rate) for name, rate in rates.table.items()},
        "candidates": answer.candidates,
        "planned": answer.planned,
    }


def _best(one: Fitting, planner: Planner) -> dict[str, object]:
    candidate, costs = one.candidate, one.costs
    return {
        "name": str(candidate),
        "seconds_per_step": one.seconds,
        "tokens_per_second": _tokens(one, planner),
        "peak_bytes_per_rank": {"device": round(costs.device), "host": round(costs.host), "disk": round(costs.disk)},
        "checkpoint_activations": candidate.family.recomputes,
        "offload_activations": candidate.family.moves,
        "config": planner.space.config(candidate),
    }


def _lines(answer: Answer, planner: Planner, rates: Rates) -> list[str]:
    from hf_zero.system.sizes import size_text

    lines = []
    if answer.best:
        load = f"{planner.space.global_batch} samples of {planner.sequence} tokens per step"
        lines.append(f"the best of what fits into {_limits_text(planner)}, {load}:")
    for number, one in enumerate(answer.best, 1):
        costs = one.costs
        tiers = [("device", costs.device), ("host", costs.host), ("disk", costs.disk)]
        held = ", ".join(f"{tier} {size_text(nbytes)}" for tier, nbytes in tiers if nbytes >= 1 << 20 or tier == planner.main_tier)
        lines += [
            f"{number}. {one.candidate}",
            f"   {one.seconds:.4g} s per step, {_tokens(one, planner):,.0f} tokens per second; a rank holds at most: {held}",
        ]
    if not answer.best:
        lines.append(f"NOTHING FITS into {_limits_text(planner)}")
    lines += ["", "not among them, and why:"]
    lines += [f"- {one.name}: {one.reason}" for one in answer.out]
    lines += ["", f"{answer.candidates} configurations, {answer.planned} runs of the engine without values. The seconds rest on:"]
    return [*lines, *_rate_lines(rates)]


def _tokens(one: Fitting, planner: Planner) -> float:
    """Per second, of all ranks."""
    return planner.space.global_batch * planner.sequence / one.seconds


def _limits_text(planner: Planner) -> str:
    """Return the limits in words."""
    from hf_zero.system.sizes import size_text

    limits = planner.hardware
    of_device = "node" if planner.cluster.on_host else "device"
    parts = [f"{size_text(limits.memory)} of each {of_device}"] if limits.memory is not None else []
    parts += [f"{size_text(limits.host_memory)} of each host"] if limits.host_memory is not None else []
    return " and ".join(parts)


def _rate_lines(rates: Rates) -> list[str]:
    from hf_zero.plan.rates import WHAT

    return [f"- {rate.source}: {name} {rate.value:.4g} ({WHAT[name]})" for name, rate in rates.table.items()]
