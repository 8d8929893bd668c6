"""One rank of one contender of ``two_nodes.py``, started in a node's network namespace, also with the Python of a peer's venv.

Needs only torch and the contender's package. ``{"steps": K}`` runs K training steps; the answer has the seconds per step, the bytes
that this node sent over the link per step, and the last loss.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.collectives.slow_network import sent_bytes
from benchmarks.common.processes import open_answers

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
BF16 = torch.bfloat16
Step = Callable[[Tensor], float]


class Model(nn.Module):
    """A decoder of torch's own layers, its head tied to its embedding; the same weights on every rank and in every contender."""

    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = size["width"]
        self.embedding = nn.Embedding(size["vocab"], width)
        self.positions = nn.Parameter(0.02 * torch.randn(size["length"], width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, size["heads"], 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(size["layers"])
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of ``tokens`` (batch, length)."""
        hidden = self.embedding(tokens) + self.positions
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        logits = self.norm(hidden) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_batch(step: int, rank: int, size: dict[str, int]) -> Tensor:
    """Return random tokens (batch, length) that depend on step and rank only."""
    return torch.randint(0, size["vocab"], (size["batch"], size["length"]), generator=torch.Generator().manual_seed(1000 * step + rank))


def torch_loop(model: nn.Module) -> Step:
    """Return the bare PyTorch step: forward, backward, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)  # type: ignore[arg-type]

    def step(batch: Tensor) -> float:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def ddp(model: nn.Module, dtype: torch.dtype) -> Step:
    """Return DDP's step: fp32 masters, computation in bf16, gradients sent in ``dtype``: fp32 like DDP, or bf16 like engines in a bf16
    run.
    """
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if dtype != torch.float32:
        hook: Any = lambda _, bucket: reduce_in(dtype, bucket)  # noqa: E731 - DDP refuses hooks with string annotations
        wrapped.register_comm_hook(None, hook)
    plain = torch_loop(wrapped)

    def step(batch: Tensor) -> float:
        with torch.autocast("cpu", BF16):
            return plain(batch)

    return step


def reduce_in(dtype: torch.dtype, bucket: dist.GradBucket) -> Any:
    """Reduce a bucket in ``dtype``, like torch's ``bf16_compress_hook``, which needs a GPU."""
    sent = bucket.buffer().to(dtype).div_(dist.get_world_size())
    return dist.all_reduce(sent, async_op=True).get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def fsdp2(model: Model, nodes: int) -> Step:
    """Return the step of ``fully_shard`` over all ranks, or over the ranks of each of ``nodes`` nodes (HSDP); bf16, resharded after
    forward.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (nodes, world // nodes), mesh_dim_names=("replicate", "shard")) if nodes > 1 else None
    rest: dict[str, Any] = {"mesh": mesh or init_device_mesh("cpu", (world,)), "mp_policy": MixedPrecisionPolicy(BF16, BF16)}
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=True, **rest)
    fully_shard(model, reshard_after_forward=True, **rest)
    return torch_loop(model)


def engine(package: str, part: dict[str, Any], size: dict[str, int]) -> Step:
    """Return the step of ``hf_zero`` or ``deepspeed``: one configuration and one client optimizer for both."""
    module = __import__(package)
    config = {
        "train_micro_batch_size_per_gpu": size["batch"],
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,  # the loops of DDP and FSDP2 do not clip
        "zero_allow_untested_optimizer": True,
        **part,
    }
    with model_context(package, config):
        model = Model(size)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)  # type: ignore[arg-type]
    built = module.initialize(model=model, optimizer=optimizer, model_parameters=list(model.parameters()), config=config)[0]

    def step(batch: Tensor) -> float:
        loss = built(batch)
        built.backward(loss)
        built.step()
        return float(loss)

    return step


def model_context(package: str, config: dict[str, Any]) -> AbstractContextManager[Any]:
    """Return the context in which the model is built: DeepSpeed's MiCS needs one of its own."""
    if package == "hf_zero" or "mics_shard_size" not in config["zero_optimization"]:
        return nullcontext()
    from deepspeed.runtime.zero.mics import MiCS_Init

    made: AbstractContextManager[Any] = MiCS_Init(config_dict_or_path=config)
    return made


def build_step(kind: str, part: dict[str, Any], size: dict[str, int]) -> Step:
    """Return the training step of a contender: ``ddp``, ``ddp-bf16``, ``fsdp2``, ``fsdp2-nodes``, ``hf_zero`` or ``deepspeed``."""
    if kind.startswith("ddp"):
        return ddp(Model(size), BF16 if kind.endswith("bf16") else torch.float32)
    if kind.startswith("fsdp2"):
        return fsdp2(Model(size), 2 if kind.endswith("nodes") else 1)
    return engine(kind, part, size)


def serve(step: Step, size: dict[str, int], answers: Any) -> None:
    """Run steps on request until standard input ends."""
    answers.write(json.dumps({"ready": True}) + "\n")
    done = 0
    for line in sys.stdin:
        count = json.loads(line)["steps"]
        batches = [make_batch(done + index, dist.get_rank(), size) for index in range(count)]
        dist.barrier()
        before, start = sent_bytes(), time.perf_counter()
        losses = [step(batch) for batch in batches]
        seconds = (time.perf_counter() - start) / count
        dist.barrier()
        done += count
        answer = {"seconds": seconds, "bytes": (sent_bytes() - before) / count, "loss": losses[-1]}
        answers.write(json.dumps(answer) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("part", type=json.loads, help="JSON: of the configuration, for engines")
    parser.add_argument("size", type=json.loads, help="JSON: layers, width, heads, vocab, length, batch")
    arguments = parser.parse_args()
    answers = open_answers()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    serve(build_step(arguments.kind, arguments.part, arguments.size), arguments.size, answers)


if __name__ == "__main__":
    main()
