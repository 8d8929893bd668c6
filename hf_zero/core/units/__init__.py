"""Shard parameters: flat buffers, divided over ranks.

``core/units/grouping.py`` finds the repeated blocks: those that the model's ``_no_split_modules`` names, else the children of the largest
``ModuleList``s. Large embeddings and heads outside them (from 2^20 elements) are blocks of their own; the rest is the **root**. A
parameter that several modules register (tied weights) belongs to their lowest common ancestor, once. A block has one unit per dtype and
kind, so a LoRA block has a 16-bit frozen unit and a trainable one.

Packed weights (``packed.py``; ``assembly/packed_weights.py`` finds and marks them) are frozen units of their own whatever element type they
are kept in. Beside each lie its scales, a plain tensor of another type, as bytes (``ParamSlot.shown_as``): whatever unshards the weight
unshards them. A 4-bit layer of bitsandbytes reads its weight's statistics from the parameter object, which stays; an 8-bit one keeps a
reference to the bytes of its first forward (``state.CB``), which is made to follow the weight. Checkpoints leave packed weights out.
torchao's weights are parameters of a class of its own around plain tensors: those lie in the unit (``assembly/wrapped_weights.py``, [Note:
inner tensors]). At stage 3 a packed weight is a unit of its own as soon as ``from_pretrained`` has quantized it
(``integrations/packed_loads.py``, [Note: packed as loaded]); ``initialize`` takes those into the units of blocks.

Inside a unit, parameters lie param group by param group, each starting at a multiple of 16 elements; so each group is at most one segment
per shard, and decay / no-decay groups cost nothing. Gaps and padding hold zeros and stay zero under any element-wise optimizer.

A unit (``unit.py``) is in one of three states: sharded, unsharding, unsharded; only its own methods change it. It keeps one buffer for
its life (``whole_buffer.py``). *Reshard* points each ``param.data`` at an empty tensor ([Note: the class of an empty parameter]) and
resizes the buffer's storage to 0; *unshard* allocates the storage again, all-gathers, and points ``param.data`` at the views. Tensors
that autograd saved share that storage: they cost nothing while the unit is sharded and see the values again in backward. A tensor that a
script took out of ``GatheredParameters`` keeps the buffer, and the unit takes another ([Note: tensors taken out of a gather]); so does
one that autograd saved for the root's own forward (a fused loss that reads ``lm_head.weight``), because nothing says when the root's
backward reads it. A function that saved the parameter itself finds the head unsharded when backward begins, any other parameter with what
the forward left ([Note: parameters that a function saved]). A plain embedding's backward reads no values: its parameter shows a
*placeholder* then, its shape without memory, and is not unsharded a second time. On a host, flat buffers ask for huge pages
(``host_memory.py``, [Note: huge pages]), and the C library's heap keeps what a step frees for the next (``heap.py``, [Note: memory that
a step frees]).

Around the unit: ``own_part.py`` is this rank's shard and master, ``alone.py`` single parameters that somebody holds whole while the rest
is sharded ([Note: a parameter alone]), ``secondary.py`` its part of the copy that a node keeps ([Note: secondary copies]),
``shard_storage.py`` where the shard rests, ``pins.py`` who holds the unit unsharded, ``values.py`` how values get from master to shard to
whole buffer and back. ``registration.py`` says which unit a parameter belongs to, and what pickling and copying such a parameter means. A
``ParamListener`` (``listener.py``) hears when a parameter is registered and when its unit's state changes.

``zero.Init`` makes each parameter a unit of its own as soon as its module is assigned to its parent (torch's registration hooks report
it; nothing is patched; a sharded layer's own ``apply`` unshards, for ``self.apply(init_weights)`` in constructors, and what a constructor
reads or writes of a layer it has assigned is unsharded for it, ``core/constructor_access.py``). While a model is built its parameters
keep the type and device that constructors gave them, every rank draws every random number, and the cast comes at the end ([Note: as it
was built]), so that the weights are those of a plain build ([Note: same seed, same model]). ``initialize`` moves parameters from whatever
unit they are in to block units, one block at a time, so the whole model is never held. The same path takes a module over from another
engine. Until then the C library returns large blocks as they are freed ([Note: permanent blocks in the heap]), so that a rank's memory is
its shards and one whole tensor while ``from_pretrained`` loads. A parameter has one engine: what another engine trains and this one does
not stays in its units (``Unit.belongs_to``), and an engine that has lost parameters to another says so when it is to train
(``Runtime.lost``). A deep copy of a sharded parameter belongs to a copy of its unit ([Note: deep copies], ``unit_copy.py``); a module
whose parameters no engine unshards says so when it is called (``unprepared.py``). A state dict of sharded parameters holds shapes without
values, which refuse to be written, computed with, and loaded into anything but the parameter that they stand for ([Note: no empty file],
``guards.py``). A parameter itself has another class while it is empty, which lets questions pass and raises for what needs values
([Note: the class of an empty parameter], ``sharded_parameter.py``); its ``data`` and ``detach()`` are stand-ins (``stand_in.py``). Whole
models are written by ``checkpoint/model/model_files.py``: laid out from shapes, each unit written to its place as it is unsharded.
"""
