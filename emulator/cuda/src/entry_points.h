// Every function that programs may call is defined by one of these, so that it can be found by
// name. They are registered before other constructors run, which look for them.
#pragma once

#include "stand_in.h"

namespace deep_moe::cuda {

struct Registration {
    Registration(const char* name, void* address);
};

// What a call writes its result to.
template <class T>
T& out(T* pointer) {
    if (!pointer) throw Failure{invalid_value, ""};
    return *pointer;
}

inline uint64_t address_of(const void* pointer) {
    return reinterpret_cast<uint64_t>(pointer);
}

}  // namespace deep_moe::cuda

#define CALL_OF(result, name, parameters)                                               \
    EXPORT result name parameters;                                                      \
    __attribute__((init_priority(1000))) static const Registration name##_registration{ \
        #name, reinterpret_cast<void*>(&name)};                                         \
    EXPORT result name parameters

#define DRIVER_CALL(name, parameters) CALL_OF(int, name, parameters)
