"""Decide when units are unsharded and gradients reduced: hooks, and the one order of their collectives.

When a unit is unsharded (stage 3)

``core/schedule/schedule.py``, [Note: unshard passes]. A pass (``UnshardPass``) has a position in the unshard order. A request for block *j*
issues the all-gathers of all sharded blocks up to *j*, including blocks that this rank skips, and the end of forward and backward issues
the remaining ones. So ranks that run different experts, layers or towers issue the same sequence. Whether an all-gather is issued depends
only on which blocks were unsharded when the pass began, which is the same on all ranks. The order is the model's until the first complete
forward; then rank 0's observed order is broadcast once. A request for a block that was resharded after it was used (a module that runs
twice, another order on one rank) needs another pass. Where this is possible (not all blocks stay unsharded until backward) the ranks vote
at the end of each pass, and ranks that need no other pass take part in the all-gathers of the ranks that need one.

- Prefetch: the next block's all-gather is started when the present one is needed (``stage3_prefetch_bucket_size``; at least one block).
- Between forward and backward a block stays unsharded if fewer than ``stage3_max_reuse_distance`` elements are used in between and
  ``stage3_max_live_parameters`` allows it; with the defaults, models below about 0.5 billion parameters unshard each block once per step.
- Units of at most ``stage3_param_persistence_threshold`` elements always stay unsharded.
- In backward, the first gradient of a block's output unshards the block; it is resharded when backward has reached a later block and no
  execution of it is pending (``block.py`` counts). ``watched_outputs.py`` ([Note: announced backwards]) finds the outputs, follows
  outputs that the caller changes in place, and asks the graph, when backward begins, which of them backward will reach. A block whose
  backward no output announces in time is unsharded together with the block before it, and where no output can be found at all, autograd
  keeps the memory. Recomputation under activation checkpointing unshards through the same pass and never reshards.
- A submodule that is called by itself is unsharded for its own call. A parameter read by a module that does not own it is either declared
  with ``register_external_parameter``, or noticed when its attribute is read or, if it was found by iteration, when code computes with it
  (``outside_reads.py``), and unsharded. After the forward, the attribute lookup communicates nothing and shows shape, type and device
  ([Note: late values]); the first computation with the parameter unshards it, by a vote ([Note: reads behind the forward]).
  Where torch.compile traces the reader, the trace finds the read (``core/units/marks.py``, [Note: reads that a trace finds]).
- In backward, no block below the last block with trained parameters is unsharded unless a rank requests it ([Note: below what trains]): one
  vote replaces the gathers of a frozen backbone.
- After a step whose updates may still be running (``hf_zero.offload_overlap``), the prefetches of the first forward are issued after the
  block before has run, because an all-gather waits for its unit's update. No decision here depends on time or on whether work has finished.

``runtime.py`` registers the hooks on a module; ``ForwardPhase`` (``schedule.py``) and ``BackwardPhase`` (``backward_phase.py``) implement
them. Functions of torch without a public name that they need are in ``torch_internals.py``, and ``tests/core/test_torch_internals.py``
checks each.

The order of collectives

No collective may be issued in an order that depends on data or time. ``core/schedule/reducer.py``, [Note: one order]: a backward's
all-gathers and reductions have one order, which follows from the model, the limits and the blocks that are unsharded when backward begins.
A rank that skips a block unshards it and sends zeros at the same positions. Gradients that arrive after their position (a block that runs
twice, another order of execution) are agreed on at the end of backward and reduced once more; from then on their unit is sent at the end
([Note: late gradients]; where nothing is unsharded, the ranks agree in the backward that completes an optimizer step).
``tests/core/test_backward_order.py`` checks this for the real schedule and reducer; every test with several ranks checks that the ranks
have one order, and that no circular wait is possible under nccl's rules (``tests/support/collective_order.py``).

A collective that the script itself issues inside a forward is in the script's order, on the script's group: it is safe as long as all ranks
reach it, and reach the same blocks before it. A rank that skips a block whose parameters others gather before such a collective hangs, as
with any collective that not all ranks issue.

The host waits for the device at these points:

- once per optimizer step, to read the norm: overflow check of fp16, and of bf16 (``check_grad_overflow``, on by default)
- every ``steps_per_print`` steps, for loss and norm of the printed line, and for monitors
- with offload, on the training thread, once per optimizer step: for the norm's sum of squares, the norm, the factor of the update, and for
  each unit the arrival of its gradient and of its new shard

Votes (another pass, reads after the forward, below the trained blocks, late gradients, micro-steps) block the host until all ranks have
reached the same point; the device continues.

Gradients

Whether a backward reduces is decided once, when its micro-step begins (``Stepper.begin_micro_step``, by ``StagePolicy.reduces``), and
passed to the reducer.

The path of a gradient: a post-accumulate hook (``backward_phase.py``) → ``Reducer.collect`` takes ``param.grad`` (autograd moved it there
without a copy) → ``Collector.add`` copies it into the unit's flat buffer and scales it, large gradients at once, small ones of a unit
together ([Note: kept gradients]). ``Reducer.proceed`` sends units from last to first: a unit is sent when it and all units after it in the
model are complete; units that are incomplete at the end of backward are sent then, with zeros for missing gradients. Where backward
unshards too, the position of a unit in [Note: one order] may make it go before it is complete, or delay it. ``UnitGradients.start_reduce``
gets the hops of the reduction from the ``GradientExchange`` (``gradient_sums.py``): usually one, the sum over all ranks to the owner.
``Reducer._finish`` waits for each hop and starts the next one, and ``GradientSum.add`` adds the result of the last hop to the unit's sum. A
feature adds a class of its own, without a change to this code: other hops (``QuantizedExchange``, ``onebit/step.py``), another sum
(``ReplicatedSum``), another collector (of a pipeline, where autograd adds gradients in the buffer: ``pipeline/train.py``). On a
device all of this runs on the stream that the backward began on ([Note: one stream for gradients]).

At stage 0 ``param.grad`` shows the reduced gradient (``core/schedule/read_gradients.py``, [Note: shown gradients]). Gradients that a
script assigns to it are found at the boundary (``core/step/written.py``); their mean over ranks replaces the reduced gradient.
At stages 1 to 3 a read of ``param.grad`` gathers it, or warns (``core/schedule/read_gradients.py``, [Note: read gradients]).
Other code than a script's reads torch's own gradient through ``gradients_of``.

Where shard groups have replicas, ``ReplicatedSum`` (``core/schedule/gradient_sums.py``) adds the last hop ([Note: two sums]):
micro-steps are added up inside the group, and the backward of a boundary sends each unit's sum to its replicas when the reducer takes it
from its queue. Unshards, updates and their all-gathers, and norms run inside the group (the groups hold the same bits). ``zero.Init`` also
shards over the group. A sum over a node that is then summed over the nodes (``comm/nodes.py``, [Note: swizzled parts]) has another hop: the
reducer takes an entry from the queue of each hop in order and starts the next ([Note: hops of a reduction]).

On gloo, ``comm/direct_exchange.py`` exchanges parts directly and sums them in rank order ([Note: direct exchange on gloo]): deterministic,
and 16-bit parts are summed in fp32. Gathered shards are sent to each node once and forwarded inside it, by a thread
(``comm/direct_exchange.py``, [Note: gathers over nodes]). Above 16 ranks ``comm/direct_exchange.py`` transfers the parts of a reduction in
one call ([Note: many ranks on gloo]), with the same bits; there groups connect on first use ([Note: connections of gloo]). On nccl and
other back ends the native calls are used.

With ZeRO++ (docs/quantized-collectives.md) messages are codes of blocks of elements (``native/quantize.py``, [Note: the code of a block]);
``comm/quantized.py`` encodes and decodes them over any back end. ``Unit.start_all_gather`` sends codes where the schedule unshards, never
where a caller pins a unit ([Note: exact values]), and a ``QuantizedExchange`` (``core/schedule/gradient_sums.py``) reduces codes, in
two hops over several nodes, with LoCo's errors ([Note: errors of gradients]). The step notifies the exchange when it is over; checkpoints
get the errors through the optimizer's ``memory``. With tensor parallelism, parameters that all ranks hold alike have units of their own
([Note: codes beside split layers]).

The stages, with H ranks in a node and N ranks in all; bytes are per parameter and rank after a step, with bf16 parameters and Adam:

- Stage 0: complete parameters between steps; all-reduce at the boundary; every rank updates everything; 2+12 bytes.
- Stage 1: complete parameters; a reduction in each micro-step, which ``no_sync()`` defers; each rank updates its shard, and an all-gather
  follows; 2+12/N bytes.
- Stage 2: like stage 1, but ``no_sync()`` does not defer; 2+12/N bytes.
- Stage 3: a shard of the parameters between steps; a reduction in each micro-step; each rank updates its shard; 14/N bytes.
- Stage 3 with parameters in the node: the rank's shard and its part of the node's copy; a reduction in two hops in each micro-step; each
  rank updates its shard and sends it to each node; 14/N + 2/H bytes.

The last one is ``hf_zero.param_shard_size`` ([Note: parameters in the node]): the secondary copies of hpZ, which updates refill
(``SecondaryCopy.fill``), and the two hops of ``core/schedule/gradient_sums.py``. ``comm/nodes.py`` reports how many ranks a node has,
a number that all ranks agree on, and which groups fit.

Stage 1 reduces in every backward like stages 2 and 3 ([Note: when stage 1 reduces]): the order of summation (ranks first, micro-steps
second) is then the same, and stages 1, 2 and 3 agree bit for bit under accumulation. ``no_sync()`` defers the reduction at stages 0 and 1,
as it does with DDP. At stages 2 and 3, backwards inside ``no_sync()`` reduce and do not complete a step.
"""
