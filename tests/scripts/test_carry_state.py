"""The state of a memory goes from chunk to chunk of a document."""

import numpy as np
import pytest
import torch


pytest.importorskip("peft", reason="fine-tuning needs peft: pip install 'hf-longctx[training]'")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.training.data import collate
from scripts.carry_state import CarriesStates, DocumentStreams


pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

EOS, T = 2, 12
FP32_SUM = 64 * torch.finfo(torch.float32).eps  # the loss is a float32 sum of up to 22 positive terms
SIZES = [5, 50, 12, 31, 2, 70, 9]  # tokens of the documents, with their EOS
DOCUMENTS = [
    [*torch.randint(3, 61, (size - 1,), generator=torch.Generator().manual_seed(size)).tolist(), EOS] for size in SIZES
]
TOKENS = np.array([token for document in DOCUMENTS for token in document], np.uint16)


def tiny_llama(vocab_size=61):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, max_position_embeddings=64, **sizes))
    with torch.no_grad():  # far from the near-uniform start, so that every input matters visibly
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() == 2 else 1)
    return model


def tiny_hmt(**settings):
    settings = dict(segment_length=8, sensory_tokens=3, memory_size=3) | settings
    return HMTWrapper.from_backbone(tiny_llama(), HMTConfig(**settings))


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_streams_read_documents_in_order_and_mark_where_one_begins(streams):
    chunks = DocumentStreams(TOKENS, T, EOS, streams)
    read = [[] for _ in range(streams)]
    for i in range(len(chunks)):
        item = chunks[i]
        assert item["stream"] == i % streams
        real = item["attention_mask"].bool()
        ids = item["input_ids"][real].tolist()
        assert item["labels"].tolist() == ids + [-100] * (T - len(ids))
        assert real[: len(ids)].all()
        if item["begins"]:
            read[i % streams].append([])
        read[i % streams][-1] += ids
        assert ids[-1] == EOS or len(ids) == T
    pieces = [piece for stream in read for piece in stream]
    if streams == 1:
        assert pieces == DOCUMENTS
    joined = [token for piece in pieces for token in piece]
    assert joined == TOKENS[: len(joined)].tolist() and len(TOKENS) - len(joined) < streams * T
    assert chunks.text_share() == pytest.approx(len(TOKENS) / (18 * T))
    with pytest.raises(ValueError, match="the text has 18 chunks of at most 12 tokens; 21 streams"):
        DocumentStreams(TOKENS, T, EOS, 21)


def test_tokens_without_a_border_are_one_document():
    chunks = DocumentStreams(TOKENS, T, None, 2)
    assert [item["begins"].item() for item in (chunks[i] for i in range(len(chunks)))] == [True, True] + [False] * 12


class MyTrainer(CarriesStates, Trainer):
    pass


def make_trainer(model, folder, dataset, **arguments):
    pytest.importorskip("accelerate")
    settings = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 1e9}
    settings |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    settings |= {"remove_unused_columns": False, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    arguments = TrainingArguments(str(folder), **settings | arguments)
    return MyTrainer(
        model,
        arguments,
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=collate,
        processing_class=None,
    )


@pytest.mark.parametrize(
    "passes, settings", [(1, {}), (2, {"recall": False}), (2, {"recalled_pages": 1, "page_size": 1})], ids=str
)
def test_each_chunk_has_the_loss_that_it_has_behind_the_chunks_before_it(settings, passes, tmp_path):
    """Chunks of 12 tokens and segments of 8: rows differ in their segments, and some segments stay open."""
    model = tiny_hmt(**settings).double()
    chunks = DocumentStreams(TOKENS, T, EOS, 2 * passes)
    losses, alone = [], {}
    with torch.no_grad():
        trainer = make_trainer(model, tmp_path, chunks)
        for first in range(0, len(chunks), 2):
            batch = collate([chunks[first], chunks[first + 1]])
            losses.append(trainer.compute_loss(model.eval(), batch, num_items_in_batch=1))
            expected = 0
            for row in range(2):
                ids, stream = batch["input_ids"][row, None], batch["stream"][row].item()
                ids = ids[:, : batch["attention_mask"][row].sum()]
                state = None if batch["begins"][row] else alone[stream]
                output = model(ids, labels=ids, state=state, use_cache=True, num_items_in_batch=1)
                expected, alone[stream] = expected + output.loss, output.state
            torch.testing.assert_close(losses[-1], expected, atol=0, rtol=FP32_SUM)
    assert max(state.segment for state in alone.values()) > 2


def test_the_state_has_no_graph(tmp_path):
    model = tiny_hmt()
    trainer = make_trainer(model, tmp_path, DocumentStreams(TOKENS, T, EOS, 2), max_steps=3)
    trainer.train()
    (state,) = trainer.states.values()
    assert not any(value.requires_grad for value in state.tensors().values())
    assert state.lengths == (24, 12)  # two chunks of the second document; the first of the sixth


def test_evaluation_begins_without_states_and_leaves_those_of_the_training(tmp_path):
    chunks = DocumentStreams(TOKENS, T, EOS, 2)
    trainer = make_trainer(tiny_hmt(), tmp_path, chunks, max_steps=3)
    fresh = trainer.evaluate()["eval_loss"]
    trainer.states = {0: trainer.model.new_state(2)}
    before = dict(trainer.states)
    assert trainer.evaluate()["eval_loss"] == fresh
    assert trainer.states == before


def test_dropout_goes_on_as_states_do(tmp_path):
    weights = []
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        model = tiny_hmt()
        for layer in model.backbone.model.layers:
            layer.self_attn.attention_dropout = 0.5
        steps = dict(max_steps=3, save_strategy="steps", save_steps=2)
        trainer = make_trainer(model, tmp_path, DocumentStreams(TOKENS, T, EOS, 2), **steps)
        trainer.train(resume_from_checkpoint=checkpoint)
        weights.append(model.state_dict())
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    "batch, message",
    [
        (
            lambda chunks: {"input_ids": chunks[0]["input_ids"]},
            "without a stream to carry a state in.*remove_unused_columns",
        ),
        (
            lambda chunks: collate([chunks[4], chunks[5]]),
            "2 rows from stream 0 on .* of no rows. Read the chunks in",
        ),
        (lambda chunks: collate([chunks[4]]), "1 rows from stream 0 on go on .* of 2 rows"),
    ],
    ids=["columns removed", "chunks shuffled", "other rows at once"],
)
def test_a_state_that_does_not_fit_the_batch_is_refused(batch, message, tmp_path):
    chunks = DocumentStreams(TOKENS, T, EOS, 2)
    trainer = make_trainer(tiny_hmt(), tmp_path, chunks)
    if "of 2 rows" in message:
        trainer.compute_loss(trainer.model, collate([chunks[0], chunks[1]]))
    with pytest.raises(ValueError, match=message):
        trainer.compute_loss(trainer.model, batch(chunks))
