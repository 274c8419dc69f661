"""Push a bundle to the Hub in a single commit."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_token,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from .. import __version__
from .bundle import Bundle, with_contents
from .lint import check


HUB_TIMEOUT_S = 10.0
# A push removes these files from a model's repository if the bundle does not contain them.
REPLACED = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|adapter_model\.\w+|\w+_(fox|hmt)\.py")
# Valid names of branches and tags, except names that look like a commit hash or an internal reference.
REFERENCE = re.compile(r"(?!refs/|HEAD$|[0-9a-f]{40}$)[A-Za-z0-9_]+((-+|[./])[A-Za-z0-9_]+)*")


@contextmanager
def named_errors(left: str = "") -> Iterator[None]:
    """Convert authorization and connection errors of the Hub into built-in exceptions.

    Args:
        left: sentence about the state in which the repository was left. It is appended to the error message.

    Raises:
        PermissionError: the token is invalid or lacks permission.
        ConnectionError: the Hub cannot be reached.
        HfHubHTTPError: the Hub rejects the request.
    """
    left = f" {left}" if left else ""
    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise PermissionError(
                f"Your token is invalid or lacks permission. Check it with `hf auth whoami`. {error}{left}"
            ) from error
        error.append_to_message(left)
        raise
    except HTTPError as error:  # connection errors
        raise ConnectionError(f"{constants.ENDPOINT} cannot be reached ({error}).{left}") from error


def check_destination(repo: str, revision: str | None = None, tag: str | None = None, create_pr: bool = False) -> None:
    """Raise ValueError for a repository, branch or tag name that the Hub would reject or misinterpret."""
    try:
        validate_repo_id(repo if repo.count("/") == 1 else "")
    except ValueError as error:
        raise ValueError(
            f"{repo!r} is not the name of a repository. Give NAMESPACE/NAME, such as alice/fox, with at most 96 "
            "letters, digits, hyphens, underscores and dots."
        ) from error
    for name in (revision, tag):
        if name is not None and not REFERENCE.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a valid name of a branch or tag. Use letters and digits, separated by "
                '".", "-", "_" or "/". Do not use a commit hash.'
            )
    if tag is not None and tag in (revision, "main"):
        raise ValueError(f"the tag {tag} would have the same name as a branch. Give another name, such as v1.")
    if tag is not None and create_pr:
        raise ValueError(f"A pull request cannot be tagged. Omit the tag {tag}, and create it after the merge.")


@named_errors()
def removed_files(bundle: Bundle, repo: str, *, repo_type: str = "model", revision: str | None = None) -> list[str]:
    """List the files that a push of the bundle removes from the repository.

    A push removes old weights, because transformers prefers an old `model.safetensors` to new shards. It also removes
    files of older versions of this package.

    Raises:
        ValueError: the repository contains a model and the bundle contains an adapter, or vice versa. `named_errors`
            lists further exceptions.
    """
    try:
        # Without a network, list_repo_files would retry for 20 seconds.
        info: Any = HfApi().repo_info(repo, repo_type=repo_type, revision=revision, timeout=HUB_TIMEOUT_S)
        present = {file.rfilename for file in info.siblings or ()}
    except RevisionNotFoundError:  # a new branch starts from main
        return removed_files(bundle, repo, repo_type=repo_type)
    except RepositoryNotFoundError:
        return []
    if repo_type != "model":
        return []
    kinds = {"a model": "config.json", "an adapter": "adapter_config.json"}
    for kind, file in kinds.items():
        if file in present and file not in bundle.files:
            raise ValueError(
                f"{repo} contains {kind}. A repository cannot contain both a model and an adapter. Push to another "
                "name."
            )
    return sorted(path for path in present - bundle.files.keys() if REPLACED.fullmatch(path))


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
    """Push a bundle in one commit, if anything has changed.

    The repository and the branch are created if they do not exist. The same commit deletes the files that
    `removed_files` lists. The token comes from `hf auth login` or from the environment variable HF_TOKEN.

    Args:
        repo: name of the repository, NAMESPACE/NAME.
        repo_type: "model", or "space" for a Gradio Space.
        private: whether to create a private repository.
        revision: branch (default: main).
        create_pr: whether to open a pull request instead of changing the branch.
        tag: name of a new tag for the commit.

    Raises:
        ValueError: `lint.check`, `check_destination` or `removed_files` rejects the push; the token is missing; the
            repository is public although `private` is set; the tag already exists; or the branch has the name of a
            tag.
        HfHubHTTPError: the Hub rejects the request, for example because of a concurrent commit. `named_errors` lists
            further exceptions.
    """
    check(bundle)
    check_destination(repo, revision, tag, create_pr)
    if get_token() is None:
        raise ValueError("No Hub token was found. Run `hf auth login`, or set HF_TOKEN.")
    api = HfApi(library_name="hf_longctx", library_version=__version__)
    with named_errors():
        is_new = not api.repo_exists(repo, repo_type=repo_type)
        if is_new:
            sdk = "gradio" if repo_type == "space" else None
            api.create_repo(repo, repo_type=repo_type, space_sdk=sdk, private=private or None)
    with named_errors(f"{repo} was created, but the files were not pushed." if is_new else ""):
        if private and not api.repo_info(repo, repo_type=repo_type).private:
            raise ValueError(f"{repo} is public. Make it private in its settings, or push to another name.")
        if revision is not None or tag is not None:
            refs = api.list_repo_refs(repo, repo_type=repo_type)
            tags, branches = ({ref.name for ref in names} for names in (refs.tags, refs.branches))
            if tag in tags | branches:
                raise ValueError(f"{repo} already has a tag or branch {tag}. Give another name.")
            if revision in tags:
                raise ValueError(
                    f"{repo} has a tag {revision}. A branch of this name would hide the tag. Give another name."
                )
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
        with named_errors(f"The files were pushed to {repo} in commit {commit.oid}, but the tag was not created."):
            api.create_tag(repo, repo_type=repo_type, tag=tag, revision=commit.oid)
    return commit


@named_errors()
def pin_base(bundle: Bundle) -> Bundle:
    """Pin the base model of an adapter, or the backbone of an HMT, to its current commit on the Hub.

    Raises:
        ValueError: the repository or revision does not exist on the Hub.
        PermissionError: the repository is gated, and the token does not have access. `named_errors` lists further
            exceptions.
    """
    if bundle.base is None:
        return bundle
    name, revision = bundle.base
    try:
        base = HfApi().model_info(name, revision=revision)
    except GatedRepoError:  # also a RepositoryNotFoundError
        raise
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ValueError(f"the base model {name} (revision {revision}) is not on the Hub. Push it first.") from error
    path, field = ("adapter_config.json", "revision") if bundle.is_adapter else ("config.json", "backbone_revision")
    config = json.loads(bundle.text(path)) | {field: base.sha}
    has_code = bundle.is_adapter and any(file.rfilename.endswith(".py") for file in base.siblings or ())
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    return with_contents(replace(bundle, config=config, base_has_code=has_code), {path: text.encode()})
