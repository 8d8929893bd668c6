"""The worked examples of docs/plan.md, made by `hf-zero plan` itself.

    python -m benchmarks.plan.plan_tables 8b     Llama-3-8B on 1, 4 and 8 devices
    python -m benchmarks.plan.plan_tables 70b    a 70-B model on 2 nodes of 8
    python -m benchmarks.plan.plan_tables 30b    Qwen3-30B-A3B on 2 nodes of 8

It prints Markdown. `make` does not run it, because each takes a minute or two.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json

from hf_zero.cli import main

LLAMA = {
    "model_type": "llama",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
MODELS = {
    "8b": {**LLAMA, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "70b": {**LLAMA, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
}
MODELS["30b"] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
RANKS = {"8b": (1, 4, 8), "70b": (16,), "30b": (16,)}
MEMORY = (24, 48, 80)  # GB by which devices are sold; each has at least as many times 10^9 bytes
HOST = {"offload_optimizer": {"device": "cpu"}}
ALL_ON_HOST = {**HOST, "offload_param": {"device": "cpu"}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 8}}
LORA = ["--trainable", "lora:r=16"]
CONFIGURATIONS: dict[str, tuple[dict[str, object], dict[str, object], list[str]]] = {  # zero_optimization, other sections, flags
    "stage 3": ({}, {}, []),
    "stage 3, optimizer on the host": (HOST, {}, []),
    "stage 3, optimizer and parameters on the host": (ALL_ON_HOST, {}, []),
    "stage 3, LoRA of rank 16": ({}, {}, LORA),
}
OF_EXPERTS = {
    "stage 3": CONFIGURATIONS["stage 3"],
    "stage 3, experts over 8 ranks": ({}, EXPERTS, []),
    "stage 3, optimizer on the host": (HOST, {}, []),
    "stage 3, experts over 8 ranks, optimizer on the host": (HOST, EXPERTS, []),
}
COMMON = ["--checkpoint-activations", "--sequence", "4096", "--micro-batch", "1", "--ranks-per-node", "8", "--json"]


def configurations(model: str) -> dict[str, tuple[dict[str, object], dict[str, object], list[str]]]:
    """Return the configurations to plan for a model."""
    return OF_EXPERTS if "num_experts" in MODELS[model] else CONFIGURATIONS


def planned(model: str, ranks: int, name: str) -> dict[str, object]:
    """Return the JSON output of the command."""
    zero, sections, flags = configurations(model)[name]
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **zero}, **sections}
    values = dict(MODELS[model])
    kind = str(values.pop("model_type"))
    settings = [part for name, value in values.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["plan", kind, "--config", json.dumps(config), "--ranks", str(ranks), *COMMON, *settings, *flags])
    if status == 2:
        raise SystemExit("the command refused its input")
    found: dict[str, object] = json.loads(out.getvalue())
    return found


def row(model: str, ranks: int, name: str) -> str:
    """Return one row of the table."""
    found = planned(model, ranks, name)
    peaks, sent = found["peak_bytes_per_rank"], found["sent_bytes_per_step"]
    assert isinstance(peaks, dict)
    assert isinstance(sent, dict)
    verdicts = " | ".join("yes" if peaks["device"] <= size * 10**9 else "no" for size in MEMORY)
    numbers = " | ".join(f"{nbytes / 2**30:.1f}" for nbytes in (peaks["device"], peaks["host"], sent["node"], sent["network"]))
    return f"| {ranks} | {name} | {numbers} | {verdicts} |"


def tables(model: str) -> None:
    """Print the table of one model."""
    sizes = " | ".join(f"{size} GB" for size in MEMORY)
    print(f"| ranks | configuration | device | host | sent in the node | sent to others | {sizes} |")
    print("|---|---|---|---|---|---|---|---|---|")
    for ranks in RANKS[model]:
        for name in configurations(model):
            print(row(model, ranks, name), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="all where none is named")
    for wanted in parser.parse_args().models or MODELS:
        tables(wanted)
