// From a launch to warps: checks the geometry, lays out constants, creates clusters, CTAs and
// warps, retires them.
#include <algorithm>
#include <cstring>
#include <tuple>

#include "async_units.h"
#include "engine.h"
#include "memory_limit.h"
#include "race_detector.h"
#include "register_watch.h"
#include "shared_window.h"

namespace deep_moe::emulator {

namespace {

constexpr uint32_t max_grid[3] = {INT32_MAX, 65535, 65535}, max_block[3] = {1024, 1024, 64};
constexpr uint32_t max_threads = 1024, max_cluster_ctas = 16;
constexpr uint32_t max_thread_registers = 255, max_cta_registers = 65536;

std::byte* aligned(std::vector<std::byte>& storage, size_t bytes, size_t alignment) {
    storage.resize(bytes + alignment);
    auto address = reinterpret_cast<uintptr_t>(storage.data());
    return storage.data() + ((address + alignment - 1) / alignment * alignment - address);
}

void broadcast(std::byte* to, int bits, uint64_t low, uint64_t high) {
    for (int lane = 0; lane < warp_size; ++lane) {
        if (bits <= 32) {
            if (bits == 1 && lane) break;
            uint32_t value = uint32_t(low);
            std::memcpy(to + lane * 4, &value, 4);
        } else {
            std::memcpy(to + lane * 8, &low, 8);
            if (bits == 128) std::memcpy(to + warp_size * 8 + lane * 8, &high, 8);
        }
    }
}

// What the compiler may use at launch, 0 if the module does not say; from launch bounds, ptxas
// takes no more than the largest setmaxnreg asks for. That one moves registers between warpgroups
// of this sum.
uint32_t registers_at_launch(const Grid& g) {
    const Program& program = *g.program;
    if (program.max_registers) return program.max_registers;
    if (!program.max_threads && !program.required_threads[0]) return 0;
    const uint32_t threads = (g.num_threads + 127) / 128 * 128;
    const uint32_t each = std::min(65536 / threads / 8 * 8, 255u);
    return program.largest_budget ? std::min(each, program.largest_budget) : each;
}

// position: of the CTA in the grid.
void fill_special_registers(Warp& w, const uint32_t position[3]) {
    const Grid& g = *w.grid;
    const Cta& c = *w.cta;
    auto row = [&](Special s) { return w.special.data() + size_t(s) * warp_size; };
    auto fill = [&](Special s, uint32_t value) { std::fill_n(row(s), warp_size, value); };
    for (uint32_t lane = 0; lane < warp_size; ++lane) {
        const uint32_t t = w.index * warp_size + lane;
        row(Special::tid_x)[lane] = t % g.block[0];
        row(Special::tid_y)[lane] = t / g.block[0] % g.block[1];
        row(Special::tid_z)[lane] = t / g.block[0] / g.block[1];
        row(Special::laneid)[lane] = lane;
        row(Special::lanemask_eq)[lane] = 1u << lane;
        row(Special::lanemask_lt)[lane] = (1u << lane) - 1;
        row(Special::lanemask_le)[lane] = ((1u << lane) - 1) | 1u << lane;
        row(Special::lanemask_gt)[lane] = ~(((1u << lane) - 1) | 1u << lane);
        row(Special::lanemask_ge)[lane] = ~((1u << lane) - 1);
    }
    for (uint32_t d = 0; d < 3; ++d) {
        auto fill_dimension = [&](Special x, uint32_t value) {
            fill(Special(uint32_t(x) + d), value);
        };
        fill_dimension(Special::ntid_x, g.block[d]);
        fill_dimension(Special::ctaid_x, position[d]);
        fill_dimension(Special::nctaid_x, g.grid[d]);
        fill_dimension(Special::clusterid_x, position[d] / g.cluster[d]);
        fill_dimension(Special::nclusterid_x, g.grid[d] / g.cluster[d]);
        fill_dimension(Special::cluster_ctaid_x, position[d] % g.cluster[d]);
        fill_dimension(Special::cluster_nctaid_x, g.cluster[d]);
    }
    const uint32_t cluster_ctas = g.cluster[0] * g.cluster[1] * g.cluster[2];
    fill(Special::warpid, w.index);
    fill(Special::nwarpid, g.num_warps);
    fill(Special::smid, c.index);
    fill(Special::nsmid, g.num_ctas);
    fill(Special::gridid, g.id);
    fill(Special::cluster_ctarank, c.cluster_rank);
    fill(Special::cluster_nctarank, cluster_ctas);
    fill(Special::is_explicit_cluster, cluster_ctas > 1 || g.program->cluster[0] ? full_mask : 0);
    fill(Special::dynamic_smem_size, g.dynamic_shared_bytes);
    fill(Special::total_smem_size, c.shared_end);
    fill(Special::aggr_smem_size, c.shared_end);
    fill(Special::reserved_smem_offset_begin, 0);
    fill(Special::reserved_smem_offset_cap, shared_base);
    fill(Special::reserved_smem_offset_1, runtime_shared_base);
    const auto workspace = reinterpret_cast<uint64_t>(g.workspace.get());
    fill(Special::envreg1, uint32_t(workspace >> 32));
    fill(Special::envreg2, uint32_t(workspace));
}

// Gives a module's variables their memory and their initial values.
void lay_out_variables(const Module& module, Rank& rank, ModuleMemory& memory) {
    // Variables lie 256 bytes apart, so that one that is overrun does not hide in its neighbour.
    constexpr size_t gap = 256;
    size_t bytes = gap, largest_alignment = 4096;
    std::map<std::string, size_t> offsets;
    for (const auto& [name, symbol] : module.variables) {
        if (symbol.space != Space::global && symbol.space != Space::constant) continue;
        const size_t alignment = std::max<size_t>(symbol.alignment, gap);
        largest_alignment = std::max(largest_alignment, alignment);
        bytes = (bytes + alignment - 1) / alignment * alignment;
        offsets[name] = bytes;
        bytes += symbol.size + gap;
        require_memory(double(bytes), "module " + module.name + ": variable '" + name +
                                          "', with those before it,");
    }
    std::byte* base = aligned(memory.storage, bytes, largest_alignment);
    for (const auto& [name, offset] : offsets) {
        const Symbol& symbol = module.variables.at(name);
        const auto address = reinterpret_cast<uint64_t>(base + offset);
        std::copy(symbol.initializer.begin(), symbol.initializer.end(), base + offset);
        if (symbol.size)
            rank.memory.add(address, symbol.size, module.name + ": " + name,
                            symbol.space == Space::global);
        memory.addresses[name] = address;
    }
    for (const auto& [name, offset] : offsets) {
        for (const auto& [at, target] : module.variables.at(name).pointers) {
            uint64_t value;
            std::memcpy(&value, base + offset + at, 8);
            auto other = memory.addresses.find(target);
            auto function = module.functions.find(target);
            if (other != memory.addresses.end())
                value += other->second;
            else if (function != module.functions.end())
                value += function->second;
            else
                throw Fault(FaultKind::unsupported,
                            "the initializer of " + name + " refers to " + target);
            std::memcpy(base + offset + at, &value, 8);
        }
    }
}

[[noreturn]] void refuse(const Program& program, const std::string& why) {
    throw Fault(FaultKind::launch, "launch of " + program.name + ": " + why);
}

}  // namespace

Rank& Engine::rank(uint32_t index) {
    auto& slot = ranks[index];
    if (!slot) {
        slot = std::make_unique<Rank>();
        slot->index = index;
    }
    return *slot;
}

void Engine::forget_module(const Module& module, Rank& rank) {
    auto found = rank.modules.find(&module);
    if (found == rank.modules.end()) return;
    for (const auto& [name, address] : found->second.addresses) rank.memory.discard(address);
    rank.modules.erase(found);
}

ModuleMemory& Engine::module_memory(const Module& module, Rank& rank) {
    auto [found, is_new] = rank.modules.try_emplace(&module);
    ModuleMemory& memory = found->second;
    if (!is_new || module.variables.empty()) return memory;
    try {
        lay_out_variables(module, rank, memory);
    } catch (...) {
        forget_module(module, rank);
        throw;
    }
    return memory;
}

void Engine::forget_module(const Module& module) {
    for (auto& [index, rank] : ranks) forget_module(module, *rank);
}

void Engine::launch(const Program& program, uint32_t rank_index, const uint32_t grid_size[3],
                    const uint32_t block_size[3], const uint32_t cluster_size[3],
                    uint32_t shared_bytes, const std::vector<std::byte>& parameters, bool in_order,
                    uint32_t num_registers) {
    auto grid = std::make_unique<Grid>();
    Grid& g = *grid;
    g.machine = this;
    g.rank = &rank(rank_index);
    g.program = &program;
    g.id = ++last_grid_id;
    uint64_t num_ctas = 1, num_threads = 1, cluster_ctas = 1;
    for (int i = 0; i < 3; ++i) {
        g.grid[i] = grid_size[i];
        g.block[i] = block_size[i];
        uint32_t declared = program.cluster[i];
        if (cluster_size[0] && program.cluster[0] && cluster_size[i] != declared)
            refuse(program,
                   format("cluster size %u in dimension %d, but the kernel was compiled for %u",
                          cluster_size[i], i, declared));
        g.cluster[i] = cluster_size[0] ? cluster_size[i] : declared ? declared : 1;
        if (!g.grid[i] || !g.block[i] || !g.cluster[i]) refuse(program, "a size is zero");
        if (g.grid[i] % g.cluster[i])
            refuse(program, format("grid size %u is not a multiple of cluster size %u", g.grid[i],
                                   g.cluster[i]));
        if (program.required_threads[0] && program.required_threads[i] != g.block[i])
            refuse(program, format("block size %u in dimension %d, the kernel requires %u",
                                   g.block[i], i, program.required_threads[i]));
        for (const auto& [name, value, most] : {std::tuple("grid", g.grid[i], max_grid[i]),
                                                {"block", g.block[i], max_block[i]},
                                                {"cluster", g.cluster[i], max_cluster_ctas}}) {
            if (value > most)
                refuse(program,
                       format("%s size %u in dimension %d; at most %u", name, value, i, most));
        }
        num_ctas *= g.grid[i];
        num_threads *= g.block[i];
        cluster_ctas *= g.cluster[i];
    }
    if (num_threads > max_threads)
        refuse(program, format("%llu threads per CTA; at most %u", (unsigned long long)num_threads,
                               max_threads));
    if (num_ctas > INT32_MAX)
        refuse(program, format("%llu CTAs; the emulator counts at most %d",
                               (unsigned long long)num_ctas, INT32_MAX));
    g.num_ctas = uint32_t(num_ctas);
    g.num_threads = uint32_t(num_threads);
    if (program.max_threads && g.num_threads > program.max_threads)
        refuse(program, format("%u threads per CTA; the kernel was compiled for at most %u",
                               g.num_threads, program.max_threads));
    if (cluster_ctas > max_cluster_ctas)
        refuse(program, format("%llu CTAs per cluster; at most %u",
                               (unsigned long long)cluster_ctas, max_cluster_ctas));
    if (parameters.size() != program.parameter_bytes)
        refuse(program, format("%zu bytes of arguments; the kernel takes %u", parameters.size(),
                               program.parameter_bytes));
    const uint64_t total_shared =
        uint64_t(program.dynamic_shared_offset) - shared_base + shared_bytes;
    if (total_shared > max_shared_bytes)
        refuse(program, format("%llu bytes of shared memory per CTA; at most %u",
                               (unsigned long long)total_shared, max_shared_bytes));
    g.dynamic_shared_bytes = shared_bytes;
    g.num_warps = (g.num_threads + warp_size - 1) / warp_size;
    const uint64_t allocated = (uint64_t(num_registers) + 7) / 8 * 8 * warp_size * g.num_warps;
    if (num_registers > max_thread_registers || allocated > max_cta_registers)
        refuse(program,
               format("%u registers per thread, %llu per CTA; at most %u and %u", num_registers,
                      (unsigned long long)allocated, max_thread_registers, max_cta_registers));
    g.num_registers = num_registers;
    check_memory(g);
    g.parameters = aligned(g.parameter_storage, std::max<size_t>(parameters.size(), 1), 128);
    std::copy(parameters.begin(), parameters.end(), g.parameters);
    if (program.uses_grid_workspace) g.workspace = std::make_unique<std::array<uint32_t, 4>>();
    ModuleMemory& memory = module_memory(*program.module, *g.rank);
    g.constants.resize(cluster_ctas);
    for (uint32_t r = 0; r < cluster_ctas; ++r) {
        g.constants[r].resize(program.constant_bytes);
        for (const Constant& c : program.constants) {
            uint64_t low = c.low;
            if (c.parameter) low += reinterpret_cast<uint64_t>(g.parameters);
            if (c.symbol) {
                if (c.symbol->space == Space::shared)
                    low += c.symbol->address + (uint64_t(r) << shared_rank_shift);
                else
                    low += memory.addresses.at(c.symbol->name);
            }
            broadcast(g.constants[r].data() + c.offset, c.bits, low, c.high);
        }
    }
    g.ctas.resize(g.num_ctas);
    try {
        if (!parameters.empty())
            g.rank->memory.add(reinterpret_cast<uint64_t>(g.parameters), parameters.size(),
                               "parameters of " + program.name, false);
        if (g.workspace)
            g.rank->memory.add(reinterpret_cast<uint64_t>(g.workspace.get()), sizeof *g.workspace,
                               "grid workspace of " + program.name, true);
    } catch (...) {
        forget_regions(g);
        throw;
    }
    for (const auto& earlier : grids)
        if (in_order && earlier->rank == g.rank) g.previous = earlier.get();
    grids.push_back(std::move(grid));
}

// What a grid's bookkeeping takes until the run ends, and its CTAs while they are resident.
void Engine::check_memory(const Grid& g) const {
    const double kept = double(g.num_ctas) * (sizeof(Cta) + sizeof(std::unique_ptr<Cta>) +
                                              g.num_warps * double(sizeof(Warp)));
    const double shared = 2.0 * (g.program->dynamic_shared_offset + g.dynamic_shared_bytes),
                 warp = g.program->register_bytes + double(g.program->local_bytes) * warp_size;
    const double resident =
        std::min<double>(g.num_ctas, max_resident_ctas) * (shared + g.num_warps * warp);
    require_memory(
        kept + resident,
        "launch of " + g.program->name +
            format(": a grid of %u CTAs of %u warps, with %u bytes of shared memory "
                   "and, per thread, %u of local memory,",
                   g.num_ctas, g.num_warps, g.program->static_shared_bytes + g.dynamic_shared_bytes,
                   g.program->local_bytes));
}

// Creates clusters as long as the grid's residency allows it. Clusters are taken in order of their
// first CTA.
void Engine::admit_ctas(Grid& g) {
    if (g.previous && !g.previous->has_ended()) return;
    const uint32_t cluster_ctas = g.cluster[0] * g.cluster[1] * g.cluster[2];
    if (timing) {
        std::vector<SmTime*> sms;
        while (g.next_cta < g.num_ctas && timing->place(g, cluster_ctas, sms))
            admit_cluster(g, sms);
        if (g.next_cta < g.num_ctas && g.live_ctas == 0 && is_alone(g))
            refuse(*g.program, "an SM of the chip has no room for a CTA");
        return;
    }
    while (g.next_cta < g.num_ctas &&
           (g.live_ctas == 0 || g.live_ctas + cluster_ctas <= max_resident_ctas))
        admit_cluster(g, {});
}

// No other grid of the rank runs, whose end may make room.
bool Engine::is_alone(const Grid& g) const {
    return std::none_of(grids.begin(), grids.end(), [&](const auto& other) {
        return other.get() != &g && other->rank == g.rank && other->live_ctas;
    });
}

void Engine::admit_cluster(Grid& g, const std::vector<SmTime*>& sms) {
    const uint32_t cluster_ctas = g.cluster[0] * g.cluster[1] * g.cluster[2];
    auto cluster = std::make_unique<Cluster>();
    cluster->index = g.next_cta / cluster_ctas;
    uint32_t first[3];
    uint32_t number = cluster->index;
    for (int i = 0; i < 3; ++i) {
        const uint32_t num_clusters = g.grid[i] / g.cluster[i];
        first[i] = number % num_clusters * g.cluster[i];
        number /= num_clusters;
    }
    for (uint32_t r = 0; r < cluster_ctas; ++r) {
        const uint32_t position[3] = {first[0] + r % g.cluster[0],
                                      first[1] + r / g.cluster[0] % g.cluster[1],
                                      first[2] + r / g.cluster[0] / g.cluster[1]};
        auto cta = make_cta(g, *cluster, position);
        cluster->live_threads += g.num_threads;
        cluster->ctas.push_back(cta.get());
        g.ctas[cta->index] = std::move(cta);
        ++g.live_ctas;
    }
    for (Cta* c : cluster->ctas) {
        if (timing) {
            c->sm = sms[c->cluster_rank];
            timing->start_cta(*c, g.rank->index);
            continue;
        }
        for (auto& w : c->warps) make_ready(*w);
    }
    g.clusters.push_back(std::move(cluster));
    g.next_cta += cluster_ctas;
}

// The next CTA of `cluster`.
std::unique_ptr<Cta> Engine::make_cta(Grid& g, Cluster& cluster, const uint32_t position[3]) {
    const Program& program = *g.program;
    auto cta = std::make_unique<Cta>();
    Cta& c = *cta;
    c.machine = this;
    c.grid = &g;
    c.cluster = &cluster;
    c.index = position[0] + g.grid[0] * (position[1] + g.grid[1] * position[2]);
    c.cluster_rank = uint32_t(cluster.ctas.size());
    c.live_threads = g.num_threads;
    c.shared_end = program.dynamic_shared_offset + g.dynamic_shared_bytes;
    c.shared = aligned(c.shared_storage, c.shared_end, 1024);
    c.shadow.assign(c.shared_end, 0);
    // What CUDA's headers keep below the kernel's own memory is zero at the start.
    std::fill(c.shadow.begin() + program.shared_begin, c.shadow.begin() + shared_base, 1);
    c.launch_registers = g.num_registers ? g.num_registers : registers_at_launch(g);
    for (uint32_t i = 0; i < g.num_warps; ++i) {
        auto warp = make_warp(c, i);
        fill_special_registers(*warp, position);
        c.warps.push_back(std::move(warp));
    }
    return cta;
}

std::unique_ptr<Warp> Engine::make_warp(Cta& c, uint32_t index) {
    Grid& g = *c.grid;
    const Program& program = *g.program;
    auto warp = std::make_unique<Warp>();
    Warp& w = *warp;
    w.machine = this;
    w.grid = &g;
    w.cta = &c;
    w.program = &program;
    w.index = index;
    w.turns = std::make_shared<Turns>();
    w.num_registers = c.launch_registers;
    if (races) races->add_warp(w);
    if (checks && program.register_plan)
        w.watch = std::make_shared<RegisterWatch>(*program.register_plan);
    const uint32_t lanes = std::min<uint32_t>(warp_size, g.num_threads - index * warp_size);
    w.live = lanes == warp_size ? full_mask : (1u << lanes) - 1;
    w.current.lanes = w.live;
    w.registers.assign(program.register_bytes, std::byte{0xcb});
    w.local_stride = program.local_bytes;
    w.local.assign(size_t(w.local_stride) * warp_size, std::byte{0xcb});
    w.stack_tops.fill(program.callables[0].frame_bytes);
    w.special.assign(size_t(Special::count) * warp_size, 0);
    w.bases[int(Base::registers)] = w.registers.data();
    w.bases[int(Base::constants)] = g.constants[c.cluster_rank].data();
    w.bases[int(Base::special)] = reinterpret_cast<std::byte*>(w.special.data());
    return warp;
}

// The CTA's threads have all exited. Its memory goes; the objects stay until the run ends, because
// queues and timers may still name its warps, and without checks so may copies in flight.
void Engine::retire_cta(Cta& cta) {
    Grid& g = *cta.grid;
    if (checks) check_units_at_exit(cta);
    for (auto& w : cta.warps) {
        std::vector<std::byte>().swap(w->registers);
        std::vector<std::byte>().swap(w->local);
        std::vector<uint32_t>().swap(w->special);
    }
    if (timing) timing->end_cta(cta);
    --g.live_ctas;
    if (timing && g.has_ended()) timing->end_grid(g);
    if (g.next_cta < g.num_ctas) admit_ctas(g);
    if (!g.has_ended()) return;
    if (races) races->end(g);
    for (const auto& next : grids)
        if (next->previous == &g || (timing && next->rank == g.rank && !next->has_ended()))
            admit_ctas(*next);
}

void Engine::reset() {
    ready.clear();
    timers.clear();
    async_queues.clear();
    async_by_key.clear();
    if (timing) timing->clear();
    running = nullptr;
    completing = nullptr;
    races.reset();
    for (auto& g : grids) forget_regions(*g);
    grids.clear();
}

void Engine::forget_regions(const Grid& g) {
    g.rank->memory.discard(reinterpret_cast<uint64_t>(g.parameters));
    if (g.workspace) g.rank->memory.discard(reinterpret_cast<uint64_t>(g.workspace.get()));
}

void Engine::withdraw_launch() {
    forget_regions(*grids.back());
    grids.pop_back();
}

}  // namespace deep_moe::emulator
