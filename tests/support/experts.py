"""Tiny mixtures of experts, trained with expert parallelism and compared with plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tests.support import ranks, zoo
from tests.support.models import Batch
from tests.support.parity import Difference, Feed, Run, Trace, check_training


def build(name: str, changes: dict[str, Any] | None = None) -> nn.Module:
    """Return the zoo's model, with weights large enough that a router distinguishes tokens."""
    model = zoo.build(name, changes=changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def mixed(name: str) -> Feed:
    """Return a feed with different tokens on every rank and in every step."""
    return lambda step, micro, rank: zoo.batch(name, torch.Generator().manual_seed(1 + step + 10 * micro + 100 * rank))


def lopsided(name: str) -> Feed:
    """Return a feed that repeats one token per rank, so that all tokens of a rank use the same few experts and some ranks get none."""

    def feed(step: int, micro: int, rank: int) -> Batch:
        batch = zoo.batch(name, torch.Generator().manual_seed(step))
        return {key: torch.full_like(value, zoo.FIRST_TOKEN + 7 * rank + micro + step) for key, value in batch.items()}

    return feed


def with_adapters(model: Any, **targets: Any) -> nn.Module:
    """Return the model with PEFT's LoRA, with fixed weights that are not zero."""
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return get_peft_model(model, LoraConfig(r=2, init_lora_weights=False, **targets))


def with_experts(run: Run, size: int) -> Run:
    """Return ``run`` with experts divided over ``size`` ranks."""
    return replace(run, extra={**run.extra, "expert_parallel": {"enabled": True, "autoep_size": size}})


def with_split_layers(run: Run, tp: int) -> Run:
    """Return ``run`` with layers split over ``tp`` ranks."""
    return replace(run, extra={**run.extra, "tensor_parallel": {"autotp_size": tp}})


def alike(feed: Feed, tp: int) -> Feed:
    """Return ``feed`` with the same batches on each ``tp`` adjacent ranks."""
    return lambda step, micro, rank: feed(step, micro, rank // tp)


def check_experts(
    name: str,
    run: Run,
    size: int,
    feed: Feed | None = None,
    changes: dict[str, Any] | None = None,
    prepare: Callable[[nn.Module], Any] | None = None,
    limit: Difference | None = None,
) -> Trace:
    """Train the zoo's model ``name`` with experts over ``size`` ranks; rank 0 compares with plain PyTorch."""

    def make() -> nn.Module:
        model = build(name, changes)
        prepared = prepare(model) if prepare is not None else None
        return prepared if isinstance(prepared, nn.Module) else model

    label = f"{name}, experts over {size} of {ranks.world()} ranks"
    return check_training(make, feed or mixed(name), zoo.loss, with_experts(run, size), label=label, limit=limit)


class Expert(nn.Module):
    """A gated feed-forward layer, as in remote code."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width), nn.Linear(width, 2 * width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(tokens)) * self.w3(tokens))


class ListedBlock(nn.Module):
    """The mixture layer of transformers 4.57: a list of experts, called one by one for the tokens routed to them."""

    def __init__(self, width: int, count: int, jitter: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(count))
        self.jitter = jitter

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length, width = hidden_states.shape
        if self.jitter:
            hidden_states *= torch.empty_like(hidden_states).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
        hidden_states = hidden_states.view(-1, width)
        logits = self.gate(hidden_states)
        weights, chosen = torch.topk(logits.softmax(dim=1, dtype=torch.float), 2, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(hidden_states.dtype)
        final = torch.zeros_like(hidden_states)
        mask = nn.functional.one_hot(chosen, num_classes=len(self.experts)).permute(2, 1, 0)
        for index in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            place, token = torch.where(mask[index[0]])
            final.index_add_(0, token, self.experts[index[0]](hidden_states[token]) * weights[token, place, None])
        return final.view(batch, length, width), logits


class ListedModel(nn.Module):
    """Two such blocks after an embedding, with a loss over tokens and one that balances the router."""

    def __init__(self, count: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(zoo.VOCAB, width)
        self.layers = nn.ModuleList(ListedBlock(width, count) for _ in range(2))
        self.head = nn.Linear(width, zoo.VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, balance = self.embed(input_ids), 0.0
        for layer in self.layers:
            mixed_states, logits = layer(hidden)
            hidden = hidden + mixed_states
            balance = balance + logits.softmax(-1).mean(dim=0).square().sum()
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()) + 0.1 * balance


def build_listed() -> nn.Module:
    """Return a ``ListedModel`` with fixed weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ListedModel()
    with torch.no_grad():
        for layer in model.layers:
            layer.gate.weight.mul_(3)
    return model


def check_listed(run: Run, size: int, feed: Feed | None = None) -> Trace:
    """Train the model above with experts over ``size`` ranks; rank 0 compares with plain PyTorch."""
    forward = lambda model, batch: model(**batch)  # noqa: E731
    return check_training(build_listed, feed or mixed("MixtralForCausalLM"), forward, with_experts(run, size), label="a list of experts")


class Records:
    """A monitor that keeps its records."""

    def __init__(self, records: list[dict[str, float]]) -> None:
        self._records = records

    def write(self, record: dict[str, float], samples: int) -> None:
        self._records.append(record)

    def close(self) -> None:
        pass
