"""The folders of checkpoints: which is the newest, what is removed and replaced, and what others made stays."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.checkpoint.commit import folders, staging
from hf_zero.checkpoint.engine_checkpoints import _folder
from hf_zero.errors import CheckpointError
from hf_zero.system import own_files
from hf_zero.system.folder import Folder
from hf_zero.system.process import Process
from tests.support.processes import REPO, environment


def _finalized(save_dir: Path, tag: str, text: str = "{}") -> Path:
    part = staging.begin(save_dir, tag)
    staging.finalize(part, text)
    return staging.publish(part, save_dir, tag)


@pytest.mark.parametrize("given", [None, 3, ""])
def test_an_argument_that_is_no_path_is_refused(given: Any) -> None:
    with pytest.raises(CheckpointError, match=f"save_dir is {given!r}, allowed is a path"):
        _folder(given, "save_dir")


@pytest.mark.parametrize("tag", ["", ".", "..", "a/b", "/abs", ".hidden", "latest", "zero_to_fp32.py", "a\0b"])
def test_tags_that_name_no_folder_are_refused(tag: str) -> None:
    with pytest.raises(CheckpointError, match="cannot name a folder"):
        folders.check_tag(tag)


def test_incomplete_folder_is_named_with_the_newest_complete_one(tmp_path: Path) -> None:
    for tag in ("global_step1", "global_step2", "global_step10"):
        _finalized(tmp_path, tag)
    (tmp_path / "global_step10" / "complete").unlink()
    staging.begin(tmp_path, "global_step3")  # killed while it was written
    for tag, problem in (
        ("global_step10", "is incomplete"),
        ("global_step3", "there is no checkpoint folder"),
        ("global_step7", "no checkpoint"),
    ):
        with pytest.raises(CheckpointError, match=f"{problem}.*newest complete one is 'global_step2'"):
            folders.find(tmp_path, tag)
    with pytest.raises(CheckpointError, match="no other is complete"):
        folders.find(tmp_path / "absent", "t")


def test_newest_is_by_number_else_by_time(tmp_path: Path) -> None:
    for number, tag in enumerate(("global_step10", "global_step9")):
        os.utime(_finalized(tmp_path, tag) / "complete", ns=(number, number))
    assert folders.newest_complete(tmp_path) == tmp_path / "global_step10"
    os.utime(_finalized(tmp_path, "best") / "complete", ns=(5, 5))
    assert folders.newest_complete(tmp_path) == tmp_path / "best"


def test_a_clock_that_was_set_back_makes_no_checkpoint_newer(tmp_path: Path) -> None:
    """Where tags have no numbers, the steps in the index tell, and time where these are the same or absent."""
    for number, (tag, text) in enumerate(
        [("late", '{"counters": {"global_steps": 30}}'), ("early", '{"counters": {"global_steps": 20}}'), ("none", '{"counters": 5}')]
    ):
        os.utime(_finalized(tmp_path, tag, text) / "complete", ns=(number, number))
    assert folders.newest_complete(tmp_path) == tmp_path / "late" and str(tmp_path / "late") in folders.describe_newest(tmp_path)
    os.utime(_finalized(tmp_path, "other", '{"counters": {"global_steps": 30}}') / "complete", ns=(9, 9))
    assert folders.newest_complete(tmp_path) == tmp_path / "other"


@pytest.mark.parametrize("name", ["latest", "t/index.json", "t/complete"])
def test_a_file_that_the_disk_does_not_give_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _finalized(tmp_path, "t", "{}")
    own_files.write_text(tmp_path / "latest", "t")
    read, broken = os.read, (tmp_path / name).stat().st_ino

    def fail(descriptor: int, count: int) -> bytes:
        if os.fstat(descriptor).st_ino == broken:
            raise OSError(5, "Input/output error")
        return read(descriptor, count)

    monkeypatch.setattr(os, "read", fail)
    with pytest.raises(CheckpointError, match=f"Input/output error: '{tmp_path / name}'"):
        folders.read_index(folders.find_latest(tmp_path) or tmp_path)


def test_latest_that_names_nothing_complete_gives_way_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert folders.find_latest(tmp_path) is None and folders.find_latest(tmp_path / "absent") is None
    staging.begin(tmp_path, "global_step1")  # killed: nothing was ever saved
    assert folders.find_latest(tmp_path) is None
    own_files.write_text(tmp_path / "latest", "global_step4")
    with pytest.raises(CheckpointError, match="no checkpoint folder .*global_step4; no other is complete there"):
        folders.find_latest(tmp_path)
    (tmp_path / "latest").unlink()
    _finalized(tmp_path, "global_step1")  # killed before ``latest``
    with caplog.at_level("WARNING", "hf_zero"), _propagating():
        assert folders.find_latest(tmp_path) == tmp_path / "global_step1"
        own_files.write_text(tmp_path / "latest", "global_step4")
        assert folders.find_latest(tmp_path) == tmp_path / "global_step1"
    assert "no file 'latest'" in caplog.text and "'latest' names 'global_step4': there is no checkpoint folder" in caplog.text
    own_files.write_text(tmp_path / "latest", "global_step1")
    assert folders.find_latest(tmp_path) == tmp_path / "global_step1"


@contextmanager
def _propagating() -> Iterator[None]:
    """The package's logger keeps its records to itself; pytest listens at the root."""
    from hf_zero.observe import logger

    before, logger.propagate = logger.propagate, True
    try:
        yield
    finally:
        logger.propagate = before


def test_folders_of_killed_saves_are_removed_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    for tag, writer in {
        "mine": Process.own(),
        "dead": replace(Process.own(), pid=dead.pid),
        "far": Process("x", 1),
    }.items():
        (staging.begin(tmp_path, tag) / "writer.json").write_text(json.dumps(writer.as_json()))
    old = staging.begin(tmp_path, "old") / "writer.json"
    old.write_text("{}")
    for path in (old, old.parent):
        os.utime(path, (0, 0))
    staging.begin(tmp_path, "next")
    assert sorted(str(folders.tag_of_staging(path.name)) for path in tmp_path.iterdir()) == ["far", "mine", "next"]


def test_a_file_that_is_renamed_while_one_looks_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a save in the background looks into the folder while others put their notes there."""
    (tmp_path / "stays").write_text("1234")
    monkeypatch.setattr(Folder, "names", lambda folder: [".rank-00001.json.part", "stays"])
    assert {name: found.st_size for name, found in own_files.present_files(tmp_path).items()} == {"stays": 4}


def test_the_newest_whole_checkpoint_of_a_trainer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from hf_zero.utils import newest_trainer_checkpoint

    assert newest_trainer_checkpoint(tmp_path / "absent") is None
    for number in (9, 10, 11, 12, 13):
        folder = tmp_path / f"checkpoint-{number}"
        _finalized(folder, f"global_step{number}")
        (folder / "latest").write_text(f"global_step{number}")
        (folder / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-13" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text('{"glo')
    os.rename(tmp_path / "checkpoint-11" / "global_step11", tmp_path / "checkpoint-11" / ".global_step11.part")
    (tmp_path / "checkpoint-11" / "latest").unlink()
    with caplog.at_level("WARNING", "hf_zero"), _propagating():
        assert newest_trainer_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert "checkpoint-13, checkpoint-12, checkpoint-11 in" in caplog.text
    folder = tmp_path / "checkpoint-14"  # two ranks, of which the second was killed before it wrote its random state
    _finalized(folder, "global_step14", json.dumps({"world": 2, "library": "0"}))
    (folder / "latest").write_text("global_step14")
    (folder / "trainer_state.json").write_text("{}")
    torch.save({}, folder / "rng_state_0.pth")
    for half in (b"", b"PK\x03\x04"):
        (folder / "rng_state_1.pth").write_bytes(half)
        assert newest_trainer_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    torch.save({}, folder / "rng_state_1.pth")
    assert newest_trainer_checkpoint(tmp_path) == str(folder)
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text("{}")  # of a run without the engine
    assert newest_trainer_checkpoint(tmp_path) == str(tmp_path / "checkpoint-20")


def test_a_former_checkpoint_is_removed_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    for tag in ("done", "lost"):
        shutil.copytree(_finalized(tmp_path, tag), tmp_path / f".{tag}.former")
    shutil.rmtree(tmp_path / "lost")
    part = staging.begin(tmp_path, "next")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lost.former", part.name, "done"]
    assert folders.find(tmp_path, "lost") == tmp_path / ".lost.former"


def test_a_folder_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "corpus.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="data exists and is not a checkpoint that hf_zero wrote"):
        staging.begin(tmp_path, "data")
    broken = _finalized(tmp_path, "t")
    (broken / "index.json").unlink()
    _finalized(tmp_path, "t")
    assert folders.is_complete(tmp_path / "t")


FOREIGN: dict[str, dict[str, str]] = {
    "a model": {"model.safetensors": "weights"},
    "a model in parts": {"model-00001-of-00002.safetensors": "weights", "index.json": "{}"},
    "an index and a marker of others": {"index.json": "{}", "complete": "yes"},
    "values of others": {"values.safetensors": "x"},
    "a checkpoint and more": {"master-00000-of-00001.safetensors": "x", "notes.txt": "x"},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_others_made_stays(tmp_path: Path, name: str) -> None:
    for folder in ("best", ".old.former", ".other.0123abcd.part"):
        (tmp_path / folder).mkdir()
        for file, content in FOREIGN[name].items():
            (tmp_path / folder / file).write_text(content)
            os.utime(tmp_path / folder / file, (0, 0))
        os.utime(tmp_path / folder, (0, 0))
    _finalized(tmp_path, "old")
    with pytest.raises(
        CheckpointError, match="best exists and is not a checkpoint that hf_zero wrote.*choose another tag, or move it away"
    ):
        staging.begin(tmp_path, "best")
    for folder in ("best", ".other.0123abcd.part"):
        assert {path.name: path.read_text() for path in (tmp_path / folder).iterdir()} == FOREIGN[name]
    left = {path.name: path.read_text() for place in ("old", ".old.former") for path in tmp_path.glob(f"{place}/*")}
    assert {**left, "index.json": "", "complete": ""}.keys() >= FOREIGN[name].keys() - {"master-00000-of-00001.safetensors"}


def test_a_link_in_the_place_of_a_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "best").symlink_to(_finalized(tmp_path, "t"))
    with pytest.raises(CheckpointError, match="best is a link; choose another tag"):
        staging.begin(tmp_path, "best")
    assert folders.is_complete(tmp_path / "best")


def test_what_is_in_a_checkpoint_that_is_replaced_moves_to_the_new_one(tmp_path: Path) -> None:
    for number in range(3):
        folder = _finalized(tmp_path, "t", json.dumps({"n": number}))
        if number == 0:
            (folder / "notes.txt").write_text("mine")
            (folder / "plots").mkdir()
            (folder / "plots" / "loss.png").write_text("mine too")
    assert folders.read_index(folder) == '{"n": 2}'
    assert (folder / "notes.txt").read_text() == "mine" and (folder / "plots" / "loss.png").read_text() == "mine too"
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


_SAVING = """
import sys
from pathlib import Path
from hf_zero.checkpoint.commit import staging
part = staging.begin(Path(sys.argv[1]), "t")
(part / "master-00000-of-00001.safetensors").write_text("theirs")
print(part, flush=True)
for step in (lambda: staging.finalize(part, "{}"), lambda: staging.publish(part, Path(sys.argv[1]), "t")):
    sys.stdin.readline()
    step()
"""


@pytest.mark.slow  # fast: `test_a_folder_that_another_process_has_taken_is_not_completed`
def test_a_second_job_that_saves_the_same_tag_is_refused_by_name(tmp_path: Path) -> None:
    """What is complete stays until the first one has its own, and the second works when that is dead."""
    previous = _finalized(tmp_path, "t", '{"n": 1}')
    command = [sys.executable, "-c", _SAVING, str(tmp_path)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen(command, env=environment(), cwd=REPO, **pipes)
    try:
        part = Path(other.stdout.readline().strip())  # type: ignore[union-attr]
        with pytest.raises(
            CheckpointError, match=rf"process {other.pid} of .* is still running and is saving checkpoint 't' .*{re.escape(str(part))}"
        ):
            staging.begin(tmp_path, "t")
        assert (part / "master-00000-of-00001.safetensors").read_text() == "theirs"
        assert folders.read_index(previous) == '{"n": 1}'
        _finalized(tmp_path, "another")
        assert part.is_dir()
        writer = Process.of_json(json.loads((part / "writer.json").read_text()))
        assert writer is not None and writer.pid == other.pid
        staging.clear(tmp_path, "t", [writer])  # ranks of one job that share a disk
    finally:
        other.kill()
        other.communicate()
    _finalized(tmp_path, "t", '{"n": 2}')
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "t"]


def test_a_checkpoint_whose_save_was_killed_elsewhere_after_its_rename_is_replaced(tmp_path: Path) -> None:
    for number in range(3):
        folder = _finalized(tmp_path, "t", json.dumps({"n": number}))
        (folder / "writer.json").write_text(json.dumps(Process("elsewhere", 1).as_json()))
    assert [path.name for path in tmp_path.iterdir()] == ["t"] and folders.read_index(tmp_path / "t") == '{"n": 2}'


def test_jobs_that_do_not_know_of_each_other_have_folders_of_their_own(tmp_path: Path) -> None:
    """On two machines, say: each checkpoint is whole, the later one stays."""
    parts = []
    for number in range(2):
        parts.append(staging.begin(tmp_path, "t"))
        writer = json.loads((parts[number] / "writer.json").read_text())
        if number == 0:
            (parts[0] / "writer.json").write_text(json.dumps({**writer, "place": "elsewhere"}))
    for number, part in enumerate(parts):
        (part / "master-00000-of-00001.safetensors").write_text(str(number))
    (parts[0] / "writer.json").write_text(json.dumps(writer))
    for number, part in enumerate(parts):
        staging.finalize(part, json.dumps({"n": number}))
        assert folders.read_index(staging.publish(part, tmp_path, "t")) == json.dumps({"n": number})
        assert (tmp_path / "t" / "master-00000-of-00001.safetensors").read_text() == str(number)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_folder_that_another_process_has_taken_is_not_completed(tmp_path: Path) -> None:
    _finalized(tmp_path, "t", '{"n": 1}')
    part = staging.begin(tmp_path, "t")
    own = (part / "writer.json").read_text()
    other = json.dumps(replace(Process.own(), pid=1).as_json())
    (part / "writer.json").write_text(other)
    with pytest.raises(CheckpointError, match="no longer this process' folder"):
        staging.finalize(part, '{"n": 2}')
    assert not folders.is_complete(part)
    (part / "writer.json").write_text(own)
    staging.finalize(part, '{"n": 2}')
    (part / "writer.json").unlink()
    with pytest.raises(CheckpointError, match="no longer this process' folder"):
        staging.publish(part, tmp_path, "t")
    assert folders.read_index(tmp_path / "t") == '{"n": 1}'


def test_killed_between_the_renames_the_former_checkpoint_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _finalized(tmp_path, "t", '{"n": 1}')
    part = staging.begin(tmp_path, "t")
    staging.finalize(part, '{"n": 2}')
    rename = os.rename

    def killed(source: str, target: str, **folders: int) -> None:
        if source == part.name:
            raise KeyboardInterrupt
        rename(source, target, **folders)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        staging.publish(part, tmp_path, "t")
    monkeypatch.undo()
    assert folders.read_index(folders.find(tmp_path, "t")) == '{"n": 1}'
    assert folders.read_index(_finalized(tmp_path, "t", '{"n": 3}')) == '{"n": 3}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t"]


def test_index_and_marker_must_agree(tmp_path: Path) -> None:
    folder = _finalized(tmp_path, "t", '{"n": 1}')
    (folder / "index.json").write_text('{"n": 2}')
    with pytest.raises(CheckpointError, match="index.json is damaged"):
        folders.read_index(folder)


def test_latest_that_names_a_path_is_refused(tmp_path: Path) -> None:
    assert folders.read_latest(tmp_path) is None
    own_files.write_text(tmp_path / "latest", "../../elsewhere")
    with pytest.raises(CheckpointError, match="latest: the checkpoint tag '../../elsewhere'"):
        folders.read_latest(tmp_path)


def test_a_checkpoint_of_deepspeed_is_named_with_the_command_that_converts_it(tmp_path: Path) -> None:
    for name in ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
        folder = tmp_path / name / "global_step1"
        folder.mkdir(parents=True)
        (folder / name).write_bytes(b"")
        (folder.parent / "latest").write_text("global_step1")
        command = f"written by DeepSpeed.* `hf-zero convert {folder} NEW --tag global_step1 --trust-pickle`"
        for load in (
            lambda folder=folder: folders.find_latest(folder.parent),
            lambda folder=folder: folders.find(folder.parent, "global_step1"),
            lambda folder=folder: folders.require_no_mistaken_folder(folder),
        ):
            with pytest.raises(CheckpointError, match=command):
                load()
