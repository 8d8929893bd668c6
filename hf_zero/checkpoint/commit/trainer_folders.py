"""The checkpoints of a Trainer's output folder: ``checkpoint-N``, with Trainer's own state beside the engine's."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from hf_zero.checkpoint.commit.folders import complete_or_previous, read_latest
from hf_zero.checkpoint.format.names import CONVERTED, INDEX_FILE
from hf_zero.errors import CheckpointError
from hf_zero.observe import logger
from hf_zero.system.reading import whole_json
from hf_zero.system.text_file import limit_beside, opened_file

_STATE_BYTES = 64 << 20  # of trainer_state.json, whose history grows with each record


def newest_trainer_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Find the complete ``checkpoint-N`` with the highest N in a Trainer's output folder; None when there is none.

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
    if not isinstance(whole_json(folder / "trainer_state.json", _STATE_BYTES), dict):
        return False
    try:
        tag = read_latest(folder)
    except CheckpointError:
        return False
    if tag is None:
        return not [path for path in folder.iterdir() if path.name.startswith("global_step") or path.suffix == ".part"]
    found = complete_or_previous(folder, tag)
    return found is not None and all(_is_archive(folder / name) for name in _random_states(found))


def _is_archive(path: Path) -> bool:
    """Whether a file is whole, as ``torch.save`` writes it."""
    try:
        with opened_file(path) as file:
            return zipfile.is_zipfile(file)
    except OSError:
        return False


def _random_states(checkpoint: Path) -> Iterator[str]:
    """Names of Trainer's files beside a checkpoint of ours; none when that was converted, or does not say how many ranks wrote it."""
    path = checkpoint / INDEX_FILE
    index = whole_json(path, limit_beside(path))
    if index is None:
        return
    world = index.get("world") if isinstance(index, dict) and index.get("library") != CONVERTED else 0
    if world == 1:
        yield "rng_state.pth"
    elif isinstance(world, int):
        yield from (f"rng_state_{rank}.pth" for rank in range(world))  # one by one: the number may be anything
