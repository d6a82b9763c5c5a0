"""Compiles every Triton operation for an H200 at DeepSeek-V3's shapes, without one, and says what came out.

A process of its own, without the interpreter: tensors have shapes and no values, and kernels stop before their launch.

    python tests/support/compile_triton.py                one line of JSON per kernel
    python tests/support/compile_triton.py --compare      what got worse than compiled_kernels.json has it; exit code 1
    python tests/support/compile_triton.py --record       writes it down there, for the Triton that is installed

TRITON_CACHE_DIR keeps compiled kernels for the next time.
"""

from __future__ import annotations

import functools
import json
import re
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
RECORDED = HERE / "compiled_kernels.json"
COMMAND = "PYTHONPATH=kernels:. python tests/support/compile_triton.py --record"
INSTRUCTION_BYTES = 16
# What a kernel may take beyond what is written down: a few registers, a tenth of its instructions.
MORE = {"registers": (16, 0.0), "stack_bytes": (0, 0.0), "shared_bytes": (0, 0.0), "instructions": (16, 0.1)}


def of(*shape, dtype=None):
    return torch.empty(*shape, dtype=dtype or torch.bfloat16, device="meta")


def blocks(*shape):
    return BlockScaled(of(*shape, dtype=FP8), of(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), dtype=FLOAT))


def groups(*shape):
    return GroupScaled(of(*shape[:-1], shape[-1] // 2, dtype=torch.uint8), of(*shape[:-1], shape[-1] // 32))


def fp4(*shape):
    packed = groups(*shape)
    return Fp4Scaled(packed.values, packed.scales.to(torch.uint8))


def compile_all():
    x, counts = of(T, D), of(HELD, dtype=INT)
    for columns in (24576, 576):
        for weight in (of(columns, 1536), blocks(columns, 1536)):
            for rows in (T, 64):  # few rows have tiles of their own
                ops.linear(of(rows, 1536), weight, residual=of(rows, columns))
    for rows in (64, 128):
        ops.linear(of(rows, D), of(129280, D), float32_out=True)
        ops.batched_linear(of(rows, H, 128).transpose(0, 1), of(H, 512, 128))
        ops.batched_linear(of(rows, H, 512).transpose(0, 1), of(H, 128, 512))
    for gate_up, down in ((of(HELD, 2 * F, D), of(HELD, D, F)), (blocks(HELD, 2 * F, D), blocks(HELD, D, F))):
        ops.grouped_mlp(x, counts, gate_up, down, of(8 * T, dtype=INT))
        ops.grouped_mlp(of(8 * T, D), counts, gate_up, down, tile_rows=128)
        ops.masked_mlp(of(HELD, 4096, D), counts, gate_up, down)
        for rows in (64, 128):
            experts_tma.masked_mlp(of(HELD, 4096, D), counts, gate_up, down, expected_rows=rows)
    for held in (groups, fp4):
        weights = held(HELD, 2 * F, D), held(HELD, D, F)
        ops.grouped_mlp(x, counts, *weights, of(8 * T, dtype=INT))
        ops.masked_mlp(of(HELD, 4096, D), counts, *weights)
    rows, scales = of(2, 18432, D, dtype=FP8), of(2, 56, 18432, dtype=FLOAT).mT  # decode's, as DeepEP gives them
    ops.masked_mlp(rows, of(2, dtype=torch.int32), blocks(2, 2 * F, D), blocks(2, D, F), scales)
    for fp8 in (True, False):
        ops.silu_mul_blocks(of(2, 18432, 2 * F), of(2, dtype=torch.int32), fp8=fp8)
    ops.quantize_fp8_rows(x)
    ops.quantize_fp8_rows(of(2, 18432, D), of(2, dtype=torch.int32))
    for rows in (T, 128):
        ops.router(of(rows, D), of(3, E, D))
    ops.rms_norm(x, of(D), 1e-6)
    for width in (D, 1536):
        ops.rms_norm_fp8(of(128, 2112)[:, :width] if width < D else of(128, D), of(width), 1e-6, keeps=width == D)
    ops.silu_mul_blocks(of(1, 128, 2 * F), fp8=True)
    ops.silu_mul(*of(T, 2 * 18432).chunk(2, dim=-1))
    angles = of(T, 32, dtype=FLOAT)
    pages, slots = of(1000, 64, 576), of(T, dtype=INT)
    ops.rope_and_cache(of(T, H, 192), NewKeys(of(T, 576), of(512), 1e-6, angles, angles, pages, slots, True))
    for method in ("noaux_tc", "group_limited_greedy", "group_top2", "greedy"):
        counted = of(E, dtype=INT), of(T, dtype=INT)
        ops.gate(of(T, E, dtype=FLOAT), of(E, dtype=FLOAT), GateRule(method, 8, 8, 4, True, 2.5), *counted)
    for tokens in (T, 128):
        ops.sort_by_expert(of(tokens, 8, dtype=INT), E)
    ops.expert_places(of(E, dtype=INT), 8 * 128, 128, of(8 * 128, dtype=INT))
    lying = PlacedRows(of(8 * T, D), of(8 * T, dtype=INT))
    for sorted_rows in (lying.values_SD, lying):
        ops.sum_per_token(sorted_rows, lying.place_M, of(T, 8, dtype=FLOAT))
    ops.add_sums(x, of(T, D, dtype=FLOAT), x)
    ops.argmax(of(128, 129280, dtype=FLOAT))
    shares = [of(128, dtype=torch.float64) for _ in range(4)]
    ops.draw(of(128, 129280, dtype=FLOAT), shares[0], of(128, dtype=INT), *shares[1:])
    ops.quantize_fp8_block(of(D, F), (128, 128))
    ops.dequantize_fp8_block(of(T, D, dtype=FP8), of(T, 56, dtype=FLOAT), torch.bfloat16, (1, 128))
    decode.mla_decode(
        of(128, H, 576),
        PagedKeys(of(9000, 64, 576), of(128, 64, dtype=INT), of(128, dtype=INT), of(128, dtype=INT)),
        latent_dim=512,
        scale=0.1352,
    )
    parts, places = of(264, H, 512), of(128, 2, dtype=torch.int32)
    ops.spread_queries(of(128, H, 576), of(264, dtype=torch.int32))
    ops.merge_pieces(parts, of(264, H, dtype=FLOAT), places)
    compile_fp8_pages()
    compile_sparse()
    compile_compressed()
    gemm.product(of(T, 576)[:, :512], of(16 * 256, 512), out=of(T, 16 * 256), rows=of(T, dtype=INT))
    compile_prefill()


def compile_prefill():
    """DeepSeek-V3's prefill attention in all its forms; the cut is made from lengths, which these tensors have not."""
    work = prefill_cut.Work(of(T, dtype=INT), of(128, 5, dtype=INT), of(T, dtype=INT))
    forms = prefill._attend, *(functools.partial(prefill_tma._attend, tile_keys) for tile_keys in (64, 128))
    for attend in forms:
        attend(of(T, H, 192), of(T, 16, 256), of(T, 64), work, of(T, dtype=INT), of(T, H, 128), 0, 0.1352)


def compile_fp8_pages():
    """DeepSeek-V3's rows in FP8 pages, 656 bytes each: written, read in decode, widened for prefill."""
    angles, pages = of(128, 32, dtype=FLOAT), of(9000, 64, 656, dtype=torch.uint8)
    table, positions = of(128, 64, dtype=INT), of(128, dtype=INT)
    ops.rope_and_cache_fp8(
        of(128, H, 192), NewKeys(of(128, 576), of(512), 1e-6, angles, angles, pages, positions, True)
    )
    decode.mla_decode_fp8(of(128, H, 576), PagedKeys(pages, table, positions, positions), latent_dim=512, scale=0.1352)
    fp8_pages.widen_rows(pages, of(T, dtype=INT), 512)


def compile_sparse():
    """DeepSeek-V3.2's widths: pages of latents and index keys, an indexer of 64 heads, 2,048 keys per query."""
    pages, angles, positions = of(9000, 64, 576 + 128), of(128, 32, dtype=FLOAT), of(128, dtype=INT)
    latents, index_keys = pages[..., :576], pages[..., 576:]
    table, slots = of(128, 512, dtype=INT), of(128, 2048, dtype=torch.int32)
    new = NewKeys(of(128, 576), of(512), 1e-6, angles, angles, latents, positions, True)
    decode.mla_decode(of(128, H, 576), PagedKeys(latents, table, positions, positions), latent_dim=512, scale=0.1352)
    decode.mla_sparse(of(128, H, 576), latents, slots, latent_dim=512, scale=0.1352)
    ops.rope_and_cache(of(128, H, 192), new)
    for interleaved in (True, False):
        turned = angles, angles, interleaved
        indexer.index_cache(
            NewIndexKeys(of(128, 128), of(128), of(128), 1e-6, *turned[:2], index_keys, positions, interleaved)
        )
        indexer.choose_keys(
            IndexQueries(of(128, 64, 128), of(128, 64, dtype=FLOAT), *turned),
            IndexedKeys(index_keys, table, positions, positions),
            topk=2048,
            scale=128**-0.5,
        )
    indexer.rotated_queries(IndexQueries(of(128, 64, 128), of(128, 64, dtype=FLOAT), angles, angles, True))
    keys = IndexedKeys(index_keys, table, positions, positions)
    topk.best_slots(of(128, 9216, dtype=FLOAT)[:, :9000], keys, topk=2048)
    index_fp8.hadamard_fp8(of(8192, 128))
    index_fp8.hadamard_fp8(index_keys.flatten(0, 1), of(9000, dtype=INT))


def compile_compressed():
    """DeepSeek-V4-Flash's widths: 64 heads of 512, a window of 128, 512 chosen entries, four streams of 4,096."""
    table, rows = of(128, 64, dtype=INT), of(128, dtype=INT)
    angles = of(128, 32, dtype=FLOAT)
    for heads, width, norm in ((64, 512, of(512)), (64, 128, None), (1, 512, of(512))):
        ops.rotate_heads(of(128, heads * width), heads, norm, 1e-6, angles, angles)
    for ratio, raw, width in ((4, 1024, 512), (4, 256, 128), (128, 512, 512)):
        parts = (
            of(128, raw, dtype=FLOAT),
            of(128, raw, dtype=FLOAT),
            of(ratio, raw, dtype=FLOAT),
            of(width, dtype=FLOAT),
        )
        waiting, pages = of(128, 8 if ratio == 4 else 128, 2, raw, dtype=FLOAT), of(9000, 64 * width // ratio)
        lists = rows, rows, of(129, dtype=INT), rows
        ops.pool_entries(NewEntries(*parts, 1e-6, angles, angles, *lists, waiting, pages, table))
    keys = EntryKeys(of(9000, 16 * 128), table, rows, rows)
    ops.choose_entries(of(128, 64, 128), of(128, 64, dtype=FLOAT), keys, topk=512, scale=0.01)
    window = KeyRows(of(128, 128, 512), of(128, 128, 1, dtype=INT))
    chosen = KeyRows(of(9000 * 16, 512), of(128, 512, 1, dtype=INT))
    wide = KeyRows(of(9000, 256), of(128, 32, 2, dtype=INT))
    for entries in (None, chosen, wide):
        ops.attend_entries(of(128, 64, 512), window, entries, of(64, dtype=FLOAT), 0.04, angles, angles)
    streams, base = of(128, 4, 4096), of(24, dtype=FLOAT)
    mixed = ops.stream_products(streams, of(3, 24, 4 * 4096), 1e-6)
    mix = ops.stream_mix(mixed, of(3, dtype=FLOAT), base, StreamRule(20, 1e-6))
    ops.leave_streams(streams, mix, ops.join_streams(streams, mix.before_TN))


def all_compiled():
    """Compile every kernel that `compile_all` would start, once; return them by distinct names."""
    kernels = {}

    def compile_only(function, *args, grid, warmup, **options):
        del warmup
        kernel = run(function, *args, grid=grid, warmup=True, **options)
        kernels.setdefault(kernel.hash, (function.__name__, variant(kernel), kernel))
        return kernel

    driver.set_active(Hopper())
    run = JITFunction.run
    JITFunction.run = compile_only
    compile_all()
    named = {}
    for name, words, kernel in kernels.values():
        key, number = f"{name}({words})", 2
        while key in named:
            key, number = f"{name}({words}) #{number}", number + 1
        named[key] = (name, kernel)
    return named


def refused_ones(kernel):
    """Return the whole-number arguments for which the kernel does not compile when they are 1, with Triton's message.

    Triton makes an argument that is 1 a constant of the program, without the methods of a tensor; its interpreter does
    not. Each argument alone, and all at once.
    """
    source, target = kernel.src, driver.active.get_current_target()
    backend = make_backend(target)
    options = backend.parse_options({"num_warps": kernel.metadata.num_warps})
    numbers = [name for name, word in source.signature.items() if re.fullmatch(r"[iu]\d+", word)]
    refused = {}
    for ones in [numbers, *([name] for name in numbers)]:
        places = {(source.fn.arg_names.index(name),) for name in ones}
        changed = ASTSource(
            source.fn,
            source.signature | dict.fromkeys(ones, "constexpr"),
            source.constants | dict.fromkeys(places, 1),
            {place: words for place, words in source.attrs.items() if place not in places},
        )
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        try:
            changed.make_ir(target, options, functions, modules, context)
        except CompilationError as error:
            refused[" ".join(ones)] = str(error)
    return refused


def variant(kernel):
    """Return the distinction of a kernel from others of its function: types behind its pointers, its constants."""
    source = kernel.src
    types = [word.removeprefix("*") for word in source.signature.values() if word.startswith("*")]
    constants = [
        f"{source.fn.arg_names[place[0]]}={value}"
        for place, value in source.constants.items()
        if isinstance(value, int | float) and source.signature.get(source.fn.arg_names[place[0]]) == "constexpr"
    ]
    return " ".join([*types, *constants])


def measured(named):
    """Registers, stack (spilled registers lie there), shared memory and instructions, from the machine code."""
    found = {}
    with TemporaryDirectory() as folder:
        for key, (name, kernel) in named.items():
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(kernel.asm["cubin"])
            usage = resources(path)
            words = {word for word in kernel.asm["ptx"].split() if word.startswith("wgmma.mma_async")}
            found[key] = {
                "name": name,
                "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
                "stack_bytes": int(re.search(r"STACK:(\d+)", usage).group(1)),
                "shared_bytes": kernel.metadata.shared,
                "instructions": code_bytes(path.read_bytes()) // INSTRUCTION_BYTES,
                "matrix_instructions": sorted(words),
                "refused_ones": refused_ones(kernel),
            }
    return found


def resources(path):
    """Return the resource usage of a cubin's kernel, by the tool in Triton's wheel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout


def code_bytes(cubin):
    """Bytes of its sections of code (ELF64, "System V ABI" chapter 4); disassembling it would take a second."""
    first, size, count, names = struct.unpack_from("<40xQ10x3H", cubin)
    headers = [struct.unpack_from("<IIQQQQ", cubin, first + place * size) for place in range(count)]
    text = headers[names][4]
    return sum(header[5] for header in headers if cubin[text + header[0] :].startswith(b".text."))


def worse(found, recorded):
    """A sentence for each kernel that takes more than is written down, or of which nothing is."""
    sentences = [f"{key}: nothing is written down of it" for key in found.keys() - recorded.keys()]
    sentences += [f"{key}: it is not compiled any more" for key in recorded.keys() - found.keys()]
    for key in found.keys() & recorded.keys():
        for what, (few, share) in MORE.items():
            now, before = found[key][what], recorded[key][what]
            if now > before + max(few, share * before):
                sentences.append(f"{key}: {what} {now}, before {before}")
    return sorted(sentences)


def main(arguments):
    found = measured(all_compiled())
    tables = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    counts = {key: {what: numbers[what] for what in MORE} for key, numbers in sorted(found.items())}
    if arguments == ["--record"]:
        tables[triton.__version__] = counts
        lines = [
            f' "{version}": {{\n'
            + ",\n".join(f"  {json.dumps(key)}: {json.dumps(numbers)}" for key, numbers in table.items())
            + "\n }"
            for version, table in sorted(tables.items())
        ]
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{len(counts)} kernels of Triton {triton.__version__} written to {RECORDED}")
    elif arguments == ["--compare"]:
        if triton.__version__ not in tables:
            print(f"nothing is written down of Triton {triton.__version__}: {COMMAND}")
            return 0
        sentences = worse(counts, tables[triton.__version__])
        print("\n".join([*sentences, f"{len(counts)} kernels, {len(sentences)} sentences; anew: {COMMAND}"]))
        return 1 if sentences else 0
    else:
        print("\n".join(json.dumps({"key": key, **numbers}) for key, numbers in found.items()))
    return 0


if __name__ == "__main__":
    import torch
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, CompilationError, make_backend
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))  # kernels that no job takes yet are there
    import experts_tma
    import prefill_tma

    from batchinfer_kernels.reference.block_scaled import BlockScaled
    from batchinfer_kernels.reference.compressed import EntryKeys, KeyRows, NewEntries
    from batchinfer_kernels.reference.fp4 import Fp4Scaled
    from batchinfer_kernels.reference.gating import GateRule
    from batchinfer_kernels.reference.group_scaled import GroupScaled
    from batchinfer_kernels.reference.hyper import StreamRule
    from batchinfer_kernels.reference.mla import PagedKeys
    from batchinfer_kernels.reference.places import PlacedRows
    from batchinfer_kernels.reference.rows import NewKeys
    from batchinfer_kernels.reference.sparse import IndexedKeys, IndexQueries, NewIndexKeys
    from batchinfer_kernels.triton import (
        decode,
        fp8_pages,
        gemm,
        index_fp8,
        indexer,
        ops,
        prefill,
        prefill_cut,
        topk,
    )

    T, D, F, H, E = 16384, 7168, 2048, 128, 256
    HELD = 9  # experts of a rank
    INT, FLOAT, FP8 = torch.int64, torch.float32, torch.float8_e4m3fn

    @dataclass(frozen=True)
    class Hopper:
        """The answers that Triton needs from a device's driver before it compiles."""

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    sys.exit(main(sys.argv[1:]))
