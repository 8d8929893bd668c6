"""Pipelines on CPU ranks: time and bytes beside peers, waiting times of stages, memory of activations, and a slow link.

    python -m benchmarks.parallel.pipelines peers --peer-python /path/to/venv/bin/python --json benchmarks/results/pipelines.json
    python -m benchmarks.parallel.pipelines pairs --peer-python /path/to/venv/bin/python --json benchmarks/results/pipelines_pairs.json
    python -m benchmarks.parallel.pipelines pairs --width 512 --length 256 --rounds 3 --json benchmarks/results/pipelines_pairs_wide.json
    python -m benchmarks.parallel.pipelines bubbles --json benchmarks/results/pipelines_bubbles.json --plot docs/pipelines.png
    python -m benchmarks.parallel.pipelines memory --json benchmarks/results/pipelines_memory.json
    python -m benchmarks.parallel.pipelines link --json benchmarks/results/pipelines_link.json          # as root, see slow_network.py
    python -m benchmarks.parallel.pipelines peers --rounds 1 --steps 1                                    # quick check

Every contender keeps its processes; a round times each in turn, and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.collectives.slow_network import LINK, slow_network, why_not
from benchmarks.common.processes import REPOSITORY, RankProcesses
from benchmarks.common.tables import ResultTable
from benchmarks.parallel.pipeline_timeline import UNITS, Event, own_seconds, theory, waiting
from benchmarks.parallel.tensor_parallel import last_error

WORKER = Path(__file__).with_name("pipelines_worker.py")
RATE = "100mbit"
MTU = 9000
PORTS = itertools.count(29700)
SINGLE = ("GPipe", "1F1B")
SEVERAL = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")  # two stages on each rank
PAIRED = ("torch", "norm", "deepspeed")
SCRIPT = "script"
SIZE = {"layers": 8, "width": 256, "vocab": 512, "length": 128, "rows": 1, "parts": 8}  # default sizes of the model and a batch
MODEL = (
    "A Llama ({layers} layers, {width} wide, vocabulary {vocab}) in fp32 on {world} gloo ranks of one thread; a batch is {parts} parts of "
    "{rows} x {length} tokens, AdamW. "
)


@dataclass
class Contender:
    """One package in one setting; measurements have one entry per round."""

    title: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    beside: str = ""  # title of the contender that its row is compared with
    python: str = sys.executable
    ranks: RankProcesses | None = None
    seconds: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    sent: float = 0.0
    loss: float = 0.0
    failed: str = ""

    def start(self, world: int, size: dict[str, Any], **more: Any) -> None:
        """Build the model on all ranks; record the error of a peer that fails."""
        try:
            self.ranks = RankProcesses(self.title, WORKER, [self.kind, self.options, size], world, self.python, **more)
            self.ask(**({"forwards": 2} if self.forward_only else {"steps": 2}))
        except RuntimeError as error:
            if self.kind == "hf_zero":
                raise
            print(error, file=sys.stderr)
            self.failed = last_error(str(error))
            self.stop()

    @property
    def forward_only(self) -> bool:
        """Return whether only forwards are timed, instead of steps."""
        return bool(self.options.get("forward"))

    def ask(self, **request: Any) -> list[dict[str, Any]]:
        """Send a request to all ranks; return their answers."""
        assert self.ranks is not None
        return self.ranks.ask(**request)

    def time(self, steps: int) -> None:
        """Add the seconds of the slowest rank, and the CPU seconds of all ranks together."""
        answers = self.ask(**{"forwards" if self.forward_only else "steps": steps})
        self.seconds.append(max(answer["seconds"] for answer in answers))
        self.computed.append(sum(answer["computed"] for answer in answers))
        self.sent = max(answer["sent"] for answer in answers)
        losses = [answer["loss"] for answer in answers if answer["loss"]]
        self.loss = statistics.mean(losses) if losses else 0.0

    def trace(self) -> list[list[Event]]:
        """Return the events of one step on each rank."""
        return [[Event(*event) for event in answer["events"]] for answer in self.ask(trace=True)]

    def stop(self) -> None:
        """End the contender's processes."""
        if self.ranks is not None:
            self.ranks.stop()
            self.ranks = None


def settings(name: str) -> dict[str, Any]:
    """Return the settings of a schedule."""
    return {"schedule": name, "each": 2 if name in SEVERAL else 1}


def title_of(name: str) -> str:
    """Return the title of one of hf_zero's schedules."""
    return "hf_zero, Trainer's forward and backward" if name == SCRIPT else f"hf_zero, {name}"


def size_of(arguments: argparse.Namespace, **changes: int) -> dict[str, Any]:
    """Return the sizes of model and batch for the ranks."""
    return {name: getattr(arguments, name) for name in SIZE} | changes


def in_rounds(found: list[Contender], world: int, size: dict[str, Any], arguments: argparse.Namespace, **more: Any) -> None:
    """Time the contenders in rotating order."""
    try:
        for one in found:
            print(f"building {one.title}", file=sys.stderr)
            one.start(world, size, **({**more, "MASTER_PORT": next(PORTS)} if more else {}))
        running = [one for one in found if not one.failed]
        for index in range(arguments.rounds):
            shift = index % len(running)
            for one in running[shift:] + running[:shift]:
                one.time(arguments.steps)
    finally:
        for one in found:
            one.stop()


def ratio(mine: list[float], other: list[float]) -> str:
    """Return the median of the ratios over rounds, and its range, as text."""
    ratios = [left / right for left, right in zip(mine, other, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


# ------------------------------------------------------------------------------------------------ peers


def with_peers(arguments: argparse.Namespace) -> ResultTable:
    """Measure hf_zero against the same schedule by hand, and against DeepSpeed's and transformers' pipelines."""
    found: list[Contender] = []
    for name in (*SINGLE, *SEVERAL):
        found += [Contender(title_of(name), "hf_zero", settings(name))]
        found += [Contender(f"torch by hand, {name}", "torch", settings(name), title_of(name))]
    found.append(Contender(title_of(SCRIPT), "hf_zero", settings(SCRIPT)))
    if arguments.peer_python:
        found.append(Contender("DeepSpeed PipelineModule, 1F1B", "deepspeed", {}, title_of("1F1B"), arguments.peer_python))
    found.append(Contender("hf_zero, forward alone", "hf_zero", {**settings(SCRIPT), "forward": True}))
    found.append(Contender("transformers pp_size, forward alone", "transformers", {"forward": True}, "hf_zero, forward alone"))
    found = [one for one in found if not arguments.only or any(word in one.title for word in arguments.only)]
    size = size_of(arguments)
    in_rounds(found, 2, size, arguments)
    by_title = {one.title: one for one in found}
    rows = []
    for one in found:
        if one.failed:
            rows.append([one.title, "does not run", one.failed, "", "", "", ""])
            continue
        other = by_title.get(one.beside)
        beside = [ratio(one.seconds, other.seconds), ratio(one.computed, other.computed)] if other else ["", ""]
        times = [f"{statistics.median(found):.3f}" for found in (one.seconds, one.computed)]
        sent, loss = f"{one.sent / 2**20:.2f}", f"{one.loss:.6f}" if one.loss else ""
        rows.append([one.title, times[0], beside[0], times[1], beside[1], sent, loss])
    text = MODEL.format(**size, world=2) + (
        f"By hand: two modules written for Llama, torch's `PipelineStage` and schedule, fused AdamW. Medians of {arguments.rounds} "
        f"interleaved rounds of {arguments.steps} steps; ratios are to hf_zero with the same schedule (lowest to highest), above 1 is "
        "slower. *On the CPU*: seconds of both ranks together, without their waiting. Sent: by the busier rank in a step. transformers' "
        "`pp_size` has no backward."
    )
    command = "python -m benchmarks.parallel.pipelines peers" + _changed(size) + (" --peer-python PYTHON" if arguments.peer_python else "")
    columns = ["", "s", "ratio to hf_zero", "s on the CPU", "ratio to hf_zero", "MiB sent", "loss"]
    return ResultTable("Pipelines", command, text, columns, rows)


def _changed(size: dict[str, Any]) -> str:
    """Return the options of a command for a size that differs from the default."""
    return "".join(f" --{name} {value}" for name, value in size.items() if value != SIZE[name])


# ------------------------------------------------------------------------------------------------ pairs


def pairs(arguments: argparse.Namespace) -> ResultTable:
    """Time steps of hf_zero, of torch's schedules by hand and of DeepSpeed in turn, in the same processes, with the same memory layout."""
    size, rows = size_of(arguments), []
    for name in (*SINGLE, *SEVERAL):
        if arguments.only and name not in arguments.only:
            continue
        print(f"building {name}", file=sys.stderr)
        options, python, variables = settings(name), sys.executable, {}
        if arguments.peer_python and name == "1F1B":  # DeepSpeed's only schedule, in its venv, which can import hf_zero
            options, python, variables = options | {"deepspeed": True}, arguments.peer_python, {"PYTHONPATH": REPOSITORY}
        ranks = RankProcesses(name, WORKER, ["pair", options, size], 2, python, **variables)
        try:
            found = ranks.ask(pairs=arguments.rounds * arguments.steps)[0]
        finally:
            ranks.stop()
        medians = [f"{statistics.median(found[kind]):.3f}" for kind in ("hf_zero", "torch", "norm")]
        rows.append([name, *medians, *(ratio(found[kind], found["hf_zero"]) if kind in found else "" for kind in PAIRED)])
    text = MODEL.format(**size, world=2) + (
        f"{arguments.rounds * arguments.steps} steps of each in turn, all models in the same two processes. By hand as in the table of "
        "pipelines; *with norm*: also the norm of all gradients, which hf_zero always computes; DeepSpeed: its `PipelineModule`, without "
        "a norm. Ratios are relative to hf_zero in the same turn (lowest to highest), above 1 is slower than hf_zero."
    )
    columns = ["", "s, hf_zero", "s, by hand", "s, with norm", "ratio, by hand", "ratio, with norm", "ratio, DeepSpeed"]
    title = f"Pipelines step by step, {size['width']} wide"
    command = f"python -m benchmarks.parallel.pipelines pairs{_changed(size)}" + (" --peer-python PYTHON" if arguments.peer_python else "")
    return ResultTable(title, command, text, columns, rows)


# ------------------------------------------------------------------------------------------------ bubbles


def bubbles(arguments: argparse.Namespace) -> ResultTable:
    """Measure how long stages wait in every schedule, by a trace."""
    size, rows, shown = size_of(arguments), [], {}
    for name in (SCRIPT, *SINGLE, *SEVERAL):
        one = Contender(title_of(name), "hf_zero", settings(name))
        print(f"building {one.title}", file=sys.stderr)
        try:
            one.start(2, size)
            traces = [one.trace() for _ in range(arguments.rounds)]
        finally:
            one.stop()
        each = settings(name)["each"]
        measured = sorted(traces, key=waiting)
        middle = shown[one.title] = measured[len(measured) // 2]
        shares = [
            f"{100 * share:.1f} %" for share in (_formula(name, each, size["parts"]), theory(middle, lambda event: UNITS[event.kind]))
        ]
        own = statistics.median(theory(trace, own_seconds(trace)) for trace in traces)
        seconds = statistics.median(_span(trace) for trace in traces)
        rows.append([one.title, str(each), *shares, f"{100 * own:.1f} %", f"{100 * waiting(middle):.1f} %", f"{seconds:.3f}"])
    if arguments.plot:
        draw(shown, arguments.plot)
    text = MODEL.format(**size, world=2) + (
        f"Share of a step in which a rank computes no part, mean of the ranks, median of {arguments.rounds} steps. *Formula*: (ranks - "
        "1) / (parts x stages a rank + ranks - 1), for schedules that do not divide the backward. *Theory*: the recorded order, if a "
        "backward took twice a forward's time and messages none. *With its parts' times*: the same with the median time of each stage's "
        "parts."
    )
    columns = ["", "stages a rank", "formula", "theory", "with its parts' times", "measured", "s, forward and backward"]
    figure = arguments.plot.name if arguments.plot else ""
    return ResultTable(
        "Time that stages of a pipeline wait",
        "python -m benchmarks.parallel.pipelines bubbles --plot docs/pipelines.png",
        text,
        columns,
        rows,
        figure,
    )


def _formula(name: str, each: int, parts: int, ranks: int = 2) -> float:
    return 0.0 if name == "ZBVZeroBubble" else (ranks - 1) / (parts * each + ranks - 1)


def _span(trace: list[list[Event]]) -> float:
    return max(event.end for rank in trace for event in rank) - min(event.begin for rank in trace for event in rank)


def draw(shown: dict[str, list[list[Event]]], path: Path) -> None:
    """Draw one timeline per schedule, with one row per rank."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    colours = {"forward": "tab:blue", "backward": "tab:orange", "input": "gold", "weight": "tab:green"}
    figure, axes = pyplot.subplots(len(shown), 1, figsize=(10, 1.1 * len(shown) + 0.6), sharex=True)
    for axis, (title, ranks) in zip(axes, shown.items(), strict=True):
        start = min(event.begin for rank in ranks for event in rank)
        for place, events in enumerate(ranks):
            for event in events:
                later = event.stage >= len(ranks)  # the second stage of a rank has a paler colour
                bar = axis.barh(place, event.end - event.begin, left=event.begin - start, color=colours[event.kind], height=0.85)
                bar[0].set(edgecolor="white", linewidth=0.4, alpha=0.6 if later else 1.0)
                axis.text((event.begin + event.end) / 2 - start, place, event.part, ha="center", va="center", fontsize=6)
        axis.set(yticks=range(len(ranks)), yticklabels=[f"rank {place}" for place in range(len(ranks))], ylim=(len(ranks) - 0.5, -0.5))
        axis.set_title(f"{title}: {100 * waiting(ranks):.0f} % waiting", fontsize=9, loc="left", pad=2)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("seconds")
    meanings = {"input": "backward to inputs", "weight": "backward to weights"}
    handles = [Patch(color=colour, label=meanings.get(kind, kind)) for kind, colour in colours.items()]
    handles.append(Patch(color="lightgray", label="paler: the second stage of a rank"))
    legend = {"loc": "upper center", "ncol": len(handles), "fontsize": 8, "frameon": False}
    figure.legend(handles=handles, title="the number is that of the part of the batch", title_fontsize=8, **legend)
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


# ------------------------------------------------------------------------------------------------ memory


def memory(arguments: argparse.Namespace) -> ResultTable:
    """Measure the bytes that forward and backward add at their peak, by the number of parts."""
    rows = []
    for world in arguments.ranks:
        peaks = {name: _peaks(name, world, arguments) for name in (*SINGLE, SCRIPT)}
        for parts, ours, all_kept, script in zip(arguments.counts, *(peaks[name] for name in ("1F1B", "GPipe", SCRIPT)), strict=True):
            most = [f"{max(found):.1f}" for found in (ours, all_kept, script)]
            by_rank = [", ".join(f"{peak:.1f}" for peak in found) for found in (ours, all_kept, script)]
            rows.append([f"{world} stages, {parts} parts", *most, f"{max(ours) / max(all_kept):.2f}", *by_rank])
    size = size_of(arguments)
    text = MODEL.format(**{**size, "parts": "2 and more"}, world=" or ".join(map(str, arguments.ranks))) + (
        "MiB of tensors (activations, messages, gradients) that a step adds at its peak on the rank that has most. *Trainer's*: the "
        "parts are one micro-batch of a script, which calls forward and backward itself."
    )
    columns = ["", "1F1B", "GPipe", "Trainer's", "1F1B to GPipe", "1F1B, by rank", "GPipe, by rank", "Trainer's, by rank"]
    return ResultTable("Memory of activations in a pipeline", "python -m benchmarks.parallel.pipelines memory", text, columns, rows)


def _peaks(name: str, world: int, arguments: argparse.Namespace) -> list[list[float]]:
    """Return for each number of parts the MiB of each rank; each number has its own script run, whose configuration divides the batch."""
    found = []
    for counts in [[parts] for parts in arguments.counts] if name == SCRIPT else [arguments.counts]:
        one = Contender(title_of(name), "hf_zero", settings(name))
        try:
            one.start(world, size_of(arguments, parts=counts[0]))
            found += [[answer["peak"] / 2**20 for answer in one.ask(peak=True, parts=parts)] for parts in counts]
        finally:
            one.stop()
    return found


# ------------------------------------------------------------------------------------------------ link


def over_link(arguments: argparse.Namespace) -> ResultTable:
    """Measure two ranks, each behind its own slow link: a pipeline beside layouts that send gradients or parameters."""
    if why_not():
        raise SystemExit(f"cannot measure here: {why_not()}")
    found = [
        Contender("hf_zero, 2 stages, 1F1B", "hf_zero", settings("1F1B")),
        Contender("hf_zero, 2 stages, Trainer's", "hf_zero", settings(SCRIPT)),
        Contender("torch by hand, 2 stages, 1F1B", "torch", settings("1F1B")),
        Contender("DDP", "ddp"),
        Contender("hf_zero, stage 1, no_sync", "hf_zero", {"zero": 1, "defers": True}),
        Contender("hf_zero, stage 1", "hf_zero", {"zero": 1}),
        Contender("hf_zero, stage 3", "hf_zero", {"zero": 3}),
    ]
    if arguments.peer_python:
        found.insert(3, Contender("DeepSpeed PipelineModule, 2 stages, 1F1B", "deepspeed", {}, python=arguments.peer_python))
    size = size_of(arguments)
    with ExitStack() as stack:
        network = stack.enter_context(slow_network(2, mtu=MTU))
        network.limit(RATE)
        place: Callable[[int, list[str]], list[str]] = network.command
        in_rounds(found, 2, size, arguments, place=place, MASTER_ADDR=network.address(0), GLOO_SOCKET_IFNAME=LINK)
    first, rows = found[0], []
    for one in found:
        if one.failed:
            rows.append([one.title, "does not run", one.failed, "", ""])
            continue
        beside = "" if one is first else ratio(one.seconds, first.seconds)
        rows.append([one.title, f"{statistics.median(one.seconds):.3f}", beside, f"{one.sent / 1e6:.2f}", f"{one.loss:.6f}"])
    text = MODEL.format(**size, world=2) + (
        f"Each rank in a network namespace behind a link of {RATE} (`tc tbf` both ways). DDP and ZeRO give "
        "each rank half of the parts. DDP and *no_sync* (`with engine.no_sync()` around all parts but the last) exchange gradients once "
        f"a step, stage 1 by itself once a part, stage 3 parameters too. Medians of {arguments.rounds} interleaved rounds of "
        f"{arguments.steps} step(s); ratios are to the first line, above 1 is slower. MB: sent in a step by the busier rank, counted by "
        "its interface."
    )
    columns = ["", "s per step", "ratio (lowest-highest)", "MB sent", "loss"]
    command = "python -m benchmarks.parallel.pipelines link" + (" --peer-python PYTHON" if arguments.peer_python else "") + "   # as root"
    return ResultTable("A pipeline over a slow link", command, text, columns, rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("peers", "pairs", "bubbles", "memory", "link"))
    parser.add_argument("--rounds", type=int, help="7; of link 3")
    parser.add_argument("--steps", type=int, help="in a round: 2; of link 1, where one of stage 3 takes a dozen seconds")
    for name, default in SIZE.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="of memory")
    parser.add_argument("--counts", type=int, nargs="+", default=[2, 4, 8, 16], help="parts, of memory")
    parser.add_argument(
        "--only", nargs="+", metavar="WORD", help="of peers: contenders whose title has one of these words; of pairs: schedules"
    )
    parser.add_argument("--peer-python", help="Python of a venv with DeepSpeed and transformers")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="of bubbles: draw the timelines (needs matplotlib)")
    arguments = parser.parse_args()
    rounds, steps = (3, 1) if arguments.what == "link" else (7, 2)
    arguments.rounds, arguments.steps = arguments.rounds or rounds, arguments.steps or steps
    return arguments


def main() -> int:
    """Measure and print."""
    arguments = parse()
    result = {"peers": with_peers, "pairs": pairs, "bubbles": bubbles, "memory": memory, "link": over_link}[arguments.what](arguments)
    result.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
