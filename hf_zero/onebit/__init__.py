"""1-bit Adam: changes to the optimizer and to the step.

``optim/onebit_adam.py`` holds hyper-parameters and the arithmetic of the warm-up, which is AdamW's. After the warm-up,
``onebit/step.py`` makes its ``GradientExchange`` keep the gradients unsharded (summed over micro-steps in fp32, never sent) and computes
their norm ([Note: the norm of local gradients]), while ``onebit/sharded.py`` exchanges codes instead. Per unit it runs ``pack`` →
exchange → ``serve`` → all-gather → ``finish``, with three units in progress at a time, in the same order on every rank.
``native/codes.py`` codes a vector (``compress`` packs, ``recompress`` is the server's average and second coding, ``take`` decodes and
updates). Chunks never cross the end of a parameter or of a rank's part, so no chunk has padding. Warm-up reductions at stage 0 are summed
in rank order (``Collectives.all_reduce_in_order``), which makes stages 0 and 1 and the reference equal bit for bit. See also
[Note: elements without variance] and [Note: errors at another number of ranks]. Users' page: docs/onebit-adam.md.
"""
