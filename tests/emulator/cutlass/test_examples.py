"""Example programs of the CUTLASS package, run whole: their own checks and ours must hold.

The kernels are NVIDIA's and know nothing of our descriptors, swizzles and scale layouts. Our
references are FP64 over the operands' bytes as they lie in memory. All run with all checks on; what
the checks find is asserted too, and docs/emulator.md says what it is.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .examples import Example, Launch, run

# NVRTC takes minutes for some, and a busy machine a multiple of them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
# Each compiles for half a minute to two, and what it does, others do as well.
covered = pytest.mark.exhaustive


def tutorial(name: str) -> Example:
    return Example(
        f"cute/tutorial/blackwell/{name}.cu", "sm_100a", "template <class TypeA, class LayoutA"
    )


MMA = tutorial("01_mma_sm100")
WGMMA = Example(
    "cute/tutorial/hopper/wgmma_tma_sm90.cu",
    "sm_90a",
    "// Setup params for",
)


def gemm(path: str, arch: str) -> Example:
    """A file with one kernel, which it calls GemmKernel."""
    return Example(path, arch, "using Gemm = cutlass", "cutlass::device_kernel<GemmKernel>")


MXFP8_MXFP4 = gemm(
    "72_blackwell_narrow_precision_gemm/72c_blackwell_mixed_mxfp8_bf16_gemm.cu", "sm_100a"
)
NVFP4 = gemm("72_blackwell_narrow_precision_gemm/72a_blackwell_nvfp4_bf16_gemm.cu", "sm_100a")
NVFP4_OUTPUT = gemm(
    "72_blackwell_narrow_precision_gemm/72b_blackwell_nvfp4_nvfp4_gemm.cu", "sm_100a"
)
FP8_ON_SM100 = gemm("70_blackwell_gemm/70_blackwell_fp8_gemm.cu", "sm_100a")
FP8_ON_SM90 = gemm(
    "54_hopper_fp8_warp_specialized_gemm/54_hopper_fp8_warp_specialized_gemm.cu", "sm_90a"
)
FP16_ON_SM100 = gemm("70_blackwell_gemm/70_blackwell_fp16_gemm.cu", "sm_100a")
TF32_ON_SM90 = gemm("48_hopper_warp_specialized_gemm/48_hopper_warp_specialized_gemm.cu", "sm_90a")

# Of the same copies: the barrier that was to count them.
EXITS_EXPECTING = "the CTA exits although the mbarrier"
EXITS_EARLY = "the CTA exits while asynchronous copies that need its shared memory are in flight"


def check_findings(launch: Launch, *expected: str, allowed: tuple[str, ...] = ()) -> None:
    """Every finding is one of `expected` or `allowed`, and each of `expected` was found."""
    texts = [str(finding) for finding in launch.findings]
    assert [t for t in texts if not any(e in t for e in (*expected, *allowed))] == []
    assert [e for e in expected if not any(e in t for t in texts)] == []


def run_gemm(
    example: Example,
    capfd: pytest.CaptureFixture[str],
    *findings: str,
    allowed: tuple[str, ...] = (),
    seed: int = 0,
    **options: float,
) -> list[np.ndarray]:
    """Run one of CUTLASS's GEMMs, which compares its result itself, and check what was found.

    findings, allowed: as in `check_findings`. seed: of the schedule. options: of its command line.
    Returns each allocation's bytes as the kernel left them.
    """
    texts = [f"--{name}={value}" for name, value in {**options, "iterations": 0}.items()]
    status, launches = run(example, *texts, seed=seed)
    assert status == 0
    check_findings(launches[0], *findings, allowed=allowed)
    assert "Disposition: Passed" in capfd.readouterr().out
    return launches[0].after


def check_tutorial(example: Example, m: int, n: int, k: int, *findings: str) -> None:
    status, launches = run(example, m, n, k)
    check_findings(launches[0], *findings)
    d, a, b, _ = (
        memory.view(dtype)
        for memory, dtype in zip(
            launches[0].after, (np.float32, np.float16, np.float16, np.float32), strict=True
        )
    )
    expected = a.reshape(m, k).astype(np.float64) @ b.reshape(n, k).astype(np.float64).T
    assert status == 0
    assert np.abs(expected).max() > 0
    # The operands are small integers: every sum is exact.
    np.testing.assert_array_equal(d.reshape(m, n), expected)


@pytest.mark.parametrize("size", [(128, 256, 64), (256, 512, 256)])
def test_one_cta_with_ordinary_loads(size):
    # It copies with st.shared, meets at a barrier and issues the MMA.
    check_tutorial(MMA, *size, "they are ordered, but no fence.proxy.async stands between them")


@covered
@pytest.mark.parametrize("size", [(128, 256, 64), (256, 512, 192)])
def test_one_cta_with_tma(size):
    check_tutorial(tutorial("02_mma_tma_sm100"), *size)


@covered
@pytest.mark.parametrize("size", [(512, 1024, 64), (512, 2048, 192)])
def test_multicast(size):
    check_tutorial(tutorial("03_mma_tma_multicast_sm100"), *size)


@pytest.mark.parametrize("size", [(512, 1024, 64), (1024, 1024, 192)])
def test_cta_pairs_with_multicast(size):
    check_tutorial(tutorial("04_mma_tma_2sm_sm100"), *size)


@pytest.mark.parametrize("size", [(512, 1024, 64), (1024, 1024, 192)])
def test_cta_pairs_with_tma_epilogue(size):
    check_tutorial(tutorial("05_mma_tma_epi_sm100"), *size)


# ---- block scales

# The barrier of the deallocation is initialized after the last fence.mbarrier_init.
BARRIER_OF_DEALLOCATION = "is used, but no barrier orders this after its mbarrier.init"


def decode(codes: np.ndarray, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Values of sign, exponent, mantissa codes with the usual bias and subnormals."""
    codes = codes.astype(np.int64)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = 1.0 - 2.0 * (codes >> (mantissa_bits + exponent_bits))
    bias = (1 << (exponent_bits - 1)) - 1
    normal = (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
    subnormal = mantissa / (1 << mantissa_bits) * 2.0 ** (1 - bias)
    return sign * np.where(exponent == 0, subnormal, normal)


def scale_codes(memory: np.ndarray, rows: int, num_blocks: int) -> np.ndarray:
    """[rows, num_blocks]. 128 rows by 4 blocks make 512 bytes, k innermost."""
    row, block = np.indices((rows, num_blocks))
    tile = row // 128 * (-(-num_blocks // 4)) + block // 4
    return memory[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]


def scales(memory: np.ndarray, rows: int, k: int) -> np.ndarray:
    """Factor of every element, in UE8M0 for 32 elements."""
    codes = scale_codes(memory, rows, k // 32).astype(np.float64)
    return np.repeat(2.0 ** (codes - 127), 32, axis=1)


def nvfp4_values(memory: np.ndarray, memory_of_scales: np.ndarray, rows: int, k: int) -> np.ndarray:
    """E2M1 with factors in UE4M3 for 16 elements."""
    codes = scale_codes(memory_of_scales, rows, k // 16)
    return decode(nibbles(memory).reshape(rows, k), 2, 1) * np.repeat(
        decode(codes, 4, 3), 16, axis=1
    )


def nibbles(memory: np.ndarray) -> np.ndarray:
    return np.stack([memory & 15, memory >> 4], axis=-1).reshape(-1)


@pytest.mark.parametrize(
    ("size", "beta"), [((256, 1024, 256), 2), ((512, 1024, 512), 2), ((256, 1024, 768), 0)]
)
def test_mxfp8_times_mxfp4_in_cta_pairs(size, beta, capfd):
    m, n, k = size
    findings, allowed = (BARRIER_OF_DEALLOCATION,), ()
    if not beta:  # without a C operand the last stores are not waited for
        findings, allowed = (*findings, EXITS_EARLY), (EXITS_EXPECTING,)
    # In this order of events copies are in flight when the CTA exits; seed 0 lets them end before.
    after = run_gemm(
        MXFP8_MXFP4, capfd, *findings, allowed=allowed, seed=2, m=m, n=n, k=k, alpha=1.5, beta=beta
    )
    a_codes, b_codes, c, d, _, a_scales, b_scales = after[:7]
    a = decode(a_codes.reshape(m, k), 4, 3) * scales(a_scales, m, k)
    b = decode(nibbles(b_codes).reshape(n, k), 2, 1) * scales(b_scales, n, k)
    expected = 1.5 * (a @ b.T) + beta * bfloat16_values(c).reshape(m, n)
    assert np.abs(expected).max() > 0
    # One rounding to FP32 per MMA, which these values do not need, and one to BF16.
    np.testing.assert_array_equal(bfloat16_values(d).reshape(m, n), rounded_to_bfloat16(expected))


@covered
@pytest.mark.parametrize("size", [(512, 1024, 256), (256, 1024, 768)])
def test_nvfp4_in_cta_pairs(size, capfd):
    m, n, k = size
    after = run_gemm(NVFP4, capfd, BARRIER_OF_DEALLOCATION, m=m, n=n, k=k, alpha=0.5, beta=2)
    a_codes, b_codes, c, d, _, a_scales, b_scales = after[:7]
    a, b = nvfp4_values(a_codes, a_scales, m, k), nvfp4_values(b_codes, b_scales, n, k)
    expected = 0.5 * (a @ b.T) + 2 * bfloat16_values(c).reshape(m, n)
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(bfloat16_values(d).reshape(m, n), rounded_to_bfloat16(expected))


@covered
@pytest.mark.parametrize("size", [(256, 128, 256), (384, 256, 512)])
def test_nvfp4_with_nvfp4_results(size, capfd):
    """Results in E2M1, with a factor in UE8M0 for 16 of them that the kernel chooses."""
    m, n, k = size
    after = run_gemm(NVFP4_OUTPUT, capfd, m=m, n=n, k=k, alpha=0.5, beta=2)
    a_codes, b_codes, c, d, _, _, norm, a_scales, b_scales, d_scales = after[:10]
    a, b = nvfp4_values(a_codes, a_scales, m, k), nvfp4_values(b_codes, b_scales, n, k)
    sums = (0.5 * (a @ b.T) + 2.0 * c.view(np.float32).reshape(m, n)).astype(np.float32)
    (constant,) = norm.view(np.float32)
    largest = np.abs(sums).reshape(m, n // 16, 16).max(axis=-1)
    assert largest.min() > 0
    # The smallest power of two by which the largest of 16 fits below 6.
    exponents = np.ceil(np.log2(largest * np.float32(constant * np.float32(1 / 6))))
    codes = scale_codes(d_scales, m, n // 16)
    np.testing.assert_array_equal(codes, exponents + 127)
    scaled = sums * np.repeat(constant / 2.0**exponents, 16, axis=1)
    np.testing.assert_array_equal(
        decode(nibbles(d).reshape(m, n), 2, 1), rounded_to_e2m1(scaled.astype(np.float64))
    )


def rounded_to_e2m1(values: np.ndarray) -> np.ndarray:
    """To the nearest, the even one of two codes that are equally near; 6 at most."""
    magnitudes = decode(np.arange(8), 2, 1)
    distance = np.abs(np.abs(values)[..., None] - magnitudes)
    # An odd code must be strictly nearer.
    nearest = (distance + np.arange(8) % 2 * 1e-9).argmin(axis=-1)
    return np.copysign(magnitudes[nearest], values)


def bfloat16_values(memory: np.ndarray) -> np.ndarray:
    return (memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded_to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


# ---- plain products


@covered
@pytest.mark.parametrize(
    ("example", "dtype"), [(TF32_ON_SM90, np.float32), (FP16_ON_SM100, np.float16)]
)
@pytest.mark.parametrize("size", [(512, 256, 96), (1000, 248, 136)])
def test_product(example, dtype, size, capfd):
    """Whole numbers, so that every sum is exact. The second size fits no tile."""
    m, n, k = size
    findings = [BARRIER_OF_DEALLOCATION] if example is FP16_ON_SM100 else []
    after = run_gemm(example, capfd, *findings, m=m, n=n, k=k, alpha=0.5, beta=2)
    types = (dtype, dtype, np.float32, np.float32)
    a, b, c, d = (x.view(t) for x, t in zip(after, types, strict=False))
    product = a.reshape(m, k).astype(np.float64) @ b.reshape(n, k).astype(np.float64).T
    expected = 0.5 * product + 2.0 * c.reshape(n, m).T
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(d.reshape(n, m).T, expected)


# ---- FP8


@pytest.mark.parametrize("example", [FP8_ON_SM90, pytest.param(FP8_ON_SM100, marks=covered)])
@pytest.mark.parametrize("size", [(512, 256, 256), (304, 208, 144)])
def test_fp8_with_scales_activation_and_largest_value(example, size, capfd):
    m, n, k = size
    scales = {"scale_a": 0.5, "scale_b": 0.25, "scale_c": 2, "scale_d": 0.5, "scale_aux": 0.25}
    findings, allowed = (), ()
    if example is FP8_ON_SM100:
        # As with block scales; it waits for its last stores only where C shares their memory.
        findings, allowed = (BARRIER_OF_DEALLOCATION,), (EXITS_EARLY, EXITS_EXPECTING)
    after = run_gemm(
        example, capfd, *findings, allowed=allowed, m=m, n=n, k=k, alpha=1.5, beta=0.5, **scales
    )
    a, b, c, d, _, aux, _, largest_d, _, largest_aux, _ = after[:11]
    product = decode(a.reshape(m, k), 4, 3) @ decode(b.reshape(n, k), 4, 3).T
    # Exact in FP32: the operands are small whole numbers, the scales powers of two.
    sums = 1.5 * 0.5 * 0.25 * product + 0.5 * 2 * decode(c.reshape(n, m), 4, 3).T
    activated = np.maximum(sums, 0)
    np.testing.assert_array_equal(aux.reshape(n, m).T, rounded_to_e4m3(0.25 * sums))
    np.testing.assert_array_equal(d.reshape(n, m).T, rounded_to_e4m3(0.5 * activated))
    assert largest_d.view(np.float32)[0] == activated.max() > 0
    assert largest_aux.view(np.float32)[0] == np.abs(sums).max()


def rounded_to_e4m3(values: np.ndarray) -> np.ndarray:
    codes = torch.from_numpy(values).to(torch.float32).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy()


# ---- SM90


@pytest.mark.parametrize(
    ("size", "majors"), [((256, 128, 64), "TN"), ((256, 256, 192), "TN"), ((256, 128, 192), "NT")]
)
def test_wgmma_fed_by_tma(size, majors):
    m, n, k = size
    status, launches = run(WGMMA, m, n, k, *majors)
    # Its producer goes on for as many tiles as there are stages, and nobody waits for those.
    # Whether the copies or only their bytes are missed is the schedule's choice.
    check_findings(launches[0], allowed=(EXITS_EARLY, EXITS_EXPECTING))
    assert launches[0].findings
    a, b, c = (memory.view(np.float16).astype(np.float64) for memory in launches[0].after)
    a = a.reshape(m, k) if majors[0] == "T" else a.reshape(k, m).T
    b = b.reshape(n, k) if majors[1] == "N" else b.reshape(k, n).T
    assert status == 0
    np.testing.assert_array_equal(c.reshape(n, m).T, a @ b.T)
