"""Keep state off the training device: in host memory and NVMe files, within the memory that the host has left.

``offload_optimizer`` and ``offload_param`` change the place of state, never a number: on CPU the run is the same bit for bit
(``tests/parity/test_parity_offload.py``). Users' page: docs/offload.md. ``offload/policy.py`` turns the sections into two objects, chosen
per unit; no other code asks where state is.

- A **shard storage** (``core/units/shard.py``) is where a unit's shard rests: on the device; on the device but updated on the host
(``ReturningStorage``); in page-locked host memory (``HostStorage``); in a file, with the next ones read ahead (``FileStorage``).
Unsharding gets the tensor to send from it.
- The **state store** (``core/optimizer/state_store.py``) is where masters and moments live and how an update reaches them. Without
offload one step of the inner optimizer updates all. It is given the inner optimizer and its segments (``core/optimizer/segments.py``)
once. Offloaded, units are updated one sub-group at a time in the order of forward ([Note: stepping by sub-groups]): in one native pass
where the inner optimizer is one of ``hf_zero.ops``, else by a clone of the user's torch optimizer that sees this sub-group alone.

Gradients of offloaded units stream to the host as they are reduced ([Note: gradients on the host]). When units are updated is
``hf_zero.offload_overlap`` (``offload/state_store.py``), and changes no number. Without overlap all are updated inside ``step``. With it
a thread (``offload/updates.py``) takes them in the order of forward and ``step`` waits for those only that are whole on the device; a
resharded unit carries the rest in ``Unit.shard`` and ``Unit.master``, which wait for this one unit: unsharding its block in the next
forward, a checkpoint, ``safe_get_*`` and all else come to its values through them, and to moments through ``ShardedOptimizer.state``
([Note: updates under way]). During the backward of a boundary units are stepped already, on copies that ``step`` either exchanges for the
originals or forgets when it clips, overflows, or finds anything changed that the copies were made from ([Note: speculative steps]): no
number is computed backwards, so taking back is exact. Copies take host memory, at most half of what is free. Only optimizers of
``hf_zero.ops`` overlap (they change nothing but tensors of their own unit and give up Python's lock), from the second step on, and not
where shards rest in files. On a machine without accelerator the device *is* the host: ``cpu`` moves nothing, and overlap is off unless
asked for, because backward needs the same cores. When backward is over what has not begun is dropped: in place an update moves half the
memory, and the norm wants the same processors.

Copies run in lanes (``memory/copies.py``), a stream per direction. Nothing calls ``record_stream``: memory goes back to the allocator
when the computing stream has waited for the lane, and is reused however far the host is ahead ([Note: device memory in a lane]). All
page-locked memory is ``HostMemory`` (``memory/buffers.py``): pages from the kernel, registered as they are, unlocked and given back with
their last tensor, so that the shards of ``zero.Init`` go block by block as ``initialize`` makes the engine's (the budget counts on it).
What comes and goes takes blocks from a ``HostPool``: checkpointed inputs, and what ``offload_states`` moved; a save in the background
keeps one block. The update thread has the engine's device as its current one, and ``init_distributed`` makes it the main thread's, unless
the script has chosen another.

NVMe is plain files, one per rank, in a folder below ``nvme_path`` that goes at exit ([Note: what a killed process leaves]), read and
written by a few threads past the page cache where the file system allows. At rest a tensor in a file is a mapped one ([Note: mapped and
direct access]), so checkpoints and ``safe_get_full_*`` read it like any other; for an update a sub-group comes into a buffer ([Note:
buffer_count and sub-groups]).

``memory/budget.py`` compares what all ranks of a machine are about to allocate with what the machine and its cgroups leave, and refuses
with the numbers.
"""
