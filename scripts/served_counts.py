"""Does a served model give the counts of the model itself? Measures a forgetting curve both ways, point by point.

    python -m vllm.entrypoints.openai.api_server --model FOLDER --dtype float32 --port 8000
    python -m scripts.served_counts http://localhost:8000/v1 FOLDER

Measures --text (default: English that ships with CPython) and random tokens. Prints a JSON object, and exits with 1 if
a count differs.
"""

import argparse
import json
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.corpus import load_tokens
from hf_longctx.metrics import ServedModel, forgetting_curve


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint", metavar="URL", help="up to and including /v1")
    parser.add_argument("model", metavar="FOLDER", help="folder or Hub name of the model that is served there")
    parser.add_argument("--served-as", metavar="NAME", help="its name there, if several are served")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 32, 64, 128], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=10, metavar="N")
    parser.add_argument("--text", default="stdlib", metavar="SOURCE", help="text file, folder or dataset name")
    parser.add_argument("--dtype", default="float32", help="of the local model; that of the server (default: float32)")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    served = ServedModel(args.endpoint, args.served_as, tokenizer=tokenizer, vocab_size=len(tokenizer))
    local = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    tokens = load_tokens(tokenizer, args.text).tokens
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    rows = []
    for data_type in ("order", "random"):
        options = {"lengths": args.lengths, "repeats": args.repeats, "data_type": data_type} | special
        theirs, ours = (
            forgetting_curve(model, tokens if data_type == "order" else None, **options) for model in (served, local)
        )
        points = {point.length: point for point in theirs.points}
        for point in ours.points:
            row = {"data_type": data_type, "length": point.length, "local": counts(point)}
            if point.length in points:
                row |= {"served": counts(points[point.length]), "equal": points[point.length] == point}
            else:
                row |= {"not_measured": theirs.not_measured[point.length]}
            rows.append(row)
    compared = [row["equal"] for row in rows if "equal" in row]
    document = {
        "endpoint": args.endpoint,
        "model": args.model,
        "served_with": served.settings()["served_with"],
        "all_equal": bool(compared) and all(compared),
        "compared": len(compared),
        "rows": rows,
    }
    print(json.dumps(document, indent=1))
    sys.exit(not document["all_equal"])


def counts(point):
    return {"copy": list(point.copy_correct), "LM": list(point.lm_correct)}


if __name__ == "__main__":
    main()
