"""Keep state off the training device: in host memory and NVMe files, within the memory that the host has left.

``offload_optimizer`` and ``offload_param`` change where state is kept, never a number: on CPU the run is the same bit for bit
(``tests/parity/test_parity_offload.py``). Users' page: docs/offload.md. ``offload/policy.py`` turns the sections into two objects, chosen
per unit; no other code checks where state is:

- A **shard storage** (``core/units/shard.py``) keeps a unit's shard between uses: on the device; on the device but updated on the host
(``ReturningStorage``); in page-locked host memory (``HostStorage``); in a file, with the next shards read ahead (``FileStorage``).
Unsharding gets the tensor to send from it.
- The **state store** (``core/optimizer/state_store.py``) keeps masters and moments and defines how an update accesses them. Without
offload one step of the inner optimizer updates all of them. The store gets the inner optimizer and its segments
(``core/optimizer/segments.py``) once. Offloaded units are updated one sub-group at a time in the order of forward ([Note: stepping by
sub-groups]): in one native pass where the inner optimizer is one of ``hf_zero.ops``, else by a clone of the user's torch optimizer that
has this sub-group alone.

Gradients of offloaded units are copied to the host as they are reduced ([Note: gradients on the host]). ``hf_zero.offload_overlap``
(``offload/state_store.py``) selects when units are updated, and changes no number. Without overlap ``step`` updates all of them. With
overlap a thread (``offload/updates.py``) updates them in the order of forward, and ``step`` waits only for units that are unsharded on
the device. Resharded units are read through ``Unit.shard`` and ``Unit.master``, which wait for the update of this one unit: unsharding
its block in the next forward, a checkpoint, ``safe_get_*`` and all other readers get its values through them, and moments through
``ShardedOptimizer.state`` ([Note: updates under way]).

During the backward of a boundary units are already stepped, on copies. ``step`` either exchanges the copies for the originals, or drops
them if it clips, overflows, or finds a change to any input of the copies ([Note: speculative steps]). The originals are untouched until
then, so dropping a copy is exact. Copies take host memory, at most half of the free amount. Only optimizers of ``hf_zero.ops`` overlap
(they change only tensors of their own unit and release Python's lock), from the second step on, and not where shards are kept in files. On
a machine without accelerator the device *is* the host: ``cpu`` moves nothing, and overlap is off by default, because backward needs the
same cores. At the end of backward, speculative steps that have not begun are dropped: an update in place moves half the memory, and the
norm needs the same processors.

Copies run in lanes (``memory/copies.py``), one stream per direction. No code calls ``record_stream``: memory returns to the allocator
when the computing stream has waited for the lane, and is reused however far the host is ahead ([Note: device memory in a lane]). All
page-locked memory is ``HostMemory`` (``memory/buffers.py``): pages from the kernel, registered in place, unlocked and released with their
last tensor. So the shards of ``zero.Init`` are freed block by block while ``initialize`` makes the engine's (the memory budget assumes
it). Temporary data takes blocks from a ``HostPool``: checkpointed inputs, and states that ``offload_states`` moved; a save in the
background keeps one block. The engine's device is the current device of the update thread, and ``init_distributed`` makes it the main
thread's, unless the script has chosen another.

NVMe is plain files, one per rank, in a folder below ``nvme_path`` that is removed at exit ([Note: what a killed process leaves]). A few
threads read and write them, past the page cache where the file system allows. Between uses a tensor in a file is a mapped tensor ([Note:
mapped and direct access]), so checkpoints and ``safe_get_full_*`` read it like any other; for an update a sub-group is read into a buffer
([Note: buffer_count and sub-groups]).

``memory/budget.py`` compares the memory that all ranks of a machine are about to allocate with the memory that the machine and its cgroups
have left, and refuses with the numbers if it is too little.
"""
