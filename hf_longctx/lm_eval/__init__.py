"""lm-eval integration: a task for every metric that runs a model, and the model type `hf-longctx` for FoX and HMT.

lm-eval finds the tasks in the folder that `tasks_folder` returns:
`lm_eval run --include_path "$(hf-longctx lm-eval --tasks-folder)" --tasks forgetting_curve`.
Importing `hf_longctx.lm_eval.model` registers the model type. `hf-longctx lm-eval` imports this module.
"""

from pathlib import Path


def tasks_folder() -> Path:
    """Write a YAML file for each task into a folder of the user's cache. Return the folder."""
    from huggingface_hub.constants import HF_HOME

    from ..metrics import tasks  # noqa: F401 - importing `tasks` registers every Task
    from ..metrics.task import Task

    folder = Path(HF_HOME) / "hf_longctx" / "lm_eval"
    folder.mkdir(parents=True, exist_ok=True)
    names = [task.result.kind for task in Task.tasks.values()]
    for file in folder.glob("*.yaml"):
        if file.stem not in names:
            file.unlink(missing_ok=True)
    for name in names:
        lines = f"task: {name}\nclass: !function hf_longctx.lm_eval.tasks.{name}\n"
        (folder / f"{name}.yaml").write_text(lines, encoding="utf-8")
    return folder
