"""Plain values as JSON: every supported type comes back as it was, every other one is refused by its key."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import pathlib
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.checkpoint.format.plausible import check_group
from hf_zero.checkpoint.format.values import Decoder, Encoder, encode_scalar
from hf_zero.errors import CheckpointError

pytestmark = pytest.mark.quick


def round_trip(value: Any) -> Any:
    encoder = Encoder()
    text = json.dumps(encoder.encode(value, "client_state"), allow_nan=False)
    return Decoder(encoder.tensors.__getitem__, "index.json").decode(json.loads(text))


PLAIN = [
    None,
    True,
    3,
    2**80,
    -0.0,
    1e-310,
    "",
    "ünï\n\x00",
    [],
    [1, [2]],
    (),
    (1,),
    {},
    {"a": {"b": [1]}},
    {1: "x", (2, 3): "y", None: 0, False: 1, 2.5: "f"},
    {"$": "tensor", "name": "not one"},
    OrderedDict([("z", 1), ("a", 2)]),
    set(),
    {1, "a", (2,)},
    frozenset({b"x"}),
    deque([1, (2,)], maxlen=3),
    Counter({"a": 2, 3: 1}),
    defaultdict(list, {"x": [1]}),
    defaultdict(None, {1: 2}),
    argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
    types.SimpleNamespace(a=[1]),
    datetime.datetime(2024, 5, 1, 12, 30, 1, 5, tzinfo=datetime.timezone.utc),
    datetime.date(2024, 5, 1),
    datetime.time(1, 2),
    datetime.timedelta(days=-1, microseconds=3),
    b"\x00\xff",
    bytearray(b"ab"),
    1 + 2j,
    complex("inf-infj"),
    range(2, 9, 3),
    slice(None, 4),
    float("inf"),
    -float("inf"),
    torch.float8_e4m3fn,
    torch.device("cuda", 1),
    torch.Size([2, 3]),
    pathlib.Path("a/../b"),
    np.float32(0.1),
    np.int64(-3),
    np.bool_(True),
    np.str_("x"),
    np.datetime64("2024-05-01"),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: "set" if isinstance(value, set) else f"{type(value).__name__}-{value!r}"[:40])
def test_value_comes_back_with_its_type(value: Any) -> None:
    back = round_trip(value)
    assert type(back) is type(value) and back == value
    if isinstance(value, float):
        assert math.copysign(1, back) == math.copysign(1, value)


def test_random_states_come_back() -> None:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}  # noqa: NPY002
    back = round_trip(states)
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])  # noqa: NPY002
    torch.set_rng_state(back["torch"])


class HistoryBuffer:
    """A series of logged values with the constructor and the names of mmengine's class; its trainers save some with each checkpoint."""

    def __init__(self, log_history: Any = (), count_history: Any = (), max_length: int = 1_000_000) -> None:
        self.max_length = max_length
        self.data = np.array(log_history), np.array(count_history)


HISTORY = "mmengine.logging.history_buffer"


def test_series_of_mmengine_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HistoryBuffer, "__module__", HISTORY)
    found = types.ModuleType(HISTORY)
    found.HistoryBuffer = HistoryBuffer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, HISTORY, found)
    hub = {"log_scalars": {"train/loss": HistoryBuffer([0.5, 0.25], [1, 2], 7)}, "runtime_info": {"epoch": 1}}
    back = round_trip(hub)["log_scalars"]["train/loss"]
    assert type(back) is HistoryBuffer and back.max_length == 7
    assert [list(values) for values in back.data] == [[0.5, 0.25], [1, 2]] and back.data[1].dtype == np.int64
    written = Encoder().encode(hub, "client_state")
    monkeypatch.setitem(sys.modules, HISTORY, None)
    with pytest.raises(CheckpointError, match="install mmengine"):
        Decoder({}.__getitem__, "index.json").decode(written)
    with pytest.raises(CheckpointError, match=r"subprocess\.Popen"):
        Decoder({}.__getitem__, "index.json").decode({"$": "rebuilt", "class": "subprocess.Popen", "items": {"args": "true"}})


def _schedulers() -> dict[str, Any]:
    """Every scheduler of torch, a few steps on."""
    from torch.optim import lr_scheduler as kinds

    def sgd() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)

    makers: dict[str, Any] = {
        "LambdaLR": lambda o: kinds.LambdaLR(o, lambda step: 0.5**step),
        "MultiplicativeLR": lambda o: kinds.MultiplicativeLR(o, lambda step: 0.9),
        "StepLR": lambda o: kinds.StepLR(o, 2),
        "MultiStepLR": lambda o: kinds.MultiStepLR(o, [1, 3]),
        "ConstantLR": kinds.ConstantLR,
        "LinearLR": kinds.LinearLR,
        "ExponentialLR": lambda o: kinds.ExponentialLR(o, 0.9),
        "PolynomialLR": kinds.PolynomialLR,
        "CosineAnnealingLR": lambda o: kinds.CosineAnnealingLR(o, 10),
        "CosineAnnealingWarmRestarts": lambda o: kinds.CosineAnnealingWarmRestarts(o, 5),
        "CyclicLR": lambda o: kinds.CyclicLR(o, 0.01, 0.1),
        "OneCycleLR": lambda o: kinds.OneCycleLR(o, 0.1, total_steps=10),
        "ReduceLROnPlateau": kinds.ReduceLROnPlateau,
        "SequentialLR": lambda o: kinds.SequentialLR(o, [kinds.ConstantLR(o), kinds.ExponentialLR(o, 0.9)], [2]),
        "ChainedScheduler": lambda o: kinds.ChainedScheduler([kinds.ConstantLR(o), kinds.ExponentialLR(o, 0.9)]),
    }
    return {name: (lambda make=make: make(sgd())) for name, make in makers.items()}


@pytest.mark.parametrize("name", _schedulers())
def test_state_of_every_scheduler_of_torch_resumes(name: str) -> None:
    make = _schedulers()[name]
    plateau = name == "ReduceLROnPlateau"
    scheduler, other = make(), make()
    nested = name in ("SequentialLR", "ChainedScheduler")

    def optimizer_of(made: Any) -> Any:
        return made._schedulers[0].optimizer if nested else made.optimizer

    for _ in range(3):
        optimizer_of(scheduler).step()
        scheduler.step(1.0) if plateau else scheduler.step()
    other.load_state_dict(round_trip(scheduler.state_dict()))
    for group, mine in zip(optimizer_of(other).param_groups, optimizer_of(scheduler).param_groups, strict=True):
        group["lr"] = mine["lr"]  # the groups are the optimizer's state
    for made in (scheduler, other):
        optimizer_of(made).step()
        made.step(1.0) if plateau else made.step()
    assert scheduler.get_last_lr() == other.get_last_lr()


def test_nan_comes_back() -> None:
    assert math.isnan(round_trip([float("nan")])[0])


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3), np.float16),
        np.arange(6).reshape(2, 3).T,
        np.array(["a", "bc"]),
        np.array(1.5),
        np.array([1 + 1j], np.complex128),
        np.array([2**63], np.uint64),
        np.arange(3, dtype=">i4"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    back = round_trip({"x": array})["x"]
    assert type(back) is np.ndarray and back.dtype == array.dtype and back.shape == array.shape and (back == array).all()
    assert back.flags.writeable


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.float8_e5m2, torch.complex64])
def test_tensors_go_to_a_file_of_their_own(dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 3, dtype=dtype)
    encoder = Encoder()
    assert encoder.encode([tensor], "x") == [{"$": "tensor", "name": "00000 x[0]"}]
    assert list(encoder.tensors) == ["00000 x[0]"] and encoder.tensors["00000 x[0]"].data_ptr() == tensor.data_ptr()


class Custom(dict):  # type: ignore[type-arg]
    """A mapping whose behaviour a plain dict would lose."""


class Text(str):
    """A string that is more than a string."""


REFUSED = {
    "object": (object(), "client_state['x']"),
    "function": ([len], "client_state['x'][0]"),
    "class": ({"k": int}, "client_state['x']['k']"),
    "dict subclass": (Custom(a=1), "client_state['x']"),
    "str subclass": (Text("a"), "client_state['x']"),
    "named tuple": (namedtuple("Point", "a b")(1, 2), "client_state['x']"),  # noqa: PYI024
    "object array": (np.array([object()]), "client_state['x']"),
    "record array": (np.zeros(1, dtype=[("a", "i4")]), "client_state['x']"),
    "masked array": (np.ma.array([1]), "client_state['x']"),
    "sparse tensor": (torch.eye(2).to_sparse(), "client_state['x']"),
    "meta tensor": (torch.empty(2, device="meta"), "client_state['x']"),
    "complex128 tensor": (torch.ones(1, dtype=torch.complex128), "client_state['x']"),
    "factory of the caller's": (defaultdict(lambda: 1), "client_state['x']"),
    "tensor as a key": ({torch.ones(1): 1}, "client_state['x'] has tensors as keys"),
    "key": ({object(): 1}, "of client_state['x']"),
    "generator": (torch.Generator(), "client_state['x']"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_key(name: str) -> None:
    value, path = REFUSED[name]
    with pytest.raises(CheckpointError) as caught:
        round_trip({"fine": 1, "x": value})
    assert path in str(caught.value)


def test_cycle_is_refused_and_shared_value_is_not() -> None:
    shared = [1]
    assert round_trip([shared, shared]) == [[1], [1]]
    shared.append(shared)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="contains itself"):
        round_trip(shared)


@pytest.mark.parametrize(
    "value",
    [torch.tensor(3.1), torch.tensor(7, dtype=torch.int64), torch.tensor(0.1, dtype=torch.bfloat16), torch.ones(1, 1), 2, None, 0.5],
)
def test_single_numbers_are_exact_and_fresh(value: Any) -> None:
    data = json.loads(json.dumps(encode_scalar(value, "x")))
    decoder = Decoder({}.__getitem__, "index.json")
    first, second = decoder.decode(data), decoder.decode(data)
    assert first == value and type(first) is type(value)
    if isinstance(value, torch.Tensor):
        assert first.dtype == value.dtype and first.shape == value.shape and first.data_ptr() != second.data_ptr()


HOSTILE = [
    {"$": "object", "class": "os.system"},
    {"$": ["list"]},
    {"$": "dtype", "value": "save"},
    {"$": "dtype", "value": "__loader__"},
    {"$": "ndarray", "dtype": "|O", "shape": [1], "base64": "AAAAAAAAAAA="},
    {"$": "ndarray", "dtype": "<f4", "shape": [10**9], "base64": "AAAA"},
    {"$": "tensor", "name": "absent"},
    {"$": "tuple"},
    {"$": "float", "value": "1"},
    {"$": "dict", "items": [[1]]},
    {"$": "bytes", "base64": 5},
    {"$": "scalar", "dtype": "F32", "value": 1.0, "shape": [1, 2]},
    {"$": "scalar", "dtype": "F32", "value": 1.0, "shape": [1] * 100},
    {"$": "scalar", "dtype": "F32", "value": 1.0, "shape": 1},
]


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: json.dumps(data)[:40])
def test_hostile_values_are_an_error_of_ours(data: Any) -> None:
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Decoder({}.__getitem__, "index.json").decode({"nested": [data]})


SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=8)
KEYS = st.text(max_size=4) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
NESTED = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=12,
)


@given(NESTED)
@settings(max_examples=150, deadline=None)
def test_any_nesting_comes_back(value: Any) -> None:
    back = round_trip(value)
    assert repr(back) == repr(value)  # repr tells -0.0 from 0.0 and a tuple from a list


@pytest.mark.parametrize("betas", [None, 0.9, [0.9], [None, 0.999], [0.9, True], [0.9, 1.5]])
def test_hyper_parameters_that_no_optimizer_has_are_refused(betas: Any) -> None:
    check_group({"lr": 0.1, "betas": [0.9, 0.999]}, "optimizer.groups[0]")
    with pytest.raises(CheckpointError, match=r"optimizer.groups\[0\]: betas is"):
        check_group({"lr": 0.1, "betas": betas}, "optimizer.groups[0]")


def test_a_switch_is_true_or_false() -> None:
    check_group({"lr": 0.1, "foreach": None, "fused": None, "amsgrad": False}, "optimizer.groups[0]")
    with pytest.raises(CheckpointError, match="amsgrad is None"):
        check_group({"lr": 0.1, "amsgrad": None}, "optimizer.groups[0]")
