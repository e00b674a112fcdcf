// What of CUDA's interfaces the stand-in needs: results, and structures that programs pass. Names
// and layouts are the interface's; tests compare them with CUDA's own headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deep_moe::cuda {

struct Context;
struct Event;
struct Function;
struct Graph;
struct Library;
struct Pool;
struct Stream;

// Results of the driver; the runtime has the same numbers.
enum Result : int {
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    invalid_configuration = 9,  // of the runtime
    invalid_symbol = 13,        // of the runtime
    invalid_device_function = 98,
    no_device = 100,
    invalid_device = 101,
    invalid_image = 200,
    invalid_context = 201,
    no_binary_for_gpu = 209,
    invalid_ptx = 218,
    file_not_found = 301,
    invalid_handle = 400,
    illegal_state = 401,
    not_found = 500,
    not_ready = 600,
    illegal_address = 700,
    launch_out_of_resources = 701,
    launch_timeout = 702,
    peer_access_already_enabled = 704,
    peer_access_not_enabled = 705,
    assertion = 710,
    host_memory_already_registered = 712,
    host_memory_not_registered = 713,
    illegal_instruction = 715,
    misaligned_address = 716,
    launch_failed = 719,
    cooperative_launch_too_large = 720,
    not_supported = 801,
    capture_unsupported = 900,
    unknown_error = 999,
};

using DevicePointer = uint64_t;
using Device = int;

enum MemoryType : unsigned { host_memory = 1, device_memory = 2, array_memory = 3, unified = 4 };

struct Dim3 {
    uint32_t x = 1, y = 1, z = 1;
};

struct Uuid {
    unsigned char bytes[16];
};

// CUDA_MEMCPY2D
struct Copy2D {
    size_t source_x, source_y;
    MemoryType source_type;
    const void* source_host;
    DevicePointer source_device;
    void* source_array;
    size_t source_pitch;
    size_t x, y;
    MemoryType type;
    void* host;
    DevicePointer device;
    void* array;
    size_t pitch;
    size_t width, height;
};

// CUDA_MEMCPY3D; that of peers has contexts where this one has reserved words.
struct Copy3D {
    size_t source_x, source_y, source_z, source_lod;
    MemoryType source_type;
    const void* source_host;
    DevicePointer source_device;
    void* source_array;
    void* source_context;
    size_t source_pitch, source_height;
    size_t x, y, z, lod;
    MemoryType type;
    void* host;
    DevicePointer device;
    void* array;
    void* context;
    size_t pitch, height;
    size_t width, rows, depth;
};

enum LaunchAttributeId : int {
    attribute_cooperative = 2,
    attribute_cluster = 4,
    attribute_programmatic_event = 7,
    attribute_launch_completion_event = 12,
};

// CUlaunchAttribute and cudaLaunchAttribute
struct LaunchAttribute {
    int id;
    int padding;
    union {
        char bytes[64];
        Dim3 cluster;
        int cooperative;
        struct {
            Event* event;
            int flags;
        } event;
    };

    LaunchAttribute() = delete;
};

// CUlaunchConfig
struct LaunchConfig {
    uint32_t grid[3], block[3];
    uint32_t shared_bytes;
    Stream* stream;
    const LaunchAttribute* attributes;
    uint32_t num_attributes;
};

// cudaLaunchConfig_t
struct RuntimeLaunchConfig {
    Dim3 grid, block;
    size_t shared_bytes;
    Stream* stream;
    const LaunchAttribute* attributes;
    uint32_t num_attributes;
};

// CUmemLocation and cudaMemLocation
struct Location {
    int type;  // 1: a device
    int id;
};

// CUmemPoolProps and cudaMemPoolProps
struct PoolProperties {
    int allocation_type, handle_types;
    Location location;
    void* security;
    size_t max_bytes;
    unsigned short usage;
    unsigned char reserved[54];
};

// CUmemAccessDesc and cudaMemAccessDesc
struct AccessDescription {
    Location location;
    int flags;  // 0: none, 1: read, 3: read and write
};

// cudaDeviceProp of CUDA 13
struct DeviceProperties {
    char name[256];
    Uuid uuid;
    char luid[8];
    unsigned luid_mask;
    size_t global_bytes, shared_per_block;
    int registers_per_block, warp_size;
    size_t pitch;
    int threads_per_block, block[3], grid[3];
    size_t constant_bytes;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
    int num_sms, integrated, maps_host;
    int textures_and_surfaces[39];
    size_t surface_alignment;
    int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, copy_engines, unified,
        bus_bits, l2_bytes, persisting_l2_bytes, threads_per_sm, priorities, global_l1, local_l1;
    size_t shared_per_sm;
    int registers_per_sm, managed, multi_gpu_board, board_group, host_atomics, pageable,
        concurrent_managed, preemption, host_pointer_of_registered, cooperative;
    size_t shared_per_block_optin;
    int host_page_tables, direct_managed, ctas_per_sm, access_window;
    size_t reserved_shared;
    int host_register, sparse, read_only_register, timeline, pools, rdma;
    unsigned rdma_flush;
    int rdma_order;
    unsigned pool_handles;
    int deferred_arrays, ipc_events, clusters, function_pointers, numa_config, numa_id, mps,
        host_numa;
    unsigned pci_id, pci_subsystem;
    int host_numa_ipc, reserved[56];
};

// cudaDeviceProp of CUDA 12, which has a few fields more
struct DeviceProperties12 {
    char name[256];
    Uuid uuid;
    char luid[8];
    unsigned luid_mask;
    size_t global_bytes, shared_per_block;
    int registers_per_block, warp_size;
    size_t pitch;
    int threads_per_block, block[3], grid[3], clock_khz;
    size_t constant_bytes;
    int major, minor;
    size_t texture_alignment, texture_pitch_alignment;
    int overlaps_copies, num_sms, timeout, integrated, maps_host, compute_mode;
    int textures_and_surfaces[40];
    size_t surface_alignment;
    int concurrent_kernels, ecc, pci_bus, pci_device, pci_domain, tcc, copy_engines, unified,
        memory_khz, bus_bits, l2_bytes, persisting_l2_bytes, threads_per_sm, priorities, global_l1,
        local_l1;
    size_t shared_per_sm;
    int registers_per_sm, managed, multi_gpu_board, board_group, host_atomics, double_ratio,
        pageable, concurrent_managed, preemption, host_pointer_of_registered, cooperative,
        multi_device_cooperative;
    size_t shared_per_block_optin;
    int host_page_tables, direct_managed, ctas_per_sm, access_window;
    size_t reserved_shared;
    int host_register, sparse, read_only_register, timeline, pools, rdma;
    unsigned rdma_flush;
    int rdma_order;
    unsigned pool_handles;
    int deferred_arrays, ipc_events, clusters, function_pointers, reserved[63];
};
static_assert(sizeof(DeviceProperties12) == 1032);

// cudaFuncAttributes
struct FunctionAttributes {
    size_t shared_bytes, constant_bytes, local_bytes;
    int max_threads, num_registers, ptx_version, binary_version, caches, dynamic_shared_bytes,
        carveout, needs_cluster, cluster[3], cluster_policy, large_clusters, reserved[16];
};

// cudaPointerAttributes
struct PointerAttributes {
    int type, device;
    void *device_pointer, *host_pointer;
    long reserved[8];
};

// cudaPitchedPtr
struct Pitched {
    void* pointer;
    size_t pitch, width, height;
};

// cudaPos and cudaExtent
struct Position {
    size_t x, y, z;
};

// cudaMemcpy3DParms
struct BoxParameters {
    void* source_array;
    Position source_position;
    Pitched source;
    void* array;
    Position position;
    Pitched target;
    Position extent;
    int kind;
};

// Streams that are no objects.
inline Stream* const legacy_stream = reinterpret_cast<Stream*>(1);
inline Stream* const per_thread_stream = reinterpret_cast<Stream*>(2);

}  // namespace deep_moe::cuda

#define EXPORT extern "C" __attribute__((visibility("default")))
