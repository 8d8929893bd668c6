"""The architectures of ``docs/tensor-parallel.md`` split by DeepSpeed's AutoTP and transformers' own ``tp_plan``, judged like hf_zero.

    python -m benchmarks.parallel.tp_peers --peer-python /path/to/venv-with-deepspeed/bin/python      # both; writes the page
    python -m benchmarks.parallel.tp_peers --peer-python ... --only LlamaForCausalLM GPT2LMHeadModel       # prints these

Two gloo ranks. One process group per peer runs all architectures; it is started again if one leaves it unusable.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.processes import RankProcesses
from tests.tensor_parallel.breadth import GRAD, LOSS, PAGE
from tests.tensor_parallel.breadth import RESULTS as OURS

WORKER = Path(__file__).with_name("tp_peers_worker.py")
RESULTS = OURS.with_name("tp_peers.json")
START, STOP = "<!-- peers: made by python -m benchmarks.parallel.tp_peers -->", "<!-- end of peers -->"
RIGHT, WRONG, CANNOT = "right", "wrong", "cannot"
SECONDS = 60.0  # time limit of one architecture
AT_ONCE = 50  # architectures per process: transformers makes a mesh for each, whose threads stay
TITLES = {"deepspeed": "DeepSpeed {deepspeed} AutoTP", "transformers": 'transformers {transformers} `tp_plan="auto"`'}


def verdict(row: dict[str, Any]) -> str:
    """Return "right" if loss, logits and every gradient equal those of one rank; "wrong" if it trains with others; else "cannot"."""
    if row.get("error"):
        return CANNOT
    return RIGHT if row["loss"] < LOSS and row["logits"] < 10 * LOSS and row["grad"] < GRAD else WRONG


def measure(peer: str, python: str, names: list[str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return a row per architecture, and the versions of the peer's libraries."""
    rows: dict[str, dict[str, Any]] = {}
    ranks: RankProcesses | None = None
    versions: dict[str, str] = {}
    start = time.monotonic()
    try:
        for name in names:
            if ranks is None:
                ranks = RankProcesses(peer, WORKER, [peer], 2, python)
                versions = ranks.first[0]
            try:
                answers = ranks.ask(SECONDS, name=name)
            except RuntimeError as error:
                answers = [{"error": str(error).splitlines()[0], "broken": True}]
            rows[name] = next((answer for answer in answers if answer.get("error")), answers[0])
            failed = [bool(answer.get("error")) for answer in answers]
            broken = any(answer.get("broken") for answer in answers) or (any(failed) and not all(failed))
            if broken or len(rows) % AT_ONCE == 0:
                ranks.stop(0.0)
                ranks = None
            print(f"{time.monotonic() - start:5.0f} s {peer} {name}: {verdict(rows[name])} {rows[name]}", file=sys.stderr, flush=True)
    finally:
        if ranks is not None:
            ranks.stop(0.0)
    return rows, versions


def ours() -> dict[str, str]:
    """Return hf_zero's verdicts, from the last measurement of ``python -m tests.tensor_parallel.breadth``."""
    found = json.loads(OURS.read_text(encoding="utf-8"))
    return {row["name"]: verdict(row) for row in found if not row["error"].startswith("does not train on one rank")}


def section(measured: dict[str, Any]) -> str:
    """Return the generated part of the page."""
    mine = ours()
    peers = {peer: {name: verdict(row) for name, row in found["rows"].items()} for peer, found in measured.items()}
    names = [name for name in mine if all(name in found for found in peers.values())]
    contenders = {"hf_zero": mine, **{TITLES[peer].format(**measured[peer]["versions"]): found for peer, found in peers.items()}}
    lines = [
        START,
        f"The same {len(names)} tiny models, TP = 2 on gloo, judged the same way; made by "
        "`python -m benchmarks.parallel.tp_peers --peer-python /path/to/venv/bin/python`. Right: loss, logits and every "
        "gradient are those of one rank. Wrong: it trains, on something else. "
        "Cannot: an error, a hang, or nothing is split.",
        "",
        "| | right | wrong | cannot |",
        "|---|---:|---:|---:|",
    ]
    for title, found in contenders.items():
        counts = [sum(found[name] == kind for name in names) for kind in (RIGHT, WRONG, CANNOT)]
        lines.append(f"| {title} | {counts[0]} | {counts[1]} | {counts[2]} |")
    either = [name for name in names if any(found[name] == RIGHT for found in peers.values())]
    only_theirs = [name for name in either if mine[name] != RIGHT]
    lines += ["", f"Either of the two is right in {len(either)}, neither in {len(names) - len(either)}."]
    lines += [f"Right there and not here: {', '.join(sorted(only_theirs)) or 'none'}.", ""]
    for title, found in list(contenders.items())[1:]:
        wrong = sorted(name for name in names if found[name] == WRONG)
        lines += [f"<details><summary>Wrong with {title}</summary>{', '.join(wrong)}</details>", ""]
    return "\n".join([*lines, STOP])


def write(text: str) -> None:
    """Write the section into the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.split(START)[0] + text + page.split(STOP)[1], encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peer-python", help="Python of a venv with deepspeed and the same transformers; without it the page is rewritten only"
    )
    parser.add_argument("--peers", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="architectures to print")
    arguments = parser.parse_args()
    measured = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for peer in arguments.peers if arguments.peer_python else ():
        python = arguments.peer_python if peer == "deepspeed" else sys.executable
        rows, versions = measure(peer, python, arguments.only or list(ours()))
        measured[peer] = {"versions": versions, "rows": rows}
        if not arguments.only:
            RESULTS.write_text(json.dumps(measured, indent=0) + "\n", encoding="utf-8")
    if not arguments.only:
        write(section(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
