"""Attention of context parallelism beside PyTorch's, on the ranks' device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.topology import axis_over
from hf_zero.sequence_parallel import gathered
from hf_zero.sequence_parallel.blocks import Scores
from hf_zero.sequence_parallel.joining import Layout
from hf_zero.sequence_parallel.ring import _Ring, _Rules
from tests.support import ranks


def heads_in_turn() -> None:
    """Compare context parallelism's attention of two runs of tokens in bf16 with PyTorch's of all tokens in fp32, by the numbers of key
    heads and of heads at a time."""
    length, width, heads, runs, scale = 256, 64, 8, [(32, 64), (192, 224)], 0.125
    rows = torch.cat([torch.arange(*run, device=ranks.device()) for run in runs])
    seen = torch.arange(length, device=ranks.device()) <= rows[:, None]
    for key_heads in (1, 2, 8):
        torch.manual_seed(3)
        shapes = ((heads, len(rows)), (key_heads, length), (key_heads, length), (heads, len(rows)))
        *parts, above = (torch.randn(2, *shape, width, device=ranks.device()).bfloat16() for shape in shapes)
        wide = [part.float().requires_grad_() for part in parts]
        whole = [part.repeat_interleave(heads // part.shape[1], dim=1) for part in wide]
        expected = torch.nn.functional.scaled_dot_product_attention(*whole, attn_mask=seen, scale=scale)
        wanted = torch.autograd.grad((expected * above).sum(), wide)
        for at_once in (1, 3, 100):
            nbytes = at_once * 2 * length * 2 * width * (2 + 4)
            with mock.patch.object(gathered, "_AT_ONCE_BYTES", nbytes):
                mine = [part.clone().requires_grad_() for part in parts]
                out = gathered._Causal.apply(runs, scale, *mine)  # type: ignore[no-untyped-call]
                found = torch.autograd.grad((out * above).sum(), mine)
            for name, own, other in zip(("output", "query", "key", "value"), (out, *found), (expected, *wanted), strict=True):
                off = float((own.float() - other).norm() / other.norm())
                assert off < 8e-3, f"{key_heads} key heads, {at_once} at a time: {name} is off by {off:.2g}"


def ring_of(dtype: torch.dtype) -> int:
    """One attention with grouped keys beside torch's, and the bytes that a rank sends."""
    world, length, heads, shared, width = dist.get_world_size(), 12 * dist.get_world_size(), 4, 2, 8
    torch.manual_seed(0)
    shapes = [(2, count, length, width) for count in (heads, shared, shared, heads)]
    *whole, above = (torch.randn(shape, dtype=dtype).to(ranks.device()).requires_grad_() for shape in shapes)
    above, limits = above.detach(), {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad((expected * above).sum(), whole)
    collectives = open_collectives(axis_over(dist.group.WORLD))  # type: ignore[arg-type]
    layout = Layout(collectives)
    mine = [layout.cut(part.detach(), 2).requires_grad_() for part in whole]
    rules = _Rules(Scores(width**-0.5), True, None, heads // shared)
    before = collectives.sent_bytes
    found: Any = _Ring.apply(layout, collectives, rules, *mine)  # type: ignore[no-untyped-call]
    forward = collectives.sent_bytes - before
    each = 2 * 2 * shared * (length // world) * width * dtype.itemsize  # keys and values of one place
    assert forward == (world - 1) * each
    torch.testing.assert_close(found, layout.cut(expected, 2), **limits)
    (found * layout.cut(above, 2)).sum().backward()
    wide = torch.promote_types(dtype, torch.float32).itemsize // dtype.itemsize
    assert collectives.sent_bytes - before - forward == (world - 1 + world * wide) * each
    for part, gradient in zip(mine, wanted, strict=True):
        torch.testing.assert_close(part.grad, layout.cut(gradient, 2), **limits)
    return forward
