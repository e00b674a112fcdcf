// Functions by their names: cuGetProcAddress, and what the runtime and `dlsym` ask for.
#include "entry_points.h"

#include <link.h>

#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>

namespace deep_moe::cuda {

namespace {

std::unordered_map<std::string_view, void*>& functions() {
    static auto* all = new std::unordered_map<std::string_view, void*>;
    return *all;
}

// From which version of CUDA on a name stands for its second, third or fourth form, where the forms
// take different arguments. All other names stand for their newest form.
struct Form {
    const char* name;
    int version;
    const char* form;
};
constexpr Form forms[] = {
    {"cuCtxCreate", 12050, "cuCtxCreate_v4"},
    {"cuCtxCreate", 11040, "cuCtxCreate_v3"},
    {"cuCtxCreate", 0, "cuCtxCreate_v2"},
    {"cuCtxGetDevice", 13000, "cuCtxGetDevice_v2"},
    {"cuCtxGetDevice", 0, "cuCtxGetDevice"},
    {"cuCtxSynchronize", 13000, "cuCtxSynchronize_v2"},
    {"cuCtxSynchronize", 0, "cuCtxSynchronize"},
    {"cuGraphInstantiate", 0, "cuGraphInstantiateWithFlags"},
    {"cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"},
    {"cuStreamGetCaptureInfo", 11030, "cuStreamGetCaptureInfo_v2"},
    {"cuStreamGetCaptureInfo", 0, "cuStreamGetCaptureInfo"},
    {"cuMemAdvise", 12020, "cuMemAdvise_v2"},
    {"cuMemAdvise", 0, "cuMemAdvise"},
    {"cuMemPrefetchAsync", 12020, "cuMemPrefetchAsync_v2"},
    {"cuMemPrefetchAsync", 0, "cuMemPrefetchAsync"},
    {"cuMemcpyBatchAsync", 13000, "cuMemcpyBatchAsync_v2"},
    {"cuMemcpyBatchAsync", 0, "cuMemcpyBatchAsync"},
    {"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
    {"cuGetProcAddress", 0, "cuGetProcAddress"},
    {"cuStreamGetCtx", 12050, "cuStreamGetCtx_v2"},
    {"cuStreamGetCtx", 0, "cuStreamGetCtx"},
};

// The file of the code at an address.
std::string object_at(void* address) {
    struct Search {
        uintptr_t address;
        std::string name;
    } search{reinterpret_cast<uintptr_t>(address), ""};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            auto& s = *static_cast<Search*>(data);
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const auto& p = info->dlpi_phdr[i];
                if (p.p_type == PT_LOAD && s.address - (info->dlpi_addr + p.p_vaddr) < p.p_memsz)
                    s.name = *info->dlpi_name ? info->dlpi_name : "the program";
            }
            return s.name.empty() ? 0 : 1;
        },
        &search);
    return search.name;
}

}  // namespace

Registration::Registration(const char* name, void* address) {
    functions().emplace(name, address);
}

void* exported_function(const char* name) {
    std::string_view text = name;
    for (const std::string_view suffix : {"_ptsz", "_ptds"})
        if (text.size() > suffix.size() && text.substr(text.size() - suffix.size()) == suffix)
            text.remove_suffix(suffix.size());
    auto found = functions().find(text);
    return found == functions().end() ? nullptr : found->second;
}

void* driver_function(const char* name, int version) {
    if (std::strncmp(name, "cu", 2) != 0 || std::strncmp(name, "cuda", 4) == 0) return nullptr;
    for (const Form& f : forms)
        if (!std::strcmp(f.name, name) && version >= f.version) return exported_function(f.form);
    const std::string text = name;
    for (const char* suffix : {"_v4", "_v3", "_v2", ""})
        if (void* found = exported_function((text + suffix).c_str())) return found;
    return nullptr;
}

}  // namespace deep_moe::cuda

using namespace deep_moe::cuda;

// status: 0 found, 1 no such name, 2 needs a newer driver
DRIVER_CALL(cuGetProcAddress_v2,
            (const char* name, void** function, int version, uint64_t, int* status)) {
    if (!name || !function) return invalid_value;
    *function = driver_function(name, version);
    if (status) *status = *function ? 0 : 1;
    // Without a status, a missing name is an error of the call.
    return *function || status ? success : not_found;
}

DRIVER_CALL(cuGetProcAddress, (const char* name, void** function, int version, uint64_t flags)) {
    return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

// Tables that NVIDIA's own libraries share with its driver, and nobody else knows. Its runtime
// cannot do without the one with this name.
DRIVER_CALL(cuGetExportTable, (const void** table, const Uuid* name)) {
    {
        std::lock_guard lock(the_lock);
        look_at_new_libraries();
    }
    constexpr unsigned char of_runtime[4] = {0x6b, 0xd5, 0xfb, 0x6c};
    static bool was_told = false;
    if (name && !std::memcmp(name->bytes, of_runtime, sizeof of_runtime) && !was_told) {
        was_told = true;
        start();
        stand_in().report_call(
            "cuGetExportTable",
            {not_supported,
             object_at(__builtin_return_address(0)) +
                 " holds NVIDIA's CUDA runtime, which works with no other driver than NVIDIA's. "
                 "The "
                 "emulator's own runtime takes its place where the program links it dynamically "
                 "(nvcc -cudart shared), or statically and is not stripped"});
    }
    if (table) *table = nullptr;
    return not_found;
}
