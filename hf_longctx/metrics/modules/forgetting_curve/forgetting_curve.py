"""The forgetting curve as an evaluate module: it measures how far back a language model remembers."""

import datasets
import evaluate

from hf_longctx.metrics import evaluate_modules  # From: hf-longctx


_DESCRIPTION = """
The forgetting curve measures how far back a causal language model remembers. The model reads two inputs. In the
first, a passage S occurs twice. In the second, S follows an unrelated passage I of the same length. The accuracy in
the second half of the last S is the copy accuracy in the first input, and the LM accuracy in the second. The fine
length is the longest S with a copy accuracy above 99 %. The coarse length is the longest S with a copy accuracy at
least one percentage point above the LM accuracy.
"""

_KWARGS_DESCRIPTION = """
Either a model:
    model: a causal language model of transformers, its name, or its folder.
    corpus (str, list of str or list of int): corpus of S and I: text, path or token ids. The corpus must be at least
        three times as long as the longest passage. None for data_type="random".
    tokenizer: tokenizer for the corpus, or its name. Default: the model's tokenizer.
    Further arguments, such as lengths, repeats, seed and journal, are passed to hf_longctx.metrics.forgetting_curve
        and hf_longctx.metrics.Run.
Or predictions and references, one for each passage S of n tokens:
    predictions (list of [copy, lm], each a list of n int): predicted ids for the n tokens of the last S. The input is
        [bos] S [bos] S [eos] for copy, and [bos] I [bos] S [eos] for lm.
    references (list of list of int): the n ids of S. Passages of equal length are repeats of the same point.
Returns:
    summary (str): the result in one line.
    fine_low, coarse_low (int): lower ends of the 95 % intervals of the fine and the coarse length in tokens; 0 if no
        length is significant. Use them to compare models.
    fine_high, coarse_high (int): upper ends of these intervals (exclusive); None if no length is significant.
    intervals_95 (dict): 95 % interval of each length ("fine", "coarse"), with the fields of
        hf_longctx.metrics.curve.intervals.LengthInterval.
    fine_length, coarse_length (int): the paper's lengths in tokens, i.e. the longest tested length that passes. 0 if
        no length passes. A length may pass by chance.
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
        """Measure a model, or score predictions. Predictions from earlier calls of `add` are included."""
        if evaluate_modules.measures(self, model, predictions, references):
            return evaluate_modules.measure_curve(model, **options)
        return super().compute(predictions=predictions, references=references, **options)

    def _compute(self, predictions, references):
        return evaluate_modules.curve_result(evaluate_modules.score_predictions(predictions, references))
