"""The per-token loss as a module of the evaluate library: up to where does a model make use of its context?"""

import datasets
import evaluate

from hf_longctx.metrics import evaluate_modules  # From: hf-longctx


_DESCRIPTION = """
The per-token loss L(i) is the mean negative log-probability, in nats, of the i-th token of a text, given those before
it. While it falls with i, the model makes use of what it read that far back; where it stays level, more context is of no
use to it. The perplexity P(l) = exp(mean of L(1) .. L(l)) is given beside it.
"""

_KWARGS_DESCRIPTION = """
Either a model and a corpus:
    model: a causal language model of transformers, or its name or folder.
    corpus (str, list of str or list of int): the text, its path, or its token ids.
    tokenizer: for a text, or its name; default: found by the model's name.
    context_length (int): tokens per sequence. Default: the context that the model claims.
    model_kwargs (dict): keywords of from_pretrained for a model given by its name: revision, token, trust_remote_code ...
    further options of hf_longctx.metrics.position_loss: sequences, bos_token_id, ...
        A journal is kept in the file of that name with .position_loss appended. The BOS defaults to the tokenizer's.
Or predictions:
    predictions (list of list of float): per sequence the log-probability of each of its tokens, natural logarithm, the
        first included. All sequences have one length. There are no references: the tokens are in the probabilities.
Returns:
    final_perplexity (float): of all positions.
    summary (str): the result in one line.
    loss (list of float): L(1), L(2), ... in nats, not smoothed.
    perplexity (dict): P(l) at powers of two and at the end, keys as strings.
    sequences (int), settings (dict): how it was measured.
Examples:
    >>> loss = evaluate.load("position_loss")
    >>> result = loss.compute(predictions=[[-1.0, -0.5], [-2.0, -0.5]])
    >>> print(result["loss"])
    [1.5, 0.5]
"""

_CITATION = """
@inproceedings{lin2025forgetting,
    title={Forgetting Transformer: Softmax Attention with a Forget Gate},
    author={Lin, Zhixuan and Nikishin, Evgenii and He, Xu Owen and Courville, Aaron},
    booktitle={International Conference on Learning Representations},
    year={2025}
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class PositionLoss(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": datasets.Sequence(datasets.Value("float64"))}),
            reference_urls=["https://arxiv.org/abs/2503.02130"],
        )

    def compute(self, *, predictions=None, references=None, model=None, corpus=None, tokenizer=None, **options):
        """Measure a model, or average log-probabilities: those given here and those added before."""
        if references is not None:
            raise ValueError("position_loss takes no references: predictions are the log-probabilities of the tokens.")
        if evaluate_modules.measures(self, model, corpus, options, predictions=predictions):
            return evaluate_modules.measure_loss(model, corpus, tokenizer, **options)
        return super().compute(predictions=predictions)

    def _compute(self, predictions):
        return evaluate_modules.loss_result(evaluate_modules.average_log_probs(predictions))
