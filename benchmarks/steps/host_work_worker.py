"""One contender of the host-work benchmark, a process of its own. Started by ``host_work.py``.

The process is one rank of a pretended world: torch's ``fake`` process group accepts every collective and sends nothing, so the time of a
step is the work of this host, without waiting. Values are meaningless (nothing is summed); times are valid.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from benchmarks.common.processes import open_answers

ADAMW = {"lr": 1e-4, "weight_decay": 0.1, "fused": True}
Step = Callable[[Tensor], None]


class Block(nn.Module):
    """A transformer's block: two norms, attention, a perceptron; 12 parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 32)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of the same shape, (batch, tokens, width)."""
        shape = (*x.shape[:2], self.heads, -1)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    """Blocks between two projections; the forward returns the loss."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss, a scalar, of ``x`` (batch, tokens, width)."""
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).float().mean()


# ------------------------------------------------------------------------------------------------ contenders


def plain_loop(model: nn.Module, clip: float) -> Step:
    """Return the bare PyTorch step, also for FSDP2."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def step(x: Tensor) -> None:
        model(x).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2(model: Model, bf16: bool, clip: float, reshard: bool) -> Step:
    """Return the step of ``fully_shard`` per block and around all, as in its documentation."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return plain_loop(model, clip)


def engine_loop(model: Model, stage: int, bf16: bool, clip: float, reshard: bool) -> Step:
    """Return the step of ZeRO stage ``stage``; with ``reshard`` every block is gathered again in backward, like FSDP2 by default."""
    import hf_zero

    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if reshard:
        zero["stage3_max_reuse_distance"] = 0
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": clip,
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
    }
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(x: Tensor) -> None:
        engine.backward(engine(x))
        engine.step()

    return step


def build_step(contender: str, model: Model, bf16: bool, clip: float) -> Step:
    """Return the training step of ``bare``, ``fsdp2[-reshard]`` or ``hf_zero-N[-reshard]``."""
    name, _, option = contender.partition("-")
    reshard = contender.endswith("-reshard")
    if name == "bare":
        return plain_loop(model.bfloat16() if bf16 else model, clip)
    if name == "fsdp2":
        return fsdp2(model, bf16, clip, reshard)
    return engine_loop(model, int(option[0]), bf16, clip, reshard)


# ------------------------------------------------------------------------------------------------ loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender")
    parser.add_argument("settings", type=json.loads, help="JSON: blocks, width, tokens, world, dtype, clip")
    arguments = parser.parse_args()
    answers = open_answers()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    settings = arguments.settings
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=settings["world"])
    bf16 = settings["dtype"] == "bf16"
    step = build_step(arguments.contender, Model(settings["blocks"], settings["width"]).train(), bf16, settings["clip"])
    x = torch.ones(1, settings["tokens"], settings["width"], dtype=torch.bfloat16 if bf16 else torch.float32)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        count = json.loads(line)["steps"]
        start = time.process_time()  # processor time of this process, which other processes do not affect
        for _ in range(count):
            step(x)
        answers.write(json.dumps({"seconds": (time.process_time() - start) / count}) + "\n")


if __name__ == "__main__":
    main()
