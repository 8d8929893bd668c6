"""Plans beside runs: the allocator's peak on the pretend accelerator, and bytes sent between two gloo ranks.

    python -m benchmarks.plan.plan_accuracy [--json benchmarks/results/plan_accuracy.json]
    python -m benchmarks.plan.plan_accuracy --only 1        # quick check

On the pretend accelerator (tests/pretend), whose allocator counts bytes, the plan of a device with torch's reference kernels is compared
with the peak of allocations in the second optimizer step. On CPUs the planned bytes are compared with the bytes that the collectives
count in an optimizer step, and with the bytes of parameters, masters and moments. It prints one row per combination and the worst; no
time is measured. For pipelines the peak of the stage that needs most is compared; tests/plan compares every rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.tables import ResultTable
from tests.support import planned

WORLD = 2
_AT_ONCE = 9  # combinations that run in the same processes
SMALL = {"vocab_size": 503, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**SMALL, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "num_key_value_heads": 2},
    "qwen2": {**LLAMA, "num_key_value_heads": 4},
    "mistral": {**LLAMA, "num_key_value_heads": 2},
    "gpt2": {**SMALL, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 128},
    "gpt_neox": {**LLAMA},
    "mixtral": {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 4, "experts_implementation": "batched_mm"},
    "opt": {**SMALL, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 256, "word_embed_proj_dim": 128},
}
FOREACH = {"type": "AdamW", "params": {"lr": 1e-3, "foreach": True}}  # the pretend accelerator has no fused kernel


def combinations() -> list[dict[str, Any]]:
    """Return six models x stages x recomputation, offload of optimizer or everything, experts or layers over both ranks; varying
    micro-batches.
    """
    found = []
    dense = [model for model in MODELS if model != "mixtral"]
    for number, (model, stage) in enumerate(itertools.product(dense, (0, 1, 2, 3))):
        for checkpointing in (False, True):
            found.append(_case(model, stage, 1 + number % 4, checkpointing, {}))
    for model in ("llama", "gpt2"):
        for stage, offload in ((2, ("optimizer",)), (3, ("optimizer",)), (3, ("optimizer", "param"))):
            found.append(_case(model, stage, 2, False, {f"offload_{name}": {"device": "cpu"} for name in offload}))
    for stage, checkpointing in ((1, False), (3, True)):
        found.append(_case("mixtral", stage, 2, checkpointing, {}, expert_parallel={"enabled": True, "autoep_size": WORLD}))
    for model, stage, checkpointing in (("llama", 1, False), ("gpt2", 0, True), ("qwen2", 2, False)):
        found.append(_case(model, stage, 4, checkpointing, {}, pipeline={"stages": WORLD}))
    return found


def _case(model: str, stage: int, samples: int, checkpointing: bool, offload: dict[str, Any], **sections: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 0, **offload}
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": FOREACH if not offload else {**FOREACH, "params": {"lr": 1e-3}},
        **sections,
    }
    wish = {"checkpointing": checkpointing}
    return {"model": model, "settings": MODELS[model], "config": config, "samples": samples, "length": 64, "wish": wish}


def _is_apart(config: dict[str, Any]) -> bool:
    """Return whether the CPU run differs from the plan: nothing is offloaded there, and for a pipeline the table has only one rank."""
    return "pipeline" in config or any(key.startswith("offload") for key in config["zero_optimization"])


def rows_of(cases: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """Return name, planned and measured peak of each combination."""
    told, real = planned.planned_peaks(cases, WORLD), planned.real_peaks(cases, WORLD)
    return [(name_of(case), plan, peak) for case, plan, peak in zip(cases, told, real, strict=True)]


def name_of(case: dict[str, Any]) -> str:
    """Return a short name of a combination."""
    zero = case["config"]["zero_optimization"]
    offload = "".join(f", {name} on the host" for name in ("optimizer", "param") if f"offload_{name}" in zero)
    recomputes = ", recomputes" if case["wish"]["checkpointing"] else ""
    experts = f", experts over {WORLD}" if "expert_parallel" in case["config"] else ""
    stages = f", pipeline of {WORLD} stages" if "pipeline" in case["config"] else ""
    return f"{case['model']}, stage {zero['stage']}, micro-batch {case['samples']}{recomputes}{offload}{experts}{stages}"


def differing_of(cases: list[dict[str, Any]]) -> list[str]:
    """Return the names of combinations whose bytes on CPUs, sent or held as parameters, masters and moments, differ from the plan."""
    found = []
    for case, held in zip(cases, planned.run_real(cases, WORLD), strict=True):
        told = planned.plan(**case, world=WORLD)
        kinds, traffic = told.by_kind(), told.to_dict()["sent_bytes_per_step"]
        same = all(kinds[kind] == held[kind] for kind in ("parameters", "masters", "moments")) and traffic["node"] == held["sent"]
        found += [] if same else [name_of(case)]
    return found


@dataclass
class Found:
    """Results of the combinations so far.

    Attributes:
        peaks: Name, planned and measured peak of each.
        compared: Number of combinations that were also run on CPUs.
        differing: Names of those whose bytes differ there.
        wanted: Total number of combinations.
    """

    wanted: int
    peaks: list[tuple[str, int, int]] = field(default_factory=list)
    compared: int = 0
    differing: list[str] = field(default_factory=list)

    def table(self) -> ResultTable:
        """Return the results as a table."""
        worst = max(self.peaks, key=lambda row: abs(row[1] / row[2] - 1))
        differing = f"; these differ: {', '.join(self.differing)}" if self.differing else ""
        return ResultTable(
            title="Plans beside runs",
            command="python -m benchmarks.plan.plan_accuracy --json benchmarks/results/plan_accuracy.json",
            text="The most that is allocated on a device in the second optimizer step, bytes of a rank: planned, and counted by the "
            f"allocator of the pretend accelerator; {WORLD} ranks. {len(self.peaks)} of {self.wanted} combinations; the worst is "
            f"{100 * (worst[1] / worst[2] - 1):+.2f} % off ({worst[0]}). Bytes sent in a step, and held of parameters, masters and "
            f"moments, on {WORLD} gloo ranks: {self.compared - len(self.differing)} of {self.compared} equal to the byte{differing}.",
            columns=["combination", "planned", "measured", "off"],
            rows=[[name, f"{plan:,}", f"{peak:,}", f"{100 * (plan / peak - 1):+.2f} %"] for name, plan, peak in self.peaks],
        )


def main() -> None:
    """Run the combinations, a few at a time, and print the table; finished ones are kept if the run is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="keep the table there, after every few combinations")
    parser.add_argument("--only", type=int, help="the first so many combinations")
    parser.add_argument("--rest", action="store_true", help="only combinations that the file of --json has no row of; its rows stay")
    options = parser.parse_args()
    cases = combinations()
    found = stored(options.json, len(cases)) if options.rest else Found(len(cases))
    known = {name for name, _, _ in found.peaks}
    for part in batched([case for case in cases[: options.only] if name_of(case) not in known], _AT_ONCE):
        found.peaks += rows_of(part)
        on_cpus = [case for case in part if not _is_apart(case["config"])]
        found.differing += differing_of(on_cpus) if on_cpus else []
        found.compared += len(on_cpus)
        print(f"{len(found.peaks)} of {len(cases)}", flush=True)
        if options.json:
            found.table().save(options.json)
    found.table().print()


def stored(file: Path, wanted: int) -> Found:
    """Return the results in a file of an earlier run."""
    content = json.loads(file.read_text())
    equal, compared = map(int, re.findall(r"(\d+) of (\d+) equal to the byte", content["text"])[0])
    if equal != compared:
        raise SystemExit(f"{file} has combinations that differ: run them all again, without --rest")
    rows = [(name, int(plan.replace(",", "")), int(peak.replace(",", ""))) for name, plan, peak, _ in content["rows"]]
    return Found(wanted, rows, compared)


def batched(cases: list[dict[str, Any]], count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield ``count`` cases at a time."""
    for start in range(0, len(cases), count):
        yield cases[start : start + count]


if __name__ == "__main__":
    main()
