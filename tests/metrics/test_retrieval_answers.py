"""Scoring answers without a judge, and the records of line retrieval."""

import math
import re

import pytest
import scipy.stats

from hf_longctx.metrics.retrieval.answers import Answer, Answers, contains_number, contains_text, wilson
from hf_longctx.metrics.tasks.lines import NAMES, draw_record


@pytest.mark.parametrize(
    "reply, expected, held",
    [
        ("Eat a sandwich.", "eat a sandwich", True),
        ("I'd say: eat   a\tSANDWICH!", " eat a sandwich.", True),
        ("seat a sandwich", "eat a sandwich", False),
        ("eat a sandwiches", "eat a sandwich", False),
        ("eat a", "eat a sandwich", False),
        ("Straße 12", "straße 12", True),
    ],
)
def test_text_in_a_reply(reply, expected, held):
    assert contains_text(reply, expected) is held


@pytest.mark.parametrize(
    "reply, number",
    [
        (" <42>\nline 7", 42),
        ("it is 0042.", 42),
        ("not 7 but 42", 7),
        ("1,234,567", 1234567),
        ("4, 096", 4),
        ("4,0961", 4),
        ("421", 421),
        ("no idea", None),
    ],
)
def test_number_in_a_reply(reply, number):
    """Thousands may be set off."""
    assert [n for n in (4, 7, 42, 421, 1234567) if contains_number(reply, n)] == [number] * (number is not None)


def test_rates():
    answers = Answers(
        [
            Answer(math.log(0.25), 2, exact=True, reply=None, matched=True),
            Answer(math.log(1e-3), 3, exact=False, reply="It is", matched=True),
            Answer(0.0, 1, exact=False, reply="no", matched=False),
        ]
    )
    assert answers.rates() == pytest.approx(
        {"match_rate": 2 / 3, "exact_rate": 1 / 3, "probability": (0.5 + 0.1 + 1) / 3}
    )
    silent = Answers([Answer(-1.0, 2, exact=True, reply=None, matched=True)])
    assert list(silent.rates()) == ["exact_rate", "probability"]


def test_the_interval_of_a_rate_is_wilsons():
    """https://en.wikipedia.org/wiki/Binomial_proportion_confidence_interval; scipy computes the same."""
    expected = scipy.stats.binomtest(3, 10).proportion_ci(0.95, method="wilson")
    assert wilson(0.3, 10) == pytest.approx((expected.low, expected.high), abs=1e-4)


@pytest.mark.parametrize("lines", [1, 2, 40, len(NAMES)])
def test_record(lines):
    record = draw_record(lines, seed=3, repeat=1)
    contents = re.findall(r"^line (\w+-\w+): REGISTER_CONTENT is <(\d+)>$", record.text, re.MULTILINE)
    assert len(contents) == len(dict(contents)) == lines
    name, number = contents[record.asked_line]
    assert int(number) == record.number
    assert contains_number(record.answer, record.number)
    assert record.question.count(f"line {name}") == 2
    assert f"line {name}: REGISTER_CONTENT is{record.answer}" in record.text
    assert record == draw_record(lines, seed=3, repeat=1)


def test_records_differ():
    records = {draw_record(8, seed, repeat).text for seed in range(3) for repeat in range(3)}
    assert len(records) == 9 and len(set(NAMES)) == len(NAMES) > 10_000
    asked = {draw_record(4, 0, repeat).asked_line for repeat in range(40)}
    assert asked == {0, 1, 2, 3}
