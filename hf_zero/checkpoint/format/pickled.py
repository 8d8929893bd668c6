"""Values of a script's own classes in its client state, where the configuration lets them be pickled: the only pickles in a checkpoint."""

from __future__ import annotations

import pickle
from typing import Any

from hf_zero.errors import CheckpointError

PICKLE_KEY = "hf_zero.pickle_client_state"


def pickled(value: Any, what: str) -> bytes:
    """The pickle of ``value``.

    Raises:
        CheckpointError: It cannot be pickled; says ``what`` it is.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:  # whatever the value's own class raises
        raise CheckpointError(f"{what}, cannot be pickled ({type(error).__name__}: {error}); leave it out") from error


def unpickled(data: bytes) -> Any:
    """The value again. Runs what the writer of ``data`` wanted: asked for by the user's configuration alone."""
    return pickle.loads(data)
