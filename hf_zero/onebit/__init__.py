"""Run 1-bit Adam: its changes of the optimizer and of the step.

``optim/onebit_adam.py`` holds hyper-parameters and the arithmetic of the warm-up, which is AdamW's own. When it is over,
``onebit/step.py`` lets its ``GradientExchange`` keep the gradients unsharded (summed over micro-steps in fp32, never
sent), takes their norm ([Note: the norm of local gradients]), and ``onebit/sharded.py`` exchanges codes instead: per unit ``pack`` →
exchange → ``serve`` → all-gather → ``finish``, three units under way at a time in the same order on every rank. The code of a vector is
``native/codes.py`` (``compress`` packs, ``recompress`` is the server's average and second coding, ``take`` decodes and updates): chunks
never reach over the end of a parameter or of a rank's part, so padding is in none. Warm-up reductions at stage 0 are summed in rank order
(``Collectives.all_reduce_in_order``), which makes stages 0 and 1 and the reference equal bit for bit. [Note: elements without variance]
and [Note: errors at another number of ranks] say what happens there. Users' page: docs/onebit-adam.md.
"""
