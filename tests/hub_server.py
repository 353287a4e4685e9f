"""A Hub on loopback: the endpoints that downloads and uploads use, in memory, with the Hub's ways of refusing."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "0123"
LARGE = ".safetensors"
"""The ending of files that are uploaded apart from the commit."""


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
    private: bool = False
    refused: str = ""
    """An upload is answered with 403 where its path holds this."""
    commits: list[str] = field(default_factory=list)
    """What was uploaded says of itself."""


@dataclass
class Hub:
    """What the server serves, and what it was asked for."""

    repositories: dict[str, Repository]
    address: str = ""
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    """With which uploads came; all are taken, and none is refused."""
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files by their digest, until a commit names them."""


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

    def do_POST(self) -> None:
        self._take()

    def do_PUT(self) -> None:
        self._take()

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

    def _take(self) -> None:
        """One request of an upload."""
        length = self.headers["Content-Length"]
        raw = self._chunks() if length is None else self.rfile.read(int(length))
        path = unquote(urlsplit(self.path).path).strip("/")
        if self.command == "PUT":
            self.hub.stored[path.removeprefix("stored/")] = raw
            self._send_json({})
            return
        self.hub.tokens.add(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if path == "api/repos/create":
            self._create(**json.loads(raw))
            return
        name = next((name for name in self.hub.repositories if f"{name}/" in path or f"{name}.git/" in path), "")
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._refuse(404, "RepoNotFound")
        elif repository.refused and repository.refused in path:
            self._refuse(403)
        elif path.endswith("/preupload/main"):
            self._send_json({"files": [_plan(repository, file["path"]) for file in json.loads(raw)["files"]]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [self._place(each["oid"], each["size"]) for each in json.loads(raw)["objects"]]
            self._send_json({"transfer": "basic", "objects": objects})
        else:
            self._commit(name, repository, [json.loads(line) for line in raw.splitlines() if line])

    def _chunks(self) -> bytes:
        """A body of unknown length."""
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _create(self, name: str, visibility: str = "public", organization: str | None = None, **_: object) -> None:
        full = f"{organization or 'me'}/{name}"
        there = self.hub.repositories.get(full)
        if there is not None and there.refused == "create":
            self._refuse(403)
            return
        self.hub.repositories.setdefault(full, Repository({}, private=visibility == "private"))
        self._send_json({"url": f"{self.hub.address}/{full}"}, 409 if there else 200)

    def _place(self, digest: str, size: int) -> dict[str, object]:
        found: dict[str, object] = {"oid": digest, "size": size}
        if digest in self.hub.stored:
            return found
        return found | {"actions": {"upload": {"href": f"{self.hub.address}/stored/{digest}"}}}

    def _commit(self, name: str, repository: Repository, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.commits.append(value["summary"])
            elif line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            else:
                repository.files[value["path"]] = self.hub.stored[value["oid"]]
        self._send_json({"commitUrl": f"{self.hub.address}/{name}/commit/{COMMIT}", "commitOid": COMMIT})

    def _refuse(self, status: int, code: str | None = None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, content: object, status: int = 200) -> None:
        raw = json.dumps(content).encode()
        self.send_response(status)
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
    about = {"id": name, "sha": COMMIT, "private": repository.private}
    return about | {"siblings": [{"rfilename": file} for file in repository.files]}


def _listing(repository: Repository) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": file, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
        for file, raw in repository.files.items()
    ]


def _plan(repository: Repository, path: str) -> dict[str, object]:
    """How a file is to be uploaded, and what is there under its name."""
    large, there = path.endswith(LARGE), repository.files.get(path)
    plan: dict[str, object] = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
    if there is not None:
        blob = b"blob %d\0" % len(there) + there
        plan["oid"] = hashlib.sha256(there).hexdigest() if large else hashlib.sha1(blob).hexdigest()
    return plan
