"""Gather the unsharded weights of a model unit by unit, into a state dict on rank 0 or directly into safetensors files.

If rank 0 has too little memory for the state dict, its tensors are mapped from files.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint.commit import agreement
from hf_zero.checkpoint.format.names import refuse_sparse
from hf_zero.checkpoint.model.model_files import MAX_SHARD_SIZE, ModelFiles, PlannedTensor
from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.core.units.divided import require_own_parts
from hf_zero.core.units.marks import TpShard, is_wrapped, paste, tp_shard_of
from hf_zero.core.units.unit import Unit, find_unit, full_shape
from hf_zero.errors import CheckpointError, UnsupportedError
from hf_zero.memory.budget import free_memory
from hf_zero.observe import logger, warn_once
from hf_zero.pipeline.buffers import share_buffers
from hf_zero.system import own_files
from hf_zero.system.folder import Folder
from hf_zero.system.sizes import bytes_of, gib
from hf_zero.tensor_parallel.apply import mark_buffers

SPILL_VARIABLE = "HF_ZERO_SPILL_DIR"


class HostCopies:
    """A factory of host copies of tensors; each copy has a storage of its own, in memory or in a mapped file.

    [Note: copies in a file] ``Trainer.save_model`` and ``accelerator.get_state_dict`` need the whole model as one dict on the rank that
    writes. If the model is larger than half of the free memory there, or if the variable HF_ZERO_SPILL_DIR names a folder, the tensors
    are mapped from files whose names have been removed. The operating system writes their pages to disk when it needs the memory, and
    frees each file together with its last tensor.

    Args:
        nbytes: Total size of all copies in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._folder = _spill_folder(nbytes)

    def take(self, value: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of ``value`` on the host.

        Raises:
            CheckpointError: The disk is too full for the copy. The space is reserved before the file is mapped, because a full disk would
                    otherwise kill the process (SIGBUS) at a write to the mapped memory.
        """
        if self._folder is None or value.numel() == 0:
            return value.detach().to("cpu", copy=True).contiguous()
        nbytes = value.numel() * value.element_size()
        try:
            flat = _mapped(self._folder, nbytes, value.numel(), value.dtype)
        except OSError as error:
            raise CheckpointError(
                f"a tensor of {gib(nbytes)} cannot be kept in a file in {self._folder}: {error}. The whole model takes "
                f"{gib(self._nbytes)}; free disk space, or set {SPILL_VARIABLE} to a folder with enough space"
            ) from error
        return flat.view(value.shape).copy_(value.detach())


def _mapped(folder: str, nbytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a (numel,) tensor mapped from a new file; its disk space is reserved and its name is removed already."""
    own_files.make_folders(Path(folder))
    with Folder(Path(folder)) as opened:
        name = own_files.hidden_name("spilled")
        descriptor = opened.create(name, 0o600, reads=True)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, nbytes)
            else:
                os.ftruncate(descriptor, nbytes)
            pages = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(descriptor)
            own_files.remove_file(opened.path / name, opened)
    return torch.frombuffer(pages, dtype=dtype, count=numel)


def _spill_folder(nbytes: int) -> str | None:
    """Return the folder in which to keep ``nbytes`` bytes of copies, or None to keep them in memory."""
    asked = os.environ.get(SPILL_VARIABLE)
    if asked:
        return asked
    memory = free_memory()
    if memory is None or nbytes <= memory.nbytes // 2:
        return None
    folder = tempfile.gettempdir()
    room = shutil.disk_usage(folder).free
    taken = f"the whole model takes {gib(nbytes)} of {gib(memory.nbytes)} free memory on this rank"
    if room < nbytes:
        logger.warning("%s, and %s has only %s free; set %s to a folder with enough space", taken, folder, gib(room), SPILL_VARIABLE)
        return None
    logger.info("%s: its tensors are stored in files", taken)
    return folder


def consolidated_state_dict(
    module: nn.Module,
    collectives: Collectives,
    exclude_frozen_parameters: bool = False,
    kept: Container[str] = (),
    wanted_here: bool = False,
) -> dict[str, torch.Tensor] | None:
    """Return the state dict of ``module`` with unsharded parameters in the training dtype, on the host; collective.

    One unit at a time is gathered. Each entry has a storage of its own; tied parameters share one tensor. If the dict would fill the
    host's memory, its tensors are mapped from files, see [Note: copies in a file].

    Args:
        module: The user's module; its parameters may be placeholders.
        collectives: Collectives of the data-parallel ranks.
        exclude_frozen_parameters: Leave out parameters that need no gradient (a PEFT base model).
        kept: Names of parameters that are never left out.
        wanted_here: Whether this rank needs the dict although it is not the first (it writes files on a node's own disk); ranks may differ.

    Returns:
        The dict on the first rank of the data-parallel and the model axis; None on every other rank. Where data parallelism is the only
        axis, the dict also on ranks with ``wanted_here``; elsewhere a warning says that they get none.

    Raises:
        CheckpointError: The disk is too full for the dict; raised on every rank.
    """
    mark_buffers(module, collectives.topology)  # they are joined like parameters
    entries = _entries(module, exclude_frozen_parameters, kept)
    values = list({id(value): value for value in entries.values()}.values())
    axes, collectives, model = collectives.topology, collectives.data, model_axis_of(collectives)
    keeps = collectives.rank == 0 and (model is None or model.rank == 0)
    alone = model is None and axes.all_parts is None and axes.pipe is None  # then each rank sees every unit whole
    if wanted_here and not keeps:
        keeps = alone
        if not alone:
            logger.warning(
                "save_on_each_node: the model is divided by tensor, expert or pipeline parallelism, so only rank 0 gets the whole weights, "
                "and the other nodes have no model files. Copy the folder from the node of rank 0"
            )
    host = HostCopies(sum(_planned("", value).nbytes for value in values)) if keeps else None
    copies: dict[int, torch.Tensor] = {}

    def take(value: torch.Tensor, whole: torch.Tensor) -> None:
        if host is not None:
            copies[id(value)] = host.take(whole)

    share_buffers(module)
    failure = _gather_all(take, values, collectives, model, here=keeps)
    if alone:
        agreement.quickly(collectives, "gathering the whole model", lambda: _raise(failure))
    else:
        _on_first_of_both(collectives, model, "gathering the whole model", lambda: _raise(failure))
    # Like a module's, the dict takes attributes: mmengine sets _metadata on it, as on DeepSpeed's.
    return OrderedDict((name, copies[id(value)]) for name, value in entries.items()) if keeps else None


def _entries(module: nn.Module, exclude_frozen_parameters: bool, kept: Container[str] = ()) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; tied parameters are the same object.

    A parameter that a model's own ``state_dict`` leaves out is added under its name in ``named_parameters``. Scripts expect it there,
    because DeepSpeed gathers module by module (trl's models with a value head leave out all parameters that peft has wrapped).

    Raises:
        UnsupportedError: A script has replaced a parameter of which this rank held a part.
        CheckpointError: There are sparse buffers.
    """
    for inner in module.modules():
        require_own_parts(inner)
    named = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, torch.Tensor)}
    refuse_sparse(named)
    present = set(map(id, named.values()))
    named.update((name, param) for name, param in module.named_parameters() if id(param) not in present)
    return {name: value for name, value in named.items() if not (exclude_frozen_parameters and _is_frozen(value)) or name in kept}


def _planned(name: str, value: torch.Tensor) -> PlannedTensor:
    part = tp_shard_of(value)
    return PlannedTensor(name, value.dtype, tuple(part.full_shape if part is not None else full_shape(value)))


def model_axis_of(collectives: Collectives) -> Collectives | None:
    """Return the collectives of the model axis, the ranks that hold one copy of each layer together; None if there is one such rank."""
    return open_collectives(collectives.topology.model) if collectives.topology.model is not None else None


def expert_axis_of(collectives: Collectives) -> Collectives | None:
    """Return the collectives of the ranks that together hold all experts of all pipeline stages; None if each rank holds all experts."""
    parts = collectives.topology.all_parts
    return open_collectives(parts) if parts is not None else None


def joined_experts(local: torch.Tensor, part: TpShard, axis: Collectives, everywhere: bool = False) -> torch.Tensor | None:
    """Gather all experts of a parameter, on the first rank of ``axis`` or on each of its ranks; collective over ``axis``.

    Args:
        local: This rank's experts.
        part: Index ranges of this rank's experts in the whole parameter.
        axis: Ranks that together hold all experts.
        everywhere: Whether every rank of the axis receives all experts, not only the first.

        Returns:
            The whole parameter; None on a rank that does not receive it.
    """
    everyones = axis.gather_objects(part.ranges, "ranges of experts")
    flat, width = local.detach().reshape(-1), part.full_shape.numel() // part.full_shape[part.dim]
    takes, empty = everywhere or axis.rank == 0, flat.new_empty(0)
    incoming = [flat.new_empty(sum(piece.numel for piece in pieces) * width if takes else 0) for pieces in everyones]
    outgoing = [flat if everywhere or rank == 0 else empty for rank in range(axis.world)]
    axis.exchange_parts(outgoing, incoming, "all experts").wait()
    if not takes:
        return None
    incoming[axis.rank] = flat
    whole = torch.empty(part.full_shape, dtype=local.dtype, device=local.device)
    for pieces, values in zip(everyones, incoming, strict=True):
        paste(whole, values, part.dim, pieces)
    return whole


def joined(local: torch.Tensor, part: TpShard | None, model: Collectives | None) -> torch.Tensor:
    """Gather the tensor-parallel shards of a parameter and return the whole parameter; collective over the model axis.

    Args:
        local: This rank's shard, or the whole parameter if ``part`` is None.
        part: Index ranges of the shard in the whole parameter.
        model: Collectives of the model axis; None without tensor parallelism.
    """
    if part is None or model is None:
        return local
    ranges = model.gather_objects([(piece.start, piece.stop) for piece in part.ranges], "tensor-parallel shards")
    whole = torch.empty(part.full_shape, dtype=local.dtype, device=local.device)
    for pieces, values in zip(ranges, _everyones(local.detach().contiguous(), part, ranges, model), strict=True):
        if pieces:
            indices = torch.cat([torch.arange(start, stop, device=local.device) for start, stop in pieces])
            whole.index_copy_(part.dim, indices, values)
    return whole


def _everyones(local: torch.Tensor, part: TpShard, ranges: list[Any], model: Collectives) -> list[torch.Tensor]:
    """Return each model-axis rank's shard of a parameter; collective.

    A rank of another pipeline stage holds no elements, so its shard is empty.
    """
    shape = list(part.full_shape)
    sizes = [sum(stop - start for start, stop in pieces) for pieces in ranges]
    found = [local.new_empty([*shape[: part.dim], size, *shape[part.dim + 1 :]]) for size in sizes]
    if len(set(sizes)) == 1:
        together = torch.empty((model.world, *local.shape), dtype=local.dtype, device=local.device)
        model.all_gather(together.view(-1), local.view(-1), "whole parameter").wait()
        return list(together)
    model.exchange_parts([local.view(-1)] * model.world, [values.view(-1) for values in found], "whole parameter").wait()
    found[model.rank] = local
    return found


def _outside(values: list[torch.Tensor], in_units: list[tuple[Unit, list[torch.Tensor]]]) -> list[torch.Tensor]:
    """Return the tensors of ``values`` that no unit holds."""
    held = {id(value) for _, members in in_units for value in members}
    return [value for value in values if id(value) not in held]


def _by_unit(values: list[torch.Tensor]) -> list[tuple[Unit, list[torch.Tensor]]]:
    """Return the units that hold ``values``, each with its tensors, in the order of first appearance, which is the same on every rank."""
    found: dict[int, tuple[Unit, list[torch.Tensor]]] = {}
    for value in values:
        owner = find_unit(value)
        if owner is not None:
            found.setdefault(id(owner[0]), (owner[0], []))[1].append(value)
    return list(found.values())


def _is_frozen(value: torch.Tensor) -> bool:
    return isinstance(value, nn.Parameter) and not value.requires_grad


def safetensors_name(filename: str) -> str:
    """Return ``filename`` with the ending ``.safetensors``; ``pytorch_model.bin`` becomes ``model.safetensors`` as in transformers."""
    stem, _, ending = filename.rpartition(".")
    if ending == "safetensors":
        return filename
    if ending not in ("bin", "pt", "pth"):
        return f"{filename}.safetensors"
    return "model.safetensors" if stem == "pytorch_model" else f"{stem}.safetensors"


def write_model_files(
    module: nn.Module,
    collectives: Collectives,
    folder: Path,
    filename: str,
    exclude_frozen_parameters: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> Path:
    """Write unsharded weights in the training dtype as safetensors files that ``from_pretrained`` reads; collective.

    No rank holds more than its shards and one unsharded unit: rank 0 writes each unit to its place in the file as soon as it is gathered.
    A tied parameter is stored once, under its first name, as in Hugging Face's files.

    Args:
        module: The user's module.
        collectives: Collectives of the data-parallel ranks.
        folder: Folder of the files; created if it does not exist.
        filename: Name of the file; ``pytorch_model.bin`` becomes ``model.safetensors``, and ``.bin`` or ``.pt`` becomes ``.safetensors``.
        exclude_frozen_parameters: Leave out parameters that need no gradient.
        max_shard_size: Bytes per file; a larger model becomes ``model-00001-of-0000N.safetensors`` and an index.

    Returns:
        Path of the file; a model in several files has no file of this name.

    Raises:
        CheckpointError: A file cannot be written; raised on every rank, and files of an earlier save do not change.
        ConfigError: ``max_shard_size`` is not a size.
        UnsupportedError: A weight is of a class that safetensors does not know (torchao).
    """
    name = safetensors_name(filename)
    if name != filename:
        warn_once(f"save_16bit_model: the weights are written as {name} in safetensors format, not as {filename}, because that is a pickle")
    limit = bytes_of(max_shard_size, "max_shard_size", bare=True)
    mark_buffers(module, collectives.topology)  # they are joined like parameters
    names: dict[int, str] = {}  # the first name of each tensor
    values: list[torch.Tensor] = []
    for key, value in _entries(module, exclude_frozen_parameters).items():
        if is_wrapped(value):
            raise UnsupportedError(
                f"{key} is of class {type(value).__name__}, which safetensors cannot hold: save the adapter alone (save_model, or "
                "save_pretrained of a PeftModel), or pass exclude_frozen_parameters=True"
            )
        if id(value) not in names:
            names[id(value)] = key
            values.append(value)
    what = f"saving the model to {folder / name}"
    planned = [_planned(names[id(value)], value) for value in values]
    collectives, model = collectives.data, model_axis_of(collectives)
    made: list[ModelFiles] = []
    _on_first_of_both(collectives, model, what, lambda: made.append(ModelFiles(folder, name, planned, limit)))
    try:
        share_buffers(module)
        failure = _gather_all(lambda value, whole: made[0].write(names[id(value)], whole) if made else None, values, collectives, model)
        _on_first_of_both(collectives, model, what, lambda: _finish(made[0], failure))
    except BaseException:
        if made:
            made[0].abort()
        raise
    return folder / name


def _on_first_of_both(collectives: Collectives, model: Collectives | None, what: str, work: Callable[[], None]) -> None:
    """Run ``work`` on the first rank of both axes, data-parallel and model; raise its error on every rank. Collective."""
    agreement.on_first(collectives, what, work if model is None else lambda: agreement.on_first(model, what, work))


def _gather_all(
    work: Callable[[torch.Tensor, torch.Tensor], None],
    values: list[torch.Tensor],
    collectives: Collectives,
    model: Collectives | None,
    here: bool = False,
) -> Exception | None:
    """Gather all values, unit by unit; call ``work`` with each value and its whole tensor on the first data-parallel rank. Collective.

    Without a model axis ``work`` is also called on the ranks with ``here``.

    After ``work`` has raised an error, gather the remaining units nevertheless, because the other ranks take part in these collectives;
    then return the error. Return None if there was none.
    """
    failure: Exception | None = None
    expert = expert_axis_of(collectives)
    takes = collectives.rank == 0 or (here and model is None)

    def each(members: list[torch.Tensor]) -> None:
        nonlocal failure
        for value in members:
            part = tp_shard_of(value)
            if expert is not None and part is not None and part.expert:
                # The expert axis that contains rank 0 gathers; its ranks are the first ``expert_places`` ones.
                whole = joined_experts(value, part, expert) if collectives.rank < collectives.topology.expert_places else None
            else:
                whole = joined(value, part, model) if takes else None
            try:
                if failure is None and whole is not None and takes:
                    work(value, whole)
            except Exception as error:
                failure = error

    if collectives.topology.pipe is not None:  # stages have different units, all unsharded: every rank follows the model's order
        each(values)
        return failure
    in_units = _by_unit(values)
    for unit, members in in_units:
        with unit.unsharded():
            each(members)
    each(_outside(values, in_units))
    return failure


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _finish(files: ModelFiles, failure: Exception | None) -> None:
    _raise(failure)
    files.commit()
