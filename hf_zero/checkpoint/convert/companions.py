"""Copy small files that belong to a model or checkpoint (configuration, tokenizer) unchanged to the folder of a conversion.

[Note: links] The Hub's cache stores a model as symbolic links into the folder ``blobs`` of the same repository; such links are followed.
Other links are not followed, because an untrusted folder could otherwise copy any file of this machine into a result that the user
publishes.
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

# Patterns of the files, besides weights and config.json, that from_pretrained reads.
_OF_A_MODEL = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "chat_template*", "preprocessor_config.json", "processor_config.json",
    "image_processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


def copy_companions(place: Path, folder: Path, dtype: torch.dtype) -> None:
    """Copy configuration and tokenizer of the model from ``place`` to ``folder``; a dtype in the copied configuration becomes ``dtype``.

    Raises:
        CheckpointError: ``config.json`` is not a JSON object.
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
    """Copy the files of Trainer and Accelerate beside an engine's checkpoint: their state, random states, configuration, tokenizer."""
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
    """Copy a file to ``folder`` unless it is there already or is a link to elsewhere; see [Note: links]."""
    if path.is_file() and not os.path.lexists(folder / path.name) and _may_be_copied(path):
        own_files.copy_file(path.resolve(), folder / path.name)


def _may_be_copied(path: Path) -> bool:
    """Return whether ``path`` exists and is not a link to elsewhere; log a warning if it is one."""
    if not path.exists():
        return False
    if not stays_inside(path):
        logger.warning(
            "%s is a link to %s, outside of its folder, and is not copied. Copy it yourself if it belongs there", path, path.resolve()
        )
        return False
    return True


def stays_inside(path: Path) -> bool:
    """Return whether the target of ``path`` is in its folder, or in the blobs of the repository whose snapshot the folder is."""
    folder, target = path.parent.resolve(), path.resolve()
    if target.is_relative_to(folder):
        return True
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    return snapshots is not None and snapshots.parent.name.startswith("models--") and target.is_relative_to(snapshots.parent / "blobs")
