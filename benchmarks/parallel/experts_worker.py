"""One rank of one contender of the benchmark of experts. Started by ``experts.py``, also with a peer's Python.

It reads one JSON object per line from standard input. ``{"steps": K}`` runs K training steps and answers with the seconds per step, the
bytes sent in one step and the last loss; ``{"peak": true}`` with the bytes of tensors that a step adds at its peak and those that stay
between steps; ``{"least": true}`` with the lower bound of a rank's bytes in a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.peak_memory import peak_of
from benchmarks.common.processes import open_answers
from benchmarks.common.training import ADAMW
from benchmarks.parallel.expert_memory import least_bytes

Batch = dict[str, torch.Tensor]


def config_of(size: dict[str, Any]) -> Any:
    """Return the configuration of a Mixtral or a Qwen3-MoE."""
    from transformers import MixtralConfig, Qwen3MoeConfig

    common = {
        "vocab_size": size["vocab"],
        "hidden_size": size["width"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": size["width"] // 4,
        "num_experts_per_tok": size["choices"],
        "max_position_embeddings": size["length"],
        "use_cache": False,
    }
    if size["kind"] == "mixtral":
        return MixtralConfig(num_local_experts=size["experts"], intermediate_size=size["inner"], **common)
    return Qwen3MoeConfig(
        num_experts=size["experts"], moe_intermediate_size=size["inner"], intermediate_size=size["inner"], norm_topk_prob=True, **common
    )


def build(size: dict[str, Any]) -> nn.Module:
    """Return the model, with the same weights on every rank."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(size), dtype=torch.float32).train()


class Plain:
    """transformers' own expert parallelism: FSDP2 for all other parameters, a loop in plain PyTorch."""

    def __init__(self, size: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        world, box = dist.get_world_size(), [""]
        if dist.get_rank() == 0:
            box = [tempfile.mkdtemp(prefix="experts_")]
            build(size).save_pretrained(box[0])
        dist.broadcast_object_list(box)
        settings = DistributedConfig(ep_size=world, fsdp_size=world, ep_implementation="all_to_all")
        self.model = AutoModelForCausalLM.from_pretrained(box[0], distributed_config=settings, dtype=torch.float32).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    def train(self, batch: Batch) -> float:
        """Train one step; return this rank's loss."""
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


class Engine:
    """An engine of ``hf_zero`` or ``deepspeed``."""

    def __init__(self, package: str, stage: int, experts: int, size: dict[str, Any]) -> None:
        if package == "deepspeed":
            import deepspeed as library
        else:
            import hf_zero as library
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 2_000_000, "allgather_bucket_size": 2_000_000},
        }
        if stage == 3:  # otherwise models of this size would stay gathered
            config["zero_optimization"].update(stage3_param_persistence_threshold=0, stage3_max_reuse_distance=0)
        if experts > 1:
            preset = {"preset_model": size["kind"]} if package == "deepspeed" else {}
            config["expert_parallel"] = {"enabled": True, "autoep_size": experts, **preset}
        model = build(size)
        params = {name: value for name, value in ADAMW.items() if name != "fused"}
        config["optimizer"] = {"type": "AdamW", "params": {**params, "torch_adam": True}}
        self.engine = library.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def train(self, batch: Batch) -> float:
        """Train one step; return this rank's loss."""
        loss = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())


def batch_of(size: dict[str, Any]) -> Batch:
    """Return this rank's sequence."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, size["vocab"], (1, size["length"]), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def written_bytes() -> int:
    """Return the bytes that this process has written, mostly to sockets, through which gloo sends."""
    with open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def resting_bytes() -> int:
    """Return the bytes of the storages of all existing tensors."""
    gc.collect()
    sizes = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor):
            local = found.to_local() if hasattr(found, "to_local") else found
            sizes[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(sizes.values())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("package", choices=("hf_zero", "deepspeed", "transformers"))
    parser.add_argument("stage", type=int)
    parser.add_argument("experts", type=int)
    parser.add_argument("size", type=json.loads)
    arguments = parser.parse_args()
    answers = open_answers()
    if arguments.package == "deepspeed":
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    if arguments.package == "transformers":
        trainer: Any = Plain(arguments.size)
    else:
        trainer = Engine(arguments.package, arguments.stage, arguments.experts, arguments.size)
    batch = batch_of(arguments.size)
    answers.write("{}\n")
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("peak"):
            resting = resting_bytes()
            answers.write(json.dumps({"peak": peak_of(partial(trainer.train, batch)), "resting": resting}) + "\n")
            continue
        if request.get("least"):
            least = least_bytes(build(arguments.size), batch, arguments.experts, arguments.stage)
            answers.write(json.dumps({"least": least}) + "\n")
            continue
        dist.barrier()
        steps, sent, began, loss = request["steps"], written_bytes(), time.perf_counter(), 0.0
        for _ in range(steps):
            loss = trainer.train(batch)
        seconds = (time.perf_counter() - began) / steps
        answers.write(json.dumps({"seconds": seconds, "sent": (written_bytes() - sent) / steps, "loss": loss}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
