"""The description of a built package: README.md, whose links lead to the repository from wherever it is read."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


LINK = re.compile(r'(\]\(|src=")(?![a-z]+:|#)([^)"]+)')  # that does not say where
PICTURES = (".png", ".svg")


class CustomMetadataHook(MetadataHookInterface):
    """Make the links of README.md absolute."""

    def update(self, metadata: dict) -> None:
        source = metadata["urls"]["Source"]

        def absolute(match):
            kind = "raw" if match[2].endswith(PICTURES) else "blob"
            return f"{match[1]}{source}/{kind}/main/{match[2]}"

        text = LINK.sub(absolute, Path(self.root, "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
