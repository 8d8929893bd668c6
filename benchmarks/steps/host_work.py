"""Host work of a step: hf_zero's stages and FSDP2 on blocks so small that the device work is negligible, in a pretended world of 8 ranks.

    python -m benchmarks.steps.host_work                                    # 24, 96 and 384 blocks, bf16
    python -m benchmarks.steps.host_work --dtype fp32 --clip 1.0
    python -m benchmarks.steps.host_work --json benchmarks/results/host_work.json
    python -m benchmarks.steps.host_work --blocks 6 12 --rounds 1 --steps 1 --warmup 1     # quick check

On a GPU the host only launches work; if it needs longer than the device, the device waits. Each contender is one process, one rank of
torch's ``fake`` process group, which sends nothing. Every round measures each of them in turn, in seconds of processor time, so that
other programs of the machine have little effect; ratios are medians of the rounds' ratios. ``bare`` is the model, its backward and the
optimizer without ZeRO: the lower bound.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.common.processes import RankProcesses
from benchmarks.common.tables import ResultTable

WORKER = Path(__file__).with_name("host_work_worker.py")
BARE = "bare"
PEERS = ("fsdp2", "fsdp2-reshard")
CONTENDERS = (BARE, "hf_zero-0", "hf_zero-1", "hf_zero-2", "hf_zero-3", "fsdp2", "hf_zero-3-reshard", "fsdp2-reshard")
TARGET = 0.35  # target: added time relative to FSDP2's
TEXT = """Milliseconds of processor time per step of one rank in a pretended world of {world}: torch's `fake` process group moves nothing.
Blocks of a transformer's 12 parameters of width {width}, {tokens} tokens, {dtype}{masters}, `torch.optim.AdamW(fused=True)`, {clipping},
one thread; medians of {rounds} interleaved rounds of {steps} steps. **bare**: the same model on one rank, {bare}. **above bare**: what a
contender adds. **of FSDP2**: relative to `fully_shard` per block (`-reshard`: resharding after forward); target at most {target}.
**growth**: time per block at the most blocks relative to the fewest."""


def measure(blocks: int, arguments: argparse.Namespace, console: Console) -> dict[str, list[float]]:
    """Return the seconds per step of every contender for one size, one entry per round."""
    settings = {key: getattr(arguments, key) for key in ("width", "tokens", "world", "dtype", "clip")} | {"blocks": blocks}
    contenders: list[RankProcesses] = []
    try:
        for name in arguments.only:
            console.print(f"[dim]building {name}, {blocks} blocks[/dim]", highlight=False)
            contenders.append(RankProcesses(name, WORKER, [name, settings], 1))
        for contender in contenders:
            contender.ask(steps=arguments.warmup)
        seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for index in range(arguments.rounds):
            shift = index % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                seconds[contender.name].append(contender.ask(steps=arguments.steps)[0]["seconds"])
            shown = "  ".join(f"{name} {1000 * times[-1]:.1f}" for name, times in seconds.items())
            console.print(f"[dim]round {index + 1}/{arguments.rounds}: {shown}[/dim]", highlight=False)
    finally:
        for contender in contenders:
            contender.stop()
    return seconds


def table(times: dict[int, dict[str, list[float]]], arguments: argparse.Namespace) -> ResultTable:
    """Return a table with a row per contender."""
    fewest, most = min(times), max(times)
    bare = statistics.median(times[most][BARE]) if BARE in times[most] else math.nan
    rows = []
    for name in arguments.only:
        medians = {blocks: statistics.median(seconds[name]) for blocks, seconds in times.items()}
        growth = medians[most] / most / (medians[fewest] / fewest)
        above = "" if name == BARE else f"{1000 * (medians[most] - bare):.1f}"
        ratios = (_ratio(name, times[most], above_bare) for above_bare in (False, True))
        rows.append([name, *(f"{1000 * medians[blocks]:.1f}" for blocks in times), above, *ratios, f"{growth:.2f}"])
    bf16 = arguments.dtype == "bf16"
    settings = {key: getattr(arguments, key) for key in ("world", "width", "tokens", "dtype", "rounds", "steps")}
    text = TEXT.format(
        **settings,
        masters=" with fp32 masters" if bf16 else "",
        clipping=f"gradients clipped to {arguments.clip:g}" if arguments.clip else "no clipping (hf_zero takes the norm nevertheless)",
        bare="all in bf16" if bf16 else "nothing sharded",
        target=TARGET,
    )
    command = " ".join(["python", "benchmarks/steps/host_work.py", *(word for word in sys.argv[1:] if word)])
    sizes = [f"{blocks} blocks" for blocks in times]
    columns = ("contender", *sizes, "above bare", "of FSDP2", f"above bare, of FSDP2 (<= {TARGET})", "growth")
    return ResultTable(f"Host work of a step, {arguments.dtype}", command, text, columns, rows)


def _ratio(name: str, seconds: dict[str, list[float]], above_bare: bool) -> str:
    """Return the median over rounds of a contender's time relative to the peer that gathers as often, with smallest and largest."""
    peer = PEERS[name.endswith("-reshard")]
    if peer not in seconds or not name.startswith("hf_zero") or (above_bare and BARE not in seconds):
        return ""
    floors = seconds[BARE] if above_bare else [0.0] * len(seconds[name])
    ratios = [(mine - floor) / (theirs - floor) for mine, theirs, floor in zip(seconds[name], seconds[peer], floors, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[24, 96, 384])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--world", type=int, default=8, help="ranks of the pretended world")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradients; 0 is off")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps per contender and round")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the first round")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path, help="keep the table in this file, which python -m tools.render reads")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    console = Console(stderr=True)
    result = table({blocks: measure(blocks, arguments, console) for blocks in arguments.blocks}, arguments)
    result.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
