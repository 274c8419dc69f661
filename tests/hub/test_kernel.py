"""The kernel of forgetting attention: its layout, and a FoX that loads it from a Hub by its name."""

import ast
import json
import sys
import tomllib

import pytest
import torch
from safetensors.torch import save_file

from hf_longctx import FoxConfig, FoxForCausalLM, cli
from hf_longctx.fox.triton_fox import FOX_INTERFACE
from hf_longctx.hub import build_bundle, build_kernel


NAME = "alice/forgetting-attention"
BRANCH = f"v{FOX_INTERFACE}"
LIBRARIES = {"torch", "triton", "__future__", *sys.stdlib_module_names}


def content(bundle, path):
    data = bundle.files[path]
    return data if isinstance(data, bytes) else data.read_bytes()


def write(bundle, folder):
    for path in bundle.files:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content(bundle, path))


def test_the_build_is_closed_and_of_libraries_that_kernels_may_import():
    build = build_kernel(NAME)[BRANCH]
    modules = {path.removeprefix("build/torch-cuda/") for path in build.files if path.startswith("build/torch-cuda/")}
    assert {"__init__.py", "triton_fox.py", "kernels_fox.py", "metadata.json"} < modules
    for name in modules - {"metadata.json"}:
        tree = ast.parse(content(build, f"build/torch-cuda/{name}"), feature_version=(3, 9))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and f"{node.module}.py" in modules, name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                imported = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert {module.split(".")[0] for module in imported} <= LIBRARIES, name


def test_builds_have_names_of_their_own():
    names = {
        json.loads(content(build_kernel(NAME, backend=backend)[BRANCH], f"build/torch-{backend}/metadata.json"))["id"]
        for backend in ("cuda", "cpu")
    }
    assert len(names) == 2 and all(name.isidentifier() for name in names)


def test_the_source_is_what_is_built():
    source, build = build_kernel(NAME).values()
    settings = tomllib.loads(content(source, "build.toml").decode())
    assert settings["general"]["hub"] == {"repo-id": NAME} and settings["general"]["version"] == FOX_INTERFACE
    files = [path for path in source.files if path.startswith("torch-ext/")]
    for path in files:
        assert source.files[path] == build.files[path.replace("torch-ext/forgetting_attention", "build/torch-cuda")]
    assert f'get_kernel("{NAME}", version={FOX_INTERFACE}' in content(source, "README.md").decode()


def test_kernels_own_parsers_read_the_files(tmp_path):
    reads = pytest.importorskip("kernels._rust", reason="needs the library kernels: pip install 'hf-longctx[dev]'")
    for branch, bundle in build_kernel(NAME).items():
        write(bundle, tmp_path / branch)
    assert [str(backend) for backend in reads.Build.open(tmp_path / "main").general.backends] == ["cuda"]
    folder = tmp_path / BRANCH / "build" / "torch-cuda"
    metadata = reads.Metadata.read_from_file(folder / "metadata.json")
    assert (metadata.name.python_name, metadata.version) == ("forgetting_attention", FOX_INTERFACE)
    assert reads.Digest.hash_variant(reads.DigestAlgorithm.SHA256, folder).files == metadata.digest.files


def test_a_dry_run_needs_no_hub(capsys):
    assert cli.main(["push-kernel", NAME, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "build/torch-cuda/metadata.json" in printed and "torch-ext/forgetting_attention/__init__.py" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is that of a CPU, which interprets it")
def test_a_fox_loads_the_kernel_by_its_name(run_client, publish, tmp_path):
    pytest.importorskip("triton")
    pytest.importorskip("kernels", reason="kernels of the Hub need it: pip install 'hf-longctx[dev]'")
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=40, num_hidden_layers=1, pad_token_id=0)
    torch.manual_seed(0)
    fox = FoxForCausalLM(FoxConfig.pro(**sizes, num_attention_heads=2, eos_token_id=None)).eval()
    fox.save_pretrained(tmp_path / "fox")
    publish(build_bundle(tmp_path / "fox").files, "alice/fox")
    ids, mask = torch.randint(3, 61, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[1, :7] = 0
    inputs = {"input_ids": ids[:, :20], "attention_mask": mask[:, :20]}
    with torch.no_grad():
        expected = {"ids": ids, "mask": mask, "logits": fox(ids, attention_mask=mask).logits}
        expected["tokens"] = fox.generate(**inputs, max_new_tokens=3, do_sample=False)
    save_file(expected, tmp_path / "expected.safetensors")

    build = build_kernel(NAME, backend="cpu")[BRANCH]
    write(build, tmp_path / "local")
    commit = publish(build.files, NAME, type="kernel", branch=BRANCH)
    number = f"FOX_INTERFACE = {FOX_INTERFACE}\n".encode()
    later = {path: content(build, path).replace(number, b"FOX_INTERFACE = 2\n") for path in build.files}
    later["build/torch-cpu/metadata.json"] = later["build/torch-cpu/metadata.json"].replace(b"_cpu_", b"_cpu_next_")
    publish(later, "alice/next-attention", type="kernel")

    arguments = commit, tmp_path / "local", tmp_path / "expected.safetensors"
    for variables in ({}, {"HF_HUB_OFFLINE": "1"}):
        run_client("kernel.py", *arguments, **variables)
