"""Turn gradients into new weights: accumulation, norm, loss scale, update.

One step

``core/step/step.py`` reads straight down: finish reductions → norm → overflow check → clip and unscale → update (masters, and the 16-bit
shards with them) → all-gather of updated parameters (label ``spread``) → clear; where the host drives the network, each unit is gathered
while the next is updated; ``tests/core/test_trace.py`` holds the exact sequence of labels and the bytes sent, for every stage. The norm
is over all gradients, before clipping, without loss scale, added up in double precision over pieces of a shard (on a host in one pass of
the native kernel); with tensor parallelism, parameters that every rank of the model axis holds alike count once. On overflow every rank
skips, the scheduler stays, the norm is inf (for NaN gradients too), and the first parameter with a non-finite gradient is named. A finite
norm far above those of the last steps may be logged or skipped too (``core/step/spikes.py``).

Each step begins by finding the parameters to train (``core/step/trained_set.py``, [Note: what is trained]) and the values that the script
has written (``core/step/written.py``, ``core/units/values.py adopt_writes``). ``core/step/trained_set.py`` lets parameters rest
and join; those that join get units from ``assembly/joining.py``. Users' page: docs/parameters.md.

A parameter that no rank used in a step has a zero gradient: moments decay and weight decay applies, while plain PyTorch does not update it.
With ``ignore_unused_parameters: false`` a parameter that any rank did not use is an error on all ranks.

``loss.backward()`` without the engine is a micro-step too ([Note: a backward the user starts]): the first hook that fires notices it.
``torch.autograd.grad`` and torch.func's transforms through the engine give no parameter a gradient (``core/schedule/backward_phase.py``,
[Note: backwards for inputs]): they unshard, and nothing else. A loss made of such gradients (a penalty) trains as any other; at stage 3
its forward and both backwards must be inside ``GatheredParameters``, because no hook shows which parameters a second derivative reads.
``zero_grad()`` forgets gradients that wait for ``step``, and keeps those in the middle of an accumulation.

Precision

fp32: the shard is its own master. bf16 / fp16: parameters are cast, masters start from the 16-bit values and are fp32, gradients of one
micro-step travel in 16 bit and are accumulated in fp32. Buffers stay as they were loaded, unless ``data_types.buffer_dtype`` asks; so do
parameters that the model or ``data_types.keep_in_fp32_modules`` names (``assembly/kept_types.py`` reads the names and gives types by
tensor; [Note: norms with statistics]). They are units of their own, whose shards are the masters and whose gradients travel in fp32.
``zero.Init`` casts when the model is complete ([Note: cast when built]); what ``from_pretrained`` loads in fp32 is widened before it
copies into shards (``integrations/pretrained.py``). An error of torch about types in a forward is given the names of the tensors that
stayed (``assembly/kept_types.py``). The mean of fp16 gradients is taken on both sides of the sum, by a power of two near the square root of
the ranks before it (``assembly/policies.py``, ``gradient_policy``), so that the sum stays below 65504. ``torch_autocast`` keeps fp32
parameters. An autocast region around the engine is switched off inside, with a warning.
"""
