"""Swap files: what is written comes back, from buffers and from mapped tensors; folders go; a full or broken disk is named."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.errors import OffloadError
from hf_zero.offload.buffers import ALIGNMENT, HostMemory
from hf_zero.offload.files import IoSettings, SwapFile, SwapFolder
from tests.processes import REPO, environment

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
    file = SwapFile(tmp_path_factory.mktemp("swap") / "a.bin", IoSettings(request_bytes, threads))
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


def limited(code: str, tmp_path: Path) -> str:
    """Runs ``code`` where files may have 1 MiB at most; returns its output."""
    head = f"""
import resource, signal, torch
from pathlib import Path
from hf_zero.errors import OffloadError
from hf_zero.offload.files import SwapFile, SwapFolder
from hf_zero.offload.buffers import HostMemory
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
folder = SwapFolder({str(tmp_path)!r}, 0)
file = SwapFile(folder.path / "states.bin")
"""
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, timeout=60, env=environment(), cwd=REPO, check=False
    )
    return done.stdout + done.stderr


def test_a_disk_without_room_is_named(tmp_path: Path) -> None:
    text = limited("file.reserve(8 << 20)", tmp_path)
    assert "OffloadError: cannot reserve 8.0 MiB at byte 0 of the swap file" in text and "states.bin" in text
    assert str(tmp_path) in text and "are free there). Make room, or set nvme_path to another disk" in text
    assert not list(tmp_path.iterdir()), "the folder stayed after the exception"


def test_a_failing_write_is_named_and_the_buffer_is_free_again(tmp_path: Path) -> None:
    code = """
buffer = HostMemory(torch.device("cpu")).empty(4 << 20, torch.uint8)
transfer = file.write(0, buffer)
try:
    transfer.wait()
except OffloadError as error:
    print("caught", error, transfer.futures)
"""
    text = limited(code, tmp_path)
    assert "caught cannot write" in text and "states.bin" in text and text.rstrip().endswith("[]")


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


# -- folders ----------------------------------------------------------------------------------------------------------

_HOLD = """
import sys, time
from hf_zero.offload.files import SwapFile, SwapFolder
folder = SwapFolder(sys.argv[1], 0)
SwapFile(folder.path / "a.bin").reserve(4096)
print("ready", flush=True)
time.sleep(float(sys.argv[2]))
raise RuntimeError("on purpose")
"""


def test_folders_go_at_exit_and_those_of_killed_processes_with_the_next(tmp_path: Path) -> None:
    def start(seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _HOLD, str(tmp_path), str(seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=REPO)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    killed, running = start(60), start(60)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait(30)
        assert len(list(tmp_path.iterdir())) == 2, "nobody can remove the folder of a killed process at once"
        raised = start(0)
        assert "on purpose" in raised.communicate(timeout=30)[1]
        assert len(list(tmp_path.iterdir())) == 1, "the folder of the process that still runs must stay, the others must go"
    finally:
        running.kill()
        running.wait(30)
    for process in (killed, running):
        process.communicate()


def test_a_folder_goes_with_its_owner(tmp_path: Path) -> None:
    folder = SwapFolder(tmp_path / "new", 3)
    assert folder.path.parent == tmp_path / "new" and "rank3" in folder.path.name
    SwapFile(folder.path / "a.bin").reserve(1)
    del folder
    for _ in range(50):
        if not list((tmp_path / "new").iterdir()):
            break
        time.sleep(0.01)
    assert not list((tmp_path / "new").iterdir())
