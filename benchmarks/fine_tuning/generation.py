"""Tokens per second of ``generate()`` under stage 3, against the plain model on the same ranks.

    python -m benchmarks.fine_tuning.generation                              # Llama shape, 2 ranks, one thread each
    python -m benchmarks.fine_tuning.generation --json benchmarks/results/generation.json
    python -m benchmarks.fine_tuning.generation --rounds 1 --layers 2        # quick check

All contenders are in the same processes; a round times each of them once, in rotating order. ``even``: all ranks generate the same number
of tokens. ``uneven``: the last rank stops at a quarter; the time until that rank has finished is measured, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.common.tables import ResultTable

CONTENDERS = ("plain", "gathered", "block by block")
TEXT = """A model of {parameters:.0f} M parameters in {dtype}, {world} ranks, {rows} prompts of {prompt} tokens per rank, greedy, {rounds}
rounds. **plain**: the ordinary model on every rank. **gathered**: stage 3 with `hf_zero.gather_for_generation: true`. **block by block**:
`false`. Even: {new} new tokens on every rank. Uneven: the last rank makes a quarter of them; seconds until the first and until all ranks
return. Ratio: to the plain model's time."""


def build(arguments: argparse.Namespace) -> nn.Module:
    """Return a Llama with random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocab,
        hidden_size=arguments.width,
        intermediate_size=arguments.width * 8 // 3 // 32 * 32,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // 64,
        num_key_value_heads=max(1, arguments.width // 128),
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(getattr(torch, arguments.dtype)).eval()


def worker(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Run all contenders and rounds on one rank; rank 0 writes the times into ``folder``."""
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.world), "LOCAL_WORLD_SIZE": str(arguments.world)}
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shared = device.type == "cuda" and torch.cuda.device_count() >= arguments.world
    store = dist.FileStore(f"{folder}/store", arguments.world)
    dist.init_process_group("nccl" if shared else "gloo", store=store, rank=rank, world_size=arguments.world)
    models = {"plain": build(arguments).to(device)}
    import hf_zero

    for name, gather in (("gathered", True), ("block by block", False)):
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
            "hf_zero": {"gather_for_generation": gather},
            "bf16": {"enabled": arguments.dtype == "bfloat16"},
        }
        engine = hf_zero.initialize(model=build(arguments).to(device), config=config)[0]
        models[name] = engine.module
    times = measure(models, arguments, rank, device)
    gathered: list[Any] = [None] * arguments.world
    dist.all_gather_object(gathered, times)
    if rank == 0:
        torch.save(gathered, f"{folder}/times.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(models: dict[str, nn.Module], arguments: argparse.Namespace, rank: int, device: torch.device) -> dict[str, list[float]]:
    """Return this rank's seconds per round, by contender and case."""
    generator = torch.Generator().manual_seed(rank)
    prompt = torch.randint(1, arguments.vocab, (arguments.rows, arguments.prompt), generator=generator).to(device)
    times: dict[str, list[float]] = {f"{case} {name}": [] for case in ("even", "uneven") for name in CONTENDERS}
    expected: dict[str, torch.Tensor] = {}
    for index in range(arguments.rounds + 1):  # the first round is a warm-up
        order = list(CONTENDERS[index % 3 :]) + list(CONTENDERS[: index % 3])
        for case in ("even", "uneven"):
            new = arguments.new // 4 if case == "uneven" and rank == arguments.world - 1 else arguments.new
            for name in order:
                dist.barrier()
                start = time.perf_counter()
                with torch.no_grad():
                    tokens = models[name].generate(prompt, max_new_tokens=new, min_new_tokens=new, do_sample=False)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                if index:
                    times[f"{case} {name}"].append(seconds)
                if not torch.equal(expected.setdefault(case, tokens), tokens):
                    raise AssertionError(f"{name}: other tokens than {order[0]}")
    return times


def table(times: list[dict[str, list[float]]], arguments: argparse.Namespace, parameters: int) -> ResultTable:
    """Return the table: seconds of the slowest rank per round, and ratios to the plain model."""
    rounds = range(arguments.rounds)
    slowest = {key: [max(rank[key][index] for rank in times) for index in rounds] for key in times[0]}
    first = {key: [min(rank[key][index] for rank in times) for index in rounds] for key in times[0]}
    total = arguments.world * arguments.rows * arguments.new
    rows = []
    for name in CONTENDERS:
        even, uneven, early = slowest[f"even {name}"], slowest[f"uneven {name}"], first[f"uneven {name}"]
        ratio = statistics.median(mine / plain for mine, plain in zip(even, slowest["even plain"], strict=True))
        uneven_ratio = statistics.median(mine / plain for mine, plain in zip(uneven, slowest["uneven plain"], strict=True))
        target = "<= 1.10" if name == "gathered" else ""
        rows.append(
            [name, f"{total / statistics.median(even):.1f}", f"{ratio:.3f}", target, f"{statistics.median(early):.2f}"]
            + [f"{statistics.median(uneven):.2f}", f"{uneven_ratio:.3f}"]
        )
    text = TEXT.format(parameters=parameters / 1e6, **vars(arguments))
    columns = ["contender", "tokens/s", "ratio", "target", "uneven: first s", "uneven: all s", "uneven ratio"]
    return ResultTable(
        "Generation under stage 3", f"python -m benchmarks.fine_tuning.generation {arguments.given}".strip(), text, columns, rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"world": (2, "ranks"), "layers": (8, "layers"), "width": (512, "width"), "vocab": (8192, "vocabulary")}
    sizes |= {"rows": (4, "prompts per rank"), "prompt": (32, "tokens of a prompt"), "new": (64, "new tokens"), "rounds": (5, "rounds")}
    for name, (value, text) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} ({value})")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path, help="file for the numbers")
    arguments = parser.parse_args()
    arguments.given = " ".join(sys.argv[1:])
    import tempfile

    with tempfile.TemporaryDirectory(prefix="generation_") as folder:
        mp.spawn(worker, (arguments, folder), nprocs=arguments.world)
        times = torch.load(f"{folder}/times.pt", weights_only=True)
    parameters = sum(parameter.numel() for parameter in build(arguments).parameters())
    result = table(times, arguments, parameters)
    result.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
