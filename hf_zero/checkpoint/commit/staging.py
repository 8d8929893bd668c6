"""Staging of a checkpoint, which exists as a whole or not at all: a hidden folder that is signed, filled, finalized, and renamed.

[Note: one folder for each save] The hidden folder carries the number of its save, so two jobs that save the same tag never write into
one folder; the later one replaces the earlier one's checkpoint as a whole. Where it can be told that the other still lives, the save is
refused. What is replaced stays under another hidden name until the new checkpoint is complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.commit.folders import (
    SCRIPT_FILE,
    check_tag,
    digest,
    is_complete,
    marker_of,
    previous_folder,
    staging_folder,
    tag_of_staging,
)
from hf_zero.checkpoint.format.names import FORMAT, INDEX_FILE, MARKER_FILE
from hf_zero.errors import CheckpointError
from hf_zero.observe import logger, note
from hf_zero.system import own_files
from hf_zero.system.folder import Folder
from hf_zero.system.process import Process
from hf_zero.system.reading import whole_json
from hf_zero.system.text_file import read_bytes

_SHARD = re.compile(
    r"(master|weights|module|optimizer\.\w{1,64}|optimizer_params|average(_tensors)?\.\w{1,64}|(onebit_worker|onebit_server|loco)_error)"
    r"-\d{5,}-of-\d{5,}(\.tensor-\d{5,}-of-\d{5,})?\.safetensors"
)
_OTHER = re.compile(r"values(-\d{5,})?\.safetensors|module\.safetensors")  # the second in version 1 alone
_open: set[str] = set()  # names of hidden folders of saves of this process that are under way
_NOTE = re.compile(r"rank-\d{5,}\.json|failed-\d{5,}")  # of a save in the background


def note_of(rank: int) -> str:
    """Return the file in which a rank of a background save reports its written files to rank 0."""
    return f"rank-{rank:05d}.json"


def failure_of(rank: int) -> str:
    """Return the file by which it tells rank 0 that it failed."""
    return f"failed-{rank:05d}"


def is_ours(name: str) -> bool:
    """Return whether a file of a checkpoint, or of a save that is under way, has that name."""
    known = name in (INDEX_FILE, MARKER_FILE, own_files.WRITER_FILE) or own_files.is_hidden_name(name)
    return known or any(pattern.fullmatch(name) for pattern in (_SHARD, _OTHER, _NOTE))


def save_number() -> str:
    """Return a number for a save; the name of its hidden folder contains it."""
    return os.urandom(4).hex()


# -- before a byte is written -----------------------------------------------------------------------------------------


def begin(save_dir: Path, tag: str, number: str | None = None) -> Path:
    """Make the empty hidden folder that a checkpoint is written into; remove the remains of killed saves in ``save_dir``.

    Args:
        save_dir: Folder of all checkpoints; made if missing.
        tag: Name of this one.
        number: Of the save; a new one when None.

    Raises:
        CheckpointError: The entry with the tag's name is no checkpoint, or a running process saves that tag.
        OSError: The file system refuses.
    """
    folder = staging_folder(save_dir, check_tag(tag), number or save_number())
    clear(save_dir, tag)
    drop_previous(save_dir)
    own_files.make_folder(folder, {})
    _open.add(folder.name)
    return folder


def clear(save_dir: Path, tag: str, job: Collection[Process] = ()) -> None:
    """Prepare ``save_dir`` for a save: remove hidden folders that killed saves have left.

    Args:
        save_dir: Folder of all checkpoints; made if missing.
        tag: Name of the one that will be saved.
        job: Processes that save it together.

    Raises:
        CheckpointError: As ``begin``.
    """
    _refuse_foreign(save_dir / tag)
    own_files.make_folders(save_dir)
    own_files.sweep(save_dir)
    for folder in sorted(save_dir.glob(".*.part")):
        of = tag_of_staging(folder.name)
        if of is None or folder.is_symlink() or not folder.is_dir():
            continue
        writer = Process.of_json(own_files.read_writer(folder))
        if own_files.is_abandoned(folder) or writer == Process.own() and folder.name not in _open:
            logger.warning("%s was left by a save that did not finish; it is removed", folder)
            own_files.remove_folder(folder, is_ours)
        elif of == tag and writer is not None and writer != Process.own() and writer not in job:
            _refuse_second(folder, tag, writer)


def _refuse_foreign(final: Path) -> None:
    """Raise unless ``final`` is absent or a folder that a save of hf_zero may replace."""
    advice = "choose another tag, or move it away"
    if final.is_symlink():
        raise CheckpointError(f"{final} is a link; {advice}")
    if not final.exists():
        return
    with Folder(final.parent) as save_dir, save_dir.below(final.name) if final.is_dir() else nullcontext() as there:
        if not save_dir.has(final.name):
            raise CheckpointError(
                f"{final} exists under a name that differs only in upper and lower case, and this file system treats both as one "
                f"name; {advice}"
            )
        if there is not None and not there.is_own(save_dir):
            raise CheckpointError(f"{final} belongs to another user, so it cannot be replaced; {advice}")
    if is_complete(final) and _has_sign(final):
        return
    names = sorted(path.name for path in final.iterdir() if path.is_dir() or not is_ours(path.name)) if final.is_dir() else ["a file"]
    if names or not _has_sign(final):
        found = f" (it holds {', '.join(names[:3])})" if final.is_dir() and names else ""
        raise CheckpointError(f"{final} exists and is not a checkpoint that hf_zero wrote{found}; {advice}")


def _has_sign(folder: Path) -> bool:
    """Return whether hf_zero must have made this folder: it is empty, or has a file named like a shard, or a valid marker or index."""
    names = os.listdir(folder)
    if not names or any(_SHARD.fullmatch(name) for name in names):
        return True
    if re.fullmatch(r"[0-9a-f]{64}", marker_of(folder)):
        return True
    index = whole_json(folder / INDEX_FILE)
    return isinstance(index, dict) and index.get("format") == FORMAT


def _refuse_second(folder: Path, tag: str, writer: Process) -> None:
    """Raise if another process is known to write the same tag now."""
    who = f"process {writer.pid} of {writer.place.partition(' ')[0]}"
    if writer.is_alive():
        raise CheckpointError(
            f"{who} is still running and is saving checkpoint {tag!r} to {folder.parent} (it writes {folder}). Two runs must "
            "not save the same tag to the same folder: end one of them, or give it another folder"
        )
    logger.warning(
        "%s may be in use by %s; this save of %r uses a folder of its own, and the save that finishes last is kept", folder, who, tag
    )


def make_hidden_folder(save_dir: Path, tag: str, number: str, rank: int) -> None:
    """Make the hidden folder unless another rank was first; ``leader_of`` returns that rank.

    Args:
        save_dir: Folder of all checkpoints.
        tag: Of this one.
        number: Of the save.
        rank: Rank that makes the folder.
    """
    folder = staging_folder(save_dir, tag, number)
    try:
        own_files.make_folder(folder, {"leader": rank})
        _open.add(folder.name)
    except OSError:
        if not folder.is_dir():
            raise


def leader_of(folder: Path) -> int | None:
    """Return the rank that made a hidden folder; None when there is none, or no rank offered it."""
    leader = (own_files.read_writer(folder) or {}).get("leader")
    return leader if isinstance(leader, int) else None


# -- when everything is written ---------------------------------------------------------------------------------------


def finalize(folder: Path, index: str) -> None:
    """Write index and marker into a hidden folder, which is complete then.

    Raises:
        CheckpointError: It is another process' folder.
    """
    _check_writer(folder, own_files.read_writer(folder) or Process.own().as_json())
    own_files.write_text(folder / INDEX_FILE, index)
    own_files.write_text(folder / MARKER_FILE, digest(index) + "\n")


def _check_writer(folder: Path, writer: dict[str, Any] | None) -> None:
    if Process.of_json(writer) != Process.own():
        raise CheckpointError(f"{folder} is no longer this process' folder (its writer is {writer}); the checkpoint is not completed")


def publish(folder: Path, save_dir: Path, tag: str, keep_previous: bool = False) -> Path:
    """Give a finalized folder its name; the checkpoint that has this name now stays complete under a hidden one.

    Raises:
        CheckpointError: It is another process' folder.
    """
    _check_writer(folder, own_files.read_writer(folder))
    _open.discard(folder.name)
    final, previous = save_dir / tag, previous_folder(save_dir, tag)
    if is_complete(final):
        _drop(previous, final)
        own_files.move(final, previous)
        note("checkpoint_aside", tag)
    elif final.exists():  # it cannot be loaded; the complete one may be the previous one of this name
        _remove_named(final)
    own_files.move(folder, final)
    own_files.remove_file(final / own_files.WRITER_FILE)
    own_files.sync_folder(save_dir)
    note("checkpoint_named", tag)
    if not keep_previous:
        _drop(previous, final)
    return final


def abandon(folder: Path) -> None:
    """Remove a hidden folder after a failure. Every rank may call it; only the rank that made the folder removes it."""
    _open.discard(folder.name)
    own_files.remove_folder(folder, is_ours)


# -- replaced checkpoints ---------------------------------------------------------------------------------------------


def drop_previous(save_dir: Path) -> None:
    """Remove folders that complete checkpoints have replaced and that a killed save has left."""
    for previous in _all_previous(save_dir):
        final = save_dir / previous.name[1 : -len(".former")]
        if is_complete(final):
            _drop(previous, final)


def _all_previous(save_dir: Path) -> Iterator[Path]:
    return (path for path in sorted(save_dir.glob(".*.former")) if path.is_dir() and not path.is_symlink())


def _drop(folder: Path, kept: Path) -> None:
    """Remove a checkpoint that ``kept`` replaces; move files in it that hf_zero did not write (a user's notes) to ``kept``."""
    if not folder.exists() or not _has_sign(folder):
        return
    own_files.remove_file(folder / MARKER_FILE)  # first, so that it no longer counts as complete
    for path in list(folder.iterdir()):
        if (path.is_dir() or not is_ours(path.name)) and not os.path.lexists(kept / path.name):
            own_files.move(path, kept / path.name)
    _remove_named(folder)


def _remove_named(folder: Path) -> None:
    """Remove folders that have or had the name of a checkpoint, with everything a killed save left in them; no process writes there any
    more.
    """
    own_files.remove_file(folder / own_files.WRITER_FILE)
    own_files.remove_folder(folder, is_ours)


def restore_previous(save_dir: Path, tag: str, wanted: set[tuple[str, str]]) -> None:
    """Give the previous checkpoint of ``tag`` its name back if it is ``wanted`` (tag and digest) and the present one is not."""
    final, previous = save_dir / tag, previous_folder(save_dir, tag)
    if is_complete(previous) and (tag, marker_of(previous)) in wanted and (not is_complete(final) or (tag, marker_of(final)) not in wanted):
        _drop(final, previous)
        own_files.move(previous, final)
        own_files.sync_folder(save_dir)


def script_bytes() -> bytes:
    """Return the text of ``zero_to_fp32.py``."""
    return (Path(__file__).parents[1] / SCRIPT_FILE).read_bytes()


def write_script(save_dir: Path) -> None:
    """Put ``zero_to_fp32.py`` beside the checkpoints, unless it is there."""
    script, path = script_bytes(), save_dir / SCRIPT_FILE
    try:
        there = None if path.is_symlink() else read_bytes(path, len(script))
    except (OSError, ValueError):
        there = None
    if there != script:
        own_files.write_bytes(path, script)
