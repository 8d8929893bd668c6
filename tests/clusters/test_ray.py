"""The scripts of examples/clusters/ray on a real cluster of several nodes: torchrun's numbers, a worker and a node that die."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clusters.ray_cluster import RayCluster, kill_tree, ray_cluster
from tests.clusters.runs import CONSTANT, ENDLESS, history, on_torchrun, step_of, steps_printed
from tests.support.examples import EXAMPLES
from tests.support.processes import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install ray"),
]
# Ray's controller writes this file when it has the report of every rank; reports that a lost node had not sent yet are lost with it.
KNOWN = "checkpoint_manager_snapshot.json"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """A head and a second node, with room for one worker each."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:  # a short path: Ray's sockets lie in it
        with ray_cluster(Path(folder)) as made:
            yield made


class Driver:
    """A script of examples/clusters/ray that runs on the cluster."""

    def __init__(self, cluster: RayCluster, script: str, folder: Path, *words: str) -> None:
        self.log = folder / f"{script}.log"
        command = [sys.executable, str(EXAMPLES / "clusters/ray" / script), "--storage", "runs", "--cpu", *words]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=folder, env=cluster.variables(), stdout=out, stderr=out, start_new_session=True)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        kill_tree(self.process.pid)  # Ray ends the workers of a driver that is gone
        self.process.wait()

    def text(self) -> str:
        """Return all that it and its workers have printed."""
        return self.log.read_text(errors="replace")

    def until(self, event: str, come: Callable[[], object]) -> None:
        """Wait until ``come()``; fail with the output if the script ends before."""

        def reached() -> bool:
            assert self.process.poll() is None, f"the script ended before: {event}\n{self.text()[-6000:]}"
            return bool(come())

        until(reached, event, pause=0.5)

    def workers(self) -> list[int]:
        """Return the process numbers of the workers that have printed something, the newest last."""
        return [int(number) for number in dict.fromkeys(re.findall(r"RayTrainWorker pid=(\d+)", self.text()))]


def test_trainer_has_the_numbers_of_torchrun_and_goes_on_after_a_worker_died(cluster: RayCluster, tmp_path: Path) -> None:
    run = tmp_path / "runs/trainer"
    with Driver(cluster, "trainer.py", tmp_path, *ENDLESS, *CONSTANT) as driver:
        driver.until("the first checkpoint", (run / KNOWN).exists)
        os.kill(driver.workers()[-1], signal.SIGKILL)
        driver.until("the second start", lambda: len(driver.workers()) == 4)
        saved = step_of(run)
        driver.until("a checkpoint of the second start", lambda: step_of(run) > saved)
    losses = history(run)
    assert sorted(losses) == list(range(1, max(losses) + 1)) and max(losses) > saved > 0
    on_torchrun(tmp_path, "trainer.py", 2, "--output_dir", "whole", "--max_steps", str(max(losses)), *CONSTANT)
    assert history(tmp_path / "whole") == losses


def test_accelerate_has_the_numbers_of_torchrun_and_goes_on_after_a_node_died(cluster: RayCluster, tmp_path: Path) -> None:
    with Driver(cluster, "accelerate_loop.py", tmp_path, *ENDLESS) as driver:
        driver.until("the first checkpoint", (tmp_path / "runs/accelerate_loop" / KNOWN).exists)
        cluster.lose(1)
        cluster.join()
        driver.until("the second start", lambda: "Resumed after step" in driver.text())
        resumed = int(re.findall(r"Resumed after step (\d+)", driver.text())[0])
        driver.until(
            "steps of the second start", lambda: max(steps_printed(driver.text().rpartition("Resumed")[2]), default=0) > resumed + 10
        )
    losses = steps_printed(driver.text())
    last = str(max(losses))
    whole = steps_printed(
        on_torchrun(tmp_path, "accelerate_loop.py", 2, "--output_dir", "whole", "--max_steps", last, "--save_steps", last)
    )
    assert max(whole) > resumed >= 10
    assert {step: losses[step] for step in whole} == whole
