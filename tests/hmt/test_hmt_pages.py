"""Pages: equal to flat memory where everything is recalled, found by tag where not, at the cost of a square root."""

import copy

import pytest
import torch
from gradients import assert_same_gradients, gradients
from streams import CHUNKS, stream
from tiny_hmt import ROUNDING
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx.hmt import HMTConfig, HMTMemory, HMTState, HMTWrapper
from hf_longctx.hmt.pages_hmt import TAGS_PER_EMBEDDING, MemoryPages, PageFile
from hf_longctx.hmt.published_hmt import PublishedSegments


PAGED = {"memory_size": 2, "page_size": 2, "recalled_pages": 2}


def filled(embeddings, block_size=4, recalled=3, file=None, at_once=7):
    """Pages of (n, d), appended `at_once` at a time."""
    pages = MemoryPages.empty(embeddings.shape[1], embeddings.dtype, "cpu", block_size, recalled, file)
    for part in embeddings.split(at_once):
        pages = pages.append(part)
    return pages


@pytest.fixture
def long_tokens():
    """Two rows of 13 segments and a piece, (2, 109)."""
    return torch.randint(3, 61, (2, 109), generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize(
    "page_size, recalled", [(2, 50), (3, 4), (16, 1)], ids=["many pages", "three", "not one full"]
)
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


def test_equals_a_bounded_memory_while_nothing_was_dropped(make_wrapper, long_tokens):
    ids = long_tokens[:, :40]
    expected = make_wrapper(memory_size=5)(ids).logits
    assert torch.equal(make_wrapper(memory_size=5, recalled_pages=1)(ids).logits, expected)


def test_fewer_pages_recall_less(make_wrapper, long_tokens):
    out = make_wrapper(memory_size=2, page_size=2, recalled_pages=1)(long_tokens, output_recall=True)
    counts = [s.shape[1] for s in out.recall_scores[1:13]]
    assert counts[:4] == [1, 2, 3, 4]
    assert max(counts) < 12 and (out.logits - make_wrapper(memory_size=None)(long_tokens).logits).abs().max() > 1e-3


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_any_chunking_is_one_piece(make_wrapper, tokens, chunks):
    model, mask = make_wrapper(**PAGED), torch.ones_like(tokens)
    mask[1, :13] = 0
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=True)
        logits, state = stream(model, tokens, chunks, mask)
    torch.testing.assert_close(logits, whole.logits, atol=ROUNDING, rtol=0)
    assert [len(row) for row in state.pages] == [len(row) for row in whole.state.pages] == [3, 1]


@pytest.mark.parametrize("in_file", [False, True], ids=["RAM", "file"])
def test_saved_restored_and_branched(make_wrapper, long_tokens, tmp_path, in_file):
    model = make_wrapper(memory_size=1, page_size=1, recalled_pages=1)
    start, rest, other = long_tokens[:, :61], long_tokens[:, 61:], long_tokens[:, :48]
    with torch.no_grad():
        whole, expected = model(long_tokens).logits[:, 61:], model(torch.cat([start, other], 1)).logits[:, 61:]
        state = model.new_state(2, page_file=tmp_path / "pages" if in_file else None)
        state = model(start, state=state).state
        state.save(tmp_path / "state.safetensors")
        for again in (state, HMTState.load(tmp_path / "state.safetensors"), state.to("cpu"), state.detach()):
            torch.testing.assert_close(model(rest, state=again).logits, whole, atol=ROUNDING, rtol=0)
            torch.testing.assert_close(model(other, state=again).logits, expected, atol=ROUNDING, rtol=0)
        copied, later = copy.deepcopy(state), model(rest[:, :24], state=state).state
        torch.testing.assert_close(model(other, state=copied).logits, expected, atol=ROUNDING, rtol=0)
        torch.testing.assert_close(model(rest[:, 24:], state=later).logits, whole[:, 24:], atol=ROUNDING, rtol=0)
    assert (tmp_path / "pages").exists() == in_file


def test_two_states_cannot_share_a_page_file(make_wrapper, long_tokens, tmp_path):
    model = make_wrapper(memory_size=1, page_size=1, recalled_pages=1)
    with torch.no_grad():
        first, second = (model.new_state(2, tmp_path / "pages") for _ in range(2))
        with pytest.raises(ValueError, match="no longer the file of this state"):
            model(long_tokens, state=first)
        model(long_tokens, state=second)


def test_beams_take_their_pages_along(make_wrapper, long_tokens):
    model = make_wrapper(memory_size=1, page_size=1, recalled_pages=1)
    with torch.no_grad():
        state = model(long_tokens[:, :61], use_cache=True).state
        state.reorder_cache(torch.tensor([1, 0]))
        logits = model(long_tokens[:, 61:].flip(0), state=state).logits
    torch.testing.assert_close(logits.flip(0), model(long_tokens).logits[:, 61:], atol=ROUNDING, rtol=0)


def test_generates_as_it_reads(make_wrapper, long_tokens):
    model = make_wrapper(memory_size=1, page_size=1, recalled_pages=1)
    ids = model.generate(long_tokens[:, :61], max_new_tokens=30, do_sample=False, eos_token_id=None)
    with torch.no_grad():
        assert torch.equal(ids[:, 61:], model(ids).logits[:, 60:-1].argmax(-1))


def test_training_that_cuts_every_segment_pages_to_a_file(make_wrapper, tokens, tmp_path):
    model = make_wrapper(memory_size=1, page_size=1, recalled_pages=1, bptt_segments=1)
    in_ram = model(tokens, labels=tokens, state=model.new_state(2))
    in_file = model(tokens, labels=tokens, state=model.new_state(2, tmp_path / "pages"))
    in_file.loss.backward()
    assert torch.equal(in_file.logits, in_ram.logits)
    assert len(in_file.state.pages[0]) == 4 and model.memory.wq.grad.any()


def test_what_a_file_cannot_do(make_wrapper, tokens, tmp_path):
    model = make_wrapper(memory_size=1, page_size=1, recalled_pages=1)
    with pytest.raises(ValueError, match="lose their gradient"):
        model(tokens, state=model.new_state(2, tmp_path / "pages"))
    with pytest.raises(ValueError, match=r"set config\.recalled_pages"):
        make_wrapper().new_state(2, tmp_path / "pages")
    with pytest.raises(ValueError, match=r"'pages': None.*'pages': .1, 1"):
        model(tokens, state=make_wrapper(memory_size=1)(tokens, use_cache=True).state)


@pytest.mark.parametrize("in_file", [False, True], ids=["RAM", "file"])
@pytest.mark.parametrize("n", [0, 3, 4, 50, 213])
def test_look_up_returns_the_pages_of_the_best_tags(tmp_path, n, in_file):
    generator = torch.Generator().manual_seed(n)
    embeddings, direction = (torch.randn(c, 8, generator=generator) for c in (n, 1))
    pages = filled(embeddings, file=PageFile(tmp_path / "pages") if in_file else None)
    assert torch.equal(torch.cat([*pages.blocks, pages.rest]), embeddings)  # also after its file has grown
    recalled, ages = pages.look_up(direction)
    size, count = pages.block_size * pages.page_blocks, len(pages.sums)
    assert len(pages) == n and count <= TAGS_PER_EMBEDDING * pages.recalled * size
    scores = [(embeddings[i * size : (i + 1) * size].mean(0) @ direction[0]).item() for i in range(count)]
    best = sorted(sorted(range(count), key=lambda i: -scores[i])[: pages.recalled])
    index = [i for page in best for i in range(page * size, (page + 1) * size)] + list(range(count * size, n))
    assert torch.equal(recalled, embeddings[index])
    assert (n - 1 - ages).tolist() == index


def test_cost_grows_with_the_square_root():
    embeddings = torch.zeros(20_000, 1)
    pages, start = MemoryPages.empty(1, torch.float32, "cpu", 4, 3), 0
    for n in (100, 1000, 5000, 20_000):
        pages, start = pages.append(embeddings[start:n]), n
        tags, recalled = len(pages.sums), len(pages.look_up(torch.ones(1, 1))[0])
        root = (pages.recalled * n) ** 0.5
        assert tags <= 2 * root and recalled <= 2 * root  # what is in no page yet is less than a page
    assert recalled + tags < n / 20


def test_a_fact_ten_thousand_segments_back():
    """A real query finds its memory among ten thousand unrelated ones; without pages it is gone."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, hidden_size=512, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    backbone = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    config = HMTConfig(segment_length=8, sensory_tokens=3, memory_size=4, recalled_pages=8)
    model = HMTWrapper.from_backbone(backbone, config)
    ids = torch.randint(3, 61, (1, 8))
    with torch.no_grad():
        state = model(torch.randint(3, 61, (1, 80)), use_cache=True).state
        fact = PublishedSegments(model).summarize(ids[:, :4])
        everything = torch.cat([fact, torch.randn(1, 10_000, 512)], 1)
        state.bank, state.ends, state.lengths = everything[:, -4:], state.ends + 8 * 9991, (8 * 10_001,)
        state.pages = (filled(everything[0, :-4], block_size=16, recalled=8, at_once=1000),)
        with_pages = model(ids, state=state, output_recall=True)
        state.pages = None
        without = model(ids, state=state, output_recall=True)
    assert with_pages.recall_distance.item() == 10_001
    assert with_pages.recall_scores[0].max() > 0.99
    assert with_pages.recall_scores[0].shape[1] < 1000
    assert without.recall_distance.item() <= 4


def test_pages_train_the_projections():
    torch.manual_seed(0)
    memory = HMTMemory(8, 1, 8)
    torch.nn.init.eye_(memory.wq)
    torch.nn.init.eye_(memory.wk)
    pages = filled(torch.randn(40, 8).requires_grad_())
    recalled, ages = pages.look_up(memory.direction(torch.randn(1, 1, 8))[0])
    memory.recall(torch.randn(1, 1, 8), recalled[None], ages[None] >= 0)[0].sum().backward()
    assert memory.wq.grad.any() and memory.wk.grad.any()
