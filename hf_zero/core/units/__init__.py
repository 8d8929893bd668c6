"""Shard parameters: flat buffers that are divided over ranks.

``core/units/grouping.py`` finds the repeated blocks: the modules whose classes the model's ``_no_split_modules`` names, else the children
of the largest ``ModuleList``s. Large embeddings and heads outside them (from 2^20 elements) are blocks of their own; the other parameters
form the **root**. A parameter that several modules register (tied weights) belongs to their lowest common ancestor, once. A block has one
unit per dtype and kind, so a LoRA block has a 16-bit frozen unit and a trainable one.

Packed weights (``marks.py``; ``assembly/packed_weights.py`` finds and marks them) are frozen units of their own, whatever element type the
library uses for them. Each weight's scales, a plain tensor of another type, are stored next to it in the same unit as bytes
(``ParamSlot.shown_as``), so unsharding the weight also unshards its scales. A 4-bit layer of bitsandbytes reads its weight's statistics
from the parameter object, which is never replaced; an 8-bit layer keeps a reference to the bytes of its first forward (``state.CB``), and
this reference is updated whenever the weight moves. Checkpoints leave packed weights out. torchao's weights are parameters of a wrapper
class around plain tensors: the plain tensors are in the unit (``assembly/packed_weights.py``, [Note: inner tensors]). At stage 3 a packed
weight is a unit of its own as soon as ``from_pretrained`` has quantized it (``integrations/packed_loads.py``, [Note: packed as loaded]);
``initialize`` moves these weights into the units of blocks.

Inside a unit, parameters are ordered by param group, and each starts at a multiple of 16 elements; so each group is at most one segment per
shard, and separate groups with and without weight decay cost nothing. Gaps and padding hold zeros and stay zero under any element-wise
optimizer.

A unit (``unit.py``) is in one of three states: sharded, unsharding, unsharded; only its own methods change it. It keeps one buffer for its
lifetime (``whole_buffer.py``). *Reshard* points each ``param.data`` at an empty tensor ([Note: the class of an empty parameter]) and
resizes the buffer's storage to 0; *unshard* allocates the storage again, all-gathers, and points ``param.data`` at the views. Tensors that
autograd saved share that storage: they use no memory while the unit is sharded, and have their values again in backward. If a script keeps
a tensor that it took out of ``GatheredParameters``, that tensor keeps the buffer and the unit allocates another one ([Note: tensors taken
out of a gather]). The same happens for a tensor that autograd saved for the root's own forward (a fused loss that reads
``lm_head.weight``), because no hook reports when the root's backward reads it. If an autograd function saved the parameter object itself,
the head's parameter is unsharded when backward begins, and any other parameter shows the values that the forward left ([Note: parameters
that a function saved]). The backward of a plain embedding reads no values: its parameter shows a *placeholder* then, its shape without
memory, and is not unsharded a second time. On a host, flat buffers ask for huge pages (``host_memory.py``, [Note: huge pages]), and the C
library's heap keeps the memory that a step frees for the next step (``host_memory.py``, [Note: memory that a step frees]).

The other files describe parts of a unit. ``shard.py``: this rank's shard and master, the storage that keeps the shard between uses, and
this rank's part of the copy that a node keeps ([Note: secondary copies]), values that all ranks must drop together when a shard changes
([Note: dropped together]), and records of writes. ``alone.py``: single parameters that a caller keeps unsharded while the rest of the unit
is sharded ([Note: a parameter alone]). ``values.py``: copies of values from master to shard to whole buffer and back. ``registration.py``:
the unit of each parameter, and pickling and copying of such a parameter and of the modules around it. ``marks.py``: marks on parameters; a
``ParamListener`` is notified when a parameter is registered and when its unit's state changes. ``parts.py``: parts of parameters that
tensor parallelism or experts divide, and their wholes; ``divided.py``: such parameters in a loss ([Note: parts in a loss]).

``zero.Init`` makes each parameter a unit of its own as soon as its module is assigned to its parent. torch's registration hooks report the
assignment; nothing is patched. A sharded layer's own ``apply`` unshards it, for ``self.apply(init_weights)`` in constructors, and
parameters that a constructor reads or writes after it has assigned their layer are unsharded for this access
(``core/model_init.py``). While a model is built, its parameters keep the type and device that constructors gave them, every rank
draws every random number, and the cast is done at the end ([Note: as it was built]), so that the weights equal those of an ordinary build
([Note: same seed, same model]). ``initialize`` moves parameters from their present units to block units, one block at a time, so no rank
ever has the complete model. The same code moves a module from another engine. During loading, the C library returns large blocks to the
system as soon as they are freed ([Note: permanent blocks in the heap]), so that a rank's memory is its shards and one complete tensor while
``from_pretrained`` loads. A parameter has one engine: parameters that another engine trains and this one does not stay in the other
engine's units (``Unit.belongs_to``), and an engine that has lost parameters to another raises when it is asked to train (``Runtime.lost``).
A deep copy of a sharded parameter belongs to a copy of its unit ([Note: deep copies], ``registration.py``); a module whose parameters no
engine unshards raises when it is called (``guards.py``). A state dict of sharded parameters holds shapes without values; these placeholders
refuse to be written to a file, computed with, or loaded into any parameter except their own ([Note: no empty file], ``guards.py``). A
parameter itself has another class while it is empty, which answers questions about shape and type and raises for operations that need
values ([Note: the class of an empty parameter], ``sharded_parameter.py``); its ``data`` and ``detach()`` are placeholders
of the same file. ``checkpoint/model/model_files.py`` writes complete models: it computes the file layout from shapes, and writes each unit
to its place when the unit is unsharded.
"""
