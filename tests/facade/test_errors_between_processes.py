"""Errors pass between processes: a pool pickles its workers' errors, and waits for ever where one cannot be read again."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
from collections.abc import Iterator

import pytest

from hf_zero import errors
from hf_zero.deepspeed.alias.finder import RefusedAttributeError, RefusedImportError


def _classes(base: type[BaseException]) -> Iterator[type[BaseException]]:
    yield base
    for kind in base.__subclasses__():
        if kind.__module__.startswith("hf_zero."):
            yield from _classes(kind)


def _import_refused(_: int) -> None:
    importlib.import_module("deepspeed.inference")


@pytest.mark.parametrize("kind", sorted({*_classes(errors.HfZeroError)} - {RefusedImportError}, key=lambda kind: kind.__qualname__))
def test_every_error_is_read_again(kind: type[BaseException]) -> None:
    found = pickle.loads(pickle.dumps(kind("the text")))
    assert type(found) is kind and str(found) == str(kind("the text"))


def test_refused_names_are_read_again() -> None:
    found = pickle.loads(pickle.dumps(RefusedImportError("the text", "deepspeed.x")))
    assert type(found) is RefusedImportError and (found.name, str(found)) == ("deepspeed.x", "the text")
    assert str(pickle.loads(pickle.dumps(RefusedAttributeError("the text")))) == "the text"
    assert pickle.loads(pickle.dumps(errors.Preempted())).code == errors.PREEMPTED_STATUS


def test_a_pool_raises_the_refusal_of_its_worker() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        with pytest.raises(RefusedImportError, match="deepspeed.inference is not provided"):
            pool.map_async(_import_refused, [0]).get(timeout=60)
