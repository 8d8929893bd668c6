"""The job scripts of examples/clusters/slurm as they are, on a real Slurm with several nodes: signals, requeues, arrays, a dead node."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clusters.runs import CONSTANT, ENDLESS, history, on_torchrun, step_of, steps_printed
from tests.clusters.slurm_cluster import Cluster, cluster, missing
from tests.support.processes import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

FOLDER = "examples/clusters/slurm"
SMALL = ("--nodes=2", "--gpus-per-node=2", "--cpus-per-task=1")  # what a person gives on the command line of sbatch


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes with two GPUs each, of which a job takes two."""
    if reason := missing():
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


class Job:
    """A job of the cluster, which is killed when the ``with`` ends.

    Args:
        slurm: The cluster.
        *words: Words of ``sbatch``.
    """

    def __init__(self, slurm: Cluster, *words: str) -> None:
        self.slurm = slurm
        self.number = slurm.submit(*words)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.slurm.ended(self.number):
            self.slurm.run("scancel", self.number)
        self.until_ended()

    def log(self) -> str:
        """Return the output of all starts."""
        return "\n".join(path.read_text(errors="replace") for path in self.slurm.work.glob(f"*-{self.number}*.log"))

    def known(self, name: str) -> str:
        """Return a field of what Slurm says of the job."""
        return self.slurm.job(self.number)[name]

    def until(self, event: str, come: Callable[[], object]) -> None:
        """Wait until ``come()``; fail with the log if the job ends before."""

        def reached() -> bool:
            assert not self.slurm.ended(self.number), f"the job ended before: {event}\n{self.log()[-6000:]}"
            return bool(come())

        until(reached, event, pause=0.5)

    def until_ended(self) -> None:
        """Wait for the end of the job, or of every job of an array."""
        until(lambda: self.slurm.ended(self.number), f"the end of job {self.number}", pause=0.5)

    def ask_to_end(self) -> None:
        """Send SIGTERM to the ranks and not to the job's script, as ``--signal`` does before the time is over; wait for the next start."""
        before = int(self.known("Restarts"))
        self.slurm.run("scancel", "--signal=TERM", self.number)
        self.until("the next start", lambda: int(self.known("Restarts")) > before)
        assert int(self.known("Restarts")) == before + 1 and "preempted by SIGTERM" in self.log(), self.log()[-6000:]


def test_ranks_that_saved_end_the_job_step_with_status_75(slurm: Cluster) -> None:
    with Job(slurm, *SMALL, "--ntasks-per-node=1", "--requeue", f"{FOLDER}/launch.sbatch", *ENDLESS) as job:
        job.until("the first checkpoint", lambda: step_of(slurm.work / "runs/clusters/launch"))
        job.ask_to_end()
    assert job.log().count("Exited with exit code 75") >= 1 and "Terminated" not in job.log().partition("JOB REQUEUE")[0]


def test_accelerate_launch_on_each_node_goes_on_after_a_signal(slurm: Cluster, tmp_path: Path) -> None:
    newest = slurm.work / "runs/clusters/accelerate/newest"
    with Job(slurm, *SMALL, f"{FOLDER}/accelerate.sbatch", *ENDLESS) as job:
        job.until("the first checkpoint", newest.exists)
        job.ask_to_end()
        job.until("the second start", lambda: "Resumed after step" in job.log())
        resumed = int(re.findall(r"Resumed after step (\d+)", job.log())[0])
        job.until("steps of the second start", lambda: max(steps_printed(job.log())) > resumed + 10)

    losses = steps_printed(job.log())
    last = str(max(losses))
    whole = on_torchrun(tmp_path, "accelerate_loop.py", 4, "--output_dir", "whole", "--max_steps", last, "--save_steps", last)
    assert steps_printed(whole) == losses


def test_hf_zero_launch_trains_on_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    words = ("--job-name=short", "--ntasks-per-node=2", f"{FOLDER}/launch.sbatch", "--max_steps", "6", "--save_steps", "3")
    with Job(slurm, *SMALL, *words, *CONSTANT) as job:
        job.until_ended()
        assert job.known("JobState") == "COMPLETED", job.log()[-6000:]
    on_torchrun(tmp_path, "trainer.py", 4, "--output_dir", "whole", "--max_steps", "6", *CONSTANT)
    assert history(slurm.work / "runs/clusters/short") == history(tmp_path / "whole")


def test_an_array_trains_each_seed_beside_the_others(slurm: Cluster) -> None:
    small = ("--array=0-1", "--nodelist=node-1", "--gpus-per-node=1", "--cpus-per-task=1")  # both at the same time on one node
    with Job(slurm, *small, f"{FOLDER}/seeds.sbatch", "--max_steps", "6", "--save_steps", "3", *CONSTANT) as job:
        job.until_ended()
        states = re.findall(r"JobState=(\w+)", slurm.run("scontrol", "show", "job", job.number))
        assert states == ["COMPLETED"] * 2, job.log()[-6000:]
    first, second = (history(slurm.work / f"runs/clusters/seed-{seed}") for seed in (0, 1))
    assert sorted(first) == sorted(second) == list(range(1, 7)) and first != second


def test_a_script_with_an_error_is_started_again_only_so_many_times(slurm: Cluster) -> None:
    words = ("--job-name=wrong", "--nodes=1", "--gpus-per-node=1", "--cpus-per-task=1", "--ntasks-per-node=1")
    with Job(slurm, *words, f"{FOLDER}/trainer.sbatch", "--no_such_flag", "1") as job:
        job.until_ended()
        assert (job.known("JobState"), job.known("Restarts")) == ("FAILED", "5")


def test_a_run_goes_on_after_a_signal_and_without_a_dead_node(slurm: Cluster, tmp_path: Path) -> None:
    folder = slurm.work / "runs/clusters/trainer"
    with Job(slurm, *SMALL, "--ntasks-per-node=2", f"{FOLDER}/trainer.sbatch", *ENDLESS, *CONSTANT) as job:
        job.until("the first checkpoint", lambda: step_of(folder))
        job.ask_to_end()
        preempted = int(re.findall(r"preempted by SIGTERM: .*checkpoint-(\d+)", job.log())[-1])
        job.until("a checkpoint of the second start", lambda: step_of(folder) > preempted)

        assert job.known("NodeList") == "node-[1-2]"
        slurm.lose("node-2")
        job.until("a start on the other nodes", lambda: "3" in job.known("NodeList"))
        saved = step_of(folder)
        job.until("a checkpoint of the last start", lambda: step_of(folder) > saved)

    losses = history(folder)
    assert sorted(losses) == list(range(1, max(losses) + 1)) and max(losses) > saved > preempted > 0
    on_torchrun(tmp_path, "trainer.py", 4, "--output_dir", "whole", "--max_steps", str(max(losses)), *CONSTANT)
    assert history(tmp_path / "whole") == losses
