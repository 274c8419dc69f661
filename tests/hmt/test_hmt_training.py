"""Losses, truncated backpropagation, checkpointing, compilation, Trainer and DDP."""

import weakref
from functools import partial

import pytest
import torch
from gradients import assert_same_gradients, enable_checkpointing, gradients
from tiny_hmt import NORM, ROUNDING, tiny_llama
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments

from hf_longctx.hmt import HMTConfig, HMTOutput, HMTWrapper


FP32_MEAN = 64 * torch.finfo(torch.float32).eps  # the loss is a float32 mean of up to 84 positive terms


def token_losses(logits, ids):
    return cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")  # (B, T - 1)


@pytest.mark.parametrize("mode", ["single_pass", "paper"])
def test_losses_are_what_they_say(make_wrapper, tokens, mode):
    model = make_wrapper(recall_mode=mode)
    labels = tokens.clone()
    labels[0, :20] = -100
    losses = token_losses(model(tokens).logits, tokens)
    scored = labels[:, 1:] != -100
    assert_close = partial(torch.testing.assert_close, check_dtype=False, atol=0, rtol=FP32_MEAN)
    assert_close(model(tokens, labels=labels).loss, losses[scored].mean())
    late = scored & (torch.arange(42) % 8 >= 4)
    assert_close(model(tokens, labels=labels, score_from=4).loss, losses[late].mean())
    state = model(tokens[:, :13], use_cache=True).state
    found = model(tokens[:, 13:], labels=labels[:, 13:], state=state, score_from=4).loss
    assert_close(found, losses[late & (torch.arange(42) >= 13)].mean())
    assert_close(model(tokens, labels=labels, num_items_in_batch=100).loss, losses[scored].sum() / 100)
    assert_close(model(tokens, labels=labels, loss_scope="last").loss, losses[:, -8:].mean())
    model.configure(loss_scope="last")
    assert_close(model(tokens, labels=labels).loss, losses[:, -8:].mean())
    assert_close(model(tokens[:, :6], labels=tokens[:, :6]).loss, losses[:, :5].mean())


def test_recall_report(make_wrapper, tokens):
    out = make_wrapper()(tokens, output_recall=True)
    assert [None if s is None else tuple(s.shape) for s in out.recall_scores] == [
        None,
        *[(2, n) for n in (1, 2, 3, 4)],
        None,  # 3 tokens: its query is not complete
    ]
    for n, scores in enumerate(out.recall_scores):
        expected = torch.zeros(2, dtype=torch.long) if scores is None else min(n, 4) - scores.argmax(1)
        assert torch.equal(out.recall_distance[n], expected)
        if scores is not None:
            torch.testing.assert_close(scores.sum(1), torch.ones(2).double())
    assert [tuple(m.shape) for m in out.memories] == [(2, 1, 16)] * 5, "of full segments"
    assert isinstance(out, HMTOutput)
    model, scores = make_wrapper(memory_size=None), []
    recall = model.memory.recall

    def recorded(*arguments):
        assert sum(x() is not None for x in scores) <= 1  # the scores of a long document would need too much memory
        prompt, weights = recall(*arguments)
        scores.append(weakref.ref(weights))
        return prompt, weights

    model.memory.recall = recorded
    with torch.no_grad():
        assert model(tokens).recall_scores is None
    assert len(scores) == 4


@pytest.mark.parametrize("settings", [{}, {"recall": False}, {"recall_mode": "paper"}], ids=str)
def test_truncation_equals_detached_chunks(make_wrapper, tokens, settings):
    """Segments are counted from the start of the sequence, not of the call."""
    model, labels, start = make_wrapper(**settings), tokens.clone(), 5
    labels[:, [16, 32]] = -100  # the first token of a call has no prediction
    state = model(tokens[:, :start], use_cache=True).state.detach()
    rest = {"labels": labels[:, start:], "state": state, "num_items_in_batch": 1}
    model(tokens[:, start:], bptt_segments=2, **rest).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    model.configure(bptt_segments=2)
    model(tokens[:, start:], **rest).loss.backward()
    assert_same_gradients(gradients(model), expected)
    model.configure(bptt_segments=None)
    model.zero_grad()
    for a, b in ((start, 16), (16, 32), (32, 43)):
        out = model(tokens[:, a:b], labels=labels[:, a:b], state=state, num_items_in_batch=1)
        out.loss.backward()
        state = out.state.detach()
    assert_same_gradients(gradients(model), expected)


def saved_numbers(model, ids):
    """Return how many numbers, without parameters, a training forward saves for backward, and its gradients."""
    owned, sizes = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in owned:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().size()
        return x

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(ids, labels=ids).loss
    loss.backward()
    return sum(sizes.values()), gradients(model)


@pytest.mark.parametrize("of", ["segments", "layers"])
@pytest.mark.parametrize("settings", [{}, {"neural_cache_weight": 0.2}, {"recall_mode": "paper"}], ids=str)
def test_checkpointing_saves_memory_and_changes_no_gradient(make_wrapper, tokens, settings, of):
    model = make_wrapper(**settings).train()
    plain, expected = saved_numbers(model, tokens)
    enable_checkpointing(model if of == "segments" else model.backbone)
    assert any(getattr(x, "gradient_checkpointing", False) for x in model.backbone.modules()) == (of == "layers")
    checkpointed, recomputed = saved_numbers(model, tokens)
    assert_same_gradients(recomputed, expected, NORM)
    assert checkpointed < plain / (3 if of == "segments" else 1)


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "no checkpointing"])
@pytest.mark.parametrize("scope", ["all", "last"])
def test_the_loss_does_not_depend_on_the_logits_kept(make_wrapper, tokens, scope, checkpointing):
    model, results = make_wrapper(loss_scope=scope).train(), []
    if checkpointing:
        enable_checkpointing(model)
    for arguments in ({}, {"logits_to_keep": 1}):
        model.zero_grad()
        out = model(tokens, labels=tokens, score_from=2, num_items_in_batch=70, **arguments)
        out.loss.backward()
        results.append((out.loss, gradients(model)))
    assert out.logits.shape == (2, 1, 61)
    (loss, gradient), (same_loss, same_gradient) = results
    torch.testing.assert_close(same_loss, loss, atol=0, rtol=FP32_MEAN)
    largest = max(x.abs().max().item() for x in gradient.values())  # the gradient of the logits is rounded to float32
    for name, x in gradient.items():
        torch.testing.assert_close(same_gradient[name], x, atol=FP32_MEAN * largest, rtol=0)


def largest_tensor_alive(model, ids, **arguments):
    """Maximum number of logits alive after a pass of the head; weak references count them."""
    alive, largest = [], 0

    def count(module, args, output):
        nonlocal largest
        alive.append(weakref.ref(output))
        largest = max(largest, sum(x().numel() for x in alive if x() is not None))

    hook = model.get_output_embeddings().register_forward_hook(count)
    model(ids, labels=ids, **arguments)
    hook.remove()
    return largest


def test_a_loss_keeps_the_logits_of_one_segment(make_wrapper, tokens):
    """Perplexity and training with checkpointing: numbers do not grow with the text, whatever the head is."""
    model = make_wrapper(summary_batch=1)
    model.set_output_embeddings(torch.nn.Sequential(model.get_output_embeddings()))
    short, long = tokens.repeat(1, 2), tokens.repeat(1, 8)
    with torch.no_grad():
        sizes = [largest_tensor_alive(model, ids, logits_to_keep=1) for ids in (short, long)]
        assert sizes[0] == sizes[1] <= 2 * 2 * 8 * 61
    model.train()
    enable_checkpointing(model)
    assert largest_tensor_alive(model, long, logits_to_keep=1) == sizes[0]


def test_summaries_go_through_together(make_wrapper, tokens):
    model, rows = make_wrapper(summary_batch=7, recall_mode="paper"), []  # two rows of three segments fit
    model.backbone.model.register_forward_hook(lambda module, args, out: rows.append(tuple(out[0].shape[:2])))
    with torch.no_grad():
        together = model(tokens[:, :40]).logits
    # segments 1 to 3 summarised together; segment 4; segment 0 read, then the others
    assert rows == [(6, 6), (2, 6), (2, 10), *4 * [(2, 13)]]
    one_by_one = make_wrapper(summary_batch=1, recall_mode="paper")
    torch.testing.assert_close(one_by_one(tokens[:, :40]).logits, together, atol=ROUNDING, rtol=0)


def test_an_export_is_of_one_length(tokens):
    model = HMTWrapper.from_backbone(tiny_llama(num_hidden_layers=1), HMTConfig(segment_length=8, sensory_tokens=3))
    options = {"kwargs": {"use_cache": False}, "strict": False}
    exported = torch.export.export(model.eval(), (tokens[:, :9],), **options).module()
    torch.testing.assert_close(exported(tokens[:, 20:29], use_cache=False).logits, model(tokens[:, 20:29]).logits)


def test_a_compiled_backbone_is_one_graph_per_shape(tokens):
    config = HMTConfig(segment_length=8, sensory_tokens=3, memory_size=4)
    model, graphs = HMTWrapper.from_backbone(tiny_llama(num_hidden_layers=1), config), []
    tokens = tokens[:, :32]
    expected = model(tokens).logits
    torch._dynamo.reset()

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model.backbone.compile(backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected, atol=ROUNDING, rtol=0)
        compiled = len(graphs)
        model(tokens)
    assert compiled == len(graphs) == 3  # segment 0; first parts; second parts
    torch._dynamo.reset()


def test_autocast(make_wrapper, tokens):
    model = make_wrapper().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(tokens, labels=tokens)
        out.loss.backward()
        assert model.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None).shape == (2, 55)
    assert out.logits.dtype == torch.bfloat16
    torch.testing.assert_close(out.loss, model(tokens, labels=tokens).loss, rtol=0.02, atol=0)


def trained(model, rows, folder, **arguments):
    pytest.importorskip("accelerate")
    settings = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 1e9}
    settings |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    args = TrainingArguments(str(folder), **settings, **arguments)
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return trainer


@pytest.mark.parametrize("scope", ["all", "last"])
def test_trainer_accumulates_and_checkpoints_exactly(make_wrapper, tokens, tmp_path, llama, scope):
    """Two accumulated rows, with checkpointing, make the step of one batch of two."""
    start, results = {n: p.clone() for n, p in llama.named_parameters()}, []
    rows = [{"input_ids": row, "labels": row.clone()} for row in (tokens if scope == "all" else tokens[:, :40])]
    if scope == "all":
        rows[1]["labels"][:7] = -100  # unequal numbers of labels
    new_name, old_name = "activation_checkpointing", "gradient_checkpointing"
    checkpointing = new_name if new_name in TrainingArguments.__dataclass_fields__ else old_name
    for size, accumulation, checkpoints in ((2, 1, False), (1, 2, True)):
        llama.load_state_dict(start)
        model = make_wrapper(loss_scope=scope)
        arguments = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation, "max_steps": 1}
        trainer = trained(model, rows, tmp_path, **arguments, **{checkpointing: checkpoints})
        assert model.gradient_checkpointing == checkpoints
        results.append({n: p.detach().clone() for n, p in model.named_parameters()})
    assert_same_gradients(*results)
    assert not torch.equal(results[0]["memory.wq"], make_wrapper().memory.wq)
    assert trainer.evaluate()["eval_loss"] > 0
    trainer.save_model(tmp_path / "model")
    torch.testing.assert_close(
        type(model).from_pretrained(tmp_path / "model")(tokens).logits, model.eval()(tokens).logits
    )
