"""Compute the codes of 1-bit Adam with Triton kernels, for tensors on a GPU: as many passes over memory as on a host, the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_zero.native import codes_reference
from hf_zero.native.chunks import CHUNK_NUMEL, ChunkTable, Fresh, Sent, Target, build_chunks
from hf_zero.native.library import triton_serves

# Every product and sum is rounded separately, as in torch's operations.
_EXACT = {"enable_fp_fusion": False}


def serves(device: torch.device) -> bool:
    """Return whether these functions can be used for tensors on ``device``; see [Note: trying a kernel first]."""
    return triton_serves(device, "1-bit Adam", agrees)


def agrees(device: torch.device) -> bool:
    """Return whether a vector encoded on ``device`` equals the one that plain torch encodes, bit for bit.

    Raises:
        Exception: Any error of Triton on a device where it does not work.
    """
    table = build_chunks([(0, 1500), (1504, 1600)], 1632, device)
    values = torch.linspace(-1, 1, 3 * table.numel, device=device).view(3, -1).clone()
    values[:, 1600:] = values[:, 1500:1504] = 0
    found = []
    for functions in (compress, codes_reference.compress):
        error, bits = values[0].clone(), torch.zeros(table.numel // 8, dtype=torch.uint8, device=device)
        scales = torch.zeros(table.chunks, device=device)
        functions(error, table, bits, scales, None, Fresh(values[1], values[2], 0.9, 0.1))
        found.append((error, bits, scales))
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def _kernels() -> Any:
    from hf_zero.native import triton_kernels  # only here: without Triton it cannot be imported

    return triton_kernels


def compress(
    error: torch.Tensor,
    table: ChunkTable,
    bits: torch.Tensor,
    scales: torch.Tensor,
    alive: torch.Tensor | None = None,
    fresh: Fresh | None = None,
) -> None:
    """Compute ``codes.compress``; ``bits`` must contain zeros."""
    _code(error, table, bits, scales, alive, fresh=fresh)


def recompress(
    error: torch.Tensor, table: ChunkTable, sent: Sent, bits: torch.Tensor, scales: torch.Tensor, alive: torch.Tensor | None = None
) -> None:
    """Compute ``codes.recompress``; ``bits`` must contain zeros."""
    _code(error, table, bits, scales, alive, sent=sent)


def _code(
    error: torch.Tensor,
    table: ChunkTable,
    bits: torch.Tensor,
    scales: torch.Tensor,
    alive: torch.Tensor | None,
    fresh: Fresh | None = None,
    sent: Sent | None = None,
) -> None:
    if not table.chunks:
        return
    mix = (fresh.momentum, fresh.grad, fresh.beta, fresh.weight) if fresh else (error, error, 0.0, 0.0)
    rows = _rows(sent) if sent else (bits, 0, scales, 0)
    _kernels().compress[(table.chunks,)](
        table.starts, table.counts, *mix, *rows, _bytes(alive, bits), error, bits, scales,
        WORKERS=sent.workers if sent else 1, HAS_FRESH=fresh is not None, HAS_SENT=sent is not None, HAS_ALIVE=alive is not None,
        BLOCK=CHUNK_NUMEL, **_EXACT,
    )  # fmt: skip


def decompress(out: torch.Tensor, table: ChunkTable, sent: Sent, alive: torch.Tensor | None = None) -> None:
    """Compute ``codes.decompress``."""
    if table.chunks:
        arguments = (table.starts, table.counts, *_rows(sent), _bytes(alive, sent.bits), out)
        options = {"WORKERS": sent.workers, "HAS_ALIVE": alive is not None, "BLOCK": CHUNK_NUMEL, **_EXACT}
        _kernels().decompress[(table.chunks,)](*arguments, **options)


def take(table: ChunkTable, bits: torch.Tensor, scales: torch.Tensor, targets: Sequence[Target], alive: torch.Tensor | None = None) -> None:
    """Compute ``codes.take``."""
    for target in targets:
        if target.last == target.first:
            continue
        rule = target.rule
        _kernels().take[(target.last - target.first,)](
            table.starts, table.counts, target.first, target.start, bits, scales, _bytes(alive, bits),
            target.momentum, target.master, target.variance, rule.decay, rule.divisor, rule.eps, rule.minus_step,
            DECAYS=rule.decay != 1.0, EPS_INSIDE=rule.eps_inside, HAS_ALIVE=alive is not None, BLOCK=CHUNK_NUMEL, **_EXACT,
        )  # fmt: skip


def _rows(sent: Sent) -> tuple[Any, ...]:
    return sent.bits, sent.bits.stride(0), sent.scales, sent.scales.stride(0)


def _bytes(alive: torch.Tensor | None, otherwise: torch.Tensor) -> torch.Tensor:
    """Return ``alive`` as bytes; if it is None, any tensor of bytes, which the kernel does not read."""
    return otherwise if alive is None else alive.view(torch.uint8)
