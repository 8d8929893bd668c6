"""Choose the state that is kept off the device: make the storages of shards and the store of optimizer state."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from hf_zero.comm.collectives import Collectives
from hf_zero.comm.nodes import free_bytes, ranks_on_this_host
from hf_zero.config.schema.root import ZeroConfig
from hf_zero.config.schema.zero import ZeroOptimization
from hf_zero.core.optimizer.clones import state_types
from hf_zero.core.schedule.gradient_sums import GradientPlace
from hf_zero.core.stages import StagePolicy
from hf_zero.core.step.precision import PrecisionPolicy
from hf_zero.core.units.shard import ON_DEVICE, ShardStorage
from hf_zero.core.units.unit import Unit
from hf_zero.errors import OffloadError
from hf_zero.memory.budget import require_host_memory
from hf_zero.memory.buffers import HostMemory
from hf_zero.memory.copies import CopyLane
from hf_zero.observe import warn_once
from hf_zero.offload.file_states import BufferPlan, FileStates
from hf_zero.offload.files import PlannedFile, PlannedFolder, SwapFile, SwapFolder
from hf_zero.offload.host_states import HostGradients, HostStates
from hf_zero.offload.shards import FileStorage, HostStorage, ReturningStorage
from hf_zero.offload.state_store import OffloadedStateStore, OverlapPolicy
from hf_zero.ops.host_optimizers import HostOptimizer
from hf_zero.system.sizes import gib

T = TypeVar("T")


def trains_on_host(device: torch.device) -> bool:
    """Return whether the training device's memory is the host's, so that offloading to ``cpu`` moves nothing."""
    return device.type == "cpu"


def describe_offload(zero: ZeroOptimization, stage: StagePolicy) -> str:
    """Describe the offloaded state, as the end of a log line; return an empty text if there is none."""
    parts = [("optimizer states", zero.offload_optimizer.device, True), ("parameters", zero.offload_param.device, stage.parameters_sharded)]
    return "".join(f", {name} on {device}" for name, device, moves in parts if moves and device != "none")


def init_shard_storage(device: torch.device, pin_memory: bool) -> ShardStorage:
    """Return the storage in which ``zero.Init`` keeps offloaded shards until ``initialize`` moves them to their final storage."""
    return ON_DEVICE if trains_on_host(device) else HostStorage(HostMemory(device, pin_memory), CopyLane(device), passing=True)


class Offloading:
    """Storages of one engine's shards, masters, moments and gradients.

    Attributes:
        state_store: Store of masters and moments; None when the optimizer is not offloaded.

    Args:
        config: The configuration: ``zero_optimization``, ``aio`` and ``hf_zero.offload_overlap``.
        precision: Element types.
        collectives: The data-parallel axis.
        stage: The ZeRO stage; ``offload_param`` has an effect only at stage 3.
    """

    def __init__(self, config: ZeroConfig, precision: PrecisionPolicy, collectives: Collectives, stage: StagePolicy) -> None:
        zero = config.zero_optimization
        self._optimizer, self._param = zero.offload_optimizer, zero.offload_param
        self._config, self._precision, self._collectives = config, precision, collectives
        self._device = collectives.topology.device
        self._apart = not trains_on_host(self._device)
        self._offloads_param = stage.parameters_sharded and self._param.device != "none"
        if self._param.device != "none" and not stage.parameters_sharded:
            warn_once(
                f"zero_optimization.offload_param.device is {self._param.device!r}, which has an effect at stage 3 only; "
                f"this is stage {stage.stage}"
            )
        self.state_store: OffloadedStateStore | None = None
        self._gradients: GradientPlace | None = None
        self._returning: ShardStorage = ON_DEVICE
        self._on_host: ShardStorage = ON_DEVICE
        self._in_file: ShardStorage | None = None
        self._kept_numel = 0  # number of shard elements that `max_in_cpu` keeps in host memory
        self._left_numel = 0.0  # number of elements whose states may still stay on the device
        self._inward, self._outward = CopyLane(self._device), CopyLane(self._device)
        self._mode = "none"  # mode of `offload_overlap`, chosen by `prepare`
        self._param_itemsize = 4.0

    # -- before units are made ----------------------------------------------------------------------------------------

    def prepare(
        self,
        inner: torch.optim.Optimizer | None,
        trained_numel: int,
        frozen_numel: int,
        largest_numel: int,
        passing_bytes: int = 0,
        param_itemsize: float = 4.0,
    ) -> None:
        """Check that memory and disk have room, and reserve disk space; collective.

        Args:
            inner: The optimizer, over the model's parameters; None for an engine that only runs forward.
            trained_numel: Number of elements that the optimizer trains, over all ranks' shards.
            frozen_numel: Number of elements of frozen units.
            largest_numel: Number of elements of the largest block.
            passing_bytes: Host memory of this rank's shards from ``zero.Init``; the shards of a block are freed when its new ones exist.
            param_itemsize: Average bytes per element of the units.

        Raises:
            HostMemoryError: The host has too little memory.
            OffloadError: The swap files cannot be made, or the disk has too little room.
        """
        self._param_itemsize = param_itemsize
        world = self._collectives.world
        share = -(-trained_numel // world)
        offloads_optimizer = inner is not None and self._optimizer.device != "none"
        self._mode = self._choose_mode(inner)
        types = state_types(inner, self._master_dtype(), torch.device("cpu")) if inner is not None and offloads_optimizer else {}
        need = self._need(types, share if offloads_optimizer else 0, share + -(-frozen_numel // world), -(-largest_numel // world))
        _leave_out(need, int(passing_bytes - -(-largest_numel // world) * self._param_itemsize))
        if any(need.values()) and not self._collectives.pretended:  # a memory plan compares at its end
            gather = self._collectives.data.gather_objects
            require_host_memory(need, lambda value: gather(value, "free host memory"), self._remedies(need, -(-largest_numel // world)))
        if offloads_optimizer:
            self._left_numel = (1.0 - self._optimizer.ratio) * trained_numel
            self._open_state_store(types, share, self._overlap(sum(need.values())))
        if self._offloads_param:
            self._open_shard_storages(-(-(trained_numel + frozen_numel) // world))

    def _master_dtype(self) -> torch.dtype:
        return self._precision.master_dtype or self._precision.param_dtype or torch.float32

    def _need(self, types: dict[str, torch.dtype], trained: int, numel: int, largest: int) -> dict[str, int]:
        """Return the bytes of host memory that this rank needs, by purpose.

        Args:
            types: Dtype of each state that the optimizer keeps per element.
            trained: Number of this rank's elements whose optimizer state is offloaded.
            numel: Number of all elements of this rank.
            largest: Number of elements of the largest block on this rank.
        """
        master, param = self._master_dtype().itemsize, self._param_itemsize
        apart = self._apart or self._precision.master_dtype is not None  # a master that is not the shard itself
        offloaded = int(trained * self._optimizer.ratio)
        states = sum(dtype.itemsize for dtype in types.values()) + (master if apart else 0)
        need: dict[str, float] = {}
        if offloaded and self._optimizer.device == "cpu":
            need["masters and optimizer states"] = offloaded * states
        if offloaded and self._optimizer.device == "nvme":
            need["buffers of optimizer states"] = min(self._optimizer.buffer_count * largest * master, offloaded * states)
        if offloaded and self._apart:
            need["gradients"] = offloaded * 4
            need["updated shards"] = (2 * largest if self._mode == "none" else offloaded) * param
        if self._offloads_param and self._param.device == "cpu" and self._apart:
            need["parameters"] = numel * param
        if self._offloads_param and self._param.device == "nvme":
            need["parameters"] = min(self._param.max_in_cpu, numel) * param if self._apart else 0
            need["buffers of parameters"] = min(self._param.buffer_count * largest, numel) * param
        return {name: math.ceil(nbytes) for name, nbytes in need.items()}

    def _remedies(self, need: Mapping[str, int], largest: int) -> str:
        """Return a sentence with the settings that reduce ``need``, and by how much; ``largest``: elements of the largest block on this
        rank.
        """
        master, param = self._master_dtype().itemsize, self._param_itemsize
        states, parameters = need.get("masters and optimizer states", 0), need.get("parameters", 0)
        optimizer = states + need.get("gradients", 0) + need.get("updated shards", 0)
        ways = {
            "offload_optimizer.device: nvme": states - min(self._optimizer.buffer_count * largest * master, states),
            f"offload_optimizer.ratio: {self._optimizer.ratio / 2:g}": optimizer // 2 if states else 0,
            "offload_param.device: nvme": parameters - min(math.ceil(self._param.buffer_count * largest * param), parameters),
            "twice as many machines": sum(nbytes for name, nbytes in need.items() if "buffers" not in name) // 2,
        }
        if self._param.device == "nvme":
            ways["offload_param.max_in_cpu: 0"], ways["offload_param.device: nvme"] = parameters, 0
        found = [f"{way} by {gib(nbytes)}" for way, nbytes in sorted(ways.items(), key=lambda item: -item[1]) if nbytes > 0]
        return f"These changes reduce it per rank: {', '.join(found)}. Or give the job more memory"

    @property
    def updates_overlap(self) -> bool:
        """Return whether updates may continue after ``step`` has returned; valid after ``prepare``."""
        return self._mode != "none"

    def _choose_mode(self, inner: torch.optim.Optimizer | None) -> str:
        """Return the mode of updates that ``offload_overlap`` selects for this engine: none, forward or full."""
        wish = self._config.hf_zero.offload_overlap
        if not isinstance(inner, HostOptimizer) or (self._offloads_param and self._param.device == "nvme"):
            return "none"
        if wish == "auto":
            wish = "full" if self._apart else "none"
        return "forward" if wish == "full" and self._optimizer.device == "nvme" else wish

    def _overlap(self, need: int) -> OverlapPolicy:
        """Return the policy that selects when units are updated; ``need``: bytes of host memory that this rank is about to allocate."""
        ranks = ranks_on_this_host(self._collectives.data.world)
        threads, free = None, None
        if self._apart:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            threads = max(int(self._optimizer.cpuadam_cores_perc * cores / ranks), torch.get_num_threads())
        if self._mode == "full":
            free = free_bytes(torch.device("cpu"), ranks)
        return OverlapPolicy(self._mode != "none", max(0, (free or 0) - need) // 2, threads)

    def _open_state_store(self, types: dict[str, torch.dtype], share: int, overlap: OverlapPolicy) -> None:
        section = self._optimizer
        memory = HostMemory(self._device, section.pin_memory)
        states: HostStates
        if section.device == "nvme":
            plan = BufferPlan(section, self._config.zero_optimization.sub_group_size)
            itemsizes = sum(dtype.itemsize for dtype in types.values()) + self._master_dtype().itemsize
            folder, file = self._on_all(lambda: self._make_file(section.nvme_path, "optimizer", int(share * section.ratio) * itemsizes))
            states = FileStates(folder, file, memory, plan, types, self._apart)
        else:
            states = HostStates(memory, self._apart)
        self.state_store = OffloadedStateStore(states, self._precision.accumulation_dtype, overlap, memory)
        speculator = self.state_store.speculator
        listener = speculator.arrived if speculator is not None else None
        if self._apart:
            self._gradients = HostGradients(memory, self._device, self._outward, listener)
            self._returning = ReturningStorage(memory, self._inward, lasting=overlap.forward)
        elif listener is not None:
            self._gradients = GradientPlace(listener)

    def _open_shard_storages(self, share: int) -> None:
        section = self._param
        memory = HostMemory(self._device, section.pin_memory)
        if self._apart:
            self._on_host = HostStorage(memory, self._inward)
        if section.device == "nvme":
            nbytes = math.ceil(max(0, share - section.max_in_cpu) * self._param_itemsize)
            folder, file = self._on_all(lambda: self._make_file(section.nvme_path, "parameters", nbytes))
            self._in_file = FileStorage(folder, file, memory, self._inward, section.buffer_count)

    def _make_file(self, path: str | None, name: str, nbytes: int) -> tuple[SwapFolder, SwapFile]:
        if self._collectives.pretended:
            return PlannedFolder(), PlannedFile()
        folder = SwapFolder(Path(path or "."), self._collectives.data.rank)
        file = SwapFile(folder.path / f"{name}.bin", self._config.aio)
        file.make_room(nbytes)
        return folder, file

    def _on_all(self, work: Callable[[], T]) -> T:
        """Run ``work`` on every rank, and raise on all ranks if it fails on one; collective."""
        results: list[T] = []
        text, cause = "", None
        try:
            results.append(work())
        except OffloadError as error:
            text, cause = str(error), error
        failures = [answer for answer in self._collectives.data.gather_objects(text, "swap files") if answer]
        if failures:
            raise OffloadError(failures[0]) from cause
        return results[0]

    # -- while units are made, in the order of forward ----------------------------------------------------------------

    def shard_storage(self, numel: int, trained: bool) -> ShardStorage:
        """Return the storage of the next unit's shard.

        Args:
            numel: Number of elements of the unit.
            trained: An optimizer updates the unit.
        """
        if not self._offloads_param:
            return self._returning if trained and not self.stays(numel) else ON_DEVICE
        if self._in_file is None:
            return self._on_host
        share = -(-numel // self._collectives.world)
        if self._kept_numel + share <= self._param.max_in_cpu:
            self._kept_numel += share
            return self._on_host
        return self._in_file

    def stays(self, numel: int) -> bool:
        """Return whether ``offload_optimizer.ratio`` keeps the states of the next unit, of ``numel`` elements, on the device."""
        return self.state_store is None or numel <= self._left_numel

    def take(self, unit: Unit) -> None:
        """Move the master of a new unit to its tier."""
        if self.state_store is None or not unit.trainable:
            return
        if self.stays(unit.layout.numel):
            self._left_numel -= unit.layout.numel
        else:
            self.state_store.take(unit)

    def gradient_place(self, unit: Unit) -> GradientPlace | None:
        """Return the place in which ``unit``'s reduced gradients are summed; None if they stay on their device."""
        return self._gradients if self.state_store is not None and self.state_store.holds(unit) else None


def _leave_out(need: dict[str, int], nbytes: int) -> None:
    """Subtract ``nbytes`` from the need of parameters: they are allocated already, and are freed as the new memory is allocated."""
    for name in ("parameters", "buffers of parameters"):
        less = min(need.get(name, 0), max(0, nbytes))
        if less:
            need[name] -= less
            nbytes -= less
