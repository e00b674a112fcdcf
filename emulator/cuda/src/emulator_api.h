// What the stand-in calls of the emulator's library (emulator/src/api.cpp).
#pragma once

#include <cstdint>

extern "C" {
struct Handle;
struct KernelResources {
    uint32_t static_shared_bytes, local_bytes;
    uint32_t max_threads, required_threads[3];
    uint32_t num_registers;
};
Handle* dm_create(uint64_t seed, int checks, int real_clock);
const char* dm_error(Handle*);
const char* dm_error_finding(Handle*);
void dm_set_memory_limit(Handle*, uint64_t bytes);
void dm_set_strict_tcgen05(Handle*, int on);
void dm_set_schedule(Handle*, int schedule);
void dm_set_collects_findings(Handle*, int on);
uint32_t dm_num_findings(Handle*);
const char* dm_finding(Handle*, uint32_t index);
int dm_add_memory(Handle*, uint32_t rank, uint64_t address, uint64_t bytes, const char* name,
                  int writable);
int dm_remove_memory(Handle*, uint32_t rank, uint64_t address);
int dm_load(Handle*, const char* ptx, uint64_t bytes, const char* name, uint32_t* module);
void dm_unload(Handle*, uint32_t module);
int dm_kernel(Handle*, uint32_t module, const char* kernel, uint32_t* parameter_bytes,
              uint32_t* num_parameters, uint32_t cluster[3]);
const char* dm_kernels(Handle*, uint32_t module);
int dm_kernel_parameter(Handle*, uint32_t module, const char* kernel, uint32_t index,
                        uint32_t* offset, uint32_t* bytes, int* is_floating);
int dm_kernel_resources(Handle*, uint32_t module, const char* kernel, KernelResources*);
int dm_variable(Handle*, uint32_t module, uint32_t rank, const char* name, uint64_t* address,
                uint64_t* bytes);
int dm_launch(Handle*, uint32_t module, const char* kernel, uint32_t rank, const uint32_t grid[3],
              const uint32_t block[3], const uint32_t cluster[3], uint32_t shared_bytes,
              const void* arguments, uint64_t argument_bytes, int in_order, uint32_t num_registers);
int dm_run(Handle*, const void* python, void* progress);
void dm_statistics(Handle*, uint64_t* warp_instructions, uint64_t* lane_instructions,
                   uint64_t* virtual_ns);
}
