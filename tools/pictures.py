"""Draw the pictures of docs/pictures/ from formulas, committed results and plans.

python -m tools.pictures                 # draw all
python -m tools.pictures --plan FOLDER   # first plan the 8 B model of FOLDER (its config.json) again; takes minutes
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.svg import Svg, ticks

REPO = Path(__file__).resolve().parent.parent
FOLDER = REPO / "docs" / "pictures"
PLANS = FOLDER / "memory-8b.json"
KINDS = {"parameters": "parameters", "gradients": "gradients", "states": "masters and moments"}
# Bytes of a parameter in bf16: values, gradients summed in fp32 from backward to step, fp32 master and two moments of Adam.
BYTES = {"parameters": 2, "gradients": 4, "states": 12}
SHARDED = {0: (), 1: ("gradients", "states"), 2: ("gradients", "states"), 3: ("parameters", "gradients", "states")}
WORDS = {
    0: "nothing is sharded",
    1: "as stage 2, but no_sync() keeps whole gradients",
    2: "states and gradients",
    3: "parameters too, gathered block by block",
}


def stages() -> Svg:
    """Draw which quarter of parameters, gradients and optimizer states each of 4 ranks holds at each stage, and the bytes per parameter."""
    ranks, left, top, high, wide = 4, 150, 78, 96, 96
    picture = Svg(760, top + 4 * (high + 18) + 46, "What each ZeRO stage shards, and bytes per parameter on each of N ranks")
    picture.text(16, 26, "What a rank holds: bf16 with Adam, here on 4 ranks", style="head")
    picture.legend(16, 50, {kind: f"{name} {BYTES[kind]} B" for kind, name in KINDS.items()} | {"empty": "on other ranks"})
    for rank in range(ranks):
        picture.text(left + rank * wide + 38, top - 6, f"rank {rank}", "middle", "small")
    picture.text(left + ranks * wide + 14, top - 6, "bytes per parameter and rank", style="small")
    for stage in range(4):
        y = top + stage * (high + 18)
        picture.text(16, y + 20, f"stage {stage}", style="head")
        for line, words in enumerate(_wrapped(WORDS[stage], 20)):
            picture.text(16, y + 40 + 15 * line, words, style="small")
        for rank in range(ranks):
            at = float(y)
            for kind, size in BYTES.items():
                tall, x = high * size / sum(BYTES.values()), left + rank * wide
                if kind in SHARDED[stage]:
                    picture.box(x, at, 76, tall, "empty")
                    picture.box(x + 76 * rank / ranks, at, 76 / ranks, tall, kind)
                else:
                    picture.box(x, at, 76, tall, kind)
                at += tall
        for line, words in enumerate(_sums(stage)):
            picture.text(left + ranks * wide + 14, y + 20 + 20 * line, words, style="" if line else "head")
    y = top + 4 * (high + 18) + 8
    picture.text(
        16,
        y,
        "Between backward and step: the gradients are summed in fp32. After the step they are gone. Activations and",
        style="small",
    )
    picture.text(16, y + 16, "the blocks that are gathered come on top.", style="small")
    return picture


def bytes_per_parameter(stage: int, ranks: int) -> float:
    """Return the bytes that a rank holds for each parameter between backward and step."""
    return sum(size / (ranks if kind in SHARDED[stage] else 1) for kind, size in BYTES.items())


def _sums(stage: int) -> list[str]:
    parts = [f"{size}/N" if kind in SHARDED[stage] else f"{size}" for kind, size in BYTES.items()]
    lines = [" + ".join(parts)]
    return [*lines, *(f"{bytes_per_parameter(stage, ranks):.4g} B on {ranks} ranks" for ranks in (8, 64))]


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width)


# One stage 3 step of three blocks: lane, begin, length, kind, text. The order is that of tests/core/test_trace.py.
LANES = ("network", "compute")
STEP = (
    ("network", 0, 2, "gather", "1"),
    ("network", 2, 2, "gather", "2"),
    ("compute", 2, 2.4, "compute", "1"),
    ("network", 4.4, 2, "gather", "3"),
    ("compute", 4.4, 2.4, "compute", "2"),
    ("compute", 6.8, 2.4, "compute", "3"),
    ("network", 9.2, 2, "gather", "3"),
    ("network", 11.2, 2, "gather", "2"),
    ("compute", 11.2, 4, "compute", "3"),
    ("network", 13.2, 2, "gather", "1"),
    ("compute", 15.2, 4, "compute", "2"),
    ("network", 15.2, 2, "reduce", "3"),
    ("compute", 19.2, 4, "compute", "1"),
    ("network", 19.2, 2, "reduce", "2"),
    ("network", 23.2, 2, "reduce", "1"),
    ("network", 25.2, 1.9, "reduce", "norm"),
    ("compute", 27.1, 2.4, "update", "shard"),
)
PHASES = (("forward", 0, 9.2), ("backward", 9.2, 25.2), ("step", 25.2, 29.5))


def step() -> Svg:
    """Draw one step of stage 3 as boxes over time: gathers and reductions on the network, beside the computation."""
    left, scale, top = 84, 22.4, 92
    picture = Svg(760, 250, "One step of ZeRO stage 3 over time: gather, compute, reduce, update")
    picture.text(16, 26, "One step of stage 3, on every rank at the same time (three blocks)", style="head")
    names = {"gather": "gather a block", "compute": "compute it", "reduce": "reduce its gradients", "update": "clip and update"}
    picture.legend(16, 50, names)
    for name, begin, end in PHASES:
        picture.line(left + scale * begin, top - 20, left + scale * begin, top + 108, "grid")
        picture.text(left + scale * (begin + end) / 2, top - 8, name, "middle", "head")
    for index, lane in enumerate(LANES):
        picture.text(16, top + 24 + 52 * index, lane)
    for lane, begin, length, kind, text in STEP:
        picture.box(left + scale * begin, top + 4 + 52 * LANES.index(lane), scale * length - 2, 34, kind, text)
    picture.line(left, top + 108, left + scale * 29.2, top + 108)
    picture.text(left + scale * 29.2, top + 124, "time", "end", "small")
    picture.text(
        16,
        top + 142,
        "A block is whole from its gather until its forward, or its backward, is done; then its shard stays.",
        style="small",
    )
    return picture


def h100() -> Svg:
    """Draw seconds of a step and peak memory of every contender on one H100, both from 0."""
    tables = [
        json.loads((REPO / "benchmarks" / "results" / f"{name}_gpu.json").read_text(encoding="utf-8")) for name in ("step_time", "compiled")
    ]
    found = [dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["rows"]]
    again = {row["contender"] for row in found}  # a row with a mark repeats an earlier run's
    rows = [
        row for row in found if row["contender"].removesuffix(" ¹") == row["contender"] or row["contender"].removesuffix(" ¹") not in again
    ]
    rows.sort(key=lambda row: float(row["s/step"]))
    left, top, high = 246, 84, 25
    panels = (("s/step", "seconds per step", "{:.3f}", left, 220), ("peak GPU GiB", "peak GPU memory, GiB", "{:.1f}", left + 280, 185))
    picture = Svg(760, top + high * len(rows) + 56, "Step time and peak memory on one H100")
    picture.text(16, 26, "One H100: Llama of 1.1 G parameters, bf16, 4 x 2048 tokens (less is better)", style="head")
    picture.legend(16, 50, {"ours": "hf_zero, by stage", "peer": "others"})
    for name, title, form, x, wide in panels:
        values = [float(row[name]) for row in rows]
        marks = ticks(max(values), 5)
        for mark in marks:
            at = x + wide * mark / marks[-1]
            picture.line(at, top - 8, at, top + high * len(rows), "grid" if mark else "axis")
            picture.text(at, top + high * len(rows) + 16, f"{mark:g}", "middle", "small")
        picture.text(x + wide / 2, top + high * len(rows) + 36, title, "middle")
        for index, (row, value) in enumerate(zip(rows, values, strict=True)):
            y = top + high * index
            picture.box(x, y, wide * value / marks[-1], high - 7, "ours" if row["contender"].startswith("hf_zero") else "peer")
            picture.text(x + wide * value / marks[-1] + 5, y + 13, form.format(value), style="small")
    for index, row in enumerate(rows):
        name = row["contender"].removesuffix(" ¹").replace("hf_zero-", "hf_zero, stage ").replace("DeepSpeed-", "DeepSpeed, stage ")
        picture.text(left - 8, top + high * index + 13, name, "end")
    return picture


WORKLOADS = {
    "compiled_gpu_8": "Llama of 1.1 G parameters, compiled blocks, 8 x 2048 tokens",
    "wide_gpu": "8 layers of the sizes of Llama 8 B, compiled blocks, 4 x 2048 tokens",
    "lora_gpu": "LoRA on Llama of 8 G parameters, 2 x 2048 tokens",
    "offload_gpu": "GPT-2 XL, parameters and optimizer on the host, 16 x 128 tokens",
}


def h100_workloads() -> Svg:
    """Draw seconds of a step on one H100 for each table of ``WORKLOADS``, all bars on one scale from 0."""
    tables = {name: json.loads((REPO / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")) for name in WORKLOADS}
    left, top, high, wide = 246, 64, 25, 420
    most = max(float(row[1]) for table in tables.values() for row in table["rows"])
    tall = sum(high * len(table["rows"]) + 40 for table in tables.values())
    picture = Svg(760, top + tall + 30, "Seconds of a step on one H100, by kind of training")
    picture.text(16, 26, "One H100, bf16: seconds per step (less is better)", style="head")
    picture.legend(16, 44, {"ours": "hf_zero, by stage", "peer": "others"})
    y = top + 20
    for mark in (mark for mark in ticks(most, 6) if mark <= most):
        at = left + wide * mark / most
        picture.line(at, top + 8, at, top + tall, "grid" if mark else "axis")
        picture.text(at, top + tall + 18, f"{mark:g}", "middle", "small")
    for name, title in WORKLOADS.items():
        picture.text(16, y + 8, title, style="small")
        y += 18
        for row in sorted(tables[name]["rows"], key=lambda row: float(row[1])):
            contender = row[0].replace("hf_zero-", "hf_zero, stage ").replace("deepspeed-", "DeepSpeed, stage ")
            picture.text(
                left - 8, y + 13, contender.replace(", cpu offload", "").replace(", bf16", "").replace(", CPUOffloadPolicy", ""), "end"
            )
            picture.box(left, y, wide * float(row[1]) / most, high - 7, "ours" if row[0].startswith("hf_zero") else "peer")
            picture.text(left + wide * float(row[1]) / most + 5, y + 13, f"{float(row[1]):.3f}", style="small")
            y += high
        y += 22
    return picture


STAGES = {0: "any stage", 2: "stages 1, 2", 3: "stage 3"}
PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "states": "masters and moments",
    "activations": "activations",
    "other": "gathered, buffers",
}


def memory_8b() -> Svg:
    """Draw the peak memory of a GPU for a model of 8 B parameters by stage and number of GPUs, as ``hf-zero plan`` predicts it."""
    found = json.loads(PLANS.read_text(encoding="utf-8"))
    plans = found["plans"]
    left, top, high, gap = 136, 88, 19, 12
    groups = sorted({(plan["ranks"]) for plan in plans})
    tall = sum((high + 4) * sum(plan["ranks"] == ranks for plan in plans) + gap for ranks in groups)
    wide, most = 540, max(sum(plan["gib"].values()) for plan in plans)
    marks = ticks(most, 6)
    picture = Svg(760, top + round(tall) + 72, "Memory of a GPU for a model of 8 B parameters by stage and number of GPUs")
    picture.text(16, 26, f"Peak memory of a GPU: {found['title']}", style="head")
    picture.legend(16, 50, PARTS)
    for mark in marks:
        at = left + wide * mark / marks[-1]
        picture.line(at, top - 8, at, top + tall - gap, "grid" if mark else "axis")
        picture.text(at, top + tall + 6, f"{mark:g}", "middle", "small")
    picture.text(left + wide / 2, top + tall + 26, "GiB on one GPU", "middle")
    y = top
    for ranks in groups:
        for plan in [plan for plan in plans if plan["ranks"] == ranks]:
            picture.text(left - 8, y + 14, f"{ranks} GPU{'s' if ranks > 1 else ''}, {STAGES[plan['stage']]}", "end", "small")
            x = float(left)
            for kind in PARTS:
                part = wide * plan["gib"][kind] / marks[-1]
                picture.box(x, y, part, high, kind, hint=f"{PARTS[kind]}: {plan['gib'][kind]:.1f} GiB")
                x += part
            picture.text(left + wide + 64, y + 14, f"{sum(plan['gib'].values()):.0f} GiB", "end", "small")
            y += high + 4
        y += gap
    limit = left + wide * 80 / marks[-1]
    picture.line(limit, top - 8, limit, top + tall - gap, "limit")
    picture.text(limit + 4, top - 12, "80 GiB", style="small")
    picture.text(16, top + tall + 50, found["note"], style="small")
    return picture


def plan_all(model: Path) -> None:
    """Plan every stage and number of GPUs, and write ``PLANS``; takes some minutes."""
    plans = []
    for ranks, stage in ((1, 0), *((ranks, stage) for ranks in (2, 4, 8) for stage in (2, 3))):
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 1}
        flags = ["--ranks", str(ranks), "--ranks-per-node", str(min(ranks, 8)), "--sequence", "4096", "--checkpoint-activations", "--json"]
        command = [sys.executable, "-m", "hf_zero", "plan", str(model), "--config", json.dumps(config), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO)
        plans.append({"ranks": ranks, "stage": stage, "gib": parts_of(json.loads(done.stdout))})
        print(plans[-1], flush=True)
    content = {
        "title": "Llama of 8 B parameters, bf16 with Adam",
        "note": "hf-zero plan: micro-batch of 1 x 4096 tokens, activations recomputed in backward; parts at the moment of the peak.",
        "plans": plans,
    }
    PLANS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def parts_of(plan: dict[str, Any]) -> dict[str, float]:
    """Return GiB by kind of the peak that ``hf-zero plan --json`` reports, in the kinds of the picture."""
    kinds = plan["by_kind"]
    held = {
        "parameters": ("parameters",),
        "gradients": ("gradients",),
        "states": ("masters", "moments"),
        "activations": ("activations", "logits"),
    }
    taken = {part: sum(kinds[kind] for kind in of) for part, of in held.items()}
    taken["other"] = sum(kinds.values()) - sum(taken.values())
    return {part: round(nbytes / 2**30, 2) for part, nbytes in taken.items()}


DRAWN = {"stages": stages, "step": step, "h100": h100, "h100-workloads": h100_workloads, "memory-8b": memory_8b}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, metavar="FOLDER", help="plan the model of this folder anew")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if options.plan is not None:
        plan_all(options.plan)
    for name, draw in DRAWN.items():
        draw().write(FOLDER / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
