"""Mistakes of users of `hf-longctx train` and `finetune`."""

import shutil
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from demo_model import DEMO, VOCABULARY
from mistakes import refused


pytest.importorskip("peft", reason="fine-tuning needs peft: pip install 'hf-longctx[training]'")

from faults import SIZES, log, make
from small_llama import save_llama
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_longctx import cli
from hf_longctx.training.adapters import load_adapter
from hf_longctx.training.config import PretrainConfig, parse
from hf_longctx.training.data import encode
from hf_longctx.training.run import train
from hf_longctx.training.run_folder import COMPLETE


WORDS = ["--data", "text.txt", "--tokenizer", "gpt2", "--output_dir", "run"]


def words(*options):
    return lambda kit: parse(PretrainConfig, [*WORDS, *options])


def settings(**changes):
    return lambda kit: make(dict(data="text.txt", tokenizer="gpt2", output_dir="run") | changes)


def yaml(text):
    def read(kit):
        (kit.path / "config.yaml").write_text(text)
        words("--config", str(kit.path / "config.yaml"))(kit)

    return read


def run(files=None, **changes):
    """Train with files of these contents, which "./NAME" in the changes refers to."""

    def begin(kit):
        for name, content in (files or {}).items():
            (kit.path / name).parent.mkdir(exist_ok=True)
            np.save(kit.path / name, content) if name.endswith(".npy") else (kit.path / name).write_text(content)
        here = dict(data=str(kit.text), tokenizer=kit.tokenizer, output_dir=str(kit.path / "run"))
        paths = {name: str(kit.path / value[2:]) for name, value in changes.items() if str(value)[:2] == "./"}
        train(make(here | dict(max_length=64, max_steps=2, save_steps=1) | changes | paths))

    return begin


def damaged(name):
    """Resume a run without its model, as if killed before the model was saved, one of whose files is damaged."""

    def begin(kit):
        shutil.copytree(kit.finished, kit.path / "run")
        shutil.rmtree(kit.path / "run" / "model")
        (file,) = (kit.path / "run").glob(name)
        file.write_bytes(file.read_bytes()[:100])
        run()(kit)

    return begin


def without_eos(kit):
    tokenizer = AutoTokenizer.from_pretrained(kit.tokenizer)
    tokenizer.eos_token = None
    next(encode("text.txt", tokenizer))


def in_use(kit):
    """Another process is training in the folder."""
    (kit.path / "run").mkdir()
    lock = "import fcntl, sys; fcntl.lockf(f := open(sys.argv[1], 'w'), fcntl.LOCK_EX); print('', flush=True); input()"
    command = [sys.executable, "-c", lock, str(kit.path / "run" / ".in_use")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        try:
            run()(kit)
        finally:
            other.kill()


SETTINGS = [
    refused(
        "unknown preset",
        run(model="fox-12m"),
        "--model must be a preset .fox-125m.*got .fox-12m.. Did you mean fox-125m?",
    ),
    refused("unknown recipe", words("--recipe", "lara"), "`recipe` must be one of fox-paper, got 'lara'"),
    refused(
        "misspelt key", yaml("learning_rat: 1"), "learning_rat in .* is not a setting. Did you mean learning_rate?"
    ),
    refused("no mapping", yaml("- steps"), "must contain settings, in lines such as"),
    refused(
        "misspelt field",
        run(set=["hidden_sise=8"]),
        "--set hidden_sise=8: FoxConfig has no field hidden_sise. Did you mean hidden_size",
    ),
    refused("a log that a kill would tear", settings(logging_steps=2), "`logging_steps` must be 1"),
    refused("no log", settings(logging_strategy="no"), "`logging_strategy` must be 'steps'"),
    refused("no step", settings(max_steps=0), "`max_steps` must be positive"),
    refused("one checkpoint only", settings(save_total_limit=1), "`save_total_limit` must be at least 2"),
    refused("checkpoints without optimizer", settings(save_only_model=True), "`save_only_model` must be false"),
    refused("negative length", settings(max_length=-64), "`max_length` must be positive, got -64"),
    refused("another checkpoint", settings(resume_from_checkpoint="x"), "got x.*delete the later ones"),
    refused("rows in unequal parts", settings(sequence_parallel=3), r"must divide `max_length` \(2048\), got 3"),
    refused(
        "processes in unequal groups",
        settings(sequence_parallel=2),
        r"must divide the number of processes \(1\), got 2",
    ),
]


def finetune(**changes):
    sizes = dict(recipe="lora", max_length=32, max_steps=1, gradient_accumulation_steps=1)

    def begin(kit):
        model = kit.llama() if "model" not in changes else changes["model"]
        here = dict(model=model, data=str(kit.text), output_dir=str(kit.path / "run"))
        train(make(here | sizes | changes))

    return begin


def adapter_on(**changed):
    """Load an adapter on another base."""
    return lambda kit: load_adapter(AutoModelForCausalLM.from_pretrained(kit.llama(**changed)), kit.adapted / "model")


def larger_tokenizer(kit):
    tokenizer = AutoTokenizer.from_pretrained(kit.tokenizer)
    tokenizer.add_tokens("<new>")
    tokenizer.save_pretrained(kit.path / "tokenizer")
    finetune(tokenizer=str(kit.path / "tokenizer"))(kit)


def other_weights(kit):
    """The base of an adapter changes before the run resumes."""
    shutil.copytree(kit.adapted, kit.path / "run")
    shutil.rmtree(kit.path / "run" / "model")
    finetune(model=kit.llama(initializer_range=0.5), save_steps=1)(kit)


def other_model(model, config, **sizes):
    def begin(kit):
        sizes_of_all = dict(vocab_size=VOCABULARY, num_attention_heads=2, intermediate_size=8)
        model(config(**sizes_of_all | sizes)).save_pretrained(kit.path / "other")
        finetune(model=str(kit.path / "other"), tokenizer=kit.tokenizer)(kit)

    return begin


def merged_into_a_quantized_base(kit):
    config = '{"model_type": "llama", "quantization_config": {"quant_method": "x"}}'
    (kit.path / "config.json").write_text(config)
    finetune(model=str(kit.path), tokenizer=kit.tokenizer, merge=True)(kit)


FINETUNING = [
    refused(
        "misspelt target",
        finetune(lora_target_modules=["q_pro"]),
        "must name modules of this model, got q_pro. Did you mean q_proj?",
    ),
    refused("LoRA on the tied head", finetune(lora_target_modules=["lm_head"]), "adapter of embed_tokens or lm_head"),
    refused(
        "rows beyond the context",
        finetune(max_length=128),
        "must be at most 64, got 128.*--recipe rope-extend",
    ),
    refused("nothing to extend", finetune(recipe="rope-extend"), "32 does not extend the context of 64 tokens"),
    refused("forgetting for a Llama", finetune(decay_time=64.0), "`decay_time` requires `recipe`='fox-from-llama'"),
    refused(
        "gates that are closed at once",
        finetune(recipe="fox-from-llama", decay_time=0.0),
        "decay_time must be a positive number of tokens, got 0.0",
    ),
    refused("rate of gates of a Llama", finetune(gate_lr_ratio=2.0), "needs trainable forget gates"),
    refused(
        "an adapter as a model",
        lambda kit: finetune(model=str(kit.adapted / "model"))(kit),
        "contains an adapter. Merge it into its base",
    ),
    refused("encoder-decoder", other_model(T5ForConditionalGeneration, T5Config, d_model=8), "is an encoder-decoder"),
    refused(
        "rows beyond a table of positions",
        other_model(GPT2LMHeadModel, GPT2Config, n_embd=8, n_positions=16, num_hidden_layers=1),
        "must be at most 16, got 32. This model has 16 positions",
    ),
    refused("other weights for a run", other_weights, r"other settings \(model: "),
    refused("merging into a quantized base", merged_into_a_quantized_base, "quantized checkpoint cannot be merged"),
    refused(
        "tokenizer of another model",
        larger_tokenizer,
        f"has {VOCABULARY + 1} tokens, but the model has only {VOCABULARY}",
    ),
    refused("adapter of a deeper base", adapter_on(num_hidden_layers=2), "num_hidden_layers 1, not 2"),
]
RUNS = [
    refused("text of less than a row", run(max_length=4096), "tokens; one sequence needs 4096"),
    refused(
        "tokens that are not integers",
        run({"real.npy": np.zeros(999)}, data="./real.npy"),
        "must be a 1D or 2D array of integers, got float64 in 1 dim",
    ),
    refused(
        "tokens of another tokenizer",
        run({"far.npy": np.full(999, 70000)}, data="./far.npy"),
        f"has token ids from 70000 to 70000, but the tokenizer has {VOCABULARY}",
    ),
    refused("another column", run({"a.jsonl": '{"conversations": []}'}, data="./a.jsonl"), "--text_column.*.messages"),
    refused("damaged tokens", damaged("data/*.npy"), "npy is not a complete"),
    refused("damaged run", damaged("run.json"), "run.json is damaged"),
    refused("two trainings in one folder", in_use, "Another process is training in .*run. Wait until it ends"),
    refused("output is a file", run({"text.txt": ""}, output_dir="./text.txt"), "is a file or a broken link"),
    refused("folder of something else", run({"run/thesis.tex": ""}), "contains files that do not belong to a run"),
    refused("tokenizer without an EOS", without_eos, "must have an EOS token"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run, next to its text."""
    folder = tmp_path_factory.mktemp("finished")
    text = folder / "text.txt"
    text.write_text("The fox forgets what it no longer needs. " * 40)
    run()(SimpleNamespace(path=folder, text=text, tokenizer=str(DEMO)))
    return folder / "run"


tied_llama = partial(save_llama, max_position_embeddings=64, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def adapted(finished, tmp_path_factory):
    """The folder of a run that has trained an adapter."""
    folder = tmp_path_factory.mktemp("adapted")
    finetune(model=tied_llama(folder / "llama"))(SimpleNamespace(path=folder, text=finished.parent / "text.txt"))
    return folder / "run"


@pytest.fixture
def kit(tmp_path, finished, adapted):
    paths = dict(path=tmp_path, text=finished.parent / "text.txt", tokenizer=str(DEMO), finished=finished)
    return SimpleNamespace(**paths, adapted=adapted, llama=partial(tied_llama, tmp_path / "llama"))


@pytest.mark.parametrize("mistake", [*SETTINGS, *RUNS, *FINETUNING], ids=str)
def test_mistakes(mistake, kit):
    mistake.check(kit)


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_saved(kit):
    overflow = dict(learning_rate=1e38, max_grad_norm=0.0, weight_decay=0.0, lr_scheduler_type="constant")
    with pytest.raises(
        FloatingPointError, match=r"`(loss|grad_norm)` is (nan|inf) at step \d+; earlier checkpoints are"
    ):
        run(max_steps=5, **overflow)(kit)
    steps = [len(log(path.parent)) for path in (kit.path / "run").glob(f"checkpoint-*/{COMPLETE}")]
    assert len(steps) < 4


def test_the_exit_code_of_a_mistake_is_2_and_of_an_overflow_1(kit, capsys):
    paths = ["--data", str(kit.text), "--output_dir", str(kit.path / "run"), "--tokenizer", kit.tokenizer]
    command = ["train", "--model", "fox-tiny", "--set", *SIZES, "--max_length", "64", "--max_steps", "5", *paths]
    overflow = "--learning_rate 1e38 --max_grad_norm 0 --weight_decay 0 --lr_scheduler_type constant"
    for code, options in [(2, "--recipe none"), (2, "--config none.yaml"), (1, overflow)]:
        assert cli.main([*command, *options.split()]) == code
        assert "hf-longctx: error: " in capsys.readouterr().err
