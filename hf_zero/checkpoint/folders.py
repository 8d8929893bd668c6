"""Folders of checkpoints: written under a hidden name, renamed when complete, found again by tag or by ``latest``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_zero.checkpoint.format import CONVERTED, INDEX_FILE, LATEST_FILE, MARKER_FILE
from hf_zero.errors import CheckpointError
from hf_zero.observe import logger, note

SCRIPT_FILE = "zero_to_fp32.py"
WRITER_FILE = "writer.json"  # in a hidden folder: who writes it
_SILENT_SECONDS = 86400.0


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


def part_of(save_dir: Path, tag: str) -> Path:
    """The hidden folder that a checkpoint is written into."""
    return save_dir / f".{tag}.part"


def _former(save_dir: Path, tag: str) -> Path:
    return save_dir / f".{tag}.former"


def begin(save_dir: Path, tag: str) -> Path:
    """Makes the empty hidden folder that a checkpoint is written into; what killed saves left in ``save_dir`` goes away."""
    part = part_of(save_dir, tag)
    clear(save_dir, tag)
    if part.exists():
        shutil.rmtree(part)
    drop_formers(save_dir)
    part.mkdir()
    _sign(part, {})
    return part


def clear(save_dir: Path, tag: str) -> None:
    """Makes ``save_dir`` ready for a save: hidden folders of killed ones go away.

    Raises:
        CheckpointError: What has the name of the tag is no checkpoint.
    """
    final = save_dir / tag
    if final.exists() and not is_complete(final) and not _is_ours(final):
        raise CheckpointError(f"{final} exists and is no checkpoint of ours; choose another tag, or move it away")
    save_dir.mkdir(parents=True, exist_ok=True)
    for other in sorted(save_dir.glob(".*.part")):
        if other.is_dir() and _is_abandoned(other):
            logger.warning("%s was left by a save that did not finish; it is removed", other)
            shutil.rmtree(other, ignore_errors=True)


def offer(save_dir: Path, tag: str, number: str, rank: int) -> None:
    """Makes the hidden folder unless another rank was first; ``read_writer`` tells who was.

    Args:
        save_dir: Folder of all checkpoints.
        tag: Of this one.
        number: Of the save; a folder of another save is in the way, and goes away.
        rank: Who offers.
    """
    part, own = part_of(save_dir, tag), save_dir / f".{tag}.{rank}.part"
    if part.exists() and read_writer(part).get("save") != number:
        shutil.rmtree(part, ignore_errors=True)
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    _sign(own, {"save": number, "leader": rank})
    try:
        os.rename(own, part)  # whole with its file, or not at all: the name may be another rank's
    except OSError:
        shutil.rmtree(own, ignore_errors=True)
        if not part.is_dir():
            raise


def _sign(part: Path, more: dict[str, Any]) -> None:
    (part / WRITER_FILE).write_text(json.dumps({**Process.own().as_json(), **more}), encoding="utf-8")


def read_writer(part: Path) -> dict[str, Any]:
    """What a hidden folder says of its writer; empty when it says nothing."""
    try:
        found = json.loads((part / WRITER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def drop_formers(save_dir: Path) -> None:
    """Removes what complete checkpoints have replaced: a save that was killed may have left it."""
    for other in save_dir.glob(".*.former"):
        if is_complete(save_dir / other.name[1 : -len(".former")]):
            shutil.rmtree(other, ignore_errors=True)


def take_back(save_dir: Path, tag: str, wanted: set[tuple[str, str]]) -> None:
    """Gives the former checkpoint of ``tag`` its name back where it is ``wanted``, by tag and digest, and the present one is not."""
    final, former = save_dir / tag, _former(save_dir, tag)
    if is_complete(former) and (tag, _marker(former)) in wanted and (not is_complete(final) or (tag, _marker(final)) not in wanted):
        if final.exists():
            shutil.rmtree(final)
        os.rename(former, final)
        sync_folder(save_dir)


def _is_ours(folder: Path) -> bool:
    """Whether an incomplete folder holds nothing but files of a checkpoint, so that it may be replaced."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else ["a file"]
    return all(name in (INDEX_FILE, MARKER_FILE) or name.endswith(".safetensors") for name in names)


def _is_abandoned(part: Path) -> bool:
    """Whether nobody writes into a hidden folder any more: its writer is dead, or on another machine and silent for a day."""
    try:
        writer = Process.of_json(read_writer(part))
    except (ValueError, KeyError, TypeError):
        writer = None
    alive = writer.is_alive() if writer is not None else None
    if alive is None:
        changes = [part.stat().st_mtime, *(found.st_mtime for found in present_files(part).values())]
        return time.time() - max(changes) > _SILENT_SECONDS
    return not alive


def present_files(folder: Path) -> dict[str, os.stat_result]:
    """What is in a folder that others write into: a file that gets another name meanwhile is left out."""
    found = {}
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            found[path.name] = path.stat()
    return found


@dataclass(frozen=True)
class Process:
    """A process that takes part in a save: where it runs, and its number there."""

    place: str
    pid: int

    @staticmethod
    def own() -> Process:
        """This process."""
        try:
            space = os.readlink("/proc/self/ns/pid")  # two containers of one host name count differently
        except OSError:
            space = ""
        return Process(f"{socket.gethostname()} {space}", os.getpid())

    def as_json(self) -> dict[str, Any]:
        """For a file or a message."""
        return {"place": self.place, "pid": self.pid}

    @staticmethod
    def of_json(data: Any) -> Process:
        """From ``as_json``."""
        return Process(str(data["place"]), int(data["pid"]))

    def is_alive(self) -> bool | None:
        """Whether it runs; None when that cannot be told from here."""
        if self.place != Process.own().place:
            return None
        try:
            os.kill(self.pid, 0)
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
        except ProcessLookupError:
            return False
        except OSError:  # another user's, or no /proc here
            return True


def write_text(path: Path, text: str) -> None:
    """Writes a small file so that its name holds either the old or the new content, never half of it."""
    hidden = path.with_name(f".{path.name}.part")
    _write_through(hidden, text)
    os.replace(hidden, path)
    sync_folder(path.parent)


def _write_through(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_script(save_dir: Path) -> None:
    """Puts ``zero_to_fp32.py`` beside the checkpoints, unless it is there."""
    script, path = Path(__file__).with_name(SCRIPT_FILE).read_bytes(), save_dir / SCRIPT_FILE
    if not path.is_file() or path.read_bytes() != script:
        write_text(path, script.decode())


def sync_folder(path: Path) -> None:
    """Forces the names inside a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(part: Path, index: str) -> None:
    """Writes index and marker into a hidden folder: it is complete from here on."""
    (part / WRITER_FILE).unlink(missing_ok=True)
    _write_through(part / INDEX_FILE, index)
    _write_through(part / MARKER_FILE, _digest(index) + "\n")
    sync_folder(part)


def publish(part: Path, save_dir: Path, tag: str, keep_former: bool = False) -> Path:
    """Gives a sealed folder its name; a checkpoint of that name stays complete under a hidden one until then, or until ``drop_formers``."""
    final, former = save_dir / tag, _former(save_dir, tag)
    if is_complete(final):
        if former.exists():
            shutil.rmtree(former)
        os.rename(final, former)
        note("checkpoint_aside", tag)
    elif final.exists():  # nobody can load it; what is complete may be the former one of this name
        shutil.rmtree(final)
    os.rename(part, final)
    sync_folder(save_dir)
    note("checkpoint_named", tag)
    if former.exists() and not keep_former:
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
    found = _complete(load_dir, check_tag(tag))
    if found is not None:
        return found
    newest = newest_complete(load_dir)
    advice = f"the newest complete one is {newest.name!r}, load it with tag={newest.name!r}" if newest else "no other is complete there"
    raise CheckpointError(f"{_problem(load_dir, tag)}; {advice}")


def find_latest(load_dir: Path) -> Path | None:
    """The folder that ``latest`` names; when that is not complete, the newest that is, with a warning; None when nothing was ever saved.

    Raises:
        CheckpointError: ``latest`` names no folder name, or what it names is incomplete and there is no other.
    """
    tag = read_latest(load_dir)
    found = _complete(load_dir, tag) if tag is not None else None
    if found is not None:
        return found
    newest = newest_complete(load_dir)
    if newest is not None:
        problem = f"{load_dir} has no file {LATEST_FILE!r}" if tag is None else f"{LATEST_FILE!r} names {tag!r}: {_problem(load_dir, tag)}"
        logger.warning("%s; the newest complete checkpoint is loaded in its place: %s", problem, newest)
        return newest
    if tag is not None:
        raise CheckpointError(f"{_problem(load_dir, tag)}; no other is complete there")
    return None


def _complete(load_dir: Path, tag: str) -> Path | None:
    # A save of the same tag that was killed between its two renames leaves the former checkpoint hidden.
    return next((folder for folder in (load_dir / tag, _former(load_dir, tag)) if is_complete(folder)), None)


def _problem(load_dir: Path, tag: str) -> str:
    folder = load_dir / tag
    if folder.is_dir():
        return f"the checkpoint {folder} is incomplete: it lacks {INDEX_FILE} or {MARKER_FILE}"
    if part_of(load_dir, tag).is_dir():
        return f"there is no checkpoint folder {folder}, only {part_of(load_dir, tag)}, whose save did not finish"
    return f"there is no checkpoint folder {folder}"


def is_complete(folder: Path) -> bool:
    """Whether a save into ``folder`` reached its end."""
    return (folder / INDEX_FILE).is_file() and (folder / MARKER_FILE).is_file()


def newest_complete(load_dir: Path) -> Path | None:
    """The complete checkpoint in ``load_dir`` with the highest number at the end of its tag, else the one finished last."""
    return next(iter(complete_ones(load_dir).values()), None)


def complete_ones(load_dir: Path) -> dict[tuple[str, str], Path]:
    """All complete checkpoints in ``load_dir`` by tag and digest, the newest first, those that were replaced behind all others."""
    present: list[tuple[str, Path]] = []
    replaced: list[tuple[str, Path]] = []
    for folder in load_dir.iterdir() if load_dir.is_dir() else ():
        former = re.fullmatch(r"\.(.+)\.former", folder.name)
        if is_complete(folder) and (former or not folder.name.startswith(".")):
            tag = former[1] if former else folder.name
            (replaced if former and is_complete(load_dir / tag) else present).append((tag, folder))
    return {(tag, _marker(folder)): folder for tag, folder in [*_newest_first(present), *_newest_first(replaced)]}


def _newest_first(found: list[tuple[str, Path]]) -> list[tuple[str, Path]]:
    numbers = {tag: re.search(r"(\d+)$", tag) for tag, _ in found}
    if all(numbers.values()) and len({re.sub(r"\d+$", "", tag) for tag in numbers}) == 1:
        return sorted(found, key=lambda item: int(numbers[item[0]][1]), reverse=True)  # type: ignore[index]
    return sorted(found, key=lambda item: (item[1] / MARKER_FILE).stat().st_mtime_ns, reverse=True)


def _marker(folder: Path) -> str:
    """The digest of the index of a complete checkpoint; empty when it is being removed."""
    try:
        return (folder / MARKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def newest_trainer_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """The ``checkpoint-N`` of a Trainer's output folder with the highest N in which everything is there; None when there is none.

    transformers' ``get_last_checkpoint`` takes the highest N, also of a folder that was being written when the run was killed. This one
    passes those over, with a warning that names them.

    Args:
        output_dir: ``TrainingArguments.output_dir``; need not exist.
    """
    numbered = {}
    for folder in Path(output_dir).glob("checkpoint-*"):
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match is not None and folder.is_dir():
            numbered[int(match[1])] = folder
    found: Path | None = None
    incomplete = []
    for number in sorted(numbered, reverse=True):
        if _is_whole_trainer_checkpoint(numbered[number]):
            found = numbered[number]
            break
        incomplete.append(numbered[number].name)
    if incomplete:
        logger.warning("%s in %s: incomplete; the newest complete checkpoint is %s", ", ".join(incomplete), output_dir, found)
    return str(found) if found is not None else None


def _is_whole_trainer_checkpoint(folder: Path) -> bool:
    """Whether what Trainer writes last is there, and if there is any sign of the engine's checkpoint, that and every rank's random state.

    Trainer's rank 0 does not wait for the random states of the others: a run resumed without one would go on, with other numbers.
    """
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        tag = read_latest(folder)
    except (OSError, ValueError, CheckpointError):
        return False
    if not isinstance(state, dict):
        return False
    if tag is None:
        return not [path for path in folder.iterdir() if path.name.startswith("global_step") or path.suffix == ".part"]
    found = _complete(folder, tag)
    return found is not None and all(zipfile.is_zipfile(folder / name) for name in _random_states(found))


def _random_states(checkpoint: Path) -> Iterator[str]:
    """Names of Trainer's files beside a checkpoint of ours; none when that was converted, or does not say how many ranks wrote it."""
    try:
        index = json.loads((checkpoint / INDEX_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    world = index.get("world") if isinstance(index, dict) and index.get("library") != CONVERTED else 0
    if world == 1:
        yield "rng_state.pth"
    elif isinstance(world, int):
        yield from (f"rng_state_{rank}.pth" for rank in range(world))  # one by one: the number may be anything


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
