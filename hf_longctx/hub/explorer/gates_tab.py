"""The forget gates of a FoX: over how many tokens each head forgets, and where it looks."""

import gradio
import torch
from inputs import EXAMPLES, MEGABYTE, fetch, read_config
from outputs import connect, image, picture
from tokenizers import Tokenizer

from hf_longctx.fox import FoxConfig, FoxForCausalLM
from hf_longctx.fox.plot import head_maps, plot_forget_gates
from hf_longctx.metrics.report.comparison import markdown
from hf_longctx.metrics.space import TEXT


ABOUT = """
A Forgetting Transformer multiplies what is left of a key by a learned gate at every token
([Lin et al. 2025](https://arxiv.org/abs/2503.02130)). The decay time of a head is the number of tokens
in which it forgets by a factor e; some heads keep a few words, and others the whole text.
"""
TOKENS = 512
PARAMETERS = 10**8
SIZES = {"config.json": MEGABYTE, "tokenizer.json": 20 * MEGABYTE, "model.safetensors": 4 * PARAMETERS + MEGABYTE}


def show(example, repo, text):
    """Return a picture, and a table of decay times in tokens, for a text."""
    folder = fetch_model(repo.strip()) if repo.strip() else EXAMPLES / (example or "")
    model = load(folder)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[:TOKENS]
    maps = head_maps(model, ids, resolution=1)
    heads = model.config.num_attention_heads
    times = [
        f"{head_map.decay_time:,.0f}" if head_map.decay_time >= 10 else f"{head_map.decay_time:.1f}"
        for head_map in maps
    ]
    rows = [[f"layer {first // heads}", *times[first : first + heads]] for first in range(0, len(times), heads)]
    table = markdown(["decay time", *(f"head {head}" for head in range(heads))], rows)
    title = f"What four of {len(maps)} heads keep of {len(ids)} tokens, and where they look"
    return picture(lambda path: plot_forget_gates(model, ids, path, title=title)), table


def fetch_model(repo):
    config = fetch(repo, "config.json", SIZES["config.json"])
    for name, limit in SIZES.items():
        fetch(repo, name, limit, revision=config.parent.name)
    return config.parent


def load(folder):
    """Return the FoX in a folder, by the package's own class and from safetensors only."""
    if not (folder / "config.json").is_file():
        raise ValueError("Choose a model, or name one on the Hub.")
    values = read_config((folder / "config.json").read_text())
    if values.get("model_type") != "fox":
        raise ValueError(f"The model is a {values.get('model_type')}; only a FoX has forget gates.")
    with torch.device("meta"):
        parameters = FoxForCausalLM(FoxConfig.from_dict(values)).num_parameters()
    if parameters > PARAMETERS:
        raise ValueError(f"The model has {parameters:,} parameters; this Space loads up to {PARAMETERS:,}.")
    return FoxForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)


def build():
    gradio.Markdown(ABOUT)
    examples = sorted(path.name for path in EXAMPLES.glob("*/"))
    with gradio.Row():
        with gradio.Column(scale=2, min_width=320):
            example = gradio.Dropdown(examples, label="Model", visible=bool(examples))
            repo = gradio.Textbox(label="or a FoX on the Hub, up to 100 million parameters", max_length=200)
            text = gradio.Textbox(
                TEXT[:1500], label=f"Text (up to {TOKENS} tokens)", lines=8, max_lines=8, max_length=10_000
            )
            button = gradio.Button("Show the gates", variant="primary")
        with gradio.Column(scale=3, min_width=320):
            gates = image("Forget gates and attention of four heads")
            table = gradio.Markdown()
    connect(button, show, [example, repo, text], [gates, table])
