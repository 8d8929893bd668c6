"""Turn gradients into new weights: accumulation, norm, loss scale, update.

One step

``core/step/step.py`` lists the phases of a step in order: finish reductions → norm → overflow check → clip and unscale → update (masters,
and the 16-bit shards with them) → all-gather of updated parameters (label ``spread``) → clear. Where the host drives the network, each unit
is gathered while the next is updated. ``tests/core/test_trace.py`` contains the exact sequence of labels and the bytes sent, for every
stage. The norm is over all gradients, before clipping, without loss scale, summed in double precision over pieces of a shard (on a host in
one pass of the native kernel); with tensor parallelism, parameters that every rank of the model axis holds alike count once. On overflow
every rank skips the update, the scheduler does not advance, the norm is inf (for NaN gradients too), and the message names the first
parameter with a non-finite gradient. A norm or loss far above those of the last steps may be logged or skipped too, or the engine
restores its newest saved state (``core/step/spikes.py``, ``checkpoint/rewinds.py``).

Each step begins by finding the parameters to train (``core/step/trained_set.py``, [Note: trained parameters]) and values that the script
has written (``core/step/written.py``, ``core/units/values.py adopt_writes``). ``core/step/trained_set.py`` stops and resumes the training
of parameters, and adds new ones, which get units from ``assembly/units.py``. Page for users: docs/parameters.md.

A parameter without a gradient on any rank is not updated, as in plain PyTorch; where the engine cannot leave it out, its gradient is zero
(``core/step/unused.py`` warns of it). One that requires no gradient is not updated either.
With ``ignore_unused_parameters: false`` a parameter that any rank did not use is an error on all ranks.

``loss.backward()`` without the engine is a micro-step too ([Note: a backward the user starts]): the first hook that runs notices it.
``torch.autograd.grad`` and torch.func's transforms through the engine give no parameter a gradient (``core/schedule/backward_phase.py``,
[Note: backwards for inputs]): they only unshard. A loss computed from such gradients (a penalty) trains like any other; at stage 3 all
blocks stay unsharded meanwhile ([Note: derivatives of derivatives]). With torch.func's transforms its forward and both backwards must be
inside ``GatheredParameters``, because every transform could be such a first backward.
``zero_grad()`` discards complete gradients that ``step`` has not used, and keeps gradients in the middle of an accumulation.

Precision

In fp32 the shard is its own master. In bf16 and fp16, parameters are cast, masters are fp32 copies of the 16-bit values, and gradients of
one micro-step are sent in 16 bit and accumulated in fp32. Buffers keep the dtype that they were loaded with, unless
``data_types.buffer_dtype`` is set; so do parameters that the model or ``data_types.keep_in_fp32_modules`` names (``assembly/kept_types.py``
reads the names and computes the dtype of each tensor; [Note: norms with statistics]). These parameters have units of their own, whose
shards are the masters and whose gradients are sent in fp32. ``zero.Init`` casts when the model is complete ([Note: cast when built]);
weights that ``from_pretrained`` loads in fp32 are widened before it copies them into shards (``integrations/pretrained.py``). If torch
raises an error about dtypes in a forward, the names of the tensors that kept their dtype are added to it (``assembly/kept_types.py``). The
mean of fp16 gradients is taken in two parts, before and after the sum; the factor before it is a power of two near the square root of the
number of ranks (``assembly/policies.py``, ``gradient_policy``), so that the sum stays below 65504. ``torch_autocast`` keeps fp32
parameters. An autocast region around the engine is switched off inside the engine, with a warning.
"""
