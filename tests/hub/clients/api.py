"""Every endpoint of the Hub that the clients of this package use, by huggingface_hub as it is."""

import os
from pathlib import Path

import checks
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    HfFileSystem,
    ModelCard,
    get_hf_file_metadata,
    get_session,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get


REPO = f"alice/api-{os.environ['RUN']}"
XET = os.environ.get("HF_HUB_DISABLE_XET") != "1"
api, bob, nobody = HfApi(), HfApi(token="hf_of_" + "bob"), HfApi(token=False)
WEIGHTS = os.urandom(300_000) + bytes(200_000)


def download(*arguments, **options):
    return Path(hf_hub_download(*arguments, **options)).read_bytes()


def turn(**knobs):
    assert get_session().put(f"{api.endpoint}/knobs", json=knobs).status_code == 200


def refused(error, function, *arguments, says="", **options):
    try:
        function(*arguments, **options)
    except error as raised:
        assert says in str(raised), raised
        assert "hf_of_" not in str(raised), raised
        return raised
    raise AssertionError(f"no {error}")


def add(path, content=WEIGHTS):
    return CommitOperationAdd(path, content)


def check_users():
    assert api.whoami()["name"] == "alice" and bob.whoami()["name"] == "bob"
    refused(HfHubHTTPError, HfApi(token="hf_of_" + "nobody").whoami, says="Invalid")
    refused(HfHubHTTPError, HfApi(token="hf_alice_reads").create_repo, "alice/no")
    refused(HfHubHTTPError, api.create_repo, "bob/no", says="403")


def check_repositories_of_all_types():
    for type in ("model", "dataset", "space", "kernel"):
        options = {"repo_type": type} | ({"space_sdk": "gradio"} if type == "space" else {})
        url = api.create_repo(REPO, **options)
        assert url.repo_id == REPO and url.repo_type == type
        assert api.create_repo(REPO, exist_ok=True, **options) == url
        refused(HfHubHTTPError, api.create_repo, REPO, says="409", **options)
        api.create_commit(REPO, [add("a/w.bin")], commit_message="weights", repo_type=type)
        assert api.repo_info(REPO, repo_type=type).id == REPO
        assert "a/w.bin" in api.list_repo_files(REPO, repo_type=type)
        assert download(REPO, "a/w.bin", repo_type=type) == WEIGHTS


def check_visibility():
    name = f"{REPO}-private"
    api.create_repo(name, private=True)
    api.auth_check(name)
    for client in (bob, nobody):
        refused(RepositoryNotFoundError, client.repo_info, name)
        refused(RepositoryNotFoundError, client.auth_check, name)
    refused(HfHubHTTPError, bob.create_commit, REPO, [add("x")], commit_message="x", says="403")


def check_cards():
    ModelCard("---\nlicense: mit\n---\n# Name").validate()
    upload = {"path_in_repo": "README.md", "repo_id": REPO}
    api.upload_file(path_or_fileobj=b"---\ntags: [fox]\nlicense: mit\n---\n", **upload)
    info = api.repo_info(REPO)
    assert info.tags == ["fox"] and info.card_data.license == "mit"
    index, space = b"---\nmodel-index:\n- name: x\n---\n", b"---\nsdk: none\n---\n"
    refused(ValueError, api.upload_file, path_or_fileobj=index, says="model-index", **upload)
    refused(ValueError, api.upload_file, path_or_fileobj=space, repo_type="space", says='"sdk" must be', **upload)


def check_commits():
    first = api.create_commit(REPO, [add("config.json", b"{}"), add("w.bin", WEIGHTS[::-1])], commit_message="one")
    again = api.create_commit(REPO, [add("config.json", b"{}"), add("w.bin", WEIGHTS[::-1])], commit_message="two")
    assert again.oid == first.oid, "unchanged files make no commit"
    api.create_commit(REPO, [add("d/x.txt", b"x"), add("d/y.txt", b"y")], commit_message="three")
    deletions = [CommitOperationDelete("config.json"), CommitOperationDelete("d/")]
    last = api.create_commit(REPO, deletions, commit_message="four", parent_commit=api.repo_info(REPO).sha)
    assert not {"config.json", "d/x.txt"} & set(api.list_repo_files(REPO))
    stale = {"commit_message": "five", "parent_commit": first.oid}
    refused(HfHubHTTPError, api.create_commit, REPO, [add("z", b"z")], says="412", **stale)
    titles = [commit.title for commit in api.list_repo_commits(REPO)]
    assert titles[:3] == ["four", "three", "one"] and titles[-1] == "initial commit"
    assert "config.json" in api.list_repo_files(REPO, revision=first.oid) and last.oid == api.repo_info(REPO).sha


def check_uploads_of_known_files():
    api.create_commit(REPO, [add("parts.bin", WEIGHTS + b"parts")], commit_message="parts")
    api.create_commit(REPO, [add("renamed.bin", WEIGHTS + b"parts")], commit_message="known")
    for name in ("parts.bin", "renamed.bin"):
        assert download(REPO, name) == WEIGHTS + b"parts"
    row = api.get_paths_info(REPO, "parts.bin", expand=True)[0]
    assert row.lfs.size == row.size == 500_005 and (row.xet_hash is not None) == XET


def check_a_file_of_many_chunks():
    content = (b"the same again, " * 5_000 + WEIGHTS) * 20
    api.create_commit(REPO, [add("large.bin", content)], commit_message="large")
    assert download(REPO, "large.bin") == content


def check_branches_and_tags():
    head = api.repo_info(REPO).sha
    api.create_branch(REPO, branch="dev/one")
    api.create_branch(REPO, branch="dev/one", exist_ok=True)
    api.create_tag(REPO, tag="v1.0", revision="dev/one", tag_message="first")
    refused(HfHubHTTPError, api.create_tag, REPO, tag="v1.0")
    api.create_commit(REPO, [add("dev.txt", b"dev")], commit_message="dev", revision="dev/one")
    refs = api.list_repo_refs(REPO)
    assert {ref.name for ref in refs.branches} == {"main", "dev/one"}
    assert {ref.name: ref.target_commit for ref in refs.tags} == {"v1.0": head}
    assert api.file_exists(REPO, "dev.txt", revision="dev/one") and not api.file_exists(REPO, "dev.txt")
    assert api.revision_exists(REPO, "v1.0") and not api.revision_exists(REPO, "v2.0")
    refused(RevisionNotFoundError, hf_hub_download, REPO, "w.bin", revision="v2.0")
    refused(HfHubHTTPError, api.create_commit, REPO, [add("t", b"t")], commit_message="t", revision="v1.0")
    api.delete_branch(REPO, branch="dev/one")
    api.delete_tag(REPO, tag="v1.0")
    assert not api.list_repo_refs(REPO).tags


def check_listings_in_pages():
    paths = [f"p/{i % 3}/{i}.txt" for i in range(9)]
    api.create_commit(REPO, [add(path, path.encode()) for path in paths], commit_message="pages")
    turn(page=2)
    rows = list(api.list_repo_tree(REPO, "p", recursive=True))
    assert sorted(row.path for row in rows) == sorted([*paths, "p/0", "p/1", "p/2"])
    assert [row.path for row in api.list_repo_tree(REPO, "p")] == ["p/0", "p/1", "p/2"]
    assert sorted(os.listdir(os.path.join(snapshot_download(REPO, allow_patterns="p/*"), "p"))) == ["0", "1", "2"]
    turn(page=1000)
    refused(EntryNotFoundError, list, api.list_repo_tree(REPO, "nowhere"))
    assert [row.path for row in api.get_paths_info(REPO, ["p/0", "p/1/1.txt", "no"])] == ["p/0", "p/1/1.txt"]
    assert next(api.list_repo_tree(REPO, "p/0", expand=True)).last_commit.title == "pages"


def check_downloads():
    url = hf_hub_url(REPO, "w.bin")
    metadata = get_hf_file_metadata(url)
    assert metadata.size == 500_000 and metadata.commit_hash == api.repo_info(REPO).sha
    assert (metadata.xet_file_data is not None) == XET
    assert get_hf_file_metadata(hf_hub_url(REPO, "README.md")).etag
    refused(EntryNotFoundError, hf_hub_download, REPO, "no.bin")
    refused(RepositoryNotFoundError, hf_hub_download, "alice/nothing", "w.bin")
    answer = get_session().get(url, headers={"Range": "bytes=10-19"}, follow_redirects=True)
    assert answer.status_code == 206 and answer.content == WEIGHTS[::-1][10:20]
    answer = get_session().get(url, headers={"Range": "bytes=-5"}, follow_redirects=True)
    assert answer.content == WEIGHTS[::-1][-5:]
    answer = get_session().get(url, headers={"Range": "bytes=900000-"}, follow_redirects=True)
    assert answer.status_code == 416
    with HfFileSystem().open(f"{REPO}/w.bin") as file:
        file.seek(100_000)
        assert file.read(10) == WEIGHTS[::-1][100_000:100_010]
    turn(xet=False)
    assert download(REPO, "w.bin", force_download=True) == WEIGHTS[::-1]
    turn(xet=True)


def check_a_download_that_is_cut_goes_on():
    """huggingface_hub resumes within a process, at whole chunks of 10 MiB."""
    url = hf_hub_url(REPO, "large.bin")
    content = download(REPO, "large.bin")
    turn(cut=11_000_000)
    with open("cut.bin", "wb") as file:
        http_get(url, file)
    assert Path("cut.bin").read_bytes() == content
    turn()


def check_a_server_without_xet():
    turn(xet=False)
    if XET:
        refused(Exception, api.create_commit, REPO, [add("n.bin", os.urandom(999))], commit_message="n")
    else:
        api.create_commit(REPO, [add("n.bin", os.urandom(999))], commit_message="n")
    turn()


if __name__ == "__main__":
    checks.run(dict(globals()))
