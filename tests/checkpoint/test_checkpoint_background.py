"""Saving in the background: what is written is what was there at the call, errors reach every rank, nothing is lost at the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hf_zero.checkpoint.commit.background import Written
from tests.support import ranks
from tests.support.background_saves import CONFIGS, Slowly, check_background_save
from tests.support.checkpoints import IN_BACKGROUND, differences, full_state, start, steps
from tests.support.processes import environment
from tests.support.rows import slow_but


@pytest.mark.fast_rows("writer")
@pytest.mark.parametrize("name", slow_but(CONFIGS, "writer", "room for some"))
def test_training_goes_on_while_the_state_of_the_call_is_written(tmp_path: Path, name: str) -> None:
    stage, extra = CONFIGS[name]
    ranks.run_ranks(check_background_save, 2, str(tmp_path), stage, extra)


def _full_disk(folder: str, failing: int) -> str:
    engine = start(3, "bf16", **IN_BACKGROUND)
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    saved = full_state(engine)
    steps(engine, 0, 1, "bf16")
    with Slowly(fails=(failing,)):
        engine.save_checkpoint(folder)
        steps(engine, 1, 1, "bf16")  # nobody hears of it in the middle of a step
        with pytest.raises(Exception) as caught:
            engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()  # it was said once
    assert sorted(path.name for path in Path(folder).iterdir() if path.name != "zero_to_fp32.py") == ["global_step0", "latest"]
    engine.load_checkpoint(folder)
    assert differences(full_state(engine), saved) == []
    steps(engine, 0, 1, "bf16")
    engine.save_checkpoint(folder)
    engine.wait_for_checkpoint()
    assert (Path(folder) / "latest").read_text() == "global_step1"
    engine.destroy()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.fast_rows("0")
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_reaches_every_rank_at_the_next_save(tmp_path: Path, failing: int) -> None:
    answers = ranks.run_ranks(_full_disk, 2, str(tmp_path), failing)
    assert answers[0] == answers[1]
    for part in ("CheckpointError: saving checkpoint 'global_step1'", "No space left on device", "exp_avg", f"(rank {failing})"):
        assert part in answers[0], answers[0]


def _refused(folder: str) -> None:
    from hf_zero.errors import CheckpointError

    engine = start(3, **IN_BACKGROUND)
    with pytest.raises(CheckpointError, match=r"client_state\['x'\]"):
        engine.save_checkpoint(folder, client_state={"x": object()})  # at once, not later
    assert not Path(folder).exists()
    engine.destroy()


def test_what_cannot_be_saved_is_refused_at_the_call(tmp_path: Path) -> None:
    ranks.run_ranks(_refused, 2, str(tmp_path / "new"))


def _groups_go_first(folder: str) -> None:
    import torch.distributed as dist

    engine = start(3, "bf16", **IN_BACKGROUND)
    steps(engine, 0, 1, "bf16")
    with Slowly(0.1):
        engine.save_checkpoint(folder)
        rank = ranks.rank()
        ranks_rank, ranks.rank = ranks.rank, lambda: rank
        try:
            dist.destroy_process_group()  # what scripts do at their end
            engine.checkpoints.background.close()
        finally:
            ranks.rank = ranks_rank


def _loads(folder: str) -> int:
    engine = start(3, "bf16", seed=5)
    engine.load_checkpoint(folder)
    step = int(engine.global_steps)
    engine.destroy()
    return step


def test_process_groups_may_go_before_the_checkpoint_is_there(tmp_path: Path) -> None:
    ranks.run_ranks(_groups_go_first, 2, str(tmp_path))
    assert ranks.run_ranks(_loads, 2, str(tmp_path)) == [1, 1]


def test_a_rank_that_died_is_noticed_without_waiting(tmp_path: Path) -> None:
    from dataclasses import replace

    from hf_zero.checkpoint.commit.background import Background, Task
    from hf_zero.checkpoint.commit.targets import FolderSave
    from hf_zero.errors import CheckpointError
    from hf_zero.system.process import Process

    gone = subprocess.Popen([sys.executable, "-c", "pass"], env=environment())
    gone.wait()
    target = FolderSave(tmp_path, "t", "00000000")
    target.begin()
    task = Task("saving", target, dict, lambda parts, written: "")
    processes = [Process.own(), replace(Process.own(), pid=gone.pid)]
    with pytest.raises(CheckpointError, match="the process of rank 1 died"):  # without it: that rank 1 has written nothing for 60 seconds
        Background(0, 60.0)._others(task, processes)
    with pytest.raises(CheckpointError, match=r"ranks \[1\] have written nothing for 0 seconds"):
        Background(0, 0.2)._others(task, [Process.own(), Process("another machine", 1)])


def test_a_note_that_is_still_being_written_is_no_note_yet() -> None:
    whole = Written({}, {"step": 1}).to_json()
    assert [Written.from_json(whole[:end], "note") for end in (0, 1, len(whole) // 2, len(whole) - 1)] == [None] * 4
    assert Written.from_json(whole, "note") == Written({}, {"step": 1})
