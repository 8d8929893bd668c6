"""Memory of a rank and bytes it sends when adapters train on a frozen base: LoRA, QLoRA in one process, at stages 2 and 3, with FSDP2.

    python -m benchmarks.fine_tuning.qlora                                  # Llama shape, 2 ranks
    python -m benchmarks.fine_tuning.qlora --json benchmarks/results/qlora.json
    python -m benchmarks.fine_tuning.qlora --layers 2 --width 256           # quick check

Memory of steps is counted from torch's record of allocations on the host, which other programs do not disturb; memory of loading is
sampled from the process. Each contender has processes of its own, and loads the base with ``from_pretrained``, like scripts do.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.common.peak_memory import memory_of
from benchmarks.common.tables import ResultTable

TEXT = """Adapters (r = 16 on all linear layers, AdamW) on a frozen Llama of {parameters:.0f} M parameters, {batch} x {length} tokens
per rank, recomputed layer by layer; {world} ranks over gloo, NF4 with double quantization. **loading**: growth of anonymous memory in
`from_pretrained`. **at rest**: allocated after a step. **in a step**: the peak above that. **sent**: bytes that a rank sends in a step.
**loss**: of the second step. **FSDP2**: `fully_shard` per layer, `bnb_4bit_quant_storage` in bf16; every rank loads the base whole."""
CONTENDERS = ("QLoRA, one process", "LoRA, stage 3", "QLoRA, stage 2", "QLoRA, stage 3", "QLoRA, FSDP2")
MIB = 2**20


def grown(call: Callable[[], object]) -> int:
    """Return by how many bytes the anonymous memory of this process grows at most while ``call`` runs, sampled every millisecond."""
    before, most, over = _anonymous(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            most[0] = max(most[0], _anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    call()
    over.set()
    thread.join()
    return max(0, most[0] - before)


def _anonymous() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def save_base(arguments: argparse.Namespace, folder: str, layers: int) -> float:
    """Write a Llama with random weights in bf16; return its parameters in millions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = arguments.width
    shape = {"hidden_size": width, "intermediate_size": width * 8 // 3 // 64 * 64, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128)}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=arguments.vocab, **shape, **heads)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return sum(param.numel() for param in model.parameters()) / 1e6


def zero_config(stage: int) -> dict[str, Any]:
    """Return the engine's configuration."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero, "wall_clock_breakdown": False}


def loaded(base: str, quantized: bool) -> nn.Module:
    """Load the base like scripts do."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {}
    if quantized:
        kinds = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": torch.bfloat16}
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **kinds)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16, **options)
    for param in model.parameters():
        if type(param) is nn.Parameter and param.numel():
            param.data = param.data.clone()  # otherwise a view of the whole mapped file, unlike on a device
    return model


def adapted(model: nn.Module) -> nn.Module:
    """Return the base with LoRA, with activations recomputed in backward."""
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    model.enable_input_require_grads()  # type: ignore[operator]
    torch.manual_seed(1)
    made = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"), autocast_adapter_dtype=False)  # type: ignore[arg-type]
    for name, param in made.named_parameters():
        if "lora_" in name:
            param.data = param.data.to(torch.bfloat16)
    return made.train()


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the bytes that a rank sends in torch's collectives of whole tensors, which FSDP2 uses."""
    sent = [0]
    names = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single", "all_reduce")
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}  # torch 2.13 renamed two of them

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            world = dist.get_world_size(kwargs.get("group"))
            rounds = 2 if name == "all_reduce" else 1
            sent[0] += rounds * max(tensor.nbytes for tensor in tensors) * (world - 1) // world
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class Plain:
    """Contender without an engine, in one process or with FSDP2: a module and an optimizer over its adapters."""

    def __init__(self, sharded: bool) -> None:
        self._sharded = sharded

    def load(self, base: str) -> None:
        self._model = loaded(base, quantized=True)

    def prepare(self) -> None:
        self._model = adapted(self._model)
        if self._sharded:
            from torch.distributed.fsdp import fully_shard

            for layer in self._model.base_model.model.model.layers:  # type: ignore[union-attr]
                fully_shard(layer)
            fully_shard(self._model)
        trained = [param for param in self._model.parameters() if param.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        loss = self._model(**batch).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def sent(self, step: Callable[[], Any]) -> int:
        with counted() as sent:
            step()
        return sent[0]


class Zero:
    """Contender with the engine of hf_zero."""

    def __init__(self, stage: int, quantized: bool) -> None:
        self._stage, self._quantized = stage, quantized

    def load(self, base: str) -> None:
        from transformers.integrations import HfDeepSpeedConfig

        self._noted = HfDeepSpeedConfig(zero_config(self._stage))
        self._model = loaded(base, self._quantized)

    def prepare(self) -> None:
        import hf_zero

        model = adapted(self._model)
        trained = [param for param in model.parameters() if param.requires_grad]
        self._engine = hf_zero.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=1e-3), config=zero_config(self._stage))[0]
        del self._model

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        loss = self._engine(**batch).loss
        self._engine.backward(loss)
        self._engine.step()
        return float(loss.detach())

    def sent(self, step: Callable[[], Any]) -> int:
        from hf_zero.comm.collectives import Collectives

        networks = [
            found for found in gc.get_objects() if issubclass(type(found), Collectives)
        ]  # the engine's two, and the ones used for loading
        before = sum(network.sent_bytes for network in networks)
        step()
        return sum(network.sent_bytes for network in networks) - before


def contender(name: str) -> Any:
    """Return the contender of a name in ``CONTENDERS``."""
    return Zero(int(name[-1]), name.startswith("QLoRA")) if "stage" in name else Plain(sharded="FSDP2" in name)


def worker(rank: int, arguments: argparse.Namespace, name: str, world: int, folder: str) -> None:
    """Run one rank of one contender; rank 0 writes its numbers into ``folder``."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_ZERO": "1"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store-{name}", world), rank=rank, world_size=world)
    ids = torch.randint(0, arguments.vocab, (arguments.batch, arguments.length), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "labels": ids}
    measured = contender(name)
    measured.load(f"{folder}/small")  # so that imports and compilation do not count as memory of the model
    loading = grown(lambda: measured.load(f"{folder}/base"))
    measured = contender(name)
    _, left = memory_of(lambda: measured.load(f"{folder}/base"))
    _, prepared = memory_of(measured.prepare)
    first, stays = memory_of(lambda: measured.step(batch))  # the first step creates the optimizer's state
    losses: list[float] = []
    step, _ = memory_of(lambda: losses.append(measured.step(batch)))
    sent = measured.sent(lambda: measured.step(batch))
    if rank == 0:
        found = {"loading": loading, "rest": left + prepared + stays, "step": step, "sent": sent, "loss": losses[0]}
        Path(f"{folder}/{name}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def table(found: dict[str, dict[str, float]], arguments: argparse.Namespace, parameters: float) -> ResultTable:
    """Return the table: MiB and the loss."""
    rows = []
    for name, numbers in found.items():
        sizes = [f"{numbers[key] / MIB:.1f}" for key in ("loading", "rest", "step", "sent")]
        rows.append([name, *sizes, f"{numbers['loss']:.4f}"])
    text = TEXT.format(parameters=parameters, batch=arguments.batch, length=arguments.length, world=arguments.world)
    heads = ["", "loading, MiB", "at rest, MiB", "in a step, MiB", "sent, MiB", "loss"]
    command = (
        f"python -m benchmarks.fine_tuning.qlora --layers {arguments.layers} --width {arguments.width} --json benchmarks/results/qlora.json"
    )
    return ResultTable("Adapters on a quantized base", command, text, heads, rows)


def main() -> None:
    """Measure and print; ``--json`` writes the table to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("world", 2), ("layers", 12), ("width", 768), ("vocab", 4096), ("batch", 1), ("length", 64))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        save_base(arguments, f"{folder}/small", 1)
        parameters = save_base(arguments, f"{folder}/base", arguments.layers)
        for name in CONTENDERS:
            world = 1 if "one process" in name else arguments.world
            mp.spawn(worker, args=(arguments, name, world, folder), nprocs=world)
            found[name] = json.loads(Path(f"{folder}/{name}.json").read_text())
    result = table(found, arguments, parameters)
    result.publish(arguments.json)


if __name__ == "__main__":
    main()
