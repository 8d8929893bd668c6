"""Observe this rank from another thread: the collective it waits in, the line it runs, the operations its groups have issued."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from hf_zero import observe
from hf_zero.comm.process_groups import default_device
from hf_zero.system import stacks

_TORCH = os.path.join("torch", "distributed", "distributed_c10d.py")
_OWN = os.path.join("hf_zero", "comm", "collectives.py")
_OWN_NAMES = ("wait", "launch")  # methods of ``Pending`` and ``Collectives``, which have a label
OF_THE_SCRIPT = "a wait of the script's"
_WAITING_CALLS = (".wait(", "wait_tensor(")  # calls with which a script waits for its own works
_BLOCKS = ("hf_zero::pre_forward", "hf_zero::pre_backward")


@dataclass(frozen=True)
class RankStatus:
    """State of one rank, in the form that ranks exchange.

    Attributes:
        operation: The collective that the rank waits for: a label of the engine or the name of torch's function; "" when it waits for none.
        group: Name of the process group of the operation, in torch; "" if unknown.
        place: The rank's Python line.
        phase: Phase of the engine; "" outside of all phases.
        block: The block whose forward or backward began last; "" for none.
        last: The label that was recorded last; "" for none.
        age: Seconds since that record.
        issued: Number of operations that it has issued, by name of the process group.
        host: Its host's name.
    """

    operation: str = ""
    group: str = ""
    place: str = ""
    phase: str = ""
    block: str = ""
    last: str = ""
    age: float = 0.0
    issued: dict[str, int] = field(default_factory=dict)
    host: str = ""

    def as_text(self) -> str:
        """Return the status as text, to send to other ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RankStatus:
        """Return the status from the result of ``as_text``."""
        return cls(**json.loads(text))

    def behind(self, other: RankStatus) -> bool:
        """Return whether this rank has issued fewer operations than ``other`` in the group of ``other``'s operation, or in any group they
        share.
        """
        shared = self.issued.keys() & other.issued.keys()
        return any(self.issued[name] < other.issued[name] for name in (shared & {other.group} if other.group in shared else shared))


def moment() -> tuple[Any, ...] | None:
    """Return a value that changes whenever this rank continues; None when no thread of it waits for a collective or, possibly, for
    its device.
    """
    with stacks.threads_of_others() as frames:
        waits = _waiting_thread(frames)
        if waits is None and not _may_wait_for_device():
            return None
        where = stacks.moment(waits[0] if waits is not None else frames[0])
    return where, observe.last_event(), tuple(issued().values())


def look(device: bool = False) -> RankStatus:
    """Return the present status of this rank.

    Args:
        device: Check the device, too, because the host has stood still for so long that it may wait for the device.
    """
    with stacks.threads_of_others() as frames:
        frame, operation, group = _waiting_thread(frames) or (frames[0], "", None)
        place = stacks.place(frame)
    if not operation and device and _may_wait_for_device() and _device_is_busy():
        operation = "work of its device, which waits for a collective or computes"
    seconds, last = observe.last_event()
    return RankStatus(
        operation,
        str(group.group_name) if group is not None else "",
        place,
        observe.current_phase(),
        _block(),
        last,
        time.monotonic() - seconds,
        issued(),
        platform.node(),
    )


def issued() -> dict[str, int]:
    """Return the number of operations that this rank has issued in each of its process groups that count them, by name."""
    counts: dict[str, int] = {}
    for group in groups_of_this_rank():
        try:
            backends = {id(one): one for one in (group._get_backend(device) for device in group._device_types)}
            counts[str(group.group_name)] = sum(one._get_sequence_number_for_group() for one in backends.values())
        except RuntimeError:
            continue  # a back end that does not count
    return counts


def groups_of_this_rank() -> list[Any]:
    """Return the process groups that this rank is in, the default one first."""
    known = list(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else []
    return [group for group in known if isinstance(group, dist.ProcessGroup)]  # torch lists groups without this rank as a number


def _waiting_thread(frames: list[FrameType]) -> tuple[FrameType, str, Any] | None:
    """Return the innermost frame of a thread that waits for a collective, the operation and its group; the main thread comes first."""
    for number, frame in enumerate(frames):
        found = _operation(frame, main=number == 0)
        if found is not None:
            return frame, *found
    return None


def _operation(frame: FrameType, main: bool) -> tuple[str, Any] | None:
    """Return the operation in which a thread waits and its group (None if unknown); None if the thread waits in no operation."""
    callers = list(stacks.outer_frames(frame))
    own = next((one for one in callers if one.f_code.co_filename.endswith(_OWN) and one.f_code.co_name in _OWN_NAMES), None)
    in_torch = [one for one in callers if one.f_code.co_filename.endswith(_TORCH)]
    group = _group_of(in_torch)
    if own is not None:
        values = stacks.values_of(own)
        if own.f_code.co_name == "launch":
            return values["label"], group
        return values["self"].label, values["self"].group
    if in_torch:
        return in_torch[-1].f_code.co_name, group
    if main and any(call in stacks.line_of(frame) for call in _WAITING_CALLS):
        return OF_THE_SCRIPT, group
    return None


def _group_of(frames: list[FrameType]) -> Any:
    """Return the group that a frame passes to a function of torch.distributed, the default group for None; None without such a frame."""
    given = [values["group"] for values in map(stacks.values_of, frames) if "group" in values]
    named = next((group for group in given if isinstance(group, dist.ProcessGroup)), None)
    if named is None and given and dist.is_initialized():
        return dist.distributed_c10d._get_default_group()
    return named


def _may_wait_for_device() -> bool:
    """Return whether the main thread may wait for a device whose collectives do not block the host."""
    return default_device().type != "cpu" and any(device.type != "cpu" for group in groups_of_this_rank() for device in group._device_types)


def _device_is_busy() -> bool:
    """Return whether work of this process on its device is still running."""
    try:
        return not torch.accelerator.current_stream(default_device()).query()
    except RuntimeError:  # the device has failed; the main thread will raise its error
        return False


def _block() -> str:
    for label in reversed(observe.recent_labels()):
        if label.startswith(_BLOCKS):
            return label.partition(" (")[2].removesuffix(")")
    return ""
