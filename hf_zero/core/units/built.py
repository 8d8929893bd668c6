"""How a parameter of a divided model was built."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Built:
    """Type and device that the parameters of a unit had when their module was built.

    [Note: as it was built] A random number depends on the type and the device it is drawn for: a 16-bit normal distribution is no rounded
    fp32 one, and each device has a generator of its own. So until the model is built its units have the type that constructors gave,
    whoever makes a parameter whole sees it on the device that it was built on, and the cast to the run's type comes at the end. A model
    that is built divided then has the bits of one that was built whole and cast.

    Attributes:
        dtype: The type.
        device: The device.
        shown: The model is still being built: whole parameters have this type and device.
    """

    dtype: torch.dtype
    device: torch.device
    shown: bool
