"""The history of a run of replica groups, from the lines of all its ranks, and the same training in plain PyTorch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from hf_zero.replica_groups.sampler import ReplicaSampler
from tests.replica_groups.group_run import BATCH, LR, SAMPLES, Model, Samples

FACTS = ("step", "norm", "lr", "taken", "next", "open", "samples", "before", "after")


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the steps that led to the final state, in order.

    Every group and rank that took one of them must have the same facts. Other steps were taken by a group that died before any other had
    them.
    """
    known: dict[int, dict[str, Any]] = {}
    last: dict[str, Any] = {"step": 0}
    for path in sorted(folder.glob("steps-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            facts = {name: line[name] for name in FACTS}
            assert known.setdefault(line["after"], facts) == facts, (path.name, facts, known[line["after"]])
            if line["step"] >= last["step"]:
                last = facts
    steps: list[dict[str, Any]] = []
    while last["step"] > 1:
        steps.append(last)
        last = known[last["before"]]
    return [last, *reversed(steps)]


def check_batches(steps: list[dict[str, Any]]) -> None:
    """Check that no batch was lost or taken twice."""
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    taken = [number for step in steps for own in step["taken"].values() for number in own]
    assert len(set(taken)) == len(taken), "no batch is taken twice"
    assert sorted([*taken, *steps[-1]["open"]]) == list(range(steps[-1]["next"])), "each batch is taken, or still to be taken"


def plain(steps: list[dict[str, Any]], plan: dict[str, Any], gamma: float = 0.9) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train with the batches of ``steps`` in plain PyTorch; return the weights, and the gradient norm of each step."""
    net, rows = Model(), Samples()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    sampler = ReplicaSampler(SAMPLES, BATCH, plan["ranks"], seed=1, groups=plan["groups"])
    norms = []
    for step in steps:
        optimizer.zero_grad()
        for numbers in step["taken"].values():
            for number in numbers:
                samples = sampler.samples(number)
                loss = net(rows.x[samples], rows.labels[samples])["loss"]
                (loss / len(numbers) / len(step["taken"])).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        schedule.step()
    return net.state_dict(), norms


def check(folder: Path, plan: dict[str, Any], gamma: float = 0.9) -> list[dict[str, Any]]:
    """Check a run: batches, equal weights on all ranks bit for bit, and the training in plain PyTorch; return its steps.

    A wide model is not compared with plain PyTorch: Adam makes large steps of gradients that are rounding noise.
    """
    steps = history(folder)
    check_batches(steps)
    assert len(steps) == plan["steps"]
    found = [torch.load(folder / f"weights-{group}-{rank}.pt") for group in range(plan["groups"]) for rank in range(plan["ranks"])]
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])
    if "hidden" not in plan:
        weights, norms = plain(steps, plan, gamma)
        torch.testing.assert_close(found[0], weights, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close([step["norm"] for step in steps], norms, rtol=1e-4, atol=1e-6)
    assert [step["samples"] for step in steps] == _counted(steps, plan)
    return steps


def _counted(steps: list[dict[str, Any]], plan: dict[str, Any]) -> list[int]:
    total, counts = 0, []
    for step in steps:
        total += sum(map(len, step["taken"].values())) * BATCH * plan["ranks"]
        counts.append(total)
    return counts


def deaths_of(folder: Path) -> list[dict[str, Any]]:
    """Return the deaths that have happened, in order of time, each with its group."""
    found = [{"group": int(path.name.split("-")[1]), **json.loads(path.read_text())} for path in folder.glob("died-*")]
    return sorted(found, key=lambda death: float(death["time"]))


def times_after(folder: Path, death: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds from a death until the other groups' next step with a new set of groups, and until the next step of the group.

    A step that was under way when the group died, and has its gradients, is not counted. The second is nan if the group came back after the
    last step.
    """
    others, own = [], []
    for path in folder.glob("steps-*.jsonl"):
        group, _, attempt = map(int, path.stem.split("-")[1:])
        for line in map(json.loads, path.read_text().splitlines()):
            if line["time"] <= death["time"]:
                continue
            if group == death["group"] and attempt > death["attempt"]:
                own.append(line["time"])
            elif group != death["group"] and str(death["group"]) not in line["taken"]:
                others.append(line["time"])
    back = min(own, default=math.nan)
    return min([*others, back]) - death["time"], back - death["time"]
