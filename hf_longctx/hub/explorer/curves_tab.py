"""Forgetting curves, or losses by position, of several models in one picture, and a snippet for each model card."""

from pathlib import Path

import gradio
from inputs import EXAMPLES, MEGABYTE, fetch
from outputs import connect, harmless, image, picture

from hf_longctx.metrics import card_snippet, read_result
from hf_longctx.metrics.report.comparison import compare, named


ABOUT = """
A model reads a text twice. How much of it does it copy the second time, and how much would it have guessed
([Liu et al. 2024](https://arxiv.org/abs/2410.04727))? `hf-longctx curve MODEL --output NAME` measures it and writes
NAME.json; `hf-longctx loss` does so for the loss by position.
"""
MOST = 8  # models in one picture


def show(files, examples, repo):
    """Return a picture, a table, and a snippet by the name of each model, of JSON files of one metric."""
    paths = [Path(file) for file in files or []] + [EXAMPLES / f"{name}.json" for name in examples]
    paths += [fetch(repo.strip(), "forgetting_curve.json", MEGABYTE)] if repo.strip() else []
    if not 1 <= len(paths) <= MOST:
        raise ValueError(f"{len(paths)} results are chosen; choose 1 to {MOST}.")
    results, tables = named([(path, read(path)) for path in paths]), []
    curves = picture(lambda path: tables.append(compare(results, path)))
    return curves, harmless(tables[0]), {name: snippet(name, result) for name, result in results.items()}


def read(path):
    try:
        return read_result(path)
    except ValueError as error:
        raise ValueError(str(error).replace(str(path), path.name)) from error


def snippet(name, result):
    try:
        return card_snippet(name, [result])
    except ValueError as error:  # nothing is certain
        return str(error)


def build():
    gradio.Markdown(ABOUT)
    examples = sorted(path.stem for path in EXAMPLES.glob("*.json"))
    snippets = gradio.State({})
    with gradio.Row():
        with gradio.Column(scale=2, min_width=320):
            chosen = gradio.CheckboxGroup(examples, value=examples[:2], label="Examples", visible=bool(examples))
            files = gradio.File(file_count="multiple", file_types=[".json"], label="Your results (JSON)", height=140)
            repo = gradio.Textbox(label="or a model on the Hub with a forgetting_curve.json", max_length=200)
            button = gradio.Button("Compare", variant="primary")
        with gradio.Column(scale=3, min_width=320):
            curves = image("The curves of all models in one picture")

            @gradio.render(snippets)
            def show_snippets(snippets):
                for name, text in (snippets or {}).items():
                    with gradio.Accordion(f"For the model card of {name}", open=False):
                        gradio.Code(text, language="markdown", show_label=False, wrap_lines=True)

    table = gradio.Markdown()  # across the page, as it has nine columns
    connect(button, show, [files, chosen, repo], [curves, table, snippets])
