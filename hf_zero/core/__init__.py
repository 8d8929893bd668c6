"""Run the engine: parameters, gradients and optimizer state sharded over ranks. This package imports torch and no other library.

One step at stage 3: two ranks train a GPT-2 in bf16.

``initialize`` reads the configuration (``config/resolve.py``); all ranks compare settings, versions and model
in one collective (``assembly/same_settings.py``, ``core/step/agreement.py``). Then ``assembly/parts.py`` makes the parts of the engine:

1. ``core/units/grouping.py`` finds the repeated blocks: the classes that ``_no_split_modules`` names, else the children of the largest
   ``ModuleList``. Parameters outside them form the root. A block has one unit per dtype and kind, so LoRA adapters and frozen weights have
   units of their own.
2. ``core/units/layout.py`` orders parameters by param group, aligns them to 16 elements, and pads the unit to a multiple of the ranks.
3. ``core/units/grouping.py`` copies parameters into flat buffers, block by block, and keeps this rank's shard. Each ``param.data`` becomes
   an empty tensor that still has shape and dtype, and raises when its values are read (``core/units/sharded_parameter.py``).
4. The user's optimizer is rebuilt over segments of the fp32 masters (``core/optimizer/segments.py``): one per param group and shard.

Forward. Before each block's forward a hook runs ``Runtime.enter``, ``ForwardPhase.enter``, ``UnshardSchedule.forward``,
``UnshardSchedule.request`` and ``UnshardPass.advance``. The pass iterates over all blocks in one fixed order and starts the all-gather of
each sharded block up to this one (``Unit.start_unshard``, ``Collectives.all_gather``), also of blocks that this rank skips. The next block
is prefetched. ``Unit.unshard`` waits for its own gather and points each ``param.data`` at a view of the whole buffer. After the block's
forward, ``UnshardSchedule.after_forward`` reshards it, unless the backward comes soon enough: the buffer's storage is resized to 0 bytes.
Tensors that autograd saved share this storage, so they have their values again when backward gathers the block.

Backward. ``Engine.backward`` divides the loss by the accumulation steps, multiplies it by the loss scale and begins a micro-step. When the
gradient of a block's output arrives, a hook gathers the block (``BackwardPhase._pre_backward``), in the reverse order. When autograd has
accumulated a parameter's gradient, its hook copies it into the unit's flat gradient buffer (``Reducer.collect``, ``Collector.add``). When a
unit is complete and all units before it in the order have been sent, ``UnitGradients.start_reduce`` starts the first hop of its reduction,
here the only one, a reduce-scatter (``GradientExchange.sum_over_ranks``). The sum arrives at the owner of each shard
(``UnitGradients.finish_hop``) and is added to this rank's fp32 gradient shard (``GradientSum.add``). Reductions over nodes and replicas and
quantized reductions are further hops (``GradientExchange.hops``). All divisors: [Note: divisors of a gradient].

Step. ``Stepper.take``: ``core/step/__init__.py`` lists its phases.
"""
