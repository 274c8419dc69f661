"""The local Hub answers the Hub's own client as the Hub does, and notices what must never happen."""

import urllib.error
import urllib.request

import pytest


@pytest.mark.parametrize("variables", [{}, {"HF_HUB_DISABLE_XET": "1"}], ids=["Xet", "LFS"])
def test_the_client_of_the_hub_works(run_client, hub, variables):
    run_client("api.py", RUN="lfs" if variables else "xet", **variables)
    paths = [entry.path for entry in hub.log]
    assert any("/v1/shards" in path for path in paths) == (not variables)
    assert any("/lfs/objects/batch" in path for path in paths) == bool(variables)
    assert ("bytes=10485760-", 206) in [(entry.range, entry.status) for entry in hub.log], "a cut download goes on"


@pytest.mark.parametrize(
    "path, at_blob_host, says",
    [
        ("/api/unheard-of", False, "an unknown endpoint"),
        ("/blob/" + 64 * "0", False, "FileNotFoundError"),
        ("/v1/chunks/default/" + 64 * "0", True, "a token was sent to the blob host"),
    ],
    ids=["unknown endpoint", "defect", "token"],
)
def test_what_must_never_happen_is_noticed(server, path, at_blob_host, says):
    request = urllib.request.Request((server.blob_url if at_blob_host else server.url) + path)
    request.add_header("Authorization", "Bearer hf_of_alice")
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(request)
    assert says in server.problems()[-1]
    server.log.clear()
