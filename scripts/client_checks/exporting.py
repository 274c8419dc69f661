"""Clients that turn a model into a graph."""

import inspect

import torch
from transformers import DynamicCache

from scripts.client_checks.checks import check, difference, load, token_ids


LENGTH = {"input_ids": {1: torch.export.Dim("length", min=2, max=512)}}


class Logits(torch.nn.Module):
    """The model as a function of token ids alone."""

    def __init__(self, folder):
        super().__init__()
        self.model = load(folder)

    def forward(self, input_ids):
        return self.model(input_ids, use_cache=False).logits


@torch.no_grad()
def difference_of_generation(model, name, **options):
    """Return the difference between a model's logits and those of two graphs, for a prompt and the tokens after it."""
    from transformers import exporters

    exporter, config = getattr(exporters, f"{name}Exporter"), getattr(exporters, f"{name}Config")
    lengths = (40, 1, 1)  # lengths of the prompt and of each step; the graphs were exported with other lengths
    inputs = {"input_ids": torch.randint(3, model.config.vocab_size, (2, sum(lengths)))}
    sample = {"input_ids": inputs["input_ids"][:, :9]}
    exported = exporter().export_for_generation(model, sample, config(dynamic=True, **options))
    inputs["position_ids"] = torch.arange(sum(lengths)).expand(2, -1)
    cache, steps = DynamicCache(config=model.config), []
    passed = inspect.signature(model.prepare_inputs_for_generation).parameters  # the graphs were traced with these
    cache_name = "cache" if "cache" in passed else "past_key_values"
    for parts in zip(*(x.split(lengths, dim=1) for x in inputs.values())):
        runner = exported.runners["decode" if steps else "prefill"]
        output = runner(**dict(zip(inputs, parts)), **{cache_name: cache})
        cache = getattr(output, cache_name)
        steps.append(output.logits)
    return difference(torch.cat(steps, dim=1), model(inputs["input_ids"]).logits)


GENERATION = "difference of logits from those of the model, for a prompt and the tokens after it"
EXPORTERS = {  # exporters of transformers: package and options
    "Dynamo": ("torch", {}),
    "Onnx": ("onnxruntime", {}),
    "OpenVINO": ("openvino", dict(stateful=False)),  # otherwise the program hides the cache
}
for name, (package, options) in EXPORTERS.items():
    check(f"transformers.exporters, {name}", package, GENERATION, 1e-4, 20)(
        lambda folder, name=name, options=options: difference_of_generation(load(folder), name, **options)
    )


@check("ONNX, dynamic length", "onnxruntime", "difference of logits from those of the model", 1e-4)
def onnx_dynamic(folder):
    import onnxruntime

    model, path = Logits(folder).eval(), str(folder / "model.onnx")
    options = {"input_names": ["input_ids"], "dynamo": True, "dynamic_shapes": LENGTH}
    torch.onnx.export(model, (token_ids(length=40),), path, **options)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    batches = [token_ids(length=length) for length in (40, 3, 77)]
    outputs = [torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0]) for ids in batches]
    return max(difference(output, model(ids)) for output, ids in zip(outputs, batches))
