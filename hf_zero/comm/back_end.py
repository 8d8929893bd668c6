"""Which collectives fit a group."""

from __future__ import annotations

from hf_zero.comm.all_to_all import AllToAllCollectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.comms_log import current_log
from hf_zero.comm.direct_exchange import GlooCollectives
from hf_zero.comm.native import NativeCollectives
from hf_zero.comm.process_groups import MOST_CONNECTED, serving_backend
from hf_zero.comm.recorded import RecordedCollectives
from hf_zero.comm.roll_call import sign_in
from hf_zero.comm.topology import Topology


def build_collectives(topology: Topology) -> Collectives:
    """Direct exchange where gloo serves the device, with all-to-alls for many ranks; the native calls elsewhere."""
    if serving_backend(topology.group, topology.device) != "gloo":
        return NativeCollectives(topology)
    return GlooCollectives(topology) if topology.world <= MOST_CONNECTED else AllToAllCollectives(topology)


def open_collectives(topology: Topology) -> Collectives:
    """The same, recorded where this process has a comms log; with the network of all data-parallel ranks where there are replicas."""
    sign_in()
    inner, log = build_collectives(topology), current_log()
    opened = inner if log is None else RecordedCollectives(inner, log)
    if topology.replicate is not None and topology.joint is not None:
        opened.joint = open_collectives(topology.joint)
    return opened
