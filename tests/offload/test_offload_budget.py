"""Free host memory, from the machine and from cgroups of both versions, and the refusal that gives the numbers."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.errors import HostMemoryError
from hf_zero.memory import budget
from hf_zero.memory.budget import FreeMemory, free_memory, require_host_memory
from hf_zero.memory.buffers import ALIGNMENT, HostMemory

pytestmark = pytest.mark.quick

GIB = 2**30


def machine(folder: Path, available: int, cgroup: str) -> Path:
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal:       {64 * GIB // 1024} kB\nMemAvailable:   {available // 1024} kB\nHugePages_Total:       0\n"
    )
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc


def group(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def test_without_cgroups_the_machine_counts(tmp_path: Path) -> None:
    free = free_memory(machine(tmp_path, 40 * GIB, ""), tmp_path / "none")
    assert free == FreeMemory(40 * GIB, "the machine has 40.00 GiB available of 64.00 GiB")


def test_version_2_counts_every_ancestor_and_gives_the_page_cache_back(tmp_path: Path) -> None:
    proc = machine(tmp_path, 40 * GIB, "0::/job/step\n")
    mount = tmp_path / "cgroup"
    group(mount / "job", {"memory.max": 16 * GIB, "memory.current": 10 * GIB, "memory.stat": f"anon 5\ninactive_file {3 * GIB}"})
    group(mount / "job" / "step", {"memory.max": "max", "memory.current": GIB, "memory.stat": "anon 5"})
    free = free_memory(proc, mount)
    assert free is not None and free.nbytes == 9 * GIB
    assert free.limit == "cgroup /job allows 16.00 GiB, of which 10.00 GiB are used (3.00 GiB of that page cache)"


def test_version_1_and_a_path_that_the_container_does_not_see(tmp_path: Path) -> None:
    proc = machine(tmp_path, 40 * GIB, "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n")
    mount = tmp_path / "cgroup"
    group(mount / "memory", {"memory.limit_in_bytes": 8 * GIB, "memory.usage_in_bytes": 6 * GIB, "memory.stat": "total_inactive_file 0"})
    free = free_memory(proc, mount)
    assert free is not None and free.nbytes == 2 * GIB and free.limit.startswith("cgroup / allows 8.00 GiB")


def test_no_limit_in_version_1_is_a_huge_number(tmp_path: Path) -> None:
    proc = machine(tmp_path, 40 * GIB, "4:memory:/\n")
    files = {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": 6 * GIB, "memory.stat": ""}
    group(tmp_path / "cgroup" / "memory", files)
    free = free_memory(proc, tmp_path / "cgroup")
    assert free is not None and free.nbytes == 40 * GIB


def test_elsewhere_nothing_is_known(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "none", tmp_path / "none") is None


def test_here_something_is_known() -> None:
    free = free_memory()
    assert free is None or free.nbytes > 0


def ranks(*machines: str) -> Any:
    """A gather of the same value from ranks on these machines."""
    return lambda value: [(name, *value[1:]) for name in machines]


def test_the_ranks_of_a_machine_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "free_memory", lambda: FreeMemory(10 * GIB, "the machine has 10.00 GiB available of 12.00 GiB"))
    need = {"masters and optimizer states": 3 * GIB, "gradients": GIB}
    require_host_memory(need, ranks("a", "a"), "Buy more")
    require_host_memory(need, ranks("a", "b", "a", "b"), "Buy more")
    with pytest.raises(HostMemoryError) as error:
        require_host_memory(need, ranks("b", "a", "a", "a"), "Buy more.")
    text = str(error.value)
    assert "needs 12.00 GiB of host memory on a for 3 rank(s)" in text
    assert "(masters and optimizer states 3.00 GiB, gradients 1.00 GiB on the first of them)" in text
    assert "but 10.00 GiB are free: the machine has 10.00 GiB available of 12.00 GiB. Buy more." in text


# -- buffers ----------------------------------------------------------------------------------------------------------


def test_buffers_begin_at_pages_and_are_zero() -> None:
    memory, kept = HostMemory(torch.device("cpu")), []
    for numel, dtype in ((0, torch.float32), (5, torch.bfloat16), (3 << 20, torch.uint8), (ALIGNMENT, torch.float64)):
        buffer = memory.empty(numel, dtype, pinned=True)
        kept.append(buffer)
        assert buffer.shape == (numel,) and buffer.dtype == dtype and not buffer.any()
        assert numel == 0 or buffer.data_ptr() % ALIGNMENT == 0
    assert memory.locked_bytes == 0 and memory.nbytes == (3 << 20) + 10 * ALIGNMENT
    view = kept[2][100:200]
    del kept, buffer
    assert memory.nbytes == 3 << 20 and not view.any(), "a view keeps its buffer, and nothing else is kept"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the kernel does not show mappings")
def test_only_private_memory_is_on_huge_pages_and_only_locked_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(1 << 30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    memory = HostMemory(torch.device("cuda", 0))
    for pinned, kind in ((False, "rw-p"), (True, "rw-s")):
        buffer = memory.empty(4 << 20, torch.uint8, pinned)
        address = buffer.data_ptr()
        rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        assert [row[1] for row in rows if int(row[0].split("-")[0], 16) <= address < int(row[0].split("-")[1], 16)] == [kind]


class FakeRuntime:
    """A CUDA runtime that locks ``room`` bytes."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        if sum(self.held.values()) + nbytes > self.room:
            return 2
        self.held[pointer] = nbytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.held[pointer]
        return 0


def test_locking_falls_back_to_ordinary_memory_and_unlocks_what_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = FakeRuntime(3 * ALIGNMENT)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(len(runtime.held)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    warnings: list[str] = []
    monkeypatch.setattr("hf_zero.memory.buffers.warn_once", warnings.append)
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: None)
    memory = HostMemory(torch.device("cuda", 0), pin=True)
    kept = [memory.empty(2 * ALIGNMENT, torch.uint8, pinned=True) for _ in range(2)]
    assert memory.locked_bytes == 2 * ALIGNMENT == sum(runtime.held.values())
    assert len(warnings) == 1 and "page-locking" in warnings[0] and "CUDA error 2" in warnings[0] and "ulimit -l" in warnings[0]
    assert all(not buffer.any() for buffer in kept)
    assert kept[0].data_ptr() in runtime.held
    view = kept[0][:1]
    kept.clear()
    assert len(runtime.held) == 1 and not waits
    del view
    assert waits == [1] and not runtime.held, "unlocked before the kernel takes it back, when the device has come to rest"
    assert memory.nbytes == memory.locked_bytes == 0
    assert HostMemory(torch.device("cuda", 0), pin=False)._locks is None


def test_a_forked_child_unlocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(ALIGNMENT)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    buffer = HostMemory(torch.device("cuda", 0)).empty(8, torch.uint8, pinned=True)
    child = os.fork()
    if child == 0:
        del buffer
        os._exit(len(runtime.held))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    del buffer
    assert not runtime.held


@pytest.mark.gpu
def test_a_device_sees_locked_memory() -> None:
    memory = HostMemory(torch.device("cuda", 0), pin=True)
    assert memory.empty(100, torch.float32, pinned=True).is_pinned()
    assert not memory.empty(100, torch.float32).is_pinned()
