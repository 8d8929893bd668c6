"""Manage one rank's parts of a unit: the shard and its storage, the master, the values that follow from all shards, and writes to them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from hf_zero.comm.collectives import Collectives, Pending
from hf_zero.comm.quantized import Codes, message_of, values_of
from hf_zero.core.units.layout import UnitState
from hf_zero.errors import StateError
from hf_zero.native.masters import same_bits, take_changed
from hf_zero.system.planning import has_values


class ShardOwner(Protocol):
    """The part of a unit that a storage uses.

    Attributes:
        state: State of the unit.
    """

    state: UnitState

    @property
    def shard(self) -> torch.Tensor:
        """Return this rank's shard, (shard_numel,), in its storage."""


class ShardStorage:
    """Storage on the device, where shards are used directly. Subclasses keep shards elsewhere and fetch them when a unit is unsharded.

    Attributes:
        reshards: Whether units are resharded between uses even if one rank owns all of them.
        passing: Whether the storage is temporary (``zero.Init``): shards are on the host until ``initialize`` moves them to their final
            storage, and are freed then.
        on_disk: Whether shards are kept in a file.
    """

    reshards = False
    passing = False
    on_disk = False

    def rest(self, unit: ShardOwner, shard: torch.Tensor) -> torch.Tensor:
        """Store the shard of a new unit, (shard_numel,) on the device; return the tensor that represents it from now on."""
        return shard

    def gather_source(self, unit: ShardOwner, own: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Return a context whose value is the tensor that an all-gather sends; collectives issued inside are ordered after the copy.

        Args:
            unit: The unit, about to be unsharded.
            own: This rank's part of the unit's whole buffer, which may be filled and sent.
        """
        return nullcontext(unit.shard)

    def arrive(self, unit: ShardOwner) -> None:
        """Finish an all-gather: make the device's stream wait for copies that are still running."""

    def outgoing(self, unit: ShardOwner) -> torch.Tensor:
        """Return the host buffer, (shard_numel,), to which an update on the host writes the new shard; ``send`` comes next."""
        return unit.shard

    def send(self, unit: ShardOwner) -> None:
        """Copy the contents of ``outgoing`` to the shard's storage; the copy may still run when this returns."""

    def flush(self) -> None:
        """Wait for the copies between host and file that ``send`` has started."""

    def changed(self, unit: ShardOwner) -> None:
        """Drop copies of the shard after a direct write to it."""

    def of_copies(self) -> ShardStorage:
        """Return the storage for shards of deep copies, which may outlive this storage."""
        return ON_DEVICE

    def close(self) -> None:
        """Free files and buffers; the shards are not needed any more."""


ON_DEVICE = ShardStorage()


class Arriving(Protocol):
    """New values of a shard and its master that another thread may still be computing."""

    def wait(self) -> BaseException | None:
        """Wait until the other thread has ended its work; return its error."""

    def finish(self) -> None:
        """Do the rest of the work: shard and master hold the new values then."""


class OwnPart:
    """This rank's part of a unit: the shard, (shard_numel,) of the parameters' dtype, and the master, (shard_numel,) of the master dtype.

    [Note: updates under way] The update of an offloaded unit may still run when ``step`` has returned. No reader sees a half-finished
    update: all-gathers, checkpoints and all other readers use ``shard`` and ``master``, which wait for the update of this unit only.

    Attributes:
        offloaded: Whether some of the unit's state is on the host (``engine.offload_states``). Reading a shard or master that has no memory
            would crash the process; the properties raise instead.

    Args:
        shard: The shard in its storage.
    """

    def __init__(self, shard: torch.Tensor) -> None:
        self._shard = shard
        self._master: torch.Tensor | None = None
        self._arriving: Arriving | None = None
        self.offloaded = False

    def expect(self, values: Arriving) -> None:
        """Make readers of shard and master wait for ``values`` first."""
        self._arriving = values

    def settle(self) -> None:
        """Wait for the running update, if there is one, and raise its error once. After an interrupt the next call waits for it."""
        arriving = self._arriving
        if arriving is None:
            return
        failure = arriving.wait()
        self._arriving = None
        if failure is not None:
            raise failure
        arriving.finish()

    def tensors(self) -> list[torch.Tensor]:
        """Return shard and master, whether or not they have memory now."""
        self.settle()
        return [self._shard] if self._master is None else [self._shard, self._master]

    def resting(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return shard and master without waiting for an update; they may be half updated or without memory. For callers that read no
        values.
        """
        return self._shard, self._master

    @property
    def shard(self) -> torch.Tensor:
        """Return this rank's part of the parameters, in its storage.

        Raises:
            StateError: ``engine.offload_states`` has moved it to the host.
        """
        if self._arriving is not None:
            self.settle()
        if self.offloaded:
            require_memory(self._shard, "the shard of a unit")
        return self._shard

    @shard.setter
    def shard(self, value: torch.Tensor) -> None:
        self._shard = value

    @property
    def master(self) -> torch.Tensor | None:
        """Return the tensor that the optimizer updates: the shard itself if the dtypes are the same; None if nothing is trained.

        Raises:
            StateError: ``engine.offload_states`` has moved it to the host.
        """
        if self._arriving is not None:
            self.settle()
        if self.offloaded and self._master is not None:
            require_memory(self._master, "the master of a unit")
        return self._master

    @master.setter
    def master(self, value: torch.Tensor | None) -> None:
        self._master = value

    def drop_master(self) -> None:
        """Free the master, because the unit is not trained any more."""
        self.settle()
        self._master = None

    def refresh_master(self) -> None:
        """Copy changes of the shard into the master; elements whose 16-bit value is unchanged keep their fp32 bits; local."""
        if self.master is None or self.master is self.shard:
            return
        shard, master = self.shard.to(self.master.device), self.master
        # On a host the comparison is cheap; on a device the host would have to wait for its result.
        if shard.device.type == "cpu" and has_values(shard) and same_bits(master.to(shard.dtype), shard):
            return
        take_changed(master, shard)


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the indices and values of a sparse tensor, which share its memory; of others the tensor itself."""
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has memory; False while ``engine.offload_states`` has moved its elements to the host."""
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


def require_memory(tensor: torch.Tensor, what: str) -> None:
    """Raise if ``tensor`` has no memory.

    Raises:
        StateError: ``what`` was moved to the host.
    """
    if not has_memory(tensor):
        raise StateError(f"{what} was read while it is on the host; call engine.reload_states() first")


class SecondaryCopy:
    """The node's part of one unit that this rank keeps, in the parameters' dtype (hpZ; Wang et al., arXiv 2306.10209, section 3.2).

    [Note: secondary copies] The first all-gather after an update runs over all ranks. The ranks of a node keep the gathered values in equal
    parts, and further all-gathers stay inside the node until the shard changes. The copy is made when the values arrive, not when the unit
    is resharded, so it contains no writes of a script to unsharded parameters. Either all ranks have their copy of a unit or none has
    ([Note: dropped together]). If the all-gathers of a unit carry codes, the copy holds the values of the codes:
    the values in forward do not depend on an earlier request for exact ones.

    [Note: parameters in the node] If the copy lasts, each update refills it: each rank sends its new shard to one rank of every node, the
    one that keeps these elements. So a node receives each element once, and no gather leaves the node until the shard is changed in another
    way.

    Attributes:
        lasts: Whether updates refill the copy.

    Args:
        node: Network of the ranks that keep the unit between them; None keeps nothing.
        lasts: See the attribute.
    """

    def __init__(self, node: Collectives | None, lasts: bool = False) -> None:
        self._node = node
        self.lasts = lasts and node is not None
        self._part: torch.Tensor | None = None

    @property
    def part(self) -> torch.Tensor | None:
        """Return the part of the copy that this rank keeps now; None if there is none."""
        return self._part

    @property
    def kept(self) -> bool:
        """Return whether the node keeps copies of the unit."""
        return self._node is not None

    @property
    def here(self) -> bool:
        """Return whether the node can unshard the unit by itself."""
        return self._part is not None

    def keep(self, full: torch.Tensor) -> None:
        """Copy this rank's part of ``full`` (padded_numel,), whose values have just arrived, unless the copy exists."""
        if self._node is not None and self._part is None:
            numel = full.numel() // self._node.world
            self._part = full[self._node.rank * numel : (self._node.rank + 1) * numel].clone()

    def all_gather(self, full: torch.Tensor, unit: str) -> Pending:
        """Fill ``full`` from the parts of the node; collective over the node."""
        if self._node is None or self._part is None:
            raise StateError(f"unit {unit}: this rank has no secondary copy")
        return self._node.all_gather(full, self._part, unit)

    def fill(self, axis: Collectives, shard: torch.Tensor, quantized: bool, unit: str) -> Pending:
        """Start filling the copy from the updated shards of all ranks; collective over ``axis``. The copy exists once the returned object
        has been waited for.

        Args:
            axis: Network of all ranks; the ranks of a node are adjacent.
            shard: This rank's shard, (shard_numel,).
            quantized: Whether the copy holds the values of the codes.
            unit: Name for labels.
        """
        if self._node is None:
            raise StateError(f"unit {unit}: secondary copies are off, so there is none to fill")
        nodes, mine = axis.world // self._node.world, message_of(shard) if quantized else shard
        first, keeper = self._node.rank * nodes, axis.rank // nodes  # first owner of the kept elements; keeper of this shard
        rows = mine.new_empty(nodes, mine.numel())
        outgoing, incoming = [[mine.new_empty(0)] * axis.world for _ in range(2)]
        outgoing[keeper :: self._node.world] = [mine] * nodes
        incoming[first : first + nodes] = list(rows)
        if first <= axis.rank < first + nodes:
            rows[axis.rank - first].copy_(mine)

        def keep(_: torch.Tensor | None) -> None:
            values = rows.view(-1)
            self._part = values_of(rows, shard.new_empty(nodes * shard.numel())) if quantized else values

        return axis.exchange_parts(outgoing, incoming, f"{unit}: update").then(keep)

    def forget(self) -> None:
        """Drop the copy, because the unit's values have changed."""
        self._part = None


Gather = Callable[[torch.Tensor, torch.Tensor, str], Pending]


class Derived:
    """Values of one unit that follow from the shards of all ranks: the node's copy, and the scales with which weights are gathered.

    [Note: dropped together] All ranks must drop such values together: a rank that has none gathers in another way than a rank that has
    them, and both would wait without end. Most changes to shards happen on all ranks (an update, a load, a broadcast) and drop the values
    at once (``shard_changed``). But a write by the script is found where a rank compares its own part with the shard, and may lie in the
    parts of some ranks only. Such a rank notes it (``changed_here``); the ranks exchange these notes when a context of
    ``GatheredParameters`` ends, and at the begin and the end of the pass of a forward, and all drop the values if any rank has noted a
    change. A gather of exact values outside of a pass (`agree`) exchanges the notes of its unit, too. If a unit is gathered for a forward
    between a change and the next exchange (a block that is called alone), the values are outdated: the next step raises on all ranks.

    Attributes:
        changed_here: Whether this rank has changed its shard since the ranks last exchanged their notes.
        outdated: Whether a gather has used values that did not fit this rank's shard.
        changes: Number of times that this rank has seen the unit's values change.

    Args:
        secondary: The unit's copy in the node.
        codes: Codes of its all-gathers.
    """

    def __init__(self, secondary: SecondaryCopy, codes: Codes) -> None:
        self._secondary, self._codes = secondary, codes
        self.changed_here = self.outdated = False
        self.changes = 0

    @property
    def kept(self) -> bool:
        """Return whether such values are ever kept for this unit; the same on all ranks."""
        return self._secondary.kept or self._codes.kept

    def forget(self) -> None:
        """Drop the values, because a shard has changed. Local; every rank must call it."""
        self._secondary.forget()
        self._codes.forget()
        self.changed_here = False

    def agree(self, network: Collectives) -> None:
        """Drop the node's copy if any rank has changed its shard: exact values are about to be read outside of a pass. Collective if there
        is a copy.
        """
        if self._secondary.here and network.any_rank(self.changed_here, "changed shards"):
            self.forget()

    def gather(self, collectives: Collectives, exact: bool) -> Gather:
        """Return the all-gather of the shards: of ``exact`` values, or of their codes."""
        if not exact:
            self._note_use(self._codes.agreed)
            return partial(self._codes.all_gather, collectives)
        self._codes.forget()  # whoever holds the exact values may write to them, and not every rank would see it
        if not self._secondary.here:
            self.changed_here = False
        return collectives.all_gather

    def from_node(self, full: torch.Tensor, unit: str) -> Pending:
        """Fill ``full`` from the copy that the node keeps; collective over the node."""
        self._note_use(True)
        return self._secondary.all_gather(full, unit)

    def _note_use(self, used: bool) -> None:
        if self.changed_here:
            self.outdated |= used
            self.changed_here = used

    def require_current(self, name: str) -> None:
        """Raise if a gather has used outdated values.

        Raises:
            StateError: See ``outdated``.
        """
        if self.outdated:
            self.outdated = False
            raise StateError(
                f"a parameter of {name} was written while a part of the model ran alone, and gathered before the ranks could exchange "
                "the write: the gather used the node's copy, or the float8 scales, of the previous values. Write it inside `with "
                "hf_zero.zero.GatheredParameters([parameter], modifier_rank=0):`"
            )


class HasDerived(Protocol):
    """The part of a unit that ``drop_changed`` uses."""

    derived: Derived


def keepers(units: Iterable[HasDerived]) -> list[HasDerived]:
    """Return the units for which values that follow from the shards of all ranks are kept; the same on all ranks."""
    return [unit for unit in units if unit.derived.kept]


def drop_changed(units: Sequence[HasDerived], anywhere: bool) -> None:
    """Drop the values of ``units`` if a shard has changed ``anywhere``; every rank calls it with the same answer."""
    for unit in units if anywhere else ():
        unit.derived.forget()


def exchange_changes(units: Iterable[HasDerived], network: Collectives) -> None:
    """Drop the values of ``units`` if any rank has changed a shard of one; collective if values are kept for any of them."""
    kept = keepers(units)
    if kept:
        drop_changed(kept, network.any_rank(any(unit.derived.changed_here for unit in kept), "changed shards"))


Key = TypeVar("Key")


class NotedWrites(Generic[Key]):
    """Checksums of written parameters, by a key that is the same on all ranks.

    A record depends on the written values and on the number of looks before the write: two ranks that have written the same values, one
    before a forward and the other after it, have different records.

    Attributes:
        touched: Names of written parameters that every rank has whole: ``WrittenValues`` takes them, and compares the present values.
    """

    def __init__(self) -> None:
        self.touched: set[str] = set()
        self._sums: dict[Key, int] = {}
        self._looks: Counter[Key] = Counter()

    def __bool__(self) -> bool:
        return bool(self._sums)

    def look(self, key: Key, checksum: int | None) -> None:
        """Count a look at a parameter, which all ranks take; if it has new values, add their ``checksum`` (else None) to its record."""
        self._looks[key] += 1
        if checksum is not None:
            self._sums[key] = zlib.crc32(repr((self._sums.get(key), self._looks[key], checksum)).encode())

    def add(self, key: Key, checksum: int) -> None:
        """Record the ``checksum`` of a parameter that was written in a forward, where a rank may have run more forwards than others."""
        self._sums[key] = checksum

    def record(self, key: Key) -> int | None:
        """Return the record of a parameter; None if there is none."""
        return self._sums.get(key)

    def restore_record(self, key: Key, record: int | None) -> None:
        """Restore an earlier ``record`` of a parameter, because all ranks have made the writes since then."""
        self._sums.pop(key, None)
        if record is not None:
            self._sums[key] = record

    def take(self) -> dict[Key, int]:
        """Return all records, and clear them."""
        found, self._sums = self._sums, {}
        self._looks.clear()
        return found
