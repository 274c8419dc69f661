"""The push of a bundle to the Hub, in one commit."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_token,
    hf_hub_download,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from .. import __version__
from ..hmt.reading import STATE
from .bundle import CONTENTS, Bundle, with_contents
from .lint import check


HUB_TIMEOUT_S = 10.0
CODE = re.compile(r"\w+_(fox|hmt)\.py")
# Files that are removed from the repository of a model where the bundle lacks them; by a push of code only, the code.
REPLACED = re.compile(rf"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|adapter_model\.\w+|{CODE.pattern}")
# A file that only such a repository holds; of two, transformers would load one, or the card would be of the other.
KINDS = {"an adapter": "adapter_config.json", "a model": "config.json", "the memory of a text": STATE}
# Of branches and tags; what looks like a commit, or like the Hub's own references, would be taken for it.
REFERENCE = re.compile(r"(?!refs/|HEAD$|[0-9a-f]{40}$)[A-Za-z0-9_]+((-+|[./])[A-Za-z0-9_]+)*")


@contextmanager
def named_errors(left: str = "") -> Iterator[None]:
    """Turn errors on the way to the Hub into built-in ones that say what to do.

    Args:
        left: what the Hub keeps if this step fails, in a sentence; the message ends with it.

    Raises:
        PermissionError: the token is not known, or may not do this.
        ConnectionError: the Hub cannot be reached, HF_HUB_OFFLINE is set, or something else answers in its place.
        HfHubHTTPError: the Hub refuses.
    """
    left = f" {left}" if left else ""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ConnectionError(f"HF_HUB_OFFLINE is set, and this needs the Hub; unset it.{left}") from error
    except UnicodeEncodeError as error:
        raise PermissionError(f"The token has characters that no token has; see `hf auth whoami`.{left}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise PermissionError(
                f"The token is unknown or may not do this; see `hf auth whoami`. {error}{left}"
            ) from error
        error.append_to_message(" The branch has changed meanwhile; push again." * (status == 412) + left)
        raise
    except HTTPError as error:  # of the connection
        raise ConnectionError(f"{constants.ENDPOINT} cannot be reached ({error}).{left}") from error
    except (json.JSONDecodeError, KeyError) as error:  # of huggingface_hub, which reads the answer
        raise ConnectionError(f"{constants.ENDPOINT} does not answer as the Hub does ({error!r}).{left}") from error


def check_destination(repo: str, revision: str | None = None, tag: str | None = None, create_pr: bool = False) -> None:
    """Raise ValueError for names and combinations that the Hub would refuse, or confuse."""
    try:
        validate_repo_id(repo if repo.count("/") == 1 else "")
    except ValueError as error:
        raise ValueError(
            f"{repo!r} is not the name of a repository; give NAMESPACE/NAME, such as alice/fox: letters, digits, -, _ and ., at "
            "most 96 of them."
        ) from error
    for name in (revision, tag):
        if name is not None and not REFERENCE.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a name of a branch or tag; take letters, digits, and . - _ / between them, and not what looks "
                "like a commit."
            )
    if tag is not None and tag in (revision, "main"):
        raise ValueError(f"the tag {tag} would have the name of a branch, which moves; give another name, such as v1.")
    if tag is not None and create_pr:
        raise ValueError(f"a pull request cannot be tagged; leave the tag {tag} out, and tag it when it is merged.")


@named_errors()
def removed_files(bundle: Bundle, repo: str, *, repo_type: str = "model", revision: str | None = None) -> list[str]:
    """List the files of a repository that a push of the bundle removes.

    These are weights that the bundle lacks, because transformers prefers an old `model.safetensors` to new shards,
    and code of older versions of this package.

    Raises:
        ValueError: it holds another kind of thing, such as a model, which an adapter would hide. Others:
            `named_errors`.
    """
    try:
        # list_repo_files would retry for 20 seconds without a network
        info: Any = HfApi().repo_info(repo, repo_type=repo_type, revision=revision, timeout=HUB_TIMEOUT_S)
        present = {file.rfilename for file in info.siblings or ()}
    except RevisionNotFoundError:  # a new branch begins with the files of main
        return removed_files(bundle, repo, repo_type=repo_type)
    except RepositoryNotFoundError:
        return []
    for kind, file in KINDS.items() if repo_type == "model" else ():
        if file in present and file not in bundle.files:
            own = next(kind for kind, file in KINDS.items() if file in bundle.files)
            raise ValueError(
                f"{repo} holds {kind}; beside each other, one would hide the other. Push {own} to another name."
            )
    old = present - bundle.files.keys() if repo_type == "model" else set()
    return sorted(path for path in old if (CODE if bundle.code_only else REPLACED).fullmatch(path))


def push(
    bundle: Bundle,
    repo: str,
    *,
    repo_type: str = "model",
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    tag: str | None = None,
) -> CommitInfo:
    """Push a bundle in one commit; where nothing has changed, no commit is made.

    The repository and the branch are created if they do not exist. `removed_files` are removed in the same commit.

    The token is that of `hf auth login` or of the environment variable HF_TOKEN.

    Args:
        repo: NAMESPACE/NAME.
        repo_type: "model", or "space" for a Space of gradio.
        private: create a private repository.
        revision: a branch. Default: main.
        create_pr: open a pull request instead of changing the branch.
        tag: a name for the commit, which no tag or branch has yet.

    Raises:
        ValueError: the bundle must not be pushed (`lint.check`), a token is missing, a name does not hold
            (`check_destination`), the repository is public although `private`, a tag or branch has the name already,
            or the files do not fit (`removed_files`).
        HfHubHTTPError: the Hub refuses; among other reasons, because the branch has changed meanwhile. Others:
            `named_errors`.
    """
    check(bundle)
    check_destination(repo, revision, tag, create_pr)
    if get_token() is None:
        raise ValueError("There is no token for the Hub. Run `hf auth login`, or set HF_TOKEN.")
    api = HfApi(library_name="hf_longctx", library_version=__version__)
    with named_errors():
        is_new = not api.repo_exists(repo, repo_type=repo_type)
        if is_new:
            sdk = "gradio" if repo_type == "space" else None
            api.create_repo(repo, repo_type=repo_type, space_sdk=sdk, private=private or None)
    with named_errors(f"{repo} was created, and stays without these files." if is_new else ""):
        if private and not api.repo_info(repo, repo_type=repo_type).private:
            raise ValueError(f"{repo} is public; make it private in its settings, or push to another name.")
        if revision is not None or tag is not None:
            refs = api.list_repo_refs(repo, repo_type=repo_type)
            tags, branches = ({ref.name for ref in names} for names in (refs.tags, refs.branches))
            if tag in tags | branches:
                raise ValueError(f"{repo} has a tag or branch {tag}, on which others rely; give another name.")
            if revision in tags:
                raise ValueError(f"{repo} has a tag {revision}, which a branch would hide; give another name.")
        if revision is not None:
            api.create_branch(repo, repo_type=repo_type, branch=revision, exist_ok=True)
        head = api.repo_info(repo, repo_type=repo_type, revision=revision)
        old = removed_files(bundle, repo, repo_type=repo_type, revision=head.sha)
        operations: list[CommitOperationDelete | CommitOperationAdd] = [CommitOperationDelete(path) for path in old]
        operations += [CommitOperationAdd(path, content) for path, content in bundle.files.items()]
        commit = api.create_commit(
            repo,
            operations,
            repo_type=repo_type,
            commit_message=f"Push with hf-longctx {__version__}",
            revision=revision,
            parent_commit=head.sha,
            create_pr=create_pr,
        )
    if tag is not None:
        with named_errors(f"{repo} has the files, in commit {commit.oid}; only the tag is missing."):
            api.create_tag(repo, repo_type=repo_type, tag=tag, revision=commit.oid)
    return commit


@named_errors()
def code_only(bundle: Bundle, repo: str, revision: str | None = None) -> Bundle:
    """Return the code of a bundle, with the configuration and the hashes that a repository has, brought up to date.

    Raises:
        ValueError: the bundle has no code, or the repository holds another type of model. Others: `named_errors`.
    """
    code = {path: content for path, content in bundle.files.items() if path.endswith(".py")}
    if not code:
        raise ValueError("the folder needs no code of this package; push it without --code-only.")
    text = Path(hf_hub_download(repo, "config.json", revision=revision)).read_text()
    config, auto_map = json.loads(text), json.loads(bundle.text("config.json"))["auto_map"]
    if config.get("model_type") != bundle.config["model_type"]:
        raise ValueError(
            f"{repo} holds a model of type {config.get('model_type')!r}, and the folder one of type "
            f"{bundle.config['model_type']!r}. Give the folder of the model that was pushed there."
        )
    if config.get("auto_map") != auto_map:
        text = json.dumps(config | {"auto_map": auto_map}, indent=2, sort_keys=True) + "\n"
    hashes = {}
    if HfApi().file_exists(repo, CONTENTS, revision=revision):
        hashes = json.loads(Path(hf_hub_download(repo, CONTENTS, revision=revision)).read_text())["sha256"]
    kept = {path: digest for path, digest in hashes.items() if not CODE.fullmatch(path)}
    contents = {CONTENTS: json.dumps({"sha256": kept}).encode()}
    return with_contents(replace(bundle, files=contents, code_only=True), {**code, "config.json": text.encode()})


@named_errors()
def pin_base(bundle: Bundle) -> Bundle:
    """Return the bundle with the commit that the base of an adapter, or the backbone of an HMT, has on the Hub now.

    Raises:
        ValueError: the Hub has no such repository or revision.
        PermissionError: it is gated, and the token may not read it. Others: `named_errors`.
    """
    if bundle.base is None:
        return bundle
    name, revision = bundle.base
    try:
        base = HfApi().model_info(name, revision=revision)
    except GatedRepoError as error:
        raise PermissionError(f"the base {name} is gated; ask for access on its page, with this token.") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ValueError(f"the base {name} (revision {revision}) is not on the Hub; push it first.") from error
    path, field = ("adapter_config.json", "revision") if bundle.is_adapter else ("config.json", "backbone_revision")
    config = json.loads(bundle.text(path)) | {field: base.sha}
    has_code = bundle.is_adapter and any(file.rfilename.endswith(".py") for file in base.siblings or ())
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    return with_contents(replace(bundle, config=config, base_has_code=has_code), {path: text.encode()})
