"""Clients that let a model read and write: pipelines, servers, evaluation harnesses."""

from scripts.client_checks.checks import check, load, load_tokenizer, texts, write_jsonl


@check("pipeline, padded batch", "transformers", "texts that differ from those of single prompts", 0)
def pipeline(folder):
    from transformers import pipeline

    generate = pipeline("text-generation", str(folder), trust_remote_code=True)
    prompts, options = texts(4), dict(max_new_tokens=12, do_sample=False)
    single = [generate(prompt, **options)[0]["generated_text"] for prompt in prompts]
    generate.tokenizer.padding_side = "left"
    batched = [reply[0]["generated_text"] for reply in generate(prompts, batch_size=4, **options)]
    return float(sum(a != b for a, b in zip(single, batched)))


def lm_eval_samples(folder, batch_size, **task):
    """What lm-eval logs of a task over a few texts."""
    import lm_eval

    questions = [{"text": text, "choices": ["forget", " the key of a layer", " a"]} for text in texts(6)]
    task = {
        "task": "check",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": write_jsonl(folder / "questions.jsonl", questions)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        **task,
    }
    result = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "trust_remote_code": True, "dtype": "float32"},
        tasks=[task],
        batch_size=batch_size,
        device="cpu",
        bootstrap_iters=0,
    )
    return sorted(result["samples"]["check"], key=lambda sample: sample["doc_id"])


@check("lm-eval, multiple choice", "lm-eval", "difference of log-likelihoods between batches of 1 and 4", 1e-4)
def multiple_choice(folder):
    task = dict(output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target=0)
    single, batched = (lm_eval_samples(folder, size, **task) for size in (1, 4))
    likelihoods = [[float(reply[0][0]) for sample in run for reply in sample["resps"]] for run in (single, batched)]
    return max(abs(a - b) for a, b in zip(*likelihoods))


@check("lm-eval, generate_until", "lm-eval", "replies that differ between batches of 1 and 4", 0)
def generate_until(folder):
    task = dict(
        output_type="generate_until",
        doc_to_target="none",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        metric_list=[{"metric": "exact_match"}],
    )
    single, batched = (lm_eval_samples(folder, size, **task) for size in (1, 4))
    return float(sum(a["resps"] != b["resps"] for a, b in zip(single, batched)))
