"""Pretrain a new model from a config; the same command resumes a stopped run.

Examples:
  hf-longctx train --model fox-pro-125m --data text.jsonl --tokenizer gpt2 --max_steps 1000 --output_dir run
  hf-longctx train --model fox-tiny --set hidden_size=256 --data a.txt --tokenizer gpt2 --output_dir run
  hf-longctx train --config run/config.yaml --output_dir run
  torchrun --nproc-per-node 8 -m hf_longctx train --recipe fox-paper --data a.npy --tokenizer gpt2 --output_dir run
"""


def run(kind: str, words: list[str], description: str | None) -> None:
    """Train with command-line settings. If a signal stops the run, exit with 128 plus the signal's number.

    Args:
        kind: "PretrainConfig" or "FinetuneConfig".
    """
    try:
        from huggingface_hub.errors import StrictDataclassError
        from safetensors import SafetensorError

        from ..training import config
        from ..training.run import train
    except ImportError as error:
        raise ImportError(f"Training needs more packages ({error}): pip install 'hf-longctx[training]'") from None
    from transformers.utils.logging import disable_progress_bar

    from .spelling import respell, suggestion

    disable_progress_bar()  # otherwise saving a checkpoint shows a progress bar
    names = {
        "prog": f"hf-longctx {getattr(config, kind).command}",
        "usage": "%(prog)s --data DATA --output_dir RUN [options]",
    }
    known = config.make_parser(getattr(config, kind))._option_string_actions
    words = respell(words, known)
    for word in words:
        if word.startswith("--") and word.partition("=")[0] not in known:
            raise ValueError(f"unrecognized arguments: {word}.{suggestion([word], known)}")
    settings = config.parse(getattr(config, kind), words, description=description, **names)
    try:
        number = train(settings)
    except (StrictDataclassError, SafetensorError) as error:
        raise ValueError(f"{settings.model} has a damaged config or weight file ({error}).") from error
    if number:
        raise SystemExit(128 + number)
