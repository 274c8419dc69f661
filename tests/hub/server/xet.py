"""Xet, the protocol by which hf_xet moves large files: chunks in xorbs, files as lists of chunks.

A *xorb* is a row of chunks, each compressed behind a header of 8 bytes: version, stored size (3 bytes), scheme, size
(3 bytes). A *shard* lists files, each a row of *terms*: chunks begin to end of a xorb. When a shard arrives, its files
are put together and kept by their sha256 as well, so that they can also be fetched without Xet. Numbers are
little-endian; a hash is written as four words of 64 bits.
"""

import asyncio
import re
import struct
import time
from dataclasses import dataclass

import lz4.frame
from starlette.responses import JSONResponse, Response

from .app import API, TYPES, Refusal, endpoint
from .files import PIECE, content


HASH = "(?P<hash>[0-9a-f]{64})"
HEADER_OF_SHARD, ROW = 48, 48  # bytes
END = b"\xff" * 32
WITH_SHA256, WITH_VERIFICATION = 1 << 30, 1 << 31


@dataclass
class Term:
    xorb: str
    size: int
    begin: int
    end: int


def words(raw):
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


@endpoint(f"{API}/xet-(?P<mode>read|write)-token/(?P<revision>[^/]+)")
async def token(hub, request, plural, id, mode, revision):
    hub.repo(request, TYPES[plural], id, write=mode == "write")
    if not hub.knobs.xet:
        raise Refusal(404, "Xet is not available here")
    values = {"casUrl": hub.blob_url, "accessToken": "of-xet", "exp": int(time.time()) + 3600}
    names = {"casUrl": "X-Xet-Cas-Url", "accessToken": "X-Xet-Access-Token", "exp": "X-Xet-Token-Expiration"}
    return JSONResponse(values, headers={names[key]: str(value) for key, value in values.items()})


@endpoint(f"/v1/xorbs/[^/]+/{HASH}", "POST")
async def put_xorb(hub, request, hash):
    data = await request.body()
    await asyncio.sleep(hub.knobs.slow * len(data) / PIECE)
    borders = [0]
    while borders[-1] + 8 <= len(data) and data[borders[-1]] == 0:  # version 0; a footer may follow the chunks
        stored = int.from_bytes(data[borders[-1] + 1 : borders[-1] + 4], "little")
        borders.append(borders[-1] + 8 + stored)
    hub.xorbs[hash] = (data, borders)
    return {"was_inserted": True}


def chunk(data, start, end):
    """The content of a chunk: as it is, in LZ4, or in LZ4 with the bytes of each four apart (scheme 0, 1, 2)."""
    scheme, size, body = data[start + 4], int.from_bytes(data[start + 5 : start + 8], "little"), data[start + 8 : end]
    if scheme:
        body = lz4.frame.decompress(body)
    if scheme == 2:
        plain, first = bytearray(len(body)), 0
        for i in range(4):
            count = len(plain[i::4])
            plain[i::4] = body[first : first + count]
            first += count
        body = bytes(plain)
    if len(body) != size:
        raise Refusal(400, f"a chunk has {len(body)} bytes, and its header says {size}")
    return body


@endpoint("/v1/shards", "POST")
async def put_shard(hub, request):
    data, at = await request.body(), HEADER_OF_SHARD
    while data[at : at + 32] != END:
        name, (flags, count) = words(data[at : at + 32]), struct.unpack_from("<II", data, at + 32)
        rows = [at + ROW * (i + 1) for i in range(count)]
        terms = [Term(words(data[row : row + 32]), *struct.unpack_from("<3I", data, row + 36)) for row in rows]
        at += ROW * (1 + count + (count if flags & WITH_VERIFICATION else 0))
        sha256 = None
        if flags & WITH_SHA256:
            sha256 = words(data[at : at + 32])
            at += ROW
        parts = []
        for term in terms:
            xorb, borders = hub.xorbs[term.xorb]
            parts += [chunk(xorb, borders[i], borders[i + 1]) for i in range(term.begin, term.end)]
        hub.xet_hashes[hub.put(b"".join(parts), sha256)] = name
        hub.xet_files[name] = terms
    return {"result": 1}


@endpoint(f"/v1/reconstructions/{HASH}")
async def reconstruction(hub, request, hash):
    """From which chunks to make a file, or the range of bytes that was requested."""
    terms = hub.xet_files.get(hash)
    if terms is None:
        raise Refusal(404, "There is no such file")
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "bytes=0-"))
    first, last = int(match[1]), int(match[2] or 2**63)
    rows, chunks, offset, start = [], {}, 0, 0
    if first >= sum(term.size for term in terms):
        raise Refusal(416, "Range Not Satisfiable")
    for term in terms:
        if start + term.size > first and start <= last:
            offset = first - start if not rows else offset
            span = {"start": term.begin, "end": term.end}
            rows.append({"hash": term.xorb, "unpacked_length": term.size, "range": span})
            chunks.setdefault(term.xorb, set()).update(range(term.begin, term.end))
        start += term.size
    fetch = {xorb: [of_span(hub, xorb, *span) for span in spans(numbers)] for xorb, numbers in chunks.items()}
    return {"offset_into_first_range": offset, "terms": rows, "fetch_info": fetch}


def spans(numbers):
    """(begin, end) of each run of consecutive numbers; what a client fetches must not overlap."""
    begins = sorted(n for n in numbers if n - 1 not in numbers)
    ends = sorted(n + 1 for n in numbers if n + 1 not in numbers)
    return list(zip(begins, ends))


def of_span(hub, xorb, begin, end):
    borders = hub.xorbs[xorb][1]
    address = {"start": borders[begin], "end": borders[end] - 1}
    return {"range": {"start": begin, "end": end}, "url": f"{hub.blob_url}/xorb/{xorb}", "url_range": address}


@endpoint(f"/xorb/{HASH}")
async def get_xorb(hub, request, hash):
    return content(request, hub.xorbs[hash][0], {}, hub.knobs.slow)


@endpoint(f"/v1/xorbs/[^/]+/{HASH}", "HEAD")
async def has_xorb(hub, request, hash):
    return Response(status_code=200 if hash in hub.xorbs else 404)
