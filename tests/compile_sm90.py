"""Compiles every Triton kernel for sm_90, without a GPU, and prints what came out as one JSON object.

    python tests/compile_sm90.py        {"matmul": {"registers": 190, "stack": 0, "wgmma": 4, …}, …}

A process of its own, because kernels are either compiled or interpreted. `stack`: bytes of local memory per thread,
more than 0 where registers spill. `wgmma`: E4M3 warp-group products in the PTX. `asynchronous`: 16-byte copies to
shared memory. `wide`: 16-byte accesses to global memory.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dstrain.precision.kernels import blocks, e5m6, gemm, grouped_gemm, permute, rms_norm, swiglu, tiles  # noqa: E402
from dstrain.precision.kernels.tile_product import STAGES, WARPS  # noqa: E402

OPERANDS = {"a": "*fp8e4nv", "b": "*fp8e4nv", "offsets": "*i32"}
KEPT = {name: "*fp8e4nv" for name in (
    "codes", "gate_codes", "up_codes", "out", "turned_codes", "row_codes", "column_codes",
    "dgate", "dup",
)}
STRIDES = {
    "a_stride", "b_stride", "c_stride", "b_expert", "c_expert", "k_size", "cols", "x_stride", "column_stride", "bytes_",
}
LAST = {"a_scale_k": 1, "b_scale_k": 1}  # the interface's scales are contiguous, and a stride of 1 is compiled in
FP32 = {"weight", "inverse_rms", "weight_parts"}

# name: kernel, types by argument (others: pointers to FP32 if named like scales, else integers), constants, options
GEMM = {"num_warps": WARPS, "num_stages": STAGES}
CASES = {
    "matmul": (gemm.matmul_kernel, OPERANDS | {"c": "*bf16"}, LAST | {"B_PER_ROW": False, "ACCUMULATE": False}, GEMM),
    "accumulate": (gemm.matmul_kernel, OPERANDS | {"c": "*fp32"}, LAST | {"B_PER_ROW": True, "ACCUMULATE": True}, GEMM),
    "grouped_matmul": (grouped_gemm.grouped_matmul_kernel, OPERANDS | {"c": "*bf16"}, LAST | {"EXPERTS": 32}, GEMM),
    "grouped_accumulate": (grouped_gemm.grouped_accumulate_kernel, OPERANDS | {"c": "*fp32"}, LAST, GEMM),
    "quantize_rows": (tiles.quantize_rows_kernel, KEPT | {"x": "*bf16"}, {"POWER_OF_TWO": True, "ROWS": 32}, {}),
    "quantize_rows fp32 scales": (
        tiles.quantize_rows_kernel, KEPT | {"x": "*bf16"}, {"POWER_OF_TWO": False, "ROWS": 32}, {},
    ),
    "dequantize_rows": (tiles.dequantize_rows_kernel, KEPT | {"out": "*bf16"}, {"ROWS": 32}, {}),
    "quantize_both": (
        tiles.quantize_columns_kernel, KEPT | {"x": "*bf16", "offsets": "*i32"},
        {"x_scales": None, "POWER_OF_TWO": True, "DEQUANTIZE": False, "BOTH": True, "EXPERTS": 32}, {"num_warps": 8},
    ),
    "requantize_columns": (
        tiles.quantize_columns_kernel, KEPT | {"x": "*fp8e4nv"},
        {"row_codes": None, "row_scales": None, "offsets": None, "POWER_OF_TWO": True, "DEQUANTIZE": True,
         "BOTH": False, "EXPERTS": 0}, {"num_warps": 8},
    ),
    "quantize_weight": (
        blocks.quantize_blocks_kernel, KEPT | {"weight": "*bf16"}, {"POWER_OF_TWO": True}, {"num_warps": 8},
    ),
    "quantize_e5m6": (e5m6.quantize_e5m6_kernel, {"x": "*bf16", "packed": "*u8"}, {"ROWS": 32}, {}),
    "dequantize_e5m6": (e5m6.dequantize_e5m6_kernel, {"packed": "*u8", "out": "*bf16"}, {"ROWS": 32}, {}),
    "e5m6_to_columns": (
        e5m6.e5m6_to_columns_kernel, KEPT | {"packed": "*u8"}, {"POWER_OF_TWO": True}, {"num_warps": 8},
    ),
    "swiglu": (
        swiglu.swiglu_kernel, KEPT | {"gate": "*bf16", "up": "*bf16"},
        {"POWER_OF_TWO": True, "WEIGHTED": True, "ROWS": 32}, {},
    ),
    "swiglu_backward_rows": (
        swiglu.swiglu_backward_rows_kernel, KEPT | {"grad": "*bf16"},
        {"POWER_OF_TWO": True, "WEIGHTED": True, "ROWS": 32}, {},
    ),
    "swiglu_backward_columns": (
        swiglu.swiglu_backward_columns_kernel, KEPT | {"grad": "*bf16", "offsets": "*i32"},
        {"POWER_OF_TWO": True, "WEIGHTED": True, "EXPERTS": 32, "WIDTH": swiglu.WIDTH}, {"num_warps": 8},
    ),
    "rms_norm": (
        rms_norm.rms_norm_kernel, KEPT | {"x": "*bf16", "eps": "fp32"},
        {"POWER_OF_TWO": True, "TILES": 64}, {"num_warps": 8},
    ),
    "permute": (
        permute.permute_kernel, {"codes": "*u8", "out": "*u8", "index": "*i64"}, {"COLS": 4096, "TILES": 64}, {},
    ),
    "unpermute": (permute.unpermute_kernel, {"rows": "*bf16", "slots": "*i64", "out": "*bf16"}, {"COLS": 2048}, {}),
    # the control: what a spill looks like to this script
    "control": (
        gemm.matmul_kernel, OPERANDS | {"c": "*bf16"}, LAST | {"B_PER_ROW": False, "ACCUMULATE": False},
        GEMM | {"num_warps": 4},
    ),
}


def compile_kernel(kernel, types: dict, constants: dict, options: dict) -> dict:
    def kind(name):
        pointer = name.endswith("scales") or name in FP32
        return "constexpr" if name in constants else types.get(name, "*fp32" if pointer else "i32")

    signature = {name: kind(name) for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in STRIDES - set(constants)
    }
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(ASTSource(kernel, signature, constants, aligned), target=target, options=options)
    ptx = compiled.asm["ptx"]
    usage = resources(compiled.asm["cubin"])
    return {
        "registers": usage["REG"], "stack": usage["STACK"] + usage["LOCAL"], "shared": compiled.metadata.shared,
        "wgmma": len(re.findall(r"wgmma\.mma_async\S*\.e4m3\.e4m3", ptx)),
        "asynchronous": len(re.findall(r"cp\.async\.cg\.shared\.global", ptx)),
        "wide": len(re.findall(r"(?:ld|st)\.global\S*\.v4\.b32", ptx)),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """What the binary's own header says of its needs."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


if __name__ == "__main__":
    print(json.dumps({name: compile_kernel(*case) for name, case in CASES.items()}))
