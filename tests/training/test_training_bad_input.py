"""What users of `hf-longctx train` get wrong."""

import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from demo_model import DEMO, VOCABULARY
from mistakes import refused


pytest.importorskip("peft", reason="fine-tuning needs peft: pip install 'hf-longctx[training]'")

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_longctx import cli
from hf_longctx.training.adapters import load_adapter
from hf_longctx.training.data import encode
from hf_longctx.training.recipes import FinetuneSettings, TrainSettings
from hf_longctx.training.run import train
from hf_longctx.training.run_folder import check_checkpoint, last_checkpoint
from hf_longctx.training.settings import option, read_settings
from hf_longctx.training.trainer import ResumableTrainer


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.usefixtures("small_model"),
]
NEEDED = dict(data="text.txt", tokenizer="gpt2", output="run")


def resolve(**changes):
    return lambda kit: TrainSettings(**NEEDED | changes).resolve()


def yaml(text):
    def read(kit):
        (kit.path / "config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        read_settings(TrainSettings, kit.path / "config.yaml", {})

    return read


def run(resume="auto", **changes):
    def begin(kit):
        sizes = dict(sequence_length=64, batch_tokens=64, per_device_batch_size=1, steps=2, save_steps=1)
        here = dict(data=str(kit.text), tokenizer=kit.tokenizer, output=str(kit.path / "run"))
        paths = {name: str(kit.path / value[2:]) for name, value in changes.items() if str(value)[:2] == "./"}
        where = str(kit.path / resume[2:]) if resume[:2] == "./" else resume
        train(TrainSettings(**here | sizes | changes | paths), where)

    return begin


def after(prepare, mistake):
    def both(kit):
        prepare(kit)
        mistake(kit)

    return both


def write(name, content="something"):
    def prepare(kit):
        (kit.path / name).parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            (kit.path / name).write_text(content)
        elif isinstance(content, bytes):
            (kit.path / name).write_bytes(content)
        else:
            np.save(kit.path / name, content)

    return prepare


def without_eos(kit):
    tokenizer = AutoTokenizer.from_pretrained(kit.tokenizer)
    tokenizer.eos_token = None
    next(encode("text.txt", tokenizer))


def damaged(name, content="{"):
    """A run without its model, as if killed before the model was saved, one of whose files is damaged."""

    def prepare(kit):
        shutil.copytree(kit.finished, kit.path / "run")
        shutil.rmtree(kit.path / "run" / "model")
        file = kit.path / "run" / name
        file.write_bytes(file.read_bytes()[:100] if content == "cut" else content.encode())

    return prepare


def divided(name):
    """A run whose last checkpoint was saved by processes that divide the model."""

    def prepare(kit):
        shutil.copytree(kit.finished, kit.path / "run")
        shutil.rmtree(kit.path / "run" / "model")
        (kit.path / "run" / "checkpoints" / "checkpoint-2" / name).mkdir()

    return prepare


def in_use(kit):
    """Another process trains in the folder."""
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
    refused("no data", resolve(data=None), "--data is missing: text file, JSONL"),
    refused("no tokenizer", resolve(tokenizer=None), "--tokenizer is missing"),
    refused("unknown preset", resolve(preset="1B"), "'1B'; it must be one of tiny, 5M, 125M"),
    refused("dropout of one", resolve(dropout=1.0), "--dropout is 1.0; it must be at least 0 and below 1"),
    refused("warmup of a schedule without", resolve(schedule="step", warmup_steps=6), "--schedule step has no warmup"),
    refused("stream of tokens", resolve(data="a.npy", streaming=True), "packed tokens, which need no --streaming"),
    refused(
        "Llama with the blocks of a FoX", resolve(architecture="llama", pro=True), "--pro is a FoX; --architecture"
    ),
    refused("warmup beyond the end", resolve(steps=5, warmup_steps=6), "between 0 and the 5 steps"),
    refused(
        "a batch of no whole passes",
        lambda kit: TrainSettings(**NEEDED, batch_tokens=5000).resolve().accumulation(2),
        "5000 is not a multiple of the 8192 tokens.*Change --batch-tokens",
    ),
    refused("the best of no evaluations", resolve(keep_best=True), "--keep-best belongs to --eval-data, which is mis"),
    refused("epochs of a stream", resolve(epochs=2, streaming=True), "--epochs needs to know how long the data are"),
    refused(
        "layers without checkpoints", resolve(checkpointed_layers=2, sequence_length=512), "which is off; turn it on"
    ),
    refused("a share of some texts only", resolve(data="a.txt=1,b.txt"), "several texts; each needs a share above 0"),
    refused("a share of nothing", resolve(data="a.txt=0,b.txt=1"), "several texts; each needs a share above 0"),
    refused("a text without a name", resolve(data="a.txt,"), "several texts; each needs a share above 0"),
    refused("a stream of texts without shares", resolve(data="a,b", streaming=True), "a,b needs shares: a=0.5"),
    refused("a stream of tokens in a mixture", resolve(data="a.npy=1,b=1", streaming=True), "a.npy holds packed tok"),
    refused("unknown report", run(report_to="tensorbord"), "--report-to names tensorbord; transformers has"),
    refused("report without package", run(report_to="swanlab"), "pip install swanlab"),
    refused("rows in unequal parts", resolve(sequence_parallel=3), "3 does not divide the 512 tokens of a row"),
    refused(
        "processes in unequal groups",
        lambda kit: TrainSettings(**NEEDED, sequence_parallel=2).resolve().accumulation(3),
        "2 does not divide the number of processes, 3; start a multiple",
    ),
    refused(
        "misspelt key", yaml("learning_rat: 1"), "learning_rat, which is not a setting. Did you mean learning_rate?"
    ),
    refused("unknown key", yaml("zzz: 1"), "zzz, which is not a setting. The settings are data, tokenizer"),
    refused("word for a number", yaml("steps: many"), "steps to 'many'; it must be int"),
    refused("list for a number", yaml("steps: [1]"), r"steps to \[1\]; it must be int"),
    refused("no mapping", yaml("- steps"), "does not hold settings; it must have lines such as"),
    refused("no YAML", yaml("a: [1"), "is not YAML"),
    refused("negative seed", resolve(seed=-1), "--seed is -1; it must be between 0 and 4294967295"),
    refused("rows of one token", resolve(sequence_length=1), "--sequence-length is 1; a row needs at least 2"),
]


def finetune(**changes):
    sizes = dict(sequence_length=32, batch_tokens=32, steps=1)

    def begin(kit):
        model = kit.llama() if "model" not in changes else changes["model"]
        here = dict(model=model, data=str(kit.text), output=str(kit.path / "run"))
        train(FinetuneSettings(**here | sizes | changes))

    return begin


def adapter_on(**changed):
    """Load an adapter on another base."""
    return lambda kit: load_adapter(AutoModelForCausalLM.from_pretrained(kit.llama(**changed)), kit.adapted / "model")


def larger_tokenizer(kit):
    tokenizer = AutoTokenizer.from_pretrained(kit.tokenizer)
    tokenizer.add_tokens("<new>")
    tokenizer.save_pretrained(kit.path / "tokenizer")
    finetune(tokenizer=str(kit.path / "tokenizer"))(kit)


def on_an_adapter(prepare=lambda folder: None, **changes):
    """Train on an adapter in another way."""

    def begin(kit):
        shutil.copytree(kit.adapted / "model", kit.path / "adapter")
        prepare(kit.path / "adapter")
        finetune(model=str(kit.path / "adapter"), **changes)(kit)

    return begin


def other_weights(kit):
    """The base of an adapter changes before the run goes on."""
    shutil.copytree(kit.adapted, kit.path / "run")
    shutil.rmtree(kit.path / "run" / "model")
    finetune(model=kit.llama(initializer_range=0.5))(kit)


def other_model(model, config, **sizes):
    def begin(kit):
        sizes_of_all = dict(vocab_size=VOCABULARY, num_attention_heads=2, intermediate_size=8)
        model(config(**sizes_of_all | sizes)).save_pretrained(kit.path / "other")
        finetune(model=str(kit.path / "other"), tokenizer=kit.tokenizer)(kit)

    return begin


def damaged_model(name, content="damaged", **changes):
    def begin(kit):
        model = kit.llama()
        (kit.path / "llama" / name).write_text(content)
        finetune(model=model, tokenizer=kit.tokenizer, **changes)(kit)

    return begin


FINETUNING = [
    refused("no model", finetune(model=None), "MODEL is missing"),
    refused("no sequence length", finetune(sequence_length=None), "--sequence-length is missing"),
    refused("misspelt target", finetune(lora_targets="q_pro"), "q_pro, which is not a module.*did you mean q_proj?"),
    refused("forget gate of a Llama", finetune(train_in_full="f_proj"), "names f_proj, which is not a module"),
    refused("LoRA on the tied head", finetune(lora_targets="lm_head"), "adapter of embed_tokens or lm_head"),
    refused(
        "rows beyond the context",
        finetune(sequence_length=128, batch_tokens=128),
        "128 is more than the 64 tokens.*by --recipe rope-extend",
    ),
    *(
        refused(f"{name} of a full training", finetune(full=True, **{name: value}), f"leave out {option(name)}")
        for name, value in [("lora_targets", "q_proj"), ("lora_dropout", 0.5), ("merge", True)]
    ),
    refused(
        "a target in full", finetune(lora_targets="q_proj", train_in_full="norm,q_proj"), "both name q_proj; leave it"
    ),
    refused(
        "merging into a base of 4 bits", finetune(load_in_4bit=True, merge=True), "leave out --merge: `hf_longctx"
    ),
    refused("training all of 4 bits", finetune(load_in_8bit=True, full=True), "leave out --full"),
    refused("base of another recipe", finetune(rope_base=1e6), "--rope-base belongs to --recipe rope-extend"),
    refused("no context to measure", finetune(eval_context=False), "--eval-context belongs to --recipe rope-extend"),
    refused(
        "states of a mixture", finetune(recipe="hmt", carry_state=True, data="a,b"), "one text in its order, not a"
    ),
    refused(
        "many places of a stream", finetune(recipe="hmt", carry_state=True, streaming=True), "leave out --streaming"
    ),
    refused(
        "no longer context",
        finetune(recipe="rope-extend"),
        "32 does not extend the context of 64 tokens, and base 10000 suffices for these: there is nothing to extend",
    ),
    refused(
        "base below the bound",
        finetune(recipe="rope-extend", sequence_length=256, batch_tokens=256, rope_base=100.0),
        "--rope-base 100 is below the bound of .*--allow-below-bound",
    ),
    refused(
        "attention of a recipe", finetune(recipe="fox-from-llama", attention="vllm"), "cannot be had: .*forget gate"
    ),
    refused("rate of gates of a Llama", finetune(gate_learning_rate=1.0), "for forget gates, and none are trained"),
    refused("a recipe on an adapter", on_an_adapter(recipe="hmt"), "only --recipe lora trains on; .*merge it first"),
    refused("all of an adapter", on_an_adapter(full=True), "only --recipe lora trains on; for --full, merge it first"),
    refused("another rank of an adapter", on_an_adapter(lora_rank=2), "has its own; leave out --lora-rank"),
    refused(
        "an adapter without a base",
        on_an_adapter(lambda folder: (folder / "adapter_config.json").write_text("{}")),
        "does not name the base of the adapter; give the base, and --adapter",
    ),
    refused(
        "an adapter beside its base",
        on_an_adapter(lambda folder: (folder / "config.json").write_text("{}")),
        "holds an adapter beside its base; name a whole model with it",
    ),
    refused("encoder-decoder", other_model(T5ForConditionalGeneration, T5Config, d_model=8), "is an encoder-decoder"),
    refused("reads ahead", other_model(BertForMaskedLM, BertConfig, hidden_size=8), "is not causal"),
    refused(
        "rows beyond a table of positions",
        other_model(GPT2LMHeadModel, GPT2Config, n_embd=8, n_positions=16, num_hidden_layers=1),
        "32 is more than the 16 positions",
    ),
    refused("other weights for a run", other_weights, r"other settings \(--model: "),
    refused(
        "merging into a quantized base",
        damaged_model(
            "config.json", '{"model_type": "llama", "quantization_config": {"quant_method": "x"}}', merge=True
        ),
        r"is quantized, and --merge \(of most recipes",
    ),
    refused(
        "damaged configuration",
        damaged_model("config.json", '{"model_type": "llama", "hidden_size": "x"}'),
        "is damaged",
    ),
    refused("a FoX for a Llama", finetune(model=str(DEMO), recipe="fox-from-llama"), "(?i)llama"),
    refused("RoPE of a FoX", finetune(model=str(DEMO), recipe="rope-extend"), "one RoPE base"),
    refused("tokenizer of another model", larger_tokenizer, f"has {VOCABULARY + 1} tokens, the model {VOCABULARY}"),
    refused("adapter of a deeper base", adapter_on(num_hidden_layers=2), "num_hidden_layers 1, not 2"),
    refused("adapter of other weights", adapter_on(initializer_range=0.5), "trained on another model"),
    refused("no adapter", lambda kit: load_adapter(None, kit.path), "holds no adapter"),
]
RUNS = [
    refused("text of less than a row", run(sequence_length=4096, batch_tokens=4096), "tokens; one row needs 4096"),
    refused("unknown attention", run(data="/no/such/text", attention="sdpax"), "--attention sdpax cannot be had: "),
    refused("empty text", after(write("empty.txt", " \n"), run(data="./empty.txt")), "holds no text"),
    refused(
        "tokens that are no integers",
        after(write("real.npy", np.zeros(999)), run(data="./real.npy")),
        "holds float64 of 1 dimensions; a file of tokens holds integers",
    ),
    refused(
        "tokens of another tokenizer",
        after(write("far.npy", np.full(999, 70000)), run(data="./far.npy")),
        f"holds tokens from 70000 to 70000; the tokenizer has {VOCABULARY}",
    ),
    *(
        refused(
            f"{name} as tokens", after(write("no.npy", content), run(data="./no.npy")), "not a whole file of numpy"
        )
        for name, content in {
            "an empty file": b"",
            "something else": b"tokens",
            "half a file": b"\x93NUMPY\1\0v",
        }.items()
    ),
    refused("text of less than a step", run(batch_tokens=2**16), r"holds \d+ rows of 64 tokens, less than the 65536"),
    refused(
        "evaluation text of less than a row",
        after(write("short.txt", "a fox"), run(eval_data="./short.txt")),
        "one row needs 64",
    ),
    refused(
        "not UTF-8",
        after(write("text.txt", "café ".encode("latin-1") * 99), run(data="./text.txt")),
        "is not text in UTF-8",
    ),
    refused("no column text", after(write("a.jsonl", '{"content": "x"}'), run(data="./a.jsonl")), "--text-column"),
    refused(
        "no such column", after(write("a.csv", "text\nx\n"), run(data="./a.csv", text_column="body")), 'column "body"'
    ),
    refused("dataset name without a network", run(data="no/dataset"), "no/dataset is neither a file nor a folder"),
    refused("no such tokenizer", run(tokenizer="./none"), "--tokenizer .*none cannot be loaded.*Name the folder"),
    refused("unknown way to resume", run("always"), "--resume is always; it must be auto, never, or a checkpoint"),
    refused(
        "checkpoint of another run",
        after(damaged("metrics.jsonl", ""), run("./run/checkpoints/checkpoint-2", output="./other")),
        "it must be auto, never, or a checkpoint of this run",
    ),
    *(
        refused(f"damaged {name}", after(damaged(f"checkpoints/checkpoint-2/{name}", "cut"), run()), says)
        for name, says in {
            name: f"checkpoint-2 is damaged: {name} cannot be read. Remove this folder"
            for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json")
        }.items()
    ),
    *(
        refused(
            f"checkpoint of {kind}", after(divided(file), run()), f"with {kind}, and these have whole models. Go on"
        )
        for kind, file in {"FSDP": "pytorch_model_fsdp_0", "DeepSpeed": "global_step2"}.items()
    ),
    refused("damaged metrics", after(damaged("metrics.jsonl", "x\n"), run()), "metrics.jsonl has a line that this"),
    refused("damaged tokens", after(damaged("data/tokens.npy", "cut"), run()), "tokens.npy is not a whole file"),
    refused("damaged lock", after(damaged("lock.json"), run()), "lock.json is damaged"),
    refused("two trainings in one folder", in_use, "another process trains in .*run; wait for it"),
    refused(
        "output is a file",
        after(write("text.txt"), run(output="./text.txt")),
        "is a file or a broken link; --output is the folder",
    ),
    refused(
        "output is a broken link",
        after(lambda kit: (kit.path / "run").symlink_to("nowhere"), run()),
        "is a file or a broken link; --output is the folder",
    ),
    refused(
        "folder of something else", after(write("run/thesis.tex"), run()), "holds other files than those of a run"
    ),
    refused("tokenizer without an EOS", without_eos, "no EOS, which ends a document"),
    refused(
        "checkpoint that misses files",
        after(write("checkpoint-3/trainer_state.json", "{}"), lambda kit: check_checkpoint(kit.path / "checkpoint-3")),
        "not a complete checkpoint: weights, optimizer, schedule, random state missing",
    ),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run, beside its text."""
    folder = tmp_path_factory.mktemp("finished")
    text = folder / "text.txt"
    text.write_text("The fox forgets what it no longer needs. " * 40)
    run()(SimpleNamespace(path=folder, text=text, tokenizer=str(DEMO)))
    return folder / "run"


def save_llama(folder, **changes):
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2) | changes
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def adapted(finished, tmp_path_factory):
    """The folder of a run that has trained an adapter."""
    folder = tmp_path_factory.mktemp("adapted")
    finetune(model=save_llama(folder / "llama"))(SimpleNamespace(path=folder, text=finished.parent / "text.txt"))
    return folder / "run"


@pytest.fixture
def kit(tmp_path, finished, adapted):
    return SimpleNamespace(
        path=tmp_path,
        text=finished.parent / "text.txt",
        tokenizer=str(DEMO),
        llama=lambda **changes: save_llama(tmp_path / "llama", **changes),
        finished=finished,
        adapted=adapted,
    )


@pytest.mark.parametrize("mistake", [*SETTINGS, *RUNS, *FINETUNING], ids=str)
def test_mistakes(mistake, kit, record_property):
    record_property("mistake", mistake.check(kit))


def test_a_run_goes_on_only_with_its_own_settings_and_data(kit):
    run()(kit)
    with pytest.raises(ValueError, match=r"other settings \(--learning-rate: 0.003 -> 0.1; --seed: 0 -> 1\).*never"):
        run(learning_rate=0.1, seed=1)(kit)
    (kit.path / "text.txt").write_text("Another text about a fox that forgets. " * 40)
    with pytest.raises(ValueError, match="is not the text that the run"):
        run(data="./text.txt")(kit)
    with pytest.raises(ValueError, match="a finished model, which --resume never would lose"):
        run("never")(kit)


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(kit):
    with pytest.raises(FloatingPointError, match=r"gradients of step \d+ is (nan|inf). The weights are those of step"):
        run(learning_rate=1e38, max_grad_norm=1e30, weight_decay=0.0, steps=5, schedule="constant")(kit)


def test_a_run_goes_on_from_an_earlier_checkpoint_and_drops_the_later_one(kit, monkeypatch):
    folder = kit.path / "run"
    shutil.copytree(kit.finished, folder)
    shutil.rmtree(folder / "model")

    def end(*args, **kwargs):
        raise InterruptedError

    monkeypatch.setattr(ResumableTrainer, "train", end)
    with pytest.raises(InterruptedError):
        run("./run/checkpoints/checkpoint-1")(kit)
    monkeypatch.undo()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["checkpoint-1"]
    run()(kit)
    assert (folder / "metrics.jsonl").read_text() == (kit.finished / "metrics.jsonl").read_text()


def test_a_mistake_that_is_found_late_can_be_mended_in_the_same_folder(kit):
    with pytest.raises(ValueError, match="did you mean q_proj"):
        finetune(lora_targets="q_pro")(kit)
    tokens = (kit.path / "run" / "data" / "tokens.npy").stat().st_mtime_ns
    finetune(lora_targets="q_proj", steps=2)(kit)
    assert (kit.path / "run" / "data" / "tokens.npy").stat().st_mtime_ns == tokens  # packed once


@pytest.mark.parametrize("schedule, steps", [("warmup_stable_decay", 11), ("cosine", 2)])
def test_a_run_is_made_longer_if_its_learning_rate_did_not_know_its_end(schedule, steps, kit):
    sizes = dict(schedule=schedule, warmup_steps=0, save_steps=steps - 1)
    whole, part = ({"output": f"./{name}", **sizes} for name in ("whole", "part"))
    run(**part, steps=steps)(kit)
    with pytest.raises(ValueError, match=rf"other settings \(--steps: {steps} -> {steps + 2}\)"):
        run(**part, steps=steps + 2)(kit)  # the last step had a lower rate
    if schedule == "cosine":
        return
    run(f"./part/checkpoints/checkpoint-{steps - 1}", **part, steps=steps + 2)(kit)
    run(**whole, steps=steps + 2)(kit)
    whole, part = kit.path / "whole", kit.path / "part"
    assert (part / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    assert (part / "model" / "model.safetensors").read_bytes() == (whole / "model" / "model.safetensors").read_bytes()
    assert (part / "old-1" / "model" / "model.safetensors").exists()


def test_the_same_command_says_that_the_run_is_finished(kit, capsys):
    folder = kit.path / "run"
    shutil.copytree(kit.finished, folder)
    metrics = (folder / "metrics.jsonl").read_text()
    assert cli.main(["train", "--config", str(folder / "config.yaml"), "--output", str(folder)]) == 0
    assert f"{folder} is finished: the model is in {folder / 'model'}." in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_text() == metrics


def test_the_exit_code_of_a_mistake_is_2_and_of_an_overflow_1(kit, capsys):
    sizes = (
        "--sequence-length 64 --batch-tokens 64 --per-device-batch-size 1 --steps 5 --tokenizer model_cards/fox-demo"
    )
    command = ["train", *sizes.split(), "--data", str(kit.text), "--output", str(kit.path / "run")]
    overflow = "--learning-rate 1e38 --max-grad-norm 1e30 --weight-decay 0 --schedule constant"
    for code, options in [(2, "--learning-rate 0"), (2, "--config none.yaml"), (1, overflow)]:
        assert cli.main([*command, *options.split()]) == code
        assert capsys.readouterr().err.splitlines()[-1].startswith("hf-longctx: error: ")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("file write failed")])
def test_a_full_disk_is_named_and_leaves_the_older_checkpoints(error, kit, monkeypatch):
    save = ResumableTrainer._save_optimizer_and_scheduler

    def fill(self, folder):
        if self.state.global_step == 2:
            raise error
        save(self, folder)

    monkeypatch.setattr(ResumableTrainer, "_save_optimizer_and_scheduler", fill)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e6))
    with pytest.raises(OSError, match=r"too full to save in .* takes about 3 MB, and 1 MB are free") as raised:
        run()(kit)
    assert cli.shared.exit_code(raised.value) == 1
    monkeypatch.undo()
    checkpoints = kit.path / "run" / "checkpoints"
    assert last_checkpoint(checkpoints).name == "checkpoint-1"
    run()(kit)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint-1", "checkpoint-2"]
