"""The Space "How far does it remember?": its app, the parts of the package that Spaces use, and examples.

The package goes along as it is, in a folder: Spaces install their requirements before they have the other files of the
repository, so a wheel among those files could not be installed.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from ..fox.checkpoint_files import leads_outside, read_json
from ..metrics import read_result
from .bundle import Bundle, with_contents
from .weights import check_safetensors


APP = Path(__file__).with_name("explorer")
PACKAGE = Path(__file__).parents[1]
PARTS = ("__init__.py", "_registration.py", "fox/*.py", "hmt/*.py", "metrics/**/*.py")
RESULT = "forgetting_curve.json"
MODEL = ("config.json", "tokenizer.json", "model.safetensors")


def build_explorer(examples: Iterable[str | os.PathLike] = ()) -> Bundle:
    """Return the files of the Space.

    Args:
        examples: results to choose from, JSON files of `curve` or `loss`; or folders of models, of which the
            forgetting_curve.json is taken and, of a FoX, what its gates need: configuration, tokenizer, weights.

    Raises:
        ValueError: an example is not a result, lacks curve and gates, has a file that leads out of its folder or
            weights that are damaged; or two have one name.
    """
    files: dict[str, Path | bytes] = {
        path.name: path for path in APP.iterdir() if path.suffix in (".md", ".png", ".py", ".txt")
    }
    files |= package_files()
    for path in map(Path, examples):
        added = {f"examples/{name}": file for name, file in example(path).items()}
        if double := added.keys() & files.keys():
            raise ValueError(f"two examples are called {path.stem} ({min(double)}); rename one of them.")
        files |= added
    return with_contents(Bundle(files, (), {}))


def package_files() -> dict[str, Path]:
    """Return the Python files of this package that the apps of Spaces use."""
    code = [path for pattern in PARTS for path in PACKAGE.glob(pattern) if "modules" not in path.parts]
    return {path.relative_to(PACKAGE.parent).as_posix(): path for path in code}


def example(path):
    """Return {name in the folder of examples: file} of a result or a model."""
    if not path.is_dir():
        read_result(path)
        return {path.name: path}
    files = {}
    if (path / RESULT).is_file():
        read_result(path / RESULT)
        files[f"{path.name}.json"] = path / RESULT
    if (path / "config.json").is_file() and read_json(path / "config.json").get("model_type") == "fox":
        check_safetensors(path / "model.safetensors")
        files |= {f"{path.name}/{name}": path / name for name in MODEL}
    for file in files.values():
        if not file.is_file() or leads_outside(file, path):
            raise ValueError(f"{file} is absent, or a link that leads out of its folder; put the file there.")
    if not files:
        raise ValueError(f"{path} lacks {RESULT}, and is not a FoX; give a folder with one of them, or a result.")
    return files
