"""When hf_zero answers as `deepspeed`, what it answers, and what it costs."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPO, START, environment, run_python

REAL = '__version__ = "9.9.9"\n'
REPORT = """
    import importlib.metadata, importlib.util
    spec = importlib.util.find_spec("deepspeed")
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    where = "none" if spec is None else "ours" if spec.origin == "hf_zero" else "real"
    if spec is not None:
        import deepspeed
        where += " " + deepspeed.__version__
    print(where, version)
"""


@pytest.fixture
def real_deepspeed(tmp_path: Path) -> Path:
    """A folder with a package `deepspeed` and its metadata, as an installed one has."""
    site = tmp_path / "site"
    (site / "deepspeed").mkdir(parents=True)
    (site / "deepspeed" / "__init__.py").write_text(REAL)
    info = site / "deepspeed-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 9.9.9\n")
    return site


def _report(site: Path | None = None, switch: str | None = None, cwd: Path | None = None) -> str:
    env = environment({} if switch is None else {"HF_ZERO": switch})
    if site is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (env.get("PYTHONPATH"), str(site))))
    return run_python(REPORT, env=env, cwd=cwd).strip()


def test_without_deepspeed_the_alias_answers_spec_and_metadata() -> None:
    assert _report() == "ours 0.19.6 0.19.6"


def test_a_real_deepspeed_is_left_alone(real_deepspeed: Path) -> None:
    assert _report(real_deepspeed) == "real 9.9.9 9.9.9"


def test_switch_on_wins_over_a_real_deepspeed(real_deepspeed: Path) -> None:
    assert _report(real_deepspeed, "1") == "ours 0.19.6 0.19.6"


def test_switch_off_silences_the_alias(real_deepspeed: Path) -> None:
    assert _report(switch="0") == "none none"
    assert _report(real_deepspeed, "0") == "real 9.9.9 9.9.9"


def test_unknown_value_of_the_switch_is_named() -> None:
    with pytest.raises(AssertionError, match="environment variable HF_ZERO is 'maybe'; allowed are 1"):
        _report(switch="maybe")


def test_a_bare_folder_named_deepspeed_hides_nothing(tmp_path: Path) -> None:
    """Projects keep their JSON files in ``deepspeed/``; Python takes that folder for a namespace package."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "zero3.json").write_text("{}")
    assert _report(cwd=tmp_path) == "ours 0.19.6 0.19.6"


@pytest.mark.parametrize("shape", ["file", "folder", "script"])
def test_a_users_own_hf_zero_is_left_alone(shape: str, tmp_path: Path) -> None:
    """A training script called hf_zero.py: what imports accelerate must neither fail nor run it a second time."""
    question = "import importlib.metadata, importlib.util, sys\nprint('RUN')\n"
    question += "print(importlib.util.find_spec('deepspeed'), list(importlib.metadata.distributions(name='deepspeed')))\n"
    question += "print('hf_zero' in sys.modules)\n"
    target = tmp_path / "hf_zero" / "__init__.py" if shape == "folder" else tmp_path / "hf_zero.py"
    target.parent.mkdir(exist_ok=True)
    target.write_text(question if shape == "script" else "print('the file of the user was run')\n")
    script = tmp_path / ("hf_zero.py" if shape == "script" else "train.py")
    script.write_text(question)
    env = environment({"PYTHONPATH": os.pathsep.join((START, str(REPO)))})
    done = subprocess.run([sys.executable, str(script)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == ["RUN", "None []", "False"]
    assert f"{target} is named hf_zero and hides the installed package" in done.stderr


def test_an_empty_folder_named_hf_zero_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "hf_zero").mkdir()
    assert _report(cwd=tmp_path) == "ours 0.19.6 0.19.6"


def test_metadata_is_answered_by_name_only() -> None:
    """pip lists distributions without a name; it must not take DeepSpeed for installed."""
    out = run_python("""
        import importlib.metadata as m
        print(m.metadata("deepspeed")["Name"], m.metadata("DeepSpeed")["Version"], m.requires("deepspeed"))
        print("deepspeed" in {d.metadata["Name"] for d in m.distributions()}, "deepspeed" in m.packages_distributions())
    """)
    assert out.split("\n")[:2] == ["deepspeed 0.19.6 None", "False False"]


def test_import_is_lazy_and_attribute_chains_resolve() -> None:
    """accelerate imports the package in every program, so importing it must load neither torch nor the engine."""
    out = run_python("""
        import sys
        import deepspeed
        from deepspeed import comm
        from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
        print("torch" in sys.modules, DEEPSPEED_ENVIRONMENT_NAME, deepspeed.runtime.lr_schedules.__name__)
        print(deepspeed.comm.is_initialized(), comm is deepspeed.comm, "torch" in sys.modules)
    """)
    assert out.split("\n")[:2] == ["False .deepspeed_env deepspeed.runtime.lr_schedules", "False True True"]


def test_modules_that_are_commands_run_with_python_m(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["runner", "--dry-run", "--num_gpus", "3", "train.py", "--deepspeed"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("deepspeed.launcher.runner", run_name="__main__")
    assert ended.value.code == 0 and "--nproc_per_node 3" in capsys.readouterr().out
    for name, option in (("checkpoint.ds_to_universal", "--output_folder"), ("utils.zero_to_fp32", "--max_shard_size")):
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"deepspeed.{name}", run_name="__main__")
        assert ended.value.code == 0 and option in capsys.readouterr().out
    with pytest.raises(ImportError, match=r"'deepspeed\.comm' is a package and cannot be directly executed"):
        runpy.run_module("deepspeed.comm", run_name="__main__")


def test_install_by_hand_needs_no_hook() -> None:
    out = run_python(
        f"""
        import sys
        sys.path.insert(0, {str(REPO)!r})
        from hf_zero.deepspeed import install_as_deepspeed
        install_as_deepspeed(); install_as_deepspeed()
        import importlib.metadata
        import deepspeed
        print(deepspeed.__version__, importlib.metadata.version("deepspeed"))
        """,
        options=["-S", "-E"],
    )
    assert out.strip() == "0.19.6 0.19.6"


def test_install_by_hand_after_a_real_deepspeed_says_so(real_deepspeed: Path) -> None:
    with pytest.raises(AssertionError, match="a real deepspeed .* is imported already; call install_as_deepspeed"):
        run_python(f"""
            import sys
            sys.path.insert(0, {str(real_deepspeed)!r})
            import deepspeed
            sys.path.insert(0, {str(REPO)!r})
            from hf_zero.deepspeed import install_as_deepspeed
            install_as_deepspeed()
        """)


def test_a_stand_in_put_into_sys_modules_is_respected() -> None:
    out = run_python("""
        import importlib.metadata, sys, types
        sys.modules["deepspeed"] = types.ModuleType("deepspeed")
        import deepspeed
        print(hasattr(deepspeed, "initialize"), [d for d in importlib.metadata.distributions(name="deepspeed")])
    """)
    assert out.strip() == "False []"


def test_start_up_hook_costs_next_to_nothing(tmp_path: Path) -> None:
    """The hook runs in every Python process of the environment, so it imports nothing else and runs some dozens of lines."""
    env = {"PYTHONPATH": str(REPO), "PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    code = """
        import sys
        sys.modules.pop("_hf_zero_startup", None)
        before, lines = set(sys.modules), 0
        def count(frame, event, argument):
            global lines
            lines += event == "line" and not frame.f_code.co_filename.startswith("<frozen importlib")
            return count
        sys.settrace(count)
        import _hf_zero_startup
        sys.settrace(None)
        print(lines, sorted(set(sys.modules) - before))
    """
    lines, modules = run_python(code, env=env).split(" ", 1)
    assert modules.strip() == "['_hf_zero_startup']"
    assert 0 < int(lines) < 150


def test_finder_stays_out_of_other_imports() -> None:
    import _hf_zero_startup

    finder = _hf_zero_startup.DeepSpeedAliasFinder
    assert finder.find_spec("deepspeed_kernels") is None
    assert finder.find_spec("mydeepspeed") is None
    assert list(finder.find_distributions()) == []
    assert sys.meta_path.count(finder) == 1
