"""How files reach the disk: past the page cache and through it the same bytes; errors name the file that has them."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint.files import disk as disks
from hf_zero.checkpoint.files.disk import Disk
from hf_zero.checkpoint.files.rows import whole
from hf_zero.checkpoint.files.tensor_reader import Copy, RangeReader
from hf_zero.checkpoint.files.tensor_writer import write_tensor_file

pytestmark = pytest.mark.quick

# Around blocks, buffers and windows.
SIZES = [0, 1, 4000, 4096, 100_003, (4 << 20) - 90, 4 << 20, (8 << 20) + 4096, (9 << 20) + 13]


@pytest.fixture(autouse=True)
def _always_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "DIRECT_FROM", 0)


def write_all(folder: Path, direct: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8) for size in SIZES]
    records = {}
    with Disk(direct) as disk:
        for size, value in zip(SIZES, values, strict=True):
            records[f"f{size}"] = write_tensor_file(folder / f"f{size}", [whole("u", value)], disk=disk)
        disk.sync()
    reader = RangeReader(folder, records)
    for size, value in zip(SIZES, values, strict=True):
        assert (folder / f"f{size}").stat().st_size == records[f"f{size}"].nbytes
        back = torch.empty(size, dtype=torch.uint8)
        reader.read([Copy(f"f{size}", "u", 0, back)])
        assert torch.equal(back, value), size
    return values


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("alone", [True, False], ids=["in the background", "in the foreground"])
def test_the_bytes_do_not_depend_on_the_way(tmp_path: Path, direct: bool, alone: bool) -> None:
    if alone:
        errors: list[Exception] = []

        def work() -> None:
            try:
                write_all(tmp_path, direct)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert errors == []
    else:
        write_all(tmp_path, direct)


def test_a_file_system_that_takes_the_flag_and_refuses_the_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    write, refused = os.pwrite, []

    def pwrite(descriptor: int, data: Any, position: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(position)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    write_all(tmp_path, True)
    probe = os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT)
    assert refused or not disks._make_direct(probe)
    os.close(probe)


@pytest.mark.parametrize("direct", [True, False])
def test_an_error_names_its_file_and_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    write = os.pwrite

    def pwrite(descriptor: int, data: Any, position: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/second") and position >= 4 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, position)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    monkeypatch.setattr(os, "pwrite", pwrite)
    before = len(os.listdir("/proc/self/fd"))
    value = torch.ones(3 << 20)
    with pytest.raises(OSError, match="No space left") as caught, Disk(direct) as disk:
        for name in ("first", "second", "third"):
            write_tensor_file(tmp_path / name, [whole("u", value)], disk=disk)
        disk.sync()
    assert caught.value.filename == str(tmp_path / "second")
    assert not (tmp_path / "second").exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_that_nobody_needs_are_written_over(tmp_path: Path) -> None:
    """Their place gets the new file, whether it is longer or shorter; a file with a second name elsewhere, or a link, is left alone."""
    former, folder = tmp_path / "former", tmp_path / "new"
    former.mkdir()
    folder.mkdir()
    for name, nbytes in (("longer", 5000), ("shorter", 50), ("shared", 50)):
        (former / name).write_bytes(b"x" * nbytes)
    os.link(former / "shared", tmp_path / "second name")
    (former / "link").symlink_to(tmp_path / "second name")
    places = {name: (former / name).stat().st_ino for name in ("longer", "shorter")}
    values = {name: torch.arange(300, dtype=torch.float32) + len(name) for name in ("longer", "shorter", "shared", "link", "other")}
    with Disk(False, former) as disk:
        records = {name: write_tensor_file(folder / name, [whole("u", value)], disk=disk) for name, value in values.items()}
        with pytest.raises(FileExistsError):
            write_tensor_file(folder / "longer", [], disk=disk)
        disk.sync()
    for name, value in values.items():
        back = torch.empty(300)
        RangeReader(folder, records).read([Copy(name, "u", 0, back)])
        assert torch.equal(back, value) and (folder / name).stat().st_size == records[name].nbytes, name
    assert {name: (folder / name).stat().st_ino for name in places} == places
    assert (tmp_path / "second name").read_bytes() == b"x" * 50
    assert sorted(path.name for path in former.iterdir()) == ["link", "shared"]
