"""Fixtures and options of the whole suite: what is slow, what needs a GPU, and what a test must not leave behind."""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import ranks

# Set before huggingface_hub reads it: a name of the Hub fails at once, while its client would repeat requests for half a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Variables that start-up code reads. A test that leaves one behind changes the meaning of the next.
WATCHED_PREFIXES = ("ACCELERATE_", "DEEPSPEED_", "DS_", "FSDP_", "HF_ZERO", "LOCAL_", "MASTER_", "RANK", "WORLD_SIZE")

_SHARED_SECONDS: dict[tuple[str, str], float] = {}  # set-up of each shared fixture, by the path below which it counts and its name


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well (the full parity matrix)")
    parser.addoption("--short", action="store_true", help="leave out the tests that take seconds, which tests/data/long_tests.json names")
    parser.addoption("--slow-part", metavar="K/N", help="run only tests marked slow, and of these the K-th of N parts, drawn by name")


def pytest_configure(config: pytest.Config) -> None:
    """The fast run repeats the same examples, so that a change alone can break it; the slow one draws new ones each time."""
    slow = [HealthCheck.too_slow]  # how fast examples are drawn depends on the machine
    settings.register_profile("repeat", derandomize=True, database=None, deadline=None, suppress_health_check=slow)
    settings.register_profile("explore", derandomize=False, print_blob=True, deadline=None, suppress_health_check=slow)
    settings.load_profile("explore" if config.getoption("--slow") else "repeat")
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # files with many tests first; ``longest_first`` knows better


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say that ``--short`` leaves tests out: with several processes, pytest does not count them."""
    if not config.getoption("--short"):
        return None
    return f"short: {len(_long_tests())} tests of several seconds are left out; `make test LONG=1` runs them too, as CI does"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``-m quick`` reads only the files that mark something so: importing all others would take longer than the tests."""
    if config.option.markexpr == "quick" and collection_path.name.startswith("test_"):
        return "mark.quick" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_slow_rows(items, all_rows=not any("::" in argument for argument in config.args))
    if config.getoption("--slow-part"):
        part, parts = map(int, config.getoption("--slow-part").split("/"))
        if not 1 <= part <= parts:
            raise pytest.UsageError(f"--slow-part {part}/{parts}: the first number is at least 1 and at most the second")
        _keep(config, items, lambda item: _is_slow(item) and zlib.crc32(item.nodeid.encode()) % parts == part - 1)
    elif not config.getoption("--slow") and "slow" not in config.option.markexpr:
        _keep(config, items, lambda item: not _is_slow(item))
    if config.getoption("--short"):
        long = _long_tests()
        _keep(config, items, lambda item: item.nodeid.removeprefix("tests/") not in long)
    for item in items:
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if hasattr(config, "workerinput"):  # one of several processes, which all sort alike
        longest_first(items)
    if any("parity" in item.nodeid for item in items):
        ranks.warm_up()  # imports transformers while the first tests run


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _long_tests() -> frozenset[str]:
    """Return the ids, below ``tests/``, of the tests that ``python -m tools.times_of_tests --write`` found long."""
    return frozenset(json.loads((Path(__file__).parent / "data" / "long_tests.json").read_text(encoding="utf-8")))


def _keep(config: pytest.Config, items: list[pytest.Item], runs: Callable[[pytest.Item], bool]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = filter(runs, items)


def mark_slow_rows(items: list[pytest.Item], all_rows: bool) -> None:
    """Mark the rows of a test as slow that its mark ``fast_rows`` does not name.

    Args:
        items: Tests.
        all_rows: They include all rows of each test, so each name must be one of theirs.

    Raises:
        pytest.UsageError: A mark names a row that its test does not have.
    """
    missing: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("fast_rows")
        if mark is None:
            continue
        row = getattr(item, "callspec").id  # noqa: B009 - of a parametrised test
        missing.setdefault(item.nodeid.removesuffix(f"[{row}]"), set(mark.args)).discard(row)
        if row not in mark.args:
            item.add_marker(pytest.mark.slow)
    for name, rows in missing.items():
        if rows and all_rows:
            raise pytest.UsageError(f"{name}: the mark fast_rows names {sorted(rows)}, and the test has no such rows")


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by the seconds of their files, longest first: a long file that one process began last would keep the others waiting.

    A file that ``python -m tools.times_of_tests --write`` has not seen counts by its number of tests, before all others.
    """
    path = Path(__file__).parent / "data" / "seconds.json"
    seconds: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    counts = Counter(item.path for item in items)

    def key(item: pytest.Item) -> tuple[bool, float, str]:
        name = item.path.relative_to(Path(__file__).parent).as_posix()
        return name in seconds, -seconds.get(name, counts[item.path]), name

    items.sort(key=key)


def pytest_collection_finish() -> None:
    """One thread, as ranks have: tensors are small, and idle threads of torch would look for work on cores that other tests need."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    """Note the seconds of fixtures that several tests share: leaving out the first of these tests saves nothing."""
    started = time.monotonic()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function" and (seconds := time.monotonic() - started) > 1:
            _SHARED_SECONDS[fixturedef.baseid, fixturedef.argname] = seconds


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item: Any) -> None:
    """Write the seconds of a test's shared fixtures into the report, for ``tools.times_of_tests``."""
    shared = [s for (folder, name), s in _SHARED_SECONDS.items() if name in item.fixturenames and item.nodeid.startswith(folder)]
    if shared:
        item.user_properties.append(("shared seconds", sum(shared)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Garbage, which engines and tests ask to be collected, is looked for among what tests make: not in a million objects of imports."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def trainer_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny checkpoints that the Trainer tests start from."""
    from tests.support import trainers

    folder = tmp_path_factory.mktemp("models")
    trainers.save_models(folder)
    return folder


def pytest_sessionfinish() -> None:
    ranks.close_pools()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that changes the process for later tests: launcher variables, a process group, torch's default dtype, grad mode, ...

    The log's level, which libraries set, is put back.
    """
    before, modes, log = _watched(), _modes_of_torch(), logging.getLogger("hf_zero")
    level = log.level
    yield
    log.setLevel(level)
    import torch.distributed as dist

    after = _watched()
    left_group = dist.is_available() and dist.is_initialized()
    if left_group:
        dist.destroy_process_group()
    for name in after.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    modes_after = _modes_of_torch()
    changed += [f"{name} of torch ({modes[name]} before, {value} after)" for name, value in modes_after.items() if modes[name] != value]
    if left_group or changed:
        pytest.fail(f"the test left behind: process group {left_group}, changed {changed}")


def _watched() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(WATCHED_PREFIXES)}


def _modes_of_torch() -> dict[str, object]:
    """Return the state of this process that torch's functions depend on; a device written in Python stays registered for good."""
    import torch

    return {
        "registered device": torch._C._get_privateuse1_backend_name(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "intra-op threads": torch.get_num_threads(),
    }


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
