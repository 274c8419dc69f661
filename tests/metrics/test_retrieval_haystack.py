"""Needles: what the prompts are made of, where the needle goes, the grid."""

import math
from itertools import pairwise

import numpy as np
import pytest

from hf_longctx.metrics.retrieval.answers import Answer
from hf_longctx.metrics.retrieval.haystack import (
    draw_begins,
    haystack_length,
    hide_needle,
    insertion_point,
    needle_pieces,
    split_encoding,
)
from hf_longctx.metrics.retrieval.wording import ANSWER, wording
from hf_longctx.metrics.tasks.needle import NeedleCell, NeedleGrid


def letters(text):
    return list(map(ord, text))


def text_of(ids):
    return "".join(map(chr, ids))


QUESTION = (
    "\nThere is an important piece of information hidden inside the above document. Now that you've read the document, "
    "I will quiz you about it. Answer the following question: What is the best thing to do in San Francisco? Answer: "
    "The best thing to do in San Francisco is"
)


@pytest.mark.parametrize(
    "mode, needle",
    [
        (
            "standard",
            "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.\n",
        ),
        (
            "easy",
            "\nWhat is the best thing to do in San Francisco? Answer: The best thing to do in San Francisco is eat a "
            "sandwich and sit in Dolores Park on a sunny day.\n",
        ),
    ],
)
def test_prompts_of_the_paper(mode, needle):
    pieces = needle_pieces(letters, 1, wording(mode))
    prompt = hide_needle(np.array(letters("One. Two.")), 4, pieces)
    assert prompt[0] == 1
    assert text_of(prompt[1:]) == "One." + needle + " Two." + QUESTION
    assert text_of(pieces.answer) == " eat a sandwich and sit in Dolores Park on a sunny day." == ANSWER


def test_prompt_and_answer_have_the_length():
    pieces = needle_pieces(letters, 1, wording("standard"))
    haystack = np.full(haystack_length(1000, pieces), 7)
    assert len(hide_needle(haystack, 3, pieces)) + len(pieces.answer) == 1000
    assert haystack_length(pieces.tokens + 1, pieces) == 1
    with pytest.raises(ValueError, match=rf"lengths must be above {pieces.tokens} .*got 100"):
        haystack_length(100, pieces)


@pytest.mark.parametrize("depth, at", [(0.0, 0), (0.1, 1), (0.2, 2), (0.45, 2), (0.5, 5), (0.99, 5), (1.0, 10)])
def test_the_needle_comes_after_a_sentence(depth, at):
    """At 0.1, no sentence ends before it."""
    assert insertion_point(np.array([0, 1, 0, 0, 1, 0, 0, 0, 0, 0], dtype=bool), depth) == at


@pytest.mark.parametrize("corpus, questions, haystacks", [(100, 4, 4), (109, 11, 10), (10, 2, 1)])
def test_haystacks_do_not_overlap(corpus, questions, haystacks):
    """Each question has one of its own, or, where the text is too short, shares one with as few as can be."""
    drawn = [draw_begins(corpus, 10, questions, seed) for seed in range(300)]
    for begins in drawn:
        places = sorted(set(begins))
        assert len(places) == haystacks and all(b - a >= 10 for a, b in pairwise(places))
        assert max(map(begins.count, places)) == -(-questions // haystacks)
    assert {min(begins) for begins in drawn} >= {0, 1, 2, 3}.intersection(range(corpus - 9 - 10 * (haystacks - 1)))
    assert drawn[3] == draw_begins(corpus, 10, questions, 3)
    assert corpus == 10 or len(set(map(tuple, drawn))) > 5
    with pytest.raises(ValueError, match="at least 10 tokens for a haystack, got 9"):
        draw_begins(9, 10, 1, 0)


def test_tokens_that_reach_over_the_seam():
    pairs = {"ab": [0, 1], "abc": [0, 2], "a": [0]}
    assert split_encoding(pairs.get, "ab", "c") == ([0], [2])
    assert split_encoding(pairs.get, "a", "b") == ([0], [1])


def cell(length, depth, *matches):
    answers = [Answer(math.log(0.5) * 12, 12, exact=x, reply=None, matched=x) for x in matches]
    return NeedleCell(answers, length, depth, [7] * len(matches))


GRID = NeedleGrid.of_parts(
    [cell(100, 0.0, True, False), cell(100, 0.5, True, True), cell(200, 0.0, False, False)], {"seed": 3}
)


def test_grid():
    assert (GRID.lengths, GRID.depths) == ([100, 200], [0.0, 0.5])
    assert np.array_equal(GRID.grid(), [[0.5, 0.0], [1.0, np.nan]], equal_nan=True)
    assert np.allclose(GRID.grid("probability")[0], 0.5)
    assert "match_rate" not in GRID.to_json()
    assert GRID.summary() == (  # without responses, there is no match rate
        "token for token: 75% of 100 tokens, 0% of 200 tokens; 2 depths, 2 haystacks for each length"
    )
    assert GRID.units(100) == [[cell.answers[i] for cell in GRID.cells[:2]] for i in (0, 1)]
    assert NeedleGrid.of_parts(()).summary() == "nothing measured"


def apart(depths, repeats, right=True):
    """Return answers, each about its own haystack."""
    answers = [Answer(-1.0, 12, right, None, right)] * repeats
    cells = [NeedleCell(answers, 100, d / 10, [7] * repeats, range(d, 1000, 100)[:repeats]) for d in range(depths)]
    return NeedleGrid.of_parts(cells)


def test_an_interval_is_one_over_haystacks():
    """Eleven questions about one haystack are one observation; about eleven haystacks they are eleven."""
    (row,) = apart(11, 1).numbers()
    assert row.name == "needle in a haystack, token for token: 100 tokens"
    assert (row.interval(), row.sample) == ("0.7412 to 1", "11 questions")
    shared = NeedleGrid.of_parts([cell(100, d / 10, True) for d in range(11)])
    (row,) = shared.numbers()
    assert (row.interval(), row.sample) == ("", "11 questions about 1 haystack")
    assert [row.interval() for row in GRID.numbers()] == ["", ""]  # two haystacks at each length
    assert len({number.name for number in GRID.numbers()}) == 2
    assert [len(score.shares) for score in shared.by_length() + apart(11, 1).by_length()] == [1, 11]
