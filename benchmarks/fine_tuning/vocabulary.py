"""Peak memory of a step with a vocabulary of 128 thousand: the whole logits, and losses that never make them.

    python -m benchmarks.fine_tuning.vocabulary                             # 1024 tokens
    python -m benchmarks.fine_tuning.vocabulary --json benchmarks/results/vocabulary.json
    python -m benchmarks.fine_tuning.vocabulary --vocab 4096 --tokens 128   # quick check

Every variant runs alone in one process, and at stage 3 in two. All get the same tokens and must compute the same loss and norm.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional

from benchmarks.common.peak_memory import peak_of
from benchmarks.common.tables import ResultTable

TEXT = """A Llama of {layers} layers, width {width}, a feed-forward layer of {inner} and {vocab} words in its vocabulary, in fp32;
{tokens} tokens per rank, whose logits take {logits:.0f} MiB. Bytes that forward and backward add at their peak. **plain**: one process
without an engine; **stage 3**: 2 ranks. **TiledFusedLogitsLoss** in {tiles} tiles, **TiledMLP** too; **TRL**: the fused head of its
trainers, tiles of 4096 tokens and 32768 words. Ratio: to the full logits. Seconds: one step, on a busy machine."""
Way = Callable[[Any, Any, torch.Tensor, int], torch.Tensor]


def build(arguments: argparse.Namespace) -> nn.Module:
    """Return a Llama with the same random weights on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": arguments.width, "intermediate_size": arguments.inner, "num_hidden_layers": arguments.layers}
    heads = {"num_attention_heads": arguments.width // 64, "num_key_value_heads": arguments.width // 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=arguments.vocab, max_position_embeddings=arguments.tokens, **sizes, **heads))


def whole_logits(model: Any, module: Any, tokens: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return the model's own loss, computed from whole logits."""
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


class TiledHead(nn.Module):
    """A model whose forward returns the tiled loss."""

    def __init__(self, model: Any, tiles: int) -> None:
        super().__init__()
        self.inner = model
        self.tiles = tiles

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over ``tokens`` (batch, length)."""
        from hf_zero.sequence_parallel.tiled import TiledFusedLogitsLoss

        hidden = self.inner.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        total = TiledFusedLogitsLoss.apply(sum_of_tile, self.inner, hidden, tokens[:, 1:], None, self.tiles, None, "sum")
        return total / tokens[:, 1:].numel()


def sum_of_tile(model: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of one tile of tokens, from their hidden states."""
    return functional.cross_entropy(model.lm_head(hidden).float(), targets, reduction="sum")


def fused_head(model: Any, module: Any, tokens: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return the loss of TRL's fused head."""
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, fused_lm_head=True).loss
    return loss


@contextmanager
def tiled_layers(tiles: int) -> Iterator[None]:
    """Make Llama's feed-forward layers compute tile by tile, inside the context."""
    from transformers.models.llama import modeling_llama

    from hf_zero.sequence_parallel.tiled import TiledMLP

    plain = modeling_llama.LlamaMLP.forward
    modeling_llama.LlamaMLP.forward = lambda self, x: TiledMLP.apply(plain, self, x, tiles)  # type: ignore[method-assign]
    try:
        yield
    finally:
        modeling_llama.LlamaMLP.forward = plain  # type: ignore[method-assign]


WAYS: dict[str, Way] = {
    "whole logits": whole_logits,
    "TiledFusedLogitsLoss": lambda model, module, tokens, tiles: model(tokens),
    "TiledFusedLogitsLoss and TiledMLP": lambda model, module, tokens, tiles: model(tokens),
    "TRL, fused head": fused_head,
}


def model_of(name: str, arguments: argparse.Namespace) -> nn.Module:
    """Return the model of one variant."""
    if "Tiled" in name:
        return TiledHead(build(arguments), arguments.tiles)
    model: Any = build(arguments)
    if "TRL" in name:
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model)
    return model


def measure(name: str, world: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure a step of one variant: the bytes of a first step, the seconds of a second."""
    module: Any = model_of(name, arguments)
    model: Any = module
    if world > 1:
        import hf_zero

        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
        sections = {"optimizer": {"type": "SGD", "params": {"lr": 1e-9}}, "zero_optimization": zero}
        model = hf_zero.initialize(model=module, config={"train_micro_batch_size_per_gpu": 1, **sections})[0]
    tokens = torch.randint(0, arguments.vocab, (1, arguments.tokens), generator=torch.Generator().manual_seed(1))
    losses = []

    def step() -> None:
        loss = WAYS[name](model, module, tokens, arguments.tiles)
        losses.append(float(loss.detach()))
        model.backward(loss) if world > 1 else loss.backward()

    peak = peak_of(step)
    if world > 1:
        model.step()
        norm = float(model.get_global_grad_norm())
    else:
        norm = float(torch.stack([param.grad.norm() for param in module.parameters()]).norm())
        module.zero_grad()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    if world > 1:
        model.destroy()
    return {"peak": peak, "seconds": seconds, "loss": losses[0], "norm": norm}


def worker(rank: int, world: int, arguments: argparse.Namespace, folder: str) -> None:
    """Run all variants on one rank; rank 0 writes its results into ``folder``."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    found = {}
    for name in WAYS:
        with tiled_layers(arguments.tiles) if "TiledMLP" in name else nullcontext():
            found[name] = measure(name, world, arguments)
        if rank == 0:
            print(world, name, found[name], flush=True)
        gc.collect()
    if rank == 0:
        torch.save(found, f"{folder}/results{world}.pt")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def table(arguments: argparse.Namespace) -> ResultTable:
    """Return the table: MiB, ratio and seconds, alone and at stage 3."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2):
            mp.spawn(worker, args=(world, arguments, folder), nprocs=world)
            found[world] = torch.load(f"{folder}/results{world}.pt", weights_only=True)
    rows = []
    for name in WAYS:
        rows.append([name])
        for here in found.values():
            one, base = here[name], here["whole logits"]
            if not all(abs(one[key] - base[key]) <= 1e-5 * base[key] for key in ("loss", "norm")):  # fails for NaN
                raise AssertionError(f"{name}: {one}, the whole logits give {base}")
            rows[-1] += [f"{one['peak'] / 2**20:.0f}", f"{one['peak'] / base['peak']:.2f}", f"{one['seconds']:.1f}"]
    shape = {name: getattr(arguments, name) for name in ("layers", "width", "inner", "vocab", "tokens", "tiles")}
    columns = ["", "plain, MiB", "ratio", "seconds", "stage 3, MiB", "ratio", "seconds"]
    command = "python -m benchmarks.fine_tuning.vocabulary --json benchmarks/results/vocabulary.json"
    text = TEXT.format(logits=arguments.tokens * arguments.vocab * 4 / 2**20, **shape)
    return ResultTable("A vocabulary of 128 thousand", command, text, columns, rows)


def main() -> None:
    """Measure and print; ``--json`` writes the table to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = (("layers", 4), ("width", 256), ("inner", 2048), ("vocab", 128256), ("tokens", 1024), ("tiles", 16))
    for name, default in shape:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = table(arguments)
    result.publish(arguments.json)


if __name__ == "__main__":
    main()
