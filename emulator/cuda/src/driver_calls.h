// The driver's calls that the runtime goes through.
#pragma once

#include "abi.h"

extern "C" {
using namespace deep_moe::cuda;
int cuGetErrorString(int result, const char** text);
int cuDevicePrimaryCtxReset_v2(Device device);
int cuDeviceCanAccessPeer(int* can, Device device, Device peer);
int cuDeviceGetAttribute(int* value, int attribute, Device device);
int cuDeviceGetP2PAttribute(int* value, int attribute, Device device, Device peer);
int cuDeviceGetPCIBusId(char* text, int size, Device device);
int cuDeviceGetByPCIBusId(Device* device, const char* text);
int cuDeviceGetDefaultMemPool(Pool** pool, Device device);
int cuDeviceGetMemPool(Pool** pool, Device device);
int cuDeviceSetMemPool(Device device, Pool* pool);
int cuCtxGetLimit(size_t* value, int limit);
int cuCtxSetLimit(int limit, size_t value);
int cuFuncGetAttribute(int* value, int attribute, Function* function);
int cuFuncSetAttribute(Function* function, int attribute, int value);
int cuFuncGetParamInfo(Function* function, size_t index, size_t* offset, size_t* size);
int cuModuleLoad(Library** module, const char* path);
int cuModuleGetFunction(Function** function, Library* module, const char* name);
int cuModuleGetFunctionCount(unsigned* count, Library* module);
int cuModuleEnumerateFunctions(Function** functions, unsigned count, Library* module);
int cuModuleGetGlobal_v2(DevicePointer* address, size_t* bytes, Library* module, const char* name);
int cuOccupancyAvailableDynamicSMemPerBlock(size_t* bytes, Function* function, int num_blocks,
                                            int threads);
int cuOccupancyMaxPotentialClusterSize(int* size, Function* function, const LaunchConfig* config);
int cuOccupancyMaxActiveClusters(int* count, Function* function, const LaunchConfig* config);
int cuMemGetInfo_v2(size_t* free, size_t* total);
int cuMemAlloc_v2(DevicePointer* pointer, size_t size);
int cuMemAllocPitch_v2(DevicePointer* pointer, size_t* pitch, size_t width, size_t height,
                       unsigned element_bytes);
int cuMemFree_v2(DevicePointer pointer);
int cuMemAllocManaged(DevicePointer* pointer, size_t size, unsigned flags);
int cuMemHostAlloc(void** pointer, size_t size, unsigned flags);
int cuMemHostGetDevicePointer_v2(DevicePointer* device, void* host, unsigned flags);
int cuMemHostGetFlags(unsigned* flags, void* host);
int cuMemHostRegister_v2(void* host, size_t size, unsigned flags);
int cuMemHostUnregister(void* host);
int cuMemAllocAsync(DevicePointer* pointer, size_t size, Stream* stream);
int cuMemAllocFromPoolAsync(DevicePointer* pointer, size_t size, Pool* pool, Stream* stream);
int cuMemFreeAsync(DevicePointer pointer, Stream* stream);
int cuMemPoolCreate(Pool** pool, const PoolProperties* properties);
int cuMemPoolDestroy(Pool* pool);
int cuMemPoolTrimTo(Pool* pool, size_t bytes);
int cuMemPoolSetAttribute(Pool* pool, int attribute, void* value);
int cuMemPoolGetAttribute(Pool* pool, int attribute, void* value);
int cuMemPoolSetAccess(Pool* pool, const AccessDescription* map, size_t count);
int cuMemPoolGetAccess(int* flags, Pool* pool, const Location* location);
int cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority);
int cuStreamDestroy_v2(Stream* stream);
int cuStreamSynchronize(Stream* stream);
int cuStreamQuery(Stream* stream);
int cuStreamGetFlags(Stream* stream, unsigned* flags);
int cuStreamGetPriority(Stream* stream, int* priority);
int cuStreamGetId(Stream* stream, unsigned long long* id);
int cuStreamGetDevice(Stream* stream, Device* device);
int cuStreamWaitEvent(Stream* stream, Event* event, unsigned flags);
int cuStreamBeginCapture_v2(Stream* stream, int mode);
int cuStreamEndCapture(Stream* stream, Graph** graph);
int cuGraphInstantiateWithFlags(Graph** executable, Graph* graph, unsigned long long flags);
int cuGraphExecUpdate_v2(Graph* executable, Graph* graph, int* result);
int cuGraphLaunch(Graph* executable, Stream* stream);
int cuGraphGetNodes(Graph* graph, void** nodes, size_t* count);
int cuGraphDestroy(Graph* graph);
int cuGraphExecDestroy(Graph* executable);
int cuStreamIsCapturing(Stream* stream, int* status);
int cuStreamAddCallback(Stream* stream, void (*function)(Stream*, int, void*), void* data,
                        unsigned flags);
int cuLaunchHostFunc(Stream* stream, void (*function)(void*), void* data);
int cuEventCreate(Event** event, unsigned flags);
int cuEventDestroy_v2(Event* event);
int cuEventRecord(Event* event, Stream* stream);
int cuEventQuery(Event* event);
int cuEventSynchronize(Event* event);
int cuEventElapsedTime(float* milliseconds, Event* begin, Event* end);
}
