"""zero_to_fp32.py verifies every checksum, whatever the index says of their size."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from hf_zero.checkpoint.format.names import CHUNK_BYTES
from hf_zero.checkpoint.zero_to_fp32 import CHUNK_BYTES as CHUNK_BYTES_OF_SCRIPT
from hf_zero.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.make_golden_checkpoint import FOLDERS, TAG

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("chunk_bytes", [-1, 0, 1 << 40, "65536", None])
def test_another_size_of_chunks_is_refused(folder: Path, chunk_bytes: object, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(folder, copy)
    assert get_fp32_state_dict_from_zero_checkpoint(copy, TAG)
    (path,) = copy.rglob("index.json")
    index = json.loads(path.read_text())
    index["chunk_bytes"] = chunk_bytes
    path.write_text(json.dumps(index))
    path.with_name("complete").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(ValueError, match="chunk_bytes"):
        get_fp32_state_dict_from_zero_checkpoint(copy, TAG)


def test_script_and_package_agree() -> None:
    assert CHUNK_BYTES_OF_SCRIPT == CHUNK_BYTES
