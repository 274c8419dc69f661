"""The addresses of a built package, and its description: README.md with absolute links."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


SOURCE = re.compile(r'^SOURCE = "(.*)"', re.MULTILINE)  # in hub/card.py
LINK = re.compile(r"\[([^]]*)\]\((?![a-z]+:|#)([^)]+)\)")
IMAGE = re.compile(r'<img src="(?![a-z]+:)([^"]+)"[^>]*>\n*')


class CustomMetadataHook(MetadataHookInterface):
    """Add the addresses and make the links of README.md absolute; without an address, leave both out."""

    def update(self, metadata: dict) -> None:
        found = SOURCE.search(Path(self.root, "hf_longctx", "hub", "card.py").read_text(encoding="utf-8"))
        assert found is not None
        source = found[1]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        if source:
            metadata["urls"] = {"Source": source, "Changelog": f"{source}/blob/main/CHANGELOG.md"}
            text = LINK.sub(rf"[\1]({source}/blob/main/\2)", text)
            text = IMAGE.sub(lambda match: match[0].replace(match[1], f"{source}/raw/main/{match[1]}"), text)
        else:
            metadata["urls"] = {}
            text = IMAGE.sub("", LINK.sub(r"\1", text))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
