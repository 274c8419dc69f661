"""Host time of an eager training step without a GPU: the CUDA path on CPU tensors, with a driver that does nothing.

    python -m scripts.bench.host_time

The models have the layers of the 125M presets, but tiny sizes, so that arithmetic on the CPU takes little time. Triton
compiles and launches the kernels of an H100, but the driver ignores the launches, so all results are wrong. A step is
a forward and backward pass under bfloat16 autocast. "host ms" is CPU time of the thread, including the arithmetic. Two
counts do not depend on the load of the machine: "operators" are calls of PyTorch's operators, and "Python calls" are
calls of Python functions. A GPU has one kernel for RMSNorm, and a CPU composes it from several operators, so LayerNorm
replaces it here. The time that a launch takes in a real driver is not measured. The script needs a C compiler and
Triton.
"""

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from scripts.bench import common


# cuPointerGetAttribute returns the pointer itself. The other functions report success, and a device of capability 9.0.
DRIVER = """
#include <stdint.h>
int cuPointerGetAttribute(void *value, int name, uint64_t pointer) { *(uint64_t *)value = pointer; return 0; }
int cuDeviceGetAttribute(int *value, int name, int device) {
    *value = name == 75 ? 9 : name == 76 ? 0 : name == 16 ? 132 : 232448; return 0;
}
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)1; return 0; }
int cuFuncGetAttribute(int *value, int name, void *function) { *value = name == 0 ? 1024 : 0; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
"""
IGNORED = """Init GetErrorString CtxSetCurrent CtxGetDevice CtxGetLimit CtxSetLimit DeviceGet DeviceGetCount
DevicePrimaryCtxRetain DriverGetVersion ModuleUnload FuncSetAttribute FuncSetCacheConfig StreamIsCapturing
PointerGetAttributes LaunchKernelEx LaunchKernel OccupancyMaxActiveClusters TensorMapEncodeTiled
TensorMapEncodeIm2col MemAlloc_v2"""
MODELS = {"llama": "Llama", "fox": "FoX (LLaMA)", "fox-pro": "FoX (Pro)"}  # preset: name
TABLE = """
| model | host ms | to Llama | operators | Python calls |
| {name} | {ms:.1f} | {to_llama:.2f}x | {operators} | {python_calls} |
"""


def install_driver(folder):
    """Compile the driver, load it under the name of CUDA's, and make Triton use it."""
    source, library = folder / "cuda.c", folder / "libcuda.so.1"
    source.write_text(DRIVER + "".join(f"int cu{name}() {{ return 0; }}\n" for name in IGNORED.split()))
    subprocess.run(["cc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, source], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)

    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils, ty_to_cpp
    from triton.runtime.driver import driver

    class Driver:
        launcher_cls = CudaLauncher
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        map_python_to_cpp_type = staticmethod(ty_to_cpp)
        allocate_default_profile_scratch = staticmethod(lambda *args: None)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    driver.set_active(Driver())
    Driver.utils = CudaUtils()


def accept_cpu():
    """Make FoX run its kernels on CPU tensors, as on a GPU of capability 9.0."""
    from hf_longctx.fox import backend_fox, fused_fox, modeling_fox, tiles_fox, triton_fox

    for module in (backend_fox, fused_fox, modeling_fox, triton_fox):
        module.why_not = lambda *args: None
    tiles_fox.capability_of = lambda device: 90
    fused_fox.has_kernels = lambda device: True
    fused_fox.processors = triton_fox.processors = lambda device: 132
    F.rms_norm = lambda x, shape, weight=None, eps=None: F.layer_norm(x, shape, weight, None, eps or 1e-6)


def make_step(kind, layers, tokens):
    """Return a function that runs one step."""
    from hf_longctx.training.config import PRESETS

    sizes = dict(vocab_size=128, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
                 head_dim=16, intermediate_size=128, max_position_embeddings=tokens)  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(PRESETS[f"{kind}-125m"], **sizes)).train()
    model.set_attn_implementation("sdpa" if kind == "llama" else "forgetting_triton")
    ids, parameters = torch.randint(3, 128, (1, tokens)), list(model.parameters())

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.lm_head(model.model(ids, use_cache=False)[0])
        F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def count_operators(step):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return sum(event.count for event in profiler.key_averages() if event.key.startswith("aten::"))


def count_python_calls(step):
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    return calls


def measure(args):
    with tempfile.TemporaryDirectory() as folder:
        install_driver(Path(folder))
        accept_cpu()
        torch.set_num_threads(1)
        steps = {kind: make_step(kind, args.layers, args.tokens) for kind in MODELS}
        for step in steps.values():  # compiles the kernels
            step()
        turns = {kind: lambda step=step: common.timed(step, clock=time.thread_time)[0] for kind, step in steps.items()}
        seconds = common.alternate(turns, args.rounds)
        for kind, step in steps.items():
            yield {
                "name": MODELS[kind],
                "ms": 1e3 * statistics.median(seconds[kind]),
                "to_llama": common.median_ratio(seconds[kind], seconds["llama"]),
                "operators": count_operators(step),
                "python_calls": count_python_calls(step),
            }


def table(result):
    return common.markdown(result["rows"], TABLE)


def main(arguments=None):
    parser = common.make_parser(__spec__.name, __doc__, layers=12, tokens=32, rounds=60)
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
