"""What the package makes beside others' files, and the little that it deletes: never what is not its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hf_zero.system import own_files
from hf_zero.system.process import Process
from tests.support.processes import REPO, environment

# -- small files ------------------------------------------------------------------------------------------------------


def test_a_small_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("as it was")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("latest", ".latest.part"):  # the second is what the hidden file was once called
        (folder / name).symlink_to(secret)
    own_files.write_text(folder / "latest", "global_step1")
    assert secret.read_text() == "as it was"
    assert (folder / "latest").read_text() == "global_step1" and not (folder / "latest").is_symlink()


def test_a_small_file_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str, **folders: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "latest").write_text("old")
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(OSError, match="No space"):
        own_files.write_text(tmp_path / "latest", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"] and (tmp_path / "latest").read_text() == "old"


# -- processes --------------------------------------------------------------------------------------------------------


def test_a_process_is_known_again_by_file_and_by_name() -> None:
    own = Process.own()
    assert own.is_alive() is True
    assert Process.of_json(own.as_json()) == own and Process.of_code(own.code) == own
    assert replace(own, place="elsewhere").is_alive() is None
    far = Process.of_code(replace(own, place="elsewhere").code)
    assert far is not None and far.is_alive() is None
    assert Process.of_code(replace(own, started="").code) == replace(own, started="")


def test_a_dead_process_and_one_that_has_its_number_now_are_told_apart() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment())
    stat = Path(f"/proc/{child.pid}/stat")
    running = replace(Process.own(), pid=child.pid, started="")
    try:
        assert running.is_alive() is True
        if stat.exists():
            assert replace(Process.own(), pid=child.pid).is_alive() is False, "another process began under that number"
    finally:
        child.communicate(b"\n")
    assert running.is_alive() is False


@pytest.mark.parametrize(
    "data", [None, [], {}, {"place": "x"}, {"place": "x", "pid": "1"}, {"place": "x", "pid": 0}, {"place": "x", "pid": 10**30}, {"pid": -1}]
)
def test_what_is_no_process_is_none(data: object) -> None:
    assert Process.of_json(data) is None


# -- sweeping and removing --------------------------------------------------------------------------------------------


def left_by(writer: Process, name: str) -> str:
    return own_files.hidden_name(name).replace(Process.own().code, writer.code)


def test_what_dead_processes_were_making_goes_and_all_else_stays(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"], env=environment())
    gone.wait()
    dead, far = replace(Process.own(), pid=gone.pid), replace(Process.own(), place="elsewhere")
    (tmp_path / left_by(dead, "latest")).write_text("half")
    folder = tmp_path / left_by(dead, ".t.part")
    folder.mkdir()
    (folder / own_files.WRITER_FILE).write_text("")
    silent = tmp_path / left_by(far, "silent")
    silent.write_text("")
    os.utime(silent, (0, 0))
    stay = [own_files.hidden_name("latest"), left_by(far, "latest"), ".latest.part", ".cache.part", "latest"]
    for name in stay:
        (tmp_path / name).write_text("")
    os.utime(tmp_path / ".cache.part", (0, 0))
    foreign = tmp_path / left_by(dead, "folder")
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("")
    link = tmp_path / left_by(dead, "link")
    link.symlink_to(tmp_path)
    own_files.sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*stay, foreign.name, link.name}
    assert (foreign / "thesis.tex").exists()
    own_files.sweep(tmp_path / "absent")


def test_a_folder_loses_what_is_ours_and_stays_with_all_else(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    (folder / "ours.d" / "deeper").mkdir(parents=True)
    outside.mkdir()
    (outside / "ours").write_text("")
    for name in ("ours", "theirs"):
        (folder / name).write_text("")
    (folder / "ours.link").symlink_to(outside)
    assert not own_files.remove_folder(folder, lambda name: name.startswith("ours"))
    assert sorted(path.name for path in folder.iterdir()) == ["ours.d", "theirs"]
    assert (folder / "ours.d" / "deeper").is_dir() and (outside / "ours").exists()
    (tmp_path / "link").symlink_to(outside)
    assert not own_files.remove_folder(tmp_path / "link", lambda name: True)
    assert (outside / "ours").exists()
    assert not own_files.remove_folder(outside, lambda name: True, maker=os.getpid() + 1) and (outside / "ours").exists()
    assert own_files.remove_folder(outside, lambda name: True, maker=os.getpid()) and not outside.exists()


def test_a_signed_folder_goes_with_its_writer_alone(tmp_path: Path) -> None:
    own_files.make_folder(tmp_path / "a", {"leader": 3})
    assert own_files.read_writer(tmp_path / "a") == {**Process.own().as_json(), "leader": 3}
    assert not own_files.is_abandoned(tmp_path / "a") and not own_files.is_abandoned(tmp_path)
    with pytest.raises(OSError, match=r"not empty|exists"):
        own_files.make_folder(tmp_path / "a", {})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    code = (
        "import sys; from pathlib import Path; from hf_zero.system import own_files\n"
        "print(own_files.is_abandoned(Path(sys.argv[1])), own_files.remove_folder(Path(sys.argv[1]), lambda name: True))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    done = subprocess.run(command, env=environment(), cwd=REPO, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "False False\n" and (tmp_path / "a").is_dir()
    assert own_files.remove_folder(tmp_path / "a", lambda name: True)
    assert own_files.remove_folder(tmp_path / "a", lambda name: True), "it is gone"


def test_a_writer_elsewhere_has_a_day(tmp_path: Path) -> None:
    own_files.make_folder(tmp_path / "a", {"place": "elsewhere"})
    now = time.time()
    for age, gone in ((3600, False), (2 * 86400, True)):
        for path in (tmp_path / "a" / own_files.WRITER_FILE, tmp_path / "a"):
            os.utime(path, (now - age, now - age))
        assert own_files.is_abandoned(tmp_path / "a") is gone
