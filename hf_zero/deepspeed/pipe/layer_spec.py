"""Describe layers, so that they are built only on the ranks that need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from hf_zero.deepspeed.served.helpers import call_to_str
from hf_zero.errors import ConfigError
from hf_zero.observe import logger


class LayerSpec:
    """The description of a layer that a pipeline builds only on the ranks of its stage.

    Args:
        typename: Class of the layer.
        module_args: Positional arguments of its constructor.
        module_kwargs: Keyword arguments of its constructor.

    Raises:
        ConfigError: ``typename`` is not a class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ConfigError(f"{type(self).__name__}({typename!r}): pass a class of torch.nn.Module, which the pipeline constructs")
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Build and return a new layer.

        Args:
            log: Whether to log the construction.
        """
        if log:
            logger.info("building %r", self)
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        return call_to_str(self.typename.__name__, *self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """The description of a layer that occurs at several positions with the same parameters.

    The first description with a key defines the layer; the others run the same layer again. All parameters are shared, over any number of
    stages.

    Args:
        key: Key of the layer; descriptions with the same key share parameters.
        typename: Class of the layer.
        module_args: Positional arguments of its constructor.
        forward_fn: ``forward_fn(layer, inputs)``, called instead of ``layer(inputs)``, for example to use an embedding as the head.
        tied_weight_attr: Name of the shared parameter, or several names; each must exist.
        module_kwargs: Keyword arguments of the constructor.
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
