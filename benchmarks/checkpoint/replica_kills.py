"""Kill ranks, launchers and nodes of replica groups at random, check that nothing is lost, and time until the others go on.

    python -m benchmarks.checkpoint.replica_kills --kills 60 --seed 1              # needs torchft; nodes need root (network namespaces)
    python -m benchmarks.checkpoint.replica_kills --kills 8 --nodes 0 --groups 2   # quick check
    python -m benchmarks.checkpoint.replica_kills --kills 9 --nodes 3 --groups 2 --hidden 8192 --heartbeat 2000    # 67 M parameters

``--groups`` replica groups of two gloo ranks train a small model. Deaths are drawn from the seed: which group and rank, after how many
steps of its process, at which place of a step (``PLACES`` of tests/replica_groups/group_run.py), and what dies: the rank, its launcher,
or its node, a network namespace whose link is cut before all its processes are killed, so that no connection is closed. Half of the dead
groups are started again only after another group has taken a step without them. No group dies while another is away. On a machine with
other work give a longer ``--heartbeat``: a group that is silent for so long is left out, and four times that ends an exchange.

After each run the history of all ranks is checked: no batch lost or taken twice, weights of all ranks equal bit for bit, and equal to
plain PyTorch on the batches that were taken (tests/replica_groups/history.py). A job of the same model on two ranks, which saves every
``--every`` steps and is restarted from the disk after each death, is measured in the same run. Ranks are forked from a process that has
imported everything, so no time contains imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.common.processes import REPOSITORY
from benchmarks.common.tables import ResultTable
from tests.replica_groups.group_run import PLACES
from tests.replica_groups.history import check, deaths_of, times_after

_RANKS, _STEPS_PER_KILL = 2, 7
_TIMEOUT = 4  # seconds (TORCHFT_TIMEOUT_SEC) after which a silent node is given up


def plan_of(chance: random.Random, kills: int, nodes: int, groups: int) -> dict[str, Any]:
    """Return a plan with ``kills`` deaths, ``nodes`` of them of nodes."""
    kinds = ["node"] * nodes + ["agent"] * ((kills - nodes) // 3)
    kinds += ["rank"] * (kills - len(kinds))
    chance.shuffle(kinds)
    deaths: dict[str, list[dict[str, Any]]] = {str(group): [] for group in range(groups)}
    for kind in kinds:
        death = {"rank": chance.randrange(_RANKS), "after": chance.randrange(1, 4), "place": chance.choice(PLACES), "kind": kind}
        deaths[chance.choice(sorted(deaths))].append({**death, "lone": chance.random() < 0.5})
    plan = {"groups": groups, "ranks": _RANKS, "steps": _STEPS_PER_KILL * kills, "stage": chance.randrange(4)}
    accumulation = chance.randrange(1, 3)
    return {**plan, "accumulation": accumulation, "deaths": deaths, "nodes": nodes > 0, "timeout": _TIMEOUT, "limit": 60 + 30 * kills}


def run(plan: dict[str, Any], folder: Path) -> None:
    """Carry out a plan."""
    (folder / "plan.json").write_text(json.dumps(plan))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "RUST_LOG": "off"}
    words = [sys.executable, "-m", "tests.replica_groups.agents", str(folder)]
    if subprocess.run(words, cwd=REPOSITORY, env=environment).returncode:
        logs = sorted(folder.glob("log-*"), key=lambda path: path.stat().st_mtime)[-6:]
        raise SystemExit("\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in logs))


def restart_times(folder: Path) -> list[float]:
    """Return for each death of a job that restarts from the disk the seconds until the step after the one that it died at."""
    lines = [json.loads(line) for path in folder.glob("steps-*.jsonl") for line in path.read_text().splitlines()]
    found = []
    for death in deaths_of(folder):
        last = max((line["step"] for line in lines if line["time"] <= death["time"]), default=0)
        found += [min((line["time"] for line in lines if line["step"] > last), default=float("nan")) - death["time"]]
    return [seconds for seconds in found if seconds > 0]


def row(name: str, times: list[float]) -> list[str]:
    """Return a row of the table."""
    if not times:
        return [name, "0", "", "", ""]
    return [name, str(len(times)), *(f"{value:.2f} s" for value in (statistics.median(times), min(times), max(times)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--nodes", type=int, default=6, help="kills of nodes among them")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--per-run", type=int, default=20, help="kills of one run")
    parser.add_argument("--every", type=int, default=4, help="steps between two checkpoints of the job that restarts from the disk")
    parser.add_argument("--heartbeat", type=int, default=1000, help="milliseconds of silence after which a group is left out")
    parser.add_argument("--hidden", type=int, help="width of the model's hidden layers; such a model is not compared with plain PyTorch")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    wide = {"hidden": options.hidden} if options.hidden else {}
    others: dict[str, list[float]] = {"rank": [], "agent": [], "node": []}
    back: dict[str, list[float]] = {"rank": [], "agent": [], "node": []}
    disk: list[float] = []
    left, nodes, steps, places = options.kills, options.nodes, 0, Counter[str]()
    while left > 0:
        kills = min(left, options.per_run)
        of_nodes = min(nodes, kills, -(-options.nodes * kills // options.kills))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            # A machine with other work may keep a group silent for so long: it ends with an error, and is started again.
            plan = {**plan_of(chance, kills, of_nodes, options.groups), "heartbeat": options.heartbeat, "failures": kills, **wide}
            plan["timeout"] = 4 * options.heartbeat // 1000
            plan["limit"] *= 4
            run(plan, folder)
            steps += len(check(folder, plan))
            for death in deaths_of(folder):
                going, returned = times_after(folder, death)
                others[death["kind"]].append(going)
                back[death["kind"]].append(returned)
                places[death["place"]] += 1
            happened = len(deaths_of(folder))
        print(f"stage {plan['stage']}, accumulation {plan['accumulation']}: {happened} kills, exact", flush=True)
        for kind in others:
            print(row(kind, others[kind]), row(kind, [value for value in back[kind] if value == value]), flush=True)
        left, nodes = left - kills, nodes - of_nodes
    with tempfile.TemporaryDirectory() as name:
        death = {"rank": 1, "after": options.every // 2, "place": "backward", "kind": "rank"}
        plan = plan_of(chance, 1, 0, 1)
        run({**plan, "ranks": 2, "steps": 40, "deaths": {"0": [death] * 8}, "disk": options.every, "stage": 3, **wide}, Path(name))
        disk = restart_times(Path(name))
    columns = ["after the death of a", "kills", "median", "least", "most"]
    rows = [row(f"{kind}: the next step of the others", others[kind]) for kind in others]
    rows += [row(f"{kind}: the next step of its group", [value for value in back[kind] if value == value]) for kind in back]
    rows += [row("rank of one job, restarted from the disk", disk)]
    ResultTable("Replica groups", " ".join(sys.argv), "", columns, rows).print()
    print(f"{sum(places.values())} kills in {steps} steps, by place {dict(places)}; no batch lost or taken twice")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


if __name__ == "__main__":
    main()
