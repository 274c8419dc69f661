"""RoPE: B_m over the distance, for a base and its scaling or for a configuration, and how far it stays above 0."""

import gradio
from inputs import MEGABYTE, fetch, read_config
from outputs import connect, harmless, image, picture
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig

from hf_longctx.metrics import rope_report
from hf_longctx.metrics.report.card import plain
from hf_longctx.metrics.report.comparison import markdown


LONGEST = 1 << 22  # tokens
MINIMUM_BASE_UP_TO = 1 << 16  # tokens; the search for the smallest base takes some 7 s for twice as many
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ABOUT = r"""
At distance $m$, a query prefers a similar key to a random one by an amount proportional to
$B_m = \sum_i \cos(m\,\theta_i)$, which should not be negative anywhere in the context
([Men et al. 2024](https://arxiv.org/abs/2405.14591)). It is a screening number, read from the configuration alone.
"""
INLINE = [{"left": "$", "right": "$", "display": False}]


def of_numbers(base, head_dim, context, scaling, factor, trained):
    """Return verdict, picture, table and remarks of a plain model with these numbers."""
    parameters = {"rope_type": scaling, "rope_theta": float(base)}
    if scaling != "default":
        parameters |= {"factor": float(factor)} | (LLAMA3 if scaling == "llama3" else {})
        parameters |= {"original_max_position_embeddings": int(trained)} if scaling in ("yarn", "llama3") else {}
    maximum = int(trained if scaling == "dynamic" else context)
    config = LlamaConfig(
        num_hidden_layers=1, head_dim=int(head_dim), max_position_embeddings=maximum, rope_parameters=parameters
    )
    config.name_or_path = f"base {base:g}" + f", {scaling} by {factor:g}" * (scaling != "default")
    return shown(config, int(context))


def of_config(repo, text, context):
    """Return the same of a model on the Hub, or of a pasted config.json, by the code of transformers alone."""
    repo = repo.strip()
    if repo and text.strip():
        raise ValueError("Give a name on the Hub or a config.json, not both.")
    if not repo and not text.strip():
        raise ValueError("Give a name on the Hub, or paste a config.json.")
    values = read_config(fetch(repo, "config.json", MEGABYTE).read_text() if repo else text)
    try:
        is_listed = values.get("model_type") in CONFIG_MAPPING  # which loads its classes lazily, and not by get
        config = (CONFIG_MAPPING[values["model_type"]] if is_listed else PreTrainedConfig).from_dict(values)
    except Exception as error:  # of many types
        raise ValueError(f"transformers cannot make a configuration of this: {error}") from error
    config.name_or_path = repo
    return shown(config, int(context) or None)


def shown(config, context):
    """Return verdict, picture, table and remarks of a configuration."""
    claimed = context or getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 0
    if claimed > LONGEST:
        raise ValueError(f"The context is {claimed:,} tokens; this Space looks at up to {LONGEST:,}.")
    report = rope_report(config, context_length=context, minimum_base=claimed <= MINIMUM_BASE_UP_TO)
    columns, rows = report.table()
    header, *body = zip(columns, *rows)
    remarks = "".join(f"- {plain(remark)}\n" for remark in report.remarks())
    return f"### {plain(report.summary())}", picture(report.plot), harmless(markdown(header, body)), remarks


def build():
    """Lay out the tab, and return function, inputs and outputs of what it shows at first."""
    gradio.Markdown(ABOUT, latex_delimiters=INLINE)
    with gradio.Row():
        with gradio.Column(scale=2, min_width=320):
            with gradio.Tab("By numbers"):
                numbers = [
                    gradio.Number(10_000, label="Base (rope_theta)", minimum=1.01),
                    gradio.Number(
                        128, label="Dimensions of a head, all rotating", minimum=4, maximum=1024, precision=0
                    ),
                    gradio.Number(4096, label="Context to check (tokens)", minimum=2, maximum=LONGEST, precision=0),
                    gradio.Dropdown(["default", "linear", "dynamic", "yarn", "llama3"], label="Scaling"),
                ]
                scaling = numbers[-1]
                with gradio.Row(visible=False) as of_scaling:
                    numbers.append(gradio.Number(4, label="Factor", minimum=1, min_width=120))
                    trained = gradio.Number(4096, label="Trained with (tokens)", minimum=2, precision=0, min_width=120)
                    numbers.append(trained)
                scaling.change(lambda name: gradio.Row(visible=name != "default"), scaling, of_scaling)
                check_numbers = gradio.Button("Check these numbers", variant="primary")
            with gradio.Tab("By configuration"):
                configuration = [
                    gradio.Textbox(label="Name on the Hub", placeholder="Qwen/Qwen3-8B", max_length=200),
                    gradio.Textbox(label="or config.json", lines=8, max_lines=16, max_length=MEGABYTE),
                    gradio.Number(
                        0, label="Context (tokens; 0: what it claims)", minimum=0, maximum=LONGEST, precision=0
                    ),
                ]
                check_config = gradio.Button("Check this configuration", variant="primary")
        with gradio.Column(scale=3, min_width=320):
            outputs = [
                gradio.Markdown(),
                image("B_m over the distance m"),
                gradio.Markdown(),
            ]
            with gradio.Accordion("What to keep in mind", open=False):
                outputs.append(gradio.Markdown())
    connect(check_numbers, of_numbers, numbers, outputs)
    connect(check_config, of_config, configuration, outputs)
    return of_numbers, numbers, outputs
