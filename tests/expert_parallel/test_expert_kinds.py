"""Kinds of experts and of training with experts divided over ranks, each against plain PyTorch."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_zero.observe import logger
from tests.support import parity, ranks, zoo
from tests.support.experts import Records, build, build_listed, check_experts, check_listed, lopsided, mixed, with_adapters, with_experts
from tests.support.parity import Run, check_bitwise

MIXTRAL, QWEN = "MixtralForCausalLM", "Qwen3MoeForCausalLM"
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lists_of_experts(every: bool) -> None:
    ranks.run_ranks(check_lists, 2, every)


def check_lists(every: bool) -> None:
    traces = [check_listed(Run(stage, accumulation=2, clip=0.1), 2) for stage in (1, 3)]
    check_bitwise(traces[1], traces[0], "a list of experts: stage 3 against 1")
    if every:
        check_listed(Run(0, accumulation=2, clip=0.1), 2)
        check_listed(Run(3, dtype="bf16"), 2)
    check_listed(Run(2), 2, lopsided(MIXTRAL))
    check_copy()
    large = Run(3, eps=0.1)  # the norm of its gradients is 55: rounding noise is that much larger
    check_experts("SwitchTransformersForConditionalGeneration", large, 2, limit=replace(parity.limits_of(large), norm=1e-4))


def check_copy() -> None:
    engine = parity.initialize(build_listed(), with_experts(Run(0), 2))
    twin, batch = copy.deepcopy(engine.module), mixed(MIXTRAL)(0, 0, ranks.rank())
    with torch.no_grad():
        assert torch.equal(twin(**batch), engine.module(**batch))
        for expert in twin.layers[0].experts:
            expert.w2.weight.zero_()
            expert.w2.bias.zero_()
        assert not torch.equal(twin(**batch), engine.module(**batch))
    engine.destroy()


def test_buffers_of_lists_of_experts() -> None:
    ranks.run_ranks(check_buffers, 2)


def check_buffers() -> None:
    """Count tokens in buffers of the router and of each expert: the router counts once, and no rank overwrites the counts of experts that
    other ranks hold.
    """

    def count(module: nn.Module) -> None:
        forward = module.forward
        module.register_buffer("seen", torch.zeros(()))

        def counting(tokens: torch.Tensor) -> torch.Tensor:
            module.seen += len(tokens)
            return forward(tokens)

        module.forward = counting  # type: ignore[method-assign]

    model = build_listed()
    layer = model.layers[0]
    for module in (layer.gate, *layer.experts):
        count(module)
    engine, feed = parity.initialize(model, with_experts(Run(1), 2)), mixed(MIXTRAL)
    for step in range(2):
        engine.backward(engine(**feed(step, 0, ranks.rank())))
        engine.step()
    counts = torch.stack([expert.seen for expert in layer.experts])
    assert bool(counts[2 * ranks.rank() :][:2].sum()) and not counts[2 - 2 * ranks.rank() :][:2].sum()
    dist.all_reduce(counts)
    tokens = sum(feed(step, 0, rank)["input_ids"].numel() for step in range(2) for rank in range(2))
    assert counts.sum() == 2 * tokens  # two experts of each token
    assert layer.gate.seen == sum(feed(step, 0, 0)["input_ids"].numel() for step in range(2))
    engine.destroy()


def test_16_bit() -> None:
    """bf16 with fp32 masters; fp16 with a loss scale that overflows first."""
    ranks.run_ranks(check_16_bit, 2)


def check_16_bit() -> None:
    check_experts(QWEN, Run(3, dtype="bf16", accumulation=2, clip=0.1), 2)
    check_experts(MIXTRAL, Run(0, dtype="bf16"), 2, lopsided(MIXTRAL))
    check_experts(QWEN, Run(2, dtype="fp16", steps=3, scale_power=24), 2)


def test_router_loss_checkpointing_and_frozen_parts() -> None:
    ranks.run_ranks(check_kinds, 2)


def check_kinds() -> None:
    check_experts(MIXTRAL, Run(3, clip=0.1), 2, changes=BALANCED)
    for reentrant in (False, True):
        check_experts(QWEN, Run(3 if reentrant else 1), 2, prepare=lambda model, kind=reentrant: checkpointed(model, kind))
    check_experts(MIXTRAL, Run(3), 2, prepare=lambda model: freeze(model, "experts"))
    for stage in (1, 3):
        check_experts(MIXTRAL, Run(stage), 2, prepare=lambda model: with_adapters(model, target_modules=["q_proj", "v_proj"]))
    check_experts(MIXTRAL, Run(1), 2, prepare=lambda model: freeze(model, "self_attn", "embed", "gate.", "layers.0.mlp.experts"))


def checkpointed(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()


def freeze(model: nn.Module, *parts: str) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in parts))


@pytest.mark.slow  # fast: the others of this file
def test_implementations_and_offload(tmp_path: Path) -> None:
    ranks.run_ranks(check_implementations, 2, str(tmp_path))


def check_implementations(folder: str) -> None:
    for name in ("eager", "batched_mm"):
        check_experts(QWEN, Run(2, steps=1), 2, lopsided(QWEN), prepare=lambda model, name=name: model.set_experts_implementation(name))
    host = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    check_experts(QWEN, Run(3, extra={"zero_optimization": host}), 2)
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}, "offload_param": {"device": "nvme", "nvme_path": folder}}
    check_experts(QWEN, Run(3, extra={"zero_optimization": disk}), 2)


@pytest.mark.slow
def test_three_of_six_ranks() -> None:
    """A number of ranks that is no power of two."""
    ranks.run_ranks(check_six, 6)


def check_six() -> None:
    check_experts(MIXTRAL, Run(3, clip=0.1), 3, changes={"num_local_experts": 6})
    check_experts(MIXTRAL, Run(1, dtype="bf16"), 6, changes={"num_local_experts": 6})


def test_load_of_experts() -> None:
    ranks.run_ranks(check_load, 2)


def check_load() -> None:
    """Two ranks whose tokens are all alike: each layer has at most four busy experts of four, and the record says how uneven they are."""
    lines = _Lines()
    with lines.heard():
        _check_records(lines, each=True)
        _check_records(lines, each=False)


def _check_records(lines: _Lines, each: bool) -> None:
    engine = parity.initialize(build(MIXTRAL), with_experts(Run(1, extra={"hf_zero": {"expert_load": 2, "expert_load_each": each}}), 2))
    records: list[dict[str, float]] = []
    engine.reports.sinks.append(Records(records))
    counts: dict[str, torch.Tensor] = {}
    for name, module in engine.module.named_modules():
        if name.endswith("mlp.gate"):
            counts[name] = torch.zeros(4)
            module.register_forward_hook(lambda _module, _inputs, output, own=counts[name]: _add_chosen(own, output))
    for step in range(2):
        parity.micro_step(engine, lopsided(MIXTRAL)(step, 0, ranks.rank()), zoo.loss, 0)
    assert len(records) == 2 and not any("Experts" in key for key in records[0])
    for name, own in counts.items():
        dist.all_reduce(own)
        layer = name.replace("gate", "experts")
        assert math.isclose(records[1][f"Train/Experts/{layer}/imbalance"], float(own.max() / own.mean()))
        told = {int(key.rpartition("/")[2]): value for key, value in records[1].items() if key.startswith(f"Train/Experts/{layer}/tokens/")}
        assert told == (dict(enumerate(own.tolist())) if each else {})
        if ranks.rank() == 0:
            assert lines.take(f"{layer}: tokens of its experts: {' '.join(str(int(count)) for count in own)}") == each
        of_ranks = own.view(2, 2).sum(dim=1)
        assert math.isclose(records[1][f"Train/Experts/{layer}/imbalance_of_ranks"], float(of_ranks.max() / of_ranks.mean()))
    assert counts and records[1]["Train/Experts/imbalance"] > 1
    if ranks.rank() == 0:
        worst = max(counts.values(), key=lambda own: float(own.max() / own.mean()))
        busiest = (
            f"expert {int(worst.argmax())} had {int(worst.max())} of {int(worst.sum())} tokens, {int((worst == 0).sum())} of 4 experts none"
        )
        assert lines.take(busiest)
    engine.destroy()


class _Lines(logging.Handler):
    """What the package logs; a line is taken once."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def take(self, text: str) -> bool:
        found = next((line for line in self._lines if text in line), None)
        if found is not None:
            self._lines.remove(found)
        return found is not None

    @contextmanager
    def heard(self) -> Iterator[None]:
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)


def _add_chosen(counts: torch.Tensor, output: Any) -> None:
    counts += torch.bincount(output[2].flatten(), minlength=4)
