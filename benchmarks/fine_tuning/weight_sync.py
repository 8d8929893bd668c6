"""Seconds until one rank has every whole weight of a sharded model, as an inference engine needs them before each rollout.

    python -m benchmarks.fine_tuning.weight_sync                             # Llama shape, 2 ranks, one thread each
    python -m benchmarks.fine_tuning.weight_sync --json benchmarks/results/weight_sync.json
    python -m benchmarks.fine_tuning.weight_sync --rounds 1 --layers 2       # quick check

All contenders are in the same processes; a round times each of them once, in rotating order. Rank 0 copies the weights that it gets into a
model of its own, and compares them with the weights once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.common.tables import ResultTable

TEXT = """A Llama of {parameters:.0f} M parameters in bf16 at stage 3, {world} ranks over {backend}, {rounds} rounds; rank 0 copies what
it gets. **parameter by parameter**: a loop over `GatheredParameters([param])`. **in messages**: tensors are kept until a message of
{bucket:.0f} MiB is full. **all at once**: `GatheredParameters` of the model. **iter_full_params**: buckets of {bucket:.0f} MiB.
**FSDP2**: `full_tensor()` of each parameter. LoRA: r = 16 on all linear layers, merged on the way. Memory: growth of rank 0's resident
memory. Ratio: to the time of `iter_full_params`."""
Contender = Callable[[], Iterator[tuple[str, torch.Tensor]]]


def build(arguments: argparse.Namespace) -> nn.Module:
    """Return a Llama with random weights, the same on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = arguments.width
    shape = {"hidden_size": width, "intermediate_size": width * 8 // 3 // 32 * 32, "num_hidden_layers": arguments.layers}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128)}
    return LlamaForCausalLM(LlamaConfig(vocab_size=arguments.vocab, **shape, **heads)).to(torch.bfloat16)


def adapted(model: nn.Module) -> Any:
    """Return the model with LoRA on all linear layers, B not zero."""
    import peft

    made = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.manual_seed(1)
    for name, param in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.02)
    return made.to(torch.bfloat16)


def engine_of(model: nn.Module) -> Any:
    """Return a stage 3 engine without optimizer state."""
    import hf_zero

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    return hf_zero.initialize(model=model, config=config)[0]


def one_by_one(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights gathered with one context per parameter."""
    import hf_zero

    for name, param in engine.module.named_parameters():
        with hf_zero.zero.GatheredParameters([param]):
            yield name, param.data


def in_packs(engine: Any, pack: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights gathered with one context per parameter, kept until the parameters of a message are complete."""
    kept: list[tuple[str, torch.Tensor]] = []
    for name, value in one_by_one(engine):
        kept.append((name, value))
        if sum(held.nbytes for _, held in kept) > pack:
            yield from kept
            kept = []
    yield from kept


def all_at_once(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights gathered in one context; adapters, if there are any, are merged inside and removed again."""
    import hf_zero

    merges = hasattr(engine.module, "merge_adapter")
    with hf_zero.zero.GatheredParameters(list(engine.module.parameters())):
        if merges:
            engine.module.merge_adapter()
        for name, param in engine.module.named_parameters():
            if "lora_" not in name:
                yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), param.data
        if merges:
            engine.module.unmerge_adapter()


def streamed(engine: Any, bucket: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights in the buckets of hf_zero."""
    from hf_zero.utils import iter_full_params

    return iter_full_params(engine, bucket_bytes=bucket)


def fsdp2(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield FSDP2's parameters, each gathered."""
    for name, param in model.named_parameters():
        yield name, param.full_tensor()


def contenders(arguments: argparse.Namespace) -> tuple[dict[str, Contender], dict[str, nn.Module]]:
    """Return the contenders to time, and the model whose weights each must give."""
    from torch.distributed.fsdp import fully_shard

    plain, lora, merging = engine_of(build(arguments)), *(engine_of(adapted(build(arguments))) for _ in range(2))
    peer = build(arguments)
    for layer in peer.model.layers:
        fully_shard(layer)
    fully_shard(peer)
    bucket = int(arguments.bucket * 2**20)
    ways: dict[str, Contender] = {
        "parameter by parameter": lambda: one_by_one(plain),
        "parameter by parameter, in messages": lambda: in_packs(plain, bucket),
        "all at once": lambda: all_at_once(plain),
        "iter_full_params": lambda: streamed(plain, bucket),
        "FSDP2": lambda: fsdp2(peer),
        "LoRA, all at once": lambda: all_at_once(merging),  # its weights are rounded with each merge, so no other contender has them
        "LoRA, iter_full_params": lambda: streamed(lora, bucket),
    }
    merged = adapted(build(arguments)).merge_and_unload()
    return ways, {name: merged if "LoRA" in name else build(arguments) for name in ways}


def resident(key: str) -> int:
    """Return bytes of this process's resident memory: the present ones (VmRSS) or the peak since `forget_peak` (VmHWM)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def forget_peak() -> int:
    """Reset the peak of resident memory; return the resident bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def worker(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """Run all contenders and rounds on one rank; rank 0 writes seconds and bytes into ``folder``."""
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.world), "LOCAL_WORLD_SIZE": str(arguments.world)}
    torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" and torch.cuda.device_count() >= arguments.world else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", arguments.world), rank=rank, world_size=arguments.world)
    with torch.device(device):
        ways, models = contenders(arguments)
    receiver = {name: torch.empty_like(param) for name, param in next(iter(models.values())).named_parameters()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    grown = dict.fromkeys(ways, 0)
    for index in range(arguments.rounds + 1):  # the first round is a warm-up, and compares the weights
        names = list(ways)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            dist.barrier()
            before, start = forget_peak(), time.perf_counter()
            for key, value in ways[name]():
                if rank == 0:
                    receiver[key].copy_(value)
                del value
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            if index:
                times[name].append(seconds)
                grown[name] = max(grown[name], resident("VmHWM") - before)
            elif rank == 0 and not all(torch.equal(receiver[key], param) for key, param in models[name].named_parameters()):
                raise AssertionError(f"{name}: other weights than the model's")
    if rank == 0:
        torch.save({"times": times, "grown": grown, "backend": backend}, f"{folder}/results.pt")
    dist.barrier()
    dist.destroy_process_group()


def table(found: dict[str, Any], arguments: argparse.Namespace, parameters: int) -> ResultTable:
    """Return the table: seconds, memory and the ratio to hf_zero's stream."""
    rows = []
    for name, times in found["times"].items():
        ours = found["times"]["LoRA, iter_full_params" if "LoRA" in name else "iter_full_params"]
        ratio = statistics.median(theirs / own for theirs, own in zip(times, ours, strict=True))
        rows.append([name, f"{statistics.median(times):.2f}", f"{found['grown'][name] / 2**20:.0f}", f"{ratio:.2f}"])
    text = TEXT.format(
        parameters=parameters / 1e6, world=arguments.world, rounds=arguments.rounds, backend=found["backend"], bucket=arguments.bucket
    )
    command = f"python -m benchmarks.fine_tuning.weight_sync --rounds {arguments.rounds} --json benchmarks/results/weight_sync.json"
    return ResultTable("Weights to another engine", command, text, ["", "seconds", "memory, MiB", "ratio"], rows)


def main() -> None:
    """Measure and print; ``--json`` writes the table to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("world", 2), ("rounds", 5), ("layers", 24), ("width", 768), ("vocab", 32000), ("bucket", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(arguments, folder), nprocs=arguments.world)
        found = torch.load(f"{folder}/results.pt", weights_only=True)
    with torch.device("meta"):
        parameters = sum(param.numel() for param in build(arguments).parameters())
    result = table(found, arguments, parameters)
    result.publish(arguments.json)


if __name__ == "__main__":
    main()
