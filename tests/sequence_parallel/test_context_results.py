"""Under context parallelism the logits of chosen tokens, and losses that are no mean over labels, are those of one rank."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import hf_zero
from hf_zero.errors import UnsupportedError
from hf_zero.sequence_parallel.forward import SlicedForwards
from tests.sequence_parallel.context import config, script_batch
from tests.support import parity, ranks
from tests.support.models import Batch
from tests.support.parity import Run
from tests.support.sequences import Data, build, llama

pytest.importorskip("transformers", minversion="5.0")
from transformers import LlamaForCausalLM, LlamaForSequenceClassification  # noqa: E402 - where there is transformers
from transformers.modeling_outputs import CausalLMOutput  # noqa: E402

LENGTH = 16


def _last_tokens(kept: int | list[int]) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        wanted = kept if isinstance(kept, int) else torch.tensor(kept)
        logits = model(input_ids=batch["input_ids"], logits_to_keep=wanted).logits
        labels = batch["labels"][:, -kept:] if isinstance(kept, int) else batch["labels"][:, kept]
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return loss


def _weighted(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Tensor | None = None, **_: Any) -> Tensor:
    shifted = pad(labels, (0, 1), value=-100)[..., 1:] if shift_labels is None else shift_labels
    return cross_entropy(logits.float().view(-1, vocab_size), shifted.reshape(-1), weight=torch.linspace(0.1, 3, vocab_size))


def _with_own_loss() -> nn.Module:
    model: Any = llama()
    model.loss_function = _weighted
    return model  # type: ignore[no-any-return]


def _ignoring_zeros(model: nn.Module, batch: Batch) -> Tensor:
    labels = batch["labels"].clone()
    labels[:, :6] = 0
    return model(input_ids=batch["input_ids"], labels=labels, ignore_index=0).loss  # type: ignore[no-any-return]


def _in_a_tuple(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, return_dict=False)[0]  # type: ignore[no-any-return]


class _OwnForward(LlamaForCausalLM):
    """A model as research code writes it: labels are shifted in the forward, and tokens may have weights."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, weights: Tensor | None = None) -> CausalLMOutput:  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        if labels is None:
            return CausalLMOutput(logits=logits)
        losses = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        by = torch.ones_like(losses) if weights is None else weights[:, 1:].flatten()
        return CausalLMOutput(loss=(losses * by).sum() / by.sum(), logits=logits)


class _WithPenalty(LlamaForCausalLM):
    """A model that adds a penalty to the loss of the library's forward."""

    def forward(self, **kwargs: Any) -> Any:  # type: ignore[override]
        output = super().forward(**kwargs)
        output.loss = output.loss + 0.1 * output.logits.logsumexp(-1).square().mean()
        return output


class _Wrapped(nn.Module):
    """A model around a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = llama()
        self.head = nn.Linear(self.inner.config.vocab_size, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return (self.head(self.inner(input_ids).logits.tanh()).squeeze(-1) - labels / 64).square().mean()


def _made(kind: type) -> Callable[[], nn.Module]:
    return lambda: kind(llama().config)


def _classifier() -> nn.Module:
    config: Any = llama().config
    config.num_labels, config.pad_token_id = 3, 0
    return LlamaForSequenceClassification(config)  # type: ignore[no-any-return]


def _with_weights(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, weights=torch.linspace(0.1, 2, LENGTH).expand(batch["labels"].shape)).loss  # type: ignore[no-any-return]


def check_results() -> None:
    """The loss and the norm of its gradient are those of one rank."""
    cases: list[tuple[Callable[[], nn.Module], Callable[[nn.Module, Batch], Tensor]]] = [
        (llama, _last_tokens(6)),
        (llama, _last_tokens([3, 9, 14])),
        (_with_own_loss, lambda model, batch: model(**batch).loss),
        (_with_own_loss, _in_a_tuple),
        (llama, _ignoring_zeros),
        (_made(_OwnForward), lambda model, batch: model(**batch).loss),
        (_made(_OwnForward), _with_weights),
        (_made(_WithPenalty), lambda model, batch: model(**batch).loss),
        (_Wrapped, lambda model, batch: model(**batch)),
        (_classifier, lambda model, batch: model(input_ids=batch["input_ids"], labels=batch["labels"][:, 0] % 3).loss),
    ]
    for place, (make, loss_of) in enumerate(cases):
        plain, batch = build(make), script_batch(Data(length=LENGTH), 0)
        expected = loss_of(plain, batch)
        expected.backward()
        norm = torch.stack([param.grad.norm() for param in plain.parameters() if param.grad is not None]).norm()
        engine = hf_zero.initialize(model=build(make), config=config(Run(stage=1 + 2 * (place % 2)), 2))[0]
        loss = loss_of(engine, batch)
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5), place
        engine.backward(loss)
        engine.step()
        assert parity.as_float(engine.get_global_grad_norm()) == pytest.approx(float(norm), rel=1e-4), place
        engine.destroy()


def test_slices_refuse_a_forward_that_shifts_labels_itself() -> None:
    labels = torch.zeros(1, LENGTH, dtype=torch.long)
    own: Any = _made(_OwnForward)()
    with pytest.raises(UnsupportedError, match="the forward of _OwnForward is its own, got labels, and reads no shift_labels"):
        SlicedForwards._refuse_requests(own, {"labels": labels})
    SlicedForwards._refuse_requests(own, {"input_ids": labels})
    for passes_them_on in (_made(_WithPenalty)(), llama()):
        SlicedForwards._refuse_requests(passes_them_on, {"labels": labels, "shift_labels": labels})


def test_logits_of_some_tokens_and_losses_of_whole_sequences() -> None:
    ranks.run_ranks(check_results, 2)


def test_sequence_parallelism_refuses_a_choice_of_tokens() -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace())
    SlicedForwards._refuse_requests(model, {"logits_to_keep": 0})
    with pytest.raises(UnsupportedError, match="logits_to_keep=6 would choose tokens of each rank's slice"):
        SlicedForwards._refuse_requests(model, {"logits_to_keep": 6})
