"""Needles: what the prompts are made of, where the needle goes, the JSON."""

import json
import math

import numpy as np
import pytest

from hf_longctx.metrics.retrieval.answers import Answer
from hf_longctx.metrics.retrieval.haystack import (
    NeedleCell,
    NeedleGrid,
    draw_begins,
    ends_sentence,
    haystack_length,
    hide_needle,
    insertion_point,
    needle_pieces,
    split_encoding,
)
from hf_longctx.metrics.retrieval.wording import ANSWER, wording


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


@pytest.mark.parametrize("length", [419, 420, 1000])
def test_prompt_and_answer_have_the_length(length):
    pieces = needle_pieces(letters, 1, wording("standard"))
    haystack = np.full(haystack_length(length, pieces), 7)
    assert len(hide_needle(haystack, 3, pieces)) + len(pieces.answer) == length


def test_no_room_for_a_haystack():
    pieces = needle_pieces(letters, 1, wording("easy"))
    assert haystack_length(pieces.tokens + 1, pieces) == 1
    with pytest.raises(ValueError, match=rf"length 100 is too short.*Start at {pieces.tokens + 1}"):
        haystack_length(100, pieces)


@pytest.mark.parametrize(
    "ends, depth, at",
    [
        ([0, 1, 0, 0, 1, 0, 0, 0, 0, 0], 0.0, 0),
        ([0, 1, 0, 0, 1, 0, 0, 0, 0, 0], 0.1, 1),  # no sentence ends before it
        ([0, 1, 0, 0, 1, 0, 0, 0, 0, 0], 0.2, 2),
        ([0, 1, 0, 0, 1, 0, 0, 0, 0, 0], 0.45, 2),
        ([0, 1, 0, 0, 1, 0, 0, 0, 0, 0], 0.5, 5),
        ([0, 1, 0, 0, 1, 0, 0, 0, 0, 0], 0.99, 5),
        ([0, 1, 0, 0, 1, 0, 0, 0, 0, 0], 1.0, 10),
        ([0] * 10, 0.7, 7),
    ],
)
def test_the_needle_comes_after_a_sentence(ends, depth, at):
    assert insertion_point(np.array(ends, dtype=bool), depth) == at


@pytest.mark.parametrize("text, ends", [(".", True), (" end.\n\n", True), ('?"', True), ("。", True), (",", False)])
def test_ends_of_sentences(text, ends):
    assert ends_sentence(text) is ends


def test_haystacks_start_anywhere_in_the_corpus():
    begins = draw_begins(30, 10, 200, seed=3)
    assert set(begins) == set(range(21))
    assert begins == draw_begins(30, 10, 200, seed=3) != draw_begins(30, 10, 200, seed=4)
    with pytest.raises(ValueError, match="9 tokens, and a haystack needs 10"):
        draw_begins(9, 10, 1, 0)


def test_tokens_that_reach_over_the_seam():
    pairs = {"ab": [0, 1], "abc": [0, 2], "a": [0]}
    assert split_encoding(pairs.get, "ab", "c") == ([0], [2])
    assert split_encoding(pairs.get, "a", "b") == ([0], [1])


def cell(length, depth, *matches):
    answers = [Answer(math.log(0.5) * 12, 12, exact=x, reply=None, matched=x) for x in matches]
    return NeedleCell(answers, length, depth, [7] * len(matches))


GRID = NeedleGrid([cell(100, 0.0, True, False), cell(100, 0.5, True, True), cell(200, 0.0, False, False)], {"seed": 3})


def test_grid():
    assert (GRID.lengths, GRID.depths) == ([100, 200], [0.0, 0.5])
    assert np.array_equal(GRID.grid(), [[0.5, 0.0], [1.0, np.nan]], equal_nan=True)
    assert np.allclose(GRID.grid("probability")[0], 0.5)
    assert GRID.summary().startswith("exact rate 50.0%, probability")  # without replies nothing is found in them
    assert NeedleGrid(()).summary() == "no length measured"


def test_json():
    text = GRID.to_json()
    assert NeedleGrid.from_json(text) == GRID
    assert json.loads(text)["cells"][0]["exact_rate"] == 0.5 and "match_rate" not in text
