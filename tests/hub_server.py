"""A local in-memory test Hub with the endpoints of downloads and uploads, and with the Hub's error responses."""

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

import yaml

from hub_rules import faults

COMMIT = "c0ffee" * 6 + "0123"
LARGE = ".safetensors"
"""Suffix of LFS files, which are uploaded separately from the commit."""


@dataclass
class Repository:
    """A model repository: its files at the newest and at older commits, and simulated failures."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    """Revision names of the newest commit."""
    commit: str = COMMIT
    """Hash of the newest commit."""
    gated: bool = False
    """Gated repository: the model info is public, the files are not."""
    status: int | None = None
    """HTTP status that answers every request instead of the content; 0 closes the connection."""
    dropped: int = 0
    """Number of downloads that break off halfway before downloads succeed."""
    private: bool = False
    refused: str = ""
    """Uploads whose URL path contains this are answered with 403; "create": creation of the repository is."""
    commits: list[str] = field(default_factory=list)
    """Commit messages of the uploads."""
    older: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files of older commits, by commit hash."""
    tags: dict[str, str] = field(default_factory=dict)
    """Commit hash, by tag."""

    def at(self, revision: str) -> dict[str, bytes] | None:
        """Return the files at a revision (branch, tag or commit); None if it does not exist."""
        commit = self.tags.get(revision, revision)
        return self.files if commit in (self.commit, *self.revisions) else self.older.get(commit)

    def commit_of(self, revision: str) -> str:
        """Return the commit hash of a revision."""
        return self.commit if revision in self.revisions else self.tags.get(revision, revision)


@dataclass
class Hub:
    """The repositories that the server serves, and a log of its requests."""

    repositories: dict[str, Repository]
    address: str = ""
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    """Access tokens with which uploads were requested."""
    accepted: set[str] | None = None
    """Access tokens that may upload; None accepts all."""
    failing: dict[str, int] = field(default_factory=dict)
    """Part of a URL path -> number of uploads to it that are answered with 500 before uploads succeed."""
    stored: dict[str, bytes] = field(default_factory=dict)
    """Uploaded LFS files, by digest."""


@contextmanager
def serving(repositories: dict[str, Repository]) -> Iterator[Hub]:
    """Serve until the block ends; clients need HF_ENDPOINT set to `hub.address`, and HF_HUB_DISABLE_XET=1."""
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
        is_api = parts[:2] == ["api", "models"]
        name, rest = "/".join(parts[2:4] if is_api else parts[:2]), parts[4:] if is_api else parts[2:]
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._refuse(404, "RepoNotFound")
        elif repository.status == 0:
            self.close_connection = True
        elif repository.status is not None:
            self._refuse(repository.status)
        elif len(rest) > 1 and repository.at(rest[1]) is None:
            self._refuse(404, "RevisionNotFound")
        elif is_api and rest[:1] == ["refs"]:
            tags = [
                {"name": tag, "ref": f"refs/tags/{tag}", "targetCommit": at} for tag, at in repository.tags.items()
            ]
            main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.commit}
            self._send_json({"branches": [main], "converts": [], "tags": tags})
        elif is_api:
            files = repository.at(rest[1] if len(rest) > 1 else "main") or {}
            described = _description(name, repository, repository.commit_of(rest[1] if len(rest) > 1 else "main"))
            self._send_json(_listing(files) if rest[:1] == ["tree"] else described)
        elif repository.gated:
            self._refuse(403, "GatedRepo")
        else:
            self._answer_file(repository, rest[1], "/".join(rest[2:]))

    def _answer_file(self, repository: Repository, revision: str, file: str) -> None:
        files = repository.at(revision) or {}
        if file in files:
            self._send_file(repository, files[file], repository.commit_of(revision))
        else:
            self._refuse(404, "EntryNotFound")

    def _take(self) -> None:
        """Handle one POST or PUT request of an upload."""
        length = self.headers["Content-Length"]
        raw = self._chunks() if length is None else self.rfile.read(int(length))
        path = unquote(urlsplit(self.path).path).strip("/")
        failing = next((part for part, times in self.hub.failing.items() if part in path and times), None)
        if failing is not None:
            self.hub.failing[failing] -= 1
            self._refuse(500)
            return
        if path == "api/validate-yaml":
            self._validate(json.loads(raw)["content"])
            return
        if self.command == "PUT":
            self.hub.stored[path.removeprefix("stored/")] = raw
            self._send_json({})
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.hub.tokens.add(token)
        if self.hub.accepted is not None and token not in self.hub.accepted:
            self._refuse(401)
            return
        if path == "api/repos/create":
            self._create(**json.loads(raw))
            return
        name = next((name for name in self.hub.repositories if f"{name}/" in path or f"{name}.git/" in path), "")
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._refuse(404, "RepoNotFound")
        elif repository.refused and repository.refused in path:
            self._refuse(403)
        elif "/tag/" in path:
            self._tag(repository, json.loads(raw)["tag"], path.rpartition("/")[2])
        elif path.endswith("/preupload/main"):
            self._send_json({"files": [_plan(repository, file["path"]) for file in json.loads(raw)["files"]]})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [self._place(lfs_object["oid"], lfs_object["size"]) for lfs_object in json.loads(raw)["objects"]]
            self._send_json({"transfer": "basic", "objects": objects})
        else:
            self._commit(name, repository, [json.loads(line) for line in raw.splitlines() if line])

    def _validate(self, content: str) -> None:
        """Answer with the errors in a card's metadata, by some of the Hub's rules."""
        errors = list(faults(content))
        answer = {"errors": [{"message": error} for error in errors], "warnings": []}
        self._send_json(answer, 400 if errors else 200)

    def _tag(self, repository: Repository, name: str, revision: str) -> None:
        exists = name in repository.tags
        repository.tags.setdefault(name, repository.commit_of(revision))
        self._send_json({}, 409 if exists else 200)

    def _chunks(self) -> bytes:
        """Return the request body of a chunked transfer."""
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _create(self, name: str, visibility: str = "public", organization: str | None = None, **_: object) -> None:
        full = f"{organization or 'me'}/{name}"
        existing = self.hub.repositories.get(full)
        if existing is not None and existing.refused == "create":
            self._refuse(403)
            return
        self.hub.repositories.setdefault(full, Repository({}, private=visibility == "private"))
        self._send_json({"url": f"{self.hub.address}/{full}"}, 409 if existing else 200)

    def _place(self, digest: str, size: int) -> dict[str, object]:
        entry: dict[str, object] = {"oid": digest, "size": size}
        if digest in self.hub.stored:
            return entry
        return entry | {"actions": {"upload": {"href": f"{self.hub.address}/stored/{digest}"}}}

    def _commit(self, name: str, repository: Repository, lines: list[dict[str, Any]]) -> None:
        repository.older[repository.commit] = dict(repository.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                repository.commits.append(value["summary"])
            elif line["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del repository.files[value["path"]]
            else:
                repository.files[value["path"]] = self.hub.stored[value["oid"]]
        commit = hashlib.sha1(f"{repository.commit}{len(repository.commits)}".encode()).hexdigest()
        repository.commit = commit
        self._send_json({"commitUrl": f"{self.hub.address}/{name}/commit/{commit}", "commitOid": commit})

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

    def _send_file(self, repository: Repository, raw: bytes, commit: str) -> None:
        range_header = self.headers.get("Range")
        start = int(range_header.removeprefix("bytes=").split("-")[0]) if range_header else 0
        self.send_response(206 if range_header else 200)
        self.send_header("ETag", f'"{hashlib.sha256(raw).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(raw) - start))
        if range_header:
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


def _description(name: str, repository: Repository, commit: str) -> dict[str, object]:
    info: dict[str, object] = {"id": name, "sha": commit, "private": repository.private}
    card = (repository.at(commit) or {}).get("README.md", b"").decode()
    if card.startswith("---\n"):
        info["cardData"] = yaml.safe_load(card.split("---\n")[1])
    return info | {"siblings": [{"rfilename": file} for file in repository.at(commit) or ()]}


def _listing(files: dict[str, bytes]) -> list[dict[str, object]]:
    return [
        {"type": "file", "path": file, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
        for file, raw in files.items()
    ]


def _plan(repository: Repository, path: str) -> dict[str, object]:
    """Return the upload mode of a file (LFS or regular), and the digest of its current version if there is one."""
    large, current = path.endswith(LARGE), repository.files.get(path)
    plan: dict[str, object] = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
    if current is not None:
        blob = b"blob %d\0" % len(current) + current
        plan["oid"] = hashlib.sha256(current).hexdigest() if large else hashlib.sha1(blob).hexdigest()
    return plan
