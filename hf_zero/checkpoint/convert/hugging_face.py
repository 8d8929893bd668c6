"""Read Hugging Face model folders as weights without optimizer, and write such folders with safetensors files.

Small files that belong to a model (configuration, tokenizer) are copied unchanged to the folder of a conversion.

[Note: links] The Hub's cache stores a model as symbolic links into the folder ``blobs`` of the same repository; such links are followed.
Other links are not followed, because an untrusted folder could otherwise copy any file of this machine into a result that the user
publishes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hf_zero.checkpoint.convert import source
from hf_zero.checkpoint.convert.pickles import Inert
from hf_zero.checkpoint.convert.source import Progress, Source, SourceParam, SourceTensor, row_of, tensor_source
from hf_zero.checkpoint.convert.torch_files import load_torch_file, require_trust
from hf_zero.checkpoint.files.rows import Elsewhere, Entry
from hf_zero.checkpoint.files.tensor_writer import write_tensor_file
from hf_zero.checkpoint.model.model_files import former_files, split_by_size
from hf_zero.errors import CheckpointError
from hf_zero.observe import log_rank0, logger
from hf_zero.system import own_files
from hf_zero.system.folder import Folder
from hf_zero.system.reading import read_json, reading, shown

# Patterns of the files, besides weights and config.json, that from_pretrained reads.
_OF_A_MODEL = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "chat_template*", "preprocessor_config.json", "processor_config.json",
    "image_processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
_SAFE, _PICKLE = "model.safetensors", "pytorch_model.bin"
_INDEX = ".index.json"


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


def is_hugging_face(folder: Path) -> bool:
    """Return whether ``folder`` has weights under Hugging Face's file names."""
    return any((folder / name).is_file() for name in (_SAFE, _SAFE + _INDEX, _PICKLE, _PICKLE + _INDEX))


def read_hugging_face(folder: Path, trust_pickle: bool) -> Source:
    """Open the weights of a folder as a conversion's source; its tensors are views of mapped files.

    Raises:
        CheckpointError: A file is missing or damaged, or it is a pickle and pickles are not allowed.
    """
    for name, read in ((_SAFE, _read_safe), (_PICKLE, _read_pickle)):
        files = _files(folder, name)
        for path in [*files, folder / (name + _INDEX)] if files else ():
            if path.is_symlink() and not stays_inside(path):
                raise CheckpointError(
                    f"{path} is a link to {path.resolve()}, outside of its folder, and is not followed, because an untrusted folder could "
                    "read any file of this machine. Replace the link by the file"
                )
        if files:
            if name == _PICKLE:
                require_trust(trust_pickle, next(iter(files)))
            with reading(folder, CheckpointError):
                return _source(folder, files, read)
    raise CheckpointError(f"{folder} has neither {_SAFE} nor {_PICKLE}, nor an index of one of them")


def _source(folder: Path, files: Mapping[Path, set[str]], read: Callable[[Path], Iterator[SourceTensor]]) -> Source:
    params: dict[str, SourceParam] = {}
    for path, expected in files.items():
        found = {tensor.name: SourceParam(tensor, tensor.row.dtype) for tensor in read(path)}
        twice, missing = found.keys() & params.keys(), expected - found.keys()
        if twice or missing:
            problem = f"{min(twice)!r} is in another file too" if twice else f"it lacks {min(missing)!r}, which the index lists there"
            raise CheckpointError(f"{path}: {problem}. Download or copy the folder again")
        params.update(found)
    return Source(what=f"the model in {folder}", params=tuple(params[name] for name in sorted(params))).require_any()


def _files(folder: Path, name: str) -> dict[Path, set[str]]:
    """Return the files with the weights, each with the names of the tensors that the index lists for it."""
    index = folder / (name + _INDEX)
    if not index.is_file():
        return {folder / name: set()} if (folder / name).is_file() else {}
    files: dict[Path, set[str]] = {}
    with reading(index, CheckpointError):
        weights = source.mapping(source.mapping(read_json(index, CheckpointError), "the index")["weight_map"], "weight_map")
        for tensor, file in weights.items():
            if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
                raise CheckpointError(f"{index} lists {shown(file)}, which is not in {folder}")
            files.setdefault(folder / file, set()).add(tensor)
    return dict(sorted(files.items()))


def _read_safe(path: Path) -> Iterator[SourceTensor]:
    with reading(path, CheckpointError):
        opened = safe_open(path, framework="pt")  # checks sizes and offsets against the file
        for name in list(opened.keys()):
            tensor = opened.get_tensor(name)  # a view of the mapped file; reads nothing yet
            yield SourceTensor(name, tuple(tensor.shape), _lazy(opened, name, tensor.numel(), tensor.dtype))


def _lazy(opened: Any, name: str, numel: int, dtype: torch.dtype) -> Elsewhere:
    return row_of(lambda: opened.get_tensor(name), numel, dtype)


def _read_pickle(path: Path) -> Iterator[SourceTensor]:
    data = load_torch_file(path)
    with reading(path, CheckpointError):
        for name, tensor in source.mapping(data, "the state dict in it").items():
            if isinstance(tensor, torch.Tensor):
                yield tensor_source(str(name), tensor)
            elif isinstance(tensor, Inert):
                raise CheckpointError(f"{path}: {name} is {tensor!r}, expected a tensor")
            else:
                log_rank0("%s: %s is not a tensor, so it is not converted", path, name)


# -- writing ------------------------------------------------------------------------------------------------------------


def write_hugging_face(source: Source, folder: Path, dtype: torch.dtype, limit: int, beside: list[Path], progress: Progress) -> list[Path]:
    """Write the weights as safetensors files of at most ``limit`` bytes of data each, a window of 4 MiB at a time.

    Files of a model that was in the folder before are removed at the end: ``from_pretrained`` prefers one file to an index.

    Args:
        source: Model to write; a tied parameter is written once, as in Hugging Face's files.
        folder: Folder to write to; created if it does not exist.
        dtype: Dtype of all floating-point parameters; buffers keep their dtypes.
        limit: Largest number of data bytes per file; a larger tensor gets a file of its own.
        beside: Folders from which configuration and tokenizer are copied.
        progress: Function that is called with the number of bytes of each window written.

    Returns:
        The paths of the weight files.

    Raises:
        OSError: A file cannot be created or written.
    """
    entries = [Entry(param.value.name, *_cast(param.value, dtype)) for param in source.params]
    entries += [Entry(buffer.name, *_cast(buffer, buffer.row.dtype)) for buffer in source.buffers]
    shards = split_by_size(entries, limit)
    own_files.make_folders(folder)
    own_files.sweep(folder)
    count = len(shards)
    names = [_SAFE] if count == 1 else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    with Folder(folder) as opened:
        former = former_files(opened, _SAFE)
        for name, members in zip(names, shards, strict=True):
            hidden = own_files.hidden_name(name)
            try:
                write_tensor_file(folder / hidden, members, progress, folder=opened)
                opened.move(hidden, name)
            except BaseException:
                own_files.remove_file(folder / hidden, opened)
                raise
        if count > 1:
            weight_map = {entry.name: name for name, members in zip(names, shards, strict=True) for entry in members}
            total = sum(entry.nbytes for entry in entries)
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            own_files.write_text(folder / (_SAFE + _INDEX), text + "\n", opened)
        for name in former - {*names, _SAFE + _INDEX if count > 1 else ""}:
            own_files.remove_file(folder / name, opened)
    for place in beside:
        copy_companions(place, folder, dtype)
    return [folder / name for name in names]


def _cast(tensor: SourceTensor, dtype: torch.dtype) -> tuple[torch.dtype, tuple[int, ...], tuple[Elsewhere, ...]]:
    row = tensor.row
    if not row.dtype.is_floating_point or row.dtype == dtype:
        return row.dtype, tensor.shape, (row,)

    def read(first: int, target: torch.Tensor) -> None:
        window = torch.empty(target.numel(), dtype=row.dtype)
        row.read(first, window)
        target.copy_(window)

    return dtype, tensor.shape, (Elsewhere(dtype, row.numel(), read, row.write),)
