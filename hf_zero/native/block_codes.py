"""The message of a vector that is encoded in blocks: one fp32 scale per block, then integers of 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

QUANTIZE_BLOCK = 256  # elements with one scale; HFZ_QUANTIZE_BLOCK of the native library
LARGEST = {8: 127, 4: 28}
"""Bits of an integer -> the largest multiple of the scale that it can represent; the smallest is its negative."""

_SCALE_BYTES = 4


@dataclass(frozen=True)
class KeptError:
    """Error of all codes so far, as a moving average that is added before the next encoding (Xie et al., "LoCo", arXiv:2407.04480).

    Attributes:
        messages: The error as codes of 8 bits, (parts, message_bytes(n, 8)) uint8; updated. Zeros at the start.
        keep: Weight of the old error in the new one, from 0 (only the error of the last code) to 1 (no error is recorded).
    """

    messages: torch.Tensor
    keep: float

    @property
    def take(self) -> float:
        """Return the weight of the newest code's error in the moving average."""
        return 1.0 - self.keep


def block_count(numel: int) -> int:
    """Return the number of blocks of a vector of ``numel`` elements."""
    return -(-numel // QUANTIZE_BLOCK)


def code_bytes(numel: int, bits: int) -> int:
    """Return the number of bytes of the integers of ``numel`` elements, without scales."""
    return -(-numel * bits // 8)


def message_bytes(numel: int, bits: int) -> int:
    """Return the number of bytes of the message of ``numel`` elements: a multiple of four, so that the scales of all rows are aligned."""
    return block_count(numel) * _SCALE_BYTES + -(-code_bytes(numel, bits) // 4) * 4


def scales_of(message: torch.Tensor, numel: int) -> torch.Tensor:
    """Return the scales at the head of a message, or of each row of messages: (..., blocks) fp32, a view."""
    return message[..., : block_count(numel) * _SCALE_BYTES].view(torch.float32)


def codes_of(message: torch.Tensor, numel: int, bits: int) -> torch.Tensor:
    """Return the integers after the scales: (..., code_bytes) uint8, a view."""
    start = block_count(numel) * _SCALE_BYTES
    return message[..., start : start + code_bytes(numel, bits)]
