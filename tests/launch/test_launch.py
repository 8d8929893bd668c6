"""Ranks from the variables of mpirun and srun, and the commands of `hf-zero launch`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hf_zero.cli import main
from hf_zero.deepspeed import launcher
from hf_zero.errors import ConfigError
from hf_zero.launch import command as launch_command
from hf_zero.launch import nodes, placement, rank
from hf_zero.launch.hosts import read_hostfile
from hf_zero.launch.placement import export_placement, find_placement, first_host, require_address
from tests.support.processes import MOST_SECONDS, REPO, environment

# What the launchers set on rank 1 of 4, two on each of two hosts (from Open MPI 4.1 and MPICH 4.0; MVAPICH2 and Slurm by their manuals).
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1012072449", "OMPI_MCA_orte_hnp_uri": "1012072448.0;tcp://192.0.2.2,10.0.0.2:44465;tcp6://[fd00::2]:41623",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "6"}
MVAPICH = {f"MV2_COMM_WORLD_{name}": value for name, value in {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}.items()}
SLURM = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "PMI_RANK": "1", "PMI_SIZE": "4",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "launcher", "address"),
    [(OPEN_MPI, "Open MPI", "192.0.2.2"), (MPICH, "MPICH's mpirun", ""), (MVAPICH, "MVAPICH2", ""), (SLURM, "srun", "gpu03")],
)
def test_placement(variables: dict[str, str], launcher: str, address: str) -> None:
    found = find_placement(variables)
    assert found is not None
    assert (found.launcher, found.rank, found.world, found.local_rank, found.local_world, found.address) == (launcher, 1, 4, 1, 2, address)
    assert 29500 <= found.port < 32768


def test_batch_scripts_shells_and_single_processes_are_no_ranks() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77", "SLURM_LOCALID": "0"}
    assert find_placement(batch) is None
    assert find_placement({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert find_placement({**MPICH, "PMI_SIZE": "1"}) is None
    assert find_placement({}) is None


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu[03-05,9],login", "gpu03"), ("a1", "a1"), ("a1,b2", "a1"), ("n[7,9]-ib", "n7-ib"), ("", ""), ("r1n[001-128]", "r1n001")],
)
def test_first_host_of_a_slurm_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def exported(variables: dict[str, str], **arguments: Any) -> dict[str, str]:
    environ = dict(variables)
    export_placement(environ, **arguments)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: environ[name] for name in names if name in environ}


def test_export_on_one_host() -> None:
    variables = {**MPICH, "PMI_SIZE": "2"}
    expected = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert exported(variables) == expected
    assert exported(variables, port=1234)["MASTER_PORT"] == "1234"
    assert exported({**variables, "MASTER_PORT": "4321"}, port=1234)["MASTER_PORT"] == "4321"


def test_export_leaves_alone_what_has_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exported({**MPICH, "RANK": "0"}) == {"RANK": "0"}
    for command in (["python", "/usr/bin/accelerate", "launch", "x.py"], ["python", "-u", "-m", "torch.distributed.run", "x.py"]):
        monkeypatch.setattr(sys, "orig_argv", command)
        assert exported(SLURM) == {}
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "accelerate"])
    assert exported(SLURM)["MASTER_ADDR"] == "gpu03"


def test_rank_0_must_be_where_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}
    with pytest.raises(ConfigError, match="Open MPI runs on 192.0.2.2, but rank 0 runs on .*mpirun -x MASTER_ADDR="):
        monkeypatch.setattr(placement, "_is_here", lambda address: False)
        exported(first)
    assert exported({**first, "MASTER_ADDR": "elsewhere"})["MASTER_ADDR"] == "elsewhere"
    monkeypatch.setattr(placement, "_is_here", lambda address: True)
    assert exported(first)["MASTER_ADDR"] == "192.0.2.2"


def test_several_hosts_without_an_address_are_refused() -> None:
    with pytest.raises(ConfigError, match="MPICH's mpirun started 4 ranks on several hosts.*-genv MASTER_ADDR"):
        require_address(MPICH)
    require_address({**MPICH, "MASTER_ADDR": "a"})
    require_address({**MPICH, "PMI_SIZE": "2"})
    require_address({})


def test_broken_variables_are_named() -> None:
    with pytest.raises(ConfigError, match="MPI_LOCALNRANKS is None"):
        find_placement({name: value for name, value in MPICH.items() if name != "MPI_LOCALNRANKS"})
    separated = find_placement({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "\x1c1"})  # str.strip takes it for a space, int does not
    assert separated is not None and separated.rank == 1
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_RANK is 'one'"):
        find_placement({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "one"})
    for wrong in ("\u00b2", "1" * 5000):  # both are digits, and no numbers to Python
        with pytest.raises(ConfigError, match="SLURM_NODEID is"):
            find_placement({**SLURM, "SLURM_NODEID": wrong})


def test_a_list_of_slurm_is_not_written_out() -> None:
    found = find_placement({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x999999999),3", "SLURM_NODEID": "999999998"})
    assert found is not None and found.local_world == 4


# --------------------------------------------------------------------------------------------------------- hf-zero launch

HOSTFILE = "# two nodes\nworker-1 slots=4\n\nworker-2 slots=2 # older\n"


@pytest.fixture
def hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("PYTHONPATH", "HF_HOME", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hf_zero.launch.command.PREFIXES", ("NCCL_",))
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(nodes, "is_this_machine", lambda host: host == "worker-1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "hosts"
    path.write_text(HOSTFILE)
    return str(path)


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["launch", "--dry-run", *words]) == 0
    return capsys.readouterr().out.strip().replace(sys.executable, "python")


def test_one_host(capsys: pytest.CaptureFixture[str], hostfile: str) -> None:
    start = "python -m torch.distributed.run --nproc_per_node 2 --nnodes 1 --node_rank 0 --master_addr 127.0.0.1 --master_port 29500"
    assert dry(capsys, "--num_gpus", "2", "train.py", "--lr", "1e-3") == f"{start} -- train.py --lr 1e-3"
    assert dry(capsys, "--num_gpus=2", "--module", "pkg.train", "--include") == f"{start} --module -- pkg.train --include"
    assert dry(capsys, "--num_gpus", "2", "--no_python", "./run.sh") == f"{start} --no_python -- ./run.sh"
    chosen = dry(capsys, "--num_gpus", "4", "--include", "localhost:1,3", "--master_port", "1", "train.py")
    assert chosen == f"CUDA_VISIBLE_DEVICES=1,3 {start[:-5]}1 -- train.py"


def test_scripts_that_declare_it_are_given_their_local_rank(
    capsys: pytest.CaptureFixture[str], hostfile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, other = tmp_path / "script.py", tmp_path / "other.py"
    script.write_text('parser.add_argument("--local_rank", type=int, default=-1)', encoding="utf-8")
    other.write_text('rank = os.environ["LOCAL_RANK"]  # not --local_rank', encoding="utf-8")
    found = dry(capsys, "--num_gpus", "2", str(script), "--lr", "1")
    assert found.endswith(f" --no_python -- python -m hf_zero.launch.rank --local_rank {script} --lr 1")
    for words in ((str(other),), ("--no_local_rank", str(script))):
        assert "hf_zero.launch" not in dry(capsys, "--num_gpus", "2", *words)
    monkeypatch.setattr(sys, "argv", ["rank.py", "--local_rank", str(script), "--lr", "1"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    started: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *command: started.append(command))
    rank.main()
    assert started == [(sys.executable, [sys.executable, "-u", str(script), "--local_rank=1", "--lr", "1"])]


def test_every_launcher(capsys: pytest.CaptureFixture[str], hostfile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    Path(".deepspeed_env").write_text("# by accelerate\nA=b c\n")
    where = ["--hostfile", hostfile]
    rest = "\n# with these variables of .deepspeed_env: A"
    assert dry(capsys, *where, "--launcher", "openmpi", "--launcher_args", "--bind-to none", "train.py") == (
        "MASTER_ADDR=worker-1 MASTER_PORT=29500 mpirun.openmpi -n 6 --host worker-1:4,worker-2:2 -x NCCL_DEBUG -x A -x MASTER_ADDR "
        f"-x MASTER_PORT --bind-to none python -u train.py{rest}"
    )
    assert dry(capsys, *where, "--launcher", "MPICH", "--num_gpus", "2", "--master_addr", "ib0", "--module", "train") == (
        f"MASTER_ADDR=ib0 MASTER_PORT=29500 mpirun.mpich -n 4 -hosts worker-1:2,worker-2:2 -genvall python -u -m train{rest}"
    )
    assert dry(capsys, *where, "--launcher", "slurm", "--num_gpus", "2", "--no_python", "./a") == (
        f"srun --nodes 2 --nodelist worker-1,worker-2 --ntasks-per-node 2 --export=ALL ./a{rest}"
    )
    assert dry(capsys, "--launcher", "slurm", "--num_nodes", "3", "--num_gpus", "8", "--master_port", "7", "train.py") == (
        f"MASTER_PORT=7 srun --nodes 3 --ntasks-per-node 8 --export=ALL python -u train.py{rest}"
    )
    second = dry(capsys, *where, "--node_rank", "1", "train.py")
    assert "--nproc_per_node 2 --nnodes 2 --node_rank 1 --master_addr worker-1 --master_port 29500 -- train.py" in second


def test_filters(capsys: pytest.CaptureFixture[str], hostfile: str) -> None:
    start = ["--hostfile", hostfile, "--launcher", "openmpi"]

    def hosts(*words: str) -> str:
        return dry(capsys, *start, *words, "t.py").split("--host ")[1].split()[0]

    assert hosts("--include", "worker-2@worker-1") == "worker-2:2,worker-1:4"
    assert hosts("--exclude", "worker-1") == "worker-2:2"
    assert hosts("--exclude", "worker-1:0,1@worker-2") == "worker-1:2"
    assert hosts("--num_nodes", "1") == "worker-1:4"
    assert hosts("--include", "worker-1:3") == "worker-1:1"
    assert "CUDA_VISIBLE_DEVICES=3" in dry(capsys, *start, "--include", "worker-1:3", "t.py")
    assert hosts("--include", "worker-1:0,1@worker-2:0,1") == "worker-1:2,worker-2:2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--include", "worker-3"], "host 'worker-3' is unknown; known: worker-1, worker-2"),
        (["--include", "worker-2:2"], "worker-2 has no slot '2'; it has 0, 1"),
        (["--include", "worker-1@worker-1:0"], "is listed twice"),
        (["--exclude", "worker-1@worker-2"], "leaves no host"),
        (["--include", "worker-1", "--exclude", "worker-2"], "cannot be combined"),
        (["--module", "--no_python"], "exclude each other"),
        (["--num_nodes", "3"], "--num_nodes is 3, but there are only 2 hosts"),
        (["--num_gpus", "3"], "worker-2 has only 2 slots"),
        (["--node_rank", "2"], "--node_rank is 2"),
        (["--launcher", "slurm"], "the same number of ranks"),
        (["--launcher", "pdsh", "--launcher_args=-x"], "--launcher pdsh is ssh here"),
        (["--launcher", "ssh", "--node_rank", "1"], "--node_rank starts only the ranks of this host"),
        (["--launcher", "standard", "--force_multi"], "remove one of them"),
        (["--launcher", "openmpi", "--ssh_port", "22"], "--ssh_port is for ssh, which --launcher openmpi does not use"),
        (["--ssh_args", "'open"], '--ssh_args "\'open" cannot be split into words'),
        (["--comment", "a"], "--comment is for srun"),
        (["--launcher", "mpich", "--enable_each_rank_log", "a"], "--enable_each_rank_log is for torchrun"),
        (["--save_pid"], "--save_pid is not supported: the process that you start is the launcher"),
        (["--venv_script", "activate"], "--venv_script is not supported: ranks use the interpreter of this command"),
        (["--bind_core_list", "0-3"], "--numa-binding node"),
        (["--max_elastic_nodes", "3"], "the number of ranks is fixed"),
        (["--launcher", "openmpi", "--include", "worker-1:0@worker-2:1"], "use different devices"),
        (["--launcher", "slurm", "--include", "worker-1:0@worker-2:1"], "use different devices"),
        (["--include", "worker-2:\u00b2"], "worker-2 has no slot"),
        (["--include", f"worker-2:{'1' * 5000}"], "worker-2 has no slot"),
        (["--launcher", "openmpi", "--launcher_args", "'open"], "No closing quotation"),
        (["--no_ssh"], f"this machine, {socket.gethostname()}, is not in the list of hosts worker-1, worker-2"),
        (["--launcher", "standard"], f"this machine, {socket.gethostname()}, is not in the list of hosts worker-1, worker-2"),
    ],
)
def test_mistakes(words: list[str], message: str, hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--dry-run", "--hostfile", hostfile, *words, "train.py"]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("launcher", [[], ["--launcher", "pdsh"], ["--launcher", "ssh"]])
def test_several_hosts_are_started_over_ssh(launcher: list[str], hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--hostfile", hostfile, "--include", "worker-1:1@worker-2", "--enable_each_rank_log", "logs", "train.py", "--lr", "1"]
    printed = dry(capsys, *launcher, "--ssh_port", "2222", "--ssh_args", "-l me", *words).splitlines()
    assert printed[0] == "# worker-1: here" and printed[2].startswith("# worker-2: ssh -l me -p 2222 -o BatchMode=yes ")
    assert printed[2].endswith(" -- worker-2") and printed[4].startswith("# with these variables: ")
    for number, command in enumerate((printed[1], printed[3])):
        alone = dry(capsys, "--no_ssh", "--node_rank", str(number), *words)
        assert command == alone.replace(" -- train.py", " --no_python -- python -m hf_zero.launch.rank train.py")
    assert (
        printed[1].startswith("CUDA_VISIBLE_DEVICES=1 ") and "--nproc_per_node 2 --nnodes 2 --node_rank 1 --master_addr wor" in printed[3]
    )
    assert " --log_dir logs --redirects 3 " in printed[1]


def test_one_host_is_started_over_ssh_on_request(
    hostfile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--hostfile", hostfile, "--num_nodes", "1", "--launcher", "pdsh", "train.py"]
    assert "ssh" not in dry(capsys, *words)
    assert dry(capsys, "--force_multi", *words).startswith("# worker-1: ssh -o BatchMode=yes")
    assert "ssh" not in dry(capsys, "--force_multi", "--no_ssh", *words)
    started: list[str] = []
    monkeypatch.setattr(os, "execve", lambda program, *command: started.append(program))
    assert main(["launch", "--hostfile", hostfile, "--include", "worker-2", "train.py"]) == 0 and len(started) == 1
    assert "the ranks of worker-2 start on this machine" in capsys.readouterr().err
    assert main(["launch", "--hostfile", hostfile, "--include", "worker-1", "train.py"]) == 0 and len(started) == 2
    assert not capsys.readouterr().err
    for quiet in (["--log_level", "warning"], ["-q"]):
        assert main(["launch", *quiet, "--hostfile", hostfile, "--include", "worker-2", "train.py"]) == 0
        assert not capsys.readouterr().err


def test_arguments_of_the_script_are_no_abbreviations_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--a", "1", "--n", "--log_level", "loud", "--mod=2", "--d", "-q"]
    assert dry(capsys, "--num_gpus", "2", "train.py", *words).endswith(f"train.py {' '.join(words)}")
    assert launcher.main(["--dry-run", "--num_gpus", "2", "train.py", *words]) == 0
    assert capsys.readouterr().out.strip().endswith(f"train.py {' '.join(words)}")


@pytest.mark.parametrize(
    ("flags", "declared"),
    [([], ""), ([], "'--local_rank'"), (["--module"], ""), (["--no_python"], "")],
    ids=["script", "local_rank", "module", "program"],
)
def test_ranks_are_given_arguments_that_torchruns_flags_begin_with(flags: list[str], declared: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "told.py"
    body = "open('told-' + os.environ['RANK'], 'w').write(repr(sys.argv[1:]))"
    script.write_text(f"#!{sys.executable}\nimport os, sys  # {declared}\n{body}\n")
    script.chmod(0o755)
    name = {"--module": "told", "--no_python": str(script)}.get("".join(flags), "told.py")
    words = ["--r", "16", "--log", "x", "--local", "1", "--n", "3", "--max=3", "--no", "1", "--d", "1", "-m", "--", "--nnodes", "7"]
    launch = [sys.executable, "-m", "hf_zero", "launch", "--num_gpus", "2", "--master_port", str(port), *flags, name, *words]
    env = environment({"PYTHONPATH": os.pathsep.join((str(REPO), str(tmp_path)))})
    done = subprocess.run(launch, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=MOST_SECONDS, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    for number in range(2):
        assert (tmp_path / f"told-{number}").read_text() == repr([*([f"--local_rank={number}"] if declared else []), *words])


def test_deepspeeds_command_is_ours_or_a_real_ones(
    hostfile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--num_gpus", "2", "--launcher", "pdsh", "train.py", "--deepspeed_config", "ds.json"]
    assert launcher.main(["--dry_run", *words]) == 0
    assert capsys.readouterr().out.endswith("--master_port 29500 -- train.py --deepspeed_config ds.json\n")
    monkeypatch.setattr(launcher, "alias_is_active", lambda: False)
    seen: list[list[str]] = []
    real = types.SimpleNamespace(main=seen.append)
    monkeypatch.setattr(launcher.importlib, "import_module", {"deepspeed.launcher.runner": real}.__getitem__)
    assert launcher.main(words) == 0 and seen == [words]


def test_no_deepspeed_command_when_it_is_switched_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launcher, "alias_is_active", lambda: False)
    monkeypatch.setattr(launcher, "_RUNNER", "no_such_module")
    assert launcher.main(["train.py"]) == 1
    assert "HF_ZERO turns hf_zero's alias off" in capsys.readouterr().err


def test_a_hostfile_that_stands_for_none_means_this_machine(
    hostfile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = dry(capsys, "--num_gpus", "2", "train.py")
    for none in (os.devnull, "", launch_command.DEFAULT_HOSTFILE):
        assert dry(capsys, "--hostfile", none, "--num_gpus", "2", "train.py") == alone
    monkeypatch.setattr(launch_command, "DEFAULT_HOSTFILE", hostfile)
    assert "worker-2" in dry(capsys, "train.py") and dry(capsys, "--hostfile", os.devnull, "--num_gpus", "2", "train.py") == alone
    assert main(["launch", "--dry-run", "--hostfile", "hosts.txt", "train.py"]) == 1
    error = capsys.readouterr().err
    assert "--hostfile is 'hosts.txt', and there is no such file" in error and "leave --hostfile out (or give /dev/null)" in error


def test_the_defaults_of_deepspeeds_flags_may_be_written_out(hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    defaults = ["--num_gpus=-1", "--num_nodes=-1", "--node_rank=-1", "--min_elastic_nodes=-1", "--max_elastic_nodes", "-1"]
    for words in ([], ["--hostfile", hostfile]):
        assert dry(capsys, *words, *defaults, "train.py") == dry(capsys, *words, "train.py")
    for wrong in ("-2", "0"):
        with pytest.raises(SystemExit):
            main(["launch", "--dry-run", f"--num_gpus={wrong}", "train.py"])
        assert f"{wrong} is not a number from 1 on" in capsys.readouterr().err


def test_slots_are_counted_within_the_visible_devices(
    hostfile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_command, "_devices", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-5")
    assert dry(capsys, "--exclude", "localhost:0", "train.py").startswith("CUDA_VISIBLE_DEVICES=GPU-5 python ")
    for name in ("openmpi", "mpich", "slurm"):
        assert "CUDA_VISIBLE_DEVICES=4 " in dry(capsys, "--include", "localhost:0", "--launcher", name, "train.py")
    assert dry(capsys, "train.py").startswith("python ")
    over_ssh = dry(capsys, "--force_multi", "train.py").splitlines()
    assert over_ssh[1].startswith("python ") and "CUDA_VISIBLE_DEVICES" in over_ssh[-1]
    for words, message in (
        (["--include", "localhost:4"], "localhost has no slot '4'; it has 0, 1, counted within CUDA_VISIBLE_DEVICES=4,GPU-5"),
        (["--num_gpus", "3", "--include", "localhost:2"], "localhost has no slot 2: slots are positions in CUDA_VISIBLE_DEVICES=4,GPU-5"),
    ):
        assert main(["launch", "--dry-run", *words, "train.py"]) == 1 and message in capsys.readouterr().err
    monkeypatch.setattr(os, "execve", lambda *_: None)
    assert main(["launch", "--exclude", "localhost:0", "train.py"]) == 0
    assert "slots are counted within CUDA_VISIBLE_DEVICES=4,GPU-5; the ranks get GPU-5" in capsys.readouterr().err
    for hides_all in ("", "-1", "NoDevFiles"):  # ranks on the CPU
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hides_all)
        assert dry(capsys, "--num_gpus", "2", "--include", "localhost:1", "train.py").startswith("python ")


def test_no_hostfile_for_several_nodes(hostfile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--dry-run", "--num_nodes", "2", "train.py"]) == 1
    assert "give one with --hostfile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=1\nb slots=x\n", ":2: 'b slots=x' is not a host"),
        ("a slots=1\n\n# c\na slots=2", ":4: a is listed twice, first in line 1"),
        ("a slots=0", ":1: a has 0 slots; expected 1 to 4096"),
        ("a slots=99999999999", ":1: a has 99999999999 slots; expected 1 to 4096"),
        pytest.param(f"a slots={'9' * 5000}", "99... slots; expected 1 to 4096", id="digits"),
        ("a slots=\u0663", "is not a host"),
        ("-x slots=1", ":1: '-x slots=1' is not a host"),
        ("a\x0bslots=1\x0bb slots=2", "is not a host"),
        ("a", ":1: 'a' is not a host"),
        ("# nothing\n", "contains no host"),
    ],
)
def test_errors_name_the_line_of_the_hostfile(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_hostfile(str(path))
    assert str(path) in str(error.value) and message in str(error.value)


def test_hostfiles_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"worker-\xff slots=1")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_hostfile(str(path))
    for wrong, message in ((str(tmp_path), "cannot be read"), ("a\0b", "cannot be read"), ("/dev/zero", "is larger than")):
        with pytest.raises(ConfigError, match=message):
            read_hostfile(wrong)


def test_ranks_without_a_hostfile_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["launch", "--dry-run", "--num_gpus", "99999999999", "train.py"])
    assert "above the limit of 4096 ranks on one host" in capsys.readouterr().err


def test_missing_hostfile_and_missing_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_hostfile(str(tmp_path / "none"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["launch", "--launcher", "slurm", "--num_gpus", "2", "train.py"]) == 1
    assert "needs srun, which is not on PATH" in capsys.readouterr().err
