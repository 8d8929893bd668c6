"""Find the frozen parameters that PEFT writes into an adapter's file, so that a save without the frozen base still has them.

Trainer gathers trained parameters only when it saves a PEFT model at stage 3. PEFT also writes adapters that are frozen now (a reference,
one of several that a script switches) and embeddings that have an adapter or were resized.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_zero.comm.collectives import Collectives


def frozen_names(module: nn.Module, collectives: Collectives) -> frozenset[str]:
    """Return the names of parameters, frozen or not, that PEFT writes beside trained ones; empty for other models. Collective.

    Args:
        module: The user's module.
        collectives: Collectives of all ranks, which take rank 0's answer: it alone may see the base's files.
    """
    configs = getattr(module, "peft_config", None)
    if not isinstance(configs, dict) or not hasattr(module, "get_base_model"):
        return frozenset()
    adapters = set(configs)
    found = {name for name, _ in module.named_parameters(remove_duplicate=False) if not adapters.isdisjoint(name.split("."))}
    resized = collectives.any_rank(collectives.rank == 0 and _is_resized(module), "vocabulary")
    for layer in _embeddings(module):
        base = getattr(layer, "base_layer", layer if resized else None)
        if isinstance(base, nn.Module):
            found |= {f"{name}.{of}" for name, inner in module.named_modules() if inner is base for of, _ in base.named_parameters()}
    return frozenset(found)


def _embeddings(module: Any) -> list[Any]:
    getters = (getattr(module, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
    return [getter() for getter in getters if callable(getter)]


def _is_resized(module: Any) -> bool:
    """Return whether the model's vocabulary is not that of the base's files; PEFT asks the same."""
    size = getattr(getattr(module, "config", None), "vocab_size", None)
    bases = {config.base_model_name_or_path for config in module.peft_config.values()} - {None, ""}
    for base in bases if size is not None else ():
        try:
            if type(module.config).from_pretrained(base, local_files_only=True).vocab_size != size:
                return True
        except (OSError, ValueError):  # no such files here: PEFT then takes the vocabulary for the base's own
            continue
    return False
