"""A Hugging Face hub on this machine: what `huggingface_hub` and the depot ask of one, and ways to go wrong.

Two servers of different origin, as in the world: the hub itself, and the storage that large files are redirected to.
The storage refuses requests that carry a token. `test_fake_hub.py` has the real library download from it.
"""

import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_SUFFIX = ".safetensors"  # what git keeps elsewhere
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class HubRepo:
    """A repository: its commits by sha, its branches, who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    tokens: frozenset[str] = frozenset()  # empty: public
    gated: bool = False  # the listing is public, the files are not

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """A new commit, which the branch then is at."""
        ids = [(name, _git_id(content)) for name, content in sorted(files.items())]
        sha = hashlib.sha1(repr((ids, len(self.commits))).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[branch] = sha
        return sha


@dataclass(frozen=True)
class Seen:
    """One request, as a server saw it."""

    server: str
    path: str
    byte_range: str | None
    token: str | None
    cookie: str | None = None


@dataclass
class Fault:
    """What happens to the next `times` requests whose `SERVER:PATH RANGE` holds `match`, or to their answers."""

    match: str
    times: int = 1
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # bytes of the body, then the connection ends
    hang: bool = False  # no answer until the hub closes
    no_ranges: bool = False  # the whole file, whatever was asked for
    edit: Callable[[bytes], bytes] | None = None  # of the body


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that has read enough hangs up: that is its right."""


class FakeHub:
    """Both servers; a context manager."""

    def __init__(self) -> None:
        self.repos: dict[str, HubRepo] = {}
        self.seen: list[Seen] = []
        self.faults: list[Fault] = []
        self.hung = threading.Event()  # a request hangs
        self.closing = threading.Event()
        self.storage_url = self._start("storage")
        self.url = self._start("hub")

    def repo(self, name: str, files: Mapping[str, bytes], **fields: Any) -> HubRepo:
        """A new repository with one commit."""
        self.repos[name] = repo = HubRepo(**fields)
        repo.commit(files)
        return repo

    def fault(self, match: str, **fields: Any) -> None:
        self.faults.append(Fault(match, **fields))

    def take_fault(self, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.match in path and fault.times:
                fault.times -= 1
                return fault
        return None

    def bytes_asked(self, name: str) -> int:
        """How much of files of this name was asked of the storage, in all."""
        spans = [
            _RANGE.fullmatch(seen.byte_range or "")
            for seen in self.seen
            if name in seen.path and seen.server == "storage"
        ]
        return sum(int(span[2]) - int(span[1]) + 1 for span in spans if span)

    def close(self) -> None:
        self.closing.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, name: str) -> str:
        server = _Server(("127.0.0.1", 0), _handler(self, name))
        self._servers = [*getattr(self, "_servers", []), server]
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"


def _handler(hub: FakeHub, server: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            bearer = self.headers.get("authorization")
            token = bearer.removeprefix("Bearer ") if bearer else None
            path = unquote(urlsplit(self.path).path)
            hub.seen.append(Seen(server, path, self.headers.get("range"), token, self.headers.get("cookie")))
            fault = hub.take_fault(f"{server}:{path} {self.headers.get('range')}")
            if fault and fault.hang:
                hub.hung.set()
                hub.closing.wait()
                self.close_connection = True
                return
            if fault and fault.status:
                self._send(fault.status, b"{}", dict(fault.headers), fault, body)
                return
            status, headers, content = _route(hub, server, self.path, token)
            self._send(status, content, headers, fault, body)

        def _send(self, status: int, content: bytes, headers: dict[str, str], fault: Fault | None, body: bool) -> None:
            if fault and fault.edit:
                content = fault.edit(content)
            total = len(content)
            asked = _RANGE.fullmatch(self.headers.get("range") or "")
            if status == 200 and asked and not (fault and fault.no_ranges):
                start, end = int(asked[1]), min(int(asked[2] or total - 1) + 1, total)
                status, content = 206, content[start:end]
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{total}"
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), "Connection": "close", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if fault and fault.cut_after is not None:
                content = content[: fault.cut_after]
                self.close_connection = True
            if body:
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


Answer = tuple[int, dict[str, str], bytes]


def _route(hub: FakeHub, server: str, url: str, token: str | None) -> Answer:
    parts = urlsplit(url)
    path, query = unquote(parts.path), parse_qs(parts.query)
    if server == "storage":
        return _stored(hub, query, token)
    if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
        return _revision(hub, match[1], match[2] or "main", token)
    if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/(.+)", path):
        return _tree(hub, match[1], match[2], token)
    if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
        return _file(hub, match[1], match[2], match[3], token)
    return _error(404, "EntryNotFound")


def _revision(hub: FakeHub, name: str, revision: str, token: str | None) -> Answer:
    repo = hub.repos.get(name)
    if repo is None or not _may_see(repo, token):
        return _error(401 if token is None else 404, "RepoNotFound")
    sha = repo.refs.get(revision, revision)
    if sha not in repo.commits:
        return _error(404, "RevisionNotFound")
    siblings = [_sibling(path, content) for path, content in repo.commits[sha].items()]
    body = {"_id": "1", "id": name, "modelId": name, "sha": sha, "siblings": siblings, "tags": [], "downloads": 0}
    return 200, {"Content-Type": "application/json"}, json.dumps(body).encode()


def _tree(hub: FakeHub, name: str, sha: str, token: str | None) -> Answer:
    """What `snapshot_download` lists; pages are not needed for so few files."""
    status, headers, body = _revision(hub, name, sha, token)
    if status == 200:
        rows = [{"type": "file", "path": row["rfilename"], "size": row["size"], "oid": row["blobId"]}
                for row in json.loads(body)["siblings"]]  # fmt: skip
        body = json.dumps(rows).encode()
    return status, headers, body


def _file(hub: FakeHub, name: str, sha: str, path: str, token: str | None) -> Answer:
    repo = hub.repos.get(name)
    if repo is None or not _may_see(repo, token):
        return _error(401 if token is None else 404, "RepoNotFound")
    if repo.gated and token not in repo.tokens:
        return _error(401 if token is None else 403, "GatedRepo")
    content = repo.commits.get(repo.refs.get(sha, sha), {}).get(path)
    if content is None:
        return _error(404, "EntryNotFound")
    headers = {"X-Repo-Commit": repo.refs.get(sha, sha)}
    if not path.endswith(LARGE_SUFFIX):
        return 200, {**headers, "ETag": f'"{_git_id(content)}"'}, content
    digest = _digest("sha256", content)
    target = f"{hub.storage_url}/{path}?repo={name}&sha={repo.refs.get(sha, sha)}&path={path}"
    headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content)), "Location": target}
    return 302, headers, b"Found"


def _stored(hub: FakeHub, query: dict[str, list[str]], token: str | None) -> Answer:
    if token is not None:
        return 400, {}, b"only one authentication method may be used"
    content = hub.repos[query["repo"][0]].commits[query["sha"][0]][query["path"][0]]
    return 200, {"ETag": f'"{_digest("md5", content)}"'}, content


def _may_see(repo: HubRepo, token: str | None) -> bool:
    return repo.gated or not repo.tokens or token in repo.tokens


def _sibling(path: str, content: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"rfilename": path, "size": len(content)}
    if not path.endswith(LARGE_SUFFIX):
        return {**row, "blobId": _git_id(content)}
    digest = _digest("sha256", content)
    lfs = {"sha256": digest, "size": len(content), "pointerSize": 134}
    return {**row, "blobId": _git_id(digest.encode()), "lfs": lfs}  # git itself only holds a pointer


@functools.lru_cache(maxsize=256)  # of large files, at every range of them
def _digest(algorithm: str, content: bytes) -> str:
    return hashlib.new(algorithm, content).hexdigest()


def _git_id(content: bytes) -> str:
    return _digest("sha1", f"blob {len(content)}\0".encode() + content)


def _error(status: int, code: str) -> Answer:
    return status, {"X-Error-Code": code, "X-Error-Message": code}, json.dumps({"error": code}).encode()
