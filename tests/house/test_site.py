"""The site of docs/: every page has its place, links to other files get pages, and the reference describes every public name."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

import hf_zero
from tests.support.processes import REPO
from tests.support.rows import each
from tools import outside_pages, reference_pages

# First words of docstrings in the reference; a word that is missing here is added if it is a verb in the imperative or third person.
VERBS = frozenset(
    re.split(
        r",\s+",
        """accept, add, average, back-propagate, bring, call, carry, change, clip, compile, configure, count, create, declare, do,
        end, exchange, fill, find, follow, forget, free, gather, get, initialize, leave, load, make, mark, move, multiply, name,
        note, open, overwrite, publish, put, read, rebuild, record, refuse, release, replace, report, restore, return, run, save, say,
        scale, set, shard, stand, start, switch, take, tell, train, treat, undo, unset, update, wait, wrap, write, yield""",
    )
)


class _Settings(yaml.SafeLoader):
    """Reads mkdocs.yml, in which a function of Python is named."""


_Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages_of(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation, in order."""
    for entry in nav:
        inner = list(entry.values())[0] if isinstance(entry, dict) else entry
        if isinstance(inner, str):
            yield inner
        else:
            yield from pages_of(inner)


def test_every_page_has_one_place_in_the_navigation() -> None:
    settings = yaml.load((REPO / "mkdocs.yml").read_text(encoding="utf-8"), _Settings)
    placed = list(pages_of(settings["nav"]))
    assert len(placed) == len(set(placed))
    written = (
        {outside_pages.uri_of(path) for path in (REPO / "docs").rglob("*.md")}
        | set(outside_pages.MOVED.values())
        | reference_pages.pages().keys()
    )
    assert set(placed) == written
    assert settings["strict"] and set(settings["validation"].values()) == {"warn"}


def test_links_to_files_outside_the_pages_lead_to_pages_made_of_them() -> None:
    outside = outside_pages.Outside()
    outside.collect()
    known = {uri for uri in outside.sources if not uri.startswith("reference/")}
    followed = 0
    for uri, source in outside.sources.items():
        if source.suffix != ".md" or not source.exists():
            continue
        found: list[str] = []
        outside_pages.replaced(
            outside.rewritten(uri, source.read_text(encoding="utf-8")), lambda target, found=found: found.append(target) or target
        )
        for target in filter(outside_pages.is_local, found):
            name = target.partition("#")[0]
            reached = (REPO / "site" / uri).parent.joinpath(name).resolve().relative_to(REPO / "site").as_posix()
            assert reached in known or (REPO / "docs" / reached).is_file(), f"{uri}: {target}"
            followed += reached.startswith(outside_pages.OUTSIDE)
    assert followed >= 8


def test_images_outside_the_pages_are_taken_along() -> None:
    outside = outside_pages.Outside()
    outside._add(REPO / "docs" / "pictures" / "stages.svg")
    assert outside.images == {"pictures/stages.svg": REPO / "docs" / "pictures" / "stages.svg"} and not outside.pages
    assert outside_pages.uri_of(REPO / "examples" / "a.png") == "repository/examples/a.png"


def test_code_that_looks_like_a_link_stays() -> None:
    text = '[a](x.md) `[b](y.md)`\n```\n[c](z.md)\n```\n<img src="d.svg"> [`e`](f.md)\n'
    changed = outside_pages.replaced(text, lambda target: f"to/{target}")
    assert changed == '[a](to/x.md) `[b](y.md)`\n```\n[c](z.md)\n```\n<img src="to/d.svg"> [`e`](to/f.md)\n'


def public() -> Iterator[tuple[str, Any]]:
    """Yield every name of the reference with what it is: names, and methods that have a docstring."""
    homes = {name: f"hf_zero:{name}" for name in hf_zero.__all__ if name != "__version__"}
    for module in reference_pages.MODULES.values():
        homes |= {f"{module}.{name}": f"{home}:{name}" for name, home in reference_pages.names_of(module) if name != "logger"}
    for title, place in homes.items():
        module, _, name = place.partition(":")
        thing = getattr(importlib.import_module(module), name)
        if inspect.ismodule(thing):
            continue
        yield title, thing
        if inspect.isclass(thing):
            for method, function in vars(thing).items():
                function = getattr(function, "__func__", getattr(function, "fget", function))
                own = inspect.isfunction(function) and function.__qualname__.startswith(f"{thing.__name__}.")  # not one of a table, bound
                if own and not method.startswith("_") and function.__module__.startswith("hf_zero"):
                    yield f"{title}.{method}", function


def test_each_public_name_has_a_docstring_and_each_function_begins_with_a_verb() -> None:
    def check(entry: tuple[str, Any]) -> None:
        name, thing = entry
        written = vars(thing).get("__doc__") if inspect.isclass(thing) else inspect.getdoc(thing)
        assert written, f"{name} has no docstring"
        if inspect.isclass(thing):
            return
        word = re.match(r"[\w-]+", written.strip())
        assert word, written
        said = word[0].lower()
        forms = {said, said.removesuffix("s"), said.removesuffix("es"), said.removesuffix("ies") + "y"}
        assert forms & VERBS, f"{name}: {written.splitlines()[0]}"

    each(public(), check)


def test_the_reference_is_complete() -> None:
    """A public name without a page is an error of the build; here it is one of the tests, where the site is not built."""
    written = "\n".join(reference_pages.pages().values())
    for name in hf_zero.__all__:
        if name not in ("__version__", *reference_pages.MODULES):
            assert re.search(rf"^::: hf_zero\.[\w.]+\.{name}$", written, re.MULTILINE), name
    for command in ("explain", "plan", "launch", "trace", "convert", "report", "recipes"):
        assert f"## hf-zero {command}\n" in written


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mkdocs", path=str(REPO / ".venv-docs" / "bin")) is None, reason="make docs has not been run")
def test_the_site_is_built_strictly_and_a_dead_link_ends_the_build(tmp_path: Any) -> None:
    copy = tmp_path / "copy"
    for name in ("docs", "tools", "hf_zero", "examples", "benchmarks", "tests"):
        shutil.copytree(REPO / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for path in (*REPO.glob("*.md"), REPO / "mkdocs.yml", REPO / "LICENSE", REPO / "Makefile", REPO / "pyproject.toml"):
        shutil.copy(path, copy)
    command = [str(REPO / ".venv-docs" / "bin" / "mkdocs"), "build"]

    def build() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=600)

    done = build()
    assert done.returncode == 0 and (copy / "build" / "site" / "index.html").is_file(), done.stderr
    with (copy / "docs" / "plan.md").open("a") as page:
        page.write("\n[gone](gone.md) [there](trainer.md#no-such-heading)\n")
    done = build()
    assert done.returncode != 0 and "gone.md" in done.stderr and "no-such-heading" in done.stderr, done.stderr
