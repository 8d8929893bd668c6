"""Find checkpoint folders: their names, which are complete, by tag or ``latest``.

[Note: a sub-folder for each save] An object store cannot rename, so a save there writes into ``<tag>/<number>``, and the marker
``<tag>/complete`` names that number: one small object, written last, which a store replaces as a whole. Until then nothing that is read
has changed. The sub-folder has a marker of its own, so that a copy of it is an ordinary checkpoint. ``files_of`` finds the files
of both forms, on disks too: a copy of a whole run loads as it is.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from hf_zero.checkpoint.format.names import INDEX_FILE, LATEST_FILE, MARKER_FILE
from hf_zero.errors import CheckpointError
from hf_zero.observe import logger
from hf_zero.system.object_store import Place
from hf_zero.system.reading import whole_json
from hf_zero.system.text_file import limit_beside, read_first_line, read_text

_TAG_BYTES = 200  # a name of a folder has 255, and hidden ones are longer than the tag
SCRIPT_FILE = "zero_to_fp32.py"
_MODEL_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_OF_DEEPSPEED = re.compile(r".*_optim_states\.pt|.*mp_rank_.*_model_states\.pt")
_PART = re.compile(r"\.(.+)\.[0-9a-f]{8}\.part")


def check_tag(tag: str) -> str:
    """Return ``tag`` if it can name a folder.

    Raises:
        CheckpointError: It is empty, hidden, or more than one path component.
    """
    if len(tag.encode("utf-8", "replace")) > _TAG_BYTES:
        raise CheckpointError(f"the checkpoint tag {tag[:40]!r}... has {len(tag)} characters, too many for a folder; give a shorter one")
    if not tag or tag.startswith(".") or "/" in tag or os.sep in tag or "\0" in tag or tag.casefold() in (LATEST_FILE, SCRIPT_FILE):
        raise CheckpointError(
            f"the checkpoint tag {tag!r} cannot name a folder; use a name like 'global_step100' without slashes and without a leading dot"
        )
    return tag


_MARKER = re.compile(r"([0-9a-f]{64})(?: ([0-9a-f]{8}))?")


def staging_folder(save_dir: Path, tag: str, number: str) -> Path:
    """Return the hidden folder that save ``number`` of a checkpoint is written into."""
    return save_dir / f".{tag}.{number}.part"


def tag_of_staging(name: str) -> str | None:
    """Return the tag of the checkpoint that is written into a hidden folder of that name; None when it is another's folder."""
    found = _PART.fullmatch(name)
    return found[1] if found is not None else None


def previous_folder(save_dir: Path, tag: str) -> Path:
    """Return the hidden name of the checkpoint of ``tag`` that is being replaced."""
    return save_dir / f".{tag}.former"


def read_latest(load_dir: Place, name: str = LATEST_FILE) -> str | None:
    """Return the tag that the file ``name`` names, or None when there is no such file.

    Raises:
        CheckpointError: It cannot be read, or names no folder name.
    """
    path = load_dir / name
    if not path.exists():
        return None
    try:
        return check_tag(read_first_line(path))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def find(load_dir: Place, tag: str) -> Place:
    """Return the folder with the files of the complete checkpoint ``tag``.

    Raises:
        CheckpointError: There is none; names the missing files and the newest complete checkpoint.
    """
    found = complete_or_previous(load_dir, check_tag(tag))
    if found is not None:
        return found
    newest = next((tag for tag, _ in complete_ones(load_dir)), None)
    advice = f"the newest complete one is {newest!r}, load it with tag={newest!r}" if newest else "no other is complete there"
    raise CheckpointError(f"{_problem(load_dir, tag)}; {advice}")


def find_latest(load_dir: Place) -> Place | None:
    """Return the folder with the files of the checkpoint that ``latest`` names, or, if that is incomplete, of the newest complete one, with
    a warning; None when nothing was ever saved.

    Raises:
        CheckpointError: ``latest`` has no valid folder name, or its folder is incomplete and there is no other checkpoint.
    """
    tag = read_latest(load_dir)
    found = complete_or_previous(load_dir, tag) if tag is not None else None
    if found is not None:
        return found
    newest = newest_complete(load_dir)
    if newest is not None:
        problem = f"{load_dir} has no file {LATEST_FILE!r}" if tag is None else f"{LATEST_FILE!r} names {tag!r}: {_problem(load_dir, tag)}"
        logger.warning("%s; loading the newest complete checkpoint instead: %s", problem, newest)
        return newest
    if tag is not None:
        raise CheckpointError(f"{_problem(load_dir, tag)}; no other is complete there")
    return None


def require_no_mistaken_folder(load_dir: Place) -> None:
    """Raise or warn for a mistaken folder without checkpoints: a run that should continue would begin anew.

    Raises:
        CheckpointError: ``load_dir`` is a checkpoint itself, of hf_zero or DeepSpeed.
    """
    if is_deepspeed(load_dir):
        raise CheckpointError(_of_deepspeed(load_dir))
    if is_complete(load_dir):
        above, tag = load_dir.parent, load_dir.name
        raise CheckpointError(f"{load_dir} is one checkpoint; give the folder that holds it: load_checkpoint({str(above)!r}, tag={tag!r})")
    inside = [folder for folder in load_dir.iterdir() if (folder / LATEST_FILE).is_file()] if load_dir.is_dir() else []
    if inside:
        shown = ", ".join(sorted(folder.name for folder in inside)[:3])
        logger.warning(
            "%s holds no checkpoint, but these folders in it do: %s. To resume, give one of them to load_checkpoint", load_dir, shown
        )
    elif (load_dir / "config.json").is_file() and any((load_dir / name).is_file() for name in _MODEL_FILES):
        logger.warning(
            "%s holds a Hugging Face model and no checkpoint: load it with from_pretrained, or hf-zero convert %s NEW --tag weights",
            load_dir,
            load_dir,
        )


def complete_or_previous(load_dir: Place, tag: str) -> Place | None:
    """Return the folder with the files of ``tag``; of the previous one where a save of that tag was killed between its two renames."""
    found = files_of(load_dir / tag)
    return found if found is not None else files_of(previous_folder(load_dir, tag)) if isinstance(load_dir, Path) else None


def _problem(load_dir: Place, tag: str) -> str:
    folder = load_dir / tag
    if is_deepspeed(folder):
        return _of_deepspeed(folder)
    if folder.is_dir():
        return f"the checkpoint {folder} is incomplete: it lacks {INDEX_FILE} or {MARKER_FILE}"
    staging = next((path for path in load_dir.iterdir() if tag_of_staging(path.name) == tag), None) if load_dir.is_dir() else None
    if staging is not None:
        return f"there is no checkpoint folder {folder}, only {staging}, whose save did not finish"
    return f"there is no checkpoint folder {folder}"


def is_deepspeed(folder: Place) -> bool:
    """Return whether ``folder`` holds one tag of a DeepSpeed checkpoint."""
    return folder.is_dir() and any(_OF_DEEPSPEED.fullmatch(path.name) for path in folder.iterdir())


def _of_deepspeed(folder: Place) -> str:
    return (
        f"the checkpoint {folder} was written by DeepSpeed, whose files hf_zero converts but does not load: run "
        f"`hf-zero convert {folder} NEW --tag {folder.name} --trust-pickle`, and give NEW to load_checkpoint"
    )


def is_complete(folder: Place) -> bool:
    """Return whether a save into ``folder`` reached its end."""
    return files_of(folder) is not None


def files_of(folder: Place) -> Place | None:
    """Return the folder with the index and files of a complete checkpoint; None if it is not complete. See [Note: a sub-folder for each
    save].
    """
    if not (folder / MARKER_FILE).is_file():
        return None
    number = number_of(folder)
    place = folder / number if number else folder
    return place if (place / INDEX_FILE).is_file() else None


def number_of(folder: Place) -> str:
    """Return the number of the save that the marker of ``folder`` names; empty when the files lie in ``folder`` itself."""
    return number_in(_marker_text(folder))


def number_in(marker: str) -> str:
    """Return the number of the save that the text of a marker names; empty when it names none."""
    found = _MARKER.fullmatch(marker.strip())
    return found[2] or "" if found is not None else ""


def newest_complete(load_dir: Place) -> Place | None:
    """Return the complete checkpoint in ``load_dir`` with the highest number at the end of its tag, else with the most steps."""
    return next(iter(complete_ones(load_dir).values()), None)


def complete_ones(load_dir: Place) -> dict[tuple[str, str], Place]:
    """Return all complete checkpoints in ``load_dir`` by tag and digest, the newest first; checkpoints that were replaced come last."""
    present: list[tuple[str, Place]] = []
    replaced: list[tuple[str, Place]] = []
    for folder in load_dir.iterdir() if load_dir.is_dir() else ():
        previous = re.fullmatch(r"\.(.+)\.former", folder.name)
        if is_complete(folder) and (previous or not folder.name.startswith(".")):
            tag = previous[1] if previous else folder.name
            (replaced if previous and is_complete(load_dir / tag) else present).append((tag, folder))
    ordered = [*_newest_first(present), *_newest_first(replaced)]
    return {(tag, marker_of(folder)): place for tag, folder in ordered if (place := files_of(folder)) is not None}


def _newest_first(found: list[tuple[str, Place]]) -> list[tuple[str, Place]]:
    numbers = {tag: re.search(r"(\d+)$", tag) for tag, _ in found}
    if all(numbers.values()) and len({re.sub(r"\d+$", "", tag) for tag in numbers}) == 1:
        return sorted(found, key=lambda item: int(numbers[item[0]][1]), reverse=True)  # type: ignore[index]
    return sorted(found, key=lambda item: _age(item[1]), reverse=True)


def steps_of_newest(load_dir: Place) -> int:
    """Return the number of optimizer steps of the checkpoint that ``find_latest`` would return; -1 if there is none, or it does not say."""
    tag = read_latest(load_dir)
    found = complete_or_previous(load_dir, tag) if tag is not None else None
    found = found if found is not None else newest_complete(load_dir)
    return _age(found)[0] if found is not None else -1


def _age(folder: Place) -> tuple[int, int]:
    """Return the number of optimizer steps of a checkpoint, from its index, and the time when it was finished.

    A clock may have been set back, or be another machine's; steps only go up.
    """
    path = (files_of(folder) or folder) / INDEX_FILE
    index = whole_json(path, limit_beside(path))
    counters = index.get("counters") if isinstance(index, dict) else None
    steps = counters.get("global_steps") if isinstance(counters, dict) else None
    try:
        finished = (folder / MARKER_FILE).stat().st_mtime_ns
    except OSError:  # it is being removed
        finished = 0
    return (steps if type(steps) is int else -1), finished


def marker_of(folder: Place) -> str:
    """Return the digest of the index of a complete checkpoint; empty when it is being removed."""
    return _marker_text(folder).partition(" ")[0]


def _marker_text(folder: Place) -> str:
    path = folder / MARKER_FILE
    try:
        return read_first_line(path)
    except (OSError, ValueError) as error:
        if isinstance(path, Path) or isinstance(error, FileNotFoundError):
            return ""
        raise  # a store that does not answer says nothing about the checkpoint


def describe_newest(save_dir: Place) -> str:
    """Return a sentence on the newest complete checkpoint: in ``save_dir``, else beside it (Trainer and Accelerate make a folder for
    each).
    """
    found = newest_complete(save_dir)
    if found is None and isinstance(save_dir, Path):
        beside = (newest_complete(folder) for folder in save_dir.absolute().parent.iterdir() if folder.is_dir())
        found = max((folder for folder in beside if folder), key=_age, default=None)
    return f"the newest complete one is {found}" if found is not None else f"none is complete in {save_dir}, nor beside it"


def digest(index: str) -> str:
    """Return the digest of the text of an index, as the marker file holds it."""
    return hashlib.sha256(index.encode()).hexdigest()


def read_index(folder: Place) -> str:
    """Return the text of the index in a folder of ``files_of``, verified against the marker.

    Raises:
        CheckpointError: They cannot be read or do not agree.
    """
    path = folder / INDEX_FILE
    try:
        text = read_text(path, limit_beside(path))
        expected = read_first_line(folder / MARKER_FILE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if digest(text) != expected:
        raise CheckpointError(f"{path} is damaged: its sha256 is {digest(text)}, {MARKER_FILE} says {expected[:64]!r}")
    return text
