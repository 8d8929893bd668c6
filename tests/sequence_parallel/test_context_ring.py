"""Keys and values that are passed around: blocks that are merged are the whole attention, and training is that of one rank."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hf_zero
from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.topology import axis_over
from hf_zero.errors import UnsupportedError
from hf_zero.sequence_parallel import blocks
from hf_zero.sequence_parallel import gathered as gathered_keys
from hf_zero.sequence_parallel.blocks import Scores
from hf_zero.sequence_parallel.gathered import ContextAttention
from hf_zero.sequence_parallel.joining import Layout
from hf_zero.sequence_parallel.masks import RowMasks
from tests.sequence_parallel.context import check, config, script_batch
from tests.sequence_parallel.kinds import MASKS, mistral
from tests.support import ranks, zoo
from tests.support.context_attention import ring_of
from tests.support.parity import Run
from tests.support.sequences import Data, build, llama

pytest.importorskip("transformers", minversion="5.0")
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402 - where there is transformers


def parts(queries: int, keys: int, width: int, of_value: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((2, 3, queries, width), (2, 3, keys, width), (2, 3, keys, of_value))
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("of_value", [8, 5], ids=["fused", "by rows"])
@pytest.mark.parametrize("masked", ["", "bool", "added"])
def test_merged_blocks_are_the_whole_attention(of_value: int, masked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_TILE", 2 * 3 * 12 * 3)  # several tiles
    query, key, value = parts(7, 12, 8, of_value)
    mask = None
    if masked:
        seen = torch.rand(2, 1, 7, 12, generator=torch.Generator().manual_seed(1)) < 0.6
        seen[0, 0, 3] = False  # a query that sees nothing
        seen[..., :5] &= torch.arange(7)[:, None] != 4  # and one that sees nothing of the first block
        mask = seen if masked == "bool" else torch.where(seen, 0.5, -torch.inf).double()
    inputs = [part.clone().requires_grad_() for part in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=0.3)
    if masked == "added":
        expected = torch.where((mask == -torch.inf).all(-1, keepdim=True), 0.0, expected)
    above = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=expected.dtype)
    cuts = [slice(0, 5), slice(5, 12)]
    rules = [Scores(0.3, mask=mask[..., cut] if mask is not None else None) for cut in cuts]
    out, lse = blocks.attend(query, key[:, :, cuts[0]], value[:, :, cuts[0]], rules[0])
    blocks.merge(out, lse, *blocks.attend(query, key[:, :, cuts[1]], value[:, :, cuts[1]], rules[1]))
    torch.testing.assert_close(out, expected.detach())
    if masked == "added":
        above[0, :, 3] = 0  # torch's gradient of a row of nothing is no number
    wanted = torch.autograd.grad((torch.nan_to_num(expected) * above).sum(), inputs) if masked != "added" else None
    found = [
        blocks.gradients(query, key[:, :, cut], value[:, :, cut], rule, out, lse, above) for cut, rule in zip(cuts, rules, strict=True)
    ]
    of_query, of_key = found[0][0] + found[1][0], torch.cat([found[0][1], found[1][1]], 2)
    of_value_ = torch.cat([found[0][2], found[1][2]], 2)
    if wanted is not None:
        for mine, theirs in zip((of_query, of_key, of_value_), wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
    assert all(torch.isfinite(part).all() for part in (of_query, of_key, of_value_))


@pytest.mark.parametrize("of_value", [8, 5])
def test_a_causal_block_is_causal(of_value: int) -> None:
    query, key, value = parts(9, 9, 8, of_value, torch.float32)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    out, lse = blocks.attend(query, key, value, Scores(8**-0.5, causal=True))
    torch.testing.assert_close(out, expected)
    scores = (query @ key.mT / math.sqrt(8)).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_the_kernel_of_cuda_gets_logarithms_that_lie_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores their strides: gradients of a part of the queries were wrong."""
    given: list[Tensor] = []

    class Kernels:
        @staticmethod
        def _scaled_dot_product_flash_attention_backward(above: Tensor, *parts: Any, **_: Any) -> tuple[Tensor, ...]:
            given.append(parts[4])
            return tuple(part.clone() for part in parts[:3])

    monkeypatch.setattr(blocks, "_ATEN", Kernels)
    monkeypatch.setattr(blocks, "CUDA_KERNELS", ["meta"])
    query, key, value = (part.bfloat16().to("meta") for part in parts(8, 8, 8, 8))
    lse, rows = torch.empty(2, 3, 8, device="meta"), slice(4, 8)
    blocks.gradients(query[:, :, rows], key, value, Scores(1.0), query[:, :, rows], lse[:, :, rows], query[:, :, rows])
    assert given[0].shape == (2, 3, 4) and given[0].is_contiguous()


@pytest.mark.parametrize("heads_at_once", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("key_heads", [1, 2, 8])
def test_heads_in_turn_are_all_heads(key_heads: int, heads_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of 3 of 24 tokens, 8 query heads: torch's attention of these rows, and no more copies and gradients of keys than fit."""
    generator, runs, scale = torch.Generator().manual_seed(4), [(3, 6), (18, 21)], 0.3
    shapes = ((8, 6), (key_heads, 24), (key_heads, 24))
    query, key, value = (torch.randn(2, *shape, 8, generator=generator).requires_grad_() for shape in shapes)
    above = torch.randn(2, 8, 6, 8, generator=generator)
    rows = torch.cat([torch.arange(*run) for run in runs])
    seen = torch.arange(24) <= rows[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=True)
    wanted = torch.autograd.grad((expected * above).sum(), (query, key, value))
    taken, attend, gradients = [], gathered_keys.attend, gathered_keys.gradients
    given = {part.untyped_storage().data_ptr() for part in (key, value)}

    def copies(*parts: Tensor) -> int:
        return sum(part.untyped_storage().nbytes() for part in parts if part.untyped_storage().data_ptr() not in given)

    def forward(part: Tensor, *others: Any) -> Any:
        taken.append((part.shape[1], copies(*others[:2])))
        return attend(part, *others)

    def backward(part: Tensor, *others: Any) -> Any:
        found = gradients(part, *others)
        taken.append((part.shape[1], copies(*others[:2]) + found[1].nbytes + found[2].nbytes))
        return found

    monkeypatch.setattr(gathered_keys, "attend", forward)
    monkeypatch.setattr(gathered_keys, "gradients", backward)
    monkeypatch.setattr(gathered_keys, "_AT_ONCE_BYTES", heads_at_once * 4 * 2 * 24 * (8 + 8))
    out = gathered_keys._Causal.apply(runs, scale, query, key, value)
    found = torch.autograd.grad((out * above).sum(), (query, key, value))
    assert max(nbytes for _, nbytes in taken) <= gathered_keys._AT_ONCE_BYTES, taken
    assert (max(taken)[0] == 8) == (heads_at_once >= 8 or key_heads in (1, 8)) and len({heads for heads, _ in taken}) <= 4, taken
    for mine, theirs in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_dropped_weights_are_dropped_in_backward_too() -> None:
    """The gradients of a block with dropout are those of finite differences of it."""
    query, key, value = parts(4, 6, 3, 3)
    rules, above = Scores(0.5, dropout=0.4, seed=9), torch.ones(2, 3, 4, 3, dtype=torch.float64)
    out, lse = blocks.attend(query, key, value, rules)
    plain, _ = blocks.attend(query, key, value, Scores(0.5))
    assert not torch.equal(out, plain)
    found = blocks.gradients(query, key, value, rules, out, lse, above)
    for place, part in enumerate((query, key, value)):
        other, step = part.clone(), 1e-6
        other[1, 2, 1, 1] += step
        moved = [other if place == index else given for index, given in enumerate((query, key, value))]
        slope = float((blocks.attend(*moved, rules)[0] - out).sum() / step)  # type: ignore[call-arg]
        assert slope == pytest.approx(float(found[place][1, 2, 1, 1]), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("world", [2, 3])
def test_a_ring_is_the_whole_attention_and_sends_what_the_page_says(world: int) -> None:
    assert len(set(ranks.run_ranks(ring_of, world, torch.float64))) == 1


def gathered(of_value: int) -> None:
    """Gathered keys: attention of the two runs without a mask is torch's, with one message each way of the bytes that the page says."""
    world, length, heads, shared, width = dist.get_world_size(), 12 * dist.get_world_size(), 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, width), (shared, width), (shared, of_value))
    whole = [torch.randn(2, count, length, size, generator=generator).requires_grad_() for count, size in sizes]
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    above = torch.randn(expected.shape, generator=generator)
    wanted = torch.autograd.grad((expected * above).sum(), whole)
    collectives = open_collectives(axis_over(dist.group.WORLD))  # type: ignore[arg-type]
    layout = Layout(collectives)
    layer = torch.nn.Identity()
    layer.num_key_value_groups = heads // shared  # type: ignore[assignment]
    attention, masks = ContextAttention(layer, layout, collectives, None), []

    def core(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        masks.append(mask)
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)

    core.__module__ = sdpa_attention_forward.__module__
    before, mine = collectives.sent_bytes, [layout.cut(part.detach(), 2).requires_grad_() for part in whole]
    found, _ = attention.attend(core, layer, *mine, None)
    torch.testing.assert_close(found.transpose(1, 2), layout.cut(expected, 2))
    (found.transpose(1, 2) * layout.cut(above, 2)).sum().backward()
    assert collectives.sent_bytes - before == 2 * (2 * shared * (length // world) * (width + of_value) * 4) * (world - 1)
    for part, gradient in zip(mine, wanted, strict=True):
        torch.testing.assert_close(part.grad, layout.cut(gradient, 2))
    assert len(masks) == (0 if of_value == width else 2)  # torch's kernel serves, or the model's function with two masks


@pytest.mark.parametrize("of_value", [8, 5])
def test_gathered_keys_are_the_whole_attention_and_send_what_the_page_says(of_value: int) -> None:
    ranks.run_ranks(gathered, 2, of_value)


def each(names: list[str]) -> None:
    for name in names:
        make, run, data = MASKS[name]
        check(make, run, data, 2, strategy="alltoall")
    check(partial(zoo.build, "BertForMaskedLM"), Run(stage=2), Data(length=16, padding="right"), 2, strategy="alltoall")


def test_training_over_two_ranks() -> None:
    ranks.run_ranks(each, 2, [name for name in MASKS if "eager" not in name])


def of_four() -> None:
    check(partial(llama, kv_heads=1), Run(stage=3, accumulation=2), Data(padding="left", prompt=7), 4, strategy="alltoall")
    check(mistral, Run(stage=1, clip=0.5), Data(packed=True), 2, strategy="alltoall", sequence=2)
    check(partial(zoo.build, "DeepseekV3ForCausalLM"), Run(stage=2), Data(length=16), 4, strategy="alltoall")  # head sizes differ
    check(llama, Run(stage=2), Data(), 2, strategy="alltoall", tensor=2)


@pytest.mark.slow  # two ranks have every mask
def test_training_over_four_ranks() -> None:
    ranks.run_ranks(of_four, 4)


def dropped() -> None:
    model = build(partial(llama, attention_dropout=0.5))
    engine = hf_zero.initialize(model=model, config=config(Run(stage=1), 2, strategy="alltoall"))[0]
    torch.manual_seed(5)
    batch = script_batch(Data(), 0)
    losses = [float(engine(**batch).loss) for _ in range(2)]
    assert losses[0] != losses[1]
    with pytest.raises(UnsupportedError, match=r"made with attn_implementation='eager'; make it with 'sdpa', or choose 'allgather'"):
        hf_zero.initialize(model=llama(implementation="eager"), config=config(Run(stage=1), 2, strategy="alltoall"))


def test_dropout_and_other_attention() -> None:
    ranks.run_ranks(dropped, 2)


def test_rows_of_a_mask_by_positions_and_by_lengths() -> None:
    """Mask functions of transformers take the positions of rows before 5.4, and a length and an offset since."""
    masks = object.__new__(RowMasks)
    masks.layout = cast(Layout, SimpleNamespace(parts=lambda length: [(0, 2), (length - 2, length)]))
    given = {"cache_position": torch.arange(8) + 3, "batch_size": 1}
    assert [chosen["cache_position"].tolist() for chosen in masks._arguments_of_rows(given)] == [[3, 4], [9, 10]]
    assert given == {"batch_size": 1}
    given = {"q_length": 8, "q_offset": 3, "batch_size": 1}
    assert masks._arguments_of_rows(given) == [{"q_length": 2, "q_offset": 3}, {"q_length": 2, "q_offset": 9}]
    assert given == {"batch_size": 1}
