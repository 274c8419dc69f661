"""Repositories: their commits, branches, tags and pull requests, and the endpoints that make, name and list them."""

import contextlib
import hashlib
import itertools
import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import quote, unquote

import yaml
from starlette.responses import JSONResponse, Response

from .app import API, TYPES, Refusal, endpoint, page_url


BINARY = ("safetensors", "bin", "pt", "pth", "pkl", "parquet", "arrow", "zip", "gz", "npz", "so", "png")
GITATTRIBUTES = "".join(f"*.{ending} filter=lfs diff=lfs merge=lfs -text\n" for ending in BINARY).encode()
FRONT_MATTER = re.compile(r"^\s*---[\r\n]+([\S\s]*?)[\r\n]+---([\r\n]|$)")
COUNTER = itertools.count()


@dataclass
class File:
    """A file of a commit; `oid` is git's, of the content or, for LFS, of the pointer."""

    oid: str
    sha256: str
    size: int
    lfs: bool = False

    @classmethod
    def of(cls, data, sha256):
        return cls(git_oid("blob", data), sha256, len(data))

    @classmethod
    def pointer(cls, sha256, size):
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
        return cls(git_oid("blob", text.encode()), sha256, size, lfs=True)

    @property
    def content_oid(self):
        return self.sha256 if self.lfs else self.oid


@dataclass
class Commit:
    sha: str
    parent: str | None
    files: dict  # path: File
    title: str
    message: str
    author: str
    date: str


@dataclass
class Repo:
    type: str
    id: str
    private: bool
    sdk: str | None
    created: str = field(default_factory=lambda: now())
    commits: dict = field(default_factory=dict)  # sha: Commit
    branches: dict = field(default_factory=dict)  # name: sha
    tags: dict = field(default_factory=dict)
    pull_requests: dict = field(default_factory=dict)  # refs/pr/N: sha

    def commit(self, ref, files, title, message="", author="alice"):
        """Add a commit to a branch or pull request; its sha."""
        refs = self.pull_requests if ref.startswith("refs/pr/") else self.branches
        parent = refs.get(ref)
        sha = git_oid("commit", f"{self.type} {self.id} {parent} {title} {next(COUNTER)}".encode())
        self.commits[sha] = Commit(sha, parent, files, title, message, author, now())
        refs[ref] = sha
        return sha

    def at(self, revision):
        """The commit of a branch, tag, pull request or sha, quoted as in an address; 404 if there is none."""
        name = unquote(revision).removeprefix("refs/heads/").removeprefix("refs/tags/")
        sha = (self.branches | self.tags | self.pull_requests).get(name, name)
        if sha not in self.commits:
            raise Refusal(404, f"Invalid rev id: {name}", "RevisionNotFound")
        return self.commits[sha]


def now():
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def git_oid(kind, data):
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data).hexdigest()


def card_data(hub, commit):
    """The YAML at the head of README.md, {} if there is none."""
    file = commit.files.get("README.md")
    match = file and FRONT_MATTER.match(hub.path(file.sha256).read_text())
    return (match and yaml.safe_load(match[1])) or {}


# -- users and cards


@endpoint(r"/api/organizations/(?P<name>[\w.-]+)/overview")
async def organization(hub, request, name):
    raise Refusal(404, f"There is no organization {name}")


@endpoint("/api/validate-yaml", "POST")
async def validate_yaml(hub, request):
    body = await request.json()
    match, errors = FRONT_MATTER.match(body["content"]), []
    if match is None:
        return {"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card", "line": 1}]}
    try:
        data = yaml.safe_load(match[1]) or {}
    except yaml.YAMLError as error:
        data, errors = {}, [str(error)]
    if any("results" not in index for index in data.get("model-index", [])):
        errors.append('"model-index[0].results" is required')
    if body["repoType"] == "space" and data.get("sdk") not in ("gradio", "docker", "static"):
        errors.append('"sdk" must be one of [gradio, docker, static]')
    errors = [{"message": message, "line": 1} for message in errors]
    return JSONResponse({"errors": errors, "warnings": []}, 400 if errors else 200)


# -- repositories


@endpoint("/api/repos/create", "POST")
async def create(hub, request):
    body = await request.json()
    type, name = body.get("type") or "model", body.get("organization") or hub.signed_in(request).name
    hub.owner(request, name, f"create a {type}")
    id = f"{name}/{body['name']}"
    if (type, id) in hub.repos:
        url = page_url(hub, hub.repos[type, id])
        raise Refusal(409, f"You already created this {type} repo", url=url)
    if type == "space" and body.get("sdk") is None:
        raise Refusal(400, '"sdk" is required')
    repo = hub.repos[type, id] = Repo(type, id, body.get("visibility") == "private", body.get("sdk"))
    repo.commit("main", {".gitattributes": File.of(GITATTRIBUTES, hub.put(GITATTRIBUTES))}, "initial commit")
    return {"url": page_url(hub, repo), "name": id, "id": id}


@endpoint(rf"{API}(?:/revision/(?P<revision>[^/]+))?")
async def info(hub, request, plural, id, revision):
    repo = hub.repo(request, TYPES[plural], id)
    return info_of(hub, repo, repo.at(revision or "main"), "blobs" in request.query_params)


def info_of(hub, repo, commit, blobs=False):
    card = card_data(hub, commit)
    siblings = []
    for path, file in sorted(commit.files.items()):
        row = {"rfilename": path} | ({"blobId": file.oid, "size": file.size} if blobs else {})
        if blobs and file.lfs:
            row["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": 134}
        siblings.append(row)
    values = {"_id": repo.id, "id": repo.id, "author": repo.id.partition("/")[0], "sha": commit.sha}
    values |= {"lastModified": commit.date, "createdAt": repo.created, "private": repo.private, "gated": False}
    values |= {"disabled": False, "downloads": 0, "likes": 0, "tags": list(card.get("tags") or [])}
    values |= {"cardData": card, "siblings": siblings}
    if repo.type == "space":
        values |= {"sdk": repo.sdk or card.get("sdk")}
    if "config.json" in commit.files:
        with contextlib.suppress(ValueError, RecursionError):  # the Hub takes any text, and leaves it out here
            config = json.loads(hub.path(commit.files["config.json"].sha256).read_text())
            values["config"] = {
                key: config[key] for key in ("architectures", "model_type", "auto_map") if key in config
            }
    return values


# -- names of commits


@endpoint(f"{API}/refs")
async def refs(hub, request, plural, id):
    repo = hub.repo(request, TYPES[plural], id)
    kinds = {"branches": ("refs/heads/", repo.branches), "tags": ("refs/tags/", repo.tags)}
    rows = {
        kind: [{"name": name, "ref": prefix + name, "targetCommit": sha} for name, sha in names.items()]
        for kind, (prefix, names) in kinds.items()
    }
    return {"converts": [], **rows}


@endpoint(f"{API}/commits/(?P<revision>[^/]+)")
async def commits(hub, request, plural, id, revision):
    repo = hub.repo(request, TYPES[plural], id)
    rows, commit = [], repo.at(revision)
    while commit is not None:
        row = {"id": commit.sha, "title": commit.title, "message": commit.message, "date": commit.date}
        rows.append(row | {"authors": [{"user": commit.author}]})
        commit = repo.commits.get(commit.parent)
    return rows


@endpoint(f"{API}/branch/(?P<name>[^/]+)", "POST")
async def branch(hub, request, plural, id, name):
    body = await request.body()
    repo, start = hub.repo(request, TYPES[plural], id, write=True), json.loads(body or b"{}").get("startingPoint")
    return add_ref(repo.branches, unquote(name), repo.at(quote(start or "main", safe="")))


@endpoint(f"{API}/tag/(?P<revision>[^/]+)", "POST")
async def tag(hub, request, plural, id, revision):
    body = await request.body()
    repo = hub.repo(request, TYPES[plural], id, write=True)
    return add_ref(repo.tags, json.loads(body)["tag"], repo.at(revision))


def add_ref(refs, name, commit):
    if name in refs:
        raise Refusal(409, f"Reference already exists: {name}")
    refs[name] = commit.sha
    return Response(status_code=201)


# -- files of a commit


def row_of(path, file):
    row = {"type": "file", "oid": file.oid, "size": file.size, "path": path}
    if file.lfs:
        row["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
    return row


def folder_row(path):
    return {"type": "directory", "oid": git_oid("tree", path.encode()), "size": 0, "path": path}


@endpoint(f"{API}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.*))?")
async def tree(hub, request, plural, id, revision, folder):
    repo, query = hub.repo(request, TYPES[plural], id), request.query_params
    commit, prefix = repo.at(revision), f"{unquote(folder).rstrip('/')}/" if folder else ""
    recursive = query.get("recursive", "").lower() == "true"
    rows = {}
    for path, file in sorted(commit.files.items()):
        if path.startswith(prefix):
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                inner = prefix + "/".join(parts[:depth])
                rows.setdefault(inner, folder_row(inner))
            if recursive or len(parts) == 1:
                rows[path] = row_of(path, file)
    headers = {"X-Repo-Commit": commit.sha}
    if prefix and not rows:
        raise Refusal(404, f"{folder} does not exist on {revision}", "EntryNotFound", headers)
    return JSONResponse(list(rows.values()), headers=headers)
