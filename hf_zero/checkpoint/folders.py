"""Folders of checkpoints: written under a hidden name, renamed when complete, found again by tag or by ``latest``."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from hf_zero.checkpoint.format import INDEX_FILE, LATEST_FILE, MARKER_FILE
from hf_zero.errors import CheckpointError

SCRIPT_FILE = "zero_to_fp32.py"


def check_tag(tag: str) -> str:
    """Returns ``tag`` when it can name a folder.

    Raises:
        CheckpointError: It is empty, hidden, or more than one path component.
    """
    if not tag or tag.startswith(".") or "/" in tag or os.sep in tag or "\0" in tag or tag in (LATEST_FILE, SCRIPT_FILE):
        raise CheckpointError(
            f"the checkpoint tag {tag!r} cannot name a folder; use a name like 'global_step100' without slashes and without a leading dot"
        )
    return tag


# -- writing ----------------------------------------------------------------------------------------------------------


def _part(save_dir: Path, tag: str) -> Path:
    return save_dir / f".{tag}.part"


def _former(save_dir: Path, tag: str) -> Path:
    return save_dir / f".{tag}.former"


def begin(save_dir: Path, tag: str) -> Path:
    """Makes the empty hidden folder that a checkpoint is written into; leftovers of a save that was killed go away."""
    part = _part(save_dir, tag)
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    return part


def write_text(path: Path, text: str) -> None:
    """Writes a small file so that its name holds either the old or the new content, never half of it."""
    hidden = path.with_name(f".{path.name}.part")
    with open(hidden, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(hidden, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Forces the names inside a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(part: Path, index: str) -> None:
    """Writes index and marker: the folder is complete from here on."""
    write_text(part / INDEX_FILE, index)
    write_text(part / MARKER_FILE, _digest(index) + "\n")


def publish(part: Path, save_dir: Path, tag: str) -> Path:
    """Gives a sealed folder its name; a checkpoint of that name stays complete under a hidden one until then."""
    final, former = save_dir / tag, _former(save_dir, tag)
    if final.exists():
        if former.exists():
            shutil.rmtree(former)
        os.rename(final, former)
    os.rename(part, final)
    sync_folder(save_dir)
    if former.exists():
        shutil.rmtree(former)
    return final


def _digest(index: str) -> str:
    return hashlib.sha256(index.encode()).hexdigest()


# -- finding ----------------------------------------------------------------------------------------------------------


def read_latest(load_dir: Path) -> str | None:
    """The tag that ``latest`` names, or None when there is no such file.

    Raises:
        CheckpointError: It names no folder name.
    """
    path = load_dir / LATEST_FILE
    if not path.is_file():
        return None
    try:
        return check_tag(path.read_text(encoding="utf-8", errors="replace").strip())
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def find(load_dir: Path, tag: str) -> Path:
    """The complete folder of ``tag``.

    Raises:
        CheckpointError: There is none; names what is missing and the newest complete one.
    """
    check_tag(tag)
    # A save of the same tag that was killed between its two renames leaves the former checkpoint hidden.
    for folder in (load_dir / tag, _former(load_dir, tag)):
        if is_complete(folder):
            return folder
    folder = load_dir / tag
    if not folder.is_dir():
        problem = f"there is no checkpoint folder {folder}"
    else:
        problem = f"the checkpoint {folder} is incomplete: it lacks {INDEX_FILE} or {MARKER_FILE}"
    newest = newest_complete(load_dir)
    advice = f"the newest complete one is {newest.name!r}, load it with tag={newest.name!r}" if newest else "no other is complete there"
    raise CheckpointError(f"{problem}; {advice}")


def is_complete(folder: Path) -> bool:
    """Whether a save into ``folder`` reached its end."""
    return (folder / INDEX_FILE).is_file() and (folder / MARKER_FILE).is_file()


def newest_complete(load_dir: Path) -> Path | None:
    """The complete checkpoint in ``load_dir`` that was finished last."""
    if not load_dir.is_dir():
        return None
    folders = [folder for folder in load_dir.iterdir() if not folder.name.startswith(".") and is_complete(folder)]
    return max(folders, key=lambda folder: (folder / MARKER_FILE).stat().st_mtime_ns, default=None)


def read_index(folder: Path) -> str:
    """The text of the index, verified against the marker.

    Raises:
        CheckpointError: They cannot be read or do not agree.
    """
    path = folder / INDEX_FILE
    try:
        text = path.read_text(encoding="utf-8")
        expected = (folder / MARKER_FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if _digest(text) != expected:
        raise CheckpointError(f"{path} is damaged: its sha256 is {_digest(text)}, {MARKER_FILE} says {expected[:64]!r}")
    return text
