"""Write an object of S3 as a multipart upload, of which several parts are on their way at a time.

s3fs' own file sends one part after the other, so an object gets the bandwidth of one connection, and stores limit each connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Semaphore
from typing import Any

PARTS_AT_ONCE = 10  # of all objects of one writer: as many connections as botocore keeps open


class PartPool:
    """Threads that send parts, for all objects that one writer has open; ends with the ``with``."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="hf_zero part")
        self._free = Semaphore(PARTS_AT_ONCE)

    def __enter__(self) -> PartPool:
        return self

    def __exit__(self, *_outcome: object) -> None:
        self._pool.shutdown()

    def send(self, call: Any, **arguments: Any) -> Future[Mapping[str, Any]]:
        """Return the future of ``call(**arguments)``; wait while ``PARTS_AT_ONCE`` calls are under way, so that memory is bounded."""
        self._free.acquire()
        try:
            future = self._pool.submit(call, **arguments)
        except BaseException:
            self._free.release()
            raise
        future.add_done_callback(lambda _: self._free.release())
        return future


class PartedUpload:
    """File that an object of S3 is written through, from its first byte to its last; the object appears in ``close``.

    An object smaller than a part is written by one request. Errors are those of s3fs, raised by a later ``write`` or by ``close``.

    Args:
        fs: File system of s3fs.
        key: Bucket and name of the object.
        part_bytes: Size of every part but the last, which may be smaller.
        pool: Sends the parts.
    """

    def __init__(self, fs: Any, key: str, part_bytes: int, pool: PartPool) -> None:
        self._fs, self._pool, self._part_bytes = fs, pool, part_bytes
        bucket, name, _ = fs.split_path(key)
        self._object = {"Bucket": bucket, "Key": name}
        self._upload: dict[str, str] = {}  # its number, once it has begun
        self._part = bytearray()
        self._sent: list[Future[Mapping[str, Any]]] = []
        self._closed = False

    def write(self, data: memoryview) -> None:
        """Append ``data``, which may change afterwards."""
        rest = memoryview(data).cast("B")
        while rest:
            taken = rest[: self._part_bytes - len(self._part)]
            self._part += taken
            rest = rest[len(taken) :]
            if len(self._part) == self._part_bytes:
                self._send()

    def _send(self) -> None:
        for sent in self._sent[-2 * PARTS_AT_ONCE :]:
            if sent.done():
                sent.result()  # an error ends the upload now; an error of an older part, in ``close``
        if not self._upload:
            self._upload = {"UploadId": self._call("create_multipart_upload")["UploadId"]}
        body, self._part = self._part, bytearray()
        number = len(self._sent) + 1
        self._sent.append(self._pool.send(self._call, method="upload_part", PartNumber=number, Body=body, **self._upload))

    def _call(self, method: str, **arguments: Any) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._fs.call_s3(method, **self._object, **arguments)
        return answer

    def close(self) -> None:
        """Send the rest and complete the object; do nothing after ``close`` or ``discard``."""
        if self._closed:
            return
        if not self._upload:
            self._call("put_object", Body=self._part)
        else:
            if self._part:
                self._send()
            parts = [{"PartNumber": number, **_identity(sent.result())} for number, sent in enumerate(self._sent, 1)]
            self._call("complete_multipart_upload", MultipartUpload={"Parts": parts}, **self._upload)
        self._closed = True

    def discard(self) -> None:
        """Delete the parts that were sent, after a failure."""
        self._closed = True
        for sent in self._sent:
            sent.cancel()
        for sent in self._sent:
            if not sent.cancelled():
                sent.exception()  # waits: a part that arrives after the deletion would stay
        if self._upload:
            self._call("abort_multipart_upload", **self._upload)


def _identity(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields by which S3 recognises a part."""
    return {name: answer[name] for name in ("ETag", "ChecksumSHA256") if name in answer}
