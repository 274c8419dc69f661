"""One commit on the Hub, of a bundle."""

import re

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, get_token

from .. import __version__
from .bundle import Bundle


# Files that are removed from a repository where the bundle lacks them, by the type of the repository.
REPLACED = {
    "model": re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?"),
    "kernel": re.compile(r"(build|torch-ext)/.*"),
}


def push(
    bundle: Bundle,
    repo: str,
    *,
    repo_type: str = "model",
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
) -> CommitInfo:
    """Push a bundle in one commit; where nothing has changed, none is made.

    The repository and the branch are created if there are none. Weights of a model that the bundle lacks are removed
    from the repository: transformers would prefer a `model.safetensors` of before to the shards of now. So are files
    of a kernel.

    The token is that of `hf auth login` or of the environment variable HF_TOKEN.

    Args:
        repo: NAMESPACE/NAME.
        repo_type: "model", "kernel", or "space" for one of gradio.
        private: create a private repository.
        revision: a branch. Default: main.
        create_pr: open a pull request instead of changing the branch.

    Raises:
        ValueError: there is no token, `repo` is no name, or the repository is public although `private`.
        HfHubHTTPError: the Hub refuses; among other reasons, because the branch has changed meanwhile.
    """
    if get_token() is None:
        raise ValueError("There is no token for the Hub. Run `hf auth login`, or set HF_TOKEN.")
    api = HfApi(library_name="hf_longctx", library_version=__version__)
    sdk = "gradio" if repo_type == "space" else None
    api.create_repo(repo, repo_type=repo_type, space_sdk=sdk, private=private or None, exist_ok=True)
    if private and not api.repo_info(repo, repo_type=repo_type).private:
        raise ValueError(f"{repo} is public; make it private in its settings, or push to another name.")
    if revision is not None:
        api.create_branch(repo, repo_type=repo_type, branch=revision, exist_ok=True)
    head = api.repo_info(repo, repo_type=repo_type, revision=revision)
    operations = []
    if repo_type in REPLACED and not bundle.is_adapter:
        present = set(api.list_repo_files(repo, repo_type=repo_type, revision=head.sha))
        old = sorted(path for path in present - bundle.files.keys() if REPLACED[repo_type].fullmatch(path))
        operations = [CommitOperationDelete(path) for path in old]
    operations += [CommitOperationAdd(path, content) for path, content in bundle.files.items()]
    return api.create_commit(
        repo,
        operations,
        repo_type=repo_type,
        commit_message=f"Push with hf-longctx {__version__}",
        revision=revision,
        parent_commit=head.sha,
        create_pr=create_pr,
    )


def loading_lines(bundle: Bundle, repo: str, commit: str) -> str:
    """Python that loads what was pushed: this commit and no other, its code included."""
    library, name = ("peft", "AutoPeftModelForCausalLM") if bundle.is_adapter else ("transformers", bundle.auto_class)
    trust = ", trust_remote_code=True" if any(path.endswith(".py") for path in bundle.files) else ""
    return f'from {library} import {name}\n{name}.from_pretrained("{repo}", revision="{commit}"{trust})'
