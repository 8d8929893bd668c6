"""Positions and frequencies that a model makes in its own way are those of whole sequences; what slices would make wrong is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero
from hf_zero.config.mesh import requested_slices
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
from hf_zero.sequence_parallel.batches import UlyssesSPDataLoaderAdapter, is_slice, prepare
from hf_zero.sequence_parallel.layer import DistributedAttention
from hf_zero.sequence_parallel.positions import require_even_temperature
from tests.sequence_parallel.breadth import measure
from tests.sequence_parallel.compared import worst_gradient
from tests.support import ranks, zoo
from tests.support.sequences import LENGTH, Data, build, cut, llama, loss_over_slices

pytest.importorskip("transformers", minversion="5.0")

# ------------------------------------------------------------------------------------------------ positions and frequencies


def rotary(kind: str) -> nn.Module:
    """Sequences of LENGTH are longer than what it was trained on; the first slice alone is not."""
    from transformers import LlamaConfig, LlamaForCausalLM

    scales = {"short_factor": [1.0] * 4, "long_factor": [3.0, 5.0, 7.0, 9.0]} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": LENGTH // 2, **scales}
    extra: dict[str, Any] = {"attn_implementation": "sdpa", "rope_parameters": rope}
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=LENGTH // 2, use_cache=False, **extra,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def frequencies(kind: str) -> None:
    expected_model, model = build(lambda: rotary(kind)), build(lambda: rotary(kind))
    state = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 2, disable_in_eval=True)
    assert state is not None
    for step in range(2):
        batch = Data().batch(step)
        expected = expected_model(**batch).loss
        loss = loss_over_slices(model, cut(batch, ranks.rank(), 2), state.get_sequence_parallel_group())
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
        expected.backward()
        loss.backward()
        assert worst_gradient(expected_model, model) < 1e-5
        model.zero_grad()
        expected_model.zero_grad()
    model.eval()
    with torch.no_grad():  # whole sequences as ever
        assert model(**batch).logits.shape[1] == LENGTH


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_frequencies_are_those_of_the_longest_sequence(kind: str) -> None:
    ranks.run_ranks(frequencies, 2, kind)


def own_positions() -> list[tuple[float, float]]:
    """Padded on the left, as loaders give it; and by hand with the wrong positions and the right ones."""
    found = []
    for name in ("RobertaForCausalLM", "OPTForCausalLM"):
        row = measure(name)
        assert row.exact, row
        found.append((row.loss, row.grad))
    model = zoo.build("RobertaForCausalLM")
    state = UlyssesSPAttentionHF.register_with_transformers(model, None, 2, 2)
    assert state is not None
    slices = cut(Data(length=16).batch(0), ranks.rank(), 2)
    with pytest.raises(StateError, match="RobertaForCausalLM computes its own positions"):
        loss_over_slices(model, slices, state.get_sequence_parallel_group())
    slices["position_ids"] = slices["position_ids"] + 2
    assert loss_over_slices(model, slices, state.get_sequence_parallel_group()).isfinite()
    return found


def test_models_that_count_their_own_way() -> None:
    assert len(ranks.run_ranks(own_positions, 2)[0]) == 2


def test_queries_that_grow_sharper_along_the_sequence_are_refused_from_there_on() -> None:
    model = zoo.build("Llama4ForCausalLM")
    require_even_temperature(model, 8191)
    with pytest.raises(UnsupportedError, match="from 8192 tokens on"):
        require_even_temperature(model, 8192)
    require_even_temperature(llama(), 1 << 20)


# ------------------------------------------------------------------------------------------------------------------ refusals


def mixtral(**changes: Any) -> nn.Module:
    return zoo.build("MixtralForCausalLM", changes=changes)


def kinds() -> list[str]:
    class Own(type(llama())):  # type: ignore[misc]
        pass

    def register(model: nn.Module) -> Callable[[], Any]:
        return lambda: UlyssesSPAttentionHF.register_with_transformers(model, None, 2, 2)

    register(build(lambda: Own(llama().config)))()
    tries = [
        zoo.build("OPTForCausalLM", changes={"layerdrop": 0.1}),
        zoo.build("BertForMaskedLM"),
        zoo.build("BertLMHeadModel", changes={"is_decoder": False}),
        mixtral(output_router_logits=True),
    ]
    found = []
    for model in tries:
        with pytest.raises(UnsupportedError) as caught:
            register(model)()
        found.append(str(caught.value))
    return found


def test_what_slices_would_make_wrong_is_refused() -> None:
    texts = [
        "layerdrop of OPTForCausalLM is 0.1",
        "BertForMaskedLM is not a causal language",
        "create it with is_decoder=True",
        "output_router_logits",
    ]
    found = ranks.run_ranks(kinds, 2)
    assert found[0] == found[1]
    assert [text for text, message in zip(texts, found[0], strict=True) if text not in message] == []


def asked_in_the_forward() -> None:
    model = mixtral()
    UlyssesSPAttentionHF.register_with_transformers(model, None, 2, 2)
    with pytest.raises(UnsupportedError, match="output_router_logits"):
        model(**cut(Data(length=16).batch(0), ranks.rank(), 2), output_router_logits=True)


def test_losses_of_routers_are_refused_in_a_forward() -> None:
    ranks.run_ranks(asked_in_the_forward, 2)


# ------------------------------------------------------------------------------------------------------------------- batches


class Loader:
    """As accelerate's loaders: tells when its batch is the last; ``batches`` differ between ranks."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.end_of_dataloader = False
        self.ended = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for place, batch in enumerate(self.batches):
            self.end_of_dataloader = place == len(self.batches) - 1
            yield batch
        self.end()

    def end(self) -> None:
        self.ended += 1


def steps() -> tuple[list[bool], int]:
    """What the loader says at each slice, where one of rank 1 is shorter."""
    loader = Loader([{"input_ids": torch.arange(4)[None]} for _ in range(3 - ranks.rank())])
    slices = UlyssesSPDataLoaderAdapter(loader, ranks.rank(), dist.group.WORLD, 2, "cpu")  # type: ignore[arg-type]
    return [loader.end_of_dataloader for _ in slices], loader.ended


def test_the_last_slice_is_the_last_on_all_ranks() -> None:
    assert ranks.run_ranks(steps, 2) == [([False, False, False, True], 1)] * 2


def embeddings() -> None:
    batch = {"inputs_embeds": torch.zeros(1, 4, 8), "labels": torch.arange(4)[None]}
    slices = next(UlyssesSPDataLoaderAdapter([batch], ranks.rank(), dist.group.WORLD, 2, "cpu"))  # type: ignore[arg-type]
    slices["inputs_embeds"] = slices["inputs_embeds"].bfloat16()  # as an engine does
    assert is_slice((), slices)
    assert not is_slice((), {name: value.clone() for name, value in slices.items()})


def test_slices_of_embeddings_are_known_after_a_cast() -> None:
    ranks.run_ranks(embeddings, 2)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"input_ids": torch.ones(1, 4), "labels": [1, 2, 3, 4]}, "labels of a batch is of type list"),
        ({"input_ids": torch.ones(1, 4), "position_ids": [0, 1, 2, 3]}, "position_ids of a batch is of type list"),
        ({"inputs_embeds": torch.ones(1, 4, 2, requires_grad=True)}, "inputs_embeds of a batch requires a gradient"),
        ((torch.ones(1, 4),), "the loader gives tuple"),
    ],
)
def test_batches_that_cannot_be_cut(batch: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        prepare(batch, 2)


# ------------------------------------------------------------------------------------------------------ layer and settings


def from_the_end() -> None:
    class Sum(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return query + key.cumsum(1) * value

    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(2, 4, 6, 3, generator=generator) for _ in range(3)]
    found = [
        DistributedAttention(Sum(), dist.group.WORLD, scatter_idx=heads, gather_idx=tokens)(*parts)  # type: ignore[arg-type]
        for heads, tokens in ((2, 1), (-2, -3))
    ]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"gather_idx"):
        DistributedAttention(Sum(), dist.group.WORLD, scatter_idx=2, gather_idx=-5)(*parts)  # type: ignore[arg-type]


def test_dimensions_may_count_from_the_end() -> None:
    ranks.run_ranks(from_the_end, 2)


@pytest.mark.parametrize("value", ["auto", "two", [1]])
def test_sizes_that_are_no_numbers_are_left_to_the_schema(value: Any) -> None:
    assert requested_slices({"sequence_parallel_size": value}) == 1
    ranks.run_ranks(no_number, 2, value)


def no_number(value: Any) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2, "data_parallel_size": value}
    if value == "auto":  # as if left out
        assert hf_zero.initialize(model=llama(), config=config)[0].sequence_parallel_size == 2
        return
    with pytest.raises(ConfigError, match="data_parallel_size"):
        hf_zero.initialize(model=llama(), config=config)
