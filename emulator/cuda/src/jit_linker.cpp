#include "jit_linker.h"

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "entry_points.h"

namespace deep_moe::cuda {
namespace {

// Of nvJitLinkResult and nvJitLinkInputType.
constexpr int linked = 0, invalid_input = 3, unrecognized_input = 8;
constexpr int input_ptx = 2, input_any = 10;
constexpr const char* one_ptx =
    "the emulator links one PTX: compile the program whole, to PTX (no -dlto, no -rdc)";

struct Linker {
    std::string ptx, error;
    int count = 0;
};

int refuse(Linker& linker, const char* call) {
    linker.error = one_ptx;
    return guarded(call, [](StandIn&) { throw Failure{not_supported, one_ptx}; })
               ? unrecognized_input
               : linked;
}

int add(Linker& linker, const char* call, int type, std::string data) {
    const bool is_ptx =
        type == input_ptx || (type == input_any && data.find(".version") != std::string::npos);
    if (!is_ptx || linker.count++) return refuse(linker, call);
    while (!data.empty() && !data.back()) data.pop_back();
    linker.ptx = std::move(data);
    return linked;
}

int create(Linker** linker, uint32_t, const char* const*) {
    if (!linker) return invalid_input;
    *linker = new Linker;
    return linked;
}
int destroy(Linker** linker) {
    if (!linker) return invalid_input;
    delete *linker;
    *linker = nullptr;
    return linked;
}
int add_data(Linker* linker, int type, const void* data, size_t size, const char*) {
    if (!linker || !data) return invalid_input;
    return add(*linker, "nvJitLinkAddData", type, {static_cast<const char*>(data), size});
}
int add_file(Linker* linker, int type, const char* path) {
    if (!linker || !path) return invalid_input;
    // Streams of C++ would need a newer glibc.
    const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path, "rb"), &std::fclose);
    if (!file) return invalid_input;
    std::string data;
    char part[1 << 14];
    while (const size_t size = std::fread(part, 1, sizeof part, file.get()))
        data.append(part, size);
    if (std::ferror(file.get())) return invalid_input;
    return add(*linker, "nvJitLinkAddFile", type, std::move(data));
}
int complete(Linker* linker) {
    return linker && linker->count == 1 ? linked : invalid_input;
}

// A text of a linker's, with the byte behind it.
template <std::string Linker::* text>
int get_size(Linker* linker, size_t* size) {
    if (!linker || !size) return invalid_input;
    *size = (linker->*text).size() + 1;
    return linked;
}
template <std::string Linker::* text>
int get(Linker* linker, char* to) {
    if (!linker || !to) return invalid_input;
    std::memcpy(to, (linker->*text).c_str(), (linker->*text).size() + 1);
    return linked;
}

struct Entry {
    std::string_view name;
    void* function;
};

}  // namespace

void* jit_linker_function(std::string_view name) {
    static const Entry entries[] = {
        {"Create", reinterpret_cast<void*>(&create)},
        {"Destroy", reinterpret_cast<void*>(&destroy)},
        {"AddData", reinterpret_cast<void*>(&add_data)},
        {"AddFile", reinterpret_cast<void*>(&add_file)},
        {"Complete", reinterpret_cast<void*>(&complete)},
        {"GetLinkedCubinSize", reinterpret_cast<void*>(&get_size<&Linker::ptx>)},
        {"GetLinkedCubin", reinterpret_cast<void*>(&get<&Linker::ptx>)},
        {"GetLinkedPtxSize", reinterpret_cast<void*>(&get_size<&Linker::ptx>)},
        {"GetLinkedPtx", reinterpret_cast<void*>(&get<&Linker::ptx>)},
        {"GetErrorLogSize", reinterpret_cast<void*>(&get_size<&Linker::error>)},
        {"GetErrorLog", reinterpret_cast<void*>(&get<&Linker::error>)},
        {"GetInfoLogSize", reinterpret_cast<void*>(&get_size<&Linker::error>)},
        {"GetInfoLog", reinterpret_cast<void*>(&get<&Linker::error>)},
    };
    constexpr std::string_view prefix = "nvJitLink";
    const size_t at = name.find(prefix);
    if (at == std::string_view::npos) return nullptr;
    name = name.substr(at + prefix.size());
    name = name.substr(0, name.find('_'));
    for (const Entry& entry : entries)
        if (entry.name == name) return entry.function;
    return nullptr;
}

}  // namespace deep_moe::cuda
