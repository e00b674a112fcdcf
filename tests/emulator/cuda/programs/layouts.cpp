// The structures that the stand-in shares with programs, beside those of CUDA's own headers.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "abi.h"

namespace ours = deep_moe::cuda;

#define SAME(mine, my_field, theirs, field) \
    static_assert(offsetof(ours::mine, my_field) == offsetof(theirs, field))
#define SAME_SIZE(mine, theirs) static_assert(sizeof(ours::mine) == sizeof(theirs))

SAME_SIZE(Copy2D, CUDA_MEMCPY2D);
SAME(Copy2D, source_pitch, CUDA_MEMCPY2D, srcPitch);
SAME(Copy2D, type, CUDA_MEMCPY2D, dstMemoryType);
SAME(Copy2D, device, CUDA_MEMCPY2D, dstDevice);
SAME(Copy2D, width, CUDA_MEMCPY2D, WidthInBytes);

SAME_SIZE(Copy3D, CUDA_MEMCPY3D);
SAME_SIZE(Copy3D, CUDA_MEMCPY3D_PEER);
SAME(Copy3D, source_height, CUDA_MEMCPY3D, srcHeight);
SAME(Copy3D, z, CUDA_MEMCPY3D, dstZ);
SAME(Copy3D, device, CUDA_MEMCPY3D_PEER, dstDevice);
SAME(Copy3D, depth, CUDA_MEMCPY3D_PEER, Depth);

SAME_SIZE(LaunchAttribute, CUlaunchAttribute);
SAME_SIZE(LaunchAttribute, cudaLaunchAttribute);
SAME(LaunchAttribute, cluster, CUlaunchAttribute, value.clusterDim);
SAME(LaunchAttribute, cooperative, CUlaunchAttribute, value.cooperative);
SAME(LaunchAttribute, event.event, CUlaunchAttribute, value.programmaticEvent.event);
SAME(LaunchAttribute, event.event, CUlaunchAttribute, value.launchCompletionEvent.event);
static_assert(ours::attribute_cluster == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
static_assert(ours::attribute_cooperative == CU_LAUNCH_ATTRIBUTE_COOPERATIVE);
static_assert(ours::attribute_programmatic_event == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT);
static_assert(ours::attribute_launch_completion_event ==
              CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT);

SAME_SIZE(LaunchConfig, CUlaunchConfig);
SAME(LaunchConfig, shared_bytes, CUlaunchConfig, sharedMemBytes);
SAME(LaunchConfig, attributes, CUlaunchConfig, attrs);
SAME(LaunchConfig, num_attributes, CUlaunchConfig, numAttrs);
SAME_SIZE(RuntimeLaunchConfig, cudaLaunchConfig_t);
SAME(RuntimeLaunchConfig, shared_bytes, cudaLaunchConfig_t, dynamicSmemBytes);
SAME(RuntimeLaunchConfig, num_attributes, cudaLaunchConfig_t, numAttrs);

SAME_SIZE(PoolProperties, CUmemPoolProps);
SAME(PoolProperties, location, cudaMemPoolProps, location);
SAME_SIZE(AccessDescription, CUmemAccessDesc);

SAME_SIZE(DeviceProperties, cudaDeviceProp);
SAME(DeviceProperties, global_bytes, cudaDeviceProp, totalGlobalMem);
SAME(DeviceProperties, grid, cudaDeviceProp, maxGridSize);
SAME(DeviceProperties, major, cudaDeviceProp, major);
SAME(DeviceProperties, num_sms, cudaDeviceProp, multiProcessorCount);
SAME(DeviceProperties, surface_alignment, cudaDeviceProp, surfaceAlignment);
SAME(DeviceProperties, copy_engines, cudaDeviceProp, asyncEngineCount);
SAME(DeviceProperties, l2_bytes, cudaDeviceProp, l2CacheSize);
SAME(DeviceProperties, threads_per_sm, cudaDeviceProp, maxThreadsPerMultiProcessor);
SAME(DeviceProperties, shared_per_sm, cudaDeviceProp, sharedMemPerMultiprocessor);
SAME(DeviceProperties, managed, cudaDeviceProp, managedMemory);
SAME(DeviceProperties, cooperative, cudaDeviceProp, cooperativeLaunch);
SAME(DeviceProperties, shared_per_block_optin, cudaDeviceProp, sharedMemPerBlockOptin);
SAME(DeviceProperties, ctas_per_sm, cudaDeviceProp, maxBlocksPerMultiProcessor);
SAME(DeviceProperties, reserved_shared, cudaDeviceProp, reservedSharedMemPerBlock);
SAME(DeviceProperties, pools, cudaDeviceProp, memoryPoolsSupported);
SAME(DeviceProperties, clusters, cudaDeviceProp, clusterLaunch);
SAME(DeviceProperties, host_numa, cudaDeviceProp, hostNumaId);

SAME_SIZE(FunctionAttributes, cudaFuncAttributes);
SAME(FunctionAttributes, num_registers, cudaFuncAttributes, numRegs);
SAME(FunctionAttributes, dynamic_shared_bytes, cudaFuncAttributes, maxDynamicSharedSizeBytes);
SAME(FunctionAttributes, cluster, cudaFuncAttributes, requiredClusterWidth);
SAME_SIZE(PointerAttributes, cudaPointerAttributes);
SAME(PointerAttributes, host_pointer, cudaPointerAttributes, hostPointer);
SAME_SIZE(BoxParameters, cudaMemcpy3DParms);
SAME(BoxParameters, target, cudaMemcpy3DParms, dstPtr);
SAME(BoxParameters, extent, cudaMemcpy3DParms, extent);

static_assert(ours::illegal_address == CUDA_ERROR_ILLEGAL_ADDRESS);
static_assert(int(ours::illegal_address) == int(cudaErrorIllegalAddress));
static_assert(int(ours::invalid_configuration) == int(cudaErrorInvalidConfiguration));
static_assert(ours::cooperative_launch_too_large == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
static_assert(ours::not_supported == CUDA_ERROR_NOT_SUPPORTED);

int main() {}
