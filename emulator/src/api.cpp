// The C ABI that emulator/library.py loads. Every call that can fail returns a FaultKind (0: fine);
// the text of the last failure of a machine is `dm_error`.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine.h"
#include "instruction_table.h"
#include "memory_limit.h"

using namespace deep_moe::emulator;

namespace {

struct Handle {
    Engine machine;
    std::vector<std::unique_ptr<Module>> modules;
    std::string error, error_finding;
    std::string text;  // what dm_kernels or dm_finding returned last
    uint64_t max_memory = UINT64_MAX;
    std::vector<std::byte> reserve;  // of memory, for the report that there is no more
};

constexpr size_t reserve_bytes = 1 << 20;

int report_no_memory(Handle* h, const std::string& doing) {
    limit_memory(UINT64_MAX);
    std::vector<std::byte>().swap(h->reserve);
    h->error =
        doing + ": no more memory: " + memory_text(h->max_memory) + h->machine.describe_running();
    h->error_finding = Finding{FaultKind::memory, h->error, "", 0, {}}.json();
    return int(FaultKind::memory);
}

template <class F>
int guarded(Handle* h, const char* doing, F f) {
    struct Limit {
        explicit Limit(uint64_t bytes) { limit_memory(bytes); }
        ~Limit() { limit_memory(UINT64_MAX); }
    } limit(h->max_memory);
    try {
        if (h->reserve.empty()) h->reserve.resize(reserve_bytes);
        f();
        return 0;
    } catch (const std::bad_alloc&) {
        return report_no_memory(h, doing);
    } catch (const Fault& fault) {
        h->error = fault.what();
        Finding finding;
        finding.kind = fault.kind;
        finding.text = fault.what();
        h->error_finding = (fault.finding ? *fault.finding : finding).json();
        return int(fault.kind);
    } catch (const std::exception& e) {
        h->error = e.what();
        h->error_finding = Finding{FaultKind::internal, e.what(), "", 0, {}}.json();
        return int(FaultKind::internal);
    }
}

// Whether the process has these pages.
bool is_mapped(uint64_t address, uint64_t bytes) {
    const auto page = uint64_t(sysconf(_SC_PAGESIZE)), first = address / page * page;
    if (!bytes || address + bytes < address) return bytes == 0;
    constexpr uint64_t pages_at_once = 1 << 16;
    static thread_local std::vector<unsigned char> residence(pages_at_once);
    for (uint64_t at = first; at < address + bytes; at += pages_at_once * page) {
        const uint64_t part = std::min(address + bytes - at, pages_at_once * page);
        if (mincore(reinterpret_cast<void*>(at), part, residence.data()) != 0) return false;
    }
    return true;
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT Handle* dm_create(uint64_t seed, int checks, int real_clock) {
    auto* h = new Handle;
    h->machine.seed = seed;
    h->machine.checks = checks != 0;
    h->machine.real_clock = real_clock != 0;
    return h;
}

EXPORT void dm_destroy(Handle* h) {
    delete h;
}

EXPORT const char* dm_error(Handle* h) {
    return h->error.c_str();
}

// The same as JSON, as `Finding::json` makes it.
EXPORT const char* dm_error_finding(Handle* h) {
    return h->error_finding.c_str();
}

// chip: lines of "name value", see chip_parameters.h.
EXPORT int dm_set_clock(Handle* h, const char* chip, int keeps_waits) {
    return guarded(h, "set_clock", [&] {
        h->machine.set_clock(parse_chip(chip));
        h->machine.clock->keeps_waits = keeps_waits != 0;
    });
}

EXPORT void dm_leave_out_products(Handle* h, int on) {
    h->machine.leaves_out_products = on != 0;
}

// The names of a chip's parameters, one in each line.
EXPORT const char* dm_chip_parameters() {
    static const std::string text = [] {
        std::string all;
        for (const ChipParameter& p : chip_parameters()) all += std::string(p.name) + "\n";
        return all;
    }();
    return text.c_str();
}

// The launches of the last run as JSON; times in picoseconds from its beginning.
EXPORT const char* dm_launch_times(Handle* h) {
    h->text = h->machine.clock ? h->machine.clock->launches_as_json() : "[]";
    return h->text.c_str();
}

// What each GPU's units were busy with in the last run, as JSON: what %globaltimer said when it
// began, and for each unit a step in picoseconds and its shares, 0 to 1.
EXPORT const char* dm_usage(Handle* h) {
    h->text = "[]";
    if (const auto& clock = h->machine.clock)
        h->text = clock->usage_as_json(h->machine.virtual_ns - uint64_t(clock->last) / 1000);
    return h->text.c_str();
}

// What this thread did to memory before is seen by other processes before what it does afterwards.
EXPORT void dm_fence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

// Waits of the last run: six numbers each, see WarpWait.
EXPORT uint64_t dm_num_waits(Handle* h) {
    return h->machine.clock ? h->machine.clock->waits.size() : 0;
}

EXPORT void dm_waits(Handle* h, int64_t* out) {
    for (const WarpWait& wait : h->machine.clock->waits) {
        for (int64_t value : {int64_t(wait.grid), int64_t(wait.cta), int64_t(wait.warp),
                              int64_t(wait.kind), wait.start, wait.end})
            *out++ = value;
    }
}

// Whose memory a region is, for a clock that tells near from far.
EXPORT void dm_set_home(Handle* h, uint32_t rank, uint64_t address, int home) {
    h->machine.rank(rank).memory.set_home(address, home);
}

// Of a rank's region of a peer's memory, see Mirror; three numbers for each array by source rank.
EXPORT int dm_mirror_memory(Handle* h, uint32_t rank, uint64_t address, uint64_t onto,
                            uint64_t num_ranks, uint64_t shift, const uint64_t* arrays,
                            uint32_t num_arrays) {
    return guarded(h, "mirror_memory", [&] {
        Mirror mirror{onto, num_ranks, shift, {}};
        for (uint32_t i = 0; i < num_arrays; ++i, arrays += 3)
            mirror.arrays.push_back({arrays[0], arrays[1], arrays[2]});
        h->machine.rank(rank).memory.set_mirror(address, std::move(mirror));
    });
}

// Addresses of a rank that stand for those of several regions at once.
EXPORT int dm_add_multicast(Handle* h, uint32_t rank, uint64_t address, uint64_t bytes,
                            const char* name, const uint64_t* members, uint32_t num_members) {
    return guarded(h, "add_multicast", [&] {
        h->machine.rank(rank).memory.add_multicast(
            {address, bytes, name, {members, members + num_members}});
    });
}

EXPORT void dm_set_memory_limit(Handle* h, uint64_t bytes) {
    h->max_memory = bytes;
}

EXPORT void dm_set_residency(Handle* h, uint32_t ctas) {
    h->machine.max_resident_ctas = ctas;
}

EXPORT void dm_set_hopper_fp8_sums(Handle* h, int on) {
    h->machine.hopper_fp8_sums = on != 0;
}

EXPORT void dm_set_strict_tcgen05(Handle* h, int on) {
    h->machine.strict_tcgen05 = on != 0;
}

EXPORT void dm_set_schedule(Handle* h, int schedule) {
    h->machine.schedule = Schedule(schedule);
}

EXPORT void dm_set_collects_findings(Handle* h, int on) {
    h->machine.collects_findings = on != 0;
}

EXPORT uint32_t dm_num_findings(Handle* h) {
    return uint32_t(h->machine.findings.all().size());
}

EXPORT const char* dm_finding(Handle* h, uint32_t index) {
    h->text = h->machine.findings.all().at(index).json();
    return h->text.c_str();
}

EXPORT int dm_add_memory(Handle* h, uint32_t rank, uint64_t address, uint64_t bytes,
                         const char* name, int writable) {
    return guarded(h, "add_memory", [&] {
        if (!is_mapped(address, bytes))
            throw Fault(FaultKind::launch,
                        format("memory region '%s': this process has no memory of %llu bytes at "
                               "0x%llx",
                               name, (unsigned long long)bytes, (unsigned long long)address));
        h->machine.rank(rank).memory.add(address, bytes, name, writable != 0);
    });
}

// Names an array inside the region that starts at `address`.
EXPORT int dm_name_memory(Handle* h, uint32_t rank, uint64_t address, const char* name,
                          uint64_t offset, uint64_t element_bytes, const uint64_t* shape,
                          uint32_t num_dimensions) {
    return guarded(h, "add_memory", [&] {
        h->machine.rank(rank).memory.name(
            address, {name, offset, element_bytes, {shape, shape + num_dimensions}});
    });
}

EXPORT int dm_remove_memory(Handle* h, uint32_t rank, uint64_t address) {
    return guarded(h, "remove_memory", [&] { h->machine.rank(rank).memory.remove(address); });
}

EXPORT int dm_load(Handle* h, const char* ptx, uint64_t bytes, const char* name, uint32_t* module) {
    return guarded(h, "load", [&] {
        h->modules.push_back(load_module({ptx, bytes}, name));
        *module = uint32_t(h->modules.size() - 1);
    });
}

// What a kernel's machine code has for lines of its PTX; six numbers a line, see LineCost.
EXPORT int dm_set_line_costs(Handle* h, uint32_t module, const char* kernel, uint64_t num_lines,
                             const uint32_t* lines, const double* numbers) {
    return guarded(h, "set_line_costs", [&] {
        std::map<int, LineCost> costs;
        for (uint64_t i = 0; i < num_lines; ++i) {
            const double* n = numbers + 6 * i;
            costs[int(lines[i])] = {n[0], n[1], n[2], n[3], n[4], n[5] != 0};
        }
        set_line_costs(*h->modules.at(module)->programs.at(kernel), costs);
    });
}

EXPORT void dm_unload(Handle* h, uint32_t module) {
    if (!h->modules.at(module)) return;
    h->machine.forget_module(*h->modules[module]);
    h->modules[module].reset();
}

// What `dm_launch` needs to know about a kernel: bytes of all arguments, number of arguments,
// declared cluster size.
EXPORT int dm_kernel(Handle* h, uint32_t module, const char* kernel, uint32_t* parameter_bytes,
                     uint32_t* num_parameters, uint32_t cluster[3]) {
    return guarded(h, "launch", [&] {
        auto found = h->modules.at(module)->programs.find(kernel);
        if (found == h->modules[module]->programs.end()) {
            std::string known;
            for (const auto& [name, program] : h->modules[module]->programs) known += " " + name;
            throw Fault(FaultKind::launch, std::string("there is no kernel '") + kernel +
                                               "'; the module has:" + known);
        }
        const Program& p = *found->second;
        *parameter_bytes = p.parameter_bytes;
        *num_parameters = uint32_t(p.parameters.size());
        for (int i = 0; i < 3; ++i) cluster[i] = p.cluster[i];
    });
}

// A line for each kernel: its name in the PTX, a tab, its C++ name without template arguments.
EXPORT const char* dm_kernels(Handle* h, uint32_t module) {
    h->text.clear();
    for (const auto& [name, program] : h->modules.at(module)->programs)
        h->text += name + "\t" + qualified_name(name) + "\n";
    return h->text.c_str();
}

EXPORT int dm_kernel_parameter(Handle* h, uint32_t module, const char* kernel, uint32_t index,
                               uint32_t* offset, uint32_t* bytes, int* is_floating) {
    return guarded(h, "launch", [&] {
        const KernelParameter& p = h->modules.at(module)->programs.at(kernel)->parameters.at(index);
        *offset = uint32_t(p.offset);
        *bytes = uint32_t(p.size);
        *is_floating = p.is_floating;
    });
}

// A variable of the module as a rank has it: its address in the host's memory, and its bytes.
EXPORT int dm_variable(Handle* h, uint32_t module, uint32_t rank, const char* name,
                       uint64_t* address, uint64_t* bytes) {
    return guarded(h, "variable", [&] {
        const Module& m = *h->modules.at(module);
        const auto& known = h->machine.module_memory(m, h->machine.rank(rank)).addresses;
        auto found = known.find(name);
        if (found == known.end())
            throw Fault(FaultKind::launch, "module " + m.name + " has no variable '" + name + "'");
        *address = found->second;
        *bytes = m.variables.at(name).size;
    });
}

// What a launch of a kernel takes and allows.
struct KernelResources {
    uint32_t static_shared_bytes, local_bytes;  // per CTA, per thread
    uint32_t max_threads, required_threads[3];  // 0: the PTX does not say
    uint32_t num_registers;                     // the most per thread, 0: the PTX does not say
};

EXPORT int dm_kernel_resources(Handle* h, uint32_t module, const char* kernel,
                               KernelResources* out) {
    return guarded(h, "launch", [&] {
        const Program& p = *h->modules.at(module)->programs.at(kernel);
        *out = {p.static_shared_bytes, p.local_bytes, p.max_threads, {}, p.max_registers};
        std::copy_n(p.required_threads, 3, out->required_threads);
    });
}

EXPORT int dm_launch(Handle* h, uint32_t module, const char* kernel, uint32_t rank,
                     const uint32_t grid[3], const uint32_t block[3], const uint32_t cluster[3],
                     uint32_t shared_bytes, const void* arguments, uint64_t argument_bytes,
                     int in_order, uint32_t num_registers) {
    return guarded(h, "launch", [&] {
        const auto* bytes = static_cast<const std::byte*>(arguments);
        h->machine.launch(*h->modules.at(module)->programs.at(kernel), rank, grid, block, cluster,
                          shared_bytes, {bytes, bytes + argument_bytes}, in_order != 0,
                          num_registers);
    });
}

// Of the last launch: an array in its dynamic shared memory, and what some of its warps do.
EXPORT int dm_name_shared(Handle* h, const char* name, uint64_t offset, uint64_t element_bytes,
                          const uint64_t* shape, uint32_t num_dimensions) {
    return guarded(h, "launch", [&] {
        h->machine.grids.back()->shared_names.add(
            {name, offset, element_bytes, {shape, shape + num_dimensions}});
    });
}

EXPORT void dm_withdraw_launch(Handle* h) {
    h->machine.withdraw_launch();
}

EXPORT int dm_name_warps(Handle* h, const char* role, const uint32_t* warps, uint32_t count) {
    return guarded(h, "launch", [&] {
        h->machine.grids.back()->roles.push_back({role, {warps, warps + count}});
    });
}

// Python's functions that a run needs to let signals be handled and others run, in this order. It
// is called with the interpreter's lock held.
struct Python {
    void* (*save_thread)();
    void (*restore_thread)(void* state);
    int (*check_signals)();
    void* (*call)(void* callable);
    void (*release)(void* object);
};

// Every some ms, signals are handled and `progress` (null: none) is called without arguments. If
// one of them raises, the run ends with the exception set. python: null for callers without one.
EXPORT int dm_run(Handle* h, const Python* python, void* progress) {
    void* state = python ? python->save_thread() : nullptr;
    std::function<bool()> keep_going;
    if (python) {
        keep_going = [&] {
            python->restore_thread(state);
            bool goes_on = python->check_signals() == 0;
            if (goes_on && progress) {
                void* result = python->call(progress);
                goes_on = result != nullptr;
                if (result) python->release(result);
            }
            state = python->save_thread();
            return goes_on;
        };
    }
    const int result = guarded(h, "run", [&] { h->machine.run(keep_going); });
    if (result) h->machine.reset();
    if (python) python->restore_thread(state);
    return result;
}

// Who waited for what when nothing changed for a while in the last run, or "".
EXPORT const char* dm_stall(Handle* h) {
    return h->machine.stall.c_str();
}

EXPORT void dm_statistics(Handle* h, uint64_t* warp_instructions, uint64_t* lane_instructions,
                          uint64_t* virtual_ns) {
    *warp_instructions = h->machine.steps;
    *lane_instructions = h->machine.lane_steps;
    *virtual_ns = h->machine.virtual_ns;
}

// "name\tsummary\n" for every instruction.
EXPORT const char* dm_supported_instructions() {
    static const std::string text = [] {
        std::string all;
        for (const Instruction& i : all_instructions())
            all += std::string(i.name) + "\t" + i.summary + "\n";
        return all;
    }();
    return text.c_str();
}

}  // extern "C"
