"""What all requests have in common: state, table of endpoints, users, errors as the Hub sends them, log."""

import hashlib
import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


TYPES = {"models": "model", "datasets": "dataset", "spaces": "space", "kernels": "kernel"}
PLURALS = {type: plural for plural, type in TYPES.items()}
ID = r"(?P<id>[\w.-]+/[\w.-]+)"
API = rf"/api/(?P<plural>{'|'.join(TYPES)})/{ID}"
PUBLIC = rf"/(?:(?P<plural>datasets|spaces|kernels)/)?{ID}"
# Clients ask for these and do without.
OPTIONAL = re.compile(r"/api/agent-harnesses")
ENDPOINTS = []  # (pattern of the path as it was sent, methods, function of hub, request and the pattern's groups)


def endpoint(pattern, *methods):
    """Decorator: the function answers these requests with a `Response`, or with what becomes JSON."""

    def register(function):
        ENDPOINTS.append((re.compile(pattern), methods or ("GET",), function))
        return function

    return register


@dataclass
class Knobs:
    """What a test can change while the server runs."""

    slow: float = 0.0  # seconds to wait before each 64 KiB of an upload
    fail: str | None = None  # addresses with this part are answered with 500


@dataclass
class User:
    name: str
    role: str


@dataclass
class Entry:
    """A request that was answered."""

    method: str
    host: str
    path: str
    status: int
    range: str
    problem: str | None


@dataclass
class Hub:
    """State of the server: in memory, with the blobs, named by their sha256, in a folder."""

    folder: Path
    knobs: Knobs = field(default_factory=Knobs)
    url: str = ""
    blob_url: str = ""
    tokens: dict = field(default_factory=dict)  # token: User
    repos: dict = field(default_factory=dict)  # (type, id): Repo
    log: list = field(default_factory=list)

    def problems(self):
        """What must never happen: an endpoint that is not there, a defect of the server, a token at the blob host."""
        return [f"{entry.method} {entry.path}: {entry.problem}" for entry in self.log if entry.problem]

    def path(self, sha256):
        return self.folder / sha256

    def put(self, data, sha256=None):
        """Keep a blob; refuse bytes that do not have the sha256 that was announced."""
        actual = hashlib.sha256(data).hexdigest()
        if sha256 not in (None, actual):
            raise Refusal(400, f"the content has sha256 {actual}, and {sha256} was announced")
        self.path(actual).write_bytes(data)
        return actual

    def user(self, request):
        """The user of a token, None without a token; 401 for a token that is not known."""
        header = request.headers.get("authorization")
        if header is None:
            return None
        if header.removeprefix("Bearer ") not in self.tokens:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return self.tokens[header.removeprefix("Bearer ")]

    def signed_in(self, request):
        user = self.user(request)
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        return user

    def owner(self, request, name, what):
        """The user, who must be of that name and have a token that may write."""
        user = self.signed_in(request)
        if user.name != name or user.role != "write":
            raise Refusal(403, f"You don't have the rights to {what} under the namespace {name!r}")
        return user

    def repo(self, request, type, id, write=False):
        """The repository; a private one exists for its owner only."""
        user, repo = self.user(request), self.repos.get((type, id))
        name = id.partition("/")[0]
        if repo is None or (repo.private and (user is None or user.name != name)):
            message = "Invalid username or password." if user is None else "Repository not found"
            raise Refusal(401 if user is None else 404, message, "RepoNotFound")
        if write:
            self.owner(request, name, "write")
        return repo


class Refusal(Exception):
    """An answer with an error; `code` decides which exception a client raises."""

    def __init__(self, status, message, code=None, headers=None, **body):
        self.response = JSONResponse(
            {"error": message, **body}, status, {"X-Error-Message": message, **(headers or {})}
        )
        if code is not None:
            self.response.headers["X-Error-Code"] = code


def type_of(plural):
    """Models have no prefix in the addresses of their files."""
    return TYPES[plural or "models"]


def page_url(hub, repo):
    return f"{hub.url}/{'' if repo.type == 'model' else PLURALS[repo.type] + '/'}{repo.id}"


@endpoint("/knobs", "PUT")
async def turn_knobs(hub, request):
    """For a client that tests several settings."""
    hub.knobs = Knobs(**await request.json())
    return {}


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
        host, token = request.headers["host"], request.headers.get("authorization", "").removeprefix("Bearer ")
        if hub.blob_url.endswith(host) and token in hub.tokens:
            problem = "a token was sent to the blob host"
        query = f"?{request.url.query}" if request.url.query else ""
        sent_range = request.headers.get("range", "")
        hub.log.append(Entry(request.method, host, path + query, response.status_code, sent_range, problem))
        return response

    methods = ["GET", "HEAD", "POST", "PUT", "DELETE"]
    return Starlette(routes=[Route("/{path:path}", answer, methods=methods)])
