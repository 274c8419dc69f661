"""The RoPE base bound as an evaluate module: it checks whether a RoPE base supports the claimed context."""

import datasets
import evaluate

from hf_longctx.metrics import evaluate_modules  # From: hf-longctx


_DESCRIPTION = """
With rotary position embeddings (RoPE), a query gives a similar key a higher score than a random key only up to a
distance that depends on the RoPE base. This module checks whether the base is large enough for a model's claimed
context, or for pairs of base and context. For bases below the bound, the paper found low perplexity but poor
long-distance retrieval.
"""

_KWARGS_DESCRIPTION = """
Either a model:
    model: a model or configuration of transformers, its name, or its folder. Weights are not loaded.
    context_length (int): context to check, in tokens. Default: the claimed context.
    minimum_base (bool): whether to also compute the smallest base that satisfies the bound. This takes seconds for
        long contexts. Default: True.
Or predictions and references:
    predictions (list of float): RoPE bases.
    references (list of int): context length that each base should support, in tokens.
    head_dim (int): number of dimensions of a query or key head. All of them rotate.
Returns:
    For a model, the report of hf_longctx.metrics.rope_report:
        verdict (str): one of: "holds"; "holds within windows"; "violated"; "inconclusive"; "no RoPE". With "holds
            within windows", no layer with RoPE attends to the whole context. With "inconclusive", half of the head
            dimensions or more do not rotate, so no base violates the bound.
        holds (bool): None if the verdict is "inconclusive" or "no RoPE".
        claimed_context, claimed_by: claimed context in tokens, and its source.
        groups (list of dict): base, scaling, verdict, context_bound, negative_distances, minimum_base and
            settled_base for each kind of layers.
        notes, caveat: assumptions and limitations.
    For pairs:
        holds (float): share of pairs that satisfy the bound.
        verdicts, context_bounds, minimum_bases, settled_bases (list): one element for each pair.
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
        """Check a model, or pairs of base and context. Pairs from earlier calls of `add` are included."""
        if evaluate_modules.measures(self, model, predictions, references):
            return evaluate_modules.check_model(model, **options)
        return super().compute(predictions=predictions, references=references, **options)

    def _compute(self, predictions, references, head_dim):
        return evaluate_modules.check_bases(predictions, references, head_dim)
