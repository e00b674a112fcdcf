"""What a config says of weights: patterns, groups, algorithms, and that tensors agree."""

from __future__ import annotations

import json
import random
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from deep_moe.checkpoint import load_experts
from deep_moe.checkpoint.quantization import Declared, quantization_of
from deep_moe.checkpoint.quantization.patterns import matches, regex_matches
from deep_moe.errors import CheckpointError
from deep_moe.formats.sizes import WHOLE_MATRIX, WHOLE_ROW

from .test_formats import LAYER, write

MODULE = "model.layers.12.mlp.experts.37.gate_proj"


class TestPatterns:
    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            (MODULE, True),
            ("model.layers.12", True),
            ("model.layers.1", False),
            ("model.layers.1*", True),
            ("model.layers.12*", True),
            ("model.layers.2*", False),
            ("*.experts.*", True),
            ("*gate_proj", True),
            ("*up_proj", False),
            ("*37*37*", False),
            ("gate_proj", False),
            ("lm_head", False),
            ("re:.*experts.*", True),
            ("re:experts", False),
            ("re:.*mlp\\.(gate|up|gate_up|down)_proj.*", False),
            ("re:^(?!.*experts).*", False),
            ("re:model\\.layers\\.\\d+\\.mlp\\.experts\\.[^.]+\\.(gate|up)_proj$", True),
        ],
    )
    def test_which_modules_they_name(self, pattern: str, expected: bool) -> None:
        assert matches(pattern, MODULE) == expected

    def test_expressions_mean_what_they_mean_in_python(self) -> None:
        drawn = random.Random(0)
        compared = 0
        while compared < 1500:
            expression = "".join(drawn.choices("ab.*+?()|[]^$d{}1,2\\", k=drawn.randint(1, 8)))
            name = "".join(drawn.choices("ab.d12", k=drawn.randint(0, 7)))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    expected = re.match(expression, name) is not None
                found = regex_matches(expression, name)
            except (re.error, CheckpointError):
                continue
            assert found == expected, (expression, name)
            compared += 1

    @pytest.mark.parametrize("expression", ["(a+)+$", "(.*)*x", ".*" * 30 + "x", "(a|a|a)*b"])
    def test_no_expression_takes_long(self, expression: str) -> None:
        begin = time.monotonic()
        regex_matches(expression, "a" * 60)
        assert time.monotonic() - begin < 5

    @pytest.mark.parametrize(
        ("expression", "words"),
        [
            ("(", "must be a regular expression"),
            ("(a)\\1", "must consist of"),
            ("(?i)a", "must consist of .* flags"),
            ("(?<=a)b", "must consist of .* look behind"),
            ("a" * 3000, "must have at most 2000 characters; got 3000"),
        ],
    )
    def test_others_are_refused(self, expression: str, words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            regex_matches(expression, "aab")


def declared(folder: Path, config: Any, module: str = MODULE) -> Declared | None:
    (folder / "config.json").write_text(json.dumps(config))
    quantization = quantization_of(folder)
    return None if quantization is None else quantization.of(module)


def compressed(**weights: Any) -> dict[str, Any]:
    """A config with one group for all modules."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


class TestCompressedTensors:
    @pytest.mark.parametrize(
        ("weights", "names", "block"),
        [
            (NVFP4, ("nvfp4",), (1, 16)),
            (INT4, ("int4",), (1, 32)),
            (INT4 | {"actorder": "static"}, ("int4",), (1, 32)),
            ({"num_bits": 4, "type": "float", "group_size": 32}, ("mxfp4",), (1, 32)),
            ({"num_bits": 8, "type": "float", "group_size": 32}, ("mxfp8", "fp8"), (1, 32)),
            ({"num_bits": 8, "type": "float", "strategy": "channel"}, ("fp8",), WHOLE_ROW),
            ({"num_bits": 8, "type": "float", "group_size": -1}, ("fp8",), WHOLE_ROW),
            ({"num_bits": 8, "type": "float"}, ("fp8",), WHOLE_MATRIX),
            (
                {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 128]},
                ("fp8",),
                (64, 128),
            ),
            (
                {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x128"},
                ("fp8",),
                (128, 128),
            ),
        ],
    )
    def test_weights(
        self, tmp_path: Path, weights: Any, names: tuple[str, ...], block: tuple[int, int]
    ) -> None:
        found = declared(tmp_path, {"quantization_config": compressed(**weights)})
        assert found is not None
        assert (found.weights, found.blocks, found.refusal) == (names, (block,), None)

    @pytest.mark.parametrize(
        ("weights", "words"),
        [
            (INT4 | {"symmetric": False}, "symmetric, without zero points"),
            (INT4 | {"actorder": "group"}, "columns must be in their order"),
            (INT4 | {"num_bits": 8}, "not taken"),
            (INT4 | {"group_size": None}, "not taken"),
            ({"num_bits": 4, "type": "float", "strategy": "channel"}, "not taken"),
        ],
    )
    def test_refusals(self, tmp_path: Path, weights: Any, words: str) -> None:
        found = declared(tmp_path, {"quantization_config": compressed(**weights)})
        assert found is not None
        with pytest.raises(CheckpointError, match=f"^a.weight: .*config.json.*group_0.*{words}"):
            found.refuse("a.weight")

    def test_tokens_that_are_rotated(self, tmp_path: Path) -> None:
        config = compressed(**NVFP4) | {"transform_config": {"config_groups": {"R1": {}}}}
        found = declared(tmp_path, {"quantization_config": config})
        assert found is not None
        assert "rotates tokens" in (found.refusal or "")

    def test_where_it_stands(self, tmp_path: Path) -> None:
        """In the config of the language model; by an older name."""
        for config in (
            {"text_config": {"quantization_config": compressed(**INT4)}},
            {"compression_config": compressed(**INT4)},
        ):
            found = declared(tmp_path, config)
            assert found is not None
            assert found.weights == ("int4",)

    def test_which_modules_a_group_has(self, tmp_path: Path) -> None:
        """A name says more than a class, and what is ignored is in no group."""
        config = compressed(**NVFP4)
        config["config_groups"]["group_1"] = {
            "targets": ["re:.*experts.*down_proj"],
            "weights": INT4,
        }
        config["ignore"] = ["re:.*shared_experts.*", "model.layers.0"]
        document = {"quantization_config": config}
        for module, expected in (
            (MODULE, ("nvfp4",)),
            (MODULE.replace("gate", "down"), ("int4",)),
            (MODULE.replace("12", "0"), None),
            ("model.layers.12.mlp.shared_experts.up_proj", None),
        ):
            found = declared(tmp_path, document, module)
            assert (found and found.weights) == expected


class TestModelOpt:
    @pytest.mark.parametrize(
        ("config", "names", "blocks"),
        [
            ({"quant_algo": "NVFP4", "group_size": 16}, ("nvfp4",), ((1, 16),)),
            ({"quant_algo": "w4a16_nvfp4"}, ("nvfp4",), ((1, 16),)),
            ({"quant_algo": "NVFP4", "group_size": "16"}, ("nvfp4",), ((1, 16),)),
            ({"quant_algo": "MXFP8", "group_size": 32}, ("mxfp8", "fp8"), ((1, 32),)),
            ({"quant_algo": "FP8"}, ("fp8",), (WHOLE_MATRIX, WHOLE_ROW)),
            ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, ("fp8",), (WHOLE_ROW,)),
            ({"quant_algo": "fp8_pb_wo"}, ("fp8",), ((128, 128),)),
        ],
    )
    @pytest.mark.parametrize("is_old", [False, True])
    def test_algorithms(
        self, tmp_path: Path, is_old: bool, config: Any, names: Any, blocks: Any
    ) -> None:
        ignore = ["lm_head", "model.layers.0*"]
        if is_old:
            old = {"producer": {"name": "modelopt"}, "quantization": config}
            old["quantization"] = config | {"exclude_modules": ignore}
            (tmp_path / "hf_quant_config.json").write_text(json.dumps(old))
            new = {}
        else:
            new = {"quantization_config": config | {"quant_method": "modelopt", "ignore": ignore}}
        found = declared(tmp_path, new)
        assert found is not None
        assert (found.weights, found.blocks, found.refusal) == (names, blocks, None)
        assert declared(tmp_path, new, "model.layers.0.mlp.experts.3.up_proj") is None

    @pytest.mark.parametrize(
        ("algorithm", "words"),
        [
            ("NVFP4_AWQ", "multiplied by pre_quant_scale"),
            ("W4A16_AWQ", "multiplied by pre_quant_scale"),
            ("NVFP4_SVD", "low rank"),
            ("W8A8_SQ_PER_CHANNEL", "int8"),
            ("NVFP2", "must be one of NVFP4, .*, FP8"),
        ],
    )
    def test_refusals(self, tmp_path: Path, algorithm: str, words: str) -> None:
        config = {"quant_method": "modelopt", "quant_algo": algorithm}
        found = declared(tmp_path, {"quantization_config": config})
        assert found is not None
        with pytest.raises(CheckpointError, match=f"quant_algo {algorithm}: .*{words}"):
            found.refuse("a.weight")

    def test_mixed_precision(self, tmp_path: Path) -> None:
        """By the module, or by one that it is part of: experts may be one module."""
        layers = {
            MODULE: {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            "model.layers.3.mlp.experts": {"quant_algo": "MXFP8", "group_size": 32},
        }
        config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
        document = {"quantization_config": config | {"quantized_layers": layers}}
        for module, expected in (
            (MODULE, ("nvfp4",)),
            ("model.layers.3.mlp.experts.5.up_proj", ("mxfp8", "fp8")),
            ("model.layers.4.mlp.experts.5.up_proj", None),
        ):
            found = declared(tmp_path, document, module)
            assert (found and found.weights) == expected


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}


def quark(**weight: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPTQ | {"bits": 8}, "bits 8, group_size 128: integers must have 4 bits"),
        (GPTQ | {"sym": False}, "must be symmetric, without zero points"),
        (GPTQ | {"desc_act": True}, "columns must be in their order, desc_act false"),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, "must be gptq; got gptq_v2"),
        (GPTQ | {"dynamic": {".*experts.*": {"sym": False}}}, "without zero points"),
        (AWQ | {"zero_point": True}, "must be symmetric, without zero points"),
        (AWQ | {"version": "GEMV"}, "version must be gemm; got gemv"),
        (AUTO_ROUND | {"packing_format": "a:awq", "sym": False}, "without zero points"),
        (quark(dtype="int4", qscheme="per_group"), "weights of this kind are not taken"),
        (
            quark(dtype="fp4", qscheme="per_group", scale_format="e4m3"),
            "weights of this kind are not taken",
        ),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": [{"dtype": "fp4"}]}},
            "must be described by one object",
        ),
    ],
)
def test_refusals_of_other_methods(tmp_path: Path, config: Any, words: str) -> None:
    found = declared(tmp_path, {"quantization_config": config})
    assert found is not None
    with pytest.raises(CheckpointError, match=rf"^a: .*quantization_config.*{words}$"):
        found.refuse("a")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8", "moe_quant_algo": "NVFP4"}, ("nvfp4",)),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        ({"quant_method": "mxfp8"}, ("mxfp8", "fp8")),
        ({"quant_method": "mxfp8", "ignored_layers": ["model.layers.12.mlp"]}, None),
        ({"quant_method": "w4afp8"}, ("int4",)),
        ({"quant_method": "mxfp4"}, None),
        ({"quant_method": "of somebody"}, None),
        (GPTQ, ("int4",)),
        (GPTQ | {"dynamic": {r"-:.*layers\.12\..*": {}}}, None),
        (GPTQ | {"bits": 8, "dynamic": {r"+:.*layers\.12\..*": {"bits": 4}}}, ("int4",)),
        (AWQ, ("int4",)),
        (AWQ | {"modules_to_not_convert": ["model.layers.12"]}, None),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, ("int4",)),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, ("int4",)),
        (AUTO_ROUND, None),
        (quark(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"), ("mxfp4",)),
        (quark(dtype="fp8_e4m3", qscheme="per_channel"), ("fp8",)),
        (quark(dtype="fp8_e4m3", qscheme="per_tensor") | {"exclude": ["*experts*"]}, None),
        (
            quark(dtype="int8", qscheme="per_tensor")
            | {
                "layer_quant_config": {
                    "*experts*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}
                }
            },
            ("fp8",),
        ),
    ],
)
def test_other_methods(tmp_path: Path, config: Any, expected: Any) -> None:
    found = declared(tmp_path, {"quantization_config": config})
    assert (found and found.weights) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": 4}, "must have a name as quant_method"),
        (
            {"quant_method": "modelopt", "ignore": "lm_head"},
            "must have a list of modules as ignore",
        ),
        ({"quant_method": "modelopt", "ignore": [4]}, "must have a list of modules as ignore"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": [16]},
            r"must have a number as group_size; got \[16\]",
        ),
        ({"quant_method": "w4afp8", "group_size": "-1"}, "must have a number as group_size"),
        (GPTQ | {"dynamic": [1]}, "must have an object of objects as dynamic"),
        (quark() | {"layer_quant_config": [1]}, "must have an object as layer_quant_config"),
        ({"quant_method": "modelopt", "quantized_layers": []}, None),
        (
            {"quant_method": "modelopt", "quantized_layers": [1]},
            "must have an object of .* as quantized_layers",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": [1]},
            "must have an object as config_groups",
        ),
    ],
)
def test_configs_of_another_form(tmp_path: Path, config: Any, words: str | None) -> None:
    document = {"quantization_config": config}
    if words is None:
        assert declared(tmp_path, document) is None
    else:
        with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config {words}"):
            declared(tmp_path, document)


class TestTensorsAgree:
    """Where a config speaks of a module, its tensors must be what it says."""

    def quantize(self, folder: Path, config: Any) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))

    def test_they_do(self, tmp_path: Path) -> None:
        write(tmp_path, "mxfp4", suffixes=(".weight_packed", ".weight_scale"))
        self.quantize(tmp_path, compressed(num_bits=4, type="float", group_size=32))
        load_experts(tmp_path, LAYER)

    @pytest.mark.parametrize(
        ("kind", "config", "words"),
        [
            ("mxfp4", compressed(**NVFP4), "must be nvfp4, as .*; by its tensors it is mxfp4"),
            ("mxfp4", compressed(**INT4 | {"symmetric": False}), "without zero points"),
            (
                "fp8_128",
                compressed(num_bits=8, type="float", strategy="channel"),
                "must have a scale for each row, as .*; it has one for 128 x 128 values",
            ),
            ("mxfp8", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "must be nvfp4"),
            ("mxfp8", {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "pre_quant_scale"),
        ],
    )
    def test_they_do_not(self, tmp_path: Path, kind: str, config: Any, words: str) -> None:
        write(tmp_path, kind)
        self.quantize(tmp_path, config)
        with pytest.raises(CheckpointError, match=rf"experts\.0\.gate_proj\.weight.* {words}"):
            load_experts(tmp_path, LAYER)
        config["ignore"] = [f"model.layers.{LAYER}.mlp*"]  # of which then nothing is said
        self.quantize(tmp_path, config)
        load_experts(tmp_path, LAYER)

    def test_weights_that_are_not_quantized_need_no_config(self, tmp_path: Path) -> None:
        import torch
        from safetensors.torch import save_file

        name = f"model.layers.{LAYER}.mlp.experts.0."
        tensors = {
            f"{name}{part}_proj.weight": torch.zeros(32, 32).bfloat16()
            for part in ("gate", "up", "down")
        }
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text('{"num_experts": 1}')
        self.quantize(tmp_path, compressed(**NVFP4))
        assert load_experts(tmp_path, LAYER).l1.weight.dtype == torch.bfloat16
