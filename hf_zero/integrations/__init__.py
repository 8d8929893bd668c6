"""Integrations with other frameworks; each name loads on first use, so that only the framework in use is imported.

Some of what an engine does depends on the library that calls it: Trainer takes a destroyed engine for prepared when it trains again,
libraries delete older checkpoints while ours is written in the background, metrics are gathered from ranks that share samples, and
``from_pretrained`` must not begin with random weights. No frames are read for it (a test counts). The few methods that tell are wrapped
when the module that defines them is imported, by the same finder, and say so while they run ([Note: callers],
``integrations/callers.py``). When one is gone, a warning names the library, its version, the method and what no longer works; where
samples would be counted several times, making an engine is an error, and without knowing who rotates checkpoints, none is written in the
background. What integrations do to an engine they attach to ``core/engine.py`` (``integrations/attach.py``); nothing below imports them.

``core/step/accumulation.py`` decides what a boundary is, for four calling conventions: the caller says it before each backward
(accelerate 1.15), steps every time and relies on the count (accelerate 1.6, Lightning), steps the optimizer (Fabric), or uses
``no_sync``. The count is that of calls of ``step``, as in DeepSpeed: with ``gradient_accumulation_steps`` 2 every second call updates,
with all gradients since, however many backwards came before each. A loop over accelerate that accumulates without saying so
(``accelerate``'s guide for samples of variable size) updates in ``optimizer.step()`` ([Note: when accelerate steps],
``integrations/accumulate.py``). The first update of every loop over accelerate waits for ``optimizer.step()``, so that the norm that the
script clips to is known ([Note: the first update waits]); this and its other values that the configuration has too:
``integrations/script_values.py`` ([Note: the script's value and the configuration's]).
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "ZeroPlugin": "hf_zero.integrations.accelerate_plugin",
    "DummyOptim": "hf_zero.integrations.accelerate_plugin",
    "DummyScheduler": "hf_zero.integrations.accelerate_plugin",
    "ZeroStrategy": "hf_zero.integrations.lightning",
    "FabricZeroStrategy": "hf_zero.integrations.lightning",
    "AveragedWeightsCallback": "hf_zero.integrations.averages",
}

__all__ = [*_NAMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'hf_zero.integrations' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
