"""The page: complete, self-contained, and safe whatever the results say."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from examples import answers, curve, lines, one_of_each
from transformers import LlamaConfig


pytest.importorskip("matplotlib", reason="pictures need matplotlib: pip install 'hf-longctx[plot]'")

from hf_longctx.metrics import CurvePoint, ForgettingCurve, NeedleGrid, PositionLoss, rope_report
from hf_longctx.metrics.report.page import conclusion, write_report
from hf_longctx.metrics.report.page import overview as overview_rows
from hf_longctx.metrics.tasks.needle import NeedleCell


EVIL = "<script>alert('&')</script>"
RESULTS = one_of_each(model=EVIL, reply=EVIL)
RESULTS[0] = ForgettingCurve.of_points(
    [CurvePoint(8, [4, 4], [1, 0]), CurvePoint(64, [30, 20], [1, 0])], RESULTS[0].settings | {"train_length": 100}
)


class Page(HTMLParser):
    """Collects tags with their attributes, and the text of each."""

    void = {"meta", "img"}

    def __init__(self, path):
        super().__init__()
        self.tags, self.open, self.text, self.source = [], [], "", path.read_text()
        self.feed(self.source)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def images(self):
        return [base64.b64decode(a["src"].partition(",")[2]).decode() for tag, a in self.tags if tag == "img"]


@pytest.fixture(autouse=True, scope="module")
def quick_pictures():
    """Pictures that tell their format only: to draw is slow."""
    with pytest.MonkeyPatch.context() as patch:
        savefig = lambda self, path: Path(path).write_text(f"a picture{Path(path).suffix}")  # noqa: E731
        patch.setattr("matplotlib.figure.Figure.savefig", savefig)
        yield


def test_notebooks_show_a_picture(monkeypatch):
    assert RESULTS[0]._repr_png_() == b"a picture.png"
    assert ForgettingCurve.of_points([])._repr_png_() is None

    def plot(self, path):
        raise ImportError("matplotlib")

    monkeypatch.setattr(PositionLoss, "plot", plot)
    assert RESULTS[1]._repr_png_() is None


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(RESULTS, path, missing={"Line retrieval": "interrupted", "Another": f"because {EVIL}"})
    return Page(path)


def test_every_metric_has_its_section(page):
    for result in RESULTS:
        assert result.summary() in page.text and result.explanation() in page.text
    assert (
        page.text.count(f"How far {EVIL} remembers") == 2
        and "holds at 512 tokens" in page.text
        and RESULTS[-1].caveat in page.text
    )
    assert page.images() == ["a picture.svg"] * 5
    assert "train_length" in page.text and "78.1%" in page.text  # 50 of 64 copied


def test_the_overview_leads_to_every_section(page):
    """Measurements that are missing or incomplete have a row, too."""
    anchors = [a["href"].removeprefix("#") for tag, a in page.tags if tag == "a"]
    assert anchors == [f"result-{i}" for i in range(1, 6)] + ["missing-1", "missing-2"]
    assert anchors == [a["id"] for tag, a in page.tags if tag == "section"]
    overview = page.text[: page.text.index(RESULTS[0].explanation())]
    for result in RESULTS:
        for row in overview_rows(result):
            assert all(text in overview for text in row), row
    assert "not measured to its end" in overview and "Not measured to its end: interrupted" in page.text
    assert f"Not measured: because {EVIL}" in page.text


def test_it_needs_nothing_beside_itself(page):
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    addresses = [a[name] for _, a in page.tags for name in ("src", "href") if name in a]
    assert addresses and all(address.startswith(("data:", "#result-", "#missing-")) for address in addresses)
    style = re.search("<style>(.*?)</style>", page.source, re.DOTALL)[1]
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style


@pytest.mark.parametrize("base, frame", [(1e6, "summary passed"), (100.0, "summary violated")])
def test_the_frame_tells_what_holds(base, frame, tmp_path):
    sizes = dict(max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": base})
    report = rope_report(LlamaConfig(**sizes), minimum_base=False)
    write_report([report, RESULTS[1]], tmp_path / "report.html")
    classes = [
        a["class"] for tag, a in Page(tmp_path / "report.html").tags if a.get("class", "").startswith("summary")
    ]
    assert classes == [frame, "summary"]


# The three sentences at the top -----------------------------------------------------------------------------------


def needle(*rights):
    found = [answers(*(i < right for i in range(10))) for right in rights]
    return NeedleGrid.of_parts([NeedleCell(each, 300 * i, 0.5, [1] * 10) for i, each in enumerate(found, start=1)])


@pytest.mark.parametrize(
    "result, words",
    [
        (needle(10, 9, 1), "Finds a sentence hidden in a document of up to 600 tokens (9 of 10 questions)."),
        (needle(1, 0), "Does not find a sentence hidden in a document, not even of 300 tokens (1 of 10 questions)."),
        (lines([True] * 4), "Finds one of many lines of up to 90 tokens (4 of 4 questions)."),
    ],
)
def test_what_is_found(result, words):
    assert conclusion([result]) == [words]
    assert conclusion([result, PositionLoss.of_mean([2.0, 1.0], 2), curve(1, 1, 1), result])[2:] == [words]


def test_nothing_measured_says_nothing(tmp_path):
    results = [ForgettingCurve.of_points([], {"model": "fox"}), NeedleGrid.of_parts([])]
    assert conclusion(results) == []
    write_report(results, tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert "nothing measured" in page.text and not page.images()
    assert conclusion([PositionLoss.of_mean([2.0, 1.0], 2)])[0].startswith("The loss after 2 tokens is 1.000 nats")


def test_the_page_begins_with_them(tmp_path):
    result = curve(1, 0.5, (0.2, 0.2), model="fox", parameters=1_240_000_000, dtype="bfloat16", hardware="NVIDIA H100")
    write_report([result], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.index("Copies up to 800 tokens (") < page.index("Copies up to 400 tokens word for word (")
    assert page.index("Copies up to 800 tokens") < page.index("1,240,000,000 parameters, bfloat16, NVIDIA H100; 20")
    assert page.index("NVIDIA H100; 20") < page.index("<table")


def test_a_page_names_the_cache_that_was_measured(tmp_path):
    cached = [result.with_settings(cache="quantized:4") for result in RESULTS[1:4]]
    write_report(cached, tmp_path / "page.html")
    assert "with the cache quantized:4" in Page(tmp_path / "page.html").text
    write_report(RESULTS[1:4], tmp_path / "page.html")
    assert "with the cache" not in Page(tmp_path / "page.html").text
