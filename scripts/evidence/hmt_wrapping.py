"""Compare the responses and the perplexity of SmolLM2 in an untrained HMT with those of SmolLM2 alone.

    python -m scripts.evidence.hmt_wrapping

Greedy responses to questions are compared token by token; a question and its response fit in one segment. SmolLM2
reads a novel in windows of as many tokens as HMT: the sensory tokens and a segment. The perplexity is measured over
all segments but the first, and over the four tokens after the recall, the first that attend to a noise prompt.
"""

import math

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from hf_longctx.hmt import HMTConfig, HMTWrapper
from scripts.bench import common
from scripts.evidence.hmt_training import BACKBONES, TEXT, load_backbone
from scripts.evidence.parts import make_parser, measure_parts, require


QUESTIONS = (
    "Name three fruits and their colours.",
    "What is the capital of France, and which river flows through it?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
)
BEHIND = 4  # tokens after the recall
FORM = """
| segment | perplexity in windows | HMT | change | change in the four tokens after the recall |
| {name} | {window:.3f} | {hmt:.3f} | {change:+.3f} % | {behind:+.3f} % |
"""


@torch.no_grad()
def reply(number, length, backbone, args):
    """Return the number of tokens before SmolLM2's and HMT's responses first differ."""
    tokenizer = AutoTokenizer.from_pretrained(BACKBONES[args.backbone])
    turn = [{"role": "user", "content": QUESTIONS[number]}]
    inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    inputs = inputs.to(args.device)
    hmt = HMTWrapper.from_backbone(backbone, HMTConfig(segment_length=length, sensory_tokens=args.sensory_tokens))
    start = inputs["input_ids"].shape[1]
    options = {"max_new_tokens": args.new_tokens, "do_sample": False, "eos_token_id": None, "repetition_penalty": 1.0}
    first, second = (model.generate(**inputs, **options)[0, start:] for model in (backbone, hmt))
    agreeing = int((first == second).long().cumprod(0).sum())
    text = tokenizer.decode(first[:16], skip_special_tokens=True)
    return {"question": QUESTIONS[number], "prompt": start, "equal": agreeing, "reply": text}


@torch.no_grad()
def perplexity(length, backbone, args):
    """Return the mean -log p of the same tokens in windows and by HMT: of all tokens and of those after the recall."""
    k, size = args.sensory_tokens, args.segments * length
    hmt = HMTWrapper.from_backbone(backbone, HMTConfig(segment_length=length, sensory_tokens=k))
    tokenizer = AutoTokenizer.from_pretrained(BACKBONES[args.backbone])
    tokens = torch.tensor(
        tokenizer((TEXT / "held_out.txt").read_text(), add_special_tokens=False, verbose=False)["input_ids"]
    )
    texts = tokens[: len(tokens) // size * size].unflatten(0, (-1, size))
    losses = []
    for ids in texts[:: max(1, len(texts) // args.texts)][: args.texts, None].to(args.device):  # from all of the novel
        of_hmt = hmt(ids).logits[0, length:]
        windows = [ids[:, start - k : start + length] for start in range(length, size, length)]
        of_windows = torch.cat([backbone(window, logits_to_keep=length).logits[0] for window in windows])
        for logits in (of_windows, of_hmt):
            losses.append(F.cross_entropy(logits[:-1], ids[0, length + 1 :], reduction="none"))
    losses = torch.stack(losses).unflatten(0, (-1, 2))  # (texts, 2, predictions)
    place = torch.arange(losses.shape[-1]) % length - hmt.config.summary_length
    parts = {"all": losses, "behind": losses[..., (place >= 0) & (place < BEHIND)]}
    return {name: dict(zip(("window", "hmt"), x.mean((0, 2)).tolist())) for name, x in parts.items()} | {
        "tokens": losses[:, 0].numel(),
        "largest_difference": (losses[:, 0] - losses[:, 1]).abs().max().item(),
    }


def measure(args):
    require(BACKBONES[args.backbone], TEXT)
    backbone = load_backbone(args)

    def one(kind, x, args):
        torch.manual_seed(0)
        if kind == "reply":
            return {"kind": kind} | reply(x, args.reply_segment, backbone, args)
        return {"kind": kind, "segment_length": x} | perplexity(x, backbone, args)

    keys = [("reply", i) for i in range(len(QUESTIONS))] + [("perplexity", x) for x in args.lengths]
    yield from measure_parts(one, keys, args)


def table(result):
    rows, s, lines = result["rows"], result["settings"], []
    for row in rows:
        if row["kind"] == "perplexity":
            values = {name: math.exp(x) for name, x in row["all"].items()}
            changes = {
                name: 100 * math.expm1(row[x]["hmt"] - row[x]["window"])
                for name, x in (("change", "all"), ("behind", "behind"))
            }
            lines.append({"name": row["segment_length"]} | values | changes)
    equal = [row["equal"] for row in rows if row["kind"] == "reply"]
    text = (
        f"{sum(x == s['new_tokens'] for x in equal)} of {len(equal)} greedy responses of {s['new_tokens']} tokens are equal, token "
        f"for token, in a segment of {s['reply_segment']}. The perplexity is that of the novel Persuasion. HMT reads each segment with "
        f"k = {s['sensory_tokens']} sensory tokens, the last tokens of the previous segment."
    )
    return f"{text}\n\n{common.markdown(lines, FORM)}"


def main(arguments=None):
    sizes = {"lengths": [128, 512], "sensory_tokens": 32, "segments": 4, "texts": 6}
    parser = make_parser(
        __spec__.name, __doc__, "hmt_wrapping_{backbone}", **sizes, reply_segment=512, new_tokens=64, device="cpu"
    )
    parser.add_argument("--backbone", choices=list(BACKBONES), default="smollm2", help="backbone (default: smollm2)")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
