"""Plans of CPU ranks beside the resident memory of training processes.

    python -m benchmarks.plan.plan_resident [--json benchmarks/results/plan_resident.json] [--rest]
    python -m benchmarks.plan.plan_resident --only 1        # quick check

Each rank is a process that imports everything and trains one layer of the model. Then it trains two optimizer steps of the combination.
Its peak of resident memory in the second step, minus its memory before, is compared with the plan of ``--device cpu``.

Resident memory is more than the memory in use: the C library's heap has holes between tensors that fit no other tensor. The library
reports the heap in use (``mallinfo2``), sampled every millisecond; the rest of the resident memory is holes. Their size differs between
runs of the same case, so no plan can predict it. It is measured, and listed as ``other`` beside the planned memory.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.processes import RankProcesses
from benchmarks.common.tables import ResultTable
from tests.support import planned

WORLD, LENGTH = 2, 128
WORKER = Path(__file__).with_name("plan_resident_worker.py")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**TOKENS, "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1376}
GPT2 = {**TOKENS, "vocab_size": 8192, "n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": LENGTH}
MIXTRAL = {**LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 4, "intermediate_size": 512, "num_local_experts": 4}
SETTINGS: dict[str, dict[str, Any]] = {"llama": LLAMA, "qwen2": {**LLAMA, "num_key_value_heads": 4}, "gpt2": GPT2, "mixtral": MIXTRAL}
SHALLOW = {"num_hidden_layers": 1, "n_layer": 1}  # for the warm-up: matrix libraries keep workspaces for the sizes they have seen
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
TEXT = """Resident memory of a rank at the peak of the second optimizer step, less that after imports and a small training, MiB; {world}
gloo ranks, {length} tokens a sample. **Planned** by `hf-zero plan --device cpu`. **In use**: heap in use, as the C library reports.
**Rest**: holes of the heap, {least:.0f} to {most:.0f} % of the plan, measured and booked as `other`. {count} of {wanted} combinations;
plan and rest are at most {worst:+.1f} % off the resident memory ({name}), the plan {worst_used:+.1f} % off the memory in use
({name_used})."""


def combinations() -> list[dict[str, Any]]:
    """Return models x stages, with and without recomputation in turn, bf16 and fp32, 1 to 4 samples; offload; experts over both ranks."""
    found = []
    for number, (model, stage) in enumerate(itertools.product(("llama", "gpt2", "qwen2"), (0, 1, 2, 3))):
        bf16 = {"bf16": {"enabled": True}} if number % 3 == 1 else {}
        found.append(_case(model, stage, 1 + (3 * number) % 4, number % 2 == 1, **bf16))
    host = {"device": "cpu"}
    found.append(_case("llama", 2, 2, True, offload_optimizer=host, bf16={"enabled": True}))
    found.append(_case("gpt2", 3, 2, False, offload_optimizer=host, offload_param=host))
    found.append(_case("mixtral", 1, 2, False, expert_parallel={"enabled": True, "autoep_size": WORLD}))
    return found


def _case(model: str, stage: int, samples: int, recomputes: bool, **sections: Any) -> dict[str, Any]:
    zero = {"stage": stage, **{name: sections.pop(name) for name in ("offload_optimizer", "offload_param") if name in sections}}
    config = {"zero_optimization": zero, "optimizer": ADAM, **sections}
    wish = {"checkpointing": recomputes}
    return {"model": model, "settings": SETTINGS[model], "config": config, "samples": samples, "length": LENGTH, "wish": wish}


def name_of(case: dict[str, Any]) -> str:
    """Return a short name of a combination."""
    config, zero = case["config"], case["config"]["zero_optimization"]
    offload = "".join(f", {name} offloaded" for name in ("optimizer", "param") if f"offload_{name}" in zero)
    kind, again = "bf16" if "bf16" in config else "fp32", ", recomputes" if case["wish"]["checkpointing"] else ""
    experts = f", experts over {WORLD}" if "expert_parallel" in config else ""
    return f"{case['model']}, {kind}, stage {zero['stage']}, micro-batch {case['samples']}{again}{offload}{experts}"


@contextmanager
def processes() -> Iterator[RankProcesses]:
    """Yield ranks that end with the context."""
    ranks = RankProcesses("hf_zero", WORKER, [], WORLD)
    try:
        yield ranks
    finally:
        ranks.stop()


def measured(case: dict[str, Any]) -> list[dict[str, int]]:
    """Return the bytes by which each rank's resident memory and heap in use grow at their peaks in the second step; in new processes."""
    settings = {**case["settings"], **{name: value for name, value in SHALLOW.items() if name in case["settings"]}}
    with processes() as ranks:
        return ranks.ask(case=case, warm_up={**case, "settings": settings})


def row_of(case: dict[str, Any]) -> list[str]:
    """Return one row of the table."""
    plan = planned.plan(**case, world=WORLD).peaks["host"].nbytes
    rank = max(measured(case), key=lambda found: abs(plan - found["used"]) / found["resident"])
    used, resident = rank["used"], rank["resident"]
    rest = resident - used
    sizes = [f"{nbytes / 2**20:.1f}" for nbytes in (plan, used, rest, resident)]
    return [name_of(case), *sizes, f"{100 * (plan / used - 1):+.1f} %", f"{100 * ((plan + rest) / resident - 1):+.1f} %"]


def table_of(rows: list[list[str]], wanted: int) -> ResultTable:
    """Return the rows as a table that names the worst."""
    worst, worst_used = (max(rows, key=lambda row, at=at: abs(_percent(row[at]))) for at in (6, 5))  # type: ignore[misc]
    rests = [100 * float(row[3]) / float(row[1]) for row in rows]
    numbers = {"world": WORLD, "length": LENGTH, "count": len(rows), "wanted": wanted, "least": min(rests), "most": max(rests)}
    names = {"name": worst[0], "name_used": worst_used[0]}
    text = TEXT.format(**numbers, **names, worst=_percent(worst[6]), worst_used=_percent(worst_used[5]))
    columns = ["combination", "planned", "in use", "rest", "resident", "plan of in use", "plan and rest of resident"]
    command = "python -m benchmarks.plan.plan_resident --json benchmarks/results/plan_resident.json"
    return ResultTable("Plans beside resident memory", command, text, columns, rows)


def _percent(cell: str) -> float:
    return float(cell.split()[0])


def main() -> None:
    """Run the combinations and print the table; finished ones are kept if the run is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="keep the table there, after every combination")
    parser.add_argument("--only", type=int, help="at most so many combinations")
    parser.add_argument("--rest", action="store_true", help="only combinations that the file of --json has no row of; its rows stay")
    options = parser.parse_args()
    cases = combinations()
    rows: list[list[str]] = json.loads(options.json.read_text())["rows"] if options.rest and options.json.exists() else []
    known = {row[0] for row in rows}
    for case in [case for case in cases if name_of(case) not in known][: options.only]:
        rows.append(row_of(case))
        print(*rows[-1], flush=True)
        if options.json:
            table_of(rows, len(cases)).save(options.json)
    table_of(rows, len(cases)).print()


if __name__ == "__main__":
    main()
