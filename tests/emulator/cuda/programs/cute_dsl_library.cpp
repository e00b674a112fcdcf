// Stands for CuTe DSL's runtime library: NVIDIA's functions without symbols, and exported ones that
// jump there. Its own only fail.
extern "C" {

__attribute__((visibility("hidden"), noipa, used)) int inner_cudaGetDeviceCount(int* count) {
    *count = -1;
    return 999;
}

__attribute__((visibility("hidden"), noipa, used)) int inner_cudaOfTomorrow(int* count) {
    *count = -2;
    return 999;
}

asm(R"(
    .globl _cudaGetDeviceCount, _cudaOfTomorrow
    .type _cudaGetDeviceCount, @function
    .type _cudaOfTomorrow, @function
_cudaGetDeviceCount:
    .byte 0xe9
    .long inner_cudaGetDeviceCount - . - 4
    .p2align 5
_cudaOfTomorrow:
    .byte 0xe9
    .long inner_cudaOfTomorrow - . - 4
    .p2align 5
)");

__attribute__((visibility("default"))) int _cuDriverGetVersion(int* version) {
    *version = -3;
    return 999;
}

// Not by the exported one.
__attribute__((visibility("default"))) int devices_by_the_inner_one() {
    int count = 0;
    return inner_cudaGetDeviceCount(&count) ? -1 : count;
}
}
