"""Find and bring the checkpoints of a Trainer: its own small files, and the engine's checkpoint beside them or in an object store.

[Note: a Trainer's files in a store] With ``hf_zero.checkpoint_url`` the engine's checkpoint of ``out/checkpoint-8`` is at
``<url>/checkpoint-8``, and the local folder keeps a note of that, ``global_step8/checkpoint_url.txt``. Trainer's small files go there
too, ``trainer_state.json`` last, so that a machine with nothing on its disk can go on. Whole weights in Hugging Face's form stay in the
local folder: the engine's checkpoint has them.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from hf_zero.checkpoint.commit.folders import complete_or_previous, files_of, read_latest
from hf_zero.checkpoint.commit.store_saves import forget
from hf_zero.checkpoint.format.names import CONVERTED, INDEX_FILE
from hf_zero.errors import CheckpointError
from hf_zero.observe import logger
from hf_zero.system import own_files
from hf_zero.system.object_store import ObjectPath, Place, is_url, place_of, tried
from hf_zero.system.parted_upload import PartPool
from hf_zero.system.reading import whole_json
from hf_zero.system.secrets import MASK
from hf_zero.system.text_file import limit_beside, opened_file, read_first_line

STATE_FILE = "trainer_state.json"
_NOTE_FILE = "checkpoint_url.txt"
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "pytorch_model*")
_PART_BYTES = 8 << 20

_STATE_BYTES = 64 << 20  # of trainer_state.json, whose history grows with each record


def newest_trainer_checkpoint(output_dir: str | os.PathLike[str], checkpoint_url: str | None = None) -> str | None:
    """Find the complete ``checkpoint-N`` with the highest N in a Trainer's output folder; None when there is none.

    transformers' ``get_last_checkpoint`` takes the highest N, also of a folder that was being written when the run was killed. This one
    passes those over, with a warning that names them.

    Args:
        output_dir: ``TrainingArguments.output_dir``; need not exist.
        checkpoint_url: ``hf_zero.checkpoint_url`` of the run: Trainer's files of the newest complete checkpoint there are copied into
            ``output_dir`` unless a newer one is complete on this machine. Every rank may call this at the same time.

    Raises:
        CheckpointError: The library for ``checkpoint_url`` is missing, or ``output_dir`` is a URL.
        OSError: The store or the file system refuses.
    """
    if is_url(os.fspath(output_dir)):
        raise CheckpointError(
            "output_dir is a URL, and Trainer writes to folders; give the URL as checkpoint_url beside a local output_dir"
        )
    number, found = _newest_local(Path(output_dir))
    if checkpoint_url is not None:
        place = place_of(checkpoint_url)
        if not isinstance(place, ObjectPath):
            raise CheckpointError(f"checkpoint_url is {checkpoint_url!r}, allowed is a URL, such as 's3://bucket/run'")
        for other, folder in _numbered(place.listed()):
            if other < number:
                break
            if _is_whole_in_store(place / folder):
                return str(_fetch(place / folder, Path(output_dir) / folder))
    return str(found) if found is not None else None


def _numbered(names: Iterable[str]) -> list[tuple[int, str]]:
    """Return the numbers and names of a Trainer's checkpoints among ``names``, the highest first."""
    matches = ((re.fullmatch(r"checkpoint-(\d+)", name), name) for name in names)
    return sorted(((int(match[1]), name) for match, name in matches if match is not None), reverse=True)


def _newest_local(output_dir: Path) -> tuple[int, Path | None]:
    """Return the highest number of a complete checkpoint in a folder, and its folder; -1 and None if there is none."""
    names = [path.name for path in output_dir.glob("checkpoint-*") if path.is_dir()]
    numbered = {number: output_dir / name for number, name in _numbered(names)}
    found: Path | None = None
    incomplete = []
    for number in sorted(numbered, reverse=True):
        if _is_whole_trainer_checkpoint(numbered[number]):
            found = numbered[number]
            break
        incomplete.append(numbered[number].name)
    if incomplete:
        logger.warning("%s in %s: incomplete; the newest complete checkpoint is %s", ", ".join(incomplete), output_dir, found)
    return (int(found.name.rpartition("-")[2]) if found is not None else -1), found


def _is_whole_trainer_checkpoint(folder: Path) -> bool:
    """Return whether the file that Trainer writes last exists and, if there is any sign of the engine's checkpoint, that checkpoint is
    complete and the random state of every rank exists.

    Trainer's rank 0 does not wait for the random states of the others: a run resumed without one would go on, with other numbers.
    """
    if not isinstance(whole_json(folder / STATE_FILE, _STATE_BYTES), dict):
        return False
    place = _place_of_engine(folder)
    try:
        tag = read_latest(place)
    except CheckpointError:
        return False
    if tag is None:
        return place == folder and not [path for path in folder.iterdir() if path.name.startswith("global_step") or path.suffix == ".part"]
    found = complete_or_previous(place, tag)
    return found is not None and all(_is_archive(folder / name) for name in _random_states(found))


def _is_archive(path: Path) -> bool:
    """Return whether a file is whole, as ``torch.save`` writes it."""
    try:
        with opened_file(path) as file:
            return zipfile.is_zipfile(file)
    except OSError:
        return False


def _random_states(checkpoint: Place) -> Iterator[str]:
    """Yield the names of Trainer's files beside an hf_zero checkpoint; none when it was converted, or does not say how many ranks
    wrote it.
    """
    path = (files_of(checkpoint) or checkpoint) / INDEX_FILE
    index = whole_json(path, limit_beside(path))
    if index is None:
        return
    world = index.get("world") if isinstance(index, dict) and index.get("library") != CONVERTED else 0
    if world == 1:
        yield "rng_state.pth"
    elif isinstance(world, int):
        yield from (f"rng_state_{rank}.pth" for rank in range(world))  # one by one: the number may be anything


# -- in an object store -------------------------------------------------------------------------------------------------


def note_place(folder: Path, tag: str, place: ObjectPath) -> None:
    """Leave a note in a local folder that the engine's checkpoint of ``tag`` is at ``place``, without its password."""
    own_files.make_folders(folder / tag)
    own_files.write_text(folder / tag / _NOTE_FILE, f"{place}\n")


def _place_of_engine(folder: Path) -> Place:
    """Return the place of the engine's checkpoint of a Trainer's local folder: that of its note, else the folder."""
    for note in sorted(folder.glob(f"global_step*/{_NOTE_FILE}")):
        url = read_first_line(note)
        return place_of(url).parent if MASK not in url else folder
    return folder


def send(folder: Path, place: ObjectPath, names: Iterable[str]) -> None:
    """Copy files of a Trainer's local folder to a store; files that do not exist are skipped.

    Raises:
        OSError: The store or the file system refuses.
    """
    with PartPool() as pool:
        for name in names:
            path = folder / name
            if path.is_file():
                tried(place / name, lambda path=path: _send(path, place, pool), uploads=True)  # type: ignore[misc]


def _send(path: Path, place: ObjectPath, pool: PartPool) -> None:
    with opened_file(path) as source, (place / path.name).writing(path.stat().st_size, pool) as target:
        while data := source.read(_PART_BYTES):
            target.write(data)


def own_names(folder: Path, rank: int) -> list[str]:
    """Return the names of the files in a Trainer's local folder that ``rank`` sends: its random state, and on rank 0 all that no other
    rank has, without weights and without ``trainer_state.json``, which comes last.
    """
    if rank:
        return [f"rng_state_{rank}.pth"]
    names = sorted(path.name for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    others = [name for name in names if re.fullmatch(r"rng_state_[1-9]\d*\.pth", name)]
    return [name for name in names if name not in (*others, STATE_FILE) and not any(fnmatch(name, weights) for weights in _WEIGHTS)]


def _is_whole_in_store(place: ObjectPath) -> bool:
    """Return whether a store has all files from which a run continues from a Trainer's checkpoint."""
    listed = place.listed()
    tag = read_latest(place) if listed.get(STATE_FILE) is not None else None
    found = complete_or_previous(place, tag) if tag is not None else None
    return found is not None and all(listed.get(name) is not None for name in _random_states(found))


def _fetch(place: ObjectPath, folder: Path) -> Path:
    """Copy a Trainer's files of a checkpoint from a store into a local folder, and leave the note that the engine's lies there."""
    tag = read_latest(place) or ""
    own_files.make_folders(folder)
    for name, size in place.listed().items():
        path = folder / name
        if size is None or name in ("latest", "zero_to_fp32.py") or (path.is_file() and path.stat().st_size == size):
            continue
        with own_files.replacing(path) as file:
            for start in range(0, size, _PART_BYTES):
                file.write((place / name).get_range(start, min(start + _PART_BYTES, size)))
    note_place(folder, tag, place / tag)
    return folder


def rotate(place: ObjectPath, limit: int, kept: str) -> None:
    """Delete a Trainer's oldest checkpoints in a store: the ``limit`` newest complete ones stay, and the one named ``kept``.

    Raises:
        OSError: The store refuses.
    """
    complete = [name for _, name in _numbered(place.listed()) if _is_whole_in_store(place / name)]
    newest = _numbered(complete)[:limit]
    for number, name in _numbered(place.listed()):
        if newest and number < newest[-1][0] and name != kept:
            folder = place / name
            folder.remove([STATE_FILE])  # first: without it nobody goes on from here
            for tag, size in folder.listed().items():
                if size is None and not tag.startswith("."):
                    forget(folder / tag)
            folder.remove([other for other, size in folder.listed().items() if size is not None])
            logger.info("%s was deleted (save_total_limit)", folder)
