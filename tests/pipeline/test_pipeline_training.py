"""Layers divided over the stages of a pipeline train like plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hf_zero.pipeline.pending import PendingTensor
from tests.pipeline.pipelines import check, check_schedule, train, train_by_schedule, with_numbers, with_stages
from tests.support import parity, ranks
from tests.support.models import CASES, Batch, ModelCase
from tests.support.parity import Run
from tests.support.tp_training import compare_trained, zoo_case


def check_stages(name: str, stages: int, zero: list[int]) -> None:
    case = zoo_case(name, {})
    for stage in zero:
        check(case, Run(stage, accumulation=2, clip=0.1), stages)


@pytest.mark.fast_rows("GPT2LMHeadModel")
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_two_stages(name: str) -> None:
    ranks.run_ranks(check_stages, 2, name, 2, [0, 1])


def check_four(every: bool) -> None:
    case = zoo_case("LlamaForCausalLM", {"num_hidden_layers": 4, "tie_word_embeddings": True})
    check(case, Run(1, clip=0.1), 4)
    check(case, Run(2, accumulation=2, clip=0.1), 2)
    if every:
        check(case, Run(0, clip=0.1), 2)
        check(case, Run(1, clip=0.1), 2, tp=2)


@pytest.mark.slow  # fast: test_pipeline_mixed.py
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_four_ranks(every: bool) -> None:
    """The fast row leaves tensor parallelism to `test_parameters_that_are_single_numbers`."""
    ranks.run_ranks(check_four, 4, every)


def check_settings() -> None:
    """16 bit, loss scaling, offload, recomputation, frozen weights, and losses that parts do not make up."""
    llama = zoo_case("LlamaForCausalLM", {"num_hidden_layers": 4})
    check(CASES["llama"], Run(1, "bf16", accumulation=2, clip=0.1), 2)
    check(CASES["llama"], Run(1, "fp16", accumulation=2, clip=0.1), 2)
    check(llama, Run(2, extra={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}), 2)
    check(recomputed(llama), Run(1, clip=0.1), 2)


def recomputed(case: ModelCase) -> ModelCase:
    def make() -> nn.Module:
        model = case.make()
        model.gradient_checkpointing_enable()
        return model

    return replace(case, make=make)


def check_numbers(every: bool) -> None:
    case = with_numbers(zoo_case("LlamaForCausalLM", {"num_hidden_layers": 4}))
    check(case, Run(0, accumulation=2, clip=0.1), 2)
    check(case, Run(2, clip=0.1), 2, tp=2)
    if every:
        check(case, Run(1, clip=0.1), 4)
        check_schedule(case, Run(1, accumulation=2, clip=0.1), 2, "1F1B")


@pytest.mark.slow  # fast: `test_kinds_of_models`
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parameters_that_are_single_numbers(every: bool) -> None:
    ranks.run_ranks(check_numbers, 4, every)


def test_settings() -> None:
    ranks.run_ranks(check_settings, 2)


def check_autocast() -> None:
    """fp32 parameters, 16-bit arithmetic: what goes over a border has the type that ``torch.autocast`` gives it."""
    extra = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.forward(model, batch)

    calls = partial(train, micro_batches=1)
    llama, bert = zoo_case("LlamaForCausalLM", {}), zoo_case("BertForMaskedLM", {})
    for case, trained in ((CASES["gpt2"], calls), (llama, calls), (bert, calls), (llama, train_by_schedule)):
        run = Run(1, accumulation=2, clip=0.1, extra=extra)
        losses, norms, weights, engine = trained(case, run, 2)
        engine.destroy()
        if weights is not None:
            expected = parity.reference(case.build(), case.rows, forward, run, 1)
            plain = parity.reference(case.build(), case.rows, case.forward, run, 1)
            compare_trained(replace(expected, weights={}), losses, norms, weights, run)
            for name, value in expected.weights.items():  # 16-bit rounding of small gradients, after two steps of Adam
                assert (weights[name] - value).abs().max() < 5e-3 * value.abs().max().clamp(min=0.01), name
            assert abs(plain.norms[0] - norms[0]) > 1e-5 * norms[0], "autocast changed nothing"


@pytest.mark.slow  # fast: `test_settings` in 16 bit
def test_autocast() -> None:
    ranks.run_ranks(check_autocast, 2)


def check_kinds(names: list[str]) -> None:
    """Encoders, encoder-decoders, shared layers, and a mixture whose balance is no mean over parts of a batch."""
    for name, changes in ((name, KINDS[name]) for name in names):
        check(zoo_case(name, changes), Run(1, clip=0.1), 2)


def check_logits() -> None:
    """Logits stay where they are until a script reads them; its own backward may come through them, which the engine notices."""
    case = zoo_case("LlamaForCausalLM", {"num_hidden_layers": 2})
    engine = parity.initialize(case.build(), with_stages(Run(1), 2))
    batch = parity.prepare(case.rows(0, 0, 0), parity.DTYPES["fp32"])
    for reads in (False, True):
        found = engine(**batch)
        assert isinstance(found.logits, PendingTensor)
        if reads:
            found.logits.float().square().mean().backward()
        else:
            engine.backward(found.loss)
        assert (found.logits._value is not None) == reads
        engine.step()
    norm = parity.as_float(engine.get_global_grad_norm())
    engine.destroy()
    plain = case.build()
    run = Run(1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=run.lr, betas=(0.9, 0.99), eps=run.eps, weight_decay=run.weight_decay)
    plain(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    plain(**batch).logits.square().mean().backward()
    expected = torch.stack([param.grad.square().sum() for param in plain.parameters()]).sum().sqrt()
    assert norm == pytest.approx(float(expected), rel=1e-4)


def test_logits_travel_when_they_are_read() -> None:
    ranks.run_ranks(check_logits, 2)


def test_a_tensor_that_turns_out_to_want_no_gradient() -> None:
    value, source = torch.ones(2), torch.ones(1, requires_grad=True).exp().grad_fn
    pending = PendingTensor(value.to("meta"), torch.device("cpu"), lambda: value, source)
    assert pending.grad_fn is source
    pending.register_hook(torch.Tensor.zero_)
    assert pending.sum() == 2 and pending.grad_fn is None


KINDS = {
    "T5ForConditionalGeneration": {},
    "BartForConditionalGeneration": {},
    "BertForMaskedLM": {},
    "AlbertForMaskedLM": {},
    "MixtralForCausalLM": {},
}
FAST_KINDS = ["T5ForConditionalGeneration", "BertForMaskedLM", "MixtralForCausalLM"]


@pytest.mark.parametrize("names", [FAST_KINDS, pytest.param([name for name in KINDS if name not in FAST_KINDS], marks=pytest.mark.slow)])
def test_kinds_of_models(names: list[str]) -> None:
    ranks.run_ranks(check_kinds, 2, names)
