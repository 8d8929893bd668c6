"""One rank of one contender of the benchmark of pipelines. Started by ``pipelines.py``, also with a peer's Python.

It reads one JSON object per line from standard input. ``{"steps": K}`` runs K training steps and answers with the seconds per step, the CPU
seconds, the bytes sent in one step and the last loss; ``{"forwards": K}`` the same for forwards without gradients; ``{"trace": true}``
gives the times at which each part passed each stage in one step; ``{"peak": true, "parts": N}`` the bytes of tensors that forward and
backward of N parts add at their peak. For the contender ``pair``, several contenders in these processes, ``{"pairs": K}`` gives the
seconds of K steps of each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.collectives.slow_network import LINK, sent_bytes
from benchmarks.common.peak_memory import peak_of
from benchmarks.common.processes import open_answers
from benchmarks.common.training import ADAMW
from benchmarks.parallel.experts_worker import written_bytes
from benchmarks.parallel.pipeline_timeline import recorded, recorded_passes

Parts = list[Tensor]


def build(size: dict[str, Any]) -> Any:
    """Return a Llama with the same weights on every rank and in every contender."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocab"],
        hidden_size=size["width"],
        intermediate_size=size["width"] * 8 // 3,
        num_hidden_layers=size["layers"],
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=size["length"],
        use_cache=False,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).train()


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss of the next tokens, as transformers computes it."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Piece(nn.Module):
    """Some layers of a Llama, cut out by hand, as users of torch's and DeepSpeed's pipelines do for each architecture.

    Args:
        model: The whole model.
        span: The layers of this piece.
        first: Add the embedding before them.
        last: Add the norm and the head after them.
    """

    def __init__(self, model: Any, span: range, first: bool, last: bool) -> None:
        super().__init__()
        self.embedding = model.model.embed_tokens if first else None
        self.layers = nn.ModuleList(model.model.layers[index] for index in span)
        self.rotary = model.model.rotary_emb if len(span) else None
        self.norm, self.head = (model.model.norm, model.lm_head) if last else (None, None)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states (or logits) for hidden states (or tokens)."""
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        if self.rotary is not None:
            places = torch.arange(hidden.shape[1]).unsqueeze(0)
            positions = self.rotary(hidden, places)
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=positions, position_ids=places)
        return hidden if self.head is None else self.head(self.norm(hidden))  # type: ignore[misc]


class ByHand:
    """``torch.distributed.pipelining`` with layers cut by hand; the option ``norm`` adds the global norm that clipping needs."""

    def __init__(self, options: dict[str, Any], size: dict[str, Any]) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        model, rank, world, each = build(size), dist.get_rank(), dist.get_world_size(), options.get("each", 1)
        count = world * each
        indices = [rank + world * turn for turn in range(each)]
        if options["schedule"] == "ZBVZeroBubble":
            indices = [rank, count - 1 - rank]
        bounds = [size["layers"] * index // count for index in range(count + 1)]
        pieces = [Piece(model, range(bounds[index], bounds[index + 1]), index == 0, index == count - 1) for index in indices]
        stages = [PipelineStage(piece, index, count, torch.device("cpu")) for piece, index in zip(pieces, indices, strict=True)]
        kind = get_schedule_class(options["schedule"])
        self._schedule: Any = kind(stages if each > 1 else stages[0], n_microbatches=size["parts"], loss_fn=loss_of)
        self._params = [param for piece in pieces for param in piece.parameters()]
        self._optimizer = torch.optim.AdamW(self._params, **ADAMW)
        self._first, self._last = 0 in indices, count - 1 in indices
        self._norm = options.get("norm", False)

    def gradients(self, parts: Parts) -> float:
        """Run forward and backward; return the mean loss on the rank of the last stage."""
        tokens, losses = torch.cat(parts), list[Tensor]()
        self._schedule.step(*((tokens,) if self._first else ()), target=tokens if self._last else None, losses=losses, return_outputs=False)
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    def step(self) -> None:
        """Run the optimizer's step, after the norm of all stages' gradients if requested."""
        if self._norm:
            square = torch.nn.utils.get_total_norm([param.grad for param in self._params if param.grad is not None]) ** 2
            dist.all_reduce(square)
            if not math.isfinite(float(square.sqrt())):
                return
        self._optimizer.step()
        self._optimizer.zero_grad()


class Engine:
    """hf_zero's engine: with one of torch's schedules, with ``script`` like Trainer, or without a pipeline."""

    def __init__(self, options: dict[str, Any], size: dict[str, Any]) -> None:
        import hf_zero

        self._schedule = options.get("schedule", "")
        self._defers = options.get("defers", False)
        self._replicas = dist.get_world_size() if not self._schedule else 1
        rows, parts = size["rows"], size["parts"]
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": rows * parts if self._schedule == "script" else rows,
            "gradient_accumulation_steps": 1 if self._schedule == "script" else parts // self._replicas,
            "zero_optimization": {"stage": options.get("zero", 0)},
            "gradient_clipping": 0.0,  # the other contenders do not clip
        }
        if options.get("zero") == 3:  # otherwise a model of this size would stay gathered
            config["zero_optimization"].update(stage3_param_persistence_threshold=0, stage3_max_reuse_distance=0)
        if self._schedule:
            section = {"stages": dist.get_world_size(), "micro_batches": parts if self._schedule == "script" else "auto"}
            if self._schedule != "script":
                section |= {"schedule": self._schedule, "stages_per_rank": options.get("each", 1)}
            config["pipeline"] = section
        model = build(size)
        self._engine = hf_zero.initialize(model=model, optimizer=lambda params: torch.optim.AdamW(params, **ADAMW), config=config)[0]

    def gradients(self, parts: Parts) -> float:
        """Run forward and backward; return the mean loss."""
        if self._schedule not in ("", "script"):
            from hf_zero.pipeline.train import backward_of

            return float(backward_of(self._engine, [{"input_ids": part, "labels": part} for part in parts]))
        if self._schedule == "script":
            return self._micro_step(torch.cat(parts))
        losses = []
        own = parts[dist.get_rank() :: self._replicas]
        for place, part in enumerate(own):
            last = place == len(own) - 1
            with self._engine.no_sync() if self._defers and not last else nullcontext():
                losses.append(self._micro_step(part))
            if not last:
                self._engine.step()
        return sum(losses) / len(losses)

    def _micro_step(self, tokens: Tensor) -> float:
        loss = self._engine(input_ids=tokens, labels=tokens).loss
        self._engine.backward(loss)
        return float(loss.detach())

    def step(self) -> None:
        """Run the optimizer's step."""
        self._engine.step()

    def forward(self, parts: Parts) -> None:
        """Compute the logits of all parts."""
        self._engine.module.eval()
        with torch.no_grad():
            self._engine(input_ids=torch.cat(parts))


class Module:
    """DeepSpeed's ``PipelineModule``, whose ``train_batch`` is forward, backward and step in one."""

    def __init__(self, options: dict[str, Any], size: dict[str, Any]) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed("gloo")
        model, layers = build(size), size["layers"]
        pieces = [Piece(model, range(0), True, False)]
        pieces += [Piece(model, range(index, index + 1), False, False) for index in range(layers)]
        pieces.append(Piece(model, range(0), False, True))
        module = PipelineModule(pieces, num_stages=dist.get_world_size(), loss_fn=loss_of, partition_method="uniform")
        config = {
            "train_micro_batch_size_per_gpu": size["rows"],
            "gradient_accumulation_steps": size["parts"],
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
        self._engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]

    def gradients(self, parts: Parts) -> float:
        """Run forward, backward and step; return the loss."""
        return float(self._engine.train_batch(iter([(part, part) for part in parts])))

    def step(self) -> None:
        """Do nothing: ``gradients`` includes the step."""


class Ddp:
    """DistributedDataParallel; each rank has its share of the parts."""

    def __init__(self, options: dict[str, Any], size: dict[str, Any]) -> None:
        self._model = nn.parallel.DistributedDataParallel(build(size), gradient_as_bucket_view=True)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), **ADAMW)

    def gradients(self, parts: Parts) -> float:
        """Run forward and backward; return the mean loss."""
        own, losses = parts[dist.get_rank() :: dist.get_world_size()], []
        for place, part in enumerate(own):
            self._model.require_backward_grad_sync = place == len(own) - 1
            loss = self._model(input_ids=part, labels=part).loss
            (loss / len(own)).backward()
            losses.append(float(loss.detach()))
        return sum(losses) / len(losses)

    def step(self) -> None:
        """Run the optimizer's step."""
        self._optimizer.step()
        self._optimizer.zero_grad()


class Forward:
    """Contender that runs the pipelined forward of transformers (``pp_size``), which has no backward."""

    def __init__(self, options: dict[str, Any], size: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        box = [""]
        if dist.get_rank() == 0:
            box = [tempfile.mkdtemp(prefix="pipelines_")]
            build(size).save_pretrained(box[0])
        dist.broadcast_object_list(box)
        settings = DistributedConfig(pp_size=dist.get_world_size())
        self._model = AutoModelForCausalLM.from_pretrained(box[0], distributed_config=settings, dtype=torch.float32).eval()

    def forward(self, parts: Parts) -> None:
        """Compute the logits of all parts."""
        with torch.no_grad():
            self._model(input_ids=torch.cat(parts))


class Pair:
    """hf_zero, layers cut by hand without and with the norm, and DeepSpeed, in the same processes, for steps in turn."""

    def __init__(self, options: dict[str, Any], size: dict[str, Any]) -> None:
        by_hand = {"torch": ByHand(options, size), "norm": ByHand({**options, "norm": True}, size)}
        self._members: dict[str, Any] = {"hf_zero": Engine(options, size), **by_hand}
        if options.get("deepspeed"):
            self._members["deepspeed"] = Module(options, size)

    def steps(self, count: int, size: dict[str, Any]) -> dict[str, list[float]]:
        """Return the seconds of ``count`` steps of each on the slowest rank, after two that do not count; the first in turn rotates."""
        seconds: dict[str, list[float]] = {name: [] for name in self._members}
        for step in range(count + 2):
            names = list(self._members)
            for name in names[step % len(names) :] + names[: step % len(names)]:
                dist.barrier()
                began = time.perf_counter()
                train(self._members[name], batch_of(step, size))
                dist.barrier()
                seconds[name].append(time.perf_counter() - began)
        return {name: found[2:] for name, found in seconds.items()}


KINDS: dict[str, Any] = {"hf_zero": Engine, "torch": ByHand, "deepspeed": Module, "ddp": Ddp, "transformers": Forward, "pair": Pair}


def batch_of(step: int, size: dict[str, Any]) -> Parts:
    """Return the parts of a batch, (rows, length) each, which depend only on the step."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, size["vocab"], (size["rows"], size["length"]), generator=generator) for _ in range(size["parts"])]


def traced(trainer: Any, parts: Parts, script: bool) -> dict[str, Any]:
    """Return the events of one step."""
    with recorded_passes() if script else recorded() as events:
        trainer.gradients(parts)
    trainer.step()
    return {"events": events}


def timed(call: Callable[[Parts], float | None], done: int, count: int, size: dict[str, Any]) -> dict[str, Any]:
    """Return seconds, CPU seconds, bytes and the last result of some calls; bytes of the interface if the rank has a link of its own."""
    batches, loss = [batch_of(done + index, size) for index in range(count)], None
    counter = sent_bytes if os.environ.get("GLOO_SOCKET_IFNAME") == LINK else written_bytes
    dist.barrier()
    sent, began, computed = counter(), time.perf_counter(), time.process_time()
    for batch in batches:
        loss = call(batch)
    computed = (time.process_time() - computed) / count
    dist.barrier()
    seconds = (time.perf_counter() - began) / count
    return {"seconds": seconds, "computed": computed, "sent": (counter() - sent) / count, "loss": loss or 0.0}


def train(trainer: Any, parts: Parts) -> float:
    """Train one step; return the loss."""
    loss = float(trainer.gradients(parts))
    trainer.step()
    return loss


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("options", type=json.loads)
    parser.add_argument("size", type=json.loads)
    arguments = parser.parse_args()
    answers, size, done = open_answers(), arguments.size, 0
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = KINDS[arguments.kind](arguments.options, size)
    answers.write("{}\n")
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("pairs"):
            found = trainer.steps(request["pairs"], size)
        elif request.get("trace"):
            dist.barrier()
            found = traced(trainer, batch_of(done, size), arguments.options.get("schedule") == "script")
            done += 1
        elif request.get("peak"):
            train(trainer, batch_of(done, {**size, "parts": request["parts"]}))  # creates the tensors that stay between steps
            found = {"peak": peak_of(partial(trainer.gradients, batch_of(done + 1, {**size, "parts": request["parts"]})))}
            trainer.step()
            done += 2
        elif request.get("forwards"):
            found = timed(trainer.forward, 0, request["forwards"], size)
        else:
            found = timed(partial(train, trainer), done, request["steps"], size)
            done += request["steps"]
        answers.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
