"""Small files that belong to a model or a checkpoint, copied to the folder of a conversion as they are.

[Note: links] A cache of the Hub keeps a model as links into ``blobs`` of the same repository; those are followed. A link to anywhere
else is not: the folder would decide which file of this machine ends up in what the user gives away.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_zero.errors import CheckpointError
from hf_zero.observe import logger
from hf_zero.system import own_files
from hf_zero.system.reading import read_json

# What makes a folder of weights a model that from_pretrained takes.
_OF_A_MODEL = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "chat_template*", "preprocessor_config.json", "processor_config.json",
    "image_processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


def copy_companions(place: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy configuration and tokenizer of the model in ``place``; the copied configuration names ``dtype``.

    Raises:
        CheckpointError: ``config.json`` is no JSON object.
    """
    _copy_all([path for pattern in _OF_A_MODEL for path in sorted(place.glob(pattern))], folder)
    config, source = folder / "config.json", place / "config.json"
    if not config.is_file() and not _may_be_copied(source):
        return
    read = config if config.is_file() else source
    data = read_json(read, CheckpointError)
    if not isinstance(data, dict):
        raise CheckpointError(f"{read} is a {type(data).__name__}, expected a JSON object")
    for key in ("dtype", "torch_dtype"):
        if isinstance(data.get(key), str):
            data[key] = str(dtype).removeprefix("torch.")
    own_files.write_text(config, json.dumps(data, indent=2) + "\n")


def copy_beside(place: Path, folder: Path) -> None:
    """Copy the files that Trainer and Accelerate keep beside the engine's checkpoint: their state, random states, configuration,
    tokenizer.
    """
    found = sorted(place.iterdir())
    _copy_all([path for path in found if not path.name.startswith((".", "zero_to_")) and path.suffix != ".distcp"], folder)


def _copy_all(paths: Sequence[Path], folder: Path) -> None:
    """Copy files; of names that differ only in upper and lower case copy the first, because not every file system distinguishes them."""
    known: dict[str, Path] = {}
    for path in paths:
        first = known.setdefault(path.name.casefold(), path)
        if first.name == path.name:
            _copy(path, folder)
        elif path.is_file():
            logger.warning("%s is not copied: its name differs from that of %s only in upper and lower case", path, first.name)


def _copy(path: Path, folder: Path) -> None:
    """Copies a file that is not in ``folder`` already; see [Note: links]."""
    if path.is_file() and not os.path.lexists(folder / path.name) and _may_be_copied(path):
        own_files.copy_file(path.resolve(), folder / path.name)


def _may_be_copied(path: Path) -> bool:
    """Return whether there is something that is no link to elsewhere; says so where it is one."""
    if not path.exists():
        return False
    if not stays_inside(path):
        logger.warning(
            "%s is a link to %s, outside of its folder: it is not copied. Copy it yourself if it belongs there", path, path.resolve()
        )
        return False
    return True


def stays_inside(path: Path) -> bool:
    """Return whether the target of ``path`` is in its folder, or in the blobs of the repository that the folder is a snapshot of."""
    folder, target = path.parent.resolve(), path.resolve()
    if target.is_relative_to(folder):
        return True
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    return snapshots is not None and snapshots.parent.name.startswith("models--") and target.is_relative_to(snapshots.parent / "blobs")
