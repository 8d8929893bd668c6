"""Importing hf_zero is cheap and brings no framework; modules import in one direction, without cycles."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.processes import REPO, run_python
from tests.support.sources import PACKAGE, imports_of, modules, tree_of

FRAMEWORKS = ("transformers", "accelerate", "peft", "trl", "datasets", "lightning", "deepspeed")

# One row per package, from the ground up: a module imports only from its own row and the rows before it. Imports inside functions and for
# type checking count as well.
LAYERS = (
    "hf_zero.errors",
    "hf_zero.observe",
    "hf_zero.system",
    "hf_zero.native",
    "hf_zero.launch",
    "hf_zero.memory",
    "hf_zero.config",
    "hf_zero.metrics",
    "hf_zero.comm",
    "hf_zero.activation_checkpointing",
    "hf_zero.ops",
    "hf_zero.core.stages",
    "hf_zero.core.units",
    "hf_zero.core.schedule",
    "hf_zero.core.optimizer",
    "hf_zero.core.step",
    "hf_zero.core",
    "hf_zero.optim",
    "hf_zero.onebit",
    "hf_zero.offload",
    "hf_zero.profiling",
    "hf_zero.tensor_parallel",
    "hf_zero.sequence_parallel",
    "hf_zero.pipeline",
    "hf_zero.expert_parallel",
    "hf_zero.checkpoint",
    "hf_zero.replica_groups",
    "hf_zero.assembly",
    "hf_zero.deepspeed",
    "hf_zero.integrations",
    "hf_zero.plan",
    "hf_zero.recipes",
    "hf_zero.environment",
    "hf_zero.utils",
    "hf_zero.zero",
    "hf_zero.cli",
    "hf_zero.__main__",
)

# The only files that issue collectives, so that a test can record them and an error can name the phase.
COLLECTIVES = ("hf_zero.comm.collectives", "hf_zero.comm.back_end", "hf_zero.comm.direct_exchange")
GROUPS = ("comm/bootstrap.py", "comm/process_groups.py")  # the only files that make process groups


def layer_of(module: str) -> int:
    owners = [(len(row), index) for index, row in enumerate(LAYERS) if module == row or module.startswith(f"{row}.")]
    return max(owners)[1]


def imported(name: str, path: Path) -> set[str]:
    """The package's own modules that a file imports, wherever it does."""
    known = modules()
    found = {module for module in imports_of(path, top_level_only=False) if module in known and module not in (name, "hf_zero")}
    return {module for module in found if not any(other.startswith(f"{module}.") for other in found)}


def test_package_import_starts_nothing_heavy() -> None:
    out = run_python("""
        import sys
        import hf_zero
        heavy = [name for name in ("torch", "transformers", "accelerate", "pydantic", "deepspeed") if name in sys.modules]
        print(heavy, hf_zero.__version__)
    """)
    assert out.startswith("[] 0.")


def test_engine_import_brings_no_framework_and_starts_no_device() -> None:
    out = run_python(f"""
        import sys
        import hf_zero
        hf_zero.initialize, hf_zero.zero.Init, hf_zero.utils.safe_get_full_grad
        import hf_zero.deepspeed.served.ops, hf_zero.deepspeed.served.accelerator
        import torch
        print([name for name in {FRAMEWORKS!r} if name in sys.modules], torch.cuda.is_initialized(), torch.distributed.is_initialized())
    """)
    assert out.strip() == "[] False False"


@pytest.mark.quick
def test_frameworks_are_imported_only_by_integrations() -> None:
    users = {
        name: used
        for name, path in modules().items()
        if not name.startswith("hf_zero.integrations")
        and (used := {module.split(".")[0] for module in imports_of(path, top_level_only=True)} & set(FRAMEWORKS))
    }
    assert not users


@pytest.mark.quick
def test_every_module_imports_only_from_its_row_and_the_rows_before() -> None:
    against = {
        (name, module)
        for name, path in modules().items()
        if name != "hf_zero"  # the root serves public names lazily, from every row
        for module in imported(name, path)
        if layer_of(module) > layer_of(name)
    }
    assert not against


def cycles() -> set[frozenset[str]]:
    """Modules that import each other, whether at the top, inside functions or for type checking."""
    edges = {name: imported(name, path) for name, path in modules().items()}
    reached: dict[str, set[str]] = {}
    for start in edges:
        found, waiting = set(), [start]
        while waiting:
            for target in edges[waiting.pop()] - found:
                found.add(target)
                waiting.append(target)
        reached[start] = found
    return {frozenset(other for other in reached[name] if name in reached[other]) for name in edges if name in reached[name]}


@pytest.mark.quick
def test_no_modules_import_each_other() -> None:
    assert not [sorted(cycle) for cycle in cycles()]


@pytest.mark.quick
def test_only_collectives_call_torch_distributed_collectives() -> None:
    banned = {
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_to_all_single",
        "broadcast",
        "reduce_scatter",
    }
    offenders = []
    for name, path in modules().items():
        if name in COLLECTIVES:
            continue
        for node in ast.walk(tree_of(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in banned
                and isinstance(node.func.value, (ast.Name, ast.Attribute))
                and ast.unparse(node.func.value) in ("dist", "torch.distributed", "torch.distributed.distributed_c10d")
            ):
                offenders.append(f"{name}:{node.lineno} {node.func.attr}")
    assert not offenders


@pytest.mark.quick
def test_process_groups_are_created_in_comm() -> None:
    pattern = re.compile(r"\b(new_group|init_process_group|init_device_mesh)\(")
    offenders = [
        str(path.relative_to(PACKAGE))
        for path in sorted(PACKAGE.rglob("*.py"))
        if pattern.search(path.read_text()) and path.relative_to(PACKAGE).as_posix() not in GROUPS
    ]
    assert not offenders, f"process groups created outside {GROUPS}: {offenders}"


# The only files of the engine that ask whether the process plans: each chooses a back end; see [Note: back ends of a plan].
BACK_ENDS = ("comm/process_groups.py", "memory/buffers.py", "memory/host_memory.py", "native/library.py")


@pytest.mark.quick
def test_only_back_ends_ask_whether_the_process_plans() -> None:
    asking = [
        path.relative_to(PACKAGE).as_posix()
        for path in modules().values()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "planning"
    ]
    assert sorted(asking) == sorted(BACK_ENDS)


@pytest.mark.quick
def test_no_test_file_is_imported() -> None:
    """What two test files need lies in ``tests/support``, or beside them in a file that holds no tests."""
    imported = re.compile(r"^\s*(?:from|import) tests\.(?:.*[.\s])?test_\w+", re.MULTILINE)
    assert imported.search("from tests.core.test_trace import labels") and imported.search("    from tests.core import test_trace")
    paths = sorted((REPO / "tests").rglob("*.py"))
    assert not [f"{path.relative_to(REPO)}: {line}" for path in paths for line in imported.findall(path.read_text(encoding="utf-8"))]
