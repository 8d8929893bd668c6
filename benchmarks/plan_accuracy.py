"""Plans beside runs: the allocator's peak on the pretend accelerator, and bytes sent between two gloo ranks.

    PYTHONPATH=. python benchmarks/plan_accuracy.py [--output FILE]

On the pretend accelerator (tests/pretend), whose allocator counts bytes, a plan of a device with torch's reference kernels is compared
with the most that is allocated in the second optimizer step. On CPUs the bytes that a rank sends in an optimizer step are compared with
those that the collectives count, and what it holds of parameters, masters and moments. Prints one row per combination and the worst;
nothing is timed.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from tests.support import planned

WORLD = 2
SMALL = {"vocab_size": 503, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**SMALL, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_key_value_heads": 2},
    "qwen2": {**LLAMA, "num_key_value_heads": 4},
    "mistral": {**LLAMA, "num_key_value_heads": 2},
    "gpt2": {**SMALL, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "gpt_neox": {**LLAMA},
    "opt": {**SMALL, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 256, "word_embed_proj_dim": 128},
}
FOREACH = {"type": "AdamW", "params": {"lr": 1e-3, "foreach": True}}  # the pretend accelerator has no fused kernel


def combinations() -> list[dict[str, Any]]:
    """Six models x stages x recomputation, and offload of the optimizer or of all; micro-batches in turn."""
    found = []
    for number, (model, stage) in enumerate(itertools.product(MODELS, (0, 1, 2, 3))):
        for checkpointing in (False, True):
            found.append(_case(model, stage, 1 + number % 4, checkpointing, {}))
    for model in ("llama", "gpt2"):
        for stage, offload in ((2, ("optimizer",)), (3, ("optimizer",)), (3, ("optimizer", "param"))):
            found.append(_case(model, stage, 2, False, {f"offload_{name}": {"device": "cpu"} for name in offload}))
    return found


def _case(model: str, stage: int, samples: int, checkpointing: bool, offload: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 0, **offload}
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": FOREACH if not offload else {**FOREACH, "params": {"lr": 1e-3}},
    }
    wish = {"checkpointing": checkpointing}
    return {"model": model, "settings": MODELS[model], "config": config, "samples": samples, "length": 64, "wish": wish}


def rows_of(cases: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Name, planned and measured peak of each combination."""
    told, real = planned.planned_peaks(cases, WORLD), planned.real_peaks(cases, WORLD)
    return [(name_of(case), plan, peak) for case, plan, peak in zip(cases, told, real, strict=True)]


def name_of(case: dict[str, Any]) -> str:
    """A combination in a few words."""
    zero = case["config"]["zero_optimization"]
    offload = "".join(f", {name} on the host" for name in ("optimizer", "param") if f"offload_{name}" in zero)
    recomputes = ", recomputes" if case["wish"]["checkpointing"] else ""
    return f"{case['model']}, stage {zero['stage']}, micro-batch {case['samples']}{recomputes}{offload}"


def main() -> None:
    """Runs all combinations and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="write the table there too")
    parser.add_argument("--only", type=int, help="the first so many combinations")
    options = parser.parse_args()
    cases = combinations()[: options.only]
    lines = ["| combination | planned | measured | off |", "|---|---|---|---|"]
    worst = (0.0, "")
    for name, plan, peak in rows_of(cases):
        off = plan / peak - 1
        worst = max(worst, (abs(off), name))
        lines.append(f"| {name} | {plan:,} | {peak:,} | {100 * off:+.2f} % |")
    sent = [case for case in cases if not any(key.startswith("offload") for key in case["config"]["zero_optimization"])]
    real, differing = planned.run_real(sent, WORLD), []
    for case, held in zip(sent, real, strict=True):
        told = planned.plan(case["model"], case["settings"], case["config"], WORLD, case["samples"], case["length"], **case["wish"])
        kinds, traffic = told.by_kind(), told.to_dict()["sent_bytes_per_step"]
        same = all(kinds[kind] == held[kind] for kind in ("parameters", "masters", "moments")) and traffic["node"] == held["sent"]
        differing += [] if same else [name_of(case)]
    lines += [
        "",
        f"Worst of {len(cases)} peaks: {100 * worst[0]:.2f} % ({worst[1]}).",
        f"Bytes sent, and held of parameters, masters and moments, on {WORLD} ranks: {len(sent) - len(differing)} of {len(sent)} equal.",
        *(f"- differs: {name}" for name in differing),
    ]
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
