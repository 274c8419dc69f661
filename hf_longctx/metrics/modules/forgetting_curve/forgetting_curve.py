"""The forgetting curve as a module of the evaluate library: how far does a language model remember?"""

import datasets
import evaluate

from hf_longctx.metrics import evaluate_modules  # From: hf-longctx


_DESCRIPTION = """
The forgetting curve tells how far a causal language model remembers. It copies a text S that it has read, by teacher
forcing, and is compared with itself after an unrelated text I of the same length. The fine length is the longest S
with more than 99 % of the second half predicted right; the coarse length, the longest with at least 1 % more than
after I.
"""

_KWARGS_DESCRIPTION = """
Either a model and a corpus:
    model: a causal language model of transformers, or its name or folder.
    corpus (str, list of str or list of int): the text to draw S and I from, its path, or its token ids. At least three times as
        long as the longest length. None for data_type="random".
    tokenizer: for a text, or its name; default: found by the model's name. Random data take from it which ids are special.
    lengths (list of int): tokens of S, ascending. Default: 16 up to half of the context that the model claims.
    model_kwargs (dict): keywords of from_pretrained for a model given by its name: revision, token, trust_remote_code ...
    further options of hf_longctx.metrics.forgetting_curve: repeats, seed, data_type, bos_token_id, ...
        A journal is kept in the file of that name with .forgetting_curve appended. BOS and EOS default to the tokenizer's.
Or predictions and references, one of each per target S of n tokens:
    predictions (list of [copy, lm], each a list of n int): the ids predicted for the n tokens of the last S in
        [bos] S [bos] S [eos] (copy) and in [bos] I [bos] S [eos] (lm), each by the logits one position before.
    references (list of list of int): the n ids of S. Targets of one length are the repeats of one point.
Returns:
    summary (str): the result in one line, beginning with what is 95 % sure.
    fine_low, fine_high, coarse_low, coarse_high (int): where the lengths lie for sure (95 %), in tokens: from low on (0
        if none is sure) to below high (None if no end is sure). For comparisons take these.
    intervals_95 (dict): the same, with repeats_needed, longest, text_too_short.
    fine_length, coarse_length (int): the paper's, in tokens: the longest that passes, even by chance; 0 if none does.
    fine_open_ended, coarse_open_ended (bool): the longest tested length still passes; read it as "more than".
    settings (dict): how it was measured.
    memory_lengths (dict): five definitions of memory length; see hf_longctx.metrics.curve.lengths.memory_lengths.
    points (list of dict): counts, means, standard deviations and p-values for each length.
Examples:
    >>> curve = evaluate.load("forgetting_curve")
    >>> S = [11, 12, 13, 14]
    >>> result = curve.compute(predictions=[[[0, 0, 13, 14], [0, 0, 0, 14]]], references=[S])
    >>> print(result["points"][0]["copy_mean"], result["points"][0]["lm_mean"])
    1.0 0.5
"""

_CITATION = """
@article{liu2024forgetting,
    title={Forgetting Curve: A Reliable Method for Evaluating Memorization Capability for Long-context Models},
    author={Liu, Xinyu and Zhao, Runsong and Huang, Pengcheng and Xiao, Chunyang and Li, Bei and Wang, Jingang and
        Xiao, Tong and Zhu, Jingbo},
    journal={arXiv preprint arXiv:2410.04727},
    year={2024}
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class ForgettingCurve(evaluate.Metric):
    def _info(self):
        ids = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": datasets.Sequence(ids), "references": ids}),
            reference_urls=["https://arxiv.org/abs/2410.04727"],
        )

    def compute(self, *, predictions=None, references=None, model=None, corpus=None, tokenizer=None, **options):
        """Measure a model, or score predictions: those given here and those added before."""
        scored = {"predictions": predictions, "references": references}
        if evaluate_modules.measures(self, model, corpus, options, **scored):
            return evaluate_modules.measure_curve(model, corpus, tokenizer, **options)
        return super().compute(**scored)

    def _compute(self, predictions, references):
        return evaluate_modules.curve_result(evaluate_modules.score_predictions(predictions, references))
