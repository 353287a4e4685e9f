"""A Hub on loopback: the endpoints that downloads use, out of memory, with the Hub's ways of refusing."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "0123"


@dataclass
class Repository:
    """A model: its files at one commit, which has several names."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main", COMMIT)
    gated: bool = False
    """Its description is public, its files are not."""
    status: int | None = None
    """What every request is answered with, if not with what was asked for; 0: the connection is closed."""
    dropped: int = 0
    """How many downloads will break off halfway."""


@dataclass
class Hub:
    """What the server serves, and what it was asked for."""

    repositories: dict[str, Repository]
    address: str = ""
    requests: list[str] = field(default_factory=list)


@contextmanager
def serving(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """Serve until the block ends; a client takes `hub.address` as HF_ENDPOINT, and needs HF_HUB_DISABLE_XET=1."""
    hub = Hub(repositories)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")

    def _answer(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        about = parts[:2] == ["api", "models"]
        name, rest = "/".join(parts[2:4] if about else parts[:2]), parts[4:] if about else parts[2:]
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._refuse(404, "RepoNotFound")
        elif repository.status == 0:
            self.close_connection = True
        elif repository.status is not None:
            self._refuse(repository.status)
        elif len(rest) > 1 and rest[1] not in repository.revisions:
            self._refuse(404, "RevisionNotFound")
        elif about:
            self._send_json(_listing(repository) if rest[:1] == ["tree"] else _description(name, repository))
        elif repository.gated:
            self._refuse(403, "GatedRepo")
        elif "/".join(rest[2:]) not in repository.files:
            self._refuse(404, "EntryNotFound")
        else:
            self._send_file(repository, repository.files["/".join(rest[2:])])

    def _refuse(self, status: int, code: str | None = None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, content: object) -> None:
        raw = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _send_file(self, repository: Repository, raw: bytes) -> None:
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha256(raw).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(raw) - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(raw) - 1}/{len(raw)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if repository.dropped:
            repository.dropped -= 1
            self.wfile.write(raw[start : (start + len(raw)) // 2])
            self.close_connection = True
        else:
            self.wfile.write(raw[start:])


def _description(name: str, repository: Repository) -> dict[str, object]:
    return {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in repository.files]}


def _listing(repository: Repository) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": file, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
        for file, raw in repository.files.items()
    ]
