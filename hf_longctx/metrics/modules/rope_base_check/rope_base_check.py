"""The bound on the RoPE base as a module of the evaluate library: does the base support the claimed context?"""

import datasets
import evaluate

from hf_longctx.metrics import evaluate_modules  # From: hf-longctx


_DESCRIPTION = """
With a rotary position embedding (RoPE), a query prefers a similar key to a random one only up to a distance that
depends on the base. This module checks this bound at a model's claimed context, or for pairs of a base and a context.
It is a screening number: below the bound, the paper found low perplexity but poor long-distance retrieval.
"""

_KWARGS_DESCRIPTION = """
Either a model:
    model: a model or configuration of transformers, or its name or folder. Weights are not loaded.
    context_length (int): context to check, in tokens. Default: the context that the model claims.
    minimum_base (bool): whether to compute the smallest base too, which takes seconds for long contexts. Default: True.
    model_kwargs (dict): keywords of from_pretrained for a model given by its name: revision, token, trust_remote_code ...
Or predictions and references:
    predictions (list of float): RoPE bases.
    references (list of int): context length that each base should support, in tokens.
    head_dim (int): dimensions of a query or key head, all of which rotate.
Returns:
    for a model, the report of hf_longctx.metrics.rope_report: verdict ("holds"; "holds within windows" if no layer with
    RoPE sees the whole context; "violated"; "inconclusive" if half of the head or more does not rotate, so that no base
    violates the bound; or "no RoPE"), holds (bool; None for the last two), claimed_context, claimed_by, groups (list of
    dict: for each kind of layers the base, scaling, verdict, context_bound, negative_distances, minimum_base and
    settled_base), notes (what is assumed), caveat.
    For pairs, holds (float), the share of pairs that hold, and lists: verdicts, context_bounds, minimum_bases,
    settled_bases.
Examples:
    >>> check = evaluate.load("rope_base_check")
    >>> result = check.compute(predictions=[10000.0, 500000.0], references=[8192, 8192], head_dim=128)
    >>> print(result["verdicts"])
    ['violated', 'holds']
"""

_CITATION = """
@article{men2024base,
    title={Base of RoPE Bounds Context Length},
    author={Men, Xin and Xu, Mingyu and Wang, Bingning and Zhang, Qingyu and Lin, Hongyu and Han, Xianpei and
        Chen, Weipeng},
    journal={arXiv preprint arXiv:2405.14591},
    year={2024}
}
"""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class RopeBaseCheck(evaluate.Metric):
    def _info(self):
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
            reference_urls=["https://arxiv.org/abs/2405.14591"],
        )

    def compute(self, *, predictions=None, references=None, model=None, **options):
        """Check a model, or the pairs of a base and a context that were passed here and added before."""
        if evaluate_modules.measures(self, model, predictions, references):
            return evaluate_modules.check_model(model, **options)
        return super().compute(predictions=predictions, references=references, **options)

    def _compute(self, predictions, references, head_dim):
        return evaluate_modules.check_bases(predictions, references, head_dim)
