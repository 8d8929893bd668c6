"""Hugging Face folders: read as weights without optimizer, written as sharded safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hf_zero import own_files
from hf_zero.checkpoint.convert.pickles import load_pickle, require_trust
from hf_zero.checkpoint.convert.source import Progress, Source, SourceParam, SourceTensor, row_of, tensor_source
from hf_zero.checkpoint.model_files import split_by_size
from hf_zero.checkpoint.tensor_file import Elsewhere, Entry, write_tensor_file
from hf_zero.errors import CheckpointError

_SAFE, _PICKLE = "model.safetensors", "pytorch_model.bin"
_INDEX = ".index.json"
# What makes a folder of weights a model that from_pretrained takes.
_COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "chat_template*", "preprocessor_config.json", "processor_config.json",
    "image_processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


def is_hugging_face(folder: Path) -> bool:
    """Whether ``folder`` holds a model's weights under Hugging Face's names."""
    return any((folder / name).is_file() for name in (_SAFE, _SAFE + _INDEX, _PICKLE, _PICKLE + _INDEX))


def read_hugging_face(folder: Path, trust_pickle: bool) -> Source:
    """Opens the weights of a folder; they stay mapped files.

    Raises:
        CheckpointError: A file is missing or broken, or is a pickle and pickles are not allowed.
    """
    for name, read in ((_SAFE, _read_safe), (_PICKLE, _read_pickle)):
        files = _files(folder, name)
        if files:
            if name == _PICKLE:
                require_trust(trust_pickle, files[0])
            params: dict[str, SourceParam] = {}
            for path in files:
                params.update({tensor.name: SourceParam(tensor, tensor.row.dtype) for tensor in read(path)})
            return Source(what=f"the model in {folder}", params=tuple(params[name] for name in sorted(params))).require_any()
    raise CheckpointError(f"{folder} has neither {_SAFE} nor {_PICKLE}, nor an index of either")


def _files(folder: Path, name: str) -> list[Path]:
    index = folder / (name + _INDEX)
    if not index.is_file():
        return [folder / name] if (folder / name).is_file() else []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weights: {error!r}") from error
    for file in names:
        if Path(file).name != file or not (folder / file).is_file():
            raise CheckpointError(f"{index} lists {file!r}, which is not in {folder}")
    return [folder / file for file in names]


def _read_safe(path: Path) -> Iterator[SourceTensor]:
    try:
        opened = safe_open(path, framework="pt")
        names = list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    for name in names:
        tensor = opened.get_tensor(name)  # mapped, not read
        yield SourceTensor(name, tuple(tensor.shape), _lazy(opened, name, tensor.numel(), tensor.dtype))


def _lazy(opened: Any, name: str, numel: int, dtype: torch.dtype) -> Elsewhere:
    return row_of(lambda: opened.get_tensor(name), numel, dtype)


def _read_pickle(path: Path) -> Iterator[SourceTensor]:
    data = load_pickle(path)
    if not isinstance(data, Mapping):
        raise CheckpointError(f"{path} holds no state dict but a {type(data).__name__}")
    for name, tensor in data.items():
        if isinstance(tensor, torch.Tensor):
            yield tensor_source(str(name), tensor)


# -- writing ------------------------------------------------------------------------------------------------------------


def write_hugging_face(source: Source, folder: Path, dtype: torch.dtype, limit: int, beside: list[Path], progress: Progress) -> list[Path]:
    """Writes the weights as safetensors of at most ``limit`` bytes of data each, a window of 4 MiB at a time.

    Args:
        source: What to write; tied parameters once, as Hugging Face does.
        folder: Made when it does not exist.
        dtype: Type of all floating-point tensors.
        limit: Bytes of one file; a larger tensor gets a file of its own.
        beside: Folders to copy configuration and tokenizer from.
        progress: Told bytes.

    Returns:
        The files of weights.

    Raises:
        OSError: The file system refuses.
    """
    tensors = [param.value for param in source.params] + list(source.buffers)
    entries = [Entry(tensor.name, *_cast(tensor, dtype)) for tensor in tensors]
    shards = split_by_size(entries, limit)
    folder.mkdir(parents=True, exist_ok=True)
    own_files.sweep(folder)
    count = len(shards)
    names = [_SAFE] if count == 1 else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for name, members in zip(names, shards, strict=True):
        hidden = folder / own_files.hidden_name(name)
        try:
            write_tensor_file(hidden, members, progress)
            hidden.replace(folder / name)
        except BaseException:
            own_files.remove_file(hidden)
            raise
    if count > 1:
        weight_map = {entry.name: name for name, members in zip(names, shards, strict=True) for entry in members}
        total = sum(entry.nbytes for entry in entries)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        own_files.write_text(folder / (_SAFE + _INDEX), text + "\n")
    for place in beside:
        _copy_companions(place, folder, dtype)
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


def _copy_companions(place: Path, folder: Path, dtype: torch.dtype) -> None:
    for pattern in _COMPANIONS:
        for path in place.glob(pattern):
            if path.is_file() and not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
    config = folder / "config.json"
    if config.is_file():
        data = json.loads(config.read_text(encoding="utf-8"))
        for key in ("dtype", "torch_dtype"):
            if isinstance(data.get(key), str):
                data[key] = str(dtype).removeprefix("torch.")
        own_files.write_text(config, json.dumps(data, indent=2) + "\n")
