"""The forgetting curve as an evaluate module: it measures how far back a language model remembers."""

import datasets
import evaluate

from hf_longctx.metrics import evaluate_modules  # From: hf-longctx


_DESCRIPTION = """
The forgetting curve measures how far back a causal language model remembers. The model reads a passage S twice, and
once after an unrelated passage I of the same length. Its accuracy in the second half of the last S is the copy
accuracy after S, and the LM accuracy after I. The fine length is the longest S with a copy accuracy above 99 %. The
coarse length is the longest S with a copy accuracy at least one percentage point above the LM accuracy.
"""

_KWARGS_DESCRIPTION = """
Either a model:
    model: a causal language model of transformers, or its name or folder.
    corpus (str, list of str or list of int): corpus to draw S and I from, its path, or its token ids, at least
        three times as long as the longest passage. None for data_type="random".
    tokenizer: tokenizer for the corpus, or its name. Default: the model's tokenizer.
    Further arguments are passed to hf_longctx.metrics.forgetting_curve and hf_longctx.metrics.Run: lengths, repeats,
        seed, journal ...
Or predictions and references, one for each passage S of n tokens:
    predictions (list of [copy, lm], each a list of n int): ids predicted for the n tokens of the last S in
        [bos] S [bos] S [eos] (copy) and in [bos] I [bos] S [eos] (lm), by the logits one position earlier.
    references (list of list of int): the n ids of S. Passages of one length are the repeats of one point.
Returns:
    summary (str): the result in one line.
    fine_low, coarse_low (int): lower ends of the 95 % intervals of the fine and the coarse length in tokens; 0 if no
        length is significant. Use them to compare models.
    fine_high, coarse_high (int): upper ends of these intervals (exclusive); None if no length is significant.
    intervals_95 (dict): 95 % interval of each length ("fine", "coarse"), with the fields of
        hf_longctx.metrics.curve.intervals.LengthInterval.
    fine_length, coarse_length (int): the paper's lengths in tokens: the longest tested length that passes, possibly by
        chance; 0 if no length passes.
    fine_open_ended, coarse_open_ended (bool): whether the longest tested length still passes.
    settings (dict): settings of the measurement.
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
        """Measure a model, or score the given predictions and those from earlier calls of `add`."""
        if evaluate_modules.measures(self, model, predictions, references):
            return evaluate_modules.measure_curve(model, **options)
        return super().compute(predictions=predictions, references=references, **options)

    def _compute(self, predictions, references):
        return evaluate_modules.curve_result(evaluate_modules.score_predictions(predictions, references))
