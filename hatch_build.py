"""The addresses of a built package, and its description: README.md, whose links lead to the repository."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


SOURCE = re.compile(r'^SOURCE = "(https://github\.com/([\w-]+)/[\w-]+)"', re.MULTILINE)  # of hub/card.py
LINK = re.compile(r'(\]\(|src=")(?![a-z]+:|#)([^)"]+)')  # that does not say where
PICTURES = (".png", ".svg")


class CustomMetadataHook(MetadataHookInterface):
    """Add the addresses, and make the links of README.md absolute."""

    def update(self, metadata: dict) -> None:
        found = SOURCE.search(Path(self.root, "hf_longctx", "hub", "card.py").read_text(encoding="utf-8"))
        assert found is not None
        source, owner = found.groups()
        metadata["urls"] = {
            "Source": source,
            "Changelog": f"{source}/blob/main/CHANGELOG.md",
            "Models": f"https://huggingface.co/{owner}",
        }

        def absolute(match):
            kind = "raw" if match[2].endswith(PICTURES) else "blob"
            return f"{match[1]}{source}/{kind}/main/{match[2]}"

        text = LINK.sub(absolute, Path(self.root, "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
