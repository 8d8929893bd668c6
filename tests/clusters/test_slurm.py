"""The job scripts of examples/clusters/slurm as they are, on a real Slurm with several nodes: signals, requeues, arrays, a dead node."""

from __future__ import annotations

import re
from collections.abc import Iterator
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


def at_least(slurm: Cluster, job: str, event: str, reached: object) -> None:
    """Wait until ``reached()``; fail with the log of the job if the job ends before."""

    def come() -> bool:
        assert not slurm.ended(job), f"the job ended before: {event}\n{log_of(slurm, job)[-6000:]}"
        return bool(reached())  # type: ignore[operator]

    until(come, event, pause=0.5)


def log_of(slurm: Cluster, job: str) -> str:
    """Return the output of all starts of a job."""
    return "\n".join(path.read_text() for path in slurm.work.glob(f"*-{job}*.log"))


def test_a_run_goes_on_after_a_signal_and_without_a_dead_node(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit(*SMALL, "--ntasks-per-node=2", f"{FOLDER}/trainer.sbatch", *ENDLESS, *CONSTANT)
    folder = slurm.work / "runs/clusters/trainer"
    at_least(slurm, job, "the first checkpoint", lambda: step_of(folder))

    slurm.run("scancel", "--signal=TERM", job)  # as --signal does before the end of the time: to the ranks, not to the job's script
    at_least(slurm, job, "the second start", lambda: slurm.job(job)["Restarts"] == "1")
    preempted = int(re.findall(r"preempted by SIGTERM: .*checkpoint-(\d+)", log_of(slurm, job))[0])
    at_least(slurm, job, "a checkpoint of the second start", lambda: step_of(folder) > preempted)

    used = slurm.job(job)["NodeList"]
    assert used == "node-[1-2]"
    slurm.lose("node-2")
    at_least(slurm, job, "a start on the other nodes", lambda: "node-3" in slurm.job(job)["NodeList"])
    saved = step_of(folder)
    at_least(slurm, job, "a checkpoint of the last start", lambda: step_of(folder) > saved)
    slurm.run("scancel", "--full", "--signal=KILL", job)
    until(lambda: slurm.ended(job), "the end of the job", pause=0.5)

    losses = history(folder)
    assert sorted(losses) == list(range(1, max(losses) + 1)) and max(losses) > saved > preempted > 0
    on_torchrun(tmp_path, "trainer.py", 4, "--output_dir", "whole", "--max_steps", str(max(losses)), *CONSTANT)
    assert history(tmp_path / "whole") == losses


def test_accelerate_launch_on_each_node_goes_on_after_a_signal(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit(*SMALL, f"{FOLDER}/accelerate.sbatch", *ENDLESS)
    newest = slurm.work / "runs/clusters/accelerate/newest"
    at_least(slurm, job, "the first checkpoint", newest.exists)
    slurm.run("scancel", "--signal=TERM", job)
    at_least(slurm, job, "the second start", lambda: "Resumed after step" in log_of(slurm, job))
    printed = log_of(slurm, job)
    resumed = int(re.findall(r"Resumed after step (\d+)", printed)[0])
    assert "preempted by SIGTERM" in printed.partition("Resumed")[0]
    at_least(slurm, job, "steps of the second start", lambda: max(steps_printed(log_of(slurm, job))) > resumed + 10)
    slurm.run("scancel", "--full", "--signal=KILL", job)
    until(lambda: slurm.ended(job), "the end of the job", pause=0.5)

    losses = steps_printed(log_of(slurm, job))
    last = max(losses)
    whole = on_torchrun(tmp_path, "accelerate_loop.py", 4, "--output_dir", "whole", "--max_steps", str(last), "--save_steps", str(last))
    assert steps_printed(whole) == losses


def test_hf_zero_launch_trains_on_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    job = slurm.submit(*SMALL, "--ntasks-per-node=2", f"{FOLDER}/launch.sbatch", "--max_steps", "6", "--save_steps", "3", *CONSTANT)
    until(lambda: slurm.ended(job), "the end of the job", pause=0.5)
    assert slurm.job(job)["JobState"] == "COMPLETED", log_of(slurm, job)[-6000:]
    on_torchrun(tmp_path, "trainer.py", 4, "--output_dir", "whole", "--max_steps", "6", *CONSTANT)
    assert history(slurm.work / "runs/clusters/launch") == history(tmp_path / "whole")


def test_an_array_trains_each_seed_beside_the_others(slurm: Cluster) -> None:
    small = ("--array=0-1", "--nodelist=node-1", "--gpus-per-node=1", "--cpus-per-task=1")  # both at the same time on one node
    job = slurm.submit(*small, f"{FOLDER}/seeds.sbatch", "--max_steps", "6", "--save_steps", "3", *CONSTANT)
    until(lambda: slurm.ended(job), "the end of the jobs", pause=0.5)
    states = re.findall(r"JobState=(\w+)", slurm.run("scontrol", "show", "job", job))
    assert states == ["COMPLETED"] * 2, log_of(slurm, job)[-6000:]
    first, second = (history(slurm.work / f"runs/clusters/seed-{seed}") for seed in (0, 1))
    assert sorted(first) == sorted(second) == list(range(1, 7)) and first != second


def test_a_script_with_an_error_is_started_again_only_so_many_times(slurm: Cluster) -> None:
    job = slurm.submit(*SMALL, "--ntasks-per-node=2", f"{FOLDER}/trainer.sbatch", "--no_such_flag", "1")
    until(lambda: slurm.ended(job), "the end of the job", pause=0.5)
    found = slurm.job(job)
    assert (found["JobState"], found["Restarts"]) == ("FAILED", "5")
