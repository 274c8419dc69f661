"""Check the release requirements of CONTRIBUTING.md, and print what is missing.

    python scripts/release.py [--quick]

--quick skips slow checks: the tests, and the wheel under each Python. If nothing is missing, the
commands that tag and build the release are printed.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = (
    "hf-longctx"  # placeholder owner of the models in cards and examples, until the repository has an address
)
COMMANDS = (["scripts/test"], ["scripts/check_wheel"])


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True).stdout


def find(pattern: str, file: Path) -> re.Match:
    """Return the first line of a file that matches a pattern."""
    match = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise ValueError(f"{file} must have a line that matches {pattern}.")
    return match


def read_version(root: Path) -> str:
    return find(r'^__version__ = "(.*)"', root / "hf_longctx/__init__.py")[1]


def missing(root: Path) -> Iterator[str]:
    """Yield a sentence for each missing requirement."""
    version, head = read_version(root), find("^## (.*)", root / "CHANGELOG.md")[1]
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"__version__ must be like 1.2.3, got {version}."
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", head):
        yield f'The first heading of CHANGELOG.md must be "{version} (YYYY-MM-DD)", got "{head}".'
    source = find(r'^SOURCE = "(.*)"', root / "hf_longctx/hub/card.py")[1]
    if not source:
        yield "SOURCE in hf_longctx/hub/card.py must be the address of the repository, got an empty string."
    elif f"/{PLACEHOLDER}/" not in source:
        for file in git(root, "grep", "-lE", rf"\b{PLACEHOLDER}/[a-z]+-demo").split():
            yield f"{file} names the placeholder {PLACEHOLDER} as the owner of a model."
    for card in sorted(root.glob("model_cards/*/README.md")):
        if source not in card.read_text(encoding="utf-8"):
            yield f"{card.relative_to(root)} does not name {source}: write it again by hf-longctx push --write-card."
    if git(root, "status", "--porcelain"):
        yield "The work tree has changes that are not committed."
    if git(root, "tag", "--list", f"v{version}"):
        yield f"The tag v{version} exists."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="skip the slow checks")
    quick, problems = parser.parse_args().quick, list(missing(ROOT))
    for python in ("python3.11", "python3.12", "python3.13"):
        if shutil.which(python) is None:
            problems.append(f"{python} is not installed, so scripts/check_wheel does not check the wheel under it.")
    for command in COMMANDS:
        if quick or subprocess.run(command, cwd=ROOT).returncode:
            problems.append(f"{' '.join(command)} {'was not run' if quick else 'failed'}.")
    version = read_version(ROOT)
    print(*problems or [f"git tag v{version} && python -m hatchling build"], sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
