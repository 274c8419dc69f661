"""Write saved results of one model as others collect them: Every Eval Ever, and the Hub's .eval_results.

Every score has its uncertainty. An upper end of a length ("below 64") is never a score.

Examples:
  hf-longctx export curve.json lines.json --model-id alice/fox --organization "Alice's lab" --output records
  hf-longctx export curve.json --benchmark alice/forgetting-curve --output model_folder
"""

import argparse
from pathlib import Path
from typing import Any

from . import measuring


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="what curve, loss, needle or lines wrote")
    parser.add_argument("--output", default=".", metavar="FOLDER", help="default: here")
    group = parser.add_argument_group("Every Eval Ever: data/hf-longctx/DEVELOPER/MODEL/UUID.json")
    group.add_argument("--organization", metavar="NAME", help="who reports the results")
    group.add_argument("--model-id", metavar="OWNER/MODEL", help="on the Hub (default: the results' model)")
    group.add_argument(
        "--relationship",
        choices=("first_party", "third_party", "collaborative", "other"),
        default="other",
        help="of the evaluator to the model: first_party, third_party, collaborative, other (default)",
    )
    group = parser.add_argument_group("the Hub: .eval_results/hf-longctx.yaml, for the model's repository")
    group.add_argument("--benchmark", metavar="OWNER/DATASET", help="dataset that is registered as a benchmark")
    group.add_argument("--source-url", metavar="URL", help="where the results can be seen")


def run(args: argparse.Namespace) -> None:
    import json
    from datetime import UTC, datetime

    import yaml

    from ..metrics import read_result
    from ..metrics.report.export import every_eval_ever, hub_eval_results

    if args.organization is None and args.benchmark is None:
        raise ValueError(
            "say for whom: --organization NAME for Every Eval Ever, --benchmark OWNER/DATASET for the Hub."
        )
    measuring.check_writable("--output", args.output, folder=True)
    results = [read_result(file) for file in args.files]
    models = sorted({str(result.settings.get("model")) for result in results})
    if len(models) > 1:
        raise ValueError(f"these results are of several models: {', '.join(models)}; export those of one at a time.")
    saved = [json.loads(Path(file).read_text()).get("saved", {}).get("time") for file in args.files]
    measured = datetime.fromisoformat(max(saved)) if all(saved) else None
    contents = {}
    if args.organization is not None:
        options: dict[str, Any] = dict(
            organization=args.organization, relationship=args.relationship, measured=measured
        )
        path, record = every_eval_ever(
            results, model_id=args.model_id or models[0], retrieved=datetime.now(UTC), **options
        )
        contents[path] = json.dumps(record, indent=1, allow_nan=False) + "\n"
    if args.benchmark is not None:
        entries = hub_eval_results(results, args.benchmark, measured=measured, source_url=args.source_url)
        contents[".eval_results/hf-longctx.yaml"] = yaml.safe_dump(entries, sort_keys=False)
    for name, content in contents.items():
        path = Path(args.output, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        print(f"wrote {path}")
