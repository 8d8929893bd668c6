"""Layers that backward calls again run over the sequences of their own forward, whatever forwards and modes have come since."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.comm.topology import build_topology, context_topology
from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
from hf_zero.sequence_parallel.attention import attention_replaced, exchange_heads_in_attention
from hf_zero.sequence_parallel.forward import SliceSettings
from hf_zero.sequence_parallel.state import ContextParallel
from tests.sequence_parallel.compared import GRAD, worst_gradient
from tests.support import ranks, zoo
from tests.support.models import Batch
from tests.support.sequences import Data, build, cut, llama, loss_over_slices

pytest.importorskip("transformers", minversion="5.20")

MODELS: dict[str, Callable[[], nn.Module]] = {
    "ulysses": llama,
    "layers that are cut": partial(zoo.build, "GPTJForCausalLM", changes={"use_cache": False}),
    "context": llama,
}


def bound(model: nn.Module, way: str) -> Callable[[Batch], Tensor]:
    """Divide the sequences of ``model`` over all ranks; return the loss of a whole batch in training mode."""
    if way == "context":
        settings = SliceSettings(None, True, None, exchange_heads_in_attention, attention_replaced)
        ContextParallel(*context_topology(build_topology(), ranks.world()), settings).bind(model)
        return lambda batch: model(**batch).loss
    state = UlyssesSPAttentionHF.register_with_transformers(model, None, ranks.world(), 2, disable_in_eval=True)
    assert state is not None
    group = state.get_sequence_parallel_group()
    return lambda batch: loss_over_slices(model, cut(batch, ranks.rank(), ranks.world()), group)


def train(model: Any, loss_of: Callable[[Batch], Tensor]) -> Tensor:
    """Return a loss of three forwards, the last of which is over whole sequences, after its backward in evaluation mode."""
    longer, shorter = Data(length=16).batch(0), Data(length=8, padding="right").batch(1)  # a slice of one is as long as the other
    loss = loss_of(longer) + loss_of(shorter)
    model.eval()
    loss = loss + model(**Data(length=8).batch(2)).loss
    loss.backward()
    with torch.no_grad():
        model(**shorter)
    model.train()
    loss_of(shorter).backward()
    return loss.detach()


def several_forwards(way: str, reentrant: bool) -> None:
    plain, model = build(MODELS[way]), build(MODELS[way])
    expected = train(plain, lambda batch: plain(**batch).loss)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})  # type: ignore[operator]
    if reentrant:
        model.enable_input_require_grads()  # type: ignore[operator]
    found = train(model, bound(model, way))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert worst_gradient(plain, model) < GRAD


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])  # fast: the other kind
@pytest.mark.parametrize("way", MODELS)
def test_several_forwards_before_a_backward(way: str, reentrant: bool) -> None:
    ranks.run_ranks(several_forwards, 2, way, reentrant)


def head_of_its_own(model: Any, batch: Batch) -> Tensor:
    """Return a loss of logits that the script makes from the model inside."""
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state[:, :-1]
    return nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), batch["labels"][:, 1:].flatten())


def parts() -> None:
    plain, model = build(llama), build(llama)
    loss_of = bound(model, "context")
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    one, other = Data().batch(0), Data(length=12).batch(1)
    (head_of_its_own(plain, one) + plain(**other).loss).backward()  # type: ignore[operator]
    (head_of_its_own(model, one) + loss_of(other)).backward()
    assert worst_gradient(plain, model) < GRAD


def test_layers_of_a_part_that_is_called_by_itself() -> None:
    ranks.run_ranks(parts, 2)


def inputs(batch: Batch, embeds: Tensor, shift: Tensor, model: Any) -> Tensor:
    loss: Tensor = model(inputs_embeds=embeds + shift[None, None], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
    return loss


def given_inputs() -> None:
    """A tensor of one row is whole on every rank as well as one of all tokens."""
    batch = Data(length=22, padding="left").batch(0)
    found = []
    for divided in (False, True):
        model: Any = build(llama)
        if divided:
            bound(model, "context")
        embeds = model.model.embed_tokens(batch["input_ids"]).detach().requires_grad_()
        shift = torch.zeros(embeds.shape[-1], requires_grad=True)
        inputs(batch, embeds, shift, model).backward()
        found.append((embeds.grad, shift.grad))
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


def test_gradients_of_inputs() -> None:
    ranks.run_ranks(given_inputs, 2)
