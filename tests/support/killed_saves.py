"""A run that saves after every step and dies at a phase of a save or after some time; the states that it may resume from."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.system.own_files import write_text
from tests.support import ranks
from tests.support.checkpoints import IN_BACKGROUND, differences, full_state, start, steps
from tests.support.s3_server import forget_servers

WORLD = 2
RESUMED_WRONGLY = "resumed wrongly"
# Labels of observe.note inside a save, in order, and the step that a run resumes from when the save after step 2 is killed there.
PHASES = {
    "checkpoint_begun": 1,
    "checkpoint_file": 1,
    "checkpoint_written": 1,
    "checkpoint_sealed": 1,
    "checkpoint_named": 1,  # complete, but ``latest`` names the former one
    "checkpoint_latest": 1,
    "checkpoint_done": 2,
}


@dataclass(frozen=True)
class Plan:
    """How a process trains, and how it dies.

    Attributes:
        folder: Of the checkpoints, and of what has been acknowledged.
        total: Steps of the whole run.
        tag: One name for all checkpoints; None: one for each step.
        background: Save in the background.
        phase: Die at this label ...
        at_step: ... of the save after this step.
        victims: Ranks that die.
        seconds: Die so long after the engine is there, whatever happens then.
        url: Of the checkpoints, if they are in an object store.
    """

    folder: str
    total: int
    tag: str | None = None
    background: bool = False
    phase: str = ""
    at_step: int = 0
    victims: tuple[int, ...] = ()
    seconds: float = 0.0
    url: str = ""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(plan: Plan, reference: list[dict[str, Any]] | None = None) -> tuple[int, dict[str, Any], dict[str, Any], float]:
    """Resumes from what there is and trains to the end.

    Returns the step it began at, the state there and at the end, and the seconds from there to the end.
    With ``reference`` it looks at once whether it has begun where it may, so that runs that are killed later prove something too.
    """
    from hf_zero import observe

    if plan.url:
        forget_servers()
    engine = start(3, "bf16", **(IN_BACKGROUND if plan.background else {}))
    began = time.monotonic()
    timer = threading.Timer(plan.seconds, _die)
    timer.daemon = True
    if ranks.rank() in plan.victims and plan.seconds:  # not before: a new process takes longer to import than to train
        timer.start()
    engine.load_checkpoint(plan.url or plan.folder)
    first, begin = engine.global_steps, full_state(engine)
    done = Path(plan.folder, "done")
    if reference is not None:
        acknowledged = int(done.read_text() or 0) if done.exists() else 0
        wrong = differences(begin, reference[first])
        if first < acknowledged or wrong:
            raise RuntimeError(f"{RESUMED_WRONGLY} at step {first} of {acknowledged} that were acknowledged: {wrong}")

    def listen(label: str) -> None:
        meant = engine.global_steps == plan.at_step if plan.tag else f"global_step{plan.at_step}" in label
        if ranks.rank() in plan.victims and plan.phase and plan.phase in label and meant:
            _die()

    observe._listeners.append(listen)
    try:
        for step in range(first, plan.total):
            steps(engine, step, 1, "bf16")
            engine.save_checkpoint(plan.url or plan.folder, plan.tag)
            # What has been acknowledged must never be lost; in the background that is the save before this one.
            if ranks.rank() == 0:
                write_text(done, str(step if plan.background else step + 1))
        engine.wait_for_checkpoint()
    finally:
        observe._listeners.remove(listen)
        timer.cancel()
    seconds = time.monotonic() - began
    end = full_state(engine)
    engine.destroy()
    return first, begin, end, seconds


def states(count: int) -> list[dict[str, Any]]:
    engine = start(3, "bf16")
    found = [full_state(engine)]
    for step in range(count):
        steps(engine, step, 1, "bf16")
        found.append(full_state(engine))
    engine.destroy()
    return found
