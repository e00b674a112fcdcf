// What the calls of the runtime share.
#pragma once

#include "entry_points.h"

#define RUNTIME_CALL(name, parameters) CALL_OF(int, name, parameters)

namespace deep_moe::cuda::runtime {

// Starts the stand-in and gives the thread a context, as every call of the runtime does.
void enter();
int finish(int result);    // keeps it for cudaGetLastError
void require(int result);  // throws what a driver's call returned, unless it went well
int last_error(bool forgets);
Device current_device();

// The kernel behind a host function's address, or behind a kernel's handle. Throws Failure.
Function& kernel_of(StandIn& s, const void* host);
// The address of the device variable behind a host variable's. Throws Failure.
uint64_t variable_of(StandIn& s, const void* host, size_t* bytes = nullptr);

template <class F>
int call(const char* name, F f) {
    enter();
    return finish(guarded(name, f));
}

}  // namespace deep_moe::cuda::runtime
