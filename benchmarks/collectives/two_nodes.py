"""Training on two nodes of two ranks each, joined by a slow link: the time of a step and the bytes a node sends, for every ZeRO layout.

python -m benchmarks.collectives.two_nodes --peer-python /path/to/venv/bin/python \
    --json benchmarks/results/two_nodes.json --plot docs/two-nodes.png

Needs root (network namespaces, see slow_network.py). Contenders that are compared directly live at the same time and take turns; stage 3
over all ranks lives through the whole run and takes part in every round. Bytes are counted by a node's network interface.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import signal
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.collectives.slow_network import LINK, Namespaces, slow_network, why_not
from benchmarks.common import figures
from benchmarks.common.processes import RankProcesses
from benchmarks.common.tables import ResultTable

WORKER = Path(__file__).with_name("two_nodes_worker.py")
NODES, PER_NODE = 2, 2
SIZE = {"layers": 4, "width": 256, "heads": 4, "vocab": 2048, "length": 4, "batch": 1}
RATES = {"1gbit": 4, "100mbit": 2}  # link -> steps of a contender per round
WARM_UP = 2
MTU = 9000  # usual in clusters; at 1500 the headers alone are 4.5 % of the bytes sent
PORTS = itertools.count(29800)

_FULL = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
}  # like a model that is too large to stay gathered
_HPZ, _NODE = _FULL | {"zero_hpz_partition_size": PER_NODE}, {"mics_shard_size": PER_NODE}
_W, _G = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
_INSIDE = {"hf_zero": {"param_shard_size": PER_NODE}}
_DDP, _DDP16, _FSDP2, _HSDP = "DDP", "DDP, bf16 gradients", "FSDP2", "FSDP2, HSDP"


@dataclass(frozen=True)
class Layout:
    """One contender: a layout of ZeRO, or a peer.

    Attributes:
        label: Name in the table.
        kind: Kind of step that ``two_nodes_worker.py`` builds.
        zero: The ``zero_optimization`` section.
        peers: Labels of contenders of other libraries that keep and send the same; this one should not be slower than the fastest of them.
        more: Further sections and keys of the configuration.
    """

    label: str
    kind: str = "hf_zero"
    zero: dict[str, Any] = field(default_factory=dict)
    peers: tuple[str, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> str:
        """Return the part of the configuration that is specific to this layout, as JSON."""
        return json.dumps({"zero_optimization": self.zero, **self.more})


BASE = Layout("stage 3", zero=_FULL, peers=(_FSDP2, "DeepSpeed, stage 3"))
FAMILIES: dict[str, list[Layout]] = {
    "flat": [
        Layout("stage 3, qwZ", zero=_FULL | _W),
        Layout("stage 3, qgZ", zero=_FULL | _G),
        Layout("stage 3, qwZ, qgZ", zero=_FULL | _W | _G),
        Layout(_FSDP2, "fsdp2"),
        Layout("DeepSpeed, stage 3", "deepspeed", _FULL),
    ],
    "hpz": [
        Layout("hpZ", zero=_HPZ, peers=("DeepSpeed, hpZ",)),
        Layout("hpZ, qwZ", zero=_HPZ | _W),
        Layout("hpZ, qgZ", zero=_HPZ | _G),
        Layout("hpZ, qwZ, qgZ", zero=_HPZ | _W | _G),
        Layout("parameters in the node", zero=_FULL, more=_INSIDE),
        Layout("parameters in the node, qwZ, qgZ", zero=_FULL | _W | _G, more=_INSIDE),
        Layout("DeepSpeed, hpZ", "deepspeed", _HPZ),
        Layout("DeepSpeed, hpZ, qwZ, qgZ", "deepspeed", _HPZ | _W | _G),
    ],
    "groups": [
        Layout("HSDP (MiCS)", zero=_FULL | _NODE, peers=(_HSDP, "DeepSpeed, MiCS")),
        Layout("HSDP (MiCS), qwZ", zero=_FULL | _NODE | _W),
        Layout("HSDP (MiCS), qwZ, qgZ", zero=_FULL | _NODE | _W | _G),
        Layout("stage 1 over a node", zero={"stage": 1, **_NODE}, peers=(_HSDP, _DDP16)),
        Layout(_HSDP, "fsdp2-nodes"),
        Layout("DeepSpeed, MiCS", "deepspeed", _FULL | _NODE),
    ],
    "stage 1": [
        Layout("stage 1", zero={"stage": 1}, peers=(_DDP16, "DeepSpeed, stage 1")),
        Layout("stage 1, qgZ", zero={"stage": 1, **_G}),
        Layout("stage 0", zero={"stage": 0}, peers=(_DDP,)),
        Layout("stage 0, bf16 gradients", zero={"stage": 0}, peers=(_DDP16,), more={"communication_data_type": "bf16"}),
        Layout(_DDP, "ddp"),
        Layout(_DDP16, "ddp-bf16"),
        Layout("DeepSpeed, stage 1", "deepspeed", {"stage": 1, "overlap_comm": True}),
    ],
}
LAYOUTS = {layout.label: layout for layout in itertools.chain([BASE], *FAMILIES.values())}


@dataclass
class Measured:
    """Measurements of a layout: by rate, one entry per round. A layout that does not run has no entries, and a reason."""

    label: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    nbytes: dict[str, list[float]] = field(default_factory=dict)
    beside: dict[str, list[float]] = field(default_factory=dict)  # seconds of stage 3 in the same rounds
    failed: str = ""

    @property
    def layout(self) -> Layout:
        """Return the layout that was measured."""
        return LAYOUTS[self.label]

    def median(self, rate: str) -> float:
        """Return the median seconds per step at a rate."""
        return statistics.median(self.seconds[rate])

    def speed_up(self, rate: str) -> float:
        """Return the median over rounds of stage 3's time divided by this layout's."""
        return statistics.median(left / right for left, right in zip(self.beside[rate], self.seconds[rate], strict=True))

    def copies(self, rate: str) -> float:
        """Return the bytes that a node sends per step, in units of the model's 2 bytes per parameter."""
        return statistics.median(self.nbytes[rate]) / 2 / parameters()


def parameters() -> int:
    """Return the number of parameters of ``two_nodes_worker.Model``, whose head is its embedding."""
    width = SIZE["width"]
    return (SIZE["vocab"] + SIZE["length"]) * width + SIZE["layers"] * (12 * width + 13) * width + 2 * width


@dataclass
class Contender:
    """The four rank processes of a layout."""

    found: Measured
    ranks: RankProcesses

    def run(self, steps: int) -> tuple[float, float]:
        """Run ``steps`` steps; return the seconds of the slowest rank and the bytes of the busiest node, per step."""
        answers = self.ranks.ask(steps=steps)
        return max(answer["seconds"] for answer in answers), max(answer["bytes"] for answer in answers)

    def turn(self, rate: str, base: Measured | None) -> None:
        """Run one round at one rate; ``base`` has just run its own."""
        seconds, nbytes = self.run(RATES[rate])
        self.found.seconds.setdefault(rate, []).append(seconds)
        self.found.nbytes.setdefault(rate, []).append(nbytes)
        self.found.beside.setdefault(rate, []).append(base.seconds[rate][-1] if base else seconds)


# ------------------------------------------------------------------------------------------------ running


def start(layout: Layout, network: Namespaces, peer_python: str | None) -> Contender:
    """Start the ranks of a layout, and wait until they are ready.

    Raises:
        RuntimeError: The layout does not run; the message ends with the last lines that its ranks printed.
    """
    python = peer_python if layout.kind == "deepspeed" and peer_python else sys.executable
    ranks = RankProcesses(
        layout.label,
        WORKER,
        [layout.kind, layout.config, json.dumps(SIZE)],
        NODES * PER_NODE,
        python,
        lambda rank, words: network.command(rank // PER_NODE, words),
        LOCAL_WORLD_SIZE=PER_NODE,
        LOCAL_SIZE=PER_NODE,  # the variable from which DeepSpeed reads the number of ranks of a node
        MASTER_ADDR=network.address(0),
        MASTER_PORT=next(PORTS),
        GLOO_SOCKET_IFNAME=LINK,
    )
    return Contender(Measured(layout.label), ranks)


@contextlib.contextmanager
def started(layouts: list[Layout], network: Namespaces, peer_python: str | None, failed: list[Measured]) -> Iterator[list[Contender]]:
    """Yield the contenders that run, warmed up; add the others to ``failed``."""
    with contextlib.ExitStack() as stack:
        running = []
        for layout in layouts:
            try:
                contender = start(layout, network, peer_python)
                stack.callback(contender.ranks.stop)
                contender.run(WARM_UP)
            except RuntimeError as error:
                failed.append(Measured(layout.label, failed=why(str(error))))
                print(f"{layout.label} does not run: {error}", file=sys.stderr, flush=True)
                continue
            running.append(contender)
        yield running


def why(text: str) -> str:
    """Return the line of a traceback that names the error."""
    lines = [re.sub(r"^\[?rank\d+\]: ?", "", line).strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.partition(":")[0].endswith("Error")]
    return (errors or lines)[-1][:160]


def measure(families: list[str], rates: list[str], rounds: int, peer_python: str | None) -> list[Measured]:
    """Measure every contender of the families; those that do not run are in the result, too."""
    found: list[Measured] = []
    with slow_network(NODES, mtu=MTU) as network:
        network.limit("1gbit")
        with started([BASE], network, peer_python, found) as bases:
            if not bases:
                raise RuntimeError(found[0].failed)
            for family in families:
                layouts = [layout for layout in FAMILIES[family] if layout.kind != "deepspeed" or peer_python]
                network.limit("1gbit")
                with started(layouts, network, peer_python, found) as others:
                    for rate in rates:
                        network.limit(rate)
                        take_turns(bases[0], others, rate, rounds)
                    found += [contender.found for contender in others]
            return [bases[0].found, *found]


def take_turns(base: Contender, others: list[Contender], rate: str, rounds: int) -> None:
    """Run rounds at one rate, in rotating order."""
    for index in range(rounds):
        base.turn(rate, None)
        shift = index % max(1, len(others))
        for contender in others[shift:] + others[:shift]:
            contender.turn(rate, base.found)
        shown = "  ".join(f"{c.found.label} {c.found.seconds[rate][-1]:.3f}" for c in [base, *others])
        print(f"{rate} round {index + 1}/{rounds}: {shown}", flush=True)


def merged(path: Path | None, fresh: list[Measured]) -> list[Measured]:
    """Return ``fresh`` merged with the file's measurements of other contenders, in the order of the table; write all to the file."""
    known = {entry["label"]: Measured(**entry) for entry in json.loads(path.read_text())} if path and path.exists() else {}
    known |= {entry.label: entry for entry in fresh}
    found = [known[label] for label in LAYOUTS if label in known]
    if path:
        path.write_text(json.dumps([vars(entry) for entry in found]))
    return found


# ------------------------------------------------------------------------------------------------ results


def peer_of(entry: Measured, known: dict[str, Measured], rate: str) -> Measured | None:
    """Return the fastest of a contender's peers at a rate; None without one."""
    there = [known[label] for label in entry.layout.peers if label in known]
    return min(there, key=lambda peer: peer.median(rate), default=None)


def columns(rates: list[str]) -> list[str]:
    """Return the headings of the table."""
    by_rate = [f"{what}, {rate}" for what in ("s/step", "to stage 3", "to the peer") for rate in rates]
    return ["contender", *by_rate, "MB a node sends a step", "copies of the model"]


def row_of(entry: Measured, rates: list[str], known: dict[str, Measured]) -> list[str]:
    """Return one line of the table."""
    return [
        entry.label,
        *(f"{entry.median(rate):.3f}" for rate in rates),
        *(f"{entry.speed_up(rate):.2f} x as fast" for rate in rates),
        *(beside_peer(entry, rate, known) for rate in rates),
        f"{statistics.median(entry.nbytes[rates[-1]]) / 1e6:.2f}",
        f"{entry.copies(rates[-1]):.3f}",
    ]


def beside_peer(entry: Measured, rate: str, known: dict[str, Measured]) -> str:
    """Return the contender's speed relative to its fastest peer, as text."""
    peer = peer_of(entry, known, rate)
    return f"{peer.median(rate) / entry.median(rate):.2f} x as fast ({peer.label})" if peer else ""


def text_of(rounds: int, failed: list[Measured]) -> str:
    """Return the text above the table."""
    size = f"{parameters() / 1e6:.1f} M parameters, bf16, batch {SIZE['batch']} x {SIZE['length']} tokens a rank"
    text = (
        f"A decoder ({size}) on {NODES} nodes of {PER_NODE} ranks: network namespaces, each behind a link of the given speed (`tc tbf` "
        f"both ways). Stage 3 and FSDP2 reshard after forward. {rounds} rounds; a step is as long as the slowest rank's. *To stage 3*: "
        "stage 3's time relative to the contender's; *to the peer*: the same with the fastest other library that keeps and sends the "
        "same. Bytes: counted by the interface of the busier node; the last column is in units of 2 bytes a parameter. All ranks share "
        "the CPUs of one machine, which matters at 1gbit."
    )
    if failed:
        text += " Not run: " + "; ".join(f"{entry.label} (`{entry.failed}`)" for entry in failed) + "."
    return text


def targets(known: dict[str, Measured], rates: list[str]) -> list[str]:
    """Return a sentence for each target of these layouts that is missed."""
    missed = []
    groups, fast = known.get("HSDP (MiCS)"), known.get("hpZ, qwZ, qgZ")
    for rate in rates:
        if groups and groups.copies(rate) > 1.02:
            missed.append(f"HSDP sends {groups.copies(rate):.3f} x what its all-reduce has to at {rate}")
        if fast and rate == "100mbit" and fast.speed_up(rate) < 3:
            missed.append(f"hpZ with qwZ and qgZ is {fast.speed_up(rate):.2f} x as fast as stage 3, not 3 x")
        for entry in known.values():
            peer = peer_of(entry, known, rate)
            if peer and peer.median(rate) < entry.median(rate):
                missed.append(f"{entry.label} is slower than {peer.label} at {rate}")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", choices=list(FAMILIES), default=list(FAMILIES), help="none: draw what --raw holds")
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-python", help="Python of a venv with deepspeed: adds its rows")
    parser.add_argument("--raw", type=Path, help="keep single measurements here, and add to those that are there")
    parser.add_argument("--json", type=Path, help="write the result table")
    parser.add_argument("--plot", type=Path, help="draw it (needs matplotlib)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed
    if why_not():
        print(f"cannot measure here: {why_not()}", file=sys.stderr)
        return 1
    fresh = measure(arguments.families, arguments.rates, arguments.rounds, arguments.peer_python) if arguments.families else []
    everything = merged(arguments.raw, fresh)
    found, failed = [one for one in everything if not one.failed], [one for one in everything if one.failed]
    known = {entry.label: entry for entry in found}
    rows = [row_of(entry, arguments.rates, known) for entry in found]
    command = "python -m benchmarks.collectives.two_nodes --peer-python /path/to/venv/bin/python"
    command += " --json benchmarks/results/two_nodes.json --plot docs/two-nodes.png   # as root"
    figure = arguments.plot.name if arguments.plot else ""
    table = ResultTable(
        "Two nodes and a slow link",
        command,
        text_of(len(found[0].seconds[arguments.rates[0]]), failed),
        columns(arguments.rates),
        rows,
        figure,
    )
    table.publish(arguments.json)
    if arguments.plot:
        figures.two_nodes(asdict(table), arguments.plot)
    missed = targets(known, arguments.rates)
    for line in missed:
        print(f"target missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
