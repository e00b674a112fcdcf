// The driver's calls about modules, libraries, functions and launches.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "entry_points.h"

namespace deep_moe::cuda {

namespace {

// `extra` of a launch: pairs of what it is and the value.
void* const extra_end = nullptr;
void* const extra_pointer = reinterpret_cast<void*>(1);
void* const extra_size = reinterpret_cast<void*>(2);

std::vector<std::byte> pack(const Function& f, void** parameters, void** extra) {
    std::vector<std::byte> bytes(f.parameter_bytes);
    if (extra) {
        const void* block = nullptr;
        size_t size = 0;
        for (; *extra != extra_end; extra += 2) {
            if (*extra == extra_pointer) block = extra[1];
            if (*extra == extra_size) size = *static_cast<size_t*>(extra[1]);
        }
        // A block ends with its last parameter, which may leave padding out.
        if (!block || size > bytes.size() + 8)
            throw Failure{invalid_value, words("%zu bytes of arguments; %s takes %zu", size,
                                               f.name.c_str(), bytes.size())};
        std::memcpy(bytes.data(), block, std::min(size, bytes.size()));
        return bytes;
    }
    if (!f.parameters.empty() && !parameters)
        throw Failure{invalid_value, "no arguments for " + f.name};
    for (size_t i = 0; i < f.parameters.size(); ++i)
        std::memcpy(bytes.data() + f.parameters[i].offset, parameters[i], f.parameters[i].bytes);
    return bytes;
}

int registers_of(const Function& f) {
    if (f.resources.num_registers) return int(f.resources.num_registers);
    // ptxas takes no more than the launch bounds allow; small kernels take less.
    constexpr int usual = 32;
    const int most = registers_per_sm / std::max(1, f.most_threads()) / 8 * 8;
    return f.resources.max_threads || f.resources.required_threads[0] ? std::min(most, 168) : usual;
}

}  // namespace

int resident_ctas(const StandIn&, const Function& f, int threads, uint64_t shared_bytes) {
    if (threads <= 0 || threads > f.most_threads()) return 0;
    const uint64_t shared =
        (f.resources.static_shared_bytes + shared_bytes + reserved_shared_bytes + 127) / 128 * 128;
    if (f.resources.static_shared_bytes + shared_bytes > uint64_t(max_shared_bytes)) return 0;
    const int warps = (threads + warp_threads - 1) / warp_threads;
    const int by_threads = max_sm_threads / warp_threads / warps,
              by_shared = int(sm_shared_bytes / shared),
              by_registers = registers_per_sm / (registers_of(f) * warp_threads * warps);
    return std::max(by_shared ? 1 : 0,
                    std::min({by_threads, by_shared, std::max(by_registers, 1), max_sm_ctas}));
}

void enqueue_launch(StandIn& s, Function& f, Stream& stream, const Dim3& grid, const Dim3& block,
                    const Dim3& cluster, bool is_cooperative, uint64_t shared_bytes,
                    void** parameters, void** extra) {
    const uint64_t threads = uint64_t(block.x) * block.y * block.z;
    const std::string what = "launch of " + f.name + ": ";
    if (threads > uint64_t(max_block_threads) || !threads)
        throw Failure{invalid_value, what + words("%llu threads per block; at most %d",
                                                  (unsigned long long)threads, max_block_threads)};
    if (threads > uint64_t(f.most_threads()))
        throw Failure{launch_out_of_resources,
                      what + words("%llu threads per block; the kernel was compiled for at most %d",
                                   (unsigned long long)threads, f.most_threads())};
    if (shared_bytes > uint64_t(f.shared_limit()))
        throw Failure{invalid_value,
                      what + words("%llu bytes of dynamic shared memory, %d are allowed; "
                                   "MAX_DYNAMIC_SHARED_SIZE_BYTES (cudaFuncSetAttribute) raises "
                                   "that to %d",
                                   (unsigned long long)shared_bytes, f.shared_limit(),
                                   max_shared_bytes - int(f.resources.static_shared_bytes))};
    if (is_cooperative) {
        const uint64_t ctas = uint64_t(grid.x) * grid.y * grid.z,
                       most = uint64_t(resident_ctas(s, f, int(threads), shared_bytes)) *
                              uint64_t(s.num_sms());
        if (ctas > most)
            throw Failure{cooperative_launch_too_large,
                          what + words("%llu blocks of a cooperative launch; %llu fit the GPU",
                                       (unsigned long long)ctas, (unsigned long long)most)};
    }
    auto launch = std::make_unique<Launch>();
    launch->function = &f;
    const uint32_t sizes[3][3] = {
        {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, {cluster.x, cluster.y, cluster.z}};
    std::copy_n(sizes[0], 3, launch->grid);
    std::copy_n(sizes[1], 3, launch->block);
    std::copy_n(sizes[2], 3, launch->cluster);
    launch->shared_bytes = uint32_t(shared_bytes);
    launch->arguments = pack(f, parameters, extra);
    s.enqueue(stream, nullptr).launch = std::move(launch);
}

Dim3 cluster_of(const LaunchConfig& config) {
    Dim3 cluster{0, 0, 0};
    for (uint32_t i = 0; i < config.num_attributes; ++i)
        if (config.attributes[i].id == attribute_cluster) cluster = config.attributes[i].cluster;
    return cluster;
}

void enqueue_launch_with(StandIn& s, Function& f, const LaunchConfig& config, void** parameters,
                         void** extra) {
    bool is_cooperative = false;
    std::vector<Event*> recorded;
    for (uint32_t i = 0; i < config.num_attributes; ++i) {
        const LaunchAttribute& a = config.attributes[i];
        if (a.id == attribute_cooperative) is_cooperative = a.cooperative != 0;
        if (a.id == attribute_programmatic_event || a.id == attribute_launch_completion_event)
            recorded.push_back(a.event.event);
    }
    Stream& stream = s.stream(config.stream);
    const uint32_t *g = config.grid, *b = config.block;
    enqueue_launch(s, f, stream, {g[0], g[1], g[2]}, {b[0], b[1], b[2]}, cluster_of(config),
                   is_cooperative, config.shared_bytes, parameters, extra);
    // An event of the launch may come as late as its end.
    for (Event* handle : recorded)
        s.enqueue(stream, [] {}).completion = s.event(handle).recorded =
            std::make_shared<Completion>();
}

}  // namespace deep_moe::cuda

using namespace deep_moe::cuda;

namespace {

std::string content_of(const char* path) {
    const int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) throw Failure{file_not_found, std::string("cannot read ") + (path ? path : "")};
    std::string content;
    char part[65536];
    for (ssize_t count; (count = read(file, part, sizeof part)) > 0;)
        content.append(part, size_t(count));
    close(file);
    if (content.empty()) throw Failure{invalid_image, std::string(path) + " is empty"};
    return content;
}

}  // namespace

// ---- modules

DRIVER_CALL(cuModuleLoadData, (Library * *module, const void* image)) {
    return guarded("cuModuleLoadData", [&](StandIn& s) { out(module) = s.load(image, 0); });
}

DRIVER_CALL(cuModuleLoadDataEx, (Library * *module, const void* image, unsigned, int*, void**)) {
    return guarded("cuModuleLoadDataEx", [&](StandIn& s) { out(module) = s.load(image, 0); });
}

DRIVER_CALL(cuModuleLoadFatBinary, (Library * *module, const void* image)) {
    return guarded("cuModuleLoadFatBinary", [&](StandIn& s) { out(module) = s.load(image, 0); });
}

DRIVER_CALL(cuModuleLoad, (Library * *module, const char* path)) {
    return guarded("cuModuleLoad", [&](StandIn& s) {
        const std::string content = content_of(path);
        out(module) = s.load(content.data(), content.size());
    });
}

DRIVER_CALL(cuModuleUnload, (Library * module)) {
    return guarded("cuModuleUnload", [&](StandIn& s) { s.unload(module); });
}

DRIVER_CALL(cuModuleGetLoadingMode, (int* mode)) {
    if (!mode) return invalid_value;
    *mode = 2;  // lazy
    return success;
}

DRIVER_CALL(cuModuleGetFunction, (Function * *function, Library* module, const char* name)) {
    return guarded("cuModuleGetFunction", [&](StandIn& s) {
        if (!name) throw Failure{invalid_value, ""};
        Function* found = s.find_function(s.library(module), name);
        if (!found) throw Failure{not_found, ""};
        out(function) = found;
    });
}

DRIVER_CALL(cuModuleGetFunctionCount, (unsigned* count, Library* module)) {
    return guarded("cuModuleGetFunctionCount", [&](StandIn& s) {
        out(count) = unsigned(s.library(module).image->functions.size());
    });
}

DRIVER_CALL(cuModuleEnumerateFunctions, (Function * *functions, unsigned count, Library* module)) {
    return guarded("cuModuleEnumerateFunctions", [&](StandIn& s) {
        unsigned i = 0;
        for (const auto& [name, function] : s.library(module).image->functions)
            if (i < count) functions[i++] = function.get();
    });
}

DRIVER_CALL(cuModuleGetGlobal_v2,
            (DevicePointer * address, size_t* bytes, Library* module, const char* name)) {
    return guarded("cuModuleGetGlobal", [&](StandIn& s) {
        uint64_t at, size;
        if (!name) throw Failure{invalid_value, ""};
        if (!s.find_variable(s.library(module), s.current_context().device, name, at, size))
            throw Failure{not_found, ""};
        if (address) *address = at;
        if (bytes) *bytes = size;
    });
}

// ---- linking: one PTX is its own program

namespace {

struct Link {
    std::string ptx;
    int count = 0;
};

}  // namespace

DRIVER_CALL(cuLinkCreate_v2, (unsigned, int*, void**, void** state)) {
    return guarded("cuLinkCreate", [&](StandIn&) { out(state) = new Link; });
}

// type: 1 is PTX
DRIVER_CALL(cuLinkAddData_v2,
            (void* state, int type, void* data, size_t size, const char*, unsigned, int*, void**)) {
    return guarded("cuLinkAddData", [&](StandIn&) {
        auto& link = *static_cast<Link*>(state);
        if (type != 1 || link.count++)
            throw Failure{not_supported,
                          "only one PTX can be linked: compile the program whole (without -rdc)"};
        link.ptx.assign(static_cast<const char*>(data), size);
    });
}

DRIVER_CALL(cuLinkAddFile_v2, (void* state, int type, const char* path, unsigned, int*, void**)) {
    return guarded("cuLinkAddFile", [&](StandIn&) {
        auto& link = *static_cast<Link*>(state);
        if (type != 1 || link.count++)
            throw Failure{not_supported,
                          "only one PTX can be linked: compile the program whole (without -rdc)"};
        link.ptx = content_of(path);
    });
}

DRIVER_CALL(cuLinkComplete, (void* state, void** image, size_t* size)) {
    return guarded("cuLinkComplete", [&](StandIn&) {
        auto& link = *static_cast<Link*>(state);
        out(image) = link.ptx.data();
        if (size) *size = link.ptx.size() + 1;
    });
}

DRIVER_CALL(cuLinkDestroy, (void* state)) {
    delete static_cast<Link*>(state);
    return success;
}

// ---- libraries

DRIVER_CALL(cuLibraryLoadData, (Library * *library, const void* image, int*, void**, unsigned, int*,
                                void**, unsigned)) {
    return guarded("cuLibraryLoadData", [&](StandIn& s) { out(library) = s.load(image, 0); });
}

DRIVER_CALL(cuLibraryLoadFromFile, (Library * *library, const char* path, int*, void**, unsigned,
                                    int*, void**, unsigned)) {
    return cuModuleLoad(library, path);
}

DRIVER_CALL(cuLibraryUnload, (Library * library)) {
    return guarded("cuLibraryUnload", [&](StandIn& s) { s.unload(library); });
}

DRIVER_CALL(cuLibraryGetKernel, (Function * *kernel, Library* library, const char* name)) {
    return cuModuleGetFunction(kernel, library, name);
}

DRIVER_CALL(cuLibraryGetKernelCount, (unsigned* count, Library* library)) {
    return cuModuleGetFunctionCount(count, library);
}

DRIVER_CALL(cuLibraryEnumerateKernels, (Function * *kernels, unsigned count, Library* library)) {
    return cuModuleEnumerateFunctions(kernels, count, library);
}

DRIVER_CALL(cuLibraryGetModule, (Library * *module, Library* library)) {
    return guarded("cuLibraryGetModule", [&](StandIn& s) { out(module) = &s.library(library); });
}

DRIVER_CALL(cuLibraryGetGlobal,
            (DevicePointer * address, size_t* bytes, Library* library, const char* name)) {
    return cuModuleGetGlobal_v2(address, bytes, library, name);
}

DRIVER_CALL(cuLibraryGetManaged,
            (DevicePointer * address, size_t* bytes, Library* library, const char* name)) {
    return cuModuleGetGlobal_v2(address, bytes, library, name);
}

DRIVER_CALL(cuKernelGetFunction, (Function * *function, Function* kernel)) {
    return guarded("cuKernelGetFunction", [&](StandIn& s) { out(function) = &s.function(kernel); });
}

DRIVER_CALL(cuKernelGetLibrary, (Library * *library, Function* kernel)) {
    return guarded("cuKernelGetLibrary",
                   [&](StandIn& s) { out(library) = s.function(kernel).library; });
}

DRIVER_CALL(cuFuncGetModule, (Library * *module, Function* function)) {
    return cuKernelGetLibrary(module, function);
}

// ---- functions

DRIVER_CALL(cuFuncGetName, (const char** name, Function* function)) {
    return guarded("cuFuncGetName",
                   [&](StandIn& s) { out(name) = s.function(function).name.c_str(); });
}

DRIVER_CALL(cuKernelGetName, (const char** name, Function* kernel)) {
    return cuFuncGetName(name, kernel);
}

DRIVER_CALL(cuFuncGetParamInfo, (Function * function, size_t index, size_t* offset, size_t* size)) {
    return guarded("cuFuncGetParamInfo", [&](StandIn& s) {
        const auto& parameters = s.function(function).parameters;
        if (index >= parameters.size()) throw Failure{invalid_value, ""};
        out(offset) = parameters[index].offset;
        if (size) *size = parameters[index].bytes;
    });
}

DRIVER_CALL(cuKernelGetParamInfo, (Function * kernel, size_t index, size_t* offset, size_t* size)) {
    return cuFuncGetParamInfo(kernel, index, offset, size);
}

DRIVER_CALL(cuFuncGetAttribute, (int* value, int attribute, Function* function)) {
    return guarded("cuFuncGetAttribute", [&](StandIn& s) {
        const Function& f = s.function(function);
        auto set = f.attributes.find(attribute);
        switch (attribute) {
            case 0:
                out(value) = f.most_threads();
                break;
            case 1:
                out(value) = int(f.resources.static_shared_bytes);
                break;
            case 2:
                out(value) = 0;
                break;  // constant memory
            case 3:
                out(value) = int(f.resources.local_bytes);
                break;
            case 4:
                out(value) = registers_of(f);
                break;
            case 5:
            case 6:
                out(value) = s.chip().major * 10 + s.chip().minor;
                break;
            case 7:
                out(value) = 0;
                break;
            case 8:
                out(value) = f.shared_limit();
                break;
            case 9:
                out(value) = set == f.attributes.end() ? -1 : set->second;
                break;
            case 11:
            case 12:
            case 13: {
                const uint32_t compiled = f.cluster[attribute - 11];
                out(value) = compiled ? int(compiled) : set == f.attributes.end() ? 0 : set->second;
                break;
            }
            case 10:
            case 14:
            case 15:
                out(value) = set == f.attributes.end() ? 0 : set->second;
                break;
            default:
                throw Failure{invalid_value, ""};
        }
    });
}

DRIVER_CALL(cuFuncSetAttribute, (Function * function, int attribute, int value)) {
    return guarded("cuFuncSetAttribute", [&](StandIn& s) {
        Function& f = s.function(function);
        // Of 8 (dynamic shared memory) to 15 (how clusters are placed) 10 can be read only.
        // Programs try newer ones and go on without.
        if (attribute < 8 || attribute > 15 || attribute == 10) throw Failure{invalid_value, ""};
        if (attribute == 8 &&
            (value < 0 || value + int(f.resources.static_shared_bytes) > max_shared_bytes))
            throw Failure{
                invalid_value,
                words("%d bytes of dynamic shared memory for %s; at most %d", value, f.name.c_str(),
                      max_shared_bytes - int(f.resources.static_shared_bytes))};
        f.attributes[attribute] = value;
    });
}

DRIVER_CALL(cuKernelGetAttribute, (int* value, int attribute, Function* kernel, Device)) {
    return cuFuncGetAttribute(value, attribute, kernel);
}

DRIVER_CALL(cuKernelSetAttribute, (int attribute, int value, Function* kernel, Device)) {
    return cuFuncSetAttribute(kernel, attribute, value);
}

DRIVER_CALL(cuFuncSetCacheConfig, (Function*, int)) {
    return success;
}

DRIVER_CALL(cuKernelSetCacheConfig, (Function*, int, Device)) {
    return success;
}

DRIVER_CALL(cuFuncSetSharedMemConfig, (Function*, int)) {
    return success;
}

DRIVER_CALL(cuFuncIsLoaded, (int* state, Function*)) {
    if (!state) return invalid_value;
    *state = 1;
    return success;
}

DRIVER_CALL(cuFuncLoad, (Function*)) {
    return success;
}

// ---- launches

DRIVER_CALL(cuLaunchKernel,
            (Function * function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
             unsigned bz, unsigned shared_bytes, Stream* stream, void** parameters, void** extra)) {
    return guarded("cuLaunchKernel", [&](StandIn& s) {
        enqueue_launch(s, s.function(function), s.stream(stream), {gx, gy, gz}, {bx, by, bz},
                       {0, 0, 0}, false, shared_bytes, parameters, extra);
    });
}

DRIVER_CALL(cuLaunchCooperativeKernel,
            (Function * function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
             unsigned bz, unsigned shared_bytes, Stream* stream, void** parameters)) {
    return guarded("cuLaunchCooperativeKernel", [&](StandIn& s) {
        enqueue_launch(s, s.function(function), s.stream(stream), {gx, gy, gz}, {bx, by, bz},
                       {0, 0, 0}, true, shared_bytes, parameters, nullptr);
    });
}

DRIVER_CALL(cuLaunchKernelEx,
            (const LaunchConfig* config, Function* function, void** parameters, void** extra)) {
    return guarded("cuLaunchKernelEx", [&](StandIn& s) {
        enqueue_launch_with(s, s.function(function), out(config), parameters, extra);
    });
}

// ---- occupancy

DRIVER_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor,
            (int* count, Function* function, int threads, size_t shared_bytes)) {
    return guarded("cuOccupancyMaxActiveBlocksPerMultiprocessor", [&](StandIn& s) {
        out(count) = resident_ctas(s, s.function(function), threads, shared_bytes);
    });
}

DRIVER_CALL(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
            (int* count, Function* function, int threads, size_t shared_bytes, unsigned)) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(count, function, threads, shared_bytes);
}

DRIVER_CALL(cuOccupancyMaxPotentialBlockSize,
            (int* grid, int* block, Function* function, size_t (*shared_of)(int),
             size_t shared_bytes, int limit)) {
    return guarded("cuOccupancyMaxPotentialBlockSize", [&](StandIn& s) {
        const Function& f = s.function(function);
        int most = std::min(f.most_threads(), limit > 0 ? limit : max_block_threads);
        int best = 0;
        for (int threads = most / warp_threads * warp_threads; threads > 0;
             threads -= warp_threads) {
            const size_t shared = shared_of ? shared_of(threads) : shared_bytes;
            const int resident = resident_ctas(s, f, threads, shared);
            if (resident * threads <= best) continue;
            best = resident * threads;
            out(block) = threads;
            out(grid) = resident * s.num_sms();
        }
        if (!best) throw Failure{invalid_value, ""};
    });
}

DRIVER_CALL(cuOccupancyMaxPotentialBlockSizeWithFlags,
            (int* grid, int* block, Function* function, size_t (*shared_of)(int),
             size_t shared_bytes, int limit, unsigned)) {
    return cuOccupancyMaxPotentialBlockSize(grid, block, function, shared_of, shared_bytes, limit);
}

DRIVER_CALL(cuOccupancyAvailableDynamicSMemPerBlock,
            (size_t* bytes, Function* function, int num_blocks, int)) {
    return guarded("cuOccupancyAvailableDynamicSMemPerBlock", [&](StandIn& s) {
        const Function& f = s.function(function);
        if (num_blocks < 1) throw Failure{invalid_value, ""};
        const int each = std::min(sm_shared_bytes / num_blocks / 128 * 128 - reserved_shared_bytes,
                                  max_shared_bytes) -
                         int(f.resources.static_shared_bytes);
        out(bytes) = size_t(std::max(0, each));
    });
}

DRIVER_CALL(cuOccupancyMaxPotentialClusterSize,
            (int* size, Function* function, const LaunchConfig*)) {
    return guarded("cuOccupancyMaxPotentialClusterSize", [&](StandIn& s) {
        const Function& f = s.function(function);
        auto set = f.attributes.find(14);
        out(size) = set != f.attributes.end() && set->second ? 16 : 8;
    });
}

DRIVER_CALL(cuOccupancyMaxActiveClusters,
            (int* count, Function* function, const LaunchConfig* config)) {
    return guarded("cuOccupancyMaxActiveClusters", [&](StandIn& s) {
        const Function& f = s.function(function);
        const uint32_t* b = out(config).block;
        Dim3 cluster = cluster_of(*config);
        if (!cluster.x) cluster = {f.cluster[0], f.cluster[1], f.cluster[2]};
        const int ctas = std::max(1, int(cluster.x * cluster.y * cluster.z));
        out(count) =
            resident_ctas(s, f, int(b[0] * b[1] * b[2]), config->shared_bytes) * s.num_sms() / ctas;
    });
}
