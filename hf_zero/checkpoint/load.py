"""Loading at any number of ranks and any stage: each rank plans the ranges it needs and reads them; updated shards are all-gathered."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_zero.checkpoint.commit import agreement, folders, node_local
from hf_zero.checkpoint.files.catalog import Catalog, Located
from hf_zero.checkpoint.files.tensor_reader import Copy, RangeReader
from hf_zero.checkpoint.format.index import Index
from hf_zero.checkpoint.format.names import CONVERTED, DTYPES, INDEX_FILE, values_file
from hf_zero.checkpoint.format.plausible import check_alike, check_values, has_known_values, missing_settings
from hf_zero.checkpoint.format.tp_shards import SavedTpShard
from hf_zero.checkpoint.format.values import Decoder
from hf_zero.checkpoint.state.averages import restore_averages
from hf_zero.checkpoint.state.module_entries import load_own, own_loaders
from hf_zero.checkpoint.state.optimizer_state import GroupsPlan, OptimizerPlan
from hf_zero.checkpoint.state.param_groups import for_present_groups, sources_of_groups
from hf_zero.checkpoint.state.param_states import ParamStatesPlan
from hf_zero.checkpoint.state.rank_states import restore_rank_states
from hf_zero.checkpoint.state.training_state import Loaded, TrainingState, values_of
from hf_zero.core.averages import AveragedWeights
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.optimizer.whole_tensors import WholeTensorOptimizer
from hf_zero.core.units.layout import FROZEN
from hf_zero.core.units.marks import is_elsewhere, is_of_library, is_wrapped
from hf_zero.core.units.names import bare_name, named_params
from hf_zero.core.units.unit import Unit
from hf_zero.core.units.values import all_gather_updated, publish, write_back
from hf_zero.errors import CheckpointError
from hf_zero.observe import log_rank0, span, warn_once
from hf_zero.system.object_store import Place, place_of, raw
from hf_zero.system.secrets import without_credentials

_SHOWN_NAMES = 5


@dataclass(frozen=True)
class LoadRequest:
    """Request to load a checkpoint.

    Attributes:
        load_dir: Folder of all checkpoints of a run, or its URL in an object store.
        tag: Name of one; None is the one ``latest`` names.
        strict: Every parameter and buffer of the model must be there, and no others.
        optimizer_states: Restore moments, param groups and loss scale.
        scheduler_states: Restore the engine's scheduler.
        module_only: Restore nothing but the module.
        masters_from_fp32: Without optimizer states, take masters from the saved fp32 values; else from the training type.
        custom: Called with ``src=`` (whole state dict) and ``dst=`` (the module) in place of loading parameters by name.
        node_local: Every node has a disk of its own, and ``load_dir`` is this rank's.
        may_unpickle: Read pickled values of the client state.
        else_from: Local folder that is looked at where ``load_dir``, in an object store, has none; empty for no such folder.
        folder: The complete checkpoint itself; if it is not empty, nothing is looked for.
    """

    load_dir: str
    tag: str | None = None
    strict: bool = True
    optimizer_states: bool = True
    scheduler_states: bool = True
    module_only: bool = False
    masters_from_fp32: bool = True
    custom: Callable[..., Any] | None = None
    node_local: bool = False
    may_unpickle: bool = False
    else_from: str = ""
    folder: str = ""


def load_checkpoint(state: TrainingState, request: LoadRequest) -> Loaded | None:
    """Restore ``state`` from a checkpoint; collective.

    Everything is checked before anything is changed, but for the bytes of the tensors: when those are damaged, the error
    comes when some are loaded already, and the engine refuses to go on (``TrainingState.changing``).

    Returns:
        Results for the caller, or None when no tag was given and there is no checkpoint.

    Raises:
        CheckpointError: On every rank, with the same text, naming file or parameter.
    """
    net = state.everyone
    with span("load_checkpoint", without_credentials(request.load_dir)):
        load_dir = without_credentials(request.load_dir)
        what = f"loading a checkpoint from {load_dir}"
        if request.node_local:
            place = place_of(request.load_dir)
            if not isinstance(place, Path):
                raise CheckpointError(
                    f"{what}: checkpoint.use_node_local_storage is true, but all nodes share this storage; set it to false"
                )
            here = Path(request.folder) if request.folder else node_local.find(net, what, place, request.tag)
            found = (raw(here), "") if here is not None else None
        else:
            found = agreement.on_first(net, what, lambda: _find(request))
        if found is None:
            log_rank0("nothing loaded: %s has no file 'latest' and no complete checkpoint, and no tag was given", load_dir)
            return None
        folder, text = place_of(found[0]), found[1]
        what = f"loading {folder}"
        if request.optimizer_states and not request.module_only and request.custom is None:
            _let_join(state, folder, text, what)
        box: list[_Plan] = []
        agreement.on_all(net, what, lambda: box.append(_Plan(state, request, folder, text or folders.read_index(folder))))
        plan = box[0]
        if request.node_local:
            agreement.on_all(net, what, lambda: node_local.check_parts(Path(found[0]), plan.index.files, plan.files()))
        state.changing(str(folder))
        agreement.on_all(net, what, plan.read)
        if request.custom is not None:
            _load_custom(state, plan, request.custom, what)
        _all_gather_updated(state)
        for averages in state.averages:
            agreement.on_all(net, what, lambda averages=averages: plan.read_averages(averages))  # type: ignore[misc]
        state.changing("")
        return Loaded(folder, plan.client_state, None if request.module_only else plan.index.counters, plan.reader.bytes_read)


def _let_join(state: TrainingState, folder: Place, text: str, what: str) -> None:
    """Make units of parameters that no unit trains yet and whose optimizer states the checkpoint holds; collective.

    They were frozen at ``initialize`` or added later, and a script resumes before it unfreezes them, or before their first gradient.
    """

    def find() -> list[str]:
        if not state.joinable:
            return []
        catalog = Catalog(Index.from_json(text or folders.read_index(folder), str(folder / INDEX_FILE)))
        return [name for name in state.joinable if (found := catalog.find(name)) is not None and found.trained]

    by_rank = agreement.on_all(state.everyone, what, find)
    shared = [name for name in by_rank[0] if all(name in names for names in by_rank)]  # none where pipeline stages have different ones
    if shared:
        state.join(shared)


def load_averages(state: TrainingState, folder: Place, averages: AveragedWeights) -> None:
    """Load into ``averages``, made after ``folder`` was loaded, the averages that the folder holds; collective.

    Raises:
        CheckpointError: On every rank, with the same text, naming the file.
    """

    def read() -> None:
        index = Index.from_json(folders.read_index(folder), str(folder / INDEX_FILE))
        restore_averages(state, averages, Catalog(index), RangeReader(folder, index.files))

    agreement.on_all(state.everyone, f"loading averages from {folder}", read)


def read_client_state(folder: Place, rank: int, may_unpickle: bool) -> Any:
    """Return the client state that ``rank`` saved in a complete checkpoint; local.

    Raises:
        CheckpointError: The checkpoint is damaged, or the value is a pickle that ``may_unpickle`` does not permit.
    """
    index = Index.from_json(folders.read_index(folder), str(folder / INDEX_FILE))
    return _client_state(index, RangeReader(folder, index.files), rank, may_unpickle)


def _client_state(index: Index, reader: RangeReader, rank: int, may_unpickle: bool) -> Any:
    """Return the client state that ``rank`` saved; rank 0's if both are the same, or if there was no such rank."""
    own = index.client_states.get(str(rank))
    return _decoder(reader, 0 if own is None else rank, may_unpickle).decode(index.client_state if own is None else own)


def _decoder(reader: RangeReader, rank: int, may_unpickle: bool) -> Decoder:
    """Return a decoder of values whose tensors ``rank`` has written."""
    return Decoder(lambda name: reader.whole(values_file(rank), name), str(reader.folder / INDEX_FILE), may_unpickle)


def _find(request: LoadRequest) -> tuple[str, str] | None:
    """Return folder and index text, on rank 0; sizes of all files are checked here, once."""
    load_dir = place_of(request.load_dir)
    if request.else_from and not folders.complete_ones(load_dir) and folders.complete_ones(Path(request.else_from)):
        load_dir = Path(request.else_from)  # saved before there was a URL
    if request.folder:
        folder = folders.files_of(place_of(request.folder))
    else:
        folder = folders.find(load_dir, request.tag) if request.tag is not None else folders.find_latest(load_dir)
    if folder is None:
        folders.require_no_mistaken_folder(load_dir)
        return None
    text = folders.read_index(folder)
    RangeReader(folder, Index.from_json(text, str(folder / INDEX_FILE)).files).check_sizes()
    return raw(folder), text


class _Plan:
    """All reads of one rank. Making it changes nothing; ``read`` carries it out.

    Raises:
        CheckpointError: Names, shapes or groups do not fit.
    """

    def __init__(self, state: TrainingState, request: LoadRequest, folder: Place, text: str) -> None:
        self.state = state
        self.request = request
        self.index = Index.from_json(text, str(folder / INDEX_FILE))
        self.reader = RangeReader(folder, self.index.files)
        self.catalog = Catalog(self.index)
        decoder = _decoder(self.reader, 0, request.may_unpickle)
        self.client_state = _client_state(self.index, self.reader, state.everyone.rank, request.may_unpickle)
        self._decoder = decoder
        self._aliases: dict[str, list[str]] = {}  # further names of tied parameters and buffers in this model
        for alias, name in state.aliases().items():
            self._aliases.setdefault(name, []).append(alias)
        self._saved_buffers = self._find_buffers()
        self._own_loaders = own_loaders(state.module)
        self._copies: list[Copy] = []
        self._after: list[tuple[torch.Tensor, torch.Tensor]] = []  # tensors whose elements do not lie in a row, and their copies
        if request.strict:
            self._check_names()
        if request.custom is None:
            for unit in state.units:
                self._plan_unit(unit)
            for name, param in state.loose_params():
                self._plan_param(name, param)
        self._plan_buffers()
        self._scheduler = self._plan_scheduler()
        wants_optimizer = request.optimizer_states and not request.module_only and state.optimizer is not None
        self._optimizer: GroupsPlan | None = None
        if wants_optimizer and isinstance(state.optimizer, WholeTensorOptimizer):
            self._optimizer = ParamStatesPlan(state.optimizer, self.catalog, decoder, self.reader)
        elif wants_optimizer and state.optimizer is not None:
            self._optimizer = OptimizerPlan(state.optimizer, state.tensor, self.catalog, decoder)
        if self._optimizer is not None:
            self._warn_of_left(self._optimizer.optimizer)

    # -- planning

    def _check_names(self) -> None:
        excluded = {bare_name(self.catalog.canonical(name)) for name in self.index.excluded}
        aliases, used = set(map(bare_name, self.state.aliases())), {name for _, name in self._saved_buffers.values()}
        model = {self.catalog.canonical(self._name(name)) for name, _ in named_params(self.state.module)}
        buffers = set(self.state.buffers())
        missing = sorted(name for name in model - self.catalog.names if bare_name(name) not in excluded)
        missing += sorted(buffers - self._saved_buffers.keys())
        spare = sorted(name for name in self.catalog.names - model - used if bare_name(name) not in aliases)
        spare += sorted(name for name in self.index.buffers.keys() - used if bare_name(name) not in aliases)
        # Rank 0 saves extra states, and other libraries may not have them.
        if self.state.everyone.rank == 0 and self.index.library != CONVERTED:
            own = {f"the extra state of {bare_name(name) or 'the model'}" for name, _ in self.state.modules_with_extra_state()}
            kept = {f"the extra state of {bare_name(name) or 'the model'}" for name in self.index.extra_state}
            missing, spare = missing + sorted(own - kept), spare + sorted(kept - own)
        problems = []
        if missing:
            problems.append(f"the checkpoint lacks {_some(missing)} of this model")
        if spare:
            problems.append(f"this model lacks {_some(spare)} of the checkpoint")
        if problems:
            raise CheckpointError(f"{'; '.join(problems)}. Load into the model that was saved, or pass load_module_strict=False")

    def _warn_of_left(self, optimizer: ShardedOptimizer) -> None:
        """Warn of saved optimizer states whose parameters are frozen now."""
        trained = {slot.name for unit in optimizer.units for slot in unit.layout.slots if slot.group != FROZEN}
        named = [name for name, param in named_params(self.state.module) if name not in trained and not is_elsewhere(param)]
        left = [name for name in named if (found := self.catalog.find(self._name(name))) is not None and found.trained]
        if left:
            warn_once(
                f"the checkpoint holds optimizer states of {len(left)} parameters that this engine does not train ({left[0]}, ...): they "
                "are not loaded, and checkpoints saved from now on lack them"
            )

    def _find_buffers(self) -> dict[str, tuple[str, str]]:
        """Return file and saved name of each buffer of this model that the checkpoint has under any of the buffer's names."""
        # A model of Hugging Face that was converted does not tell buffers from parameters.
        places = {record.name: (record.file, record.name) for record in self.index.loose}
        places |= {name: (file, name) for name, file in self.index.buffers.items()}
        saved = {bare_name(alias): places[name] for alias, name in self.index.aliases.items() if name in places}
        saved |= {bare_name(name): place for name, place in places.items()}
        found = {}
        for name in self.state.buffers():
            known = [bare_name(one) for one in (name, *self._aliases.get(name, ())) if bare_name(one) in saved]
            if known:
                found[name] = saved[known[0]]
        return found

    def _name(self, name: str) -> str:
        """Return the name by which the checkpoint knows a parameter, out of its names in this model."""
        return next((other for other in (name, *self._aliases.get(name, ())) if self.catalog.find(other) is not None), name)

    def _located(self, name: str, wanted: SavedTpShard, param: torch.Tensor | None) -> Located | None:
        found = self.catalog.find(self._name(name))
        if found is not None and param is not None and (is_of_library(param) or is_wrapped(param)):
            raise CheckpointError(
                f"parameter {name} is quantized in this model, and the checkpoint has values of it: quantized weights come from "
                "from_pretrained alone. Load it into the model without quantization_config"
            )
        if found is not None and found.shape != wanted.shape:
            raise CheckpointError(f"parameter {name} has shape {wanted.shape} in this model and {found.shape} in the checkpoint")
        return found

    def _plan_unit(self, unit: Unit) -> None:
        target = values_of(unit)
        for slot, param in zip(unit.layout.slots, unit.params, strict=True):
            wanted = self.state.tensor.tp_shard_of(slot.name, slot.shape)
            found = self._located(slot.name, wanted, param)
            part = slot.range.intersect(unit.owned)
            if found is not None and part.numel:
                place = target[part.start - unit.owned.start : part.stop - unit.owned.start]
                self._copies += self.catalog.copies(found, None, wanted, part.start - slot.offset, place)

    def _plan_param(self, name: str, param: nn.Parameter) -> None:
        wanted = self.state.tensor.tp_shard_of(name, param.shape)
        found = self._located(name, wanted, param)
        if found is not None:
            self._copies += self.catalog.copies(found, None, wanted, 0, self._flat(param.data))

    def _plan_buffers(self) -> None:
        for name, buffer in self.state.buffers().items():
            wanted, found = self.state.tensor.tp_shard_of(name, buffer.shape), self.catalog.find(self._name(name))
            if found is None and name not in self._saved_buffers:
                continue
            file, saved = self._saved_buffers.get(name, ("", name))
            shape = found.shape if found is not None else self.reader.record(file, saved).shape
            if shape != wanted.shape:
                if self._loads_itself(name):
                    continue
                raise CheckpointError(f"buffer {name} has shape {wanted.shape} in this model and {shape} in the checkpoint")
            target = self._flat(buffer.data)
            if found is not None:  # saved in parts
                self._copies += self.catalog.copies(found, None, wanted, 0, target)
                continue
            runs = wanted.runs(0, target.numel())
            self._copies += [Copy(file, saved, run.whole, target[run.local : run.local + run.numel]) for run in runs]

    def _loads_itself(self, name: str) -> bool:
        """Return whether a module that loads in its own way receives the buffer or entry ``name``."""
        return any(not loader or name.startswith(f"{loader}.") for loader in self._own_loaders)

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` as a 1D tensor that can be written to, through a copy when its elements are not contiguous."""
        if tensor.is_contiguous():
            return tensor.view(-1)
        copy = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        self._after.append((tensor, copy))
        return copy

    def _plan_scheduler(self) -> Any:
        """Return the saved state of the scheduler where it is wanted; None when there is none."""
        request, scheduler = self.request, self.state.scheduler
        if not request.scheduler_states or request.module_only:
            return None
        sources, groups = self._sources_of_groups()
        if scheduler is None:
            if self.index.scheduler is not None:
                log_rank0("%s holds the state of a scheduler, but this engine has none: it is not loaded", self.reader.folder)
            elif request.optimizer_states and sources != list(range(groups)):
                warn_once(
                    f"the param groups of this optimizer are the saved groups {sources} of {groups}: hyper-parameters follow their "
                    "parameters, but a scheduler whose state the script loads itself keeps its rates by position (base_lrs of torch's). "
                    "Use the groups that were saved, or give the scheduler to initialize()"
                )
            return None
        saved = self._decoder.decode(self.index.scheduler)
        if saved is None:
            log_rank0("%s holds no scheduler state; the scheduler of this engine keeps its present step", self.reader.folder)
        present = scheduler.state_dict()
        if has_known_values(scheduler):
            check_values(saved, "scheduler")
        saved = for_present_groups(saved, present, sources, groups)
        if has_known_values(scheduler):
            check_alike(present, saved, "scheduler")
        lost = sorted(missing_settings(present, saved)) if isinstance(saved, dict) else []
        if lost:
            raise CheckpointError(f"the checkpoint lacks {', '.join(lost)} of the scheduler")
        return saved

    def _sources_of_groups(self) -> tuple[list[int | None], int]:
        """Return the saved group of each present param group, and the number of saved groups; none without an optimizer."""
        if self.state.optimizer is None or self.index.optimizer is None:
            return [], 0
        groups = self.index.optimizer.groups
        return sources_of_groups(self.state.optimizer, groups, self.catalog), len(groups)

    # -- carrying out

    def files(self) -> set[str]:
        """Return names of the files that hold the model and the optimizer state of this rank."""
        states = self._optimizer.files() if self._optimizer is not None else set()
        return states | {copy.file for copy in self._copies + (self._optimizer.copies if self._optimizer is not None else [])}

    def read(self) -> None:
        """Read all that this rank needs, and install it; local.

        Raises:
            CheckpointError: A file is damaged.
        """
        request, state = self.request, self.state
        self.reader.read(self._copies + (self._optimizer.copies if self._optimizer is not None else []))
        for tensor, copy in self._after:
            tensor.copy_(copy.view(tensor.shape))
        self._load_own()
        extra = {bare_name(name): value for name, value in self.index.extra_state.items()}
        for name, module in state.modules_with_extra_state():
            if bare_name(name) in extra:
                module.set_extra_state(self._decoder.decode(extra[bare_name(name)]))
        if self._optimizer is not None:
            self._optimizer.apply()
            self._optimizer.optimizer.state_store.broken = ""
            restore_rank_states(self._optimizer.optimizer, self.catalog, self.reader, state.holders.rank, state.holders.world)
            if self.index.scaler:  # a conversion may have none
                state.scaler.load_state_dict(self._decoder.decode(self.index.scaler))
            if self.index.spikes is not None and state.spikes is not None:
                state.spikes.load_state_dict(self._decoder.decode(self.index.spikes))
        elif not request.masters_from_fp32:
            _round_masters(state.units)
        if self._scheduler is not None and state.scheduler is not None:
            state.scheduler.load_state_dict(self._scheduler)

    def _load_own(self) -> None:
        """Hand buffers and entries to the modules that load in their own way, see [Note: entries of modules]; local.

        Raises:
            CheckpointError: A module refuses a value, or lacks an entry.
        """
        device = self.state.everyone.topology.device
        values = {bare_name(name): self._decoder.decode(entry) for name, entry in self.index.entries.items()}
        values = {name: entry.to(device) if isinstance(entry, torch.Tensor) else entry for name, entry in values.items()}
        left = [name for name in values if not self._loads_itself(name)]
        if left:
            warn_once(f"the checkpoint holds {_some(left)}, which a module added to its state dict: no module of this model loads it")
        buffers = self.state.buffers()
        for name, (file, saved) in self._saved_buffers.items():
            if self._loads_itself(name):
                value = self.reader.whole(file, saved).to(buffers[name].device)
                values |= {bare_name(one): value for one in (name, *self._aliases.get(name, ()))}
        known = {bare_name(name) for name, _ in named_params(self.state.module, remove_duplicate=False)} | set(map(bare_name, buffers))
        for name, module in self._own_loaders.items():
            load_own(bare_name(name), module, values, known, self.request.strict and bool(self.index.entries))

    def read_averages(self, averages: AveragedWeights) -> None:
        """Read averages of the weights where they are requested, else start them again from the loaded weights; local."""
        if self.request.optimizer_states and not self.request.module_only and self.request.custom is None:
            restore_averages(self.state, averages, self.catalog, self.reader)
        else:
            averages.start_over()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers, whole, on the host, under all their names; each rank reads everything."""
        tensors: dict[str, torch.Tensor] = {}
        copies: list[Copy] = []
        for name in sorted(self.catalog.names):
            found = self.catalog.find(name)
            if found is not None:
                dtype = DTYPES[self.catalog.dtype(found) or "F32"]
                flat = torch.empty(math.prod(found.shape), dtype=dtype)
                copies += self.catalog.copies(found, None, found.whole, 0, flat)
                tensors[name] = flat.view(found.shape)
        self.reader.read(copies)
        tensors.update({name: self.reader.whole(file, name) for name, file in self.index.buffers.items()})
        tensors.update({alias: tensors[name] for alias, name in self.index.aliases.items() if name in tensors})
        return tensors


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


def _round_masters(units: list[Unit]) -> None:
    for unit in units:
        if unit.master is not None and unit.master is not unit.shard:
            unit.master.copy_(unit.master.to(unit.shard.dtype))


def _load_custom(state: TrainingState, plan: _Plan, custom: Callable[..., Any], what: str) -> None:
    """Hands the whole state dict to the caller's function, with every parameter gathered; collective."""
    with ExitStack() as stack, torch.no_grad():
        for unit in state.units:
            stack.enter_context(unit.unsharded())
        agreement.on_all(state.everyone, what, lambda: custom(src=plan.state_dict(), dst=state.module) and None)
        for unit in state.units:
            write_back(unit)


def _all_gather_updated(state: TrainingState) -> None:
    """Write training-type copies from the masters, and all-gather whole buffers where units stay whole; collective."""
    for unit in state.units:
        publish([unit])
        pending = all_gather_updated(unit)
        if pending is not None:
            pending.wait()
