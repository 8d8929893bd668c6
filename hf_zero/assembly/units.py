"""Divide a model into blocks and units: which parameters are unsharded together, in which dtype, and in which storage.

Parameters that are trained for the first time after ``initialize``, unfrozen or of modules added later, get units of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from weakref import ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hf_zero.assembly.kept_types import kept_types
from hf_zero.assembly.packed_weights import packed_weights, pieces_of, prepare_packed, prepare_wrapped
from hf_zero.assembly.policies import QuantizedUnits
from hf_zero.comm.collectives import Collectives
from hf_zero.core.optimizer.segments import group_of_params
from hf_zero.core.optimizer.sharded import ShardedOptimizer
from hf_zero.core.schedule.block import Block
from hf_zero.core.schedule.gradients import UnitGradients
from hf_zero.core.schedule.reducer import Reducer
from hf_zero.core.schedule.runtime import Runtime
from hf_zero.core.stages import StagePolicy
from hf_zero.core.step.agreement import equal_values, facts_of, require_same_model, require_same_optimizer
from hf_zero.core.step.buffers import without_repeats
from hf_zero.core.step.precision import KeptTypes, PrecisionPolicy, cast_and_move, cast_param
from hf_zero.core.step.trained_set import Joining
from hf_zero.core.units.grouping import BlockSpec, NamedParam, build_blocks, build_unit, enclosing, lowest_modules
from hf_zero.core.units.layout import FROZEN
from hf_zero.core.units.marks import (
    ParamListener,
    float8_type,
    is_elsewhere,
    is_expert,
    is_of_library,
    is_packed,
    is_wrapped,
    stages_of,
    tp_shard_of,
)
from hf_zero.core.units.names import named_buffers, named_params
from hf_zero.core.units.registration import register_loose
from hf_zero.core.units.shard import ShardStorage, strided_parts
from hf_zero.core.units.unit import Unit, UnitSpec, find_unit, full_shape
from hf_zero.errors import StateError, UnsupportedError
from hf_zero.native.quantize import can_quantize
from hf_zero.observe import warn_once
from hf_zero.offload.policy import Offloading


@dataclass
class UnitBuilder:
    """Builder of the units of one engine.

    Attributes:
        module: The user's module.
        stage: The ZeRO stage.
        precision: Element types.
        collectives: The data-parallel axis.
        offloading: Object that chooses the storage of shards.
        leaves: Names of the modules that are one block each.
        listener: Object that is notified of changes to the parameters at stage 3.
        quantized: The kinds of units whose collectives send quantized values.
        node: Network of the ranks that keep secondary copies; None without them.
        experts: The ranks that hold the same experts and shard them among themselves; None if all ranks hold all experts.
        everyone: All ranks of the engine; None if the data-parallel axis has all of them.
        kept_patterns: Names of parameters and buffers that stay in fp32, see ``kept_types``.
        groups: Param group of each parameter of the optimizer by id, frozen ones included.
    """

    module: nn.Module
    stage: StagePolicy
    precision: PrecisionPolicy
    collectives: Collectives
    offloading: Offloading
    leaves: set[str]
    listener: ParamListener
    quantized: QuantizedUnits
    node: Collectives | None = None
    experts: Collectives | None = None
    everyone: Collectives | None = None
    kept_patterns: Sequence[str] | None = None
    groups: dict[int, int] = field(default_factory=dict)

    def build(self, inner: torch.optim.Optimizer | None, whole_tensors: bool) -> tuple[Block, list[Block]]:
        """Return the root and the other blocks, in the model's order; collective.

        Args:
            inner: The optimizer over the model's parameters; None for an engine that only runs forward.
            whole_tensors: Whether the optimizer needs parameters in their own shapes.

        Raises:
            StateError: The ranks have different models or optimizers, or a parameter has no shape yet.
        """
        _refuse_scripted(self.module)
        _refuse_lazy(self.module)
        device = self.collectives.topology.device
        kept = self.kept()
        packed = packed_weights(self.module)
        divided = prepare_wrapped(self.module, self.stage.parameters_sharded, self.collectives.world)
        members = self._members(inner)
        extent = "whole tensors" if whole_tensors else "flat shards"
        notes = [f"an optimizer that updates {extent}", *facts_of(inner)] if inner is not None else ["no optimizer"]
        if self.everyone is not None and self.everyone is not self.collectives.data:
            require_same_optimizer(notes, self.everyone)
        require_same_model(self.module, members, self.collectives.data, notes)
        prepare_packed(packed, self.stage.parameters_sharded, self.collectives)
        _refuse_complex(members)
        if not self.collectives.pretended:
            _refuse_shared_memory(self.module, members)
        in_units = [member for member in members if self._belongs_in_unit(member) or id(member.param) in divided]
        specs = build_blocks(self.module, in_units, self.leaves)
        sizes = [sum(map(self._numel, spec.members)) for spec in specs]
        trained = sum(self._numel(member) for member in in_units if member.group != FROZEN)
        itemsize = self._mean_itemsize(in_units, kept)
        self.offloading.prepare(inner, trained, sum(sizes) - trained, max(sizes, default=0), _passing_bytes(in_units), itemsize)
        root, *blocks = [self.block(spec, kept) for spec in specs]
        taken = {id(member.param) for member in in_units}
        for member in members:
            if id(member.param) not in taken and find_unit(member.param) is None:
                cast_param(member.param, self.precision, device, kept)
        cast_and_move(self.module, self.precision, device, kept)
        loose = {member.name: member.param for member in members if id(member.param) not in taken}
        for name, param in loose.items():
            if not (is_elsewhere(param) or is_expert(param)):
                register_loose(param, self.collectives.data, name)
        self._take_first_values({name: param for name, param in loose.items() if find_unit(param) is None})
        if self.stage.parameters_sharded:
            for param in self.module.parameters():
                if find_unit(param) is None:
                    value = param.detach()
                    self.listener.registered(param, param.shape, value if is_wrapped(param) else value.reshape(-1), self.collectives)
        self._sync_buffers()
        return root, blocks

    def _numel(self, member: NamedParam) -> int:
        """Return the number of elements of a parameter over all ranks; for an expert it includes the experts of other ranks."""
        numel = full_shape(member.param).numel()
        return numel * (self.collectives.world // self.experts.world) if self.experts is not None and is_expert(member.param) else numel

    def _mean_itemsize(self, members: Sequence[NamedParam], kept: KeptTypes) -> float:
        """Return the average bytes per element of ``members`` in their units; for packed weights the bytes of their codes count."""
        sizes = [(self._numel(member), self.precision.unit_dtype(member.param, kept).itemsize) for member in members]
        return sum(numel * itemsize for numel, itemsize in sizes) / max(1, sum(numel for numel, _ in sizes))

    def _members(self, inner: torch.optim.Optimizer | None) -> list[NamedParam]:
        named = list(named_params(self.module))
        names = {id(param): name for name, param in named}
        self.groups = group_of_params(inner, names) if inner is not None else {}
        return [NamedParam(name, param, self._group(param)) for name, param in named]

    def _group(self, param: nn.Parameter) -> int:
        return self.groups.get(id(param), FROZEN) if param.requires_grad else FROZEN

    def _belongs_in_unit(self, member: NamedParam) -> bool:
        """Return whether a parameter gets a unit: always if trainable; if frozen, when parameters are sharded or ``zero.Init`` has sharded
        it.

        Parameters of another pipeline stage are in no unit of this one, and parameters that only another engine trains stay in its units.
        """
        if member.group == FROZEN and self._is_trained_elsewhere(member.param):
            return False
        if is_wrapped(member.param) or not (member.param.is_floating_point() or is_packed(member.param)) or is_elsewhere(member.param):
            return False
        return member.group != FROZEN or self.stage.parameters_sharded or find_unit(member.param) is not None

    def _is_trained_elsewhere(self, param: nn.Parameter) -> bool:
        owner = find_unit(param)
        training = owner[0].belongs_to() if owner is not None and owner[0].belongs_to is not None else None
        trains = training is not None and training.trains and training.module is not self.module
        return trains and owner is not None and owner[0].trainable and param.requires_grad

    def kept(self) -> KeptTypes:
        """Return the dtypes of the tensors that the cast of the model skips."""
        return kept_types(self.module, self.precision, self.kept_patterns)

    def block(self, spec: BlockSpec, kept: KeptTypes) -> Block:
        """Make a block with one unit per element type and kind; a single unit has the block's name. Collective."""
        kinds: dict[tuple[bool, bool, bool, bool, torch.dtype | None, torch.dtype, tuple[int, ...]], list[NamedParam]] = {}
        for member in spec.members:
            param, pieces, frozen = member.param, pieces_of(member), member.group == FROZEN
            held = pieces[0].param
            split = self.quantized.any(frozen) and self._is_split(param)
            dtype = self.precision.unit_dtype(held, kept)
            kind = is_expert(param), frozen, is_of_library(held), split, self._sent_as(param, dtype), dtype, stages_of(param)
            kinds.setdefault(kind, []).extend(pieces)
        units = []
        for (expert, frozen, packed, split, sent, dtype, stages), members in kinds.items():
            of = f"{'expert ' if expert else ''}{'frozen ' if frozen else ''}{'packed ' if packed else ''}{'tied ' if stages else ''}"
            of += f"{'split ' if split else ''}{'float8 ' if sent is not None else ''}"
            suffix = "" if len(kinds) == 1 and not stages else f" [{of}{str(dtype).removeprefix('torch.')}]"
            shard_storage = self.offloading.shard_storage(sum(full_shape(member.param).numel() for member in members), not frozen)
            settings = self._unit_spec(dtype, shard_storage, frozen, expert, is_packed(members[0].param), sent)
            units.append(build_unit(spec.name + suffix, members, dtype, settings))
            self.offloading.take(units[-1])
            units[-1].reshard()  # at once: a model that was built whole need not fit the device
        return Block(spec.name, spec.module, units, spec.read_in_backward)

    def _sent_as(self, param: nn.Parameter, dtype: torch.dtype) -> torch.dtype | None:
        """Return the float8 dtype in which a weight is gathered, [Note: gathers of float8]; None for its own.

        A node's copy (``zero_hpz_partition_size``, ``hf_zero.param_shard_size``) holds the values themselves.
        """
        wanted = float8_type(param) if self.stage.parameters_sharded and self.node is None and not is_expert(param) else None
        return wanted if dtype in (torch.float32, torch.bfloat16, torch.float16) else None

    def _is_split(self, param: nn.Parameter) -> bool:
        """Return whether each rank of the model axis has a different part of ``param``; only asked for units with quantized messages.

        [Note: codes beside split layers] A quantization scale covers neighbouring elements of a unit. Parameters that are equal on all
        ranks of a model axis get their own unit, whose quantized values are then equal too. In one unit with parts that differ, the copies
        would be quantized and updated differently, so their values would differ.
        """
        part = tp_shard_of(param)
        if part is None or part.expert or part.stages:
            return False
        if part.copies:
            raise UnsupportedError(
                "ZeRO++ (zero_quantized_weights, zero_quantized_gradients) with tensor parallelism over more ranks than a layer has heads "
                "for keys and values is not supported: copies of a head would be quantized differently. Set tensor_parallel.autotp_size to "
                "a divisor of the number of these heads, or set the keys to false"
            )
        return True

    def _unit_spec(
        self, dtype: torch.dtype, shard_storage: ShardStorage, frozen: bool, expert: bool, packed: bool, sent: torch.dtype | None
    ) -> UnitSpec:
        of_experts = expert and self.experts is not None
        collectives = self.experts if expert and self.experts is not None else self.collectives
        return UnitSpec(
            collectives,
            shards=self.stage.optimizer_sharded,
            reshards=self.stage.parameters_sharded and (collectives.world > 1 or shard_storage.reshards),
            master_dtype=self.precision.master_type(dtype),
            shard_storage=shard_storage,
            listener=self.listener if self.stage.parameters_sharded else ParamListener(),
            # Few ranks gather experts, so they are gathered unquantized, from all of these ranks.
            quantized=sent is not None
            or (can_quantize(dtype) and not (packed or of_experts) and (self.quantized.frozen if frozen else self.quantized.trained)),
            float8=sent,
            node=None if of_experts else self.node,
            copy_lasts=self.stage.parameters_in_node and not of_experts,
        )

    def _take_first_values(self, loose: dict[str, nn.Parameter]) -> None:
        """Copy rank 0's values of parameters outside units to ranks with other values; ``build_unit`` has done it for units."""
        alike = {name: param.data for name, param in loose.items() if not (is_wrapped(param) or is_elsewhere(param) or is_expert(param))}
        equal_values(alike, self.collectives.data, "one model")

    def _sync_buffers(self) -> None:
        """Copy rank 0's buffers to all ranks; as bytes, because backends do not support every dtype (nccl has no 16-bit integers)."""
        if sparse := [name for name, buffer in named_buffers(self.module, persistent=True) if buffer.layout != torch.strided]:
            warn_once(
                f"{', '.join(sparse[:3])}: checkpoints and model files cannot hold sparse buffers, so saving will be an error. Register "
                "them with persistent=False and build them in the constructor"
            )
        for name, buffer in self.module.named_buffers():
            for part in () if buffer.is_meta else strided_parts(buffer):
                if not part.numel():
                    continue
                once = without_repeats(part)
                contiguous = once.contiguous()
                self.collectives.data.broadcast(contiguous.reshape(-1).view(torch.uint8), 0, f"buffer {name}")
                if contiguous.data_ptr() != once.data_ptr():
                    once.copy_(contiguous)


def _refuse_lazy(module: nn.Module) -> None:
    """Raise for parameters and buffers without a shape (``nn.LazyLinear``): units are laid out before the first forward.

    Raises:
        StateError: There are some; the message names them.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    names = [name for name, tensor in named if is_lazy(tensor)]
    if names:
        raise StateError(
            f"{', '.join(names[:5])} has no shape before the first forward (a lazy module): call the model once on a small batch, on every "
            "rank, before initialize() or accelerator.prepare()"
        )


def _refuse_complex(members: Iterable[NamedParam]) -> None:
    """Raise for complex parameters that an optimizer trains: units hold real numbers.

    Raises:
        UnsupportedError: There are complex parameters; the message names them.
    """
    names = [member.name for member in members if member.group != FROZEN and member.param.is_complex()]
    if names:
        raise UnsupportedError(
            f"{', '.join(names[:5])}: parameters of complex numbers cannot be trained. Keep torch.view_as_real(value) as the parameter and "
            "use torch.view_as_complex(parameter) in forward, or freeze them"
        )


def _refuse_scripted(module: nn.Module) -> None:
    """Raise for modules that ``torch.jit.script`` has made, on which torch allows no hooks.

    Raises:
        UnsupportedError: There are such modules; the message names the first.
    """
    for name, part in module.named_modules():
        if type(part) is torch.jit.RecursiveScriptModule:
            raise UnsupportedError(
                f"{name or 'the model'} was made by torch.jit.script, which allows no hooks on modules: pass the original module, or "
                "compile it with torch.compile"
            )


def _refuse_shared_memory(module: nn.Module, members: Iterable[NamedParam]) -> None:
    """Raise if a trained parameter has memory in common with another parameter or a buffer (``head.weight.data = embed.weight.data``).

    In plain PyTorch an update of one changes the other; units have copies, whose values would differ.

    Raises:
        StateError: There are such tensors; the message names them.
    """
    trained = {member.name for member in members if member.group != FROZEN}
    held = {member.name: member.param for member in members if find_unit(member.param) is None and not is_wrapped(member.param)}
    kept = {
        f"{path}.{name}".lstrip("."): value  # attributes that are neither, such as a transposed view for the forward
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if type(value) is torch.Tensor and f"{name}_orig" not in part._parameters  # torch's spectral_norm computes it in each forward
    }
    dense: list[tuple[int, int, str, torch.Tensor]] = []  # spans of memory
    with_gaps: list[tuple[int, int, str, torch.Tensor]] = []  # in whose gaps another tensor may lie
    for name, tensor in (*held.items(), *module.named_buffers(), *kept.items()):
        if tensor.numel() and not tensor.is_meta and tensor.layout is torch.strided:
            reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            span = tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size(), name, tensor
            (dense if reach == tensor.numel() else with_gaps).append(span)
    furthest, before = 0, ""  # end of the tensors so far, and the name of the one that ends there
    for start, stop, name, _ in sorted(dense, key=itemgetter(0, 1, 2)):
        if start < furthest and (name in trained or before in trained):
            raise _shared_memory(before, name)
        if stop > furthest:
            furthest, before = stop, name
    for index, (start, stop, name, tensor) in enumerate(with_gaps):
        for other_start, other_stop, other, value in (*dense, *with_gaps[:index]):
            overlaps = start < other_stop and other_start < stop and value is not tensor
            if overlaps and (name in trained or other in trained) and _have_common_bytes(value, tensor):
                raise _shared_memory(other, name)


def _have_common_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two strided tensors, whose spans of memory overlap, have elements there in common."""
    start = min(one.data_ptr(), other.data_ptr())
    views = []
    for tensor in (one, other):
        width, strides = tensor.element_size(), tensor.stride()
        sizes = [size if stride else 1 for size, stride in zip(tensor.shape, strides, strict=True)]  # an expanded dimension has one element
        views.append(((*sizes, width), (*[stride * width for stride in strides], 1), tensor.data_ptr() - start))
    reach = max(
        1 + first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) for sizes, strides, first in views
    )
    used = torch.zeros(reach, dtype=torch.bool)
    used.as_strided(*views[0]).fill_(True)
    return bool(used.as_strided(*views[1]).any())


def _shared_memory(one: str, other: str) -> StateError:
    return StateError(
        f"{one} and {other} are two tensors that share memory: in PyTorch an update of one changes both, but the engine copies "
        "them, so their values would differ. To tie them, assign the parameter itself (head.weight = embed.weight); else clone it. "
        "If an adapter's option ties them (ensure_weight_tying), turn it off, or add the adapter to only one of the two layers"
    )


def _passing_bytes(members: Iterable[NamedParam]) -> int:
    """Return the bytes of host memory of this rank's shards that are freed when their parameters move to a new unit."""
    units = {id(owner[0]): owner[0] for member in members if (owner := find_unit(member.param)) is not None}
    return sum(unit.shard.nbytes for unit in units.values() if unit.shard_storage.passing)


def persist_and_reshard(units: Iterable[Unit], stays: set[int], largest: int, budget: int) -> None:
    """Reshard units that were built unsharded, except small ones and those that one rank may need alone, which are unsharded; collective.

    Args:
        units: All units.
        stays: Ids of units that one rank may need alone.
        largest: Largest number of elements of a small unit.
        budget: Largest number of elements of all small units together.
    """
    for unit in units:
        numel = unit.layout.numel
        small = numel <= largest and numel <= budget
        if unit.reshards and (small or id(unit) in stays):
            budget -= numel if small else 0
            unit.pin()
            unit.listener.stays_unsharded(unit.params, True)
        unit.reshard()


@dataclass
class Joiner:
    """Builder of units for parameters that join later: each gets a new unit in its block. See [Note: trained parameters].

    Attributes:
        builder: Builder of units.
        runtime: Runtime with the hooks on the module.
        reducer: Reducer of gradients.
        optimizer: The engine's optimizer.
        units: All units of the engine; the engine holds the same list object.
        gradients_of: Function that makes the gradients of a unit.
        largest: Largest number of elements of a unit that stays unsharded at stage 3.
        undivided: Ids of the parameters that existed when several ranks divided the model among them; None if each rank has all of it.
    """

    builder: UnitBuilder
    runtime: Runtime
    reducer: Reducer
    optimizer: ShardedOptimizer
    units: list[Unit]
    gradients_of: Callable[[Unit], UnitGradients]
    largest: int
    undivided: frozenset[int] | None
    _joins: int = 0  # number of calls of join; makes names of units unique

    def join(self, joining: Sequence[Joining]) -> list[UnitGradients]:
        """Make units of ``joining``, in the model's order, and train them; collective.

        Returns:
            The gradients of the new units.

        Raises:
            UnsupportedError: Several ranks hold the model together, and a parameter did not exist when it was divided.
        """
        self._require_known(joining)
        self._joins += 1
        former = {id(owner[0]): owner[0] for entry in joining if (owner := find_unit(entry.param)) is not None}
        added: list[Unit] = []
        for block, members in self._by_block(joining):
            spec = BlockSpec(f"{block.name} (added {self._joins})", block.module, members)
            added += self._extend(block, self.builder.block(spec, self.builder.kept()).units)
        self._drop_empty(former.values())
        self.units += added
        persist_and_reshard(added, set(), self.largest, sum(unit.layout.numel for unit in added))
        self.optimizer.extend(added)
        entries = self._train(added)
        for entry in entries:
            self.runtime.backward.attach_to(entry)
        return entries

    def _require_known(self, joining: Sequence[Joining]) -> None:
        unknown = [entry.name for entry in joining if self.undivided is not None and id(entry.param) not in self.undivided]
        if unknown:
            raise UnsupportedError(
                f"{', '.join(unknown[:5])}: trained for the first time after initialize(), in a model that several ranks "
                "hold together (tensor parallelism, pipelines), which is not supported. Add and unfreeze parameters before initialize()"
            )

    def _by_block(self, joining: Sequence[Joining]) -> list[tuple[Block, list[NamedParam]]]:
        """Return the blocks that the parameters of ``joining`` belong to, in the model's order, each with these parameters."""
        hooked = {id(block.module): block for block in self.runtime.blocks}
        modules = self.runtime.module.named_modules()  # a script may have moved a block's module, or put another in its place
        blocks = {name: hooked[id(module)] for name, module in modules if id(module) in hooked}
        holders = lowest_modules(self.runtime.module)
        found: dict[int, tuple[Block, list[NamedParam]]] = {}
        for entry in joining:
            name = enclosing(holders[id(entry.param)], blocks)
            block = blocks[name] if name is not None else self.runtime.root
            found.setdefault(id(block), (block, []))[1].append(NamedParam(entry.name, entry.param, entry.group))
        order = [self.runtime.root, *self.runtime.blocks]
        return [found[id(block)] for block in order if id(block) in found]

    def _extend(self, block: Block, units: Sequence[Unit]) -> Sequence[Unit]:
        block.units += units
        block.forget_size()
        return units

    def _drop_empty(self, former: Iterable[Unit]) -> None:
        """Remove frozen units without parameters from their blocks."""
        empty = {id(unit) for unit in former if all(param is None for param in unit.params)}
        self.units[:] = [unit for unit in self.units if id(unit) not in empty]
        for block in (self.runtime.root, *self.runtime.blocks):
            if any(id(unit) in empty for unit in block.units):
                block.units[:] = [unit for unit in block.units if id(unit) not in empty]
                block.forget_size()

    def _train(self, units: Sequence[Unit]) -> list[UnitGradients]:
        """Make the gradients of ``units``, and sort the gradients of all units in the model's order."""
        entries = {id(unit): self.gradients_of(unit) for unit in units}
        for unit in units:
            unit.belongs_to = ref(self.runtime)
        known = {id(entry.unit): entry for entry in self.reducer.gradients} | entries
        ordered: list[UnitGradients] = []
        for block in (self.runtime.root, *self.runtime.blocks):
            block.gradients = [known[id(unit)] for unit in block.units if id(unit) in known]
            ordered += block.gradients
        self.reducer.train(ordered)
        return list(entries.values())
