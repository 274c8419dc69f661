"""The push of a bundle to the Hub, in one commit."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .. import __version__
from .bundle import Bundle, with_contents
from .lint import check


# Files that are removed from a repository where the bundle lacks them, by the type of the repository. An adapter that
# stays beside a model would be loaded in its place.
REPLACED = {
    "model": re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|adapter_(config\.json|model\.\w+)"),
    "kernel": re.compile(r"(build|torch-ext)/.*"),
}


@contextmanager
def named_errors():
    """Turn errors on the way to the Hub into built-in ones that say what to do.

    Raises:
        ValueError: HF_HUB_OFFLINE is set.
        PermissionError: the token is not known, or may not do this.
        ConnectionError: the Hub cannot be reached.
    """
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ValueError("HF_HUB_OFFLINE is set, and a push needs the Hub; unset it.") from error
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise PermissionError(f"The token is unknown or may not do this; see `hf auth whoami`. {error}") from error
        raise
    except HTTPError as error:  # of the connection
        raise ConnectionError(f"{constants.ENDPOINT} cannot be reached ({error}).") from error


@named_errors()
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

    The repository and the branch are created if they do not exist. Old weights that the bundle lacks are removed from
    the repository, because transformers prefers an old `model.safetensors` to new shards, and an old adapter on its
    own base to both. Old files of a kernel are removed, too.

    The token is that of `hf auth login` or of the environment variable HF_TOKEN.

    Args:
        repo: NAMESPACE/NAME.
        repo_type: "model", "kernel", or "space" for a Space of gradio.
        private: create a private repository.
        revision: a branch. Default: main.
        create_pr: open a pull request instead of changing the branch.
        tag: a name for the commit, which the repository must not have yet.

    Raises:
        ValueError: the bundle must not be pushed (`lint.check`), a token is missing, `repo` is not a name, the
            repository is public although `private`, it holds a model that an adapter would hide, or it has the tag.
        HfHubHTTPError: the Hub refuses; among other reasons, because the branch has changed meanwhile. Others:
            `named_errors`.
    """
    check(bundle)
    if tag is not None and create_pr:
        raise ValueError(f"a pull request cannot be tagged; leave tag={tag!r} out, and tag it when it is merged.")
    if get_token() is None:
        raise ValueError("There is no token for the Hub. Run `hf auth login`, or set HF_TOKEN.")
    api = HfApi(library_name="hf_longctx", library_version=__version__)
    sdk = "gradio" if repo_type == "space" else None
    api.create_repo(repo, repo_type=repo_type, space_sdk=sdk, private=private or None, exist_ok=True)
    if private and not api.repo_info(repo, repo_type=repo_type).private:
        raise ValueError(f"{repo} is public; make it private in its settings, or push to another name.")
    if tag is not None and tag in {ref.name for ref in api.list_repo_refs(repo, repo_type=repo_type).tags}:
        raise ValueError(f"{repo} has a tag {tag} already, and those who pinned it rely on it; give another name.")
    if revision is not None:
        api.create_branch(repo, repo_type=repo_type, branch=revision, exist_ok=True)
    head = api.repo_info(repo, repo_type=repo_type, revision=revision)
    present = set(api.list_repo_files(repo, repo_type=repo_type, revision=head.sha))
    if bundle.is_adapter and "config.json" in present:
        raise ValueError(
            f"{repo} holds a model, which an adapter beside it would hide: transformers would load the adapter's base. Push "
            "the adapter to another name."
        )
    operations = []
    if repo_type in REPLACED:
        old = sorted(path for path in present - bundle.files.keys() if REPLACED[repo_type].fullmatch(path))
        operations = [CommitOperationDelete(path) for path in old]
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
        api.create_tag(repo, repo_type=repo_type, tag=tag, revision=commit.oid)
    return commit


@named_errors()
def pin_base(bundle: Bundle) -> Bundle:
    """Return the bundle with the commit that the base of an adapter, or the backbone of an HMT, has on the Hub now.

    Raises:
        ValueError: the Hub has no such repository or revision. Others: `named_errors`.
    """
    if bundle.base is None:
        return bundle
    name, revision = bundle.base
    try:
        base = HfApi().model_info(name, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ValueError(f"the base {name} (revision {revision}) is not on the Hub; push it first.") from error
    path, field = ("adapter_config.json", "revision") if bundle.is_adapter else ("config.json", "backbone_revision")
    config = json.loads(bundle.text(path)) | {field: base.sha}
    has_code = bundle.is_adapter and any(file.rfilename.endswith(".py") for file in base.siblings or ())
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    return with_contents(replace(bundle, config=config, base_has_code=has_code), {path: text.encode()})
