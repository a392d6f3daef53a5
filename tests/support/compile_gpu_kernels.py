"""Compile all GPU kernels for a processor that need not be there; prints the tensor-core instructions of bfloat16."""

from __future__ import annotations

import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forerun.kernels.gpu import attend, linear, scan

WIDE = {"WIDE": 128, "OUT_WIDE": 128}
SHAPE = {"SOFTCAP": True, "GPU_TILE_QUERIES": 16, "GPU_BLOCK_TOKENS": 32, "GPU_SPLIT_TOKENS": 512}
TILE = {"BIAS": True, "GPU_LINEAR_TOKENS": 16, "OUTPUTS": 64, "STEP": 64, "GPU_LINEAR_COLUMNS": 1024}
TABLES = dict.fromkeys(("addresses", "strides", "tokens", "tiles", "rows", "own"), "*i64")
ASKED = {**TABLES, "state": "*fp32", "sinks": "*fp32", "scale": "fp32", "softcap": "fp32"}


def compiled(kernel, capability: int, constants: dict[str, object], **types: str) -> str:
    """A kernel's code, given the types of its arguments that are no 32-bit integers."""
    signature = dict.fromkeys(kernel.arg_names, "i32") | {
        name: kind for name, kind in types.items() if name in kernel.arg_names
    }
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]


def main() -> None:
    capability = int(sys.argv[1])
    for kind in ("bf16", "fp32"):
        own = dict.fromkeys(("x", "w", "bias", "q", "k", "v", "y"), f"*{kind}")
        codes = [
            compiled(linear._sums, capability, {**TILE, "ALONE": True}, **(own | {"y": "*fp32"})),
            compiled(linear._sums, capability, {**TILE, "ALONE": False}, **own),
            compiled(attend._scan, capability, {**WIDE, **SHAPE}, **own, **ASKED),
            compiled(attend._combine, capability, {**WIDE, **SHAPE, "SINKS": True}, **own, **ASKED),
        ]
        compiled(attend._store, capability, WIDE, **own, **TABLES)
        compiled(linear._total, capability, {"BIAS": True, "GPU_LINEAR_ROWS": 1024}, **own, parts="*fp32")
        compiled(linear._mean, capability, {"GPU_MEAN_COLUMNS": 1024}, **own)
        if kind == "bf16":
            found = {name for code in codes for name in re.findall(r"(?:wgmma|mma\.sync)[.\w]*", code)}
            sys.stdout.write(" ".join(sorted(found)))
    short = {"WIDE": 32, "CHUNK": 16, "QUADS": 6, "GROUP": 16, "QUAD": 4, "GPU_TILE_QUERIES": 16}
    compiled(scan._best, capability, short, index="*u8", q="*fp32", scale="*fp32", out="*fp32")


if __name__ == "__main__":
    main()
