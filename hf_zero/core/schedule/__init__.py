"""Decide when units are unsharded and gradients reduced: hooks, and the one order of their collectives.

When a unit is unsharded (stage 3)

``core/schedule/schedule.py``, [Note: unshard passes]. A pass (``UnshardPass``) has a position in the unshard order. Asking for block
*j* issues the all-gathers of all sharded blocks up to *j*, the skipped ones included, and the end of forward and backward joins the rest.
So ranks that run different experts, layers or towers issue the same sequence. Whether one is issued depends only on what was whole when
the pass began, which is the same on all ranks. The order is the model's until the first whole forward; then rank 0's observed order is
broadcast once. A block that is asked for again after it was resharded (a module that runs twice, another order on one rank) needs another
pass: where that is possible (not all blocks stay unsharded until backward) the ranks vote at the end of each pass, and those that need
none join the all-gathers of those that do.

- Prefetch: the next block's all-gather is started when the present one is needed (``stage3_prefetch_bucket_size``; at least one block).
- Between forward and backward a block stays unsharded if fewer than ``stage3_max_reuse_distance`` elements are used in between and
``stage3_max_live_parameters`` allows; with the defaults, models below about 0.5 billion parameters unshard each block once per step.
- Units of at most ``stage3_param_persistence_threshold`` elements stay unsharded for good.
- In backward, the first gradient of a block's output makes it whole; it is resharded when backward has moved on and no execution of it is
pending (``block.py`` counts). ``watched_outputs.py`` ([Note: what tells of a backward]) finds the outputs, follows those that the caller
changes in place, and asks the graph when backward begins which of them it will come to: a block of which nothing tells in time is
unsharded with the one before it, and where no output can be found at all autograd keeps the memory. Recomputation under activation
checkpointing unshards through the same pass and never reshards.
- A submodule called by itself is unsharded for its own call; a parameter read by a module that does not own it is noticed by name
(``outside_reads.py``) and unsharded, or declared with ``register_external_parameter``. Behind the forward a lookup communicates nothing
and shows shape, type and device ([Note: late values]); the first computation with it unshards, by a vote ([Note:
reads behind the forward]).
- Below the blocks that train nothing is unsharded in backward unless a rank asks ([Note: below what trains]): one vote in place of the
gathers of a frozen backbone.
- After a step whose updates may still go on (``hf_zero.offload_overlap``), what is prefetched in the first forward is asked for when the
block before it has run: an all-gather waits for its unit's update. Nothing here looks at a clock or asks whether something has ended.

``runtime.py`` puts the hooks on a module; ``ForwardPhase`` (``schedule.py``) and ``BackwardPhase`` say what each does. What they need of
torch that has no public name is in ``torch_internals.py``, and ``tests/core/test_torch_internals.py`` looks at each.

The order of collectives

No collective may be issued in an order that depends on data or time. ``core/schedule/reducer.py``, [Note: one order]: a backward's
all-gathers and reductions have one order that follows from the model, the limits and what is whole when backward begins. A rank that
skips a block unshards it and sends zeros at the same positions; what arrives behind its position (a block that runs twice, another order
of execution) is agreed on at the end of backward, reduced once more, and from then on sent at the end ([Note: late gradients]; where
nothing is unsharded, at the backward that completes an optimizer step). ``tests/core/test_backward_order.py`` holds it for the real
schedule and reducer; every job of ranks in the tests is checked for one order and for circles under nccl's rules
(``tests/support/collective_order.py``).

A collective of the script's own inside a forward is in the script's order, on the script's group: it is safe as long as all ranks reach
it, and reach the same blocks before it. A rank that skips a block whose parameters others gather before such a collective hangs, as
everywhere.

- synchronisation of host and device: how often
- the norm is read: overflow check of fp16, and of bf16 (``check_grad_overflow``, on by default): once per optimizer step
- loss and norm of the printed line, monitors: every ``steps_per_print``
- with offload, on the training thread: the norm's sum of squares, the norm, the factor of the update; per unit the arrival of its
  gradient and of its new shard: once per optimizer step

Votes (another pass, reads behind the forward, below what trains, late gradients, micro-steps) block the host until all ranks have come to
the same point; the device goes on.

Gradients

Whether a backward reduces is decided once, when its micro-step begins (``Stepper.begin_micro_step``, by ``StagePolicy.reduces``); the
reducer is told.

The way of a gradient: a post-accumulate hook (``backward_phase.py``) → ``Reducer.collect`` takes ``param.grad`` (autograd moved it there
without a copy) → ``Collector.add`` scales it into the unit's flat buffer as it is copied there, large ones at once, small ones of a unit
together ([Note: kept gradients]). ``Reducer.proceed`` sends units off last to first: a unit goes when it and all behind it are complete;
what is incomplete at the end of backward goes then, with zeros in the holes. Where backward unshards too, a unit's position in [Note: one
order] may come before it is complete, or hold it back. ``UnitGradients.start_reduce`` asks the ``GradientExchange`` (``hops.py``) for the
hops of the reduction: usually one, the sum over all ranks to the owner. ``Reducer._finish`` waits for each hop and starts the next one, and
``GradientSum.add`` adds the result of the last one to the unit's sum. A feature brings a class of its own and nothing on this way knows
it: other hops (``gradient_exchanges.py``, ``onebit/step.py``), another sum (``ReplicatedSum``), another collector (of a pipeline, where
autograd adds up gradients in the buffer: ``pipeline/added_in_place.py``). On a device all of this happens on the stream that the backward
began on ([Note: one stream for gradients]).

At stage 0 ``param.grad`` shows what is reduced (``core/schedule/shown_gradients.py``, [Note: shown gradients]). What a script assigns to
it is found at the boundary (``core/step/written.py``) and takes their place, the mean over ranks.

Where shard groups have replicas, ``ReplicatedSum`` (``core/schedule/gradient_exchanges.py``) adds the last hop ([Note: two sums]):
micro-steps are added up inside the group, and the backward of a boundary sends each unit's sum to its replicas as the reducer takes it from
its queue. All else works inside the group: unshards, updates and their all-gathers, norms (the groups hold the same bits). ``zero.Init``
shards over the group too. The sum over a node that goes on to other nodes (``comm/nodes.py``, [Note: swizzled parts]) is another hop: the
reducer takes an entry from the queue of each hop in order and starts the next ([Note: hops of a reduction]).

On gloo, ``comm/direct_exchange.py`` exchanges parts directly and sums in rank order ([Note: direct exchange on gloo]): deterministic, and
16-bit parts are summed in fp32. Gathered shards come to each node once and are handed on there, by a thread (``comm/direct_exchange.py``,
[Note: gathers over nodes]). Above 16 ranks ``comm/direct_exchange.py`` brings the parts of a reduction in one call ([Note: many ranks on
gloo]), with the same bits; there groups connect on use ([Note: connections of gloo]). On nccl and others the native calls are used.

With ZeRO++ (docs/quantized-collectives.md) messages are codes of blocks (``native/quantize.py``, [Note: the code of a block]), which
``comm/quantized.py`` puts around any back end: ``Unit.start_all_gather`` sends them where the schedule unshards, never where somebody
pins a unit ([Note: exact values]), and a ``QuantizedExchange`` (``core/schedule/gradient_exchanges.py``) reduces them, in two hops over
several nodes, with LoCo's errors ([Note: errors of gradients]). The step tells the exchange when it is over; checkpoints get the errors
through the optimizer's ``memory``. Beside tensor parallelism what all ranks hold alike has units of its own ([Note: codes beside split
layers]).

- : stage 0; 1; 2; 3; 3, parameters in the node (H ranks)
- parameters between steps: whole; whole; whole; shard; shard, and the node's part
- reduction: all-reduce at the boundary; each micro-step; ``no_sync()`` defers; each micro-step; each micro-step; each micro-step, in two
  hops
- update: every rank all; own shard, then spread; own shard, then spread; own shard; own shard, then to each node
- bytes per parameter per rank after a step, bf16 + Adam, N ranks: 2+12; 2+12/N; 2+12/N; 14/N; 14/N + 2/H

The last row is ``hf_zero.param_shard_size`` ([Note: parameters in the node]): the secondary copies of hpZ, which updates fill
(``SecondaryCopy.fill``), and ``core/schedule/gradient_exchanges.py``. ``comm/nodes.py`` says how many ranks a node has, as all ranks have
been told, and which groups fit.

Stage 1 reduces in every backward like 2 and 3 ([Note: when stage 1 reduces]): the order of summation (ranks first, micro-steps second) is
then the same and stages 1, 2 and 3 agree bit for bit under accumulation. ``no_sync()`` defers the reduction at stages 0 and 1, as it does
with DDP. At stages 2 and 3 backwards inside it reduce and do not complete a step.
"""
