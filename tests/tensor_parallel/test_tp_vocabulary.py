"""Heads whose logits stay in parts of the vocabulary until the loss: the loss and every gradient are those of whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import hf_zero
from hf_zero.errors import ConfigError
from hf_zero.tensor_parallel.functions import ModelGroup, Part
from hf_zero.tensor_parallel.logits import VocabularyLogits
from hf_zero.tensor_parallel.overrides import overrides_of
from hf_zero.tensor_parallel.plan import TpPlan
from hf_zero.tensor_parallel.planner import make_plan
from tests.support import ranks, zoo
from tests.support.parity import Run
from tests.support.tp_training import check_against_one_rank, zoo_case
from tests.tensor_parallel.breadth import perturb

HEADS = {
    "GPT2LMHeadModel": "lm_head",  # tied
    "LlamaForCausalLM": "lm_head",
    "Gemma2ForCausalLM": "lm_head",  # tied, soft-capped logits
    "T5ForConditionalGeneration": "lm_head",
    "BertForMaskedLM": "cls.predictions.decoder",  # tied, with a bias, its own loss
}


def _group() -> ModelGroup:
    from hf_zero.comm.back_end import build_collectives
    from hf_zero.comm.topology import build_topology

    topology = build_topology(model_parallel=ranks.world())
    assert topology.model is not None
    return ModelGroup(build_collectives(topology.model))


def losses_of_parts() -> None:
    """Against torch's own function: reductions, ignored rows, types, and arguments that need whole logits."""
    group, width = _group(), 6
    part = Part(-1, [[(rank * width, (rank + 1) * width)] for rank in range(group.world)], width * group.world)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(10, part.full, generator=generator) * 4
    target = torch.randint(0, part.full, (10,), generator=generator)
    target[3:5] = -100
    options: list[dict[str, Any]] = [
        {},
        {"reduction": "sum"},
        {"reduction": "none"},
        {"ignore_index": int(target[0])},
        {"label_smoothing": 0.1},
        {"weight": torch.rand(part.full, generator=generator)},
    ]
    for option in options:
        wanted = target if "ignore_index" not in option else target.clamp(min=0)
        whole = values.clone().requires_grad_()
        local = part.take(values, group.rank).clone().requires_grad_()
        expected = functional.cross_entropy(whole, wanted, **option)
        logits = VocabularyLogits(local, group, part, "head")
        found = functional.cross_entropy(logits, wanted, **option)
        assert type(found) is torch.Tensor
        assert (logits._whole is None) == (not {"label_smoothing", "weight"} & set(option))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        scale = torch.linspace(1, 2, expected.numel()).view_as(expected)
        (expected * scale).sum().backward()
        (found * scale).sum().backward()
        torch.testing.assert_close(local.grad, part.take(whole.grad, group.rank), rtol=1e-5, atol=1e-7)


def test_loss_of_parts() -> None:
    ranks.run_ranks(losses_of_parts, 2)


def other_uses() -> None:
    """What a program may do with logits gives what whole logits give."""
    group = _group()
    part = Part(-1, [[(0, 4)], [(4, 8)]], 8)
    values = torch.arange(48.0).view(2, 3, 8).sin()
    logits = VocabularyLogits(part.take(values, group.rank).clone(), group, part, "head")
    assert logits.shape == values.shape and logits.size(-1) == 8 and logits.dim() == 3 and logits.dtype == values.dtype
    assert "4 of 8" in repr(logits)
    kept = [logits[..., :-1, :], logits[:, -1], logits.view(-1, 8), logits.float() / 2, torch.tanh(logits), logits[values[..., 0] > 0]]
    plain = [values[..., :-1, :], values[:, -1], values.view(-1, 8), values / 2, values.tanh(), values[values[..., 0] > 0]]
    for one, other in zip(kept, plain, strict=True):
        assert isinstance(one, VocabularyLogits)
        torch.testing.assert_close(one.whole(), other)
    needed = [
        logits.argmax(-1),
        logits.softmax(-1),
        logits[..., 1],
        logits.view(2, 24),
        logits + values,
        logits.sum(),
        torch.cat([logits, logits]),
    ]
    same = [
        values.argmax(-1),
        values.softmax(-1),
        values[..., 1],
        values.view(2, 24),
        values * 2,
        values.sum(),
        torch.cat([values, values]),
    ]
    for one, other in zip(needed, same, strict=True):
        assert not isinstance(one, VocabularyLogits)
        torch.testing.assert_close(one, other)
    assert logits.tolist() == values.tolist()


def test_everything_else_reads_the_whole_logits() -> None:
    ranks.run_ranks(other_uses, 2)


def config(head: str) -> dict[str, Any]:
    rules = [{"patterns": [head.replace(".", r"\.")], "partition_type": "vocabulary"}]
    return {"autotp_size": 2, "partition_config": {"layer_specs": rules}}


def trains(name: str, stages: list[int]) -> None:
    runs = [Run(stage=stage, clip=0.5, extra={"tensor_parallel": config(HEADS[name])}) for stage in stages]
    check_against_one_rank(zoo_case(name, {}), 2, runs)


@pytest.mark.fast_rows("BertForMaskedLM-stages2")
@pytest.mark.parametrize(("name", "stages"), [("GPT2LMHeadModel", [3]), ("T5ForConditionalGeneration", [2]), ("BertForMaskedLM", [0])])
def test_training(name: str, stages: list[int]) -> None:
    ranks.run_ranks(trains, 2, name, stages)


def model_losses(name: str) -> None:
    """The model's own loss with ignored labels and with the number of items, its logits, generation; the loss gathers no logits."""
    whole = zoo.build(name)
    perturb(whole)
    model = zoo.build(name)
    model.load_state_dict(whole.state_dict())
    engine = hf_zero.initialize(model=model, config={"train_micro_batch_size_per_gpu": 2, "tensor_parallel": config(HEADS[name])})[0]
    batch = zoo.batch(name, torch.Generator().manual_seed(0))
    batch["labels"][:, ::3] = -100
    for extra in ({}, {"num_items_in_batch": 7}) if name not in ("T5ForConditionalGeneration", "BertForMaskedLM") else ({},):
        found, expected = engine(**batch, **extra), whole(**batch, **extra)
        assert isinstance(found.logits, VocabularyLogits) and found.logits._whole is None
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.logits.whole(), expected.logits, rtol=1e-4, atol=1e-5)
    if "ForCausalLM" in name or "LMHead" in name:
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        tokens = batch["input_ids"][:1, :4]
        whole.eval()
        engine.module.eval()
        assert engine.module.generate(tokens, **options).tolist() == whole.generate(tokens, **options).tolist()


@pytest.mark.fast_rows("LlamaForCausalLM", "BertForMaskedLM")
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "BertForMaskedLM"])
def test_models_compute_their_loss_from_parts(name: str) -> None:
    ranks.run_ranks(model_losses, 2, name)


@pytest.mark.slow  # fast: `test_training`
def test_key_finds_the_head_by_its_name() -> None:
    model = zoo.build("LlamaForCausalLM")
    plan = make_plan(model, 2, overrides=overrides_of({"vocab_parallel_lm_head": True}, None, model))
    assert plan.to_dict()["borders"] == make_plan(model, 2, overrides=overrides_of(config("lm_head"), None, model)).to_dict()["borders"]
    assert plan.modules["lm_head"].source == "vocab_parallel_lm_head"
    rules = {"use_default_specs": False, "layer_specs": [{"patterns": ["down_proj"], "partition_type": "row"}]}
    plan = make_plan(model, 2, overrides=overrides_of({"vocab_parallel_lm_head": True, "partition_config": rules}, None, model))
    assert {path for path, entry in plan.modules.items() if entry.split not in ("whole", "vocabulary")} <= {
        f"model.layers.{index}.mlp.down_proj" for index in range(2)
    }
    assert plan.modules["lm_head"].split == "vocabulary"
    encoder = zoo.build("BertForMaskedLM")
    with pytest.raises(ConfigError, match="no linear layer is named lm_head or embed_out; name the head in"):
        overrides_of({"vocab_parallel_lm_head": True}, None, encoder)
    names = {"lm_head_patterns": ["decoder"]}
    plan = make_plan(encoder, 2, overrides=overrides_of({"vocab_parallel_lm_head": True, "partition_config": names}, None, encoder))
    assert plan.modules["cls.predictions.decoder"].split == "vocabulary"


def test_plan_says_so() -> None:
    model = zoo.build("LlamaForCausalLM")
    data = make_plan(model, 2).to_dict()
    assert data["modules"]["lm_head"]["split"] == "column, gathered"
    data["modules"]["lm_head"]["split"] = "vocabulary"
    plan = make_plan(model, 2, overrides=overrides_of({}, TpPlan.from_dict(data), model))
    assert [border.kind for border in plan.borders["lm_head"]] == ["copy", "logits"]
    assert plan.to_dict()["borders"] == make_plan(model, 2, overrides=overrides_of(config("lm_head"), None, model)).to_dict()["borders"]
