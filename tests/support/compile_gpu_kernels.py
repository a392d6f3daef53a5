"""Compile all GPU kernels for a processor that need not be there, as passes of several sizes launch them; prints what
their code has and needs: ``python tests/support/compile_gpu_kernels.py 90``."""

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from forerun.core.sampling_kernels import BITS, GOLDEN, MIX1, MIX2
from forerun.kernels.gpu import attend, decoder_ops, linear, recurrences, token_choice
from forerun.kernels.gpu.linear import LINEAR_TILES
from forerun.kernels.gpu.pass_tables import GPU_COMBINE_QUERIES, GPU_TILE_QUERIES

TABLES = dict.fromkeys(("addresses", "strides", "tokens", "tiles", "rows", "own", "ids", "jobs"), "*i64")
FLOATS = {
    **dict.fromkeys(("state", "sums", "sinks", "parts", "cos", "sin"), "*fp32"),
    **dict.fromkeys(("scale", "softcap", "factor", "eps", "after_eps", "before_eps"), "fp32"),
}
SHARED_BYTES = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10}
"""Shared memory of a processor; each program uses 1 KiB more than it asks for (CUDA C++ programming guide, table of
compute capabilities)."""
REGISTERS, THREADS = 65536, {80: 2048, 86: 1536, 89: 1536, 90: 2048}
REGISTERS_OF_A_WARP = 256
"""Registers are given to a warp in multiples of so many."""
GROUPS = (1, 4, 8, 16)
"""Query heads of a KV head: Llama-2-7B's, Llama-3-8B's, Llama-3-70B's, and the most that one program combines."""
SINGLE = {"x_column": 1, "w_column": 1}
"""Integers that are 1 in every call; Triton compiles them in."""
UNALIGNED = {"n", "splits", "width", "size", "pieces", "window", "group", "kv_heads", "heads", "count", "step",
             "following_bytes"}  # fmt: skip
"""Integers that need not be multiples of 16."""


def code(
    kernel: Any, capability: int, constants: dict[str, object], warps: int = 4, stages: int = 3,
    maxnreg: int | None = None, **types: str,
) -> dict[str, Any]:  # fmt: skip
    """What a kernel's code has, given the types of its arguments that are no 32-bit integers."""
    known = TABLES | FLOATS | types
    signature = {name: known.get(name, "i32") for name in kernel.arg_names}
    constants = constants | {name: value for name, value in SINGLE.items() if name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if not (kernel.params[place].do_not_specialize or kernel.params[place].do_not_specialize_on_alignment)
        and name not in constants
        and name not in UNALIGNED
        and "fp" not in signature[name].replace("*fp", "")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"enable_fp_fusion": False, "num_warps": warps, "num_stages": stages, "maxnreg": maxnreg}
    whole = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    compiled, shared = whole.asm, whole.metadata.shared
    ptx = compiled["ptx"]
    registers, spills = _assembled(ptx, capability)
    return {
        "products": sorted(set(re.findall(r"(?:wgmma|mma\.sync)[.\w]*", ptx))),
        "loads": sorted(set(re.findall(r"ld\.global[.\w:]*", ptx))),
        "copies": sorted({int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.[^;]*?0x(\d+)", ptx)}),
        "spills": spills, "registers": registers, "shared": shared,
        "programs": _programs(capability, 32 * warps, registers, shared),
        "prefetches": "cp.async.bulk.prefetch.L2" in ptx, "loads_ahead": _loads_ahead(compiled["cubin"]),
    }  # fmt: skip


def _loads_ahead(cubin: bytes) -> int:
    """The most loads from memory that the processor is given one after the other, before it needs any of them for an
    exponential."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(knobs.nvidia.nvdisasm.path), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    between = re.split(r"\b(?:MUFU\.EX2|BRA|BAR)\b", text)
    return max(len(re.findall(r"\bLDG\.E", part)) for part in between)


def _assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread, and bytes of registers that the kernel keeps in memory."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = f"sm_{capability}" + ("a" if capability == 90 else "")
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = sum(int(count) for count in re.findall(r"(\d+) bytes spill", said))
    return int(re.findall(r"Used (\d+) registers", said)[0]), spills


def _programs(capability: int, threads: int, registers: int, shared: int) -> int:
    """Programs that a processor has room for at a time."""
    warp = -(-registers * 32 // REGISTERS_OF_A_WARP) * REGISTERS_OF_A_WARP
    return min(
        REGISTERS // (warp * threads // 32), SHARED_BYTES[capability] // (shared + 1024), THREADS[capability] // threads
    )


def all_codes(capability: int, kind: str) -> dict[str, Any]:
    """Every kernel's code for numbers of this type, in heads of 128."""
    own = dict.fromkeys(("x", "w", "bias", "q", "k", "v", "following"), f"*{kind}")
    ahead = {"AHEAD": capability >= 90}
    found = {}
    for tile in LINEAR_TILES:
        for alone in (True, False) if tile is LINEAR_TILES[-1] else (True,):
            cut = {"ALONE": alone, "TOKENS": tile.tokens}
            name = f"sums {tile.tokens} {'alone' if alone else 'in turn'}"
            found[name] = code(linear._sums, capability, cut, tile.warps, 4, **own, y="*fp32")
    row_bytes = 128 * (4 if kind == "fp32" else 2)
    wide = {
        "DIM": 128,
        "OUT_DIM": 128,
        "WIDE": 128,
        "ALIGNED": True,
        "GPU_BLOCK_TOKENS": attend.block_tokens(row_bytes),
    }
    stages = attend.pipeline_stages(row_bytes)
    for tile in (GPU_COMBINE_QUERIES, GPU_TILE_QUERIES):
        for merging in (False, True):
            how = {"TILE": tile, "MERGING": merging, "SOFTCAP": False, **wide}
            options = attend.scan_options(tile, merging, row_bytes)
            found[f"scan {tile} {'merging' if merging else 'spread'}"] = code(
                attend._scan, capability, how | {"OUT_WIDE": 128}, options["num_warps"], stages, options.get("maxnreg"),
                **own,
            )  # fmt: skip
    for group in GROUPS:
        lanes, numbers, threads = attend.combine_shape(group, 128)
        how = {"TILE": GPU_COMBINE_QUERIES, "MERGING": False, "SOFTCAP": False, **wide, **ahead}
        more = {"OUT_WIDE": numbers, "LANES": lanes, "SINKS": True, "THREADS": threads,
                "GPU_COMBINE_SPLITS": attend.GPU_COMBINE_SPLITS}  # fmt: skip
        found[f"combine of {group}"] = code(
            attend._combine, capability, how | more, threads // 32, stages, **own, y=f"*{kind}"
        )
    norms = {"ADDED": True, "BIAS": False, "AFTER": True, "BEFORE": True, "AFTER_OFFSET": 1, "BEFORE_OFFSET": 0,
             "WIDE": 4096, **ahead}  # fmt: skip
    kinds = {"after": f"*{kind}", "before": f"*{kind}", "y": f"*{kind}", "x": "*fp32"}
    found["add and norm"] = code(decoder_ops._add_norm, capability, norms, decoder_ops.NORM_WARPS.value, **own | kinds)
    columns = {"OFFSET": 0, "BIAS": False, "WIDE": 4096}
    found["norm of all heads"] = code(
        decoder_ops._norm_columns, capability, columns, decoder_ops.NORM_WARPS.value, **own, y="*fp32"
    )
    heads = {"DIM": 128, "HALF": 64, "OFFSET": 0, "BIAS": True, "NORM": True, "WIDE": 128}
    kinds = {"q_norm": f"*{kind}", "k_norm": f"*{kind}"}
    found["rotate"] = code(decoder_ops._rotate_and_store, capability, heads, 1, **own | kinds)
    gated = {"BIAS": False, "SILU": True, **ahead}
    found["gate"] = code(decoder_ops._gate, capability, gated, decoder_ops.GATE_WARPS.value, **own, y=f"*{kind}")
    found["store"] = code(attend._store, capability, {"WIDE": 128, "OUT_WIDE": 128}, **own)
    found["total"] = code(linear._total, capability, {"BIAS": True}, **own, y=f"*{kind}")
    found["mean"] = code(linear._mean, capability, {}, **own, y=f"*{kind}")
    return found


def recurrent_codes(capability: int) -> dict[str, Any]:
    """Code of the recurrent layers' kernels, for heads of 128 in float32."""
    taps = {"CHANNELS": 8192, "TAPS": 4, "BIAS": True, "GPU_CONVOLUTION_CHANNELS": recurrences.GPU_CONVOLUTION_CHANNELS}
    own = dict.fromkeys(("x", "weights", "bias", "out", "rows", "q", "before", "saved", "waiting"), "*fp32")
    found = {"convolve": code(recurrences._convolve, capability, taps, **own, parents="*i64")}
    head = {"KEY_HEADS": 16, "HEADS": 32, "DIM": 128, "OUT_DIM": 128, "WIDE": 128, "SCALE": 128**-0.5, "EPSILON": 1e-6}
    more = {"GPU_STATE_COLUMNS": recurrences.GPU_STATE_COLUMNS, "ROW_WIDTH": 6208}
    for name, gates, delta in (("gated delta rule", 1, True), ("a gate per channel", 128, True), ("Mamba-2", 1, False)):
        how = head | more | {"GATES": gates, "DELTA": delta, "NORMALISE": delta}
        found[name] = code(recurrences._run_states, capability, how, **own, order="*i64")
    return found


def choice_codes(capability: int) -> dict[str, Any]:
    """Code of the kernels that choose a token of 128,000."""
    own = {"noise": "*i64", "best": "*fp64", "tokens": "*i64", "chosen": "*i64"}
    cut = {"RECIPROCAL": True, "CHOICE_TOKENS": token_choice.CHOICE_TOKENS, "GOLDEN": GOLDEN, "MIX1": MIX1,
           "MIX2": MIX2, "BITS": BITS}  # fmt: skip
    return {
        "choose": code(token_choice._choose, capability, cut, logits="*fp32", **own),
        "choose block": code(token_choice._choose_block, capability, {"WIDE": 128}, **own),
    }


def main() -> None:
    capability = int(sys.argv[1])
    found = {kind: all_codes(capability, kind) for kind in sys.argv[2:] or ("bf16", "fp32")}
    found["recurrent"] = recurrent_codes(capability)
    found["choice"] = choice_codes(capability)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
