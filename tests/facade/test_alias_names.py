"""Every `deepspeed` name that installed Hugging Face libraries use is in the table: provided, or refused with a reason."""

from __future__ import annotations

import ast
import csv
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_zero.deepspeed.alias import table
from hf_zero.deepspeed.alias.finder import AliasModule, find_spec, load_target
from hf_zero.deepspeed.alias.table import MODULES, PROVIDED, REFUSED, refusal
from tests.support.rows import each

pytestmark = pytest.mark.quick

LIBRARIES = ("accelerate", "transformers", "peft", "trl")

# Lightning is no dependency; these are the names it uses (Fabric and Trainer strategies, utilities).
LIGHTNING = (
    "deepspeed.utils.logging.logger",
    "deepspeed.init_distributed",
    "deepspeed.initialize",
    "deepspeed.zero.Init",
    "deepspeed.checkpointing.configure",
    "deepspeed.DeepSpeedEngine",
    "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer",
    "deepspeed.zero.GatheredParameters",
    "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint",
)
MODULES_OF_CONSUMERS = (
    "deepspeed.zero",
    "deepspeed.comm",
    "deepspeed.utils",
    "deepspeed.utils.logging",
    "deepspeed.utils.groups",
    "deepspeed.utils.zero_to_fp32",
    "deepspeed.runtime.lr_schedules",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.base_optimizer",
    "deepspeed.runtime.engine",
    "deepspeed.accelerator",
    "deepspeed.checkpointing",
    "deepspeed.checkpoint.utils",
    "deepspeed.launcher.runner",
    "deepspeed.ops.adam",
)


class NameCollector(ast.NodeVisitor):
    """Collects the dotted `deepspeed` names one file imports or reads through an imported name."""

    def __init__(self) -> None:
        self.bound: dict[str, str] = {}
        self.names: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] == "deepspeed":
                self.names.add(alias.name)
                self.bound[alias.asname or "deepspeed"] = alias.name if alias.asname else "deepspeed"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module and node.module.split(".")[0] == "deepspeed":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                self.names.add(name)
                self.bound[alias.asname or alias.name] = name

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts: list[str] = []
        current: ast.expr = node
        while isinstance(current, ast.Attribute):
            parts.append(current.attr)
            current = current.value
        if isinstance(current, ast.Name) and current.id in self.bound:
            self.names.add(".".join((self.bound[current.id], *reversed(parts))))
        else:
            self.generic_visit(node)


def names_in(source: str) -> set[str]:
    """The `deepspeed` names of one source text; imports are bound first, wherever they stand."""
    collector = NameCollector()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            collector.visit(node)
    collector.visit(tree)
    return collector.names


def is_known(name: str) -> bool:
    """Whether a name, or the object that its chain starts from, stands in the table."""
    if name in MODULES or name in PROVIDED or name == "deepspeed.__version__":
        return True
    if refusal(name) is not None:
        return True
    prefixes = (name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1))
    return any(prefix in PROVIDED for prefix in prefixes)


def sources_of(library: str) -> Iterator[tuple[Path, str]]:
    spec = importlib.util.find_spec(library)
    assert spec is not None and spec.submodule_search_locations, f"{library} is not installed; `make venv` installs it"
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if "deepspeed" in text:
                yield path, text


@pytest.mark.parametrize("library", LIBRARIES)
def test_names_of_installed_libraries_are_provided_or_refused(library: str) -> None:
    found: dict[str, Path] = {}
    for path, text in sources_of(library):
        for name in names_in(text):
            found.setdefault(name, path)
    assert found, f"the scan found no deepspeed name in {library}: the scanner is broken"
    unknown = {name: str(path) for name, path in sorted(found.items()) if not is_known(name)}
    assert not unknown, f"neither provided nor refused: {unknown}"


def test_scanner_sees_every_form_of_use() -> None:
    source = """
def f():
    import deepspeed
    from deepspeed import comm as dist
    from deepspeed.runtime.zero import partition_parameters as pp
    import deepspeed.utils.groups as groups
    with deepspeed.zero.Init(x=dist.get_rank()):
        pp.a.b()
    groups._g()
    self.deepspeed.not_this
"""
    assert names_in(source) == {
        "deepspeed",
        "deepspeed.comm",
        "deepspeed.comm.get_rank",
        "deepspeed.runtime.zero.partition_parameters",
        "deepspeed.runtime.zero.partition_parameters.a.b",
        "deepspeed.utils.groups",
        "deepspeed.utils.groups._g",
        "deepspeed.zero.Init",
    }
    assert not is_known("deepspeed.zero.Frob") and not is_known("deepspeed.frob")


def test_names_and_modules_of_consumers_are_provided() -> None:
    assert not set(LIGHTNING) - PROVIDED.keys()
    assert not set(MODULES_OF_CONSUMERS) - MODULES


def test_every_row_resolves() -> None:
    """A row whose target is missing would fail at a user's, as an AttributeError deep inside another library."""

    def check(name: str) -> None:
        target = PROVIDED[name]
        if ":" in target:
            assert load_target(target) is not None
        else:
            assert target in MODULES

    each(sorted(PROVIDED), check)


def test_the_census_has_every_name_and_says_who_uses_it() -> None:
    with (Path(table.__file__).parent / "census.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == sorted(PROVIDED), "write a row for each served name, and for no other"
    for row in rows:
        assert int(row["code_bases"]) >= len(row["some_of_them"].split()) >= min(1, int(row["code_bases"])), row
    used = {row["name"] for row in rows if int(row["code_bases"])}
    assert {"deepspeed.initialize", "deepspeed.zero.GatheredParameters"} <= used and len(used) > 230


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepspeed.runtime.lr_schedules.WARMUP_LR", "plain texts"),
        ("deepspeed.module_inject.tp_shard.get_shard_size", "autotp_size"),
        ("deepspeed.runtime.precision_config.get_float16_config", "DeepSpeedConfig"),
        ("deepspeed.ops.op_builder.QuantizerBuilder", "nothing is compiled"),
        ("deepspeed.utils.module_utils.recursive_getattr", "deepspeed.compression.helper"),
        ("deepspeed.runtime.zero.leaf_module_config.DEFAULT_LEAF_MODULE_NAMES", "leaf_module"),
    ],
)
def test_a_name_that_nobody_uses_says_so(name: str, words: str) -> None:
    module, _, attribute = name.rpartition(".")
    with pytest.raises(ImportError, match=words):
        exec(f"from {module} import {attribute}", {})


def test_no_name_is_both_provided_and_refused() -> None:
    assert not PROVIDED.keys() & REFUSED.keys()
    assert all(len(reason) > 20 for reason in REFUSED.values())


def test_alias_modules_are_packages_made_by_our_loader() -> None:
    """Being packages lets ``from deepspeed.x import refused`` say why, see find_spec."""
    spec = find_spec("deepspeed.utils")
    assert spec is not None and spec.submodule_search_locations == []
    module = importlib.import_module("deepspeed.utils")
    assert isinstance(module, AliasModule) and "safe_get_full_grad" in dir(module)
