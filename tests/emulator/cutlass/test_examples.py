"""Example programs of the CUTLASS package, run whole: their own checks and ours must hold.

The kernels are NVIDIA's and know nothing of our descriptors, swizzles and scale layouts. Our
references are FP64 over the operands' bytes as they lie in memory. All run with all checks on; what
the checks find is asserted too, and docs/emulator.md says what it is.
"""

from __future__ import annotations

import numpy as np
import pytest

from .examples import Example, Launch, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def tutorial(name: str) -> Example:
    return Example(
        f"cute/tutorial/blackwell/{name}.cu", "sm_100a", "template <class TypeA, class LayoutA"
    )


MMA = tutorial("01_mma_sm100")
MXFP8_MXFP4 = Example(
    "72_blackwell_narrow_precision_gemm/72c_blackwell_mixed_mxfp8_bf16_gemm.cu",
    "sm_100a",
    "using Gemm = cutlass",
    kernel="cutlass::device_kernel<GemmKernel>",
)
WGMMA = Example(
    "cute/tutorial/hopper/wgmma_tma_sm90.cu",
    "sm_90a",
    "// Setup params for",
)


# Of the same copies: the barrier that was to count them.
EXITS_EXPECTING = "the CTA exits although the mbarrier"
EXITS_EARLY = "the CTA exits while asynchronous copies that need its shared memory are in flight"


def check_findings(launch: Launch, *expected: str, allowed: tuple[str, ...] = ()) -> None:
    """Every finding is one of `expected` or `allowed`, and each of `expected` was found."""
    texts = [str(finding) for finding in launch.findings]
    assert [t for t in texts if not any(e in t for e in (*expected, *allowed))] == []
    assert [e for e in expected if not any(e in t for t in texts)] == []


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


@pytest.mark.parametrize("size", [(128, 256, 64), (256, 512, 192)])
def test_one_cta_with_tma(size):
    check_tutorial(tutorial("02_mma_tma_sm100"), *size)


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


def scales(codes: np.ndarray, rows: int, k: int) -> np.ndarray:
    """Factor of every element. 128 rows by 4 blocks of 32 make 512 bytes, k innermost."""
    row, block = np.indices((rows, k // 32))
    tile = row // 128 * (k // 128) + block // 4
    byte = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    return np.repeat(2.0 ** (codes[byte].astype(np.float64) - 127), 32, axis=1)


@pytest.mark.parametrize(
    ("size", "beta"), [((256, 1024, 256), 2), ((512, 1024, 512), 2), ((256, 1024, 768), 0)]
)
def test_mxfp8_times_mxfp4_in_cta_pairs(size, beta, capfd):
    m, n, k = size
    options = [f"--m={m}", f"--n={n}", f"--k={k}", "--alpha=1.5", f"--beta={beta}"]
    status, launches = run(MXFP8_MXFP4, *options, "--iterations=0")
    assert status == 0
    # The barrier of the deallocation is initialized after the last fence.mbarrier_init. Without a C
    # operand the last stores are not waited for.
    init = "is used, but no barrier orders this after its mbarrier.init"
    early = [] if beta else [EXITS_EARLY]
    check_findings(launches[0], init, *early, allowed=() if beta else (EXITS_EXPECTING,))
    assert "Disposition: Passed" in capfd.readouterr().out
    a_codes, b_codes, c, d, _, a_scales, b_scales = launches[0].after[:7]
    nibbles = np.stack([b_codes & 15, b_codes >> 4], axis=-1).reshape(n, k)
    a = decode(a_codes.reshape(m, k), 4, 3) * scales(a_scales, m, k)
    b = decode(nibbles, 2, 1) * scales(b_scales, n, k)
    expected = 1.5 * (a @ b.T) + beta * bfloat16_values(c).reshape(m, n)
    assert np.abs(expected).max() > 0
    # One rounding to FP32 per MMA, which these values do not need, and one to BF16.
    np.testing.assert_array_equal(bfloat16_values(d).reshape(m, n), rounded_to_bfloat16(expected))


def bfloat16_values(memory: np.ndarray) -> np.ndarray:
    return (memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def rounded_to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


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
