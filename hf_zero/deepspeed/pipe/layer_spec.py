"""Layers that are described first and built where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hf_zero.deepspeed.served.helpers import call_to_str
from hf_zero.errors import ConfigError
from hf_zero.observe import logger


class LayerSpec:
    """A layer that a pipeline builds on the ranks of its stage only.

    Args:
        typename: Class of the layer.
        module_args: For its constructor.
        module_kwargs: Likewise.

    Raises:
        ConfigError: ``typename`` is no class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(f"{type(self).__name__}({typename!r}): the class of a torch.nn.Module is allowed, which the pipeline calls")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Return a new layer.

        Args:
            log: Whether to say so in the log.
        """
        if log:
            logger.info("building %r", self)
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        return call_to_str(self.typename.__name__, *self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that stands in several places under one key, with the same parameters.

    Whoever names a key first builds the layer; the others run it again. All parameters are shared, on any number of stages.

    Args:
        key: Name that places with the same parameters share.
        typename: Class of the layer.
        module_args: For its constructor.
        forward_fn: ``forward_fn(layer, inputs)`` in place of ``layer(inputs)``: an embedding that serves as the head.
        tied_weight_attr: Name of the parameter for which the layer is shared, or several; each must be there.
        module_kwargs: For the constructor.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
