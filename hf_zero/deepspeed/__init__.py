"""DeepSpeed's interface over the core.

Where to look:

- ``initialize``, ``engine``: what ``deepspeed.initialize`` does and returns. The engine's names come from ``getters`` (questions),
  ``requests`` (changes), ``timers`` and ``offload_handle``; ``zero_init``, ``param_attributes`` and ``safe_values`` are about parameters.
- ``alias``: `import deepspeed`, every name it has, and those that are refused.
- ``served``: the rest that scripts import, by topic: devices, processes and groups, configuration, optimizers, logs, small helpers.
- ``launcher``: the `deepspeed` command.
"""

from __future__ import annotations

from hf_zero.deepspeed.alias.finder import install_as_deepspeed

__all__ = ["install_as_deepspeed"]
