"""The forgetting curve as a module of the evaluate library: how far does a language model remember?"""

import datasets
import evaluate

from hf_longctx.metrics import evaluate_modules  # From: hf-longctx


_DESCRIPTION = """
The forgetting curve measures how far back a causal language model remembers. With teacher forcing, the model copies a
passage S that it has read, and is compared with itself after an unrelated passage I of the same length. The fine length
is the longest S for which the model predicts more than 99 % of the second half right. The coarse length is the longest
S for which it predicts at least 1 % more than after I.
"""

_KWARGS_DESCRIPTION = """
Either a model:
    model: a causal language model of transformers, or its name or folder.
    corpus (str, list of str or list of int): corpus to draw S and I from, its path, or its token ids, at least
        three times as long as the longest passage. None for data_type="random".
    tokenizer: tokenizer for the corpus, or its name. Default: the model's.
    model_kwargs (dict): keywords of from_pretrained for a model given by its name: revision, token, trust_remote_code ...
    further keywords of hf_longctx.metrics.forgetting_curve and hf_longctx.metrics.Run: lengths, repeats, seed, journal ...
Or predictions and references, one for each passage S of n tokens:
    predictions (list of [copy, lm], each a list of n int): ids predicted for the n tokens of the last S in
        [bos] S [bos] S [eos] (copy) and in [bos] I [bos] S [eos] (lm), by the logits one position earlier.
    references (list of list of int): the n ids of S. Passages of one length are the repeats of one point.
Returns:
    summary (str): the result in one line.
    fine_low, fine_high, coarse_low, coarse_high (int): ends of the 95 % intervals of the lengths, in tokens: at least low (0
        if no length is significant) and below high (None if no end is significant). Compare models by these.
    intervals_95 (dict): the same, with longest, text_too_short.
    fine_length, coarse_length (int): the paper's, in tokens: the longest that passes, even by chance; 0 if none does.
    fine_open_ended, coarse_open_ended (bool): whether the longest tested length still passes.
    settings (dict): how the curve was measured.
    memory_lengths (dict): five definitions of memory length; see hf_longctx.metrics.curve.lengths.memory_lengths.
    points (list of dict): counts, means, standard deviations and p values for each length.
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

    def compute(self, *, predictions=None, references=None, model=None, **options):
        """Measure a model, or score the predictions passed here and added before."""
        if evaluate_modules.measures(self, model, predictions, references):
            return evaluate_modules.measure_curve(model, **options)
        return super().compute(predictions=predictions, references=references, **options)

    def _compute(self, predictions, references):
        return evaluate_modules.curve_result(evaluate_modules.score_predictions(predictions, references))
