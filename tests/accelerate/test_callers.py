"""Who is calling: methods of the libraries that are wrapped, whenever they are imported, and what is said when one is gone."""

from __future__ import annotations

import inspect
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest

import _hf_zero_startup
from hf_zero.errors import UnsupportedError
from hf_zero.integrations import callers, methods, pretrained, saves
from hf_zero.integrations.checkpoint_slices import Load
from hf_zero.observe import logger
from tests.support.processes import run_python
from tests.support.rows import slow_but


def running() -> list[Any]:
    return [call.caller for call in callers.running(*callers.METHODS)]


class Trainer:
    """As much of transformers' class as is wrapped."""

    def train(self, resume: bool = False, **options: Any) -> list[Any]:
        """Trains."""
        if options.get("fails"):
            raise ValueError("training failed")
        return running() if not resume else options["inner"].train()

    def evaluation_loop(self) -> None: ...


class Own(Trainer):
    """A user's subclass."""

    def train(self, resume: bool = False, **options: Any) -> list[Any]:
        before = running()
        found = super().train(resume, **options)
        assert running() == before and self not in before
        return found


def _apply_weight_conversions_to_state_dict(count: int) -> Iterator[int]:
    for _ in range(count):
        yield len(running())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes a module of a library of what it is given, wraps it, and forgets what was lost."""
    monkeypatch.setattr(callers, "_lost", {})
    monkeypatch.setattr(callers, "_attached", WeakKeyDictionary())

    def make(name: str, **content: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(content)
        callers.attach(module)
        return module

    methods = {name: Trainer.__dict__[name] for name in ("train", "evaluation_loop")}
    yield make
    for name, method in methods.items():
        setattr(Trainer, name, method)


def test_a_call_is_seen_while_it_runs_and_in_its_own_thread(library: Any) -> None:
    trainer, other = library("transformers.trainer", Trainer=Trainer).Trainer(), Own()
    assert trainer.train() == [trainer]
    assert trainer.train(True, inner=other) == [other, trainer], "the innermost first"
    with pytest.raises(ValueError, match="training failed"):
        trainer.train(fails=True)
    assert running() == []

    found: list[Any] = []
    inner = Trainer()
    inner.train = lambda: [thread.start(), thread.join(), found.extend(running())]  # type: ignore[method-assign, func-returns-value]
    thread = threading.Thread(target=lambda: found.append(running()))
    trainer.train(True, inner=inner)
    assert found == [[], trainer]


def test_a_wrapped_method_is_still_itself(library: Any) -> None:
    plain = Trainer.train
    library("transformers.trainer", Trainer=Trainer)
    wrapped = Trainer.train
    assert wrapped is not plain
    assert inspect.signature(wrapped) == inspect.signature(plain) and wrapped.__doc__ == "Trains."
    assert pickle.loads(pickle.dumps(wrapped)) is wrapped
    assert type(pickle.loads(pickle.dumps(Own()))) is Own
    library("transformers.trainer", Trainer=Trainer)
    assert Trainer.train is wrapped, "once is enough"


def test_what_a_script_puts_in_place_of_a_wrapped_method_stays(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = library("transformers.trainer", Trainer=Trainer)
    wrapped = module.Trainer.train

    def own(self: Trainer, **options: Any) -> list[Any]:
        return [*wrapped(self, **options), "own"]

    monkeypatch.setattr(module.Trainer, "train", own)
    callers.attach(module)  # another import has made code look for `deepspeed` again
    trainer = module.Trainer()
    assert module.Trainer.train is own and trainer.train() == [trainer, "own"], "called, and seen once"


def test_a_generator_runs_only_while_its_body_does(library: Any) -> None:
    convert = _apply_weight_conversions_to_state_dict
    module = library("transformers.integrations.deepspeed", _apply_weight_conversions_to_state_dict=convert)
    seen = []
    for depth in module._apply_weight_conversions_to_state_dict(2):
        seen += [depth, len(running())]
    assert seen == [1, 0, 1, 0]
    generator = module._apply_weight_conversions_to_state_dict(2)
    next(generator)
    generator.close()
    assert running() == []


@pytest.fixture
def warnings(library: Any) -> Iterator[list[str]]:
    found: list[str] = []
    note = lambda record: found.append(record.getMessage())  # noqa: E731
    logger.addFilter(note)
    yield found
    logger.removeFilter(note)


def test_a_renamed_method_is_named_at_once_and_saves_are_no_longer_in_the_background(library: Any, warnings: list[str]) -> None:
    class ModelCheckpoint:
        def _write_checkpoint(self) -> None: ...

    library("lightning.pytorch.callbacks.model_checkpoint", ModelCheckpoint=ModelCheckpoint)
    version = callers.importlib.metadata.version("lightning")
    text = f"lightning {version} has no lightning.pytorch.callbacks.model_checkpoint.ModelCheckpoint._save_checkpoint, which hf_zero needs"
    assert len(warnings) == 1 and warnings[0].startswith(text)
    assert "the last complete checkpoint could be deleted" in warnings[0]
    assert saves.keeps_too_few() == warnings[0]


def test_what_would_count_samples_twice_is_an_error(library: Any, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Accelerator:
        def __init__(self) -> None: ...
        def prepare(self) -> None: ...
        def _prepare_tp(self) -> None: ...
        def no_sync(self) -> None: ...
        def gather(self) -> None: ...
        def save_state(self) -> None: ...
        def get_state_dict(self) -> None: ...
        def clip_grad_norm_(self) -> None: ...

        def clip_grad_value_(self) -> None: ...
        def backward(self) -> None: ...
        def _prepare_deepspeed(self) -> None: ...
        def _prepare_cp(self) -> None: ...
        def maybe_context_parallel(self) -> None: ...
        def prepare_model(self) -> None: ...

    others = {
        "_refuse_recurrent_layers_under_sequence_parallelism": lambda model: None,
        "map_pytorch_optim_to_deepspeed": lambda optimizer: None,
    }
    monkeypatch.setitem(sys.modules, "accelerate.accelerator", library("accelerate.accelerator", Accelerator=Accelerator, **others))
    assert len(warnings) == 2 and "Accelerator.gather_for_metrics" in warnings[0] and "prepare_data_loader" in warnings[1]
    callers.require(methods.PREPARE, methods.GATHER)
    with pytest.raises(UnsupportedError, match=r"^accelerate .* has no .*gather_for_metrics.* each sample would be counted once per rank"):
        callers.require(methods.PREPARE, methods.METRICS)


def test_a_module_that_is_gone_is_an_error_too(library: Any) -> None:
    pytest.importorskip("accelerate")
    gone = methods.Method("accelerate.gone", "Accelerator.prepare", "nothing works")
    with pytest.raises(UnsupportedError, match=r"has no accelerate\.gone\.Accelerator\.prepare"):
        callers.require(gone)


def test_a_method_that_came_later_is_not_missed_before(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers.importlib.metadata, "version", lambda name: "4.57.6")
    library("transformers.integrations.deepspeed")
    assert not callers.lost(methods.CONVERSIONS)
    monkeypatch.setattr(callers.importlib.metadata, "version", lambda name: "5.0.0.dev0")
    library("transformers.integrations.deepspeed")
    assert callers.lost(methods.CONVERSIONS).startswith("transformers 5.0.0.dev0 has no ")


def test_a_method_is_missed_where_the_version_is_unknown(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_version(name: str) -> str:
        raise callers.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(callers.importlib.metadata, "version", no_version)
    assert methods.CONVERSIONS.since
    library("transformers.integrations.deepspeed")
    assert callers.lost(methods.CONVERSIONS).startswith("transformers (of unknown version) has no ")
    with pytest.raises(UnsupportedError, match=r"^transformers \(of unknown version\) has no "):
        callers.require(methods.CONVERSIONS)


def test_the_hook_watches_what_is_wrapped() -> None:
    assert {method.module for method in callers.METHODS} == _hf_zero_startup.WATCHED


IMPORTS = f"""
import importlib.util
for name in {sorted(_hf_zero_startup.WATCHED)}:
    places = name.split(".")
    if all(importlib.util.find_spec(".".join(places[: count + 1])) for count in range(len(places))):  # other versions lack some
        importlib.import_module(name)
"""
CHECK = """
from hf_zero.integrations import callers
for method in callers.METHODS:
    if callers.came_later(method) or importlib.util.find_spec(method.module.partition(".")[0]) is None:  # diffusers is optional
        continue
    found = sys.modules[method.module]
    for part in method.name.split("."):
        found = getattr(found, part)
    assert getattr(found, "fget", found).__dict__.get("hf_zero_method") is method, method
assert not callers._lost
print("all wrapped")
"""
ORDERS = {
    "before": f"""
import sys, _hf_zero_startup
sys.meta_path.remove(_hf_zero_startup.DeepSpeedAliasFinder)
{IMPORTS}
import hf_zero.deepspeed
hf_zero.deepspeed.install_as_deepspeed()
import deepspeed
{CHECK}""",
    "after": f"""
import os, sys
before = dict(os.environ)
import hf_zero, deepspeed, hf_zero.deepspeed
hf_zero.deepspeed.install_as_deepspeed()
hf_zero.initialize
assert not sys.modules.keys() & {{"accelerate", "transformers", "lightning"}}
{IMPORTS}
import accelerate
{CHECK}
added = sorted(os.environ.keys() - before.keys())
class Halt(Exception): ...
def halt(*args, **kwargs): raise Halt
accelerate.state.PartialState._prepare_backend = halt
try:
    accelerate.Accelerator()
except Halt:
    print("RANK" in added, os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])
""",
}
PLACED = {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}


@pytest.fixture(scope="module")
def printed() -> Callable[[str], list[str]]:
    """What a process that imports everything in one order prints; mpirun has started it."""
    variables = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in PLACED.items()}
    return cache(lambda order: run_python(ORDERS[order], env=variables).splitlines())


@pytest.mark.parametrize("order", slow_but(ORDERS, "after"))
def test_the_installed_libraries_have_every_method_whenever_they_are_imported(order: str, printed: Callable[[str], list[str]]) -> None:
    assert "all wrapped" in printed(order)


def test_imports_leave_the_environment_alone_until_a_state_is_made(printed: Callable[[str], list[str]]) -> None:
    """mpirun sets no RANK; accelerate, which reads it when a state is made, finds it then."""
    assert printed("after")[-1] == "False 1 1 2"


def test_loads_of_older_transformers_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_4(cls: str, model: str, state_dict: None, checkpoint_files: list[str], name: str, **kwargs: Any) -> tuple[Any, ...]:
        return cls, model, checkpoint_files, name, kwargs

    monkeypatch.setattr(pretrained, "_configuration_in_use", lambda: True)
    assert pretrained.load_weights(of_4, "class", "model", None, ["a.safetensors"], "name", dtype=1) == (
        "class", "model", ["a.safetensors"], "name", {"dtype": 1},
    )  # fmt: skip
    of_5_1 = SimpleNamespace(is_quantized=False, device_map=None, device_mesh=None)  # files are always mapped
    assert Load(of_4, None, None, ["a.safetensors"], of_5_1, (), {})._are_mapped()
