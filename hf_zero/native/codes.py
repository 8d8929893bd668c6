"""Encode vectors as one sign bit per element and one scale per chunk, all chunks of a vector in one call.

Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", arXiv:2102.02888. The native library
computes the codes on a host, Triton on a GPU, and ``codes_reference`` if both are missing; all give the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from hf_zero.native import codes_reference, triton_codes
from hf_zero.native.chunks import CHUNK_NUMEL, ChunkTable, Fresh, MoveRule, Sent, Target
from hf_zero.native.library import library_for
from hf_zero.native.passes import address, floats
from hf_zero.native.ranges import for_thread_ranges


class _Rule(ctypes.Structure):
    """Fields of ``struct hfz_move_rule``."""

    _fields_ = [*floats("decay", "divisor", "eps", "minus_step"), ("eps_inside", ctypes.c_int32)]


def _rule(rule: MoveRule) -> ctypes.Structure:
    return _Rule(rule.decay, rule.divisor, rule.eps, rule.minus_step, int(rule.eps_inside))


# -- encoding -----------------------------------------------------------------------------------------------------------


def compress(
    error: torch.Tensor,
    table: ChunkTable,
    bits: torch.Tensor,
    scales: torch.Tensor,
    alive: torch.Tensor | None = None,
    fresh: Fresh | None = None,
    threads: int = 1,
) -> None:
    """Encode ``fresh + error`` as signs and scales, and store the error of the code in ``error``.

    A chunk's scale is the sum of its magnitudes divided by its number of elements (section 4 of the paper: the compressed vector has the
    magnitude of the original). In the 1-norm this scale has the smallest error, and the error is never larger than the vector itself.

    Args:
        error: (numel,) fp32, contiguous, zero outside all chunks; updated.
        table: The chunks.
        bits: (numel // 8,) uint8, contiguous; bit ``i`` of byte ``j`` becomes 1 where element ``8 * j + i`` is at least 0.
        scales: (chunks,) fp32, contiguous; overwritten.
        alive: (numel,) bool, False outside all chunks; elements that are False take no part: their value is dropped. None: all elements
            of chunks take part.
        fresh: Momentum that is added to ``error`` first; None adds nothing.
        threads: Maximum number of threads; the result does not depend on it.
    """
    bits.zero_()
    native = library_for(error)
    if native is None:
        _without_library(error).compress(error, table, bits, scales, alive, fresh)
        return
    momentum, grad, beta, weight = (fresh.momentum, fresh.grad, fresh.beta, fresh.weight) if fresh else (None, None, 0.0, 0.0)
    mix = (address(momentum), address(grad), ctypes.c_float(beta), ctypes.c_float(weight))

    def work(first: int, last: int) -> None:
        chunks = _chunks(table, first, last)
        native.call("hfz_compress", *chunks, *mix, address(alive), address(error), address(bits), address(scales, first))

    _for_chunks(0, table.chunks, threads, work)


def recompress(
    error: torch.Tensor,
    table: ChunkTable,
    sent: Sent,
    bits: torch.Tensor,
    scales: torch.Tensor,
    alive: torch.Tensor | None = None,
    threads: int = 1,
) -> None:
    """Encode ``error`` plus the mean of the workers' vectors; the arguments are those of ``compress`` and ``decompress``."""
    bits.zero_()
    native = library_for(error)
    if native is None:
        _without_library(error).recompress(error, table, sent, bits, scales, alive)
        return

    def work(first: int, last: int) -> None:
        arguments = (*_chunks(table, first, last), *_sent(sent, first), address(alive))
        native.call("hfz_recompress", *arguments, address(error), address(bits), address(scales, first))

    _for_chunks(0, table.chunks, threads, work)


# -- decoding -----------------------------------------------------------------------------------------------------------


def decompress(out: torch.Tensor, table: ChunkTable, sent: Sent, alive: torch.Tensor | None = None, threads: int = 1) -> None:
    """Compute the mean of the workers' vectors: each element is plus or minus its chunk's scale; the sum runs in the workers' order.

    Args:
        out: (numel,) fp32, contiguous; its chunks are overwritten, other elements do not change.
        table: The chunks.
        sent: The codes.
        alive: See ``compress``; elements that are False become 0.
        threads: Maximum number of threads; the result does not depend on it.
    """
    native = library_for(out)
    if native is None:
        _without_library(out).decompress(out, table, sent, alive)
        return

    def work(first: int, last: int) -> None:
        native.call("hfz_decompress", *_chunks(table, first, last), *_sent(sent, first), address(alive), address(out))

    _for_chunks(0, table.chunks, threads, work)


# -- the update ---------------------------------------------------------------------------------------------------------


def move(master: torch.Tensor, momentum: torch.Tensor, variance: torch.Tensor, rule: MoveRule, threads: int = 1) -> None:
    """Update ``master`` along ``momentum`` with a fixed ``variance``, in place; every operation is rounded separately.

    Args:
        master: (n,) fp32, contiguous; updated.
        momentum: (n,) fp32, contiguous.
        variance: (n,) fp32, contiguous.
        rule: The rule of the update.
        threads: Maximum number of threads; the result does not depend on it.
    """
    native = library_for(master)
    if native is None:
        codes_reference.move(master, momentum, variance, rule)
        return
    numbers = _rule(rule)

    def work(start: int, stop: int) -> None:
        places = (address(tensor, start) for tensor in (master, momentum, variance))
        native.call("hfz_move", ctypes.c_int64(stop - start), *places, ctypes.byref(numbers))

    for_thread_ranges(master.numel(), threads, work)


def take(
    table: ChunkTable,
    bits: torch.Tensor,
    scales: torch.Tensor,
    targets: Sequence[Target],
    alive: torch.Tensor | None = None,
    threads: int = 1,
) -> None:
    """Decode a momentum and update masters along it, in one pass over memory.

    Args:
        table: The chunks.
        bits: (numel // 8,) uint8, contiguous.
        scales: (chunks,) fp32, contiguous.
        targets: Targets of the decoded momentum; they need not cover all chunks.
        alive: See ``decompress``.
        threads: Maximum number of threads; the result does not depend on it.
    """
    native = library_for(bits)
    if native is None:
        _without_library(bits).take(table, bits, scales, targets, alive)
        return
    for target in targets:
        numbers = _rule(target.rule)
        places = [ctypes.c_int64(target.start), *(address(tensor) for tensor in (target.momentum, target.master, target.variance))]

        def work(first: int, last: int, places: Sequence[object] = places, numbers: ctypes.Structure = numbers) -> None:
            arguments = (*_chunks(table, first, last), address(bits), address(scales, first), address(alive))
            native.call("hfz_take", *arguments, *places, ctypes.byref(numbers))

        _for_chunks(target.first, target.last, threads, work)


# -- calls ----------------------------------------------------------------------------------------------------------------


def _chunks(table: ChunkTable, first: int, last: int) -> tuple[object, ...]:
    return ctypes.c_int64(last - first), address(table.starts, first), address(table.counts, first)


def _sent(sent: Sent, first: int) -> tuple[object, ...]:
    """Return the arguments of a native call that pass the workers' codes from chunk ``first`` on."""
    strides = (ctypes.c_int64(tensor.stride(0)) for tensor in (sent.bits, sent.scales))
    return sent.workers, address(sent.bits), next(strides), address(sent.scales, first), next(strides)


def _for_chunks(first: int, last: int, threads: int, work: Callable[[int, int], None]) -> None:
    """Call ``work(start, stop)`` for ranges of chunks that cover ``first`` to ``last``."""

    def part(start: int, stop: int) -> None:  # in elements, as if all chunks were full
        work(first + start // CHUNK_NUMEL, first + -(-stop // CHUNK_NUMEL))

    for_thread_ranges((last - first) * CHUNK_NUMEL, threads, part, step=CHUNK_NUMEL)


def _without_library(tensor: torch.Tensor) -> ModuleType:
    """Return the module whose functions of the same names replace the native library for ``tensor``: Triton's or torch's."""
    return triton_codes if triton_codes.serves(tensor.device) else codes_reference
