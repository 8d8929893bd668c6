"""A disk that is really full, and one that can only be read: a small file system of its own, where the kernel lets a test mount one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_zero.checkpoint.model.export import HostCopies
from hf_zero.errors import CheckpointError
from tests.support import ranks
from tests.support.checkpoints import differences, full_state, start, steps
from tests.support.processes import REPO, environment

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
MEBIBYTE = 2**20


def _save_until_it_fails(folder: str, background: bool) -> list[str]:
    """Fills the file system between two saves; returns both errors of this rank."""
    extra = {"checkpoint": {"writer": {"decoupled": True}}} if background else {}
    engine = start(3, "bf16", **extra)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    saved = full_state(engine)
    steps(engine, 0, 1, "bf16")
    errors = []
    for hinder, help_ in ((_fill, _empty), (_lock, _unlock)):
        _on_rank_0(hinder, folder)
        with pytest.raises(Exception) as caught:
            engine.save_checkpoint(folder)
            engine.wait_for_checkpoint()
        errors.append(f"{type(caught.value).__name__}: {caught.value}")
        _on_rank_0(help_, folder)
        assert [name for name in os.listdir(folder) if name.startswith((".", "global_step1"))] == [], os.listdir(folder)
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder, "global_step0")
    assert differences(full_state(engine), saved) == []
    engine.load_checkpoint(folder)
    assert engine.global_steps == 1
    engine.destroy()
    return errors


def _on_rank_0(action: object, folder: str) -> None:
    import torch.distributed as dist

    dist.barrier()
    if ranks.rank() == 0:
        action(folder)  # type: ignore[operator]
    dist.barrier()


def _fill(folder: str) -> None:
    free = shutil.disk_usage(folder).free
    Path(folder, "filler").write_bytes(bytes(free - 12 * 1024))  # room to begin, not to end


def _empty(folder: str) -> None:
    Path(folder, "filler").unlink()


def _lock(folder: str) -> None:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)


def _unlock(folder: str) -> None:
    subprocess.run(["mount", "-o", "remount,rw", folder], check=True)


def inside(folder: str) -> None:
    """Body of the process in the namespace: everything below ``folder`` is a tmpfs of 1 MiB."""
    ranks.PRELOAD = ("tests.support.alias_first", "torch._dynamo", "tests.support.checkpoints")  # type: ignore[assignment]
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MEBIBYTE}", "tmpfs", folder], check=True)
    for background in (False, True):
        full, locked = zip(*ranks.run_ranks(_save_until_it_fails, 2, folder, background), strict=True)
        assert full[0] == full[1] and "CheckpointError" in full[0] and "No space left on device" in full[0] and folder in full[0], full
        assert locked[0] == locked[1] and "CheckpointError" in locked[0] and "Read-only file system" in locked[0], locked
        assert folder in locked[0], locked
        for path in Path(folder).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    ranks.close_pools()
    _copies_that_find_no_room(folder)


def _copies_that_find_no_room(folder: str) -> None:
    """A page of a mapped file that finds no room ends the process: status -7, no message."""
    os.environ["HF_ZERO_SPILL_DIR"] = folder
    host = HostCopies(8 * MEBIBYTE)
    small = host.take(torch.ones(1000))
    with pytest.raises(CheckpointError) as caught:
        host.take(torch.ones(2 * MEBIBYTE))
    told = str(caught.value)
    assert f"a tensor of 8.0 MiB cannot be kept in a file in {folder}" in told and "No space left on device" in told, told
    assert "HF_ZERO_SPILL_DIR" in told and os.listdir(folder) == [] and small.sum().item() == 1000.0


@pytest.mark.slow
def test_full_and_read_only_file_systems(tmp_path: Path) -> None:
    probe = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs in a namespace of its own (unshare --user --map-root-user --mount)")
    code = f"from tests.checkpoint.test_checkpoint_disk import inside; inside({str(tmp_path)!r})"
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-c", code],
        cwd=REPO,
        env=environment({"PYTHONPATH": str(REPO)}),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
