"""A local Hub: the part of the Hub's HTTP interface that Hugging Face's clients use, for tests.

    with serve(folder, socket) as hub:
        run_a_client(HF_ENDPOINT=hub.url, HF_HOME=an_empty_folder, HF_TOKEN="hf_of_alice")

The clients run unmodified, in processes of their own, because they read these variables when they are imported. All
files are uploaded within the commit: the server does not support LFS or Xet (HF_HUB_DISABLE_XET=1).
"""

import asyncio
import base64
import contextlib
import hashlib
import itertools
import json
import re
import socket
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route


TOKENS = {"hf_of_alice": "alice", "hf_of_bob": "bob"}
TYPES = {"models": "model", "datasets": "dataset", "spaces": "space", "kernels": "kernel"}
PLURALS = {type: plural for plural, type in TYPES.items()}
ID = r"(?P<id>[\w.-]+/[\w.-]+)"
API = rf"/api/(?P<plural>{'|'.join(TYPES)})/{ID}"
PUBLIC = rf"/(?:(?P<plural>datasets|spaces|kernels)/)?{ID}"
OPTIONAL = re.compile(r"/api/agent-harnesses|/api/organizations/[\w.-]+/overview")  # clients do without
COUNTER = itertools.count()
DATE = "2026-01-01T00:00:00.000Z"
ENDPOINTS = []  # (pattern of the raw path, methods, function of hub, request and the pattern's groups)


def endpoint(pattern, *methods):
    """Let the decorated function answer these requests, with a `Response` or with what becomes JSON."""

    def register(function):
        ENDPOINTS.append((re.compile(pattern), methods or ("GET",), function))
        return function

    return register


class Refusal(Exception):
    """An error response; `code` decides which exception a client raises."""

    def __init__(self, status, message, code=None, headers=None, **body):
        headers = {"X-Error-Message": message, **(headers or {})} | ({"X-Error-Code": code} if code else {})
        self.response = JSONResponse({"error": message, **body}, status, headers)


@dataclass
class Knobs:
    """Settings that a test can change while the server runs."""

    slow: float = 0.0  # seconds to wait after each part of an uploaded commit
    fail: str | None = None  # paths with this part are answered with status 500


class Commit(NamedTuple):
    sha: str
    parent: str | None
    files: dict  # path: git's hash of the content
    title: str


@dataclass
class Repo:
    type: str
    id: str
    private: bool = False
    commits: dict = field(default_factory=dict)  # sha: Commit
    branches: dict = field(default_factory=dict)  # name: sha
    tags: dict = field(default_factory=dict)
    pull_requests: dict = field(default_factory=dict)  # refs/pr/N: sha

    def commit(self, ref, files, title):
        """Add a commit to a branch or pull request, and return its sha."""
        refs = self.pull_requests if ref.startswith("refs/pr/") else self.branches
        parent = refs.get(ref)
        refs[ref] = sha = git_oid("commit", f"{self.type} {self.id} {parent} {title} {next(COUNTER)}".encode())
        self.commits[sha] = Commit(sha, parent, files, title)
        return sha

    def at(self, revision):
        """Return the commit of a branch, tag, pull request or sha, quoted as in an address, or refuse with 404."""
        name = unquote(revision).removeprefix("refs/heads/").removeprefix("refs/tags/")
        sha = (self.branches | self.tags | self.pull_requests).get(name, name)
        if sha not in self.commits:
            raise Refusal(404, f"Invalid rev id: {name}", "RevisionNotFound")
        return self.commits[sha]


@dataclass
class Hub:
    """State of the server: in memory, except for the contents of files."""

    folder: Path
    knobs: Knobs = field(default_factory=Knobs)
    url: str = ""
    repos: dict = field(default_factory=dict)  # (type, id): Repo
    log: list = field(default_factory=list)  # "METHOD PATH" of each answered request
    problems: list = field(default_factory=list)  # a missing endpoint, a bug of the server

    def repo(self, request, plural, id):
        """Return a repository; a private one exists for its owner only. URLs of models' files omit "models"."""
        user, repo = user_of(request), self.repos.get((TYPES[plural or "models"], id))
        if repo is None or (repo.private and user != id.partition("/")[0]):
            raise Refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        return repo

    def page(self, repo):
        return f"{self.url}/{'' if repo.type == 'model' else PLURALS[repo.type] + '/'}{repo.id}"

    def store(self, data):
        """Write the content of a file, and return its hash, which names it in the folder."""
        oid = git_oid("blob", data)
        (self.folder / oid).write_bytes(data)
        return oid


def user_of(request):
    """Return the user of the token, None without a token."""
    return TOKENS.get(request.headers.get("authorization", "").removeprefix("Bearer "))


def git_oid(kind, data):
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data).hexdigest()


@endpoint("/knobs", "PUT")
async def turn_knobs(hub, request):
    """Let a client change the settings."""
    hub.knobs = Knobs(**await request.json())
    return {}


# -- repositories


@endpoint("/api/validate-yaml", "POST")
async def validate_yaml(hub, request):
    return {"errors": [], "warnings": []}


@endpoint("/api/repos/create", "POST")
async def create(hub, request):
    body = await request.json()
    type, id = body.get("type") or "model", f"{body.get('organization') or user_of(request)}/{body['name']}"
    if (type, id) in hub.repos:
        raise Refusal(409, f"You already created this {type} repo", url=hub.page(hub.repos[type, id]))
    repo = hub.repos[type, id] = Repo(type, id, body.get("visibility") == "private")
    repo.commit("main", {".gitattributes": hub.store(b"")}, "initial commit")
    return {"url": hub.page(repo)}


@endpoint(rf"{API}(?:/revision/(?P<revision>[^/]+))?")
async def info(hub, request, plural, id, revision):
    repo = hub.repo(request, plural, id)
    commit = repo.at(revision or "main")
    files = [{"rfilename": path} for path in sorted(commit.files)]
    return {"id": id, "sha": commit.sha, "private": repo.private, "siblings": files, "tags": []}


@endpoint(f"{API}/refs")
async def refs(hub, request, plural, id):
    repo = hub.repo(request, plural, id)
    kinds = {"branches": ("refs/heads/", repo.branches), "tags": ("refs/tags/", repo.tags)}
    rows = {
        kind: [{"name": name, "ref": prefix + name, "targetCommit": sha} for name, sha in names.items()]
        for kind, (prefix, names) in kinds.items()
    }
    return {"converts": [], **rows}


@endpoint(f"{API}/commits/(?P<revision>[^/]+)")
async def commits(hub, request, plural, id, revision):
    repo = hub.repo(request, plural, id)
    rows, commit = [], repo.at(revision)
    while commit is not None:
        rows.append({"id": commit.sha, "title": commit.title, "message": "", "date": DATE, "authors": []})
        commit = repo.commits.get(commit.parent)
    return rows


@endpoint(f"{API}/(?P<kind>branch|tag)/(?P<name>[^/]+)", "POST")
async def create_ref(hub, request, plural, id, kind, name):
    """Create a branch, whose name is in the address, or a tag of the revision in the address."""
    repo = hub.repo(request, plural, id)
    if kind == "branch":
        refs, name, start = repo.branches, unquote(name), "main"
    else:
        refs, name, start = repo.tags, (await request.json())["tag"], name
    if name in refs:
        raise Refusal(409, f"Reference already exists: {name}")
    refs[name] = repo.at(start).sha
    return Response(status_code=201)


@endpoint(f"{API}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.*))?")
async def tree(hub, request, plural, id, revision, folder):
    commit = hub.repo(request, plural, id).at(revision)
    prefix = f"{unquote(folder).rstrip('/')}/" if folder else ""
    recursive, rows = request.query_params.get("recursive") == "true", {}
    for path, oid in sorted(commit.files.items()):
        if path.startswith(prefix):
            shown = path if recursive else prefix + path.removeprefix(prefix).partition("/")[0]
            kind, size = "file" if shown == path else "directory", (hub.folder / oid).stat().st_size
            rows[shown] = {"type": kind, "oid": oid, "size": size, "path": shown}
    headers = {"X-Repo-Commit": commit.sha}
    if prefix and not rows:
        raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound", headers)
    return JSONResponse(list(rows.values()), headers=headers)


# -- uploads


@endpoint(f"{API}/preupload/(?P<revision>[^/]+)", "POST")
async def preupload(hub, request, plural, id, revision):
    body = await request.json()
    files, rows = hub.repo(request, plural, id).at(revision).files, []
    for file in body["files"]:
        path = file["path"]
        row = {"path": path, "uploadMode": "regular", "shouldIgnore": False}
        rows.append(row | ({"oid": files[path]} if path in files else {}))
    return {"files": rows}


@endpoint(f"{API}/commit/(?P<revision>[^/]+)", "POST")
async def commit(hub, request, plural, id, revision):
    body = bytearray()
    async for part in request.stream():
        body += part
        await asyncio.sleep(hub.knobs.slow)
    header, *lines = [json.loads(line) for line in body.splitlines()]
    repo, header = hub.repo(request, plural, id), header["value"]
    ref, head = unquote(revision).removeprefix("refs/heads/"), repo.at(revision)
    if header.get("parentCommit") not in (None, head.sha):
        raise Refusal(412, "A commit has happened since. Please refresh and try again.")
    files, number = dict(head.files), None
    for line in lines:
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = hub.store(base64.b64decode(value["content"]))
        else:  # deletedFile
            del files[value["path"]]
    if request.query_params.get("create_pr") == "1":
        number = len(repo.pull_requests) + 1
        ref = f"refs/pr/{number}"
        repo.pull_requests[ref] = head.sha
    sha = repo.commit(ref, files, header["summary"])
    answer = {"success": True, "commitOid": sha, "commitUrl": f"{hub.page(repo)}/commit/{sha}", "hookOutput": ""}
    return answer | ({"pullRequestUrl": f"{hub.page(repo)}/discussions/{number}"} if number else {})


# -- downloads


@endpoint(f"{PUBLIC}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "GET", "HEAD")
async def resolve(hub, request, plural, id, revision, path):
    repo = hub.repo(request, plural, id)
    commit = repo.at(revision)
    headers, oid = {"X-Repo-Commit": commit.sha}, commit.files.get(unquote(path))
    if oid is None:
        raise Refusal(404, "Entry not found", "EntryNotFound", headers)  # the client's cache needs the commit
    return FileResponse(hub.folder / oid, headers=headers | {"ETag": f'"{oid}"'})


# -- the server


def application(hub):
    async def answer(request):
        path, problem = request.scope["raw_path"].decode().partition("?")[0], None
        response = Response(status_code=404)
        try:
            if hub.knobs.fail and hub.knobs.fail in path:
                raise Refusal(500, "this failure is asked for")
            for pattern, methods, function in ENDPOINTS:
                if (match := pattern.fullmatch(path)) and request.method in methods:
                    response = await function(hub, request, **match.groupdict())
                    response = response if isinstance(response, Response) else JSONResponse(response)
                    break
            else:
                problem = None if OPTIONAL.fullmatch(path) else "an unknown endpoint"
        except Refusal as refusal:
            response = refusal.response
        except ClientDisconnect:
            pass  # a client was killed
        except Exception:
            response, problem = Response(status_code=500), traceback.format_exc()
        hub.log.append(f"{request.method} {path}")
        if problem:
            hub.problems.append(f"{hub.log[-1]}: {problem}")
        return response

    methods = ["GET", "HEAD", "POST", "PUT", "DELETE"]
    return Starlette(routes=[Route("/{path:path}", answer, methods=methods)])


@contextlib.contextmanager
def serve(folder, bound):
    """Run the server in a thread, and yield the `Hub`; its `knobs` can be changed at any time.

    Args:
        folder: an empty folder for the contents of files.
        bound: a socket with the address of the Hub.
    """
    hub = Hub(folder, url="http://{}:{}".format(*bound.getsockname()))
    # A response is sent in two parts, and the second must not wait for an acknowledgement.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = uvicorn.Server(
        uvicorn.Config(application(hub), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield hub
    finally:
        server.should_exit = True
        thread.join(10)
