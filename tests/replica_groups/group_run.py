"""A rank of a replica group: trains a small model by a plan, writes a line for each step, and dies where the plan says.

Keys of a plan:

* ``groups``, ``ranks`` (of a group), ``steps``, ``stage``, ``accumulation``, ``extra`` (of the configuration), ``how``: "engine",
  "accelerate" or "trainer".
* ``deaths``: for each group a list of deaths, one after the other: ``rank``, ``after`` (steps that an attempt has taken), ``place`` in the
  step (``PLACES``) and ``kind``: "rank", "agent" or "node". With ``lone`` the group is not started again before another one has taken a
  step without it. Two kinds are no deaths: "error" at the place "averaged" is an exchange that has failed on this rank alone, and "pause"
  stops the rank until another group has taken a step without it.
* ``torchrun``: the launchers are torchrun itself, which starts a group again at once.
* ``failures``: errors after which a launcher still starts its group again; ``heartbeat``: milliseconds of silence until the lighthouse
  leaves a group out.
* ``alone``: steps that the other groups take while one is away, before they wait for it. No group dies while another is away.
* ``hidden``: width of the model's hidden layers; 16 if left out.
* ``disk``: without replica groups, steps between two checkpoints in ``FOLDER/disk``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLES, BATCH, WIDTH, LR = 96, 2, 6, 0.02
_SLOWER = 0.2  # seconds that a step takes longer while another group is about to join, so that the last step does not come before
_LAST = 8  # steps at the end of a run without deaths
PLACES = ("forward", "backward", "average", "inside", "averaged", "voted", "stepped")


class Samples(Dataset[dict[str, torch.Tensor]]):
    """SAMPLES rows: ``x`` (WIDTH,) and ``labels`` (1,)."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.labels = torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, 1, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


class Model(nn.Module):
    """A model with the same weights each time, small unless ``hidden``, the width of its hidden layers, is large."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": (self.layers(x) - labels).square().mean()}


def config(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a plan."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": plan["accumulation"],
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.9}},
        "zero_optimization": {"stage": plan["stage"], "stage3_param_persistence_threshold": 0},
        "hf_zero": {} if plan.get("disk") else {"replicas": "torchft"},
        **plan.get("extra", {}),
    }


def went_on_without(folder: Path, group: int, since: float) -> bool:
    """Return whether another group has taken a step without ``group`` since a time."""
    for path in folder.glob("steps-*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # it is being written
                step = json.loads(line)
                if step["time"] > since and str(group) not in step["taken"]:
                    return True
    return False


class Deaths:
    """Deaths of this rank by the plan, and the signs of life of all groups, as files in a folder."""

    def __init__(self, plan: dict[str, Any], folder: Path) -> None:
        self.group, self.attempt = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.rank = int(os.environ["RANK"])
        self._folder, self._alone, self._away = folder, plan.get("alone", 1), folder / "away"
        planned = plan.get("deaths", {}).get(str(self.group), [])
        self._number = len(list(folder.glob(f"died-{self.group}-*")))
        self._next = planned[self._number] if self._number < len(planned) else None
        self.taken = 0  # steps of this attempt
        self.step = 0  # of the run, before the coming one
        self._until = plan["steps"] - _LAST
        self._alone_since = ((-1, -1), 0)  # the group that is away, and the number of steps begun without it

    def at(self, place: str) -> bool:
        """Die if the plan has a death here, unless another group is away; return whether it has an error here instead."""
        death = self._next
        if death is None or (death["rank"], death["place"]) != (self.rank, place) or self.taken < death["after"] or self.step > self._until:
            return False
        if death["kind"] == "error":
            self._note(death)
            self._next = None
            return True
        with contextlib.suppress(FileExistsError), self._away.open("x") as away:
            away.write(f"{self.group} {self.attempt}")
            self._die(death)
        return False

    def _note(self, death: dict[str, Any]) -> None:
        (self._folder / f"died-{self.group}-{self._number}").write_text(json.dumps({**death, "attempt": self.attempt, "time": time.time()}))

    def _die(self, death: dict[str, Any]) -> None:
        self._note(death)
        self._away.write_text(f"{self.group} {self.attempt}")
        if death["kind"] == "pause":
            self._next = None
            self._pause(time.time())
            return
        if death["kind"] == "node":
            (self._folder / f"cut-{self.group}").write_text("")
        elif death["kind"] == "agent":
            os.kill(os.getppid(), signal.SIGKILL)
        else:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)  # until the node or the agent is gone

    def _pause(self, begun: float) -> None:
        """Stop this process; a child lets it go on when another group has taken a step without it."""
        parent = os.getpid()
        if not os.fork():
            while not went_on_without(self._folder, self.group, begun):
                time.sleep(0.01)
            os.kill(parent, signal.SIGCONT)
            os._exit(0)
        os.kill(parent, signal.SIGSTOP)
        self._away.unlink()

    def ready(self) -> None:
        """Note that this rank is about to meet the other groups for the first time."""
        if self.rank == 0 and not self.taken:
            (self._folder / f"ready-{self.group}-{self.attempt}").write_text("")

    def wait_for_others(self) -> None:
        """Wait before a step while another group is away, after a few steps without it."""
        missing = group, attempt = self._missing()
        self._alone_since = (missing, self._alone_since[1] + 1 if missing == self._alone_since[0] else 1)
        if group in (-1, self.group) or self._alone_since[1] <= self._alone:
            return
        while self._missing() == (group, attempt) and not self._is_back(group, attempt):
            time.sleep(0.01)
        if self._missing() == (group, attempt):
            time.sleep(_SLOWER)

    def wait_at_end(self) -> None:
        """Wait while another group is away, which gets the last state when it is back."""
        group, attempt = self._missing()
        while group not in (-1, self.group) and self._missing() == (group, attempt) and not self._is_back(group, attempt):
            time.sleep(0.01)

    def _missing(self) -> tuple[int, int]:
        try:
            group, attempt = self._away.read_text().split()
        except (FileNotFoundError, ValueError):
            return -1, -1
        return int(group), int(attempt)

    def _is_back(self, group: int, attempt: int) -> bool:
        return any(int(path.name.rpartition("-")[2]) > attempt for path in self._folder.glob(f"ready-{group}-*"))

    def stepped(self) -> None:
        """Count a step; the first one of an attempt shows that the group is back."""
        self.taken += 1
        group, attempt = self._missing()
        if self.rank == 0 and group == self.group and attempt < self.attempt:
            self._away.unlink()


def spread_deaths(deaths: Deaths) -> None:
    """Let a death come between the exchanges of a step: before the average, inside it, before and after the vote."""
    from hf_zero.replica_groups.quorum import Quorum

    average, vote, form = Quorum.average, Quorum.vote, Quorum.form

    def noted_form(self: Any, *facts: Any) -> Any:
        deaths.ready()
        return form(self, *facts)

    def dying_average(self: Any, tensors: Any) -> None:
        deaths.at("average")
        average(self, tensors[:1])
        deaths.at("inside")
        average(self, tensors[1:])
        if deaths.at("averaged"):
            self._manager.report_error(RuntimeError("an error that the plan has here"))

    def dying_vote(self: Any) -> bool:
        agreed = vote(self)
        deaths.at("voted")
        return agreed

    Quorum.average, Quorum.vote, Quorum.form = dying_average, dying_vote, noted_form  # type: ignore[method-assign]


class Log:
    """A line for each step of an attempt: its facts, and the history of the group before and after it."""

    def __init__(self, folder: Path, deaths: Deaths) -> None:
        self._file = (folder / f"steps-{deaths.group}-{deaths.rank}-{deaths.attempt}.jsonl").open("w")
        self._deaths = deaths
        self._groups: Any = None
        self._before = 0

    def begin(self, engine: Any) -> None:
        """Note the state before a step; the first call comes after the groups have met."""
        self._groups = engine.stepper.groups
        self._before = getattr(self._groups, "_digest", 0)
        self._step = self._deaths.step = engine.global_steps

    def end(self, engine: Any) -> None:
        """Write a line if a step was taken together with other groups."""
        if engine.global_steps == self._step:
            return
        groups = self._groups
        if groups is not None and not groups.taken:
            return  # another group has taken the step, and this one has received the state after it
        line = {"step": engine.global_steps, "norm": float(engine.get_global_grad_norm()), "lr": engine.get_lr(), "time": time.time()}
        if groups is not None:
            shares = groups.shares
            line |= {"taken": groups.taken, "next": shares.next, "samples": engine.global_samples}
            line |= {"open": sorted([*shares.back, *(number for own in shares.held.values() for number in own)])}
            line |= {"before": self._before, "after": groups._digest}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._deaths.stepped()
        self._deaths.at("stepped")


@contextlib.contextmanager
def steps_of(engine: Any, deaths: Deaths, log: Log) -> Iterator[None]:
    """Watch forwards, backwards and steps of ``engine``, whoever calls them."""
    from hf_zero.core.engine import Engine

    backward, step = engine.backward, engine.step

    def watched_backward(*args: Any, **kwargs: Any) -> Any:
        log.begin(engine)
        deaths.at("backward")
        return backward(*args, **kwargs)

    def watched_step(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        log.end(engine)

    def before(_module: Any, _args: Any) -> None:
        if not engine.accumulation.in_window:
            deaths.wait_for_others()
        deaths.at("forward")

    assert isinstance(engine, Engine)
    engine.backward, engine.step = watched_backward, watched_step
    handle = engine.register_forward_pre_hook(before, prepend=True)
    yield
    handle.remove()


def _loader(plan: dict[str, Any], rank: int | None) -> DataLoader[Any]:
    from hf_zero.utils import ReplicaSampler

    sampler = ReplicaSampler(SAMPLES, BATCH, plan["ranks"], rank, seed=1, groups=plan["groups"])
    return DataLoader(Samples(), batch_size=BATCH, sampler=sampler)


def _loop(plan: dict[str, Any], folder: Path, deaths: Deaths) -> Any:
    import hf_zero

    engine, *_ = hf_zero.initialize(model=Model(plan.get("hidden", 16)), config=config(plan))
    loader: Any = _loader(plan, deaths.rank)
    if plan.get("disk"):
        engine.load_checkpoint(folder / "disk")
        rows = Samples()
        loader = [{"x": rows.x[:BATCH], "labels": rows.labels[:BATCH]}]
    with steps_of(engine, deaths, Log(folder, deaths)):
        while engine.global_steps < plan["steps"]:
            for batch in loader:
                if engine.global_steps >= plan["steps"]:
                    break
                engine.backward(engine(**batch)["loss"])
                engine.step()
                if plan.get("disk") and engine.global_steps % plan["disk"] == 0:
                    engine.save_checkpoint(folder / "disk")
    return engine


def _accelerate(plan: dict[str, Any], folder: Path, deaths: Deaths) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    settings = {key: value for key, value in config(plan).items() if key not in ("optimizer", "scheduler")}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings), gradient_accumulation_steps=plan["accumulation"])
    model = Model(plan.get("hidden", 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step / plan["ranks"]))  # stepped once per rank
    engine, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, _loader(plan, None), scheduler)
    with steps_of(engine, deaths, Log(folder, deaths)):
        while engine.global_steps < plan["steps"]:
            for batch in loader:
                if engine.global_steps >= plan["steps"]:
                    break
                with accelerator.accumulate(engine):
                    accelerator.backward(engine(**batch)["loss"])
                    accelerator.clip_grad_norm_(engine.parameters(), 0.5)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    return engine


def _trainer(plan: dict[str, Any], folder: Path, deaths: Deaths) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    kept: list[Any] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            engine = trainer.model_wrapped
            kept.append(contextlib.ExitStack())
            kept[0].enter_context(steps_of(engine, deaths, Log(folder, deaths)))

    class Sampled(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return _loader(plan, None).sampler

    settings = {key: value for key, value in config(plan).items() if key != "scheduler"}
    settings["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}}
    args = TrainingArguments(
        str(folder / f"out-{deaths.group}"), per_device_train_batch_size=BATCH, gradient_accumulation_steps=plan["accumulation"],
        max_steps=plan["steps"], learning_rate=LR, weight_decay=0.01, max_grad_norm=0.5, lr_scheduler_type="constant", deepspeed=settings,
        report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, use_cpu=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Sampled(Model(plan.get("hidden", 16)), args, train_dataset=Samples(), callbacks=[Watch()])
    trainer.train()
    (folder / f"trainer-{deaths.group}-{deaths.rank}.json").write_text(
        json.dumps({"global_step": trainer.state.global_step, "logged": [line["step"] for line in trainer.state.log_history]})
    )
    kept[0].close()
    return trainer.model_wrapped


HOW = {"engine": _loop, "accelerate": _accelerate, "trainer": _trainer}


def train(plan: dict[str, Any], folder: Path) -> None:
    """Train for the steps of the plan, and write what was done into ``folder``."""
    from hf_zero.zero import GatheredParameters

    deaths = Deaths(plan, folder)
    spread_deaths(deaths)
    engine = HOW[plan.get("how", "engine")](plan, folder, deaths)
    params = dict(engine.module.named_parameters())
    with GatheredParameters(list(params.values())):
        weights = {name: param.detach().clone() for name, param in params.items()}
    deaths.wait_at_end()
    torch.save(weights, folder / f"weights-{deaths.group}-{deaths.rank}.pt")
    engine.destroy()


def main() -> None:
    """Be one rank that torchrun has started."""
    folder = Path(sys.argv[1])
    train(json.loads((folder / "plan.json").read_text()), folder)


if __name__ == "__main__":
    main()
