"""Each sentence about trust, in a README, in the cards and in the changelog, names the test that proves it."""

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[1]
TESTS = re.findall(
    r"^def ((?:test|check)_\w+)", "\n".join(path.read_text() for path in ROOT.glob("tests/**/*.py")), re.MULTILINE
)
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("hf_longctx/**/*.md"), *ROOT.glob("model_cards/*-demo/README.md")]
TRUST = re.compile(
    r"trust_remote_code=True|allow_all_kernels=True.* runs|byte for byte|to the last bit|sha256 of every|looks like a token"
    r"|not its hash|\bruns none|did not read the text|without a question|'s code[,; |]|[|] no code [|]"
)
NAME = re.compile(r"(?<![\w/])(?:test|check)_\w+")  # and not the path of a file
NO_PROSE = re.compile(r"^```.*?^```|^    .*?$|{%-? set.*?%}", re.MULTILINE | re.DOTALL)


def statements(text):
    """Paragraphs, items of lists and rows of tables, each on one line, without code."""
    parts = re.split(r"\n\n+|\n(?=[|]|- |##)", NO_PROSE.sub("", text))
    return [" ".join(part.split()) for part in parts if part.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_statements_about_trust_name_a_test_that_exists(page):
    found = statements(page.read_text())
    assert not [part for part in found if TRUST.search(part) and not NAME.search(part)]
    assert not {name for part in found for name in NAME.findall(part)} - {*TESTS}


def test_the_statements_are_found():
    """The sieve is not empty: these pages say most."""
    for page, fewest in (("SECURITY.md", 8), ("hf_longctx/hub/model_card.md", 2), ("CHANGELOG.md", 1)):
        assert len([part for part in statements((ROOT / page).read_text()) if TRUST.search(part)]) >= fewest, page
