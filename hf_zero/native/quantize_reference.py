"""The codes of ZeRO++ in plain torch, on any device: what every kernel is compared with, and what serves where there is none."""

from __future__ import annotations

import math

import torch

from hf_zero.native.block_codes import LIMITS, QUANTIZE_BLOCK, KeptError, codes_of, scales_of

LEAST_OF_BLOCK = 2.0**-100


def quantize(values: torch.Tensor, message: torch.Tensor, bits: int, error: KeptError | None = None) -> None:
    """As ``quantize`` in plain torch; any device."""
    numel = values.numel()
    blocks = _blocks(values.float())
    old = torch.zeros_like(blocks)
    if error is not None:
        old = _decoded(error.message, numel, 8)
        blocks = blocks + old
    scales, integers = _coded(blocks, bits)
    scales_of(message, numel).copy_(scales)
    codes_of(message, numel, bits).copy_(_packed(integers, numel, bits))
    if error is None:
        return
    lost = blocks - integers.float() * scales.unsqueeze(1)
    mixed = old * error.keep + lost * error.take
    found, kept = _coded(mixed, 8)
    found = torch.where(found.isnan(), 0.0, found)
    defined = ~scales.isnan()
    scales_of(error.message, numel)[defined] = found[defined]
    before = _unpacked(codes_of(error.message, numel, 8), numel, 8)
    codes_of(error.message, numel, 8).copy_(_packed(torch.where(defined.unsqueeze(1), kept, before), numel, 8))


def dequantize(messages: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    """As ``dequantize`` in plain torch; any device."""
    total: torch.Tensor | None = None
    for message in messages:
        part = _decoded(message, out.numel(), bits)
        total = part if total is None else total.add_(part)
    if total is not None:
        out.copy_(total.view(-1)[: out.numel()])


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """(blocks, QUANTIZE_BLOCK), zeros behind the last element."""
    return torch.nn.functional.pad(values, (0, -values.numel() % QUANTIZE_BLOCK)).view(-1, QUANTIZE_BLOCK)


def _coded(blocks: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, (blocks,) fp32, and integers, (blocks, QUANTIZE_BLOCK) int8."""
    largest = blocks.abs().amax(1)  # NaN where one is
    limit = torch.full_like(largest, LIMITS[bits])  # a tensor: some devices multiply by the reciprocal of a number
    scales = torch.where(largest < LEAST_OF_BLOCK, 0.0, largest / limit)
    scales = torch.where(torch.isfinite(largest), scales, math.nan)
    live = (scales > 0).unsqueeze(1)
    quotients = torch.where(live, blocks, 0.0) / torch.where(live, scales.unsqueeze(1), 1.0)
    return scales, quotients.round().to(torch.int8)


def _decoded(message: torch.Tensor, numel: int, bits: int) -> torch.Tensor:
    """What a message stands for, (blocks, QUANTIZE_BLOCK) fp32."""
    return _unpacked(codes_of(message, numel, bits), numel, bits).float() * scales_of(message, numel).unsqueeze(1)


def _packed(integers: torch.Tensor, numel: int, bits: int) -> torch.Tensor:
    """The bytes of (blocks, QUANTIZE_BLOCK) int8; those behind ``numel`` are zero."""
    flat = integers.view(torch.uint8).view(-1)
    if bits == 8:
        return flat[:numel]
    halves = flat.view(-1, 2) & 15
    return (halves[:, 0] | (halves[:, 1] << 4))[: -(-numel // 2)]


def _unpacked(codes: torch.Tensor, numel: int, bits: int) -> torch.Tensor:
    """(blocks, QUANTIZE_BLOCK) int8, zeros behind ``numel``."""
    if bits == 8:
        return _blocks(codes.view(torch.int8))
    halves = torch.stack([codes & 15, codes >> 4], 1).view(-1)[:numel].view(torch.int8)
    return _blocks((halves ^ 8) - 8)
