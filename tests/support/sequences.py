"""Training over slices of sequences, compared with training on whole ones, for the ``test_sequence_*`` files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import Tensor, nn

import hf_zero
from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
from tests.support import parity, ranks
from tests.support.models import VOCAB, Batch
from tests.support.parity import Run

LENGTH = 24
LOSS, NORM, WEIGHT = 2e-6, 2e-5, 5e-5


@dataclass(frozen=True)
class Data:
    """Batches of whole sequences. ``padding``: "" or the side that has padding; ``prompt``: tokens at the start without a label."""

    rows: int = 2
    length: int = LENGTH
    padding: str = ""
    prompt: int = 0
    packed: bool = False

    def batch(self, *seed: int) -> Batch:
        """Return the whole batch of (step, micro-step, group); the same on every rank."""
        generator = torch.Generator().manual_seed(hash((7, *seed)) % 2**31)
        tokens = torch.randint(3, VOCAB, (self.rows, self.length), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens.clone(), "position_ids": torch.arange(self.length).expand(self.rows, -1).clone()}
        if self.padding:
            mask = torch.ones_like(tokens)
            for row in range(self.rows):
                count = 1 + (row * 5) % (self.length // 2)
                part = slice(0, count) if self.padding == "left" else slice(self.length - count, None)
                mask[row, part] = 0
            batch["attention_mask"] = mask
            batch["labels"][mask == 0] = -100
        batch["labels"][:, : self.prompt] = -100
        if self.packed:
            for row in range(self.rows):
                cut = 5 + 3 * row  # in the middle of a slice; the second sequence begins at 0 again
                batch["position_ids"][row, cut:] = torch.arange(self.length - cut)
                batch["labels"][row, cut] = -100
        return {name: value.to(ranks.device()) for name, value in batch.items()}


def llama(kv_heads: int = 2, heads: int = 4, implementation: str = "sdpa", **extra: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=heads * 8, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=64, attn_implementation=implementation, use_cache=False, **extra,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, num_local_experts=4, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return the model with weights that depend on ``seed`` only, larger than at initialisation, so that attention matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().train()
        for param in model.parameters():
            if param.dim() > 1:
                param.data.mul_(5)
    return model


def cut(batch: Batch, rank: int, size: int) -> Batch:
    """Return slice ``rank`` of a batch, with labels that were shifted before."""
    batch = dict(batch)
    batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
    length = batch["input_ids"].shape[1] // size
    return {name: value[:, rank * length : (rank + 1) * length].contiguous() for name, value in batch.items()}


def loss_over_slices(model: Any, batch: Batch, group: dist.ProcessGroup) -> Tensor:
    """Return the mean loss over all tokens of the group's sequences, computed like in Trainer and accelerate's documentation."""
    loss = model(**batch, labels=batch["shift_labels"]).loss
    losses = torch.stack(torch.distributed.nn.functional.all_gather(loss, group=group))
    tokens = (batch["shift_labels"] != -100).sum()
    counts = torch.stack(torch.distributed.nn.functional.all_gather(tokens, group=group))
    safe = torch.where(counts > 0, losses, torch.zeros_like(losses))
    return (safe * counts).sum() / counts.sum().clamp(min=1)


@dataclass
class Result:
    """Results of a run on one rank."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def whole(make: Callable[[], nn.Module], run: Run, data: Data, groups: int) -> Result:
    """Train in plain PyTorch on whole sequences; the loss is the mean over groups and micro-steps of each batch's mean over tokens."""
    model = build(make).to(ranks.device())
    low = run.dtype != "fp32"
    if low:
        model = model.to(parity.DTYPES[run.dtype])
    params = [param for param in model.parameters() if param.requires_grad]
    masters = [param.detach().float().clone().requires_grad_() for param in params] if low else params
    optimizer = torch.optim.AdamW(masters, lr=run.lr, betas=(0.9, 0.99), eps=run.eps, weight_decay=run.weight_decay)
    losses, norms = [], []
    for step in range(run.steps):
        total = 0.0
        sums = [torch.zeros_like(master) for master in masters]
        for micro in range(run.accumulation):
            for group in range(groups):
                loss = model(**data.batch(step, micro, group)).loss
                (loss / (run.accumulation * groups)).backward()
                total += float(loss.detach()) / (run.accumulation * groups)
                for gradient, param in zip(sums, params, strict=True):
                    gradient += param.grad.float() if param.grad is not None else 0
                    param.grad = None
        for master, gradient in zip(masters, sums, strict=True):
            master.grad = gradient
        # In fp64: torch's own sum over a million fp32 elements is off by more than NORM.
        norm = torch.linalg.vector_norm(torch.stack([gradient.double().norm() for gradient in sums]))
        torch.nn.utils.clip_grads_with_norm_(masters, run.clip or 1e30, norm.float())
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        if low:
            for param, master in zip(params, masters, strict=True):
                param.data.copy_(master.data)
        losses.append(total)
    return Result(losses, norms, {name: value.detach().float().cpu() for name, value in model.state_dict().items()})


def sliced(make: Callable[[], nn.Module], run: Run, data: Data, size: int, implementation: str | None = "sdpa") -> Result:
    """Train through ``initialize`` on all ranks, where groups of ``size`` ranks share their samples."""
    model = build(make)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation=implementation, sequence_parallel_size=size, micro_batch_size=data.rows
    )
    assert mpu is not None
    engine = hf_zero.initialize(model=model, config=run.config(), mpu=mpu)[0]
    losses, norms = [], []
    for step in range(run.steps):
        parts = []
        for micro in range(run.accumulation):
            batch = cut(data.batch(step, micro, ranks.rank() // size), ranks.rank() % size, size)
            loss = loss_over_slices(engine, batch, mpu.get_sequence_parallel_group())
            parts.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
        losses.append(parity.mean_over_ranks(parts))
        norms.append(parity.as_float(engine.get_global_grad_norm()))
    weights = engine._consolidated_16bit_state_dict()
    return Result(losses, norms, {name: value.float() for name, value in (weights or {}).items()})


def compare(found: Result, expected: Result, label: str = "", factor: float = 1.0) -> None:
    """Raise unless loss and norm of every step and, on rank 0, the final weights agree."""
    for step, (mine, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        assert abs(mine - theirs) <= factor * LOSS * abs(theirs), (label, step, found.losses, expected.losses)
    for step, (mine, theirs) in enumerate(zip(found.norms, expected.norms, strict=True)):
        assert abs(mine - theirs) <= factor * NORM * abs(theirs), (label, step, found.norms, expected.norms)
    if ranks.rank() == 0:
        assert found.weights.keys() == expected.weights.keys(), label
        for name, value in found.weights.items():
            limit = factor * WEIGHT * expected.weights[name].abs().max().clamp(min=0.01)
            assert (value - expected.weights[name]).abs().max() <= limit, (label, name)


def check(make: Callable[[], nn.Module], run: Run, data: Data, size: int, implementation: str | None = "sdpa", factor: float = 1.0) -> None:
    """Check on every rank that training over slices equals training on whole sequences."""
    expected = whole(make, run, data, ranks.world() // size)
    compare(sliced(make, run, data, size, implementation), expected, f"{run} {data}", factor)
