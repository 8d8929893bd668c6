"""One way to write, one to delete, one to read what is small: every other way is a fault, but for those below, each with its reason."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.support.sources import modules, tree_of

WRITER, FOLDER, READER = "hf_zero.system.own_files", "hf_zero.system.folder", "hf_zero.system.text_file"
STORE = "hf_zero.system.object_store"
SCRIPT = "hf_zero.checkpoint.zero_to_fp32"

# Functions of modules, by their last two names; methods and bare names by the last one.
WRITING = {
    *("os.open", "os.rename", "os.replace", "os.renames", "os.link", "os.symlink", "os.mkdir", "os.makedirs", "os.mknod", "os.mkfifo"),
    *("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.copyfileobj", "shutil.move", "shutil.make_archive"),
    *("torch.save", "np.save", "numpy.save", "np.savez", "json.dump", "pickle.dump", "torch.from_file"),
    *("write_text", "write_bytes", "symlink_to", "hardlink_to", "link_to", "touch", "mkdir", "makedirs", "mkdtemp", "mkstemp", "tofile"),
    *("save_file", "savefig", "export_chrome_trace", "export_stacks", "extractall", "copyfile", "copytree", "FileSystemWriter"),
    *("pipe_file", "put_file", "upload_file"),
    *("SummaryWriter", "FileHandler", "RotatingFileHandler", "imsave", "savetxt", "unpack_archive"),
}
DELETING = {
    *("os.remove", "os.unlink", "os.rmdir", "os.removedirs", "unlink", "rmdir", "removedirs", "rmtree"),
    *("rm_file", "rm", "abort_multipart_upload"),
    *("TemporaryDirectory", "NamedTemporaryFile", "TemporaryFile", "SpooledTemporaryFile"),
}
READING = {
    *("read_text", "read_bytes", "json.load", "pickle.load", "torch.load", "yaml.load", "yaml.safe_load", "yaml.full_load", "tomllib.load"),
    *("gzip.open", "gzip.decompress", "zlib.decompress", "bz2.decompress", "lzma.decompress", "np.load", "np.fromfile", "np.loadtxt"),
    *("safe_open", "ZipFile", "GzipFile", "configparser.read", "runpy.run_path", "readlines"),
}
BANNED = WRITING | DELETING | READING
OURS_BY_NAME = {"read_text", "read_bytes", "write_text", "write_bytes"}  # as bare names they are imported from the modules above
OWN = {f"own_files.{name}" for name in ("write_text", "write_bytes")} | {"text_file.read_bytes"}

# Module -> what it does all the same -> why.
WRITES = {
    FOLDER: {"os.open": "the way itself", "os.mkdir": "the way itself", "os.rename": "the way itself"},
    WRITER: {
        "mkdir": "folders that the user names: those above them may be links",
        "mkdtemp": "a folder of a new name among temporary ones, for this user alone",
    },
    READER: {"os.open": "opens for reading"},
    STORE: {"pipe_file": "the way itself", "makedirs": "folders of a place that the user names, where a store has folders"},
    SCRIPT: {
        "os.open": "stands alone, so it has the way once more: folders that it then writes into by descriptor",
        "os.mkdir": "a new folder for this user alone, by descriptor",
        "os.makedirs": "the output folder, which the user names",
        "os.rename": "gives a file that is whole its place, by descriptor",
        "torch.save": "into the new folder",
        "save_file": "into the new folder",
        "json.dump": "into the new folder",
        "open 'x'": "in the new folder",
    },
    "hf_zero.launch.rank": {"os.open": "a pipe of the node's agent, in /proc"},
    "hf_zero.system.failure": {"os.open": "a pipe of the node's agent, in /proc"},
    "hf_zero.checkpoint.convert.torch_files": {"torch.from_file": "maps a file for reading (shared=False)"},
    "hf_zero.replica_groups.transfer": {"torch.from_file": "maps a file that this process has just written (shared=False)"},
    "hf_zero.checkpoint.convert.torch_dcp": {"FileSystemWriter": "is given own_files.for_library"},
    "hf_zero.deepspeed.served.state_files": {"torch.save": "into a file of own_files.replacing"},
    "hf_zero.integrations.trainer_snapshots": {"torch.save": "into a file of own_files.replacing"},
    "hf_zero.metrics": {"SummaryWriter": "a folder that was made and opened without links; it gives its files new names by time and host"},
    "hf_zero.profiling.recordings": {"export_chrome_trace": "is given own_files.for_library"},
    "hf_zero.system.pictures": {"savefig": "into a file of own_files.replacing"},
}
DELETES = {
    FOLDER: {"os.unlink": "the way itself", "os.rmdir": "the way itself"},
    STORE: {"rm_file": "the way itself", "rmdir": "an empty folder, where a store has folders"},
    SCRIPT: {"os.unlink": "its own new folder, by descriptor", "os.rmdir": "its own new folder, by descriptor"},
}
READS = {
    SCRIPT: {"safe_open": "shards: sizes are compared with the index first"},
    "hf_zero.checkpoint.convert.hugging_face": {"safe_open": "maps weights: the library compares sizes and offsets with the file"},
    "hf_zero.checkpoint.convert.torch_files": {"ZipFile": "of an open regular file: its members are looked at by our own rules"},
    "hf_zero.checkpoint.commit.node_local": {"open": "a file that this process has just written"},
    "hf_zero.core.holdings": {"open": "/proc"},
    "hf_zero.launch.agent": {"open": "/proc"},
    "hf_zero.deepspeed.served.accelerator": {"open": "/proc"},
    "hf_zero.integrations.checkpoint_slices": {"safe_open": "as from_pretrained opens the same files"},
    "hf_zero.memory.budget": {"read_text": "/proc and /sys"},
    "hf_zero.memory.host_memory": {"read_text": "/proc"},
    "hf_zero.system.process": {"read_text": "/proc"},
    "hf_zero.checkpoint.commit.staging": {"read_bytes": "a file of this package"},
    "hf_zero.system.text_file": {"yaml.load": "with a loader that refuses aliases"},
}


@functools.cache
def may_call(path: Path) -> bool:
    """Return whether the words of a banned name occur in a file; a file without them need not be parsed."""
    words = set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return "open" in words or any(words.issuperset(name.split(".")) for name in BANNED)


@functools.cache
def calls_in(tree: ast.AST) -> dict[str, set[int]]:
    """Ways to write, delete and read, and the lines they stand in: calls, and functions that are handed on or imported."""
    found: dict[str, set[int]] = {}
    for node in ast.walk(tree):
        for name in _names_of(node):
            if name in BANNED or name == "open" or name.startswith("open '"):
                found.setdefault(name, set()).add(node.lineno)  # type: ignore[attr-defined]
    return found


def _names_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [
            name
            for alias in node.names
            if (name := f"{node.module}.{alias.name}") in BANNED
            or ((name := alias.name) in {"rmtree", "copyfile", "copytree", "mkdtemp", "mkstemp", "unlink"} and node.level == 0)
        ]
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr if isinstance(node.value, ast.Attribute) else ""
        if f"{owner}.{node.attr}" in OWN:
            return []
        both = f"{owner}.{node.attr}"
        return [both if both in BANNED else "" if node.attr == "open" else node.attr]
    if isinstance(node, ast.Call) and _opens(node):
        mode = _mode(node)
        return ["open" if not set(mode) & set("wax+") else f"open {mode!r}"]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in BANNED - OURS_BY_NAME:
        return [node.id]
    return []


def _opens(node: ast.Call) -> bool:
    """Whether it is ``open(...)``, ``io.open(...)``, or the ``open`` of a path: with a mode, or of something that is called a path."""
    if isinstance(node.func, ast.Name):
        return node.func.id == "open"
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "open":
        return False
    owner = ast.unparse(node.func.value)
    first = node.args[0] if node.args else None
    return owner in ("io", "codecs", "gzip", "bz2", "lzma", "tarfile") or (
        isinstance(first, ast.Constant) and isinstance(first.value, str) and set(first.value) <= set("rwaxbt+")
    )


def _mode(node: ast.Call) -> str:
    of_path = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) not in (
        "io",
        "codecs",
        "gzip",
        "bz2",
        "lzma",
        "tarfile",
    )
    given = node.args[0 if of_path else 1 :][:1] or [word.value for word in node.keywords if word.arg == "mode"]
    if not given:
        return "r"
    return given[0].value if isinstance(given[0], ast.Constant) else "w"  # what cannot be read here may be anything


def offenders(kinds: set[str], allowed: dict[str, dict[str, str]], opening: str) -> dict[str, dict[str, set[int]]]:
    """Modules that do one of ``kinds`` without being ``allowed`` to, and the lines."""
    found = {}
    for name, path in modules().items():
        calls = {
            call: lines
            for call, lines in (calls_in(tree_of(path)) if may_call(path) else {}).items()
            if (call in kinds or (call.startswith("open") and bool(" " in call) == (opening == "write") and opening))
            and call not in allowed.get(name, {})
        }
        if calls:
            found[name] = calls
    return found


@pytest.mark.quick
def test_there_is_one_way_to_write() -> None:
    assert not offenders(WRITING, WRITES, "write"), "write through hf_zero.system.own_files"


@pytest.mark.quick
def test_there_is_one_way_to_delete() -> None:
    assert not offenders(DELETING, DELETES, ""), "delete through hf_zero.system.own_files"


@pytest.mark.quick
def test_there_is_one_way_to_read_what_is_small() -> None:
    assert not offenders(READING, READS, "read"), "read through hf_zero.system.text_file or hf_zero.system.reading"


@pytest.mark.quick
@pytest.mark.parametrize("table", [WRITES, DELETES, READS], ids=["writes", "deletes", "reads"])
def test_no_exception_has_outlived_its_call(table: dict[str, dict[str, str]]) -> None:
    stale = {name: left for name, calls in table.items() if (left := sorted(set(calls) - set(calls_in(tree_of(modules()[name])))))}
    assert not stale


NOTICED = {
    "open(a, 'w')": "open 'w'",
    "open(a, mode='ab')": "open 'ab'",
    "open(a, chosen)": "open 'w'",
    "open(a)": "open",
    "path.open('x')": "open 'x'",
    "io.open(a, 'r+')": "open 'r+'",
    "Path(a).write_text(b)": "write_text",
    "(a / b).write_bytes(c)": "write_bytes",
    "os.open(a, flags)": "os.open",
    "os.replace(a, b)": "os.replace",
    "os.rename(a, b)": "os.rename",
    "os.makedirs(a)": "os.makedirs",
    "torch.save(a, b)": "torch.save",
    "safetensors.torch.save_file(a, b)": "save_file",
    "json.dump(a, b)": "json.dump",
    "shutil.copyfile(a, b)": "shutil.copyfile",
    "figure.savefig(a)": "savefig",
    "shutil.rmtree(a)": "rmtree",
    "at_exit(a.rmdir)": "rmdir",
    "os.remove(a)": "os.remove",
    "os.unlink(a)": "os.unlink",
    "from os import remove": "os.remove",
    "from shutil import rmtree": "rmtree",
    "from os import open": "os.open",
    "tempfile.NamedTemporaryFile()": "NamedTemporaryFile",
    "a.read_text()": "read_text",
    "json.load(a)": "json.load",
    "yaml.safe_load(a)": "yaml.safe_load",
    "gzip.decompress(a)": "gzip.decompress",
    "torch.load(a)": "torch.load",
}


@pytest.mark.quick
@pytest.mark.parametrize("line", NOTICED)
def test_every_way_is_noticed(line: str) -> None:
    assert NOTICED[line] in calls_in(ast.parse(line)), calls_in(ast.parse(line))


@pytest.mark.quick
def test_what_is_no_such_way_is_not() -> None:
    innocent = (
        "names.remove(a)\ntext.replace(a, b)\nown_files.write_text(a, b)\nself.states.open(sub_group)\njson.loads(a)\nload.open(files)"
    )
    assert not {call for call in calls_in(ast.parse(innocent)) if call != "open"}
