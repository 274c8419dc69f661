"""A client that scores: lm-eval."""

from scripts.client_checks.checks import check, texts, write_jsonl


def log_likelihoods(folder, batch_size):
    """Return the log-likelihoods of all choices of a few questions."""
    import lm_eval

    questions = [{"text": text, "choices": ["forget", " the key of a layer", " a"]} for text in texts(6)]
    task = {
        "task": "check",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": write_jsonl(folder / "questions.jsonl", questions)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
    }
    result = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "trust_remote_code": True, "dtype": "float32"},
        tasks=[task],
        batch_size=batch_size,
        device="cpu",
        bootstrap_iters=0,
    )
    samples = sorted(result["samples"]["check"], key=lambda sample: sample["doc_id"])
    return [float(response[0][0]) for sample in samples for response in sample["resps"]]


@check("lm-eval, multiple choice", "lm-eval", "difference of log-likelihoods between batches of 1 and 4", 1e-4)
def multiple_choice(folder):
    return max(abs(a - b) for a, b in zip(log_likelihoods(folder, 1), log_likelihoods(folder, 4)))
