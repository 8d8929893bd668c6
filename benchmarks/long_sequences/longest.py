"""The longest sequence that fits 8 GiB, by plans: for each model and number of ranks what each way to save memory is worth.

    python -m benchmarks.long_sequences.longest                    # goes on where it was; writes results/longest.json and the page
    python -m benchmarks.long_sequences.longest --models 1.1b --ranks 2 --ways "stage 3" --memory 2GiB --json /tmp/try.json

A plan runs the engine itself on tensors without values (docs/plan.md). Models of two sizes in a row are planned, and what a block adds is
added for the others ([Note: few blocks]); memory grows in lines over tokens, so each next length is where the line through the last two
meets the limit. The whole model is planned with the length that is printed, which fits; a 16th more does not. Nothing is timed.

FSDP2 runs in the same way (``fsdp2.py``). DeepSpeed cannot be planned: its row is by a formula, in its favour: what the
same ways take here, beside the bucket in which it copies gradients before it reduces them: 5 * 10^8 elements (``reduce_bucket_size``, its
default) of 2 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.common.tables import ResultTable
from benchmarks.long_sequences import fsdp2
from hf_zero.plan.command import settled
from hf_zero.plan.inputs import Cluster, Load, ModelWish
from hf_zero.plan.models import build_model
from hf_zero.plan.workers import Task
from hf_zero.system.sizes import bytes_of

TILED = f"python:{Path(__file__).parents[2] / 'examples' / 'minimal' / 'long_sequences.py'}:build"
LLAMA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
MODELS: dict[str, dict[str, Any]] = {
    "1.1b": {**LLAMA, "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
             "num_key_value_heads": 4, "intermediate_size": 5632},
    "8b": {**LLAMA, "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "intermediate_size": 14336},
}  # fmt: skip
HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
STEP = 1024  # lengths are multiples of so many tokens
CLOSE = 16  # a search ends where a 16th more does not fit
BUCKET = 1_000_000_000  # bytes
COLUMNS = 2  # of a row, before those of the numbers of ranks
RESULTS = Path(__file__).parents[1] / "results" / "longest.json"
PAGE = Path(__file__).parents[2] / "docs" / "long-sequences.md"
START, STOP = "<!-- longest: made by python -m benchmarks.long_sequences.longest -->", "<!-- end of longest -->"
TEXT = """Thousands (1024) of tokens of the longest sequence that fits {memory} of each device, and in brackets GiB of host memory that a
rank takes then: Llamas in bf16 with AdamW, stage 3, recomputed layers, one sequence at a time. By plans on a pretended accelerator; a
16th more tokens do not fit. **States on the host**: masters, moments and parameters, as in all rows below it. **Tiles**: of 4096 tokens
in feed-forward layers and norms, and of 1024 in the loss. Divided sequences are shared by all ranks; others are
each rank's own. **FSDP2**: torch's
`fully_shard` and `context_parallel` as accelerate calls them, states on the host, on the same accelerator with the same tiles, gradients
sent in bf16; without accelerate's autocast and copy of the logits in fp32, and without the memory that its streams keep, which all take
more. A dash: not even 1024 tokens fit; empty: not planned yet."""
MOST = 1 << 26  # tokens
BLOCKS = 6  # of the smaller of two models: with fewer, the peak of backward grows by more than a block


@dataclass(frozen=True)
class Way:
    """What is switched on, beside stage 3 and recomputed activations.

    Attributes:
        host: Optimizer states and parameters rest on the host.
        tiles: Feed-forward layers, norms and the loss are computed in tiles.
        moves: The inputs of layers wait on the host for backward.
        axis: What divides sequences over all ranks: "sequence", or a strategy of context parallelism; "" where ranks have their own.
        half: Gradients are sent in bf16; otherwise in fp32 where sequences are divided.
        beside: Bytes of the device that something else takes.
        fsdp2: torch's FSDP2 with context parallelism runs in place of the engine; ``axis`` is its strategy.
    """

    host: bool = True
    tiles: bool = False
    moves: bool = False
    axis: str = ""
    half: bool = False
    beside: int = 0
    fsdp2: bool = False

    def config(self, ranks: int) -> dict[str, Any]:
        """Return the DeepSpeed configuration."""
        zero = {"stage": 3, "stage3_max_reuse_distance": 0, **(HOST if self.host else {})}
        found: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": zero}
        if self.half:
            found["seq_parallel_communication_data_type"] = "bf16"
        if self.axis == "sequence":
            return {**found, "sequence_parallel_size": ranks}
        if self.axis:
            return {**found, "hf_zero": {"context_parallel_size": ranks, "context_parallel_strategy": self.axis}}
        return found


WAYS = {
    "stage 3": Way(host=False),
    "states on the host": Way(),
    "tiles": Way(tiles=True),
    "tiles, inputs of layers on the host": Way(tiles=True, moves=True),
    "sequence parallel": Way(axis="sequence"),
    "context parallel": Way(axis="allgather"),
    "sequence parallel, tiles, inputs of layers on the host": Way(tiles=True, moves=True, axis="sequence"),
    "context parallel, tiles, inputs of layers on the host": Way(tiles=True, moves=True, axis="allgather"),
    "context parallel in a ring, tiles, inputs of layers on the host": Way(tiles=True, moves=True, axis="alltoall"),
    "the same, gradients sent in bf16": Way(tiles=True, moves=True, axis="alltoall", half=True),
    "DeepSpeed with ALST (sequence parallel, tiles, inputs of layers on the host), by formula": Way(
        tiles=True, moves=True, axis="sequence", beside=BUCKET
    ),
    "FSDP2, context parallel": Way(axis="allgather", fsdp2=True),
    "FSDP2, context parallel, tiles, inputs of layers on the host": Way(tiles=True, moves=True, axis="allgather", fsdp2=True),
}


@dataclass(frozen=True)
class Taken:
    """Bytes of a rank at the peaks of device and host."""

    device: float
    host: float


def taken(model: Mapping[str, Any], way: Way, ranks: int, length: int, whole: bool = False) -> Taken:
    """Return what a rank takes for sequences of ``length`` tokens, from models of two sizes, or from the whole one.

    Raises:
        HfZeroError: The engine refuses it.
    """
    count = model["num_hidden_layers"]
    if whole:
        return _taken(model, way, ranks, length, count)
    one, two = (_taken(model, way, ranks, length, blocks) for blocks in (BLOCKS, BLOCKS + 1))
    more = count - BLOCKS - 1
    return Taken(two.device + more * (two.device - one.device), two.host + more * (two.host - one.host))


def _taken(model: Mapping[str, Any], way: Way, ranks: int, length: int, blocks: int) -> Taken:
    settings = {**model, "num_hidden_layers": blocks, "max_position_embeddings": length}
    wish = ModelWish(TILED if way.tiles else "llama", settings, checkpointing=True, moves=way.moves)
    if way.fsdp2:
        return Taken(*fsdp2.peaks(build_model(wish), ranks, length, way.axis, way.host))
    costs = Task(wish, settled(way.config(ranks), 1), Cluster(ranks, ranks), Load(1, length)).costs()
    if isinstance(costs, Exception):
        raise costs
    return Taken(costs.device, costs.host)


def longest(model: Mapping[str, Any], way: Way, ranks: int, limit: int, near: int = 0) -> tuple[int, Taken]:
    """Return the most tokens whose peak on the device is within ``limit`` bytes, and what they take; 0 where not even ``STEP`` are.

    Args:
        model: Settings of a Llama.
        way: What is switched on.
        ranks: Their number.
        limit: Bytes.
        near: Tokens that the answer is likely to be near to; 0 where nothing is known.
    """
    known: dict[int, Taken] = {}
    low, high, size = 0, MOST // STEP, max(1, near // STEP) if near else 16
    while high - low > max(1, low // CLOSE):
        known[size] = taken(model, way, ranks, size * STEP)
        low, high = (size, high) if known[size].device <= limit else (low, size)
        closer = low + max(1, low // CLOSE) if low else max(1, high // 2)
        if len(known) == 1:
            size = closer if near or not low else 2 * low
        elif high > 1:
            size = min(max(_guess(known, limit), closer), high - 1, 16 * low + 16)
    exact = known[max(1, low)] if not low else taken(model, way, ranks, low * STEP, whole=True)
    while low and exact.device > limit:  # a little over the line of the two small models
        low = max(0, low - max(1, ceil((exact.device - limit) / _slope(known, limit))))
        exact = taken(model, way, ranks, max(1, low) * STEP, whole=True)
    return low * STEP, exact


def _guess(known: Mapping[int, Taken], limit: int) -> int:
    """Return where the line through the two lengths nearest to the limit meets it."""
    nearest = min(known, key=lambda size: abs(known[size].device - limit))
    slope = _slope(known, limit)
    return int(nearest + (limit - known[nearest].device) / slope) if slope > 0 else MOST // STEP


def _slope(known: Mapping[int, Taken], limit: int) -> float:
    """Return the bytes per ``STEP`` tokens between the two lengths nearest to the limit."""
    one, two = sorted(known, key=lambda size: abs(known[size].device - limit))[:2]
    return (known[two].device - known[one].device) / (two - one)


# -- the table --------------------------------------------------------------------------------------------------------


def rows_of(known: Mapping[tuple[str, str, int], str], models: list[str], ranks: list[int], ways: list[str]) -> list[list[str]]:
    """Cells of the table: a row for each model and way, a column for each number of ranks."""
    return [[model, way, *(known.get((model, way, count), "") for count in ranks)] for model in models for way in ways]


def saved(path: Path) -> dict[tuple[str, str, int], str]:
    """Return the cells of an earlier run, by model, way and ranks."""
    if not path.exists():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))
    ranks = [int(column.split()[0]) for column in table["columns"][COLUMNS:]]
    pairs = ((row, place) for row in table["rows"] for place in range(len(ranks)))
    return {(row[0], row[1], ranks[place]): row[COLUMNS + place] for row, place in pairs if row[COLUMNS + place]}


def cell(tokens: int, peak: Taken) -> str:
    """One cell."""
    return f"{tokens // 1024:,} ({peak.host / 2**30:.1f})" if tokens else "-"


def tokens_of(text: str) -> int:
    """Return the tokens that a cell tells."""
    return 0 if text in ("", "-") else 1024 * int(text.split()[0].replace(",", ""))


def page_with(table: ResultTable, page: str) -> str:
    """Return the page with the table in its place, without rows of which nothing was planned yet."""
    lines = ["", table.text, "", "| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += ["| " + " | ".join(row) + " |" for row in table.rows if any(row[COLUMNS:])]
    return page.split(START)[0] + START + "\n".join([*lines, STOP]) + page.split(STOP)[1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument("--memory", default="8GiB", help="of a device (default 8GiB)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="results so far are read from it, and each new one is added")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of other processes; this one has begun
    limit, known = bytes_of(arguments.memory, "--memory"), saved(arguments.json)
    wanted = [(model, way, count) for count in arguments.ranks[::-1] for way in arguments.ways for model in arguments.models]
    for model, way, count in [one for one in wanted if one not in known]:
        beside = [(tokens_of(text), ranks) for (other, name, ranks), text in known.items() if (other, name) == (model, way)]
        near = max((tokens * count // ranks if WAYS[way].axis else tokens for tokens, ranks in beside), default=0)
        tokens, peak = longest(MODELS[model], WAYS[way], count, limit - WAYS[way].beside, near)
        known[model, way, count] = cell(tokens, peak)
        print(model, way, count, known[model, way, count], flush=True)
        every = (list(MODELS), [2, 4, 8], list(WAYS)) if arguments.json == RESULTS else (arguments.models, arguments.ranks, arguments.ways)
        table = ResultTable(
            "The longest sequence",
            "python -m benchmarks.long_sequences.longest",
            TEXT.format(memory=arguments.memory),
            ["model", "switched on", *(f"{ranks} ranks" for ranks in every[1])],
            rows_of(known, *every),
        )
        table.save(arguments.json)
        if arguments.json == RESULTS and PAGE.exists():
            PAGE.write_text(page_with(table, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
