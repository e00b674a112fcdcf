"""The launch on a GPU: arguments arrive whole, grids are resident, graphs replay."""

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch

from deep_moe import jit
from deep_moe.emulator.tensor_map import DataType, Swizzle
from deep_moe.jit.cpp_structs import CppStruct, member_names
from deep_moe.jit.kernel_args import TensorMap, WaitStatus, kernel_args
from deep_moe.jit.launch import CudaLauncher
from deep_moe.targets import MegaMoEConfig
from deep_moe.tensor_map import map_of_rows

pytestmark = pytest.mark.gpu

# Copies its argument to y and the status to its end, through a grid barrier that only passes if
# all CTAs are resident, and with all of its dynamic shared memory.
SOURCE = """
#include <deep_moe/experts/sm100/kernel_args.cuh>

extern "C" __global__ void __cluster_dims__(2) __launch_bounds__(128, 1)
    mega_moe_kernel(const __grid_constant__ deep_moe::sm100::KernelArgs args) {
    extern __shared__ char smem[];
    smem[NUM_SMEM_BYTES - 1] = 1;
    auto* const y = static_cast<unsigned char*>(args.y);
    auto* const arrived = reinterpret_cast<unsigned int*>(args.rank_buffers[0]);
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1);
        while (atomicAdd(arrived, 0) % gridDim.x != 0) {}
    }
    __syncthreads();
    if (blockIdx.x == 0) {
        const auto* const bytes = reinterpret_cast<const unsigned char*>(&args);
        for (int i = threadIdx.x; i < sizeof(args); i += blockDim.x) y[i] = bytes[i];
        if (threadIdx.x == 0) atomicCAS_system(&args.status->code, 0u, 7u);
    }
}
"""
NUM_SMEM_BYTES = 200 * 1024
ARGS = kernel_args("sm100")


def make_launcher() -> tuple[CudaLauncher, int]:
    major, minor = torch.cuda.get_device_capability()
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count // 2 * 2
    kernel = jit.compile_cached(
        SOURCE.replace("NUM_SMEM_BYTES", str(NUM_SMEM_BYTES)),
        arch=f"sm_{major}{minor}a",
        kernel=MegaMoEConfig.kernel_name,
    )
    torch.cuda.current_stream()  # makes the context current
    torch.zeros(1, device="cuda")
    launcher = CudaLauncher(kernel, num_threads=128, smem_bytes=NUM_SMEM_BYTES, is_cooperative=True)
    return launcher, num_sms


def make_args() -> tuple[CppStruct, torch.Tensor, torch.Tensor, torch.Tensor]:
    y = torch.zeros(ctypes.sizeof(ARGS), dtype=torch.uint8, device="cuda")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    status = torch.zeros(ctypes.sizeof(WaitStatus), dtype=torch.uint8, pin_memory=True)
    args = ARGS()
    members = (getattr(args, name) for name in member_names(ARGS))
    for i, member in enumerate(own for own in members if isinstance(own, TensorMap)):
        member.bytes[:] = [(i + j) % 256 for j in range(128)]
    args.rank_buffers[0] = counter.data_ptr()
    args.rank_buffers[71] = 0x1234567890ABCDEF
    args.y = y.data_ptr()
    args.status = status.data_ptr()
    args.wait_timeout_ns = 30_000_000_000
    args.rank_idx, args.num_tokens = 5, 77
    return args, y, counter, status


def test_the_whole_argument_arrives_and_the_host_sees_the_status() -> None:
    launcher, num_sms = make_launcher()
    args, y, counter, status = make_args()
    launcher.launch(args, num_sms, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert bytes(y.cpu().numpy()) == bytes(args)
    assert counter.item() == num_sms
    assert WaitStatus.from_address(status.data_ptr()).code == 7


def test_arguments_are_copied_at_the_launch() -> None:
    launcher, num_sms = make_launcher()
    args, y, _, _ = make_args()
    before = bytes(args)
    launcher.launch(args, num_sms, torch.cuda.current_stream().cuda_stream)
    args.num_tokens = 1
    torch.cuda.synchronize()
    assert bytes(y.cpu().numpy()) == before


def in_a_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_threads_launch_at_once_each_with_its_grid_stream_and_arguments() -> None:
    launcher, _ = make_launcher()
    num_launches = 100
    works = []
    for i in range(4):
        args, y, counter, _ = make_args()
        args.num_tokens = i
        works.append((args, y, counter, 2 + 2 * i, torch.cuda.Stream()))
    torch.cuda.synchronize()

    def launch(args: CppStruct, num_ctas: int, stream: int) -> None:
        for _ in range(num_launches):
            launcher.launch(args, num_ctas, stream)

    threads = [
        in_a_thread(lambda w=work: launch(w[0], w[3], w[4].cuda_stream))  # type: ignore[misc]
        for work in works
    ]
    for thread in threads:
        thread.join()
    for args, y, counter, num_ctas, stream in works:
        stream.synchronize()
        assert counter.item() == num_launches * num_ctas
        assert bytes(y.cpu().numpy()) == bytes(args)


def test_a_thread_that_has_not_used_cuda_can_launch() -> None:
    launcher, num_sms = make_launcher()
    args, y, counter, _ = make_args()
    torch.cuda.synchronize()
    in_a_thread(lambda: launcher.launch(args, num_sms, 0)).join()
    torch.cuda.synchronize()
    assert counter.item() == num_sms
    assert bytes(y.cpu().numpy()) == bytes(args)


def test_a_launch_while_another_device_is_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; there are {torch.cuda.device_count()}")
    launcher, num_sms = make_launcher()
    args, y, counter, _ = make_args()
    torch.cuda.synchronize()
    with torch.cuda.device(1):
        torch.zeros(1, device="cuda")
        launcher.launch(args, num_sms, torch.cuda.current_stream(0).cuda_stream)
        assert torch.cuda.current_device() == 1
        assert torch.zeros(1, device="cuda").device.index == 1
    torch.cuda.synchronize(0)
    assert counter.item() == num_sms
    assert bytes(y.cpu().numpy()) == bytes(args)


def test_a_captured_launch_replays() -> None:
    launcher, num_sms = make_launcher()
    args, y, counter, _ = make_args()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.launch(args, num_sms, torch.cuda.current_stream().cuda_stream)
    assert counter.item() == 0
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert counter.item() == 3 * num_sms
    assert bytes(y.cpu().numpy()) == bytes(args)


def test_the_driver_encodes_what_the_spec_allows() -> None:
    tensor = torch.zeros(64, 1024, dtype=torch.uint8, device="cuda")
    spec = map_of_rows(tensor, DataType.UINT8, name="tensor", box=(128, 32), swizzle=Swizzle.B128)
    image = spec.encode_cuda()
    assert len(image) == 128
    assert image != bytes(128)
    scales = torch.zeros(8, 512, dtype=torch.int32, device="cuda")
    other = map_of_rows(scales, DataType.INT32, name="scales", box=(256, 1))
    assert other.encode_cuda() != image


def test_what_the_driver_refuses_is_an_error() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only Hopper's driver refuses packed FP4")
    tensor = torch.zeros(64, 1024, dtype=torch.uint8, device="cuda")
    spec = map_of_rows(
        tensor, DataType.PACKED_16U4_ALIGN16B, name="tensor", box=(128, 32), swizzle=Swizzle.B128
    )
    with pytest.raises(ValueError, match="driver refused a tensor map"):
        spec.encode_cuda()
