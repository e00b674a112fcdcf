"""Families of public models: what their checkpoints call experts' tensors, in which format these
are, and whether they are loaded. docs/weights.md has the table.

Names, formats and configs are those of the published models. Sizes are small, and values are drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from deep_moe.checkpoint.namings import NAMINGS, ExpertNaming

from .written import (
    Written,
    columns_first,
    compressed,
    fp8_blocks,
    fp8_whole,
    int4,
    modelopt,
    mxfp4,
    mxfp8,
    nvfp4,
    quark,
)

NUM_EXPERTS, HIDDEN, INTERMEDIATE, LAYER = 4, 256, 128, 3

FLOAT8 = {"num_bits": 8, "type": "float"}


class Family(NamedTuple):
    """models: as the table names them. stored: how weights are stored. write: a matrix, by rows and
    columns. naming: of the tensors. config: of the whole checkpoint beside the number of experts;
    None: what the writer says. refusal: words of the error; None: it is loaded. pair: of weights
    and tokens on Hopper."""

    models: str
    stored: str
    write: Callable[[int, int], Written]
    pair: str
    naming: str = "experts"
    config: dict[str, Any] | None = None
    refusal: str | None = None

    @property
    def has_gate(self) -> bool:
        return self.own_naming.gate is not None

    @property
    def own_naming(self) -> ExpertNaming:
        naming = NAMINGS[self.naming]
        assert isinstance(naming, ExpertNaming)
        return naming


def bf16(rows: int, columns: int) -> Written:
    weight = (torch.randn(rows, columns) * 0.05).bfloat16()
    return Written({".weight": weight}, weight.double(), {})


def renamed(written: Written, **suffixes: str) -> Written:
    """suffixes: by the old ones without their dot."""
    own = {suffixes.get(key[1:], key): tensor for key, tensor in written.tensors.items()}
    return written._replace(tensors=own)


def deepseek_v3(rows: int, columns: int) -> Written:
    written = fp8_blocks(rows, columns, is_modelopt=False)
    scale = written.tensors[".weight_scale"].float()
    return written._replace(
        tensors={".weight": written.tensors[".weight"], ".weight_scale_inv": scale}
    )


def deepseek_v4(rows: int, columns: int) -> Written:
    written = renamed(mxfp4(rows, columns), weight_scale=".scale")
    return written._replace(
        tensors={
            ".weight": written.tensors[".weight"].view(torch.int8),
            ".scale": written.tensors[".scale"].view(torch.float8_e8m0fnu),
        }
    )


def per_row(rows: int, columns: int) -> Written:
    return fp8_whole(rows, columns, (rows, 1), compressed(**FLOAT8, strategy="channel"))


def with_zero_points(rows: int, columns: int) -> Written:
    written = columns_first(rows, columns, is_awq=True)
    written.tensors[".qzeros"] += 1
    return written._replace(config=written.config | {"zero_point": True})


def int8_rows(rows: int, columns: int) -> Written:
    tensors = {
        ".weight": torch.randint(-127, 128, (rows, columns), dtype=torch.int8),
        ".weight_scale": torch.rand(rows, 1),
    }
    config = compressed(num_bits=8, type="int", strategy="channel", symmetric=True)
    return Written(tensors, torch.zeros(rows, columns).double(), config)


def quark_mxfp4(rows: int, columns: int) -> Written:
    args = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    return quark(mxfp4(rows, columns), **args)


def quark_fp8(rows: int, columns: int) -> Written:
    written = fp8_whole(rows, columns, (), {})
    return quark(written, dtype="fp8_e4m3", qscheme="per_tensor", group_size=None)


BLOCK_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
NVFP4_LAYER = {"quant_algo": "NVFP4", "group_size": 16}

FAMILIES = (
    Family(
        "DeepSeek-V3, V3.1, R1; GLM-5 FP8; Qwen3 FP8",
        "FP8, blocks",
        deepseek_v3,
        "fp8",
        config={"quantization_config": BLOCK_CONFIG},
    ),
    Family(
        "MiniMax-M2, M2.5",
        "FP8, blocks",
        deepseek_v3,
        "fp8",
        "mixtral",
        {"quantization_config": BLOCK_CONFIG},
    ),
    Family(
        "Step-3.7-Flash-FP8",
        "FP8, blocks",
        deepseek_v3,
        "fp8",
        "step",
        {"quantization_config": BLOCK_CONFIG},
    ),
    Family(
        "DeepSeek-V4-Flash, V4-Pro",
        "MXFP4",
        deepseek_v4,
        "mxfp4",
        "numbered",
        {"quantization_config": BLOCK_CONFIG | {"scale_fmt": "ue8m0"}},
    ),
    Family(
        "DeepSeek-V4 NVFP4",
        "NVFP4 of ModelOpt",
        partial(nvfp4, is_divided=False, is_static=True),
        "nvfp4",
        "numbered",
        {"quantization_config": BLOCK_CONFIG | {"moe_quant_algo": "NVFP4"}},
    ),
    Family(
        "nvidia's NVFP4 of DeepSeek-R1, V3.2, GLM-5, Qwen3",
        "NVFP4 of ModelOpt",
        partial(nvfp4, is_divided=False, is_static=True),
        "nvfp4",
        config={
            "quantization_config": modelopt(
                "NVFP4",
                ignore=["lm_head", "model.layers.0*", "model.layers.3.mlp.shared_experts*"],
            )
        },
    ),
    Family(
        "nvidia's Kimi-K2.5 to K2.7 NVFP4",
        "NVFP4 of ModelOpt",
        partial(nvfp4, is_divided=False, is_static=True),
        "nvfp4",
        "experts_language_model",
    ),
    Family(
        "MiniMax-M3 NVFP4",
        "NVFP4 of ModelOpt, other layers MXFP8",
        partial(nvfp4, is_divided=False, is_static=True),
        "nvfp4",
        "mixtral",
        {
            "quantization_config": MIXED
            | {
                "quantized_layers": {
                    f"model.layers.{LAYER}.block_sparse_moe.experts": NVFP4_LAYER,
                    f"model.layers.{LAYER}.self_attn.q_proj": {"quant_algo": "MXFP8"},
                }
            }
        },
    ),
    Family(
        "Nemotron-3 NVFP4 (no gate)",
        "NVFP4 of ModelOpt, weights only",
        partial(nvfp4, is_divided=False),
        "nvfp4",
        "nemotron",
        {
            "quantization_config": MIXED
            | {
                "quantized_layers": {
                    f"backbone.layers.{LAYER}.mixer.experts.{expert}.{part}_proj": {
                        "quant_algo": "W4A16_NVFP4",
                        "group_size": 16,
                    }
                    for expert in range(NUM_EXPERTS)
                    for part in ("up", "down")
                }
            }
        },
    ),
    Family(
        "RedHatAI's NVFP4",
        "NVFP4 of compressed-tensors",
        partial(nvfp4, is_divided=True, is_static=True),
        "nvfp4",
    ),
    Family(
        "RedHatAI's NVFP4A16",
        "NVFP4 of compressed-tensors, weights only",
        partial(nvfp4, is_divided=True),
        "nvfp4",
    ),
    Family(
        "Kimi-K2-Thinking",
        "INT4 of compressed-tensors, groups of 32",
        partial(int4, group_size=32, is_twos_complement=False),
        "int4",
    ),
    Family(
        "Kimi-K2.5 to K2.7",
        "INT4 of compressed-tensors, groups of 32",
        partial(int4, group_size=32, is_twos_complement=False),
        "int4",
        "experts_language_model",
    ),
    Family(
        "GLM-5.3 W4A8",
        "INT4 of compressed-tensors, groups of 128",
        partial(int4, group_size=128, is_twos_complement=False),
        "int4",
    ),
    Family(
        "GLM-5.2 W4AFP8",
        "INT4 of w4afp8",
        partial(int4, group_size=128, is_twos_complement=True),
        "int4",
    ),
    Family(
        "Qwen3 GPTQ-Int4",
        "INT4 of GPTQ, symmetric",
        partial(columns_first, is_awq=False, has_order=True),
        "int4",
    ),
    Family(
        "AutoRound's AWQ, symmetric",
        "INT4 of AWQ",
        partial(columns_first, is_awq=True),
        "int4",
    ),
    Family(
        "AWQ of AutoAWQ",
        "INT4 of AWQ, zero points",
        with_zero_points,
        "int4",
        refusal="weights must be symmetric, without zero points",
    ),
    Family(
        "MiniMax-M3 MXFP8",
        "MXFP8",
        partial(mxfp8, suffix=".weight_scale_inv", config={"quant_method": "mxfp8"}),
        "mxfp8 x bf16",
        "mixtral",
    ),
    Family(
        "ModelOpt's MXFP8",
        "MXFP8",
        partial(mxfp8, suffix=".weight_scale", config=modelopt("MXFP8", group_size=32)),
        "mxfp8 x bf16",
    ),
    Family(
        "GLM-4.7-FP8; RedHatAI's FP8-dynamic",
        "FP8 of compressed-tensors, rows",
        per_row,
        "fp8 x fp8_token",
    ),
    Family(
        "nvidia's FP8",
        "FP8 of ModelOpt, matrices, static",
        lambda *size: fp8_whole(*size, (), modelopt("FP8")),
        "fp8 x fp8_token",
    ),
    Family("amd's MXFP4", "MXFP4 of Quark", quark_mxfp4, "mxfp4"),
    Family("amd's FP8", "FP8 of Quark, matrices, static", quark_fp8, "fp8 x fp8_token"),
    Family(
        "MXFP4 of compressed-tensors (Kimi-K3's format)",
        "MXFP4 of compressed-tensors",
        partial(mxfp4, suffix=".weight_packed"),
        "mxfp4",
    ),
    Family("Qwen3, Mixtral and others, BF16", "BF16", bf16, "bf16", "mixtral"),
    Family(
        "RedHatAI's W8A8",
        "INT8",
        int8_rows,
        "int4",
        refusal="weights of this kind are not taken",
    ),
)


def write(folder: Path, family: Family) -> dict[tuple[int, str], Written]:
    """The layer in one file; its matrices."""
    torch.manual_seed(0)
    parts = ("gate", "up", "down") if family.has_gate else ("up", "down")
    made, tensors = {}, {}
    for expert in range(NUM_EXPERTS):
        for part in parts:
            size = (HIDDEN, INTERMEDIATE) if part == "down" else (INTERMEDIATE, HIDDEN)
            written = made[expert, part] = family.write(*size)
            name = getattr(family.own_naming, part).format(layer=LAYER, expert=expert)
            tensors |= {name + suffix: own.contiguous() for suffix, own in written.tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    said = made[0, "up"].config
    config = family.config or ({"quantization_config": said} if said else {})
    if family.naming.endswith("language_model"):  # below the language model's own part
        config = {"text_config": config}
    (folder / "config.json").write_text(json.dumps({"num_experts": NUM_EXPERTS} | config))
    return made


def table() -> str:
    """For docs/weights.md.

    >>> table().splitlines()[0]
    '| models | experts in | `naming=` | loaded as |'
    """
    lines = ["| models | experts in | `naming=` | loaded as |", "|---|---|---|---|"]
    for family in FAMILIES:
        loaded = f"`{family.pair.partition(' ')[0]}`"
        if family.refusal is not None:
            loaded = f"no: {family.refusal}"
        lines.append(f"| {family.models} | {family.stored} | `{family.naming}` | {loaded} |")
    return "\n".join(lines)
