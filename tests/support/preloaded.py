"""Module that the rank server imports last: the package without its integrations and Triton kernels, so that no rank imports it again."""

import importlib
import traceback

from tests.support.sources import modules

LEFT_TO_RANKS = ("hf_zero.integrations", "hf_zero.native.triton", "hf_zero.__main__", "hf_zero.cli")

for name in modules():
    if not name.startswith(LEFT_TO_RANKS):
        try:
            importlib.import_module(name)
        except Exception:  # the server must not end: a test of that module fails with its own message
            traceback.print_exc()
