"""The rendered translation unit: C++ sees the config that Python chose, and structs that agree."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deep_moe import jit
from deep_moe.activations import Activation, Situ, Swiglu, SwigluOai
from deep_moe.errors import CompileError
from deep_moe.heuristics import MoEShape
from deep_moe.jit.cpp_structs import LayoutCheck, layout_checks
from deep_moe.jit.headers import find_headers
from deep_moe.jit.kernel_args import kernel_args
from deep_moe.jit.nvrtc import compile_source
from deep_moe.jit.render import render_kernel
from deep_moe.targets import MegaMoEConfig, choose_config
from tests.everyday import parametrize

ROOT = Path(__file__).parents[2]
SHAPE = MoEShape(
    num_ranks=2,
    num_experts=8,
    num_topk=2,
    hidden=256,
    intermediate_hidden=128,
    num_max_tokens_per_rank=16,
)


def small_config(**arguments) -> MegaMoEConfig:
    return choose_config(SHAPE, 16, num_sms=4, **arguments)


def compile_with(source: str, assertion: str) -> None:
    """Compile everything but the kernel, with one more assertion."""
    declarations = source[: source.index('extern "C"')]
    probe = declarations + f'{assertion}\nextern "C" __global__ void probe() {{}}\n'
    compile_source(
        probe, arch="sm_100a", include_paths=find_headers().include_paths, kernel="probe"
    )


def test_every_field_and_offset_arrives_in_cpp() -> None:
    config = small_config()
    assertions = []
    for name, value in config.kernel_fields().items():
        assertions.append(f"static_assert(Config::{name} == {int(value)});")
    for struct, layout in (
        ("Symm", config.symm_buffer_layout),
        ("Smem", config.smem_layout),
        ("Tmem", config.tmem_layout),
    ):
        for name, value in {**layout.constants(), **layout.dimensions()}.items():
            assertions.append(f"static_assert(Config::{struct}::{name} == {value}ull);")
        for name, dtype in layout.element_types().items():
            kind, bits = re.fullmatch(r"(bf|[uif])(\d+)", dtype).groups()
            element = f"Config::{struct}::{name}"
            assertions.append(f"static_assert(8 * sizeof({element}) == {bits});")
            # BF16 travels as bits.
            assertions.append(f"static_assert(({element}(-1) < {element}(0)) == {kind in 'if':d});")
            assertions.append(f"static_assert(({element}(0.5f) != 0) == {kind == 'f':d});")
    assert len(assertions) > 200
    compile_with(render_kernel(config), "\n".join(assertions))


def test_no_clamp_is_infinity_in_cpp() -> None:
    text = render_kernel(small_config())
    compile_with(text, "static_assert(Config::Activation::clamp > 3.4e38f);")


@pytest.mark.parametrize(
    ("activation", "in_cpp"),
    [
        (Swiglu(1.1), "Config::Activation::clamp == 1.1f"),
        (
            SwigluOai(1.3, 2.7),
            "Config::Activation::alpha == 1.3f && Config::Activation::limit == 2.7f",
        ),
        (
            Situ(1.3, 2.7),
            "Config::Activation::beta == 1.3f && Config::Activation::linear_beta == 2.7f",
        ),
    ],
)
def test_parameters_of_activations_arrive_in_cpp(activation: Activation, in_cpp: str) -> None:
    for fast_math in (False, True):
        text = render_kernel(small_config(activation=activation, fast_math=fast_math))
        struct = f"{type(activation).__name__}<Config::ActivationParameters, {fast_math:d}>"
        compile_with(
            text,
            f"static_assert({in_cpp});\n"
            f"template <class A, class B> constexpr bool same = false;\n"
            f"template <class A> constexpr bool same<A, A> = true;\n"
            f"static_assert(same<Config::Activation, deep_moe::{struct}>);",
        )


def test_configs_of_other_parameters_are_other_kernels() -> None:
    activations = [Swiglu(), Swiglu(2.0), SwigluOai(), SwigluOai(2.0), Situ(), Situ(2.0)]
    texts = {render_kernel(small_config(activation=activation)) for activation in activations}
    assert len(texts) == len(activations)


def test_offsets_beyond_32_bits_survive() -> None:
    shape = replace(SHAPE, hidden=7168, num_topk=8, num_max_tokens_per_rank=65536)
    config = choose_config(shape, 16, num_sms=4)
    offset = config.symm_buffer_layout["combine"].offset
    assert offset > 2**32
    compile_with(
        render_kernel(config), f"static_assert(Config::Symm::combine_offset == {offset}ull);"
    )


def test_equal_configs_render_equal_text_and_others_do_not() -> None:
    assert render_kernel(small_config()) == render_kernel(small_config())
    assert render_kernel(small_config()) != render_kernel(small_config(fast_math=False))


CHECKS = list(layout_checks(kernel_args("sm100")))[::5]


@parametrize("check", CHECKS, everyday=CHECKS[:2])  # the size and a member's place
def test_a_struct_that_was_misread_does_not_compile(
    monkeypatch: pytest.MonkeyPatch, check: LayoutCheck
) -> None:
    wrong = replace(check, value=check.value + 8)
    monkeypatch.setattr("deep_moe.jit.render.layout_checks", lambda *_: iter([wrong]))
    expected = f"{wrong.value} bytes in sm100::KernelArgs"
    if check.member is not None:
        expected = f"sm100::KernelArgs::{check.member} at byte {wrong.value}"
    with pytest.raises(CompileError, match=expected):
        compile_with(render_kernel(small_config()), "")


def test_build_gives_a_kernel_whose_manifest_says_what_it_is(tmp_path: Path) -> None:
    config = small_config()
    kernel = jit.build(config, cache=jit.KernelCache(tmp_path))
    assert kernel.cubin.startswith(b"\x7fELF")
    assert ".entry mega_moe_kernel" in kernel.ptx
    assert ".reqnctapercluster 2" in kernel.ptx
    assert f".maxntid {config.num_threads}" in kernel.ptx
    assert kernel.source == render_kernel(config)
    manifest = kernel.manifest
    assert manifest["config"]["num_stages"] == config.num_stages
    assert manifest["config"]["activation"] == "swiglu"
    assert manifest["config"]["activation_clamp"] == "inf"
    assert manifest["arch"] == "sm_100a"
    assert manifest["kernel"] == config.kernel_name
    # A kernel that spills, or needs more than the launch gives each thread, is a mistake.
    assert manifest["resources"]["spill_store_bytes"] == 0
    assert manifest["resources"]["num_registers"] * config.num_threads <= 65536


def test_the_emulators_kernel_has_the_same_ptx_and_no_cubin(tmp_path: Path) -> None:
    cache = jit.KernelCache(tmp_path)
    emulated = jit.build(small_config(), cache=cache, for_emulator=True)
    assert emulated.cubin == b""
    assert emulated.manifest["resources"] is None
    assert emulated.manifest["compile_seconds"] > 0
    complete = jit.build(small_config(), cache=cache)
    assert complete.cubin.startswith(b"\x7fELF")
    assert complete.ptx == emulated.ptx
    # What is there with a cubin will do.
    assert jit.build(small_config(), cache=cache, for_emulator=True).key == complete.key
    assert {entry.problem for entry in cache.entries()} == {None}
    assert len(list(cache.entries())) == 2


@pytest.mark.parametrize("for_emulator", [False, True])
def test_a_compile_error_shows_the_config(tmp_path: Path, monkeypatch, for_emulator: bool) -> None:
    monkeypatch.setattr(
        "deep_moe.jit.render_kernel", lambda config: render_kernel(config) + "\nbroken"
    )
    with pytest.raises(CompileError, match="'num_turn_m_blocks': "):
        jit.build(small_config(), cache=jit.KernelCache(tmp_path), for_emulator=for_emulator)


def test_a_cached_kernel_needs_neither_torch_nor_cuda() -> None:
    """What keeps the load of a cached kernel short."""
    jit.build(small_config())
    script = """
import sys
from deep_moe import jit
from deep_moe.activations import Activation, Situ, Swiglu, SwigluOai
from deep_moe.heuristics import MoEShape
from deep_moe.targets import choose_config
kernel = jit.build(choose_config(MoEShape(2, 8, 2, 256, 128, 16), 16, num_sms=4))
assert kernel.ptx
loaded = {"torch", "numpy", "cuda.bindings", "cuda.core", "filelock"} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
