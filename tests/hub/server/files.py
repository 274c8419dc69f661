"""Files: what an upload announces, LFS, commits, and downloads with redirects and ranges."""

import asyncio
import base64
import fnmatch
import json
import re
from urllib.parse import quote, unquote

from starlette.responses import RedirectResponse, Response

from .app import API, ID, PLURALS, PUBLIC, TYPES, Refusal, endpoint, page_url, type_of
from .repos import File


PIECE = 2**16  # bytes per step of a slow upload
SHA256 = "(?P<sha256>[0-9a-f]{64})"


# -- uploads


@endpoint(f"{API}/preupload/(?P<revision>[^/]+)", "POST")
async def preupload(hub, request, plural, id, revision):
    body = await request.json()
    repo = hub.repo(request, TYPES[plural], id, write=True)
    files, ignored = repo.at(revision).files, body.get("gitIgnore", "").split()
    rules = hub.path(files[".gitattributes"].sha256).read_text() if ".gitattributes" in files else ""
    patterns = [line.split()[0] for line in rules.splitlines() if "filter=lfs" in line]
    rows = []
    for file in body["files"]:
        path, sample = file["path"], base64.b64decode(file["sample"])
        name = path.rpartition("/")[2]
        large = file["size"] > 10 * 2**20 or b"\0" in sample or any(fnmatch.fnmatch(name, p) for p in patterns)
        row = {"path": path, "uploadMode": "lfs" if large else "regular"}
        row["shouldIgnore"] = any(fnmatch.fnmatch(path, pattern) for pattern in ignored)
        rows.append(row | ({"oid": files[path].content_oid} if path in files else {}))
    return {"files": rows}


@endpoint(rf"{PUBLIC}\.git/info/lfs/objects/batch", "POST")
async def lfs_batch(hub, request, plural, id):
    body = await request.json()
    hub.repo(request, type_of(plural), id, write=True)
    objects = []
    for lfs in body["objects"]:
        oid, size = lfs["oid"], lfs["size"]
        row = {"oid": oid, "size": size}
        if not hub.path(oid).exists():
            upload = {"href": f"{hub.blob_url}/upload/{oid}"}
            row["actions"] = {"upload": upload, "verify": {"href": f"{hub.url}/verify"}}
        objects.append(row)
    return {"transfer": "basic", "objects": objects}


@endpoint(rf"/upload/{SHA256}", "PUT")
async def upload(hub, request, sha256):
    data = bytearray()
    async for piece in request.stream():
        data += piece
        await asyncio.sleep(hub.knobs.slow * len(piece) / PIECE)
    hub.put(bytes(data), sha256)
    return Response()


@endpoint("/verify", "POST")
async def verify(hub, request):
    body = await request.json()
    if not hub.path(body["oid"]).exists():
        raise Refusal(404, "Object not found")
    return {}


@endpoint(f"{API}/commit/(?P<revision>[^/]+)", "POST")
async def commit(hub, request, plural, id, revision):
    lines = [json.loads(line) for line in (await request.body()).splitlines()]
    repo, author = hub.repo(request, TYPES[plural], id, write=True), hub.signed_in(request).name
    ref, header = unquote(revision).removeprefix("refs/heads/"), lines[0]["value"]
    head = repo.at(quote(ref, safe=""))
    if ref in repo.tags or ref == head.sha:
        raise Refusal(400, f"{ref} is no branch")
    if header.get("parentCommit") not in (None, head.sha):
        raise Refusal(412, "A commit has happened since. Please refresh and try again.")
    files, number = dict(head.files), None
    for line in lines[1:]:
        change(hub, files, line["key"], line["value"])
    if request.query_params.get("create_pr") == "1":
        number = len(repo.pull_requests) + 1
        ref = f"refs/pr/{number}"
        repo.pull_requests[ref] = head.sha
    sha = repo.commit(ref, files, header["summary"], header.get("description", ""), author)
    answer = {"success": True, "commitOid": sha, "commitUrl": f"{page_url(hub, repo)}/commit/{sha}", "hookOutput": ""}
    if number is not None:
        answer["pullRequestUrl"] = f"{page_url(hub, repo)}/discussions/{number}"
    return answer


def change(hub, files, key, value):
    """Apply a line of a commit to {path: File}."""
    path = value["path"]
    if path.startswith("/") or {"..", ".git"} & set(path.split("/")):
        raise Refusal(400, f"Invalid path in repo: {path}")
    if key == "file":
        data = base64.b64decode(value["content"])
        files[path] = File.of(data, hub.put(data))
    elif key == "lfsFile":
        blob = hub.path(value["oid"])
        if not blob.exists():
            raise Refusal(422, f"LFS pointer pointed to a file that does not exist: {path}")
        files[path] = File.pointer(value["oid"], blob.stat().st_size)
    elif key == "deletedFile":
        if files.pop(path, None) is None:
            raise Refusal(404, f"{path} does not exist", "EntryNotFound")
    else:
        raise Refusal(400, f"{key} is no change that this Hub knows")


# -- downloads


@endpoint(f"{PUBLIC}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "GET", "HEAD")
async def resolve(hub, request, plural, id, revision, path):
    """A file of a commit: small ones at another path of this host, LFS at the blob host."""
    repo = hub.repo(request, type_of(plural), id)
    commit = repo.at(revision)
    headers, file = {"X-Repo-Commit": commit.sha}, commit.files.get(unquote(path))
    if file is None:
        raise Refusal(404, "Entry not found", "EntryNotFound", headers)  # with its commit, for the client's cache
    if not file.lfs:
        address = f"/api/resolve-cache/{PLURALS[repo.type]}/{id}/{commit.sha}/{path}"
        return RedirectResponse(address, 307, headers | {"ETag": f'"{file.oid}"'})
    headers |= {"X-Linked-Size": str(file.size), "X-Linked-ETag": f'"{file.sha256}"'}
    return RedirectResponse(f"{hub.blob_url}/blob/{file.sha256}", 302, headers)


@endpoint(rf"/api/resolve-cache/(?P<plural>\w+)/{ID}/(?P<revision>[0-9a-f]{{40}})/(?P<path>.+)", "GET", "HEAD")
async def resolve_cache(hub, request, plural, id, revision, path):
    file = hub.repo(request, TYPES[plural], id).at(revision).files[unquote(path)]
    headers = {"X-Repo-Commit": revision, "ETag": f'"{file.oid}"'}
    return content(request, hub.path(file.sha256).read_bytes(), headers)


@endpoint(f"/blob/{SHA256}", "GET", "HEAD")
async def blob(hub, request, sha256):
    return content(request, hub.path(sha256).read_bytes(), {"ETag": f'"{sha256}"'})


def content(request, data, headers):
    """Bytes, or the range of them that was requested."""
    status, total = 200, len(data)
    if match := re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", "")):
        first = int(match[1]) if match[1] else total - int(match[2])
        last = min(int(match[2]), total - 1) if match[1] and match[2] else total - 1
        if first >= total:
            raise Refusal(416, "Range Not Satisfiable", headers={"Content-Range": f"bytes */{total}"})
        data, status = data[first : last + 1], 206
        headers["Content-Range"] = f"bytes {first}-{last}/{total}"
    headers |= {"Accept-Ranges": "bytes", "Content-Length": str(len(data))}
    return Response(None if request.method == "HEAD" else data, status, headers, "application/octet-stream")
