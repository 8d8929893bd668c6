"""``hf-zero convert``: recognize the format of a folder, and write it in another one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from hf_zero.checkpoint.commit import folders
from hf_zero.checkpoint.convert import dcp_files, deepspeed, hugging_face, native, torch_dcp
from hf_zero.checkpoint.convert.source import Progress, Source
from hf_zero.checkpoint.format.names import LATEST_UNIVERSAL_FILE
from hf_zero.errors import CheckpointError
from hf_zero.observe import warn_once
from hf_zero.system.object_store import ObjectPath, Place

TARGETS = ("hf_zero", "hf", "dcp")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Conversion:
    """Request of a conversion.

    Attributes:
        source: A folder of checkpoints or of one tag, of ours or DeepSpeed's; a model folder; a torch.distributed.checkpoint folder. In an
            object store: checkpoints of ours.
        target: Folder to write; for ``hf_zero`` also a place in an object store.
        to: One of ``TARGETS``; None: ``hf`` from a checkpoint of ours, else ``hf_zero``.
        tag: Checkpoint of the source, and name of the checkpoint that is written for ``hf_zero``; None: the one that ``latest`` names.
        dtype: Type of the weights written for ``hf``.
        max_shard_bytes: Size of one file written for ``hf``.
        trust_pickle: The user allows pickles.
        quiet: Show no progress.
    """

    source: Place
    target: Place
    to: str | None = None
    tag: str | None = None
    dtype: str = "fp32"
    max_shard_bytes: int = 5 * 10**9
    trust_pickle: bool = False
    quiet: bool = False


def convert(wanted: Conversion) -> str:
    """Carry out a conversion; return a line that names the files written.

    Raises:
        CheckpointError: The source is not understood, is a pickle that is not trusted, or the target cannot be written.
    """
    if _same(wanted.target, wanted.source):
        raise CheckpointError(f"source and target are the same folder {wanted.source}; choose another target")
    ours, source = _open(wanted)
    to = wanted.to or ("hf" if ours else "hf_zero")
    try:
        with _progress(source, to, wanted) as progress:
            return _write(wanted, to, source, progress)
    except OSError as error:
        raise CheckpointError(f"cannot write {wanted.target}: {error}") from error


def _write(wanted: Conversion, to: str, source: Source, progress: Progress) -> str:
    if to == "hf_zero":
        folder = native.write_checkpoint(source, wanted.target, wanted.tag, progress)
        _copy_beside(wanted, source)
        return f"{source.what} -> checkpoint {folder}" + ("" if source.optimizer is not None else " (weights only: load_module_only=True)")
    if not isinstance(wanted.target, Path):
        raise CheckpointError(f"{wanted.target} cannot be written as {to}: only --to hf_zero writes into an object store; give a folder")
    if to == "hf":
        beside = [wanted.source, wanted.source.parent] if isinstance(wanted.source, Path) and wanted.source.is_dir() else []
        dtype = DTYPES[wanted.dtype]
        files = hugging_face.write_hugging_face(source, wanted.target, dtype, wanted.max_shard_bytes, beside, progress)
        done = f"{source.what} -> {len(files)} file(s) of {wanted.dtype} weights in {wanted.target}"
        missing = "; no config.json is beside the checkpoint: copy it and the tokenizer from the base model, or from_pretrained fails"
        return done if (wanted.target / "config.json").is_file() else done + missing
    torch_dcp.write_dcp(source, wanted.target, progress)
    return f"{source.what} -> torch.distributed.checkpoint folder {wanted.target}"


def _copy_beside(wanted: Conversion, source: Source) -> None:
    """Copy the files that Trainer and Accelerate keep beside a checkpoint, from folder to folder."""
    if source.optimizer is None or isinstance(wanted.source, Path) and folders.is_deepspeed(wanted.source):
        return
    if isinstance(wanted.source, Path) and isinstance(wanted.target, Path):
        hugging_face.copy_beside(wanted.source, wanted.target)
    else:
        warn_once("files of Trainer and Accelerate beside the checkpoint are not copied from or to an object store: copy them yourself")


def _open(wanted: Conversion) -> tuple[bool, Source]:
    """Return whether the source is a checkpoint of ours, and the source."""
    folder, trust = wanted.source, wanted.trust_pickle
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; give the folder of a checkpoint or of a Hugging Face model")
    complete = folders.files_of(folder)
    if complete is not None:
        return True, native.read_checkpoint(complete)
    if isinstance(folder, ObjectPath):
        return True, _open_in_store(folder, wanted.tag)
    if folders.is_deepspeed(folder):
        return False, deepspeed.read_deepspeed(folder, trust)
    if dcp_files.is_dcp(folder):
        return False, torch_dcp.read_dcp(folder)
    latest = folders.read_latest(folder)
    for tag in [wanted.tag] if wanted.tag else [latest, folders.read_latest(folder, LATEST_UNIVERSAL_FILE)]:
        if tag is not None and (folder / tag).is_dir() and folders.is_deepspeed(folder / tag):
            return False, deepspeed.read_deepspeed(folder / tag, trust)
    if latest is not None or folders.newest_complete(folder) is not None:  # a Trainer's folder has a model's files beside them
        found = folders.find(folder, wanted.tag) if wanted.tag is not None else folders.find_latest(folder)
        if found is not None:
            return True, native.read_checkpoint(found)
    if hugging_face.is_hugging_face(folder):
        return False, hugging_face.read_hugging_face(folder, trust)
    raise CheckpointError(
        f"{folder} is not in a known format. Known are: a checkpoint of hf_zero (index.json, or latest), one of DeepSpeed "
        "(*_optim_states.pt, or latest), a torch.distributed.checkpoint folder (.metadata and *.distcp), a Hugging Face "
        "model (model.safetensors, pytorch_model.bin, or an index)"
    )


def _open_in_store(folder: ObjectPath, tag: str | None) -> Source:
    """Return the checkpoint of ``tag``, or of ``latest``, in an object store."""
    found = folders.find(folder, tag) if tag is not None else folders.find_latest(folder)
    if found is None:
        raise CheckpointError(f"{folder} holds no complete checkpoint of hf_zero; of other formats copy the files into a folder first")
    return native.read_checkpoint(found)


def _same(first: Place, second: Place) -> bool:
    return first.resolve() == second.resolve() if isinstance(first, Path) and isinstance(second, Path) else first == second


@contextmanager
def _progress(source: Source, to: str, wanted: Conversion) -> Iterator[Progress]:
    """Show a bar on standard error that counts bytes, while the context is open."""
    total = 0
    for param in source.params:
        rows = [param.value.row] if to == "hf" else [param.value.row, *param.states.values()]
        total += sum(_written_bytes(row.numel(), row.dtype, to, wanted) for row in rows)
    total += sum(math.prod(buffer.shape) * buffer.row.dtype.itemsize for buffer in source.buffers)
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"to {to}", disable=wanted.quiet or None) as bar:
        yield lambda count: bar.update(count) and None


def _written_bytes(numel: int, dtype: torch.dtype, to: str, wanted: Conversion) -> int:
    written = DTYPES[wanted.dtype] if to == "hf" and dtype.is_floating_point else dtype
    return numel * written.itemsize
