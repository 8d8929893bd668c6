"""Parts of sequence parallelism: groups, the exchange of heads, slices of batches, and refused inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hf_zero
from hf_zero import observe
from hf_zero.deepspeed.served import groups, sequence_state
from hf_zero.errors import ConfigError, StateError, UnsupportedError
from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
from hf_zero.sequence_parallel.batches import UlyssesSPDataLoaderAdapter, prepare
from hf_zero.sequence_parallel.exchange import key_heads
from hf_zero.sequence_parallel.layer import DistributedAttention, SeqAllToAll
from tests.support import ranks
from tests.support.logged import messages_of_log
from tests.support.models import CASES
from tests.support.sequences import Data, build, cut, llama

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


# ---------------------------------------------------------------------------------------------------------------- heads


@given(ranks_=st.integers(1, 8), own=st.integers(1, 6), data=st.data())
def test_every_query_head_meets_its_key_head(ranks_: int, own: int, data: st.DataObject) -> None:
    queries = ranks_ * own
    keys = data.draw(st.sampled_from([count for count in range(1, queries + 1) if queries % count == 0]))
    plan = key_heads(queries, keys, ranks_)
    sent = plan.sent if plan.sent is not None else tuple(range(keys))
    assert len(sent) % ranks_ == 0
    each = len(sent) // ranks_
    for query in range(queries):
        rank, place = divmod(query, own)
        assert sent[rank * each + place // plan.queries_per_key] == query // (queries // keys)


def test_heads_that_do_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match="4 ranks cannot divide the model's 6 attention heads .* ranks: 1, 2, 3, 6"):
        key_heads(6, 2, 4)


def _undivided(registers: bool) -> None:
    arguments: dict[str, Any] = {"micro_batch_size": 1, "sequence_parallel_size": 2, "core_attn_implementation": "sdpa"}
    observe._warned.clear()
    model = build(llama)
    mpu = UlyssesSPAttentionHF.register_with_transformers(model, **arguments) if registers else None
    with messages_of_log() as messages:
        engine = hf_zero.initialize(model=model, config={**CONFIG, "sequence_parallel_size": 2}, mpu=mpu)[0]
    expected = ranks.rank() == 0 and not registers
    assert sum("nothing divides the attention of LlamaForCausalLM" in text for text in messages) == expected, messages
    engine.destroy()


@pytest.mark.parametrize("registers", [True, False])
def test_a_model_whose_attention_nothing_divides_gives_a_warning(registers: bool) -> None:
    ranks.run_ranks(_undivided, 2, registers)


# ---------------------------------------------------------------------------------------------------------------- layer


class Attention(nn.Module):
    """Over (batch, tokens, heads, width)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float = 1.0) -> Tensor:
        parts = [part.transpose(1, 2) for part in (query * scale, key, value)]
        return nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)


def distributed_attention(first: str) -> None:
    """Result and gradients of slices are slices of those of whole sequences, whichever dimension comes first."""
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(3, 8, 4, 5, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight = torch.randn(3, 8, 4, 5, generator=generator, dtype=torch.float64)
    expected = Attention()(*whole, scale=0.5)
    (expected * weight).sum().backward()
    rank, size = ranks.rank(), ranks.world()
    here = slice(rank * 8 // size, (rank + 1) * 8 // size)
    mine = [tensor.detach()[:, here].clone().requires_grad_() for tensor in whole]
    layer: nn.Module = DistributedAttention(Attention(), dist.group.WORLD, scatter_idx=2, gather_idx=1)  # type: ignore[arg-type]
    found = layer(*mine, 0, scale=0.5) if first == "batch" else _sequence_first(mine)
    torch.testing.assert_close(found, expected[:, here])
    (found * weight[:, here]).sum().backward()
    for tensor, other in zip(mine, whole, strict=True):
        assert tensor.grad is not None and other.grad is not None
        torch.testing.assert_close(tensor.grad, other.grad[:, here])
    group: Any = dist.group.WORLD
    heads = SeqAllToAll.apply(group, mine[0], 2, 1)
    torch.testing.assert_close(heads, whole[0].tensor_split(size, dim=2)[rank])
    back = SeqAllToAll.apply(group, heads, 1, 2)
    torch.testing.assert_close(back, mine[0])
    (gradient,) = torch.autograd.grad((back * 2).sum(), mine[0])
    torch.testing.assert_close(gradient, torch.full_like(mine[0], 2))


def _sequence_first(parts: list[Tensor]) -> Tensor:
    class Turned(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            found: Tensor = Attention()(*(part.transpose(0, 1) for part in given), scale=0.5)
            return found.transpose(0, 1)

    layer = DistributedAttention(Turned(), dist.group.WORLD)  # type: ignore[arg-type]
    found: Tensor = layer(*(part.transpose(0, 1) for part in parts), batch_dim_idx=1)
    return found.transpose(0, 1)


def shared_keys() -> None:
    """One key head on two ranks: all query heads of both read it, and its gradient is the sum."""

    class Grouped(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            parts = [part.transpose(1, 2) for part in (query, key, value)]
            return nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2)

    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, 8, heads, 5, generator=generator, dtype=torch.float64, requires_grad=True) for heads in (4, 1, 1)]
    expected = Grouped()(*whole)
    expected.square().sum().backward()
    here = slice(ranks.rank() * 4, ranks.rank() * 4 + 4)
    mine = [tensor.detach()[:, here].clone().requires_grad_() for tensor in whole]
    found = DistributedAttention(Grouped(), dist.group.WORLD, gather_idx=1)(*mine)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected[:, here])
    found.square().sum().backward()
    for tensor, other in zip(mine, whole, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad[:, here])  # type: ignore[index]


def test_distributed_attention_with_shared_keys() -> None:
    ranks.run_ranks(shared_keys, 2)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("first", ["batch", "sequence"])
def test_distributed_attention(world: int, first: str) -> None:
    ranks.run_ranks(distributed_attention, world, first)


# --------------------------------------------------------------------------------------------------------------- groups


def by_configuration(how: str) -> tuple[Any, ...]:
    extra: dict[str, Any] = {"sequence_parallel_size": 2, "data_parallel_size": 2}
    arguments: dict[str, Any] = {"mesh_param": (2, 2)} if how == "mesh" else {}
    data = [{"input_ids": torch.tensor([index])} for index in range(8)]
    engine, _, loader, _ = hf_zero.initialize(
        model=CASES["mlp"].build(), config={**CONFIG, **(extra if how == "keys" else {})}, training_data=data, **arguments
    )
    assert loader is not None
    seen = [batch["input_ids"].flatten().tolist() for batch in loader]
    assert dist.get_process_group_ranks(groups._get_sequence_parallel_group()) == [ranks.rank() // 2 * 2, ranks.rank() // 2 * 2 + 1]
    assert engine.get_sequence_parallel_group() is groups._get_sequence_parallel_group()
    sizes = groups._get_sequence_parallel_world_size(), groups._get_sequence_data_parallel_world_size()
    assert (engine.dp_world_size, engine.seq_dp_world_size, engine.sequence_parallel_size) == (2, 4, 2)
    # The groups are those that the sizes count.
    assert dist.get_process_group_ranks(engine.seq_data_parallel_group) == [0, 1, 2, 3]
    assert dist.get_process_group_ranks(engine.data_parallel_group) == [ranks.rank() % 2, ranks.rank() % 2 + 2]
    group = groups._get_data_parallel_group()
    assert group is engine.data_parallel_group and group.rank() == groups._get_data_parallel_rank()
    assert groups._get_data_parallel_world_size() == group.size()
    return engine.train_batch_size(), sizes, groups._get_sequence_parallel_rank(), groups._get_data_parallel_rank(), seen


@pytest.mark.parametrize("how", ["keys", "mesh"])
def test_groups_of_the_configuration(how: str) -> None:
    found = ranks.run_ranks(by_configuration, 4, how)
    assert [value[:4] for value in found] == [(4, (2, 4), place % 2, place // 2) for place in range(4)]
    assert found[0][4] == found[1][4] and found[2][4] == found[3][4] and found[0][4] != found[2][4]


class Mpu:
    """Groups of a script's own: ranks 0 and 2, and 1 and 3, share their samples."""

    def __init__(self) -> None:
        made = [dist.new_group(line) for line in ([0, 2], [1, 3])]
        self.group = made[dist.get_rank() % 2]

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        return self.group

    def get_sequence_parallel_world_size(self) -> int:
        return self.group.size()


def by_mpu() -> tuple[int, int, int, list[int]]:
    before = groups._get_sequence_parallel_world_size(), groups._get_sequence_parallel_rank()
    assert before == (1, 0)
    with pytest.raises(StateError, match="sequence_parallel_size"):
        groups._get_sequence_parallel_group()
    engine = hf_zero.initialize(model=CASES["mlp"].build(), config={**CONFIG, "train_batch_size": 4}, mpu=Mpu())[0]
    line = dist.get_process_group_ranks(groups._get_sequence_parallel_group())
    assert dist.get_process_group_ranks(engine.data_parallel_group) == [ranks.rank() // 2 * 2, ranks.rank() // 2 * 2 + 1]
    assert groups._get_sequence_data_parallel_rank() == ranks.rank()
    return engine.train_batch_size(), engine.collectives.world, groups._get_data_parallel_rank(), line


def test_groups_of_an_mpu_object() -> None:
    assert ranks.run_ranks(by_mpu, 4) == [(4, 4, place % 2, [place % 2, place % 2 + 2]) for place in range(4)]


def by_module() -> int:
    sequence_state.initialize_sequence_parallel(2)
    assert sequence_state.get_sequence_parallel_rank() == ranks.rank() % 2
    assert sequence_state.get_sequence_data_parallel_world_size() == 4 and sequence_state.get_sequence_data_parallel_rank() == ranks.rank()
    return int(hf_zero.initialize(model=CASES["mlp"].build(), config=CONFIG, mpu=sequence_state)[0].train_batch_size())


def test_groups_of_deepspeeds_module() -> None:
    assert ranks.run_ranks(by_module, 4) == [4] * 4


def refusals() -> list[str]:
    """The messages of what is refused at the start; every rank has the same."""

    def start(config: dict[str, Any], **extra: Any) -> Callable[[], Any]:
        return lambda: hf_zero.initialize(model=CASES["mlp"].build(), config={**CONFIG, **config}, **extra)

    def register(model: nn.Module, implementation: str | None = "sdpa", **extra: Any) -> Callable[[], Any]:
        return lambda: UlyssesSPAttentionHF.register_with_transformers(model, implementation, 2, 2, **extra)

    mpu = UlyssesSPAttentionHF.register_with_transformers("a model made later", "sdpa", 2, 2)
    tries = [
        (start({"sequence_parallel_size": 3}), ConfigError),
        (start({"sequence_parallel_size": 2, "data_parallel_size": 4}), ConfigError),
        (start({"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}}), UnsupportedError),
        (start({"sequence_parallel_size": 4}, mpu=mpu), ConfigError),
        (start({}, mpu=mpu), UnsupportedError),
        (start({}, mesh_param="wide"), ConfigError),
        (register(llama(heads=3, kv_heads=1)), ConfigError),
        (register(llama(), "flash_attention_2"), ConfigError),
        (register(CASES["t5"].build()), UnsupportedError),
        (register(llama(), seq_length_is_variable=False), ConfigError),
        (register(llama(), seq_length_is_variable=False, seq_length=7), ConfigError),
    ]
    found = []
    for attempt, kind in tries:
        with pytest.raises(kind) as caught:
            attempt()
        found.append(str(caught.value))
    return found


def test_what_does_not_fit_is_refused_at_the_start() -> None:
    found = ranks.run_ranks(refusals, 4)
    assert all(messages == found[0] for messages in found)
    texts = [
        "3 ranks (pp x cp x sp x tp) are to share their samples; 1 or 2 or 4 would fit",
        "4 x 2 makes 8 ranks; dp 2 would fit",
        "autotp_size is 2 and sequence_parallel_size is 2, tensor and sequence parallelism: the two cannot",
        "- the sequence-parallel group of the mpu object: sp 2\n- sequence_parallel_size: sp 4",
        "is no model of transformers",
        "mesh_param is 'wide'",
        "2 ranks cannot divide the model's 3 attention heads",
        "'flash_attention_2' and the model was made with attn_implementation='sdpa'",
        "is an encoder-decoder",
        "seq_length is not given",
        "seq_length is 7, not a multiple of sequence_parallel_size 2",
    ]
    assert [text for text, message in zip(texts, found[0], strict=True) if text not in message] == []


def forward_refusals() -> None:
    """What a forward over slices refuses, on every rank alike; the model works afterwards."""
    model = build(llama)
    UlyssesSPAttentionHF.register_with_transformers(model, None, 2, 2, seq_length=24, seq_length_is_variable=False)
    batch = cut(Data().batch(0), ranks.rank(), 2)
    positions = batch.pop("position_ids")
    with pytest.raises(StateError, match="got no position_ids"):
        model(**batch)
    with pytest.raises(ConfigError, match="sequences have 20 tokens, seq_length says 24"):
        model(**{name: value[:, :10] for name, value in {**batch, "position_ids": positions}.items()})
    with pytest.raises(UnsupportedError, match="masks of four dimensions"):
        model(**batch, position_ids=positions, attention_mask=torch.zeros(2, 1, 12, 12))
    with pytest.raises(UnsupportedError, match="output_attentions"):
        model(**batch, position_ids=positions, output_attentions=True)
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(2):
        cache.update(*torch.zeros(2, 2, 2, 3, 8), layer)
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"  # transformers 5.24 renamed it
    with pytest.raises(UnsupportedError, match="cannot continue from a cache"):
        model(**batch, position_ids=positions, **{name: cache})
    assert model(**batch, position_ids=positions).logits.isfinite().all()
    other = build(llama)
    UlyssesSPAttentionHF.register_with_transformers(other, None, 2, 2)
    with pytest.raises(StateError, match="rank 1 of the group"):
        rows = 1 + ranks.rank()
        other(**{name: value[:rows] for name, value in {**batch, "position_ids": positions}.items()})


def test_what_a_forward_refuses() -> None:
    ranks.run_ranks(forward_refusals, 2)


# -------------------------------------------------------------------------------------------------------------- batches


def adapter(rows: list[dict[str, Any]], batch_size: int = 1, **extra: Any) -> UlyssesSPDataLoaderAdapter:
    loader = DataLoader(rows, batch_size=batch_size, **extra)  # type: ignore[arg-type]
    return UlyssesSPDataLoaderAdapter(loader, ranks.rank(), dist.group.WORLD, ranks.world(), "cpu")  # type: ignore[arg-type]


def slices() -> tuple[list[dict[str, list[Any]]], int]:
    """Two batches per rank, of lengths that differ between ranks; batches as lists."""
    rank = ranks.rank()
    rows = [{"input_ids": torch.arange(5 - rank) + 100 * rank + 10 * turn, "labels": torch.arange(5 - rank)} for turn in range(2)]
    found = adapter(rows)
    steps = [{name: value[0].tolist() for name, value in batch.items()} for batch in found]
    assert [{name: value[0].tolist() for name, value in batch.items()} for batch in found] == steps  # another epoch
    assert next(found)["input_ids"][0].tolist() == steps[0]["input_ids"]
    return steps, len(found)


def test_slices_of_the_batches_of_all_ranks() -> None:
    (first, count), (second, _) = ranks.run_ranks(slices, 2)
    assert count == len(first) == 4
    assert first[0] == {"input_ids": [0, 1, 2], "position_ids": [0, 1, 2], "shift_labels": [1, 2, 3]}
    assert second[0] == {"input_ids": [3, 4, 0], "position_ids": [3, 4, 5], "shift_labels": [4, -100, -100]}
    assert (first[1]["input_ids"], second[1]["input_ids"]) == ([100, 101], [102, 103])
    assert (first[3]["input_ids"], second[3]["input_ids"]) == ([110, 111], [112, 113])


def uneven() -> tuple[int, str]:
    rows = [{"input_ids": torch.arange(4)} for _ in range(3 - ranks.rank())]
    count = len(list(adapter(rows)))
    bad = [{"input_ids": torch.arange(4), "pixels": torch.zeros(3, 8, 8)} if ranks.rank() else {"input_ids": torch.arange(4)}]
    with pytest.raises(ConfigError) as caught:
        list(adapter(bad))
    return count, str(caught.value)


def test_loaders_that_end_apart_and_tensors_that_cannot_be_cut() -> None:
    (count, message), other = ranks.run_ranks(uneven, 2)
    assert count == 4 and other == (count, message)
    assert "pixels of a batch has shape (1, 3, 8, 8), and input_ids has 1 rows of 4 tokens" in message


def test_other_values_and_masks_are_kept() -> None:
    lengths = torch.tensor([0, 1, 3], dtype=torch.int32)
    packed = {"input_ids": torch.arange(3)[None], "position_ids": torch.tensor([[0, 0, 1]]), "cu_seq_lens_q": lengths, "max_length_q": 2}
    assert prepare(packed, 2)[0].keys() == {"input_ids", "position_ids"} and not prepare(packed, 2)[1]
    batch = {"input_ids": torch.arange(6).view(2, 3), "attention_mask": torch.ones(2, 3, dtype=torch.bool), "name": "x", "nothing": None}
    tensors, rest = prepare(batch, 2)
    assert rest == {"name": "x", "nothing": None}
    assert tensors["attention_mask"].tolist() == [[[True, True], [True, True]], [[True, False], [True, False]]]
    assert tensors["position_ids"].tolist() == [[[0, 1], [0, 1]], [[2, 3], [2, 3]]]


def traffic() -> tuple[int, int]:
    """Bytes that a rank sends in a forward, and in its backward."""
    from hf_zero.sequence_parallel.forward import SlicedForwards, bound_forwards

    model = build(llama)
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 2)
    bound = bound_forwards(model)
    assert isinstance(bound, SlicedForwards)
    network, batch = bound.collectives, cut(Data().batch(0), ranks.rank(), 2)
    before = network.sent_bytes
    loss = model(**batch, labels=batch["shift_labels"]).loss
    after = network.sent_bytes
    loss.backward()
    return after - before, network.sent_bytes - after


def test_bytes_sent_are_those_of_the_formula() -> None:
    rows, tokens, hidden, ranks_, layers = 2, 24, 32, 2, 2
    each = rows * tokens * hidden * 4 // ranks_ * (2 + 2 * 2 // 4) * (ranks_ - 1) // ranks_  # half as many key heads as query heads
    positions = rows * tokens // ranks_ * 8
    assert ranks.run_ranks(traffic, 2) == [(layers * each + positions, layers * each)] * 2


def test_the_configuration_of_what_stands_for_a_model_is_looked_at() -> None:
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    with pytest.raises(ConfigError, match="'flash_attention_2' does not match model config attn_implementation 'sdpa'"):
        UlyssesSPAttentionHF.register_with_transformers(model, "flash_attention_2", 2, 1)
