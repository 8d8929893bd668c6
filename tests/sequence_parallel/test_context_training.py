"""Training under context parallelism is training on one rank: architectures, masks, stages, precisions, sizes of groups, other axes."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from tests.sequence_parallel.context import check, config, divided, script_batch
from tests.sequence_parallel.kinds import MASKS, adapted, adapted_in_four_bit, gpt2, mistral, tiled
from tests.support import parity, ranks, zoo
from tests.support.parity import Run
from tests.support.rows import slow_but
from tests.support.sequences import LOSS, NORM, Data, build, compare, llama, mixtral, whole

pytest.importorskip("transformers", minversion="5.0")


def each(names: list[str]) -> None:
    for name in names:
        make, run, data = MASKS[name]
        check(make, run, data, 2)


SECOND_CHOICE = ("plain", "padding right, prompt", "packed eager", "recomputed")


@pytest.mark.parametrize(
    "names",
    [[name for name in MASKS if name not in SECOND_CHOICE], pytest.param(list(SECOND_CHOICE), marks=pytest.mark.slow)],
    ids=["fast", "slow"],
)
def test_masks_and_stages_over_two_ranks(names: list[str]) -> None:
    ranks.run_ranks(each, 2, names)


def architectures(names: list[str]) -> None:
    for place, name in enumerate(names):
        make = gpt2 if name == "gpt2" else partial(zoo.build, name)
        check(make, Run(stage=1 + place % 3, clip=1.0), Data(length=16), ranks.world())


@pytest.mark.parametrize(
    "names",
    [
        ["Gemma2ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "Llama4ForCausalLM"],  # soft caps, head sizes, sinks, chunks
        pytest.param(["gpt2", "Gemma3ForCausalLM", "OPTForCausalLM", "Qwen3ForCausalLM"], marks=pytest.mark.slow),
    ],
    ids=lambda names: names[0],
)
def test_architectures_over_two_ranks(names: list[str]) -> None:
    ranks.run_ranks(architectures, 2, names)


def groups_of_four_ranks() -> None:
    check(llama, Run(stage=1, accumulation=2, clip=0.5), Data(padding="right"), 2)
    check(partial(llama, kv_heads=1, heads=3), Run(stage=3), Data(packed=True), 2)
    check(llama, Run(stage=2, clip=0.5), Data(packed=True, length=21), 4)  # padded to 24
    check(partial(llama, kv_heads=1), Run(stage=3, accumulation=2), Data(padding="left", prompt=7), 4)


def with_sequence_parallelism() -> None:
    check(llama, Run(stage=1, accumulation=2, clip=0.5), Data(padding="right"), 2, sequence=2)
    check(mistral, Run(stage=3), Data(packed=True), 2, sequence=2)
    check(partial(llama, implementation="eager"), Run(stage=2), Data(padding="left"), 2, sequence=2)


def with_tensor_parallelism() -> None:
    check(llama, Run(stage=1, accumulation=2, clip=0.5), Data(padding="right"), 2, tensor=2)
    check(mistral, Run(stage=3), Data(packed=True), 2, tensor=2)


@pytest.mark.slow  # fast: `test_masks_and_stages_over_two_ranks`
@pytest.mark.fast_rows("with_tensor_parallelism")
@pytest.mark.parametrize("groups", [groups_of_four_ranks, with_sequence_parallelism, with_tensor_parallelism])
def test_groups_over_four_ranks(groups: Any) -> None:
    ranks.run_ranks(groups, 4)


def with_experts() -> None:
    run = Run(stage=3, clip=0.5, extra={"expert_parallel": {"enabled": True, "autoep_size": 2}})
    check(mixtral, run, Data(padding="right"), 2)


def test_experts_are_shared_by_the_ranks_of_a_sequence() -> None:
    ranks.run_ranks(with_experts, 2)


OPTIMIZER_ON_HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
ALL_ON_HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}


def low_precision(stage: int) -> list[list[float]]:
    """Largest differences of losses and norms against one rank, relative: in bf16, and in fp16 with the optimizer on the host."""
    data, rows = Data(padding="right"), []
    for dtype, extra in (("bf16", {}), ("fp16", OPTIMIZER_ON_HOST)):
        run = Run(stage=stage, dtype=dtype, clip=1.0, lr=1e-3, extra=extra)
        found, expected = divided(llama, run, data, 2), whole(llama, run, data, 1)
        pairs = [(found.losses, expected.losses), (found.norms, expected.norms)]
        rows.append([max(abs(a - b) / b for a, b in zip(mine, theirs, strict=True)) for mine, theirs in pairs])
    return rows


@pytest.mark.parametrize("stage", slow_but([1, 3], 3))
def test_low_precision(stage: int) -> None:
    for rows in ranks.run_ranks(low_precision, 2, stage):
        for (loss, norm), exact in zip(rows, (1.0, 0.1), strict=True):  # fp16 has eight times the digits of bf16
            assert loss < 2e-3 * exact and norm < 1e-2 * exact


def quantized(base: str) -> None:
    """Adapters on a base in 4 bit, on one rank without an engine and on two."""
    run, data, losses, norms = Run(stage=3, clip=0.1), Data(padding="right"), [], []
    plain = adapted_in_four_bit(base)
    params = [param for param in plain.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=run.lr, betas=(0.9, 0.99), eps=run.eps, weight_decay=run.weight_decay)
    engine = hf_zero.initialize(model=adapted_in_four_bit(base), config=config(run, 2))[0]
    for step in range(run.steps):
        expected, loss = (model(**script_batch(data, step, 0, 0)).loss for model in (plain, engine))
        expected.backward()
        norms.append((float(torch.nn.utils.clip_grad_norm_(params, run.clip)), 0.0))
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(loss)
        engine.step()
        norms[-1] = norms[-1][0], parity.as_float(engine.get_global_grad_norm())
        losses.append((float(expected.detach()), float(loss.detach())))
    assert [mine for _, mine in losses] == pytest.approx([theirs for theirs, _ in losses], rel=LOSS)
    assert [mine for _, mine in norms] == pytest.approx([theirs for theirs, _ in norms], rel=NORM)


@pytest.mark.slow  # fast: test_parity_quantized.py, test_qlora.py
def test_adapters_on_a_base_in_four_bit(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    llama(heads=8, kv_heads=4, tie_word_embeddings=False).save_pretrained(tmp_path)  # type: ignore[operator]
    ranks.run_ranks(quantized, 2, str(tmp_path))


def lora() -> None:
    check(adapted, Run(stage=3), Data(packed=True), 2)
    check(adapted, Run(stage=1, extra=OPTIMIZER_ON_HOST), Data(packed=True), 2)
    run, data = Run(stage=3, accumulation=2, clip=0.5, extra=ALL_ON_HOST), Data(padding="right")
    check(llama, run, data, 2)
    compare(divided(tiled, run, data, 2), whole(llama, run, data, 1), "the model of examples/minimal/long_sequences.py")


@pytest.mark.slow  # fast: `test_masks_and_stages_over_two_ranks`
def test_adapters_states_on_the_host_and_tiles() -> None:
    pytest.importorskip("peft")
    ranks.run_ranks(lora, 2)


def dropout() -> tuple[bool, bool, bool]:
    """Whether the ranks drew different masks, went on with one stream, and dropped in attention."""
    torch.manual_seed(11)
    model: Any = build(partial(llama, attention_dropout=0.5))
    engine = hf_zero.initialize(model=model, config=config(Run(stage=1), 2))[0]
    drawn: list[torch.Tensor] = []
    model.model.layers[0].register_forward_hook(lambda *_: drawn.append(torch.rand(4)))
    batch = script_batch(Data(), 0)
    losses = [float(engine(**batch).loss) for _ in range(2)]
    streams: list[Any] = [None, None]
    torch.distributed.all_gather_object(streams, (drawn[0].tolist(), torch.rand(4).tolist()))
    return streams[0][0] != streams[1][0], streams[0][1] == streams[1][1], losses[0] != losses[1]


def test_ranks_draw_masks_of_dropout_of_their_own() -> None:
    assert ranks.run_ranks(dropout, 2) == [(True, True, True)] * 2


def draws_nothing() -> bool:
    engine = hf_zero.initialize(model=build(llama), config=config(Run(stage=3), 2))[0]
    torch.manual_seed(11)
    before = torch.get_rng_state()
    engine.backward(engine(**script_batch(Data(), 0)).loss)
    engine.step()
    return torch.equal(before, torch.get_rng_state())


def test_a_forward_without_dropout_draws_nothing() -> None:
    """A sampler without a generator of its own draws the samples of the next epoch from that stream: they were others than on one rank."""
    assert ranks.run_ranks(draws_nothing, 2) == [True] * 2


# ------------------------------------------------------------------------------------------------ what a script may do with it


def outputs(name: str, length: int, stage: int) -> None:
    """A loss of the script's own from outputs, which are whole, and evaluation: as on one rank."""
    expected_model, model = zoo.build(name), zoo.build(name)
    batch = {key: value for key, value in Data(length=length, padding="right").batch(0).items() if key != "position_ids"}
    labels = batch.pop("labels")
    engine = hf_zero.initialize(model=model, config=config(Run(stage=stage), ranks.world()))[0]
    for training in (True, False):
        expected_model.train(training), engine.train(training)
        logits, expected = engine(**batch).logits, expected_model(**batch).logits
        assert logits.shape == expected.shape
        own = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        theirs = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
        assert float(own.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
        if training:
            engine.backward(own)
            theirs.backward()
            norm = torch.stack([param.grad.norm() for param in expected_model.parameters() if param.grad is not None]).norm()
            engine.step()
            assert parity.as_float(engine.get_global_grad_norm()) == pytest.approx(float(norm), rel=1e-4)
            expected_model.load_state_dict(engine._consolidated_16bit_state_dict() or expected_model.state_dict())
            for param in expected_model.parameters():
                torch.distributed.broadcast(param.data, 0)


@pytest.mark.parametrize(("name", "length", "world"), [("LlamaForCausalLM", 16, 2), ("BertForMaskedLM", 18, 4)])
def test_outputs_without_labels_are_whole(name: str, length: int, world: int) -> None:
    ranks.run_ranks(outputs, world, name, length, 3 if world == 2 else 1)


def encoders() -> None:
    for padding, length in (("right", 16), ("", 13), ("", 16)):
        check(partial(zoo.build, "BertForMaskedLM"), Run(stage=2), Data(length=length, padding=padding), 2)
    check(partial(zoo.build, "ModernBertForMaskedLM"), Run(stage=3, clip=0.5), Data(length=16, padding="right"), 2)


def test_encoders() -> None:
    ranks.run_ranks(encoders, 2)


def own_mask() -> None:
    """A mask of four dimensions, in which tokens see some later ones."""
    batch = script_batch(Data(), 0)
    generator = torch.Generator().manual_seed(2)
    mask = torch.rand(2, 1, 24, 24, generator=generator) < 0.5
    mask |= torch.eye(24, dtype=torch.bool)
    expected = build(llama)(**batch, attention_mask=mask).loss
    engine = hf_zero.initialize(model=build(llama), config=config(Run(stage=3), 2))[0]
    assert float(engine(**batch, attention_mask=mask).loss) == pytest.approx(float(expected), rel=1e-6)
    one_row = mask[:, :, 3:4]  # stands for all
    expected = build(llama)(**batch, attention_mask=one_row).loss
    assert float(engine(**batch, attention_mask=one_row).loss) == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(UnsupportedError, match="pad_to_multiple_of=4"):
        engine(**{name: value[:, :22] for name, value in batch.items()}, attention_mask=mask[:, :, :22, :22])


def test_masks_of_four_dimensions() -> None:
    ranks.run_ranks(own_mask, 2)


def generation() -> None:
    batch = script_batch(Data(), 0)
    expected: Any = build(llama).eval()
    engine = hf_zero.initialize(model=build(llama), config=config(Run(stage=3), 2))[0]
    engine(**batch)
    engine.eval()
    with torch.no_grad():
        found = engine.generate(batch["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert found.tolist() == expected.generate(batch["input_ids"], max_new_tokens=3, do_sample=False, pad_token_id=0).tolist()
        assert float(engine(**batch).loss) == pytest.approx(float(expected(**batch).loss), rel=1e-6)


def test_generation_and_evaluation_are_over_whole_sequences() -> None:
    ranks.run_ranks(generation, 2)


def part(folder: str, size: int, first: int, last: int) -> tuple[list[float], list[float]]:
    """Losses and norms of steps ``first`` to ``last``, resumed from what the steps before have saved."""
    run, data = Run(stage=3, clip=0.5), Data(padding="right", prompt=3)
    engine = hf_zero.initialize(model=build(llama, seed=first), config=config(run, size))[0]
    if first:
        engine.load_checkpoint(folder)
    losses, norms = [], []
    for step in range(first, last):
        loss = engine(**script_batch(data, step, 0, ranks.rank() // size)).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(parity.as_float(engine.get_global_grad_norm()))
    engine.save_checkpoint(folder)
    return losses, norms


def test_a_checkpoint_resumes_over_groups_of_another_size(tmp_path: Path) -> None:
    before = ranks.run_ranks(part, 2, str(tmp_path), 2, 0, 2)[0]
    after = ranks.run_ranks(part, 4, str(tmp_path), 4, 2, 4)[0]
    expected = whole(llama, Run(steps=4, clip=0.5), Data(padding="right", prompt=3), 1)
    assert before[0] + after[0] == pytest.approx(expected.losses, rel=LOSS)
    assert before[1] + after[1] == pytest.approx(expected.norms, rel=NORM)


# ------------------------------------------------------------------------------------------------------------------ refusals


def refused() -> list[str]:
    from transformers import BertConfig, BertForSequenceClassification

    class Own(nn.Linear):
        pass

    small = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    tries: list[tuple[nn.Module, dict[str, Any]]] = [
        (Own(2, 2), {}),
        (BertForSequenceClassification(small), {}),
        (zoo.build("MambaForCausalLM"), {}),
        (zoo.build("XGLMForCausalLM"), {}),
        (zoo.build("T5ForConditionalGeneration"), {}),
        (build(partial(llama, heads=3, kv_heads=1)), {"sequence": 2}),
    ]
    found = []
    for model, axes in tries:
        with pytest.raises((UnsupportedError, ConfigError)) as caught:
            hf_zero.initialize(model=model, config=config(Run(stage=1), 2, **axes))
        found.append(str(caught.value))
    for size in (3, 8):
        with pytest.raises(ConfigError) as wrong:
            hf_zero.initialize(model=build(llama), config=config(Run(stage=1), size))
        found.append(str(wrong.value))
    return found


def test_what_cannot_be_divided_is_refused_by_name() -> None:
    texts = [
        "context parallelism: Own is no model of transformers",
        "BertModel pools one token of whole sequences",
        "Mamba",
        "context parallelism: XGLMForCausalLM cannot be divided, because it does not call its attention",
        "T5ForConditionalGeneration is an encoder-decoder",
        "cannot divide the model's 3 attention heads",
        "3 ranks (pp x cp x sp x tp) are to share their samples; 1 or 2 or 4 would fit",
        "8 ranks (pp x cp x sp x tp) are to share their samples; 1 or 2 or 4 would fit",
    ]
    found = ranks.run_ranks(refused, 4)
    assert all(other == found[0] for other in found)
    assert [(text, message) for text, message in zip(texts, found[0], strict=True) if text not in message] == []


def in_a_forward() -> None:
    engine = hf_zero.initialize(model=build(llama), config=config(Run(stage=1), 2))[0]
    batch = script_batch(Data(), 0)
    with pytest.raises(UnsupportedError, match="context parallelism: output_attentions=True"):
        engine(**batch, output_attentions=True)
    with pytest.raises(StateError, match="were given different input_ids, labels in the first step"):
        engine(**script_batch(Data(), ranks.rank()))
    for shape in ((2, 5), (2, 24, 24), (2, 1, 20, 20), (2, 1, 12, 24)):
        with pytest.raises(ConfigError, match="context parallelism: attention_mask of a batch has shape"):
            engine(**batch, attention_mask=torch.ones(shape))


def test_batches_that_cannot_be_divided_are_refused() -> None:
    ranks.run_ranks(in_a_forward, 2)


def loss_of_parts(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss that makes its logits itself, from the model inside and the head's weight."""
    hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state[:, :-1]
    logits = hidden @ model.lm_head.weight.T
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def parts_by_themselves() -> None:
    batch, plain = script_batch(Data(), 0, 0, 0), build(llama)
    expected = loss_of_parts(plain, batch)
    expected.backward()
    norm = float(torch.stack([param.grad.norm() for param in plain.parameters()]).norm())
    for stage in (0, 3):
        engine = hf_zero.initialize(model=build(llama), config=config(Run(stage, clip=0.0), 2))[0]
        model = engine.module
        with torch.no_grad(), hf_zero.zero.GatheredParameters(list(model.parameters())):
            copied = deepcopy(model)
        for recomputes in (False, False, True):  # a step over parts between those over whole sequences
            if recomputes:
                model.gradient_checkpointing_enable()
            loss = loss_of_parts(model, batch)
            assert abs(float(loss) - float(expected)) <= LOSS * abs(float(expected)), stage
            engine.backward(loss)
            found = engine.stepper.measure() if stage == 0 else None
            engine.zero_grad()
            if found is not None:
                assert abs(float(found) - norm) <= NORM * norm
            engine.backward(engine(**batch).loss)
            engine.zero_grad()
        with torch.no_grad():
            assert abs(float(loss_of_parts(copied, batch)) - float(expected)) <= LOSS * abs(float(expected)), stage
            whole_loss = float(copied.eval()(**batch).loss)
        assert abs(whole_loss - float(expected)) <= LOSS * abs(float(expected)), stage
        engine.destroy()


def test_parts_of_the_model_by_themselves_and_copies_have_whole_sequences() -> None:
    ranks.run_ranks(parts_by_themselves, 2)
