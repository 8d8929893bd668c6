"""Compute the codes of ZeRO++ in plain torch, on any device: the reference of every kernel, and the fallback without kernels."""

from __future__ import annotations

import math

import torch

from hf_zero.native.block_codes import LARGEST, QUANTIZE_BLOCK, KeptError, codes_of, scales_of

LEAST_OF_BLOCK = 2.0**-100


def quantize(values: torch.Tensor, messages: torch.Tensor, bits: int, error: KeptError | None = None) -> None:
    """Compute ``quantize.quantize`` in plain torch; any device."""
    numel = values.numel() // len(messages)
    blocks = _blocks(values.float().view(-1, numel))
    old = torch.zeros_like(blocks)
    if error is not None:
        old = _decoded(error.messages, numel, 8)
        blocks = blocks + old
    scales, integers = _coded(blocks, bits)
    scales_of(messages, numel).copy_(scales)
    codes_of(messages, numel, bits).copy_(_packed(integers, numel, bits))
    if error is None:
        return
    lost = blocks - _multiples(integers, bits) * scales.unsqueeze(-1)
    found, kept = _coded(old * error.keep + lost * error.take, 8)
    old_scales, old_codes = scales_of(error.messages, numel), codes_of(error.messages, numel, 8)
    defined = ~scales.isnan()
    old_codes.copy_(_packed(torch.where(defined.unsqueeze(-1), kept, _unpacked(old_codes, numel, 8)), numel, 8))
    old_scales.copy_(torch.where(defined, torch.where(found.isnan(), 0.0, found), old_scales))


def dequantize(messages: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """Compute ``quantize.dequantize`` in plain torch; any device."""
    parts, numel = len(messages), out.numel() // len(messages)
    total: torch.Tensor | None = None
    for worker in range(messages.shape[1]):
        part = _decoded(messages[:, worker], numel, bits)
        total = part if total is None else total.add_(part)
    if total is not None:
        out.view(parts, numel).copy_(total.view(parts, -1)[:, :numel])


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """Return (parts, n) as (parts, blocks, QUANTIZE_BLOCK), with zeros after the last element."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % QUANTIZE_BLOCK)).view(len(values), -1, QUANTIZE_BLOCK)


def _coded(blocks: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales, (parts, blocks) fp32, and integers, (parts, blocks, QUANTIZE_BLOCK) int8."""
    largest = blocks.abs().amax(-1)  # NaN if an element is NaN
    limit = torch.full_like(largest, LARGEST[bits])  # a tensor, because some devices replace division by a number with a product
    scales = torch.where(largest < LEAST_OF_BLOCK, 0.0, largest / limit)
    scales = torch.where(torch.isfinite(largest), scales, math.nan)
    live = (scales > 0).unsqueeze(-1)
    quotients = torch.where(live, blocks, 0.0) / torch.where(live, scales.unsqueeze(-1), 1.0)
    return scales, (quotients.round() if bits == 8 else _nearest_of_4(quotients)).to(torch.int8)


def _nearest_of_4(quotients: torch.Tensor) -> torch.Tensor:
    """Return the integers from -7 to 7 whose triangular numbers are nearest to ``quotients``; a tie goes to the even one."""
    twice = (quotients.abs() * 2 - 0.5).round()  # halfway between those of k - 1 and k, twice the quotient is k * k
    return twice.sqrt().floor() * quotients.sign()


def _multiples(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the multiples of the scale that the integers represent, fp32."""
    whole = integers.float()
    return whole if bits == 8 else whole * (whole.abs() + 1) * 0.5


def _decoded(messages: torch.Tensor, numel: int, bits: int) -> torch.Tensor:
    """Return the values of messages (parts, message bytes), (parts, blocks, QUANTIZE_BLOCK) fp32."""
    return _multiples(_unpacked(codes_of(messages, numel, bits), numel, bits), bits) * scales_of(messages, numel).unsqueeze(-1)


def _packed(integers: torch.Tensor, numel: int, bits: int) -> torch.Tensor:
    """Return the bytes of (parts, blocks, QUANTIZE_BLOCK) int8; bytes after ``numel`` elements are zero."""
    flat = integers.view(torch.uint8).view(len(integers), -1)
    if bits == 8:
        return flat[:, :numel]
    halves = flat.view(len(flat), -1, 2) & 15
    return (halves[..., 0] | (halves[..., 1] << 4))[:, : -(-numel // 2)]


def _unpacked(codes: torch.Tensor, numel: int, bits: int) -> torch.Tensor:
    """Return (parts, blocks, QUANTIZE_BLOCK) int8, with zeros after ``numel`` elements."""
    if bits == 8:
        return _blocks(codes.view(torch.int8))
    halves = torch.stack([codes & 15, codes >> 4], -1).view(len(codes), -1)[:, :numel].view(torch.int8)
    return _blocks((halves ^ 8) - 8)
