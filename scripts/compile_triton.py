"""Compile every kernel specialisation of `hf_longctx.fox.triton_fox.TILES` to a cubin and report what it needs.

No GPU is needed: registers, spills, shared memory and tensor-core instructions are read from the cubin with the
cuobjdump that travels with Triton. Blocks per multiprocessor, and the occupancy (the share of its warps that they fill),
follow from registers, shared memory and warps.

    python scripts/compile_triton.py --capability 90 --head-dim 64 128 --json report.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path


os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hf_longctx.fox import triton_fox as fox
from hf_longctx.fox.attention_fox import GATE_PARTS


DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
KERNELS = {
    "block_decay": fox.block_decay_kernel,
    "forward": fox.forward_kernel,
    "dq": fox.dq_kernel,
    "dkdv": fox.dkdv_kernel,
    "decode": fox.decode_kernel,
    "prune": fox.prune_kernel,
    "merge": fox.merge_kernel,
}
# bytes of shared memory per multiprocessor and per block, registers, warps and blocks per multiprocessor (CUDA C++
# programming guide, table of technical specifications per compute capability)
LIMITS = {
    80: (167936, 166912, 65536, 64, 32),
    86: (102400, 101376, 65536, 48, 16),
    90: (233472, 232448, 65536, 64, 32),
    100: (233472, 232448, 65536, 64, 32),
}
TENSOR_CORE = r"\b(HMMA|HGMMA|UTC\w*MMA)\b"  # Ampere, Hopper, Blackwell
SPILL = r"\b(?:LDL|STL)\b"
INPUT_POINTERS = {"p_q", "p_k", "p_v", "p_x", "p_o", "p_do", "p_dq", "p_dk", "p_dv"}
UNALIGNED = {f"s_{x}{d}" for x in "kvxu" for d in "bhgtp"}  # decoding: folded keys are a multiple of 8 wide, not of 16


def source(kernel, dtype: str, constants: dict) -> ASTSource:
    """The kernel as it is launched on 16-byte aligned tensors; decoding as from a static cache of folded keys."""
    signature, fixed, attributes = {}, dict(constants), {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("p_first", "p_stop"):
            signature[name] = "*i32" if constants["BOUNDED"] else "constexpr"
            if not constants["BOUNDED"]:
                fixed[name] = None
        elif name == "p_kept":
            signature[name] = "*i32"
        elif name.startswith("p_"):
            partial = kernel is fox.decode_kernel and name == "p_o"  # partial results are fp32
            signature[name] = f"*{dtype}" if name in INPUT_POINTERS and not partial else "*fp32"
            signature[name] = "*i64" if name == "p_end" else signature[name]
        else:
            signature[name] = "fp32" if name in ("scale", "unit", "bound_unit", "tolerance") else "i32"
        decoding = kernel in (fox.decode_kernel, fox.prune_kernel)
        aligned = (name.startswith("s_") and not (decoding and name in UNALIGNED)) or name.startswith("p_")
        if aligned and signature[name] != "constexpr":
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, {(kernel.arg_names.index(n),): x for n, x in fixed.items()}, attributes)


def cuobjdump(option: str, cubin: Path) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, cubin], capture_output=True, text=True, check=True).stdout


def hot_loop_spills(sass: str) -> int:
    """Local-memory instructions in the unmasked loop: the innermost loop with the fewest instructions per product."""
    code = [(int(a, 16), text) for a, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    jumps = [(int(m[1], 16), a) for a, text in code if (m := re.search(r"\bBRA\b.*0x([0-9a-f]+)", text))]
    loops = [(lo, hi) for lo, hi in jumps if lo < hi]
    best = None
    for lo, hi in loops:
        body = [text for a, text in code if lo <= a <= hi]
        products = sum(bool(re.search(TENSOR_CORE, text)) for text in body)
        inner = any(lo <= other[0] and other[1] <= hi for other in loops if other != (lo, hi))
        if products and not inner:
            spills = sum(bool(re.search(SPILL, text)) for text in body)
            best = min(best or (len(body) / products, spills), (len(body) / products, spills))
    return best[1] if best else 0


def report(capability: int, name: str, dtype: str, head_dim: int, bounded: bool) -> dict:
    """Compiles one specialisation and reads its resources."""
    tiles = fox.nearest_tiles(capability, DTYPES[dtype], head_dim)
    tile = getattr(tiles, name) if hasattr(tiles, name) else tiles.decode._replace(warps=1)  # as they are launched
    constants = {"D": head_dim, "BM": tile.BM, "BN": tile.BN, "BD": fox.padded(head_dim), "BOUNDED": bounded}
    if name == "forward":
        constants["KNOWN"] = True
    if name == "dq":
        constants["BR"] = tiles.dkdv.BM
    if name == "dkdv":
        constants["BS"] = min(tile.BM, 16)
    if name in ("decode", "prune"):
        constants |= {"P": GATE_PARTS, "ENDS": True, "W": 8}
    constants = {key: value for key, value in constants.items() if key in KERNELS[name].arg_names}
    compiled = triton.compile(
        source(KERNELS[name], dtype, constants),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage, sass = cuobjdump("--dump-resource-usage", cubin), cuobjdump("--dump-sass", cubin)
    registers, stack = (int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    shared = compiled.metadata.shared
    per_sm, per_block, all_registers, all_warps, all_blocks = LIMITS[capability]
    blocks = min(
        per_sm // (shared + 1024),  # the driver keeps 1 KiB per block
        all_registers // (-(-registers // 8) * 8 * 32 * tile.warps),
        all_warps // tile.warps,
        all_blocks,
    )
    return {
        "capability": capability,
        "kernel": name,
        "dtype": dtype,
        "head_dim": head_dim,
        "bounded": bounded,
        "tile": list(tile),
        "registers": registers,
        "spill_bytes": stack,
        "spill_instructions": len(re.findall(SPILL, sass)),
        "hot_loop_spills": hot_loop_spills(sass),
        "shared": shared,
        "shared_limit": per_block,
        "tensor_core": "+".join(sorted(set(re.findall(TENSOR_CORE, sass)))) or "no tensor cores",
        "blocks_per_sm": blocks,
        "warps_per_sm": blocks * tile.warps,
        "occupancy": blocks * tile.warps / all_warps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"], choices=DTYPES)
    parser.add_argument("--kernel", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--bounded", type=int, nargs="+", default=[0, 1], help="without and with padding or pruning")
    parser.add_argument("--json", type=Path, help="where to write the report")
    args = parser.parse_args()
    rows = []
    for capability in args.capability:
        for dtype in args.dtype:
            for head_dim in args.head_dim:
                for name in args.kernel:
                    for bounded in args.bounded:
                        row = report(capability, name, dtype, head_dim, bool(bounded))
                        rows.append(row)
                        print(
                            "sm_{capability} {dtype} D={head_dim:<3} {kernel:<7} bounded={bounded:d} {tile} registers "
                            "{registers} spills {spill_bytes} B, {hot_loop_spills} instructions in the hot loop, "
                            "shared {shared} of {shared_limit}, {tensor_core}, {blocks_per_sm} blocks/SM, "
                            "occupancy {occupancy:.0%}".format(**row),
                            flush=True,
                        )
    if args.json:
        args.json.write_text(json.dumps({"triton": triton.__version__, "kernels": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
