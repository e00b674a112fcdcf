// Calls of the driver that cannot be emulated, so that a program learns which one it needs.
#include "entry_points.h"

using namespace deep_moe::cuda;

#define REFUSED(name, why)                                                          \
    DRIVER_CALL(name, ()) {                                                         \
        return guarded(#name, [](StandIn&) { throw Failure{not_supported, why}; }); \
    }

#define GRAPHS "the emulator has graphs that are captured from streams only"
REFUSED(cuStreamBeginCaptureToGraph, GRAPHS)
REFUSED(cuGraphCreate, GRAPHS)
REFUSED(cuGraphAddKernelNode_v2, GRAPHS)
REFUSED(cuGraphAddNode_v2, GRAPHS)

#define PROCESSES "the emulator does not share memory between processes"
REFUSED(cuIpcGetMemHandle, PROCESSES)
REFUSED(cuIpcOpenMemHandle_v2, PROCESSES)
REFUSED(cuIpcCloseMemHandle, PROCESSES)
REFUSED(cuIpcGetEventHandle, PROCESSES)
REFUSED(cuIpcOpenEventHandle, PROCESSES)
REFUSED(cuMemPoolExportToShareableHandle, PROCESSES)
REFUSED(cuMemPoolImportFromShareableHandle, PROCESSES)

#define PAGES "the emulator has no virtual memory management; cuMemAlloc serves"
REFUSED(cuMemAddressReserve, PAGES)
REFUSED(cuMemCreate, PAGES)
REFUSED(cuMemMap, PAGES)
REFUSED(cuMemGetAllocationGranularity, PAGES)
REFUSED(cuMulticastCreate, PAGES)

#define TEXTURES "the emulator has no textures, surfaces and CUDA arrays"
REFUSED(cuArrayCreate_v2, TEXTURES)
REFUSED(cuArray3DCreate_v2, TEXTURES)
REFUSED(cuMipmappedArrayCreate, TEXTURES)
REFUSED(cuTexObjectCreate, TEXTURES)
REFUSED(cuSurfObjectCreate, TEXTURES)
REFUSED(cuModuleGetTexRef, TEXTURES)
REFUSED(cuModuleGetSurfRef, TEXTURES)

REFUSED(cuTensorMapEncodeIm2colWide, "the emulator has no tensor maps of the mode im2col::w")
REFUSED(cuGreenCtxCreate, "the emulator has no green contexts")
REFUSED(cuStreamBatchMemOp_v2, "one cuStreamWaitValue or cuStreamWriteValue each serves")
