"""Cost of a rank as the world grows: set-up, host time, bookkeeping and collectives on rank 0 of pretended worlds of 8 to 4096 ranks.

    python -m benchmarks.collectives.scale --json benchmarks/results/scale.json --plot docs/scale.png
    python -m benchmarks.collectives.scale --worlds 8 64 --blocks 24 --steps 1                   # quick check
    python -m benchmarks.collectives.scale --draw benchmarks/results/scale.json --plot docs/scale.png    # the picture alone

torch's ``fake`` process group accepts every collective, sends nothing between processes, and copies locally as many bytes as a real one
would return. A step's seconds are processor time, minus the time of the same collectives when they are issued alone (``scale_worker.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import figures
from benchmarks.common.processes import RankProcesses
from benchmarks.common.tables import ResultTable

WORKER = Path(__file__).with_name("scale_worker.py")
PEER_OF = {
    "hf_zero-1": "",
    "hf_zero-2": "",
    "hf_zero-3": "fsdp2",
    "hf_zero-1-node": "",
    "hf_zero-3-node": "fsdp2-hsdp",
    "hf_zero-3-hpz": "fsdp2",
    "fsdp2": "",
    "fsdp2-hsdp": "",
}
CONTENDERS = tuple(PEER_OF)
Cases = dict[str, dict[str, Any]]  # contender, world, blocks and kind of measurement -> numbers
TEXT = """Rank 0 of a pretended world, bf16, blocks of a transformer's 12 parameters of width {width}, one micro-step, every block
gathered twice. Milliseconds of processor time of a step, the least of {steps}, **without the time of torch's `fake` back end**, for
worlds of {worlds}; **back end**: what was subtracted in the largest. **kept**: bytes of Python beyond the smallest world; **ours**: of
hf_zero. **messages**: collectives of a step. `-node`: `mics_shard_size` 8, `-hpz`: `zero_hpz_partition_size` 8, `-hsdp`: FSDP2 over
replicas x 8. FSDP2 pads parameters that have fewer rows than there are ranks."""


def key(contender: str, world: int, blocks: int, what: str) -> str:
    """Return the name of a case in the file."""
    return f"{contender} {world} {blocks} {what}"


def measure(arguments: argparse.Namespace, console: Console, known: Cases) -> Cases:
    """Measure all cases that ``known`` lacks, and add them; write the file after each, so that a run can be continued."""
    worker = RankProcesses("scale", WORKER, [], 1)
    settings = {"width": arguments.width, "steps": arguments.steps}
    try:
        for blocks in arguments.blocks:
            for world in arguments.worlds:
                for contender in arguments.only:
                    for what in arguments.what:
                        name = key(contender, world, blocks, what)
                        if name in known:
                            continue
                        case = {"contender": contender, "world": world, "blocks": blocks, "what": what, **settings}
                        known[name] = worker.ask(seconds=1800.0, **case)[0]
                        console.print(f"[dim]{name}: {_brief(known[name])}[/dim]", highlight=False)
                        if arguments.json:
                            write(known, arguments)
    finally:
        worker.stop()
    return known


def _brief(found: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in found.items() if isinstance(value, (int, float)))


def own_time(case: dict[str, Any]) -> float:
    """Return the seconds of a step without the back end's."""
    return float(case["step"]) - float(case["bare"])


def messages(case: dict[str, Any]) -> int:
    """Return the number of collectives of a step."""
    return sum(int(calls) for calls, _ in case["step"].values())


def table(cases: Cases, arguments: argparse.Namespace) -> ResultTable:
    """Return a table with a row per contender and number of blocks."""
    worlds = arguments.worlds
    first, last = worlds[0], worlds[-1]
    rows = []
    for blocks in arguments.blocks:
        for name in arguments.only:
            found = {world: cases.get(key(name, world, blocks, "times")) for world in worlds}
            if not any(found.values()):
                continue
            steps = [f"{1000 * own_time(case):.0f}" if case else "" for case in found.values()]
            back_end = f"{1000 * found[last]['bare']:.0f}" if found[last] else ""
            setups = [f"{found[world]['setup']:.2f}" if found[world] else "" for world in (first, last)]
            small, large = (cases.get(key(name, world, blocks, "counts")) for world in (first, last))
            kept = [_kib(large["held"][whose] - small["held"][whose]) if small and large else "" for whose in ("all", "hf_zero")]
            counted = str(messages(large)) if large else ""
            rows.append([f"{name}, {blocks}", *steps, back_end, _ratio(cases, name, last, blocks), *setups, *kept, counted])
    text = TEXT.format(width=arguments.width, steps=arguments.steps, worlds=", ".join(map(str, worlds)))
    columns = ("layout, blocks", *(f"ms, {world}" for world in worlds), "back end", "of its FSDP2")
    columns += (f"set-up s, {first}", f"{last}", "kept KiB", "ours KiB", "messages")
    command = "python -m benchmarks.collectives.scale --json benchmarks/results/scale.json --plot docs/scale.png"
    return ResultTable("Cost of a rank as the world grows", command, text, columns, rows, figure="scale.png" if arguments.plot else "")


def _ratio(cases: Cases, name: str, world: int, blocks: int) -> str:
    mine, peer = (cases.get(key(which, world, blocks, "times")) for which in (name, PEER_OF[name]))
    return f"{own_time(mine) / own_time(peer):.2f}" if mine and peer else ""


def _kib(nbytes: int) -> str:
    return f"{nbytes / 1024:.0f}"


def write(cases: Cases, arguments: argparse.Namespace) -> None:
    """Write the table, and all measurements beside it."""
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({**asdict(table(cases, arguments)), "cases": cases}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--blocks", type=int, nargs="+", default=[24, 96, 384])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--what", nargs="+", choices=["times", "counts"], default=["times", "counts"])
    parser.add_argument("--json", type=Path, help="keep what is measured in this file; cases that it holds are not measured again")
    parser.add_argument("--draw", type=Path, help="measure nothing; take this file")
    parser.add_argument("--plot", type=Path, help="draw the curves (needs matplotlib)")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    source = arguments.draw or arguments.json
    cases: Cases = json.loads(source.read_text())["cases"] if source and source.exists() else {}
    if not arguments.draw:
        measure(arguments, Console(stderr=True), cases)
    table(cases, arguments).print()
    if arguments.json:
        write(cases, arguments)
    if arguments.plot:
        figures.scale({**asdict(table(cases, arguments)), "cases": cases}, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
