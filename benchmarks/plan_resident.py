"""Plans of CPU ranks beside the resident memory of processes that train.

    python -m benchmarks.plan_resident [--json benchmarks/results/plan_resident.json] [--rest]

Each rank is a process that imports everything, trains a tiny model of the same kind, and is then asked for two optimizer steps of the
combination: the most that it has resident in the second one, less what it had before, is compared with the plan of ``--device cpu``.

It is measured twice. Once every block from 64 KiB on goes back to the system as soon as it is freed (``MALLOC_MMAP_THRESHOLD_``), so
that resident is what is in use: this is what a plan tells; the same processes serve all combinations. Then as people train, in new
processes, where the C library's heap keeps holes between what is in use: the difference is the allocator's own rest.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes import RankProcesses
from benchmarks.tables import ResultTable
from tests.support import planned

WORLD, LENGTH = 2, 128
_EACH = 4  # of so many combinations one is measured as it is too
WORKER = Path(__file__).with_name("plan_resident_worker.py")
RETURNING = {"MALLOC_MMAP_THRESHOLD_": 1 << 16}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**TOKENS, "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1376}
GPT2 = {**TOKENS, "vocab_size": 8192, "n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": LENGTH}
MIXTRAL = {**LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 4, "intermediate_size": 512, "num_local_experts": 4}
SETTINGS: dict[str, dict[str, Any]] = {"llama": LLAMA, "qwen2": {**LLAMA, "num_key_value_heads": 4}, "gpt2": GPT2, "mixtral": MIXTRAL}
SMALL = {"vocab_size": 211, "num_hidden_layers": 2, "n_layer": 2}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
TEXT = """The most that a rank has resident in the second optimizer step, less what it had after imports and the training of a tiny
model, MiB; {world} gloo ranks, {length} tokens a sample, the rank that is farther off. **Planned** by `hf-zero plan --device cpu`. **In
use**: measured with `MALLOC_MMAP_THRESHOLD_=65536`, where the C library keeps nothing between what is in use. **As it is**: without that,
of some; what is more is the library's own rest, holes of its heap in which nothing that was asked for found room: {least:.0f} to {most:.0f}
% of the plan, another number in each run. {count} of {wanted} combinations; the worst plan is {worst:+.1f} % off ({name})."""


def combinations() -> list[dict[str, Any]]:
    """Models x stages, in turn with and without recomputation, in bf16 and fp32, of 1 to 4 samples; offload; experts over both ranks."""
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
    """A combination in a few words."""
    config, zero = case["config"], case["config"]["zero_optimization"]
    offload = "".join(f", {name} offloaded" for name in ("optimizer", "param") if f"offload_{name}" in zero)
    kind, again = "bf16" if "bf16" in config else "fp32", ", recomputes" if case["wish"]["checkpointing"] else ""
    experts = f", experts over {WORLD}" if "expert_parallel" in config else ""
    return f"{case['model']}, {kind}, stage {zero['stage']}, micro-batch {case['samples']}{again}{offload}{experts}"


@contextmanager
def processes(**variables: object) -> Iterator[RankProcesses]:
    """Ranks with ``variables`` in their environment; they end with the context."""
    ranks = RankProcesses("hf_zero", WORKER, [], WORLD, **variables)
    try:
        yield ranks
    finally:
        ranks.stop()


def resident(ranks: RankProcesses, case: dict[str, Any]) -> list[int]:
    """Bytes that each rank has more at the peak of the second step than before."""
    settings = {**case["settings"], **{name: value for name, value in SMALL.items() if name in case["settings"]}}
    answers = ranks.ask(case=case, warm_up={**case, "settings": settings, "samples": 1, "length": 16})
    return [answer["peak"] - answer["before"] for answer in answers]


def row_of(case: dict[str, Any], returning: RankProcesses, as_it_is: bool) -> list[str]:
    """One row of the table."""
    told = planned.plan(**case, world=WORLD)
    plan = told.peaks["host"].nbytes
    used = max(resident(returning, case), key=lambda nbytes: abs(plan / nbytes - 1))
    row = [name_of(case), f"{plan / 2**20:.1f}", f"{used / 2**20:.1f}", f"{100 * (plan / used - 1):+.1f} %"]
    if not as_it_is:
        return [*row, "", ""]
    with processes() as fresh:
        usual = max(resident(fresh, case))
    return [*row, f"{usual / 2**20:.1f}", f"{100 * (usual - used) / plan:+.0f} %"]


def table_of(rows: list[list[str]], wanted: int) -> ResultTable:
    """The rows as a table that names the worst."""
    worst = max(rows, key=lambda row: abs(float(row[3].split()[0])))
    rests = [float(row[5].split()[0]) for row in rows if row[5]]
    numbers = {"world": WORLD, "length": LENGTH, "count": len(rows), "wanted": wanted, "least": min(rests), "most": max(rests)}
    text = TEXT.format(**numbers, worst=float(worst[3].split()[0]), name=worst[0])
    columns = ["combination", "planned", "in use", "plan is off", "as it is", "allocator's rest, of the plan"]
    command = "python -m benchmarks.plan_resident --json benchmarks/results/plan_resident.json"
    return ResultTable("Plans beside resident memory", command, text, columns, rows)


def main() -> None:
    """Runs the combinations and prints the table; what is done is kept when the run is broken off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="keep the table there, after every combination")
    parser.add_argument("--only", type=int, help="at most so many combinations")
    parser.add_argument("--rest", action="store_true", help="only combinations that the file of --json has no row of; its rows stay")
    options = parser.parse_args()
    cases = combinations()
    rows: list[list[str]] = json.loads(options.json.read_text())["rows"] if options.rest and options.json.exists() else []
    known = {row[0] for row in rows}
    with processes(**RETURNING) as returning:
        for number, case in [(number, case) for number, case in enumerate(cases) if name_of(case) not in known][: options.only]:
            rows.append(row_of(case, returning, as_it_is=number % _EACH == 0))
            print(*rows[-1], flush=True)
            if options.json:
                table_of(rows, len(cases)).save(options.json)
    table_of(rows, len(cases)).print()


if __name__ == "__main__":
    main()
