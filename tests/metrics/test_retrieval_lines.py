"""Line retrieval: the records."""

import re

import pytest

from hf_longctx.metrics.retrieval.answers import contains_number
from hf_longctx.metrics.tasks.lines import NAMES, draw_record


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
