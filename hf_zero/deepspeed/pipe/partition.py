"""Division of a list of layers over the stages of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hf_zero.deepspeed.served.helpers import partition_balanced, partition_uniform
from hf_zero.errors import ConfigError


def stage_borders(method: str, sizes: Sequence[int], names: Sequence[str], stages: int) -> list[int]:
    """Return borders (``stages`` + 1): stage s has the layers from ``borders[s]`` to ``borders[s + 1] - 1``, at least one.

    Args:
        method: ``uniform`` (as many layers each), ``parameters`` (trainable elements as even as can be) or ``type:REGEX`` (layers whose
            class name the expression matches anywhere, in any case, as even as can be).
        sizes: Trainable elements of each layer.
        names: Name of each one's class.
        stages: Their number.

    Raises:
        ConfigError: There are fewer layers than stages, the method is none of these, or the expression is wrong or matches nothing.
    """
    if len(sizes) < stages:
        raise ConfigError(
            f"a PipelineModule of {len(sizes)} layer(s) over {stages} stages: each needs one; num_stages up to {len(sizes)} fits"
        )
    kind, _, pattern = method.partition(":")
    match kind.lower():
        case "uniform":
            return partition_uniform(len(sizes), stages)
        case "parameters":
            return partition_balanced(sizes, stages)
        case "type" if pattern:
            return partition_balanced(_matches(pattern, names), stages)
    raise ConfigError(f"partition_method is {method!r}; 'uniform', 'parameters' or 'type:REGEX' (the name of a layer's class) is allowed")


def _matches(pattern: str, names: Sequence[str]) -> list[int]:
    try:
        found = [int(re.search(pattern, name, re.IGNORECASE) is not None) for name in names]
    except re.error as error:
        raise ConfigError(f"partition_method 'type:{pattern}' is no regular expression: {error}") from None
    if not any(found):
        raise ConfigError(f"partition_method 'type:{pattern}' matches no layer; there are {', '.join(dict.fromkeys(names))}")
    return found
