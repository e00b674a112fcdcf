// A library with nvJitLink's functions, none of which works.
// They are as far apart as in NVIDIA's.
#define FUNCTION(name)                                   \
    extern "C" __attribute__((aligned(32))) int name() { \
        asm volatile(".fill 4, 4, 0");                   \
        return 77;                                       \
    }

FUNCTION(__nvJitLinkCreate_13_0)
FUNCTION(nvJitLinkDestroy)
FUNCTION(nvJitLinkAddData)
FUNCTION(nvJitLinkAddFile)
FUNCTION(nvJitLinkComplete)
FUNCTION(nvJitLinkGetLinkedCubin)
FUNCTION(nvJitLinkGetLinkedCubinSize)
FUNCTION(nvJitLinkGetErrorLog)
FUNCTION(nvJitLinkGetErrorLogSize)
