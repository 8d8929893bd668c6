"""Ranks that have nothing of something: no tokens for their experts, no loss, nothing trainable. None waits for ever, and all is exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import parity, ranks, zoo
from tests.support.experts import build, build_listed, check_experts, mixed, with_adapters, with_experts
from tests.support.models import Batch
from tests.support.parity import Run, check_training

MIXTRAL = "MixtralForCausalLM"
ON_EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_with_nothing(every: bool) -> None:
    ranks.run_ranks(check_stacked, 2, every)
    ranks.run_ranks(check_listed, 2, every)


def check_stacked(every: bool) -> None:
    for stage in (0, 2, 3) if every else (0,):
        check_experts(MIXTRAL, Run(stage, clip=0.1), 2, prepare=idle)
    for stage in (1, 3) if every else (3,):
        check_training(lambda: build(MIXTRAL), half_masked, summed_loss, with_experts(Run(stage), 2), label="a rank without labels")
        if every:
            check_experts(MIXTRAL, Run(stage), 2, prepare=only_routers)
        check_experts(MIXTRAL, Run(stage), 2, prepare=lambda model: with_adapters(idle(model), **ON_EXPERTS))
    for reentrant in (False, True) if every else (False,):
        check_experts(MIXTRAL, Run(3), 2, prepare=lambda model, kind=reentrant: recomputed(idle(model), kind))
    check_uneven_evaluation()


def idle(model: nn.Module) -> nn.Module:
    """Routers send all tokens to the experts of the first rank: the second has none of any rank."""
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(_to_first)
    return model


def _to_first(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    logits, weights, chosen = output
    return logits, weights, torch.arange(chosen.shape[1]).expand_as(chosen).contiguous()


def half_masked(step: int, micro: int, rank: int) -> Batch:
    """Batches of which rank 1 has no label."""
    batch = mixed(MIXTRAL)(step, micro, rank)
    return {**batch, "labels": torch.full_like(batch["labels"], -100)} if rank == 1 else batch


def summed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Over a number of labels that does not depend on the rank, as Trainer's: without labels it is 0."""
    logits = zoo.forward(model, {"input_ids": batch["input_ids"]}).logits.flatten(0, 1)
    return nn.functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum") / batch["labels"].numel()


def only_routers(model: nn.Module) -> None:
    """Whatever else there is stays."""
    for name, param in model.named_parameters():
        param.requires_grad_("mlp.gate." in name)


def recomputed(model: Any, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()


def check_uneven_evaluation() -> None:
    """Ranks with batches of other sizes, one of them in training; a rank that decodes longer than the other."""
    model = build(MIXTRAL)
    engine = parity.initialize(model, with_experts(Run(3), 2))
    parity.micro_step(engine, mixed(MIXTRAL)(0, 0, ranks.rank()), zoo.loss, 0)
    alone = build(MIXTRAL).eval()
    with torch.no_grad():
        alone.load_state_dict(parity.full_masters(engine), strict=False)
    engine.eval()
    for count in (1, 2):
        batch = zoo.batch(MIXTRAL, torch.Generator().manual_seed(count), rows=1 + 2 * ranks.rank() * count)
        with torch.no_grad():
            torch.testing.assert_close(zoo.loss(engine, batch), zoo.loss(alone, batch), rtol=1e-5, atol=1e-6)
    tokens = torch.full((1, 3), zoo.FIRST_TOKEN + ranks.rank())
    length = {"max_new_tokens": 2 + 3 * ranks.rank(), "do_sample": False}
    assert torch.equal(model.generate(tokens, **length), alone.generate(tokens, **length))
    engine.destroy()


# ------------------------------------------------------------------------------------------------ experts in a list


def check_listed(every: bool) -> None:
    """All tokens at the first rank's experts; one rank's experts trainable, those of the other frozen."""
    forward = lambda model, batch: model(**batch)  # noqa: E731
    for stage in (0, 1, 3) if every else (1, 3):
        check_training(_one_sided, mixed(MIXTRAL), forward, with_experts(Run(stage), 2), label="a list of experts, one rank idle")
        check_training(_one_trained, mixed(MIXTRAL), forward, with_experts(Run(stage), 2), label="a list of experts, one trained")


def _one_sided() -> nn.Module:
    model = build_listed()
    with torch.no_grad():
        model.embed.weight.abs_()
        gate = model.layers[0].gate.weight
        gate.copy_(gate.abs() * torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None])
    return model


def _one_trained() -> nn.Module:
    model = build_listed()
    for name, param in model.named_parameters():
        param.requires_grad_("experts.3." in name)
    return model
