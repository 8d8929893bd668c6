"""Memory of a step with activations kept, recomputed, moved to the host, or recomputed from inputs on the host.

    python -m benchmarks.long_sequences.activations_on_host [--length 512] [--layers 8] [--stage 3]
    python -m benchmarks.long_sequences.activations_on_host --length 64 --layers 2        # quick check

A small Llama trains two steps of bf16 on the pretend accelerator (tests/pretend), whose allocator counts bytes. It prints the peak of
allocated bytes of one of two ranks in the second step, beside the prediction of ``hf-zero plan`` for device and host. No time is measured.
"""

from __future__ import annotations

import argparse
from typing import Any

from tests.support import planned, ranks

WORLD = 2
WAYS = {
    "kept": {"checkpointing": False, "moves": False},
    "recomputed": {"checkpointing": True, "moves": False},
    "moved to the host": {"checkpointing": False, "moves": True},
    "recomputed, inputs of layers on the host": {"checkpointing": True, "moves": True},
}
LLAMA = {
    "vocab_size": 503,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
}


def cases_of(length: int, layers: int, stage: int) -> list[dict[str, Any]]:
    """Return one case for each of ``WAYS``, in the form of ``tests.support.planned``."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 0}
    # The pretend accelerator has no fused kernel.
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "foreach": True}}
    config = {"bf16": {"enabled": True}, "zero_optimization": zero, "optimizer": optimizer}
    settings = {**LLAMA, "num_hidden_layers": layers, "max_position_embeddings": length}
    common = {"model": "llama", "settings": settings, "config": config, "samples": 1, "length": length}
    return [{**common, "wish": dict(wish)} for wish in WAYS.values()]


def _planned_peaks(cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the planned peaks of device and host, in bytes; computed in a process of its own."""
    found = [planned.plan(**case, world=WORLD, on_host=False).peaks for case in cases]
    return [(peaks["device"].nbytes, peaks["host"].nbytes) for peaks in found]


def rows_of(length: int, layers: int, stage: int) -> list[tuple[str, int, int, int]]:
    """Return for each of ``WAYS``: name, measured and planned peak of the device, and planned peak of the host."""
    cases = cases_of(length, layers, stage)
    predicted = ranks.run_alone(_planned_peaks, cases, timeout=1200.0)
    real = planned.real_peaks(cases, WORLD)
    return [(name, peak, device, host) for name, peak, (device, host) in zip(WAYS, real, predicted, strict=True)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    arguments = parser.parse_args()
    print("| activations | peak of the device, MiB | planned | host, planned |\n|---|---|---|---|")
    for name, *peaks in rows_of(arguments.length, arguments.layers, arguments.stage):
        print(f"| {name} | " + " | ".join(f"{peak / 2**20:.2f}" for peak in peaks) + " |")


if __name__ == "__main__":
    main()
