"""Multipart uploads: the order of bytes, parts on their way, errors, and the remains of a failed upload."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hf_zero.system.parted_upload import PARTS_AT_ONCE, PartedUpload, PartPool
from tests.support.processes import PATIENCE


class Store:
    """Answers requests as s3fs' file system does; parts wait until ``together`` of them are on their way."""

    def __init__(self, together: int = 1, refused: int = 0) -> None:
        self.objects: dict[str, bytes] = {}
        self.parts: dict[int, bytes] = {}
        self.aborted = False
        self._refused = refused
        self._here, self.most, self._lock = 0, 0, threading.Lock()
        self._meeting = threading.Barrier(together)

    def split_path(self, key: str) -> tuple[str, str, None]:
        bucket, _, name = key.partition("/")
        return bucket, name, None

    def call_s3(self, method: str, Bucket: str, Key: str, **arguments: Any) -> dict[str, Any]:  # noqa: N803 - S3's names
        return getattr(self, method)(f"{Bucket}/{Key}", **arguments)  # type: ignore[no-any-return]

    def put_object(self, key: str, Body: bytes) -> dict[str, Any]:  # noqa: N803
        self.objects[key] = bytes(Body)
        return {}

    def create_multipart_upload(self, _key: str) -> dict[str, Any]:
        return {"UploadId": "7"}

    def upload_part(self, _key: str, PartNumber: int, Body: bytes, UploadId: str) -> dict[str, Any]:  # noqa: N803
        assert UploadId == "7"
        with self._lock:
            self._here += 1
            self.most = max(self.most, self._here)
        self._meeting.wait(PATIENCE)
        with self._lock:
            self._here -= 1
            if PartNumber == self._refused:
                raise OSError("slow down")
            self.parts[PartNumber] = bytes(Body)
        return {"ETag": f"e{PartNumber}", "Other": ""}

    def complete_multipart_upload(self, key: str, UploadId: str, MultipartUpload: dict[str, Any]) -> dict[str, Any]:  # noqa: N803
        listed = MultipartUpload["Parts"]
        assert UploadId == "7" and listed == [{"PartNumber": number, "ETag": f"e{number}"} for number in range(1, len(self.parts) + 1)]
        self.objects[key] = b"".join(self.parts[part["PartNumber"]] for part in listed)
        return {}

    def abort_multipart_upload(self, _key: str, UploadId: str) -> dict[str, Any]:  # noqa: N803
        assert UploadId == "7" and not self._here, "a part is still on its way"
        self.aborted = True
        return {}


@pytest.mark.parametrize("nbytes", [0, 15, 16, 17, 160, 1605])
def test_bytes_arrive_in_their_order(nbytes: int) -> None:
    store, data = Store(), bytes(number % 251 for number in range(nbytes))
    window = bytearray(7)  # the same for all writes, as the writer of checkpoints has one
    with PartPool() as pool:
        upload = PartedUpload(store, "bucket/x", 16, pool)
        for start in range(0, nbytes, 7):
            piece = data[start : start + 7]
            window[: len(piece)] = piece
            upload.write(memoryview(window)[: len(piece)])
        upload.close()
        upload.close()
    assert store.objects == {"bucket/x": data} and not store.aborted
    assert all(len(part) == 16 for number, part in store.parts.items() if number < len(store.parts))


def test_parts_of_one_object_are_on_their_way_together_up_to_a_limit() -> None:
    store, data = Store(together=PARTS_AT_ONCE), bytes(16 * 3 * PARTS_AT_ONCE)
    with PartPool() as pool:
        upload = PartedUpload(store, "bucket/x", 16, pool)
        upload.write(memoryview(data))
        upload.close()
    assert store.objects == {"bucket/x": data} and store.most == PARTS_AT_ONCE


def test_an_error_of_a_part_ends_the_upload_and_leaves_nothing() -> None:
    store = Store(refused=2)
    with PartPool() as pool:
        upload = PartedUpload(store, "bucket/x", 16, pool)
        with pytest.raises(OSError, match="slow down"):
            upload.write(memoryview(bytes(16 * 40)))
            upload.close()
        upload.discard()
        upload.close()
    assert store.aborted and not store.objects
