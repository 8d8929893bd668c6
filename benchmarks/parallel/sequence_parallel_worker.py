"""One rank of one contender of the benchmarks of divided sequences. Started by ``sequence_parallel.py`` and
``long_sequences/context_parallel.py``, also with a peer's Python.

It reads one JSON object per line from standard input. ``{"steps": K, "length": S}`` runs K training steps over sequences of S tokens and
answers with the seconds per step and the last loss; ``{"peak": true, "length": S}`` with the bytes of tensors a step adds at its peak;
``{"sent": true, "length": S}`` with the bytes that attention sends in a step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.peak_memory import peak_of
from benchmarks.common.processes import open_answers
from benchmarks.common.training import ADAMW

Batch = dict[str, torch.Tensor]
STRATEGIES = {"context": "allgather", "ring": "alltoall"}  # of context parallelism, by contender


def build(size: dict[str, int]) -> nn.Module:
    """Return a Llama with half as many key heads as query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["width"],
        intermediate_size=2 * size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["heads"] // 2,
        max_position_embeddings=size["longest"],
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def start(package: str, size: dict[str, int]) -> tuple[Any, Any]:
    """Return an engine of ``hf_zero`` or ``deepspeed`` at stage 1, and its sequence-parallel groups; None for whole sequences."""
    module, mpu = build(size), None
    if package == "deepspeed":
        import deepspeed as library
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    else:
        import hf_zero as library
        from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
    if package not in ("whole", *STRATEGIES):
        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=module, core_attn_implementation="sdpa", sequence_parallel_size=dist.get_world_size(), micro_batch_size=1
        )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's default buckets take 2 GB for models of any size.
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 2_000_000, "allgather_bucket_size": 2_000_000},
    }
    if package in STRATEGIES:
        config["hf_zero"] = {"context_parallel_size": dist.get_world_size(), "context_parallel_strategy": STRATEGIES[package]}
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    return library.initialize(model=module, optimizer=optimizer, config=config, mpu=mpu)[0], mpu


def batch_of(package: str, length: int, size: dict[str, int]) -> Batch:
    """Return this rank's slice of one sequence, the whole sequence, or a sequence of its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank if package == "whole" else 0)
    tokens = torch.randint(0, size["vocab"], (1, length), generator=generator)
    batch = {"input_ids": tokens, "position_ids": torch.arange(length)[None]}
    if package in ("whole", "fsdp2", *STRATEGIES):
        return {**batch, "labels": tokens}
    batch["shift_labels"] = nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    own = slice(rank * length // world, (rank + 1) * length // world)
    return {name: value[:, own].contiguous() for name, value in batch.items()}


class ContextOfAccelerate:
    """FSDP2 with context parallelism, as accelerate's ``ParallelismConfig(cp_size=...)`` makes it; has an engine's methods."""

    def __init__(self, size: dict[str, int]) -> None:
        from accelerate import Accelerator
        from accelerate.utils import FullyShardedDataParallelPlugin, ParallelismConfig, TorchContextParallelConfig

        module = build(size)
        handler = TorchContextParallelConfig(cp_comm_strategy="allgather")
        self.accelerator = Accelerator(
            cpu=True,
            parallelism_config=ParallelismConfig(cp_size=dist.get_world_size(), cp_handler=handler),
            fsdp_plugin=FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
            ),
        )
        self.module, self.optimizer = self.accelerator.prepare(module, torch.optim.AdamW(module.parameters(), **ADAMW))

    def step(self, batch: Batch) -> float:
        """One step; the loss of this rank's part."""
        given = {**batch, "shift_labels": nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)}
        buffers = list(given.values())
        with self.accelerator.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)):
            loss = self.module(**given).loss
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.module.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())


class Sent:
    """Counter of the bytes that this rank sends for attention while it is entered."""

    def __init__(self, package: str, model: nn.Module) -> None:
        self.package, self.model, self.nbytes = package, model, 0

    def __enter__(self) -> Sent:
        if self.package == "deepspeed":
            usual = dist.all_to_all_single

            def counted(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002 - torch's name
                self.nbytes += input.nbytes // dist.get_world_size() * (dist.get_world_size() - 1)
                return usual(output, input, *args, **kwargs)

            self._undo = partial(setattr, dist, "all_to_all_single", usual)
            dist.all_to_all_single = counted
            return self
        from hf_zero import observe

        self._networks, self._label = _networks(self.model), ""
        self._before = {network: network.sent_bytes for network in self._networks}
        self._told = observe.listening(self._note)
        self._told.__enter__()
        return self

    def _note(self, label: str) -> None:
        """The engine begins something: what was sent since its last word was that one's."""
        self._book()
        self._label = label

    def _book(self) -> None:
        for network in self._networks:
            if any(f"({what}" in self._label for what in ("heads", "keys", "gradients of keys")):
                self.nbytes += network.sent_bytes - self._before[network]
            self._before[network] = network.sent_bytes

    def __exit__(self, *_: object) -> None:
        if self.package == "deepspeed":
            self._undo()
            return
        self._book()
        self._told.__exit__(None, None, None)


def _networks(model: nn.Module) -> list[Any]:
    """Return the collectives over which the attention of ``model`` sends."""
    from hf_zero.sequence_parallel.attention import sliced_attention

    served = [found for found in map(sliced_attention, model.modules()) if found is not None]
    return list({getattr(found, "across", found.collectives) for found in served})


def train(engine: Any, mpu: Any, batch: Batch) -> float:
    """Train one step; return the loss over all tokens."""
    from torch.distributed.nn import functional

    if isinstance(engine, ContextOfAccelerate):
        return engine.step(batch)
    if mpu is None:
        loss = engine(**batch).loss
    else:
        own = engine(**batch, labels=batch["shift_labels"]).loss
        group = mpu.get_sequence_parallel_group()
        losses = torch.stack(functional.all_gather(own, group=group))
        counts = torch.stack(functional.all_gather((batch["shift_labels"] != -100).sum(), group=group))
        loss = (losses * counts).sum() / counts.sum()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("package", choices=("hf_zero", "deepspeed", "whole", "fsdp2", *STRATEGIES))
    parser.add_argument("size", type=json.loads)
    arguments = parser.parse_args()
    answers = open_answers()
    if arguments.package == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    if arguments.package == "fsdp2":
        engine, mpu = ContextOfAccelerate(arguments.size), None
        engine.step(batch_of("fsdp2", 64, arguments.size))  # says at once where it does not run
    else:
        engine, mpu = start(arguments.package, arguments.size)
    answers.write("{}\n")
    for line in sys.stdin:
        request = json.loads(line)
        batch = batch_of(arguments.package, request["length"], arguments.size)
        if request.get("peak"):
            answers.write(json.dumps({"peak": peak_of(partial(train, engine, mpu, batch))}) + "\n")
            continue
        if request.get("sent"):
            with Sent(arguments.package, engine.module) as sent:
                train(engine, mpu, batch)
            answers.write(json.dumps({"sent": sent.nbytes}) + "\n")
            continue
        dist.barrier()
        began, loss = time.perf_counter(), 0.0
        for _ in range(request["steps"]):
            loss = train(engine, mpu, batch)
        answers.write(json.dumps({"seconds": (time.perf_counter() - began) / request["steps"], "loss": loss}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
