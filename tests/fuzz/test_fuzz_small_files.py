"""Everything that reads a small file, against files that are none and 3,000 changed ones: a named error, soon, in little memory."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
import yaml
from hypothesis import strategies as st

from hf_zero.checkpoint.commit import folders, staging
from hf_zero.checkpoint.convert.deepspeed import read_deepspeed
from hf_zero.checkpoint.convert.hugging_face import read_hugging_face
from hf_zero.checkpoint.convert.run import Conversion, convert
from hf_zero.checkpoint.convert.torch_dcp import read_dcp
from hf_zero.checkpoint.zero_to_fp32 import Checkpoint
from hf_zero.config.auto import read_model_config
from hf_zero.config.read import read_config
from hf_zero.errors import CheckpointError, printable
from hf_zero.launch.command import read_environment_files
from hf_zero.launch.hosts import read_hostfile
from hf_zero.plan.from_fsdp import translate
from hf_zero.plan.fsdp_source import read_source
from hf_zero.profiling.recordings import read_recordings
from hf_zero.system import own_files
from hf_zero.system.process import Process
from hf_zero.tensor_parallel.plan import TpPlan
from hf_zero.utils import newest_trainer_checkpoint
from tests.fuzz.edits import edited, edits
from tests.fuzz.guard import FAST, SLOW, Refused, TooSlow, fuzzed, given_many, guarded
from tests.fuzz.mutations import mutate_bytes, mutate_value
from tests.fuzz.specials import SPECIALS, put, remove, written_bytes
from tests.support.processes import MOST_SECONDS, REPO

GOLDEN = REPO / "tests" / "golden"
STATE = {"global_step": 3, "epoch": 1.0, "log_history": [{"loss": 1.5, "step": 3}], "is_world_process_zero": True}
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False},
}  # fmt: skip
MODEL = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "architectures": ["GPT2LMHeadModel"]}


def _event(name: str, begin: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": "user_annotation", "pid": 1, "tid": 1, "ts": begin, "dur": 2, "args": {"correlation": 3}}


RECORDING = {"traceEvents": [_event("hf_zero::phase forward", 1), _event("aten::mm", 2)], "distributedInfo": {"rank": 1}}

Reader = Callable[[Path], object]


def _checkpoints(place: Path) -> Path:
    shutil.copytree(GOLDEN / "checkpoint_v1_adamw", place / "run")
    return place / "run"


def _trainer(place: Path) -> Path:
    shutil.copytree(GOLDEN / "checkpoint_v1_adamw", place / "out" / "checkpoint-3")
    (place / "out" / "checkpoint-3" / "trainer_state.json").write_text(json.dumps(STATE))
    return place / "out"


def _deepspeed(place: Path) -> Path:
    shutil.copytree(GOLDEN / "deepspeed_stage2_fp32_2", place / "run")
    return place / "run"


def _model(place: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    folder = place / "model"
    folder.mkdir()
    save_file({"a": torch.ones(4)}, folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def _dcp(place: Path) -> Path:
    convert(Conversion(GOLDEN / "checkpoint_v1_adamw", place / "dcp", to="dcp", quiet=True))
    return place / "dcp"


def _loose(name: str, text: str) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        (place / "loose").mkdir()
        (place / "loose" / name).write_text(text)
        return place / "loose"

    return make


def _signed(place: Path) -> Path:
    folder = place / "run" / ".t.01234567.part"
    folder.mkdir(parents=True)
    (folder / own_files.WRITER_FILE).write_text(json.dumps(Process.own().as_json()))
    return place / "run"


def _weights(path: Path) -> dict[str, Any]:
    checkpoint = Checkpoint(path)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def _begun(path: Path) -> None:
    staging.abandon(staging.begin(path, "t"))


CKPT = (CheckpointError, ValueError, OSError)  # the script beside checkpoints has ValueError and FileNotFoundError
# What reads -> how its files are made, the one that is changed, and the reader.
READERS: dict[str, tuple[Callable[[Path], Path], str, Reader]] = {
    "latest": (_checkpoints, "latest", folders.find_latest),
    "index.json": (_checkpoints, "golden/index.json", lambda path: folders.read_index(path / "golden")),
    "complete": (_checkpoints, "golden/complete", lambda path: folders.read_index(path / "golden")),
    "newest by index": (_checkpoints, "golden/index.json", folders.newest_complete),
    "newest by complete": (_checkpoints, "golden/complete", folders.newest_complete),
    "a shard": (_checkpoints, "golden/master-00000-of-00002.safetensors", lambda path: _converted(path)),
    "zero_to_fp32: latest": (_checkpoints, "latest", _weights),
    "zero_to_fp32: index.json": (_checkpoints, "golden/index.json", _weights),
    "zero_to_fp32: complete": (_checkpoints, "golden/complete", _weights),
    "zero_to_fp32: a shard": (_checkpoints, "golden/master-00000-of-00002.safetensors", _weights),
    "the script beside checkpoints": (_checkpoints, "zero_to_fp32.py", staging.write_script),
    "convert": (_checkpoints, "latest", lambda path: _converted(path)),
    "writer.json": (_signed, ".t.01234567.part/writer.json", _begun),
    "trainer_state.json": (_trainer, "checkpoint-3/trainer_state.json", newest_trainer_checkpoint),
    "latest of a Trainer": (_trainer, "checkpoint-3/latest", newest_trainer_checkpoint),
    "index.json of a Trainer": (_trainer, "checkpoint-3/golden/index.json", newest_trainer_checkpoint),
    "config.json of a model": (_model, "config.json", lambda path: read_model_config(str(path))),
    "config.json when converting": (_model, "config.json", lambda path: _converted(path, "hf")),
    "index of a model": (_model, "model.safetensors.index.json", lambda path: read_hugging_face(path, False)),
    "weights of a model": (_model, "model-00001-of-00001.safetensors", lambda path: read_hugging_face(path, False)),
    ".metadata": (_dcp, ".metadata", read_dcp),
    "__0_0.distcp": (_dcp, "__0_0.distcp", lambda path: _converted(path)),
    "optimizer states of DeepSpeed": (
        _deepspeed,
        "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        lambda path: read_deepspeed(path / "global_step3", True),
    ),
    "model states of DeepSpeed": (
        _deepspeed,
        "global_step3/mp_rank_00_model_states.pt",
        lambda path: read_deepspeed(path / "global_step3", True),
    ),
    "latest of DeepSpeed": (_deepspeed, "latest", lambda path: _converted(path, trust=True)),
    "--from, YAML": (_loose("fsdp.yaml", yaml.safe_dump(ACCELERATE)), "fsdp.yaml", lambda path: read_source(str(path / "fsdp.yaml"))),
    "--from, its JSON": (
        _loose("args.json", json.dumps({"fsdp": "full_shard", "fsdp_config": "inner.json"})),
        "inner.json",
        lambda path: read_source(str(path / "args.json")),
    ),
    "a recording": (_loose("rank0.json", json.dumps(RECORDING)), "rank0.json", read_recordings),
    "a recording of gzip": (_loose("rank1.json", json.dumps(RECORDING)), "rank0.json.gz", read_recordings),
    "a plan": (_loose("plan.json", json.dumps(TpPlan(2).to_dict())), "plan.json", lambda path: TpPlan.load(path / "plan.json")),
    "a configuration": (_loose("ds.json", "{}"), "ds.json", lambda path: read_config(path / "ds.json")),
    "a hostfile": (_loose("hosts", "a slots=2\n"), "hosts", lambda path: read_hostfile(str(path / "hosts"))),
    "variables": (_loose("vars", "A=b\n"), "vars", lambda path: read_environment_files({"DS_ENV_FILE": str(path / "vars")})),
}
USER_NAMED = ("a configuration", "a hostfile", "variables", "--from, YAML")  # may be pipes, which the user ends


def _converted(path: Path, to: str | None = None, trust: bool = False) -> str:
    target = path.with_name("converted")
    try:
        return convert(Conversion(path, target, to=to, trust_pickle=trust, quiet=True))
    finally:
        remove(target)


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Ends what waits for somebody else, which takes no time of the processor."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"it waited for {seconds} s")

    former = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def attempt(path: Path, changed: Path, read: Reader) -> Any:
    """What a reader says: an answer, or a named error that can be printed."""
    with ended_after(MOST_SECONDS):
        mapped = changed.suffix in (".safetensors", ".pt") and changed.is_file()  # takes addresses, no memory
        found = guarded(lambda: read(path), changed.stat().st_size if mapped else written_bytes(changed), CKPT, "")  # type: ignore[arg-type]
    if isinstance(found, Refused):
        assert printable(found) == found and str(path.name) in found, found
    return found


@pytest.fixture(scope="module", params=sorted(READERS))
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name: str = request.param
    path = READERS[name][0](tmp_path_factory.mktemp("reader"))
    READERS[name][2](path) if (path / READERS[name][1]).exists() else None  # warm, and valid
    return name, path


@pytest.mark.parametrize("kind", SPECIALS)
def test_what_is_no_such_file(reader: tuple[str, Path], kind: str) -> None:
    name, path = reader
    if name in USER_NAMED and "pipe" in kind:
        pytest.skip("the user names it, so it may be a pipe")
    changed = path / READERS[name][1]
    changed.parent.mkdir(exist_ok=True)  # it may be swept away
    kept = changed.with_name("kept")
    if changed.exists():
        changed.rename(kept)
    try:
        put(changed, kind)
        attempt(path, changed, READERS[name][2])
    finally:
        remove(changed)
        if kept.exists():
            kept.rename(changed)


# -- 3,000 changed ones each ----------------------------------------------------------------------------------------------

_SPECIAL_IN = 20  # one in so many is a file that is none


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Valid files of each reader that is fuzzed."""
    return {name: READERS[name][0](tmp_path_factory.mktemp("valid")) for name in READERS}


def changed_json(value: Any, random: Random) -> bytes:
    """A JSON text with one to three values of another kind, or with other bytes."""
    for _ in range(random.randint(1, 3)):
        if isinstance(value, (dict, list)) and value:
            value = mutate_value(value, random)[0]
    data = json.dumps(value).encode()
    return mutate_bytes(data, random) if random.random() < 0.3 else data


def spoil(path: Path, data: bytes, random: Random) -> None:
    """Writes ``data``, or one of ``SPECIALS`` in its place."""
    if random.randrange(_SPECIAL_IN):
        remove(path)
        path.write_bytes(data)
    else:
        put(path, random.choice(sorted(SPECIALS)))


def check_recording(random: Random, valid: dict[str, Path]) -> None:
    path = valid["a recording"]
    for other in path.iterdir():
        remove(other)
    data = changed_json(RECORDING, random)
    if random.random() < 0.5:
        folded = gzip.compress(data)
        data, name = mutate_bytes(folded, random) if random.random() < 0.4 else folded, "rank0.json.gz"
    else:
        name = "rank0.json"
    spoil(path / name, data, random)
    attempt(path, path / name, read_recordings)


def check_trainer_folder(random: Random, valid: dict[str, Path]) -> None:
    path = valid["trainer_state.json"]
    folder = path / "checkpoint-3"
    files = {
        "trainer_state.json": lambda: changed_json(STATE, random),
        "latest": lambda: mutate_bytes(b"golden", random),
        "golden/index.json": lambda: mutate_bytes((GOLDEN / "checkpoint_v1_adamw" / "golden" / "index.json").read_bytes(), random),
        "golden/complete": lambda: mutate_bytes(b"0" * 64, random),
        "rng_state_0.pth": lambda: mutate_bytes(b"PK\3\4", random),
    }
    name = random.choice(sorted(files))
    kept = (folder / name).read_bytes() if (folder / name).exists() else None
    try:
        spoil(folder / name, files[name](), random)
        found = attempt(path, folder / name, newest_trainer_checkpoint)
        assert found is None or found == str(folder)
    finally:
        remove(folder / name)
        if kept is not None:
            (folder / name).write_bytes(kept)


def check_writer(random: Random, valid: dict[str, Path]) -> None:
    path = valid["writer.json"]
    changed = path / READERS["writer.json"][1]
    changed.parent.mkdir(exist_ok=True)
    spoil(changed, changed_json({**Process.own().as_json(), "leader": 0}, random), random)
    attempt(path, changed, _begun)
    staging.leader_of(changed.parent)
    assert changed.parent.is_dir() or not changed.exists()


def check_small(random: Random, valid: dict[str, Path]) -> None:
    """The names and digests that stand alone, and the index."""
    name = random.choice(["latest", "complete", "zero_to_fp32: latest", "zero_to_fp32: complete", "newest by complete"])
    path, changed = valid[name], valid[name] / READERS[name][1]
    kept = changed.read_bytes()
    try:
        spoil(changed, mutate_bytes(kept, random), random)
        attempt(path, changed, READERS[name][2])
    finally:
        remove(changed)
        changed.write_bytes(kept)


def check_model_config(random: Random, valid: dict[str, Path]) -> None:
    path = valid["config.json of a model"]
    spoil(path / "config.json", changed_json(MODEL, random), random)
    found = attempt(path, path / "config.json", lambda place: read_model_config(str(place)))
    assert isinstance(found, (dict, Refused))


YAML_TOKENS = [
    *(
        "&a ",
        "*a",
        "<<: ",
        "!!python/object/apply:os.system [x]",
        "!!binary ",
        "!!set ",
        "!!omap ",
        "!!timestamp ",
        "- ",
        ": ",
        "? ",
        "| ",
        "> ",
    ),
    *("{", "}", "[", "]", "'", '"', "#", "%YAML 1.1\n", "---\n", "...\n", "\t", "\x1b[2J", "\u202e", "\ud800", "\0", "9" * 5000, "1:1:1:1"),
    *(
        "0x",
        "1e999",
        ".nan",
        ".inf",
        "2001-13-45",
        "yes",
        "~",
        "[" * 2000,
        "{a: " * 500,
        "- " * 2000,
        "a" * 40000,
        "=",
        "fsdp_version",
        "FSDP",
    ),
    *("FULL_SHARD", "num_processes: 2\n", "fsdp_config:\n", "parallelism_config:\n", "distributed_type: FSDP\n", "mixed_precision", "é"),
]
TEXTS = [
    yaml.safe_dump(ACCELERATE),
    json.dumps(ACCELERATE),
    json.dumps({"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 100}, "bf16": True}),
    yaml.safe_dump({"fsdp_version": 1, "sharding_strategy": "HYBRID_SHARD", "cpu_offload": True}),
    json.dumps({"distributed_config": {"fsdp_size": 2, "tp_size": 1}}),
]


def check_fsdp(number: int, changes: list[tuple[str, int, int, bytes]], kind: str, valid: dict[str, Path]) -> None:
    path = valid["--from, YAML"]
    file = path / "fsdp.yaml"
    if kind and "pipe" not in kind:
        put(file, kind)
    else:
        remove(file)
        file.write_bytes(edited(TEXTS[number].encode(), changes))
    found = attempt(path, file, lambda place: translate(read_source(str(place / "fsdp.yaml")), 2).to_dict())
    json.dumps(found, default=str)


def check_hostfile(number: int, changes: list[tuple[str, int, int, bytes]], kind: str, valid: dict[str, Path]) -> None:
    name = ("a hostfile", "variables", "a configuration")[number % 3]
    path, changed = valid[name], valid[name] / READERS[name][1]
    if kind and "pipe" not in kind:
        put(changed, kind)
    else:
        remove(changed)
        changed.write_bytes(edited((b"a slots=2\n", b"A=b\n", b'{"bf16": {"enabled": true}}')[number % 3], changes))
    attempt(path, changed, READERS[name][2])


KINDS = st.sampled_from([*[""] * 10 * len(SPECIALS), *SPECIALS])
CASES: dict[str, Any] = {"number": st.integers(0, len(TEXTS) - 1), "changes": edits(YAML_TOKENS), "kind": KINDS}

test_recordings, test_many_recordings = fuzzed(check_recording)
test_trainer_folders, test_many_trainer_folders = fuzzed(check_trainer_folder)
test_writers, test_many_writers = fuzzed(check_writer)
test_small_files, test_many_small_files = fuzzed(check_small)
test_model_configs, test_many_model_configs = fuzzed(check_model_config)
test_fsdp, test_many_fsdp = given_many(check_fsdp, FAST, SLOW, **CASES)
test_named_files, test_many_named_files = given_many(check_hostfile, FAST, SLOW, **CASES)
