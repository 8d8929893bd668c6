"""The order that `hf-zero plan --fit` predicts beside measured seconds per step: 12 configurations of one model on two gloo ranks.

    python -m benchmarks.plan.plan_order --json benchmarks/results/plan_order.json
    python -m benchmarks.plan.plan_order --rounds 1 --steps 1        # quick check

The rates of the machine are measured first, as with `--measure`. Every round trains each configuration in turn, so that a slow minute
affects all of them; the fastest round of each counts. The rank correlation (Spearman's) is printed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.processes import RankProcesses
from benchmarks.common.tables import ResultTable

WORLD, GLOBAL_BATCH, LENGTH = 2, 16, 128
LLAMA = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 688}
SETTINGS = {**LLAMA, "vocab_size": 2048, "max_position_embeddings": LENGTH}
WORKER = Path(__file__).with_name("plan_order_worker.py")
TEXT = """Seconds per optimizer step of {global_batch} samples of {length} tokens, Llama (4 layers,
width 256), fp32, AdamW, {world} gloo ranks on one machine, one thread each. **Predicted** by `hf-zero plan --fit`'s roofline with rates
that were measured on this machine just before; **measured** is the fastest of {rounds} interleaved rounds. Rank correlation (Spearman's):
**{correlation:.2f}**."""


def configurations() -> list[dict[str, Any]]:
    """Return four stages x (one large micro-step, the same recomputed, many small ones)."""
    each = GLOBAL_BATCH // WORLD
    return [
        {"stage": stage, "micro_batch": size, "recomputes": recomputes}
        for stage, (size, recomputes) in itertools.product((0, 1, 2, 3), ((each, False), (each, True), (1, False)))
    ]


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a case."""
    return {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": case["micro_batch"],
        "gradient_accumulation_steps": GLOBAL_BATCH // WORLD // case["micro_batch"],
        "zero_optimization": {"stage": case["stage"]},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }


def predicted(cases: Sequence[dict[str, Any]]) -> list[float]:
    """Return the seconds per step of each case, predicted by the roofline."""
    from hf_zero.plan.command import settled
    from hf_zero.plan.costs import costs_of, rates_of
    from hf_zero.plan.inputs import Cluster, Hardware, Load, ModelWish
    from hf_zero.plan.measure import measure
    from hf_zero.plan.models import build_model
    from hf_zero.plan.workers import plan_step

    rates = rates_of({}, measure({}, WORLD, on_host=True), WORLD, on_host=True)
    cluster = Cluster(WORLD, WORLD, on_host=True)
    found = []
    for case in cases:
        model = build_model(ModelWish("llama", SETTINGS, checkpointing=case["recomputes"]))
        told = plan_step(model, settled(config_of(case)), cluster, Load(case["micro_batch"], LENGTH), Hardware())
        found.append(rates.seconds(costs_of(told)))
    return found


def measured(cases: Sequence[dict[str, Any]], rounds: int, steps: int) -> list[list[float]]:
    """Return the measured seconds per step of each case, the slowest rank's, one entry per round."""
    ranks = RankProcesses("hf_zero", WORKER, [], WORLD)
    seconds: list[list[float]] = [[] for _ in cases]
    try:
        for number in range(rounds):
            for index in sorted(range(len(cases)), key=lambda index: (index + number) % len(cases)):
                case = cases[index]
                request = {"config": config_of(case), "settings": SETTINGS, "recomputes": case["recomputes"], "length": LENGTH}
                seconds[index].append(max(answer["seconds"] for answer in ranks.ask(steps=steps, **request)))
            print(f"round {number + 1} of {rounds}", flush=True)
    finally:
        ranks.stop()
    return seconds


def rank_correlation(one: Sequence[float], two: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two sequences."""
    places = [[float(sorted(values).index(value)) for value in values] for values in (one, two)]
    return statistics.correlation(*places)


def name_of(case: dict[str, Any]) -> str:
    """Return a short name of a configuration."""
    steps = GLOBAL_BATCH // WORLD // case["micro_batch"]
    return f"stage {case['stage']}, {steps} x micro batch {case['micro_batch']}" + ", recomputed" * case["recomputes"]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps of a configuration in a round, after one that is not timed")
    parser.add_argument("--json", type=Path, help="keep the table in this file, which python -m tools.render reads")
    options = parser.parse_args()
    cases = configurations()
    told = predicted(cases)
    real = [min(seconds) for seconds in measured(cases, options.rounds, options.steps)]
    correlation = rank_correlation(told, real)
    rows = [
        [name_of(case), f"{one:.3f}", f"{two:.3f}"]
        for one, two, case in sorted(zip(told, real, cases, strict=True), key=lambda row: row[:2])
    ]
    text = TEXT.format(global_batch=GLOBAL_BATCH, length=LENGTH, world=WORLD, rounds=options.rounds, correlation=correlation)
    command = f"python -m benchmarks.plan.plan_order --rounds {options.rounds} --steps {options.steps}"
    table = ResultTable(
        "Predicted and measured order of configurations", command, text, ("configuration", "predicted s", "measured s"), rows
    )
    table.print()
    print(f"rank correlation {correlation:.3f}")
    if options.json:
        table.save(options.json)


if __name__ == "__main__":
    main()
