"""Where the store listens in which ranks meet."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from hf_zero.comm import bootstrap
from hf_zero.errors import CollectiveError, ConfigError
from tests.support.processes import REPO, environment

SCRIPT = """
import json, os, time, torch, torch.distributed as dist
from hf_zero.comm.bootstrap import init_distributed
port = f"{int(os.environ['MASTER_PORT']):04X}"
sums, listening = [], []
for group in range(2):  # the second group of a process finds nothing of the first
    init_distributed("gloo")
    value = torch.tensor([float(dist.get_rank() + 1 + group)])
    dist.all_reduce(value)
    sums.append(value.item())
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{table}").read().splitlines()[1:]:
            words = line.split()
            if words[1].endswith(":" + port) and words[3] == "0A":
                listening.append(words[1].partition(":")[0])
    dist.barrier()
    if dist.get_rank() == 0 and os.environ["MASTER_ADDR"] != "localhost":  # there the store is torch's own
        time.sleep(1.0)  # the others are at the next group already
    dist.destroy_process_group()
print(json.dumps([sums, sorted(set(listening))]))
"""
LOOPBACK, ANY = "0100007F", "0" * 32


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
@pytest.mark.parametrize(("address", "expected"), [("127.0.0.1", LOOPBACK), pytest.param("localhost", ANY, marks=pytest.mark.slow)])
def test_ranks_meet_and_the_store_listens_at_their_address(address: str, expected: str) -> None:
    common = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", SCRIPT]
    ranks = [
        subprocess.Popen(command, env=environment({**common, "RANK": rank, "LOCAL_RANK": rank}), stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    for rank in ranks:
        out, _ = rank.communicate(timeout=600)
        assert rank.returncode == 0
        assert json.loads(out) == [[3.0, 5.0], [expected]]


@pytest.mark.parametrize(
    "changes",
    [{"MASTER_ADDR": "node-1"}, {"MASTER_ADDR": ""}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}, {"MASTER_PORT": "x"}, {"RANK": ""}],
)
def test_what_is_left_to_torch(changes: dict[str, str]) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **changes}
    assert bootstrap.store_at_address(timedelta(seconds=1), environ) is None


def test_an_address_that_is_not_here_or_taken() -> None:
    assert bootstrap._listen(socket.AF_INET, "192.0.2.1", free_port()) is None
    port = free_port()
    held = bootstrap._listen(socket.AF_INET, "127.0.0.1", port)
    assert held is not None and bootstrap._listen(socket.AF_INET, "127.0.0.1", port) is None
    os.close(held)


def test_groups_and_attempts_under_torchrun_find_nothing_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store lives through all groups of a process and all attempts of a run."""
    second = timedelta(seconds=1)
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=second)
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port), "WORLD_SIZE": "1"}
    for name, value in {**variables, "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}.items():
        monkeypatch.setenv(name, value)
    found = [bootstrap.store_of_launcher(second) for _ in range(2)]
    monkeypatch.setattr(bootstrap, "_made", bootstrap._made - 2)  # as in a new process, of the next attempt
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    found.append(bootstrap.store_of_launcher(second))
    for number, mine in enumerate(found):
        assert mine is not None
        mine.set("address", str(number))
    assert [mine.get("address") for mine in found if mine is not None] == [b"0", b"1", b"2"]
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert bootstrap.store_of_launcher(second) is None, "attempts are not counted alike on several machines"


@pytest.mark.fast_rows("1-did not reach rank 0 at 127.0.0.1:{port} within 1.2 s: ")
@pytest.mark.parametrize(
    ("rank", "text"),
    [
        ("1", "did not reach rank 0 at 127.0.0.1:{port} within 1.2 s: "),
        ("0", "could not meet the other ranks at 127.0.0.1:{port}: "),
    ],
)
def test_a_rank_that_meets_nobody_says_so_in_one_line(rank: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DEEPSPEED_TIMEOUT": "0.02"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CollectiveError) as error:
        bootstrap.init_distributed(dist_backend="gloo")
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"rank {rank} of 2 on {socket.gethostname()} {text.format(port=port)}")
    assert line.endswith("DEEPSPEED_TIMEOUT sets the number of minutes to wait")


def test_the_time_out_is_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    assert bootstrap.default_timeout() == timedelta(minutes=10)
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "45")
    assert bootstrap.default_timeout() == timedelta(minutes=45)
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "long")
    with pytest.raises(ConfigError, match="DEEPSPEED_TIMEOUT is 'long'"):
        bootstrap.default_timeout()
