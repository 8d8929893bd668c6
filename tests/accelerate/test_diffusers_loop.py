"""A training loop of diffusers under `accelerate launch`: the numbers of DDP, its moving average too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.launches import launch_on_ranks, report_of, run_on_ranks
from tests.support.processes import REPO

pytest.importorskip("diffusers")

SCRIPT = REPO / "tests" / "support" / "scripts" / "diffusers_unet.py"


def _report(stage: int | None, folder: Path) -> dict[str, Any]:
    """What the script reports; stage None is DDP."""
    words = ["--output_dir", str(folder / f"out{stage}")]
    if stage is None:
        return report_of(run_on_ranks(SCRIPT, *words, ACCELERATE_USE_CPU="true"))
    settings: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 2, "mixed_precision": "no"}
    zero = {"zero_stage": stage, "zero3_init_flag": stage == 3, "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}
    config = folder / f"{stage}.yaml"
    config.write_text(yaml.safe_dump({**settings, "distributed_type": "DEEPSPEED", "use_cpu": False, "deepspeed_config": zero}))
    return report_of(launch_on_ranks(config, SCRIPT, *words))


@pytest.mark.slow
def test_a_loop_of_diffusers(tmp_path: Path) -> None:
    expected = _report(None, tmp_path)
    for stage in (2, 3):
        found = _report(stage, tmp_path)
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-4), f"stage {stage}: {key}"
        assert found["saved"] == pytest.approx(found["weights"])
