"""Two machines, as network namespaces with a name and a link each: how ranks are started there, and what is said when one is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.collectives.slow_network import LINK, Namespaces
from tests.launch.machines import named, named_network
from tests.support.processes import MOST_SECONDS, REPO, environment, until

pytestmark = pytest.mark.slow

NAMES = ("node-1", "node-2")
PORT = "29500"  # each namespace has its own
TIMEOUT = 12  # seconds that a collective may take

# Trains for ever once STEPS are done, where it is told to; a line of each rank says that it has come so far.
TRAINING = """
import os, platform, sys, torch
import torch.distributed as dist
import hf_zero
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
zero = {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
engine = hf_zero.initialize(model=model, config=config)[0]
step = 0
while step < 3 or sys.argv[1] == "on":
    torch.manual_seed(10 * step + dist.get_rank())
    loss = engine(torch.randn(4, 8)).square().mean()
    engine.backward(loss)
    engine.step()
    step += 1
    if step == 3:
        total = loss.detach().clone()
        dist.all_reduce(total)
        place = platform.node(), os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
        print("TRAINED", dist.get_rank(), dist.get_world_size(), *place, f"{total.item():.6f}", flush=True)
dist.destroy_process_group()
"""
MEETING = "import hf_zero, datetime; hf_zero.init_distributed(timeout=datetime.timedelta(seconds=4))"


@pytest.fixture(scope="module")
def network() -> Iterator[Namespaces]:
    """Two namespaces whose hosts file knows both by name."""
    with named_network(NAMES, "hfzt") as made:
        yield made


@dataclass
class Node:
    """The launcher of one machine, with all that it starts in a process group of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        """What it and its ranks have printed."""
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float) -> int:
        """Its exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs on after {seconds:.0f} s\n{self.text[-3000:]}") from None

    def kill(self) -> None:
        """Ends the whole tree at once, as a machine that loses power."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for rank in self.ranks():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> list[int]:
        """Processes of its ranks: torchrun gives each a session of its own."""
        return [int(number) for number in re.findall(r"^PID (\d+)$", self.text, re.M)]


@contextlib.contextmanager
def nodes(network: Namespaces, *commands: list[str], **variables: str) -> Iterator[list[Node]]:
    """One command on each machine, under the machine's name."""
    started: list[Node] = []
    env = environment({"GLOO_SOCKET_IFNAME": LINK, "PYTHONPATH": str(REPO), "DEEPSPEED_TIMEOUT": str(TIMEOUT / 60), **variables})
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, command in enumerate(commands):
                log = Path(folder, NAMES[number])
                with log.open("wb") as out:
                    process = subprocess.Popen(
                        network.command(number, named(NAMES[number], command)),
                        stdout=out,
                        stderr=out,
                        env=env,
                        cwd=folder,
                        start_new_session=True,
                    )
                started.append(Node(process, log))
            yield started
        finally:
            for node in started:
                node.kill()


def script(folder: Path) -> str:
    """The training script, whose ranks say which processes they are."""
    path = folder / "train.py"
    path.write_text(f"import os\nprint('PID', os.getpid(), flush=True)\n{TRAINING}")
    return str(path)


def commands_of(launcher: str, folder: Path, ending: str) -> list[list[str]]:
    """What is typed on the two machines."""
    train = [script(folder), ending]
    if launcher == "hf-zero launch":  # the same words on both
        (folder / "hosts").write_text("".join(f"{name} slots=2\n" for name in NAMES))
        return [[sys.executable, "-m", "hf_zero", "launch", "--no_ssh", "--hostfile", str(folder / "hosts"), *train]] * 2
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "2"]
    if launcher == "torchrun, c10d":
        return [[*torchrun, "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{NAMES[0]}:{PORT}", *train]] * 2
    meeting = ["--master_addr", NAMES[0], "--master_port", PORT]
    return [[*torchrun, *meeting, "--node_rank", str(number), *train] for number in range(2)]


def trained(node: Node) -> list[list[str]]:
    """The lines of the ranks of a machine."""
    return sorted(line.split()[1:] for line in node.text.splitlines() if line.startswith("TRAINED"))


@pytest.mark.parametrize("launcher", ["hf-zero launch", "torchrun", "torchrun, c10d"])
def test_launchers_across_machines(network: Namespaces, launcher: str, tmp_path: Path) -> None:
    with nodes(network, *commands_of(launcher, tmp_path, "end")) as started:
        assert [node.wait(MOST_SECONDS) for node in started] == [0, 0], [node.text[-2000:] for node in started]
        lines = [trained(node) for node in started]
    first = 0 if lines[0][0][0] == "0" else 2  # c10d numbers the machines as they come
    for number, own in enumerate(lines):
        ranks = (first + 2 * number) % 4
        assert [line[:5] for line in own] == [[str(ranks + local), "4", NAMES[number], str(local), "2"] for local in range(2)]
    assert len({line[5] for own in lines for line in own}) == 1


def errors_of(node: Node) -> list[str]:
    """The engine's lines about a collective that failed, one per rank."""
    return [line for line in node.text.splitlines() if "CollectiveError: rank " in line]


def wait_until_trained(started: list[Node]) -> None:
    def all_or_ended() -> bool:
        return all(len(trained(node)) == 2 for node in started) or any(node.process.poll() is not None for node in started)

    until(all_or_ended, "a step on both machines", pause=0.2)
    assert all(node.process.poll() is None for node in started), [node.text for node in started]


@pytest.mark.parametrize("launcher", ["hf-zero launch", "torchrun, c10d"])
def test_a_machine_that_dies_is_named(network: Namespaces, launcher: str, tmp_path: Path) -> None:
    with nodes(network, *commands_of(launcher, tmp_path, "on")) as started:
        wait_until_trained(started)
        survivor, lost = sorted(started, key=lambda node: trained(node)[0][0])  # that of rank 0 survives: it has the store
        name, here = trained(lost)[0][2], trained(survivor)[0][2]
        begin = time.monotonic()
        lost.kill()
        assert survivor.wait(MOST_SECONDS) != 0
        print(f"{launcher}: ended after {time.monotonic() - begin:.1f} s")
        errors = errors_of(survivor)
        assert errors and all(f"ranks 2 and 3 on {name} did not answer" in line and f" on {here} failed in " in line for line in errors)
        assert not [rank for rank in survivor.ranks() if Path("/proc", str(rank)).exists()]


@pytest.mark.parametrize("cut", [1, 0], ids=["worker", "rank 0's"])
def test_a_link_that_goes_down_is_named(network: Namespaces, cut: int, tmp_path: Path) -> None:
    with nodes(network, *commands_of("hf-zero launch", tmp_path, "on")) as started:
        wait_until_trained(started)
        begin = time.monotonic()
        network.cut(cut)
        try:
            assert [node.wait(MOST_SECONDS) != 0 for node in started] == [True, True]
            print(f"link {cut}: ended after {time.monotonic() - begin:.1f} s")
        finally:
            network.mend(cut)
        first, second = (errors_of(node) for node in started)
        assert first and all("ranks 2 and 3 on node-2 did not answer" in line for line in first), started[0].text[-3000:]
        assert second and all(f"at {NAMES[0]}:{PORT} does not answer" in line for line in second), started[1].text[-3000:]


@pytest.mark.parametrize("cut", [False, True], ids=["nobody listens", "link down"])
def test_a_master_that_is_not_there_is_one_line(network: Namespaces, cut: bool) -> None:
    alone = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": NAMES[0], "MASTER_PORT": PORT}
    idle = [sys.executable, "-c", "import time; time.sleep(1000)"]
    if cut:
        network.cut(0)
    try:
        with nodes(network, idle, [sys.executable, "-c", MEETING], **alone) as started:
            assert started[1].wait(MOST_SECONDS) != 0
            (line,) = [line for line in started[1].text.splitlines() if "CollectiveError: " in line]
            assert f"rank 2 of 4 on {NAMES[1]} did not reach rank 0 at {NAMES[0]}:{PORT} within 4 s" in line
    finally:
        network.mend(0)
