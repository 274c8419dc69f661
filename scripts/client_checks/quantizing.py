"""Quantizers on a CPU. They round on purpose: the change of the logits is compared with that of a Llama."""

from scripts.client_checks.checks import check, load, logits


ROUNDING = "change of the logits, as a share of their norm"


def change(model, folder, **options):
    """Return the distance of the logits of a quantized model from those of the model in a folder."""
    exact, rounded = logits(load(folder, **options)).float(), logits(model).float()
    return ((rounded - exact).norm() / exact.norm()).item()


@check("torchao, int8 weights", "torchao", ROUNDING, 0.1)
def torchao(folder):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return change(load(folder, quantization_config=TorchAoConfig(Int8WeightOnlyConfig())), folder)


@check("bitsandbytes, 8 bit", "bitsandbytes", ROUNDING, 0.1)
def bitsandbytes_8bit(folder):
    from transformers import BitsAndBytesConfig

    return change(load(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True)), folder)


@check("bitsandbytes, 4 bit", "bitsandbytes", ROUNDING, 0.5)
def bitsandbytes_4bit(folder):
    from transformers import BitsAndBytesConfig

    return change(
        load(folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")), folder
    )


@check("quanto, int8 weights", "optimum-quanto", ROUNDING, 0.1)
def quanto(folder):
    from transformers import QuantoConfig

    return change(load(folder, quantization_config=QuantoConfig(weights="int8")), folder)
