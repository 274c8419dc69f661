"""Pages: equal to flat memory where everything is recalled, found by tag where not, at the cost of a square root."""

import copy
from collections import Counter

import pytest
import torch
from gradients import assert_same_gradients, gradients
from tiny_hmt import ROUNDING

from hf_longctx.hmt import HMTState, Segment
from hf_longctx.hmt.pages_hmt import MemoryPages


def filled(embeddings, page_size=4, recalled=3, at_once=7):
    """Pages of (n, d), appended `at_once` at a time."""
    pages = MemoryPages.empty(embeddings.shape[1], embeddings.dtype, "cpu", page_size, recalled)
    for part in embeddings.split(at_once):
        pages = pages.append(part)
    return pages


@pytest.fixture
def long_tokens():
    """Two rows of 13 segments and a piece, (2, 109)."""
    return torch.randint(3, 61, (2, 109), generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("page_size, recalled", [(2, 50), (4, 6), (16, 1)], ids=["many pages", "some", "one"])
def test_equals_flat_memory_while_all_pages_are_recalled(make_wrapper, long_tokens, page_size, recalled):
    flat = make_wrapper(memory_size=None)
    expected = flat(long_tokens, labels=long_tokens, output_recall=True)
    expected.loss.backward()
    flat_gradients = gradients(flat)
    flat.zero_grad()
    paged = make_wrapper(memory_size=2, page_size=page_size, recalled_pages=recalled)
    out = paged(long_tokens, labels=long_tokens, output_recall=True)
    torch.testing.assert_close(out.logits, expected.logits, atol=ROUNDING, rtol=0)
    torch.testing.assert_close(out.recall_scores[1:13], expected.recall_scores[1:13], atol=ROUNDING, rtol=0)
    assert torch.equal(out.recall_distance, expected.recall_distance)
    out.loss.backward()
    assert_same_gradients(gradients(paged), flat_gradients)


def test_is_the_recall_of_a_flat_memory_with_other_pages_left_out(make_wrapper, tokens):
    generator, counts = torch.Generator().manual_seed(0), []
    settings = {"memory_size": 2, "page_size": 2, "recalled_pages": 2}, {"memory_size": None}
    paged, flat = (make_wrapper(**x).retriever for x in settings)
    state, of_all = (retriever.empty(2, torch.zeros(16).double()) for retriever in (paged, flat))
    for n in range(13):
        memory, query = torch.randn(2, 2, 1, 16, generator=generator).double()
        segment = Segment(tokens[:, :8], memory, [n, n])
        state, of_all = paged.observe(state, segment), flat.observe(of_all, segment)
        found, every = paged.retrieve(state, query, tokens[:, :4]), flat.retrieve(of_all, query, tokens[:, :4])
        expected = every.weights.gather(1, (found.ends // 8 - 1).clamp(min=0)) * (found.ends > 0)
        torch.testing.assert_close(found.weights, expected / expected.sum(1, keepdim=True), atol=ROUNDING, rtol=0)
        counts.append(int((found.ends > 0).sum(1).max()))
    assert counts[:4] == [1, 2, 3, 4] and max(counts) < 10


def test_saved_restored_and_branched(make_wrapper, long_tokens, tmp_path):
    model = make_wrapper(memory_size=1, page_size=1, recalled_pages=1)
    start, rest, other = long_tokens[:, :61], long_tokens[:, 61:], long_tokens[:, :48]
    with torch.no_grad():
        whole, expected = model(long_tokens).logits[:, 61:], model(torch.cat([start, other], 1)).logits[:, 61:]
        state = model(start, use_cache=True).state
        state.save(tmp_path / "state.safetensors", model)
        for again in (state, HMTState.load(tmp_path / "state.safetensors", model), state.to("cpu"), state.detach()):
            torch.testing.assert_close(model(rest, state=again).logits, whole, atol=ROUNDING, rtol=0)
            torch.testing.assert_close(model(other, state=again).logits, expected, atol=ROUNDING, rtol=0)
        copied, later = copy.deepcopy(state), model(rest[:, :24], state=state).state
        torch.testing.assert_close(model(other, state=copied).logits, expected, atol=ROUNDING, rtol=0)
        torch.testing.assert_close(model(rest[:, 24:], state=later).logits, whole[:, 24:], atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("n", [0, 3, 4, 50, 213])
def test_look_up_returns_the_pages_of_the_best_tags(n):
    generator = torch.Generator().manual_seed(n)
    embeddings, direction = (torch.randn(c, 8, generator=generator) for c in (n, 1))
    pages = filled(embeddings)
    for page, members in zip(pages.pages, pages.members):
        assert torch.equal(page, embeddings[list(members)])
    assert len(pages) == n and sorted(sum(pages.members, ())) == list(range(n))  # each in one page
    recalled, numbers = pages.look_up(lambda tags: tags @ direction[0])
    scores = [(embeddings[list(page)].mean(0) @ direction[0]).item() for page in pages.members]
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[:3]
    assert numbers.tolist() == sorted(sum((pages.members[i] for i in best), ()))
    assert torch.equal(recalled, embeddings[numbers])


@pytest.mark.parametrize("center", [0, 10_000], ids=["around zero", "with much in common"])
def test_a_page_holds_what_is_alike(center):
    """Eight kinds of embeddings in turn, nearer to their kind than to another: nearly all are in a page of theirs."""
    kinds = torch.eye(8).repeat(16, 1) + 0.05 * torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    pages = filled(center + kinds, page_size=4, recalled=1)
    of_each = [Counter(number % 8 for number in page) for page in pages.members]
    assert sum(max(page.values()) for page in of_each) >= 0.95 * 128


def test_appending_leaves_the_older_pages_alone():
    embeddings = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    older = filled(embeddings[:50])
    members, sums = older.members, older.sums.clone()
    newer = older.append(embeddings[50:])
    assert older.members == members and torch.equal(older.sums, sums) and len(newer) == 60
    for pages in (older, newer):
        sums = [sum(embeddings[i] for i in page) for page in pages.members]
        torch.testing.assert_close(pages.sums, torch.stack(sums), atol=1e-5, rtol=0)  # eps of sums of order 10


KINDS = {
    "alike": torch.zeros(1500, 2),
    "unrelated": torch.randn(1500, 8, generator=torch.Generator().manual_seed(0)),
    "in line": torch.arange(1500)[:, None].float(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_cost_grows_with_the_square_root(kind):
    embeddings, recalled, start = KINDS[kind], 3, 0
    pages = MemoryPages.empty(embeddings.shape[1], torch.float32, "cpu", 2, recalled)
    for stop in (100, 500, 1500):
        pages, start = pages.append(embeddings[start:stop]), stop
        root = (recalled * stop) ** 0.5
        assert len(pages.look_up(lambda tags: tags.sum(1))[0]) <= root
        assert len(pages.members) <= 4 * root


def test_autocast_changes_no_page():
    embeddings = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        members = filled(embeddings).members
    assert members == filled(embeddings).members


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_memory_that_is_not_finite_is_kept(number):
    embeddings = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    embeddings[20, 3] = number
    assert sorted(sum(filled(embeddings).members, ())) == list(range(50))
