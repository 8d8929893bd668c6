"""Whether something that DeepSpeed compiles on the user's machine is there: offloading to files is, and compiles nothing."""

from __future__ import annotations

from typing import Final


class AsyncIOBuilder:
    """Stands for the builder of DeepSpeed's file operator, for code that asks by its name whether ``device: nvme`` can be used."""

    NAME: Final = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Always: files are read and written with what Python has."""
        return True


COMPATIBLE_OPS: Final = {AsyncIOBuilder.NAME: True}
