"""Swap files: what is written comes back, from buffers and from mapped tensors; folders go; a full or broken disk is named."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.config.schema.storage import Aio
from hf_zero.errors import OffloadError
from hf_zero.memory.buffers import ALIGNMENT, HostMemory
from hf_zero.offload import files
from hf_zero.offload.files import SwapFile, SwapFolder
from tests.support.processes import Ended, run_forked, until

MEMORY = HostMemory(torch.device("cpu"))


def filled(nbytes: int, seed: int) -> torch.Tensor:
    buffer = MEMORY.empty(nbytes, torch.uint8)
    return buffer.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


@settings(max_examples=20, deadline=None)
@given(
    pages=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    request_bytes=st.sampled_from([1, ALIGNMENT, 5 * ALIGNMENT + 7, 1 << 20]),
    threads=st.integers(1, 4),
)
def test_regions_keep_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, pages: list[int], request_bytes: int, threads: int
) -> None:
    file = SwapFile(tmp_path_factory.mktemp("swap") / "a.bin", Aio(block_size=request_bytes, queue_depth=threads))
    regions = [(file.reserve(count * ALIGNMENT), filled(count * ALIGNMENT, seed)) for seed, count in enumerate(pages)]
    for transfer in [file.write(offset, buffer) for offset, buffer in regions]:
        transfer.wait()
    for offset, buffer in regions:
        back = MEMORY.empty(buffer.numel(), torch.uint8)
        file.read(offset, back).wait()
        assert torch.equal(back, buffer)
        assert torch.equal(file.map(offset, buffer.numel(), torch.uint8), buffer)
    file.close()


def test_mapped_tensors_and_unbuffered_access_see_each_other(tmp_path: Path) -> None:
    file = SwapFile(tmp_path / "a.bin")
    numel = 3 * ALIGNMENT
    offset = file.reserve(4 * numel)
    mapped = file.map(offset, numel, torch.float32)
    buffer = MEMORY.empty(4 * numel, torch.uint8)
    for value in (1.0, 2.0, 3.0):
        assert file.read(offset, buffer).wait() is None
        assert torch.equal(mapped, buffer.view(torch.float32))
        mapped += value
        file.read(offset, buffer).wait()
        assert torch.equal(mapped, buffer.view(torch.float32))
        buffer.view(torch.float32).mul_(2.0)
        file.write(offset, buffer).wait()
        assert torch.equal(mapped, buffer.view(torch.float32))
    file.close()


def test_a_new_region_is_zero_and_aligned(tmp_path: Path) -> None:
    file = SwapFile(tmp_path / "a.bin")
    offsets = [file.reserve(nbytes) for nbytes in (1, 5000, ALIGNMENT)]
    assert all(offset % ALIGNMENT == 0 for offset in offsets) and len(set(offsets)) == 3
    assert not file.map(offsets[1], 5000, torch.uint8).any()
    file.make_room(50 * ALIGNMENT)
    assert os.stat(file.path).st_size == 50 * ALIGNMENT
    file.close()


# -- what goes wrong --------------------------------------------------------------------------------------------------


# Where files may have 1 MiB at most.
LIMITED = """
import resource, signal, sys, torch
from hf_zero.errors import OffloadError
from hf_zero.memory.buffers import HostMemory
from hf_zero.offload.files import SwapFile, SwapFolder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
file = SwapFile((folder := SwapFolder(sys.argv[1] + "/swap", 0)).path / "optimizer.bin")
"""
WRITES = """
buffer = HostMemory(torch.device("cpu")).empty(4 << 20, torch.uint8)
transfer = file.write(0, buffer)
try:
    transfer.wait()
except OffloadError as error:
    print("caught", error, transfer.futures)
"""
# Three processes that hold a folder: one is killed, one raises after that, one runs on.
HOLDING = """
import os, signal, sys, time
from hf_zero.offload.files import SwapFile, SwapFolder

def start(seconds):
    ready, told = os.pipe()
    child = os.fork()
    if child:
        assert os.read(ready, 1) == b"x"
        return child
    folder = SwapFolder(place, 0)
    SwapFile(folder.path / "parameters.bin").reserve(4096)
    os.write(told, b"x")
    time.sleep(seconds)
    raise RuntimeError("on purpose")

place = sys.argv[1] + "/swap"
killed, running = start(60), start(60)
os.kill(killed, signal.SIGKILL)
os.waitpid(killed, 0)
print("killed", len(os.listdir(place)))
status = os.waitstatus_to_exitcode(os.waitpid(start(0), 0)[1])
print("raised", status, len(os.listdir(place)))
os.kill(running, signal.SIGKILL)
os.waitpid(running, 0)
"""
FORKING = """
import os, sys
from hf_zero.offload.files import SwapFile, SwapFolder
folder = SwapFolder(sys.argv[1] + "/swap", 0)
SwapFile(folder.path / "parameters.bin").reserve(4096)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(sorted(os.listdir(folder.path)))
"""
# Children of a process that has imported everything start within a few milliseconds, find what the last ones left when they were killed,
# and each looks after its folder when all of them have one. Waits let all orders happen.
TOGETHER = """
import os, random, sys, time
from hf_zero.offload import files
from hf_zero.offload.files import SwapFile, SwapFolder

lock, place = files._try_lock, sys.argv[1] + "/swap"
files._try_lock = lambda descriptor: (time.sleep(random.choice([0, 0.001, 0.003])), lock(descriptor))[1]

def rank(number, go, ready, checked):
    random.seed(os.getpid())
    os.read(go, 1)
    time.sleep(random.choice([0, 0.002, 0.004, 0.006]))
    folder = SwapFolder(place, number)
    SwapFile(folder.path / "parameters.bin").reserve(4096)
    os.write(ready, b"x")
    os.read(checked, 1)
    os._exit(0 if sorted(os.listdir(folder.path)) == ["in_use", "parameters.bin"] else 3)

lost = 0
for start in range(STARTS):
    pipes = [os.pipe() for _ in range(3)]
    children = []
    for number in range(4):
        child = os.fork()
        if child == 0:
            try:
                rank(number, pipes[0][0], pipes[1][1], pipes[2][0])
            except BaseException as error:
                print(error, flush=True)
                os.write(pipes[1][1], b"x")
                os._exit(4)
        children.append(child)
    os.close(pipes[1][1])
    os.write(pipes[0][1], b"gggg")
    for _ in children:
        os.read(pipes[1][0], 1)
    os.write(pipes[2][1], b"cccc")
    lost += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    for end in (pipes[0][0], pipes[0][1], pipes[1][0], pipes[2][0], pipes[2][1]):
        os.close(end)
SwapFolder(place, 0).remove()
print("lost", lost, "left", len(os.listdir(place)))
"""
IMPORTS = "import hf_zero.memory.buffers, hf_zero.offload.files"


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    codes = {"no room": LIMITED + "file.reserve(8 << 20)", "writes": LIMITED + WRITES, "holding": HOLDING, "forking": FORKING}
    codes["together"] = TOGETHER.replace("STARTS", "8")
    return run_forked(codes, tmp_path_factory.mktemp("ended"), IMPORTS)


def left_of(process: Ended) -> list[str]:
    return os.listdir(process.folder / "swap")


def test_a_disk_without_room_is_named(ended: dict[str, Ended]) -> None:
    found = ended["no room"]
    assert "OffloadError: cannot reserve 8.0 MiB at byte 0 of the swap file" in found.err and "optimizer.bin" in found.err
    assert str(found.folder) in found.err and "are free there). Make room, or set nvme_path to another disk" in found.err
    assert left_of(found) == [], "the folder stayed after the exception"


def test_a_failing_write_is_named_and_the_buffer_is_free_again(ended: dict[str, Ended]) -> None:
    text = ended["writes"].out
    assert "caught cannot write" in text and "optimizer.bin" in text and text.rstrip().endswith("[]")


def test_a_read_behind_the_end_is_named(tmp_path: Path) -> None:
    file = SwapFile(tmp_path / "a.bin")
    with pytest.raises(OffloadError, match=r"cannot read .* at byte 4096 of the swap file .*a\.bin: .*the file ends there"):
        file.read(ALIGNMENT, MEMORY.empty(ALIGNMENT, torch.uint8)).wait()
    file.close()


def test_what_cannot_be_done_unbuffered_goes_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = SwapFile(tmp_path / "a.bin")
    offset, buffer = file.reserve(ALIGNMENT), filled(ALIGNMENT, 3)
    real, refused = os.pwrite, []

    def pwrite(descriptor: int, data: memoryview, place: int) -> int:
        if descriptor == file._unbuffered:
            refused.append(place)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    file.write(offset, buffer).wait()
    assert refused and torch.equal(file.map(offset, ALIGNMENT, torch.uint8), buffer)
    file.close()


def test_a_path_that_is_no_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match=r"no swap files can be made in nvme_path '.*file/below'"):
        SwapFolder(tmp_path / "file" / "below", 0)


def test_a_path_that_did_not_exist_is_created_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(files.logger, "warning", lambda text, *values: told.append(text % values))
    for rank in (1, 0):  # the first to come creates the folder
        SwapFolder(tmp_path / "nmve" / "swap", rank).remove()
    assert [text.split(": ")[0] for text in told] == [f"nvme_path {str(tmp_path / 'nmve' / 'swap')!r} did not exist"]


# -- folders ----------------------------------------------------------------------------------------------------------


def test_folders_go_at_exit_and_those_of_killed_processes_with_the_next(ended: dict[str, Ended]) -> None:
    found = ended["holding"]
    killed, raised = found.out.splitlines()
    assert killed == "killed 2", "nobody can remove the folder of a killed process at once"
    assert raised == "raised 1 1" and "on purpose" in found.err, "the folder of the process that still runs must stay, the others must go"


def test_a_folder_goes_with_its_owner(tmp_path: Path) -> None:
    folder = SwapFolder(tmp_path / "new", 3)
    assert folder.path.parent == tmp_path / "new" and "rank3" in folder.path.name
    SwapFile(folder.path / "parameters.bin").reserve(1)
    del folder
    until(lambda: not list((tmp_path / "new").iterdir()), "the end of the folder")


def test_ranks_that_start_together_keep_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one starts, and looks for what nobody holds, in the moment before this one has locked its own."""
    lock, others = files._try_lock, []

    def later(descriptor: int) -> files._Lock:
        if not others:
            others.append(None)
            others[0] = SwapFolder(tmp_path, 1)  # type: ignore[call-overload]
        return lock(descriptor)

    monkeypatch.setattr(files, "_try_lock", later)
    folder = SwapFolder(tmp_path, 0)
    SwapFile(folder.path / "parameters.bin").reserve(1)
    assert sorted(tmp_path.iterdir()) == sorted([folder.path, others[0].path])  # type: ignore[attr-defined]


def test_a_lock_that_is_not_had_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_try_lock", lambda descriptor: files._Lock.TAKEN)
    with pytest.raises(OffloadError, match="another process has locked it"):
        SwapFolder(tmp_path, 0)
    assert not list(tmp_path.iterdir())


def test_what_others_keep_in_nvme_path_stays(tmp_path: Path) -> None:
    names = [f"hf_zero_swap_{os.uname().nodename}_rank0_mine", "hf_zero_swap_elsewhere_rank0_x", ".hf_zero_swap.part"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "in_use").write_text("")
        (tmp_path / name / "thesis.tex").write_text("")
    SwapFolder(tmp_path, 0).remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert len(list(tmp_path.rglob("thesis.tex"))) == 3


def test_a_forked_child_leaves_its_parents_folder(ended: dict[str, Ended]) -> None:
    assert ended["forking"].out == "['in_use', 'parameters.bin']\n" and left_of(ended["forking"]) == []


def test_simultaneous_starts_lose_nothing(ended: dict[str, Ended]) -> None:
    assert ended["together"].out == "lost 0 left 0\n", ended["together"]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_many_simultaneous_starts_lose_nothing(tmp_path: Path) -> None:
    found = run_forked({"together": TOGETHER.replace("STARTS", "200")}, tmp_path, IMPORTS, timeout=900)["together"]
    assert found.out == "lost 0 left 0\n", found
