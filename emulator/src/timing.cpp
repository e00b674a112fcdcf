#include "timing.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "elementary.h"
#include "engine.h"

namespace deep_moe::emulator {

namespace {

constexpr uint32_t line_bytes = 128, sector_bytes = 32;
constexpr uint64_t late_bytes = 32;  // no access of a lane has more
constexpr uint32_t max_sm_ctas = 32, max_sm_threads = 2048, max_sm_registers = 65536;
constexpr uint32_t reserved_shared_bytes = 1024;  // of each CTA
constexpr uint32_t num_atomic_queues = 4096;
constexpr int quarters_per_sm = 4;
// A warp may run ahead of the next event by this much where nobody can notice.
constexpr Picoseconds horizon = 40'000;
constexpr uint64_t work_limit = 64 * 4;  // issue quarters after which it is charged
constexpr uint32_t own_limit = 64 * 16;  // the same in sixteenths of cycles, of machine code
constexpr double mma_sync_cycles = 8, mma_sync_latency_cycles = 33;
constexpr double local_latency_cycles = 36;
constexpr Picoseconds clock_step = 1'000'000;  // between two looks at the load

}  // namespace

const char* name_of(Spent spent) {
    static const char* names[] = {"instructions", "memory", "tensor", "mbarrier",
                                  "barrier",      "fence",  "sleep",  "other"};
    return names[int(spent)];
}

// ---- queues

SlottedQueue::Slot& SlottedQueue::slot(int64_t index) {
    Slot& found = slots_[size_t(index) % num_slots];
    if (found.index != index) found = {index, index + 1, 0};
    return found;
}

int64_t SlottedQueue::first_with_room(int64_t index) {
    int64_t found = index;
    while (slot(found).used == width) found = slot(found).next;
    while (index < found) {
        Slot& full = slot(index);
        index = full.next;
        full.next = found;
    }
    return found;
}

Picoseconds SlottedQueue::take(Picoseconds at, Picoseconds duration) {
    if (slots_.empty()) slots_.resize(num_slots);
    int64_t index = at / width;
    Slot& first = slot(index);
    first.used = std::max(first.used, at - index * width);
    Picoseconds end = at + duration;
    while (duration > 0) {
        index = first_with_room(index);
        Slot& next = slot(index);
        const Picoseconds part = std::min(width - next.used, duration);
        next.used += part;
        duration -= part;
        const Picoseconds until = index * width + next.used;
        if (usage) usage->add(until - part, until, 1);
        end = std::max(end, until);
    }
    return end;
}

// ---- L2

void CacheTags::resize(uint64_t bytes) {
    num_sets_ = std::max<uint64_t>(1, bytes / line_bytes / ways);
    lines_.assign(num_sets_ * ways, {});
}

void CacheTags::settle() {
    for (Line& line : lines_) line.ready = 0;
}

CacheTags::Line& CacheTags::find(uint64_t line, bool& evicts_dirty) {
    Line* set = &lines_[(line * 0x9E3779B97F4A7C15ull >> 20) % num_sets_ * ways];
    Line* oldest = set;
    evicts_dirty = false;
    for (uint32_t i = 0; i < ways; ++i) {
        if (set[i].tag == line) {
            set[i].used = ++uses_;
            return set[i];
        }
        if (set[i].used < oldest->used) oldest = &set[i];
    }
    evicts_dirty = oldest->dirty;
    *oldest = {line, ++uses_, 0, 0, false};
    return *oldest;
}

// ---- GPUs, launches

GpuTime& Timing::gpu_of(uint32_t rank) {
    auto& slot = gpus_[rank];
    if (!slot) {
        slot = std::make_unique<GpuTime>();
        slot->index = rank;
        slot->sms.resize(size_t(chip.num_sms));
        slot->tags.resize(uint64_t(chip.l2_useful_mib * (1 << 20)));
        slot->atomics.resize(num_atomic_queues);
        slot->cycle = 1e6 / chip.max_clock_mhz;
        watch(*slot);
    }
    return *slot;
}

void Timing::watch(GpuTime& gpu) {
    gpu.hbm.usage = &gpu.usage.memory;
    gpu.l2.usage = &gpu.usage.l2;
    gpu.link_in.usage = &gpu.usage.links_in;
    gpu.link_out.usage = &gpu.usage.links_out;
    for (SmTime& sm : gpu.sms) {
        sm.tensor.usage = &gpu.usage.tensor_cores;
        sm.tensor.num_units = quarters_per_sm;
        for (SmTime::Partition& p : sm.partitions) p.tensor.usage = &gpu.usage.tensor_cores;
    }
}

// L2 keeps what it has from one run to the next, everything else begins anew.
void Timing::start_run() {
    clear();
    now = last = next_tick = 0;
    for (auto& [rank, gpu] : gpus_) {
        CacheTags tags = std::move(gpu->tags);
        *gpu = GpuTime{};
        gpu->index = rank;
        gpu->sms.resize(size_t(chip.num_sms));
        gpu->tags = std::move(tags);
        gpu->tags.settle();
        gpu->atomics.resize(num_atomic_queues);
        gpu->cycle = 1e6 / chip.max_clock_mhz;
        watch(*gpu);
    }
    launches.clear();
    waits.clear();
}

void Timing::clear() {
    for (Event& e : events_) delete e.operation;
    events_.clear();
    last_of_key_.clear();
    late_writes_.clear();
    running_.clear();
}

bool Timing::place(const Grid& grid, uint32_t num_ctas, std::vector<SmTime*>& chosen) {
    GpuTime& gpu = gpu_of(grid.rank->index);
    const uint32_t shared = grid.program->dynamic_shared_offset - shared_base +
                            grid.dynamic_shared_bytes + reserved_shared_bytes;
    const auto limit = uint32_t(chip.shared_kib_per_sm * 1024);
    const uint32_t threads = grid.num_warps * warp_size, registers = grid.num_registers * threads;
    chosen.clear();
    for (uint32_t i = 0; i < num_ctas; ++i) {
        SmTime* best = nullptr;
        for (SmTime& sm : gpu.sms) {
            if (sm.num_ctas >= max_sm_ctas || sm.num_threads + threads > max_sm_threads ||
                sm.shared_bytes + shared > limit || sm.num_registers + registers > max_sm_registers)
                continue;
            if (std::find(chosen.begin(), chosen.end(), &sm) != chosen.end()) continue;
            if (!best || sm.num_ctas < best->num_ctas) best = &sm;
        }
        if (!best) return false;
        chosen.push_back(best);
    }
    for (SmTime* sm : chosen) {
        ++sm->num_ctas;
        sm->num_threads += threads;
        sm->shared_bytes += shared;
        sm->num_registers += registers;
    }
    return true;
}

void Timing::start_cta(Cta& cta, uint32_t rank) {
    const Grid& grid = *cta.grid;
    cta.gpu = &gpu_of(rank);
    const Picoseconds at = now;
    auto [found, is_new] = running_.try_emplace(&grid);
    LaunchTime& launch = found->second;
    if (is_new) {
        launch.rank = grid.rank->index;
        launch.grid = grid.id;
        launch.kernel = grid.program->name;
        launch.start = at;
        launch.spent.resize(grid.num_warps);
        GpuTime& gpu = gpu_of(launch.rank);
        run_clock(gpu, at);
        launch.cycles = -gpu.cycles_seen;
        launch.hbm_bytes = -gpu.hbm_bytes;
        launch.l2_bytes = -gpu.l2_bytes;
        launch.link_bytes = -gpu.link_bytes;
        launch.tensor_share = -double(gpu.tensor_busy);
    }
    const Picoseconds start = at + ns(chip.cta_start_ns);
    for (auto& w : cta.warps) {
        w->timed = std::make_shared<WarpTime>();
        w->timed->time = start;
        requeue(*w);
    }
}

void Timing::end_cta(Cta& cta) {
    const Grid& grid = *cta.grid;
    SmTime& sm = *cta.sm;
    const uint32_t threads = grid.num_warps * warp_size;
    --sm.num_ctas;
    sm.num_threads -= threads;
    sm.shared_bytes -= grid.program->dynamic_shared_offset - shared_base +
                       grid.dynamic_shared_bytes + reserved_shared_bytes;
    sm.num_registers -= grid.num_registers * threads;
    LaunchTime& launch = running_.at(&grid);
    for (auto& w : cta.warps) {
        flush(*w);
        launch.end = std::max({launch.end, w->timed->time, w->timed->last_arrival});
        for (size_t i = 0; i < size_t(Spent::count); ++i)
            launch.spent[w->index][i] += double(w->timed->spent[i]) / grid.num_ctas;
    }
    for (auto& w : cta.warps) now = std::max(now, w->timed->time);
    last = std::max(last, launch.end);
}

void Timing::end_grid(const Grid& grid) {
    auto found = running_.find(&grid);
    LaunchTime launch = std::move(found->second);
    running_.erase(found);
    GpuTime& gpu = gpu_of(launch.rank);
    run_clock(gpu, launch.end + ns(chip.kernel_exit_ns));
    launch.cycles += gpu.cycles_seen;
    launch.hbm_bytes += gpu.hbm_bytes;
    launch.l2_bytes += gpu.l2_bytes;
    launch.link_bytes += gpu.link_bytes;
    launch.end += ns(chip.kernel_exit_ns);
    now = last = std::max(last, launch.end);
    const double most = double(launch.end - launch.start) * chip.num_sms * 4;
    launch.tensor_share = (launch.tensor_share + double(gpu.tensor_busy)) / most;
    launches.push_back(std::move(launch));
}

void Timing::tick() {
    if (now < next_tick) return;
    next_tick = now + clock_step;
    for (auto& [rank, gpu] : gpus_) run_clock(*gpu, now);
}

// The clock falls as soon as tensor cores run, and further the more of them do.
void Timing::run_clock(GpuTime& gpu, Picoseconds at) {
    const Picoseconds passed = at - gpu.clock_seen;
    if (passed <= 0) return;
    gpu.cycles_seen += double(passed) / gpu.cycle;
    gpu.clock_seen = at;
    const double share =
        double(gpu.tensor_busy - gpu.tensor_busy_seen) / (double(passed) * chip.num_sms * 4);
    gpu.tensor_busy_seen = gpu.tensor_busy;
    const double weight = chip.power_window_us
                              ? 1 - elementary::exp(-double(passed) / (chip.power_window_us * 1e6))
                              : 1;
    gpu.tensor_share += (std::min(share, 1.0) - gpu.tensor_share) * weight;
    const double mhz = gpu.has_multiplied
                           ? chip.mma_clock_mhz - chip.power_slope_mhz * gpu.tensor_share
                           : chip.max_clock_mhz;
    gpu.cycle = 1e6 / std::max(mhz, 1.0);
}

uint64_t Timing::cycles_of(Warp& w) {
    GpuTime& gpu = *w.cta->gpu;
    const Picoseconds at = here(w);
    return uint64_t(gpu.cycles_seen + double(at - gpu.clock_seen) / gpu.cycle);
}

std::string Timing::launches_as_json() const {
    std::string text = "[";
    for (const LaunchTime& l : launches) {
        text += format(
            "%s{\"rank\": %u, \"kernel\": \"%s\", \"start\": %lld, \"end\": %lld, \"cycles\": "
            "%.17g, "
            "\"hbm_bytes\": %.17g, \"l2_bytes\": %.17g, \"link_bytes\": %.17g, "
            "\"tensor_share\": %.17g, \"spent\": [",
            text.size() > 1 ? ", " : "", l.rank, l.kernel.c_str(), (long long)l.start,
            (long long)l.end, l.cycles, l.hbm_bytes, l.l2_bytes, l.link_bytes, l.tensor_share);
        for (size_t w = 0; w < l.spent.size(); ++w) {
            text += w ? ", {" : "{";
            for (size_t i = 0; i < size_t(Spent::count); ++i)
                text += format("%s\"%s\": %.17g", i ? ", " : "", name_of(Spent(i)), l.spent[w][i]);
            text += "}";
        }
        text += "]}";
    }
    return text + "]";
}

std::string Timing::usage_as_json(uint64_t begin_ns) const {
    std::string text = "[";
    for (const auto& [rank, gpu] : gpus_) {
        text += format("%s{\"rank\": %u, \"begin_ns\": %llu", text.size() > 1 ? ", " : "", rank,
                       (unsigned long long)begin_ns);
        const auto add = [&](const char* name, const UsageSeries& series, double num_units) {
            text +=
                format(", \"%s\": {\"step\": %lld, \"shares\": [", name, (long long)series.step());
            bool is_first = true;
            for (double busy : series.busy()) {
                text +=
                    format("%s%.4g", is_first ? "" : ",", busy / double(series.step()) / num_units);
                is_first = false;
            }
            text += "]}";
        };
        add("memory", gpu->usage.memory, 1);
        add("L2", gpu->usage.l2, 1);
        add("links in", gpu->usage.links_in, 1);
        add("links out", gpu->usage.links_out, 1);
        add("tensor cores", gpu->usage.tensor_cores, chip.num_sms * quarters_per_sm);
        text += "}";
    }
    return text + "]";
}

// ---- events

void Timing::requeue(Warp& w) {
    WarpTime& t = *w.timed;
    t.stamp = ++num_events_;
    events_.push_back({time_of(w), t.stamp, &w, nullptr});
    std::push_heap(events_.begin(), events_.end());
}

void Timing::enqueue(AsyncOperation operation, uint64_t key, Picoseconds at) {
    if (key) {
        Picoseconds& latest = last_of_key_[key];
        at = latest = std::max(latest, at);
    }
    events_.push_back(
        {std::max(at, now), ++num_events_, nullptr, new AsyncOperation(std::move(operation))});
    std::push_heap(events_.begin(), events_.end());
}

Timing::Event Timing::take_event() {
    std::pop_heap(events_.begin(), events_.end());
    Event event = events_.back();
    events_.pop_back();
    if (event.operation) {
        now = event.time;
        last = std::max(last, now);
    } else if (event.warp->timed->stamp == event.order) {
        now = event.time;
        event.warp->timed->stamp = 0;
    } else {
        event.warp = nullptr;  // it was woken and runs elsewhere in the list
    }
    return event;
}

void Timing::block(Warp& w) {
    flush(w);
    w.timed->stamp = 0;
    switch (w.current.wait.awaited.kind) {
        case Awaited::Kind::mbarrier_parity:
        case Awaited::Kind::mbarrier_state:
            w.timed->blocked_by = Spent::mbarrier;
            break;
        case Awaited::Kind::named_barrier:
        case Awaited::Kind::cluster_barrier:
            w.timed->blocked_by = Spent::barrier;
            break;
        default:
            w.timed->blocked_by = w.current.deadline ? Spent::sleep : Spent::other;
    }
}

void Timing::wake(Warp& w) {
    WarpTime& t = *w.timed;
    if (t.stamp || w.machine->is_running(w)) return;  // its other lanes run
    const GpuTime& gpu = *w.cta->gpu;
    double delay = 0;
    if (t.blocked_by == Spent::mbarrier)
        delay = std::max(0.0, chip.mbarrier_wake_cycles - chip.mbarrier_test_cycles);
    advance(w, now + cycles(gpu, delay), t.blocked_by);
    requeue(w);
}

// ---- instructions

Picoseconds Timing::time_of(const Warp& w) const {
    const WarpTime& t = *w.timed;
    return t.time + cycles(*w.cta->gpu, double(t.own) / 16 + t.extra);
}

void Timing::advance(Warp& w, Picoseconds to, Spent reason) {
    WarpTime& t = *w.timed;
    if (to <= t.time) return;
    t.spent[size_t(reason)] += to - t.time;
    if (keeps_waits && reason != Spent::instructions) {
        WarpWait* before = waits.empty() ? nullptr : &waits.back();
        if (before && before->grid == w.grid->id && before->cta == w.cta->index &&
            before->warp == w.index && before->kind == reason && before->end == t.time)
            before->end = to;
        else
            waits.push_back({w.grid->id, w.cta->index, w.index, reason, t.time, to});
    }
    t.time = to;
}

void Timing::flush(Warp& w) {
    WarpTime& t = *w.timed;
    if (!t.work && !t.own && !t.extra) return;
    const GpuTime& gpu = *w.cta->gpu;
    SmTime::Partition& p = w.cta->sm->partitions[w.index % 4];
    const auto part = [&](int shift) { return double(t.work >> shift & 0xffff) * 0.25; };
    const Picoseconds start = t.time;
    Picoseconds end = time_of(w);
    const auto through = [&](ServiceQueue& queue, double cycles_taken) {
        if (cycles_taken) end = std::max(end, queue.take(start, cycles(gpu, cycles_taken)));
    };
    through(p.issue, part(0));
    through(p.alu, part(16) * chip.alu_cycles);
    through(p.fma, part(32) * chip.fma_cycles);
    through(p.xu, part(48) * chip.xu_cycles);
    t.work = 0;
    t.own = 0;
    t.extra = 0;
    advance(w, end, Spent::instructions);
}

void Timing::await_registers(Warp& w, const Op& op) {
    WarpTime& t = *w.timed;
    const auto touches = [&](uint32_t offset) {
        for (int i = 0; i < op.num_operands; ++i) {
            const Operand& o = op.operands[i];
            if (o.base == Base::registers && !o.sink && o.offset == offset) return true;
        }
        return op.guard != Guard::always && op.guard_offset == offset;
    };
    for (size_t i = 0; i < t.pending.size();) {
        WarpTime::Pending& p = t.pending[i];
        bool needed = false;
        for (uint32_t k = 0; k < p.count && !needed; ++k) needed = touches(p.offsets[k]);
        const Picoseconds at = time_of(w);
        if (!needed && p.ready > at) {
            ++i;
            continue;
        }
        if (p.ready > at) {
            flush(w);
            advance(w, p.ready, p.kind);
        }
        t.pending[i] = t.pending.back();
        t.pending.pop_back();
    }
    t.pending_registers = 0;
    for (const WarpTime::Pending& p : t.pending)
        for (uint32_t k = 0; k < p.count; ++k) t.pending_registers |= register_bit(p.offsets[k]);
}

void Timing::add_pending(Warp& w, const Op& op, const OpCost& cost, Picoseconds ready, Spent kind) {
    WarpTime& t = *w.timed;
    WarpTime::Pending p{{}, 0, ready, kind};
    for (int i = cost.first_result; i < cost.first_result + cost.num_results; ++i) {
        const Operand& o = op.operands[i];
        if (o.base != Base::registers || o.sink || p.count == p.offsets.size()) continue;
        p.offsets[p.count++] = o.offset;
        t.pending_registers |= register_bit(o.offset);
    }
    if (p.count) t.pending.push_back(p);
}

bool Timing::begin(Warp& w, const Op& op, const OpCost& cost) {
    WarpTime& t = *w.timed;
    const bool resumes = t.resumes != WarpTime::Resumes::nowhere && t.resumed_pc == w.current.pc;
    if (!resumes && t.pending_registers & cost.touches) await_registers(w, op);
    if (cost.is_ordered || (t.work & 0xffff) > work_limit || t.extra > work_limit ||
        (cost.is_scheduled && t.own > own_limit))
        flush(w);
    const Picoseconds first = next_event();
    if (t.time > first && (cost.is_ordered || t.time > first + horizon)) return false;
    now = std::max(now, t.time);
    if (resumes) return true;
    t.work += cost.work;
    t.own += cost.is_scheduled ? cost.own
                               : std::max(uint32_t(cost.work & 0xffff) * issue_sixteenths_,
                                          uint32_t(cost.depth) * dependent_sixteenths_);
    return true;
}

// Lets the time pass; false if something else comes before the warp goes on.
bool Timing::wait_and_resume(Warp& w, Picoseconds until, Spent reason, WarpTime::Resumes where) {
    WarpTime& t = *w.timed;
    if (until <= t.time) return true;
    advance(w, until, reason);
    if (t.time >= next_event()) {
        t.resumes = where;
        t.resumed_pc = w.current.pc;
        return false;
    }
    now = std::max(now, t.time);
    return true;
}

bool Timing::before(Warp& w, const Op& op, const OpCost& cost) {
    using Resumes = WarpTime::Resumes;
    GpuTime& gpu = *w.cta->gpu;
    WarpTime& t = *w.timed;
    const Resumes resumes = t.resumed_pc == w.current.pc
                                ? std::exchange(t.resumes, Resumes::nowhere)
                                : Resumes::nowhere;
    t.arrival = 0;
    if (resumes == Resumes::behind_access) return true;
    // What the thread wrote before has arrived when its release leaves, and the warp waits for it.
    if (cost.is_release && resumes == Resumes::nowhere &&
        !wait_and_resume(w, fenced(w, cost.reaches_system ? chip.fence_sys_ns : 0), Spent::fence,
                         Resumes::behind_fence))
        return false;
    switch (cost.kind) {
        case OpKind::plain:
        case OpKind::copy:
        case OpKind::barrier:
        case OpKind::barrier_arrive:
        case OpKind::cluster_arrive:
        case OpKind::cluster_wait:
        case OpKind::mbarrier_wait:
        case OpKind::timer:
        case OpKind::branch:
            break;
        case OpKind::slow:
            if (cost.is_shuffle) {
                ServiceQueue& queue = w.cta->sm->partitions[w.index % 4].shuffle;
                const Picoseconds at = time_of(w);
                const Picoseconds done = queue.take(at, cycles(gpu, chip.shuffle_cycles));
                const Picoseconds ready =
                    cost.is_scheduled ? done : at + cycles(gpu, chip.shuffle_latency_cycles);
                add_pending(w, op, cost, std::max(done, ready), Spent::instructions);
            } else if (!cost.is_scheduled) {
                add_pending(w, op, cost, time_of(w) + cycles(gpu, chip.xu_latency_cycles),
                            Spent::instructions);
            }
            break;
        case OpKind::load:
        case OpKind::store:
        case OpKind::atomic:
        case OpKind::reduction:
            return access(w, op, cost);
        case OpKind::fence_cta:
            t.extra += uint32_t(chip.fence_cta_cycles);
            break;
        case OpKind::fence_proxy:
            advance(w, fenced(w, 0), Spent::fence);
            break;
        case OpKind::fence_gpu:
            advance(w,
                    fenced(w, 0) + cycles(gpu, std::max(0.0, chip.fence_gpu_cycles -
                                                                 chip.memory_barrier_cycles)),
                    Spent::fence);
            break;
        case OpKind::fence_sys:
            advance(w, fenced(w, chip.fence_sys_ns), Spent::fence);
            break;
        case OpKind::mbarrier:
            t.extra += uint32_t(chip.mbarrier_arrive_cycles);
            break;
        case OpKind::mma: {
            flush(w);
            ServiceQueue& queue = w.cta->sm->partitions[w.index % 4].tensor;
            gpu.tensor_busy += cycles(gpu, mma_sync_cycles);
            gpu.has_multiplied = true;
            const Picoseconds done = queue.take(t.time, cycles(gpu, mma_sync_cycles));
            OpCost results = cost;
            results.num_results = 4;
            add_pending(w, op, results,
                        done + cycles(gpu, mma_sync_latency_cycles - mma_sync_cycles),
                        Spent::tensor);
            break;
        }
        case OpKind::wgmma: {
            t.extra += uint32_t(chip.mma_issue_cycles);
            // For all but one cycle of it the scheduler issues nothing else; of these, `work` has
            // the product's own.
            if (cost.has_registers)
                t.work += uint64_t(4 * std::max(0.0, chip.mma_register_cycles - 2));
            flush(w);
            SmTime& sm = *w.cta->sm;
            const double n = cost.size, rate = chip.mma_cycles_per_n * n;
            const double bytes = 32 * n + (cost.has_registers ? 0 : 2048);
            const double length =
                std::max(rate, cost.has_registers ? chip.mma_register_cycles
                                                  : chip.mma_shared_floor_cycles + n / 4);
            const Picoseconds taken = cycles(gpu, length);
            gpu.tensor_busy += cycles(gpu, rate);
            gpu.has_multiplied = true;
            Picoseconds done = sm.partitions[w.index % 4].tensor.take(t.time, taken);
            // Of a warpgroup each warp brings a quarter of what the four read together.
            done = std::max(
                done,
                sm.shared_port.take(t.time, cycles(gpu, bytes / 4 / chip.shared_bytes_per_cycle)));
            t.mma_end = std::max(
                t.mma_end,
                done + cycles(gpu, chip.mma_latency_cycles + chip.mma_latency_cycles_per_n * n));
            break;
        }
        case OpKind::wgmma_commit:
            t.mma_groups.push_back(t.mma_end);
            break;
        case OpKind::wgmma_wait:
            flush(w);
            while (t.mma_groups.size() > op.aux) {
                advance(w, t.mma_groups.front(), Spent::tensor);
                t.mma_groups.pop_front();
            }
            break;
        case OpKind::tensor_load: {
            flush(w);
            const double bytes = 128.0 * op.num_operands;
            t.mma_end = std::max(
                t.mma_end,
                t.time + cycles(gpu, chip.tmem_latency_cycles + bytes / chip.tmem_bytes_per_cycle));
            break;
        }
        case OpKind::tensor_wait:
            flush(w);
            advance(w, t.mma_end, Spent::tensor);
            break;
        case OpKind::set_registers:
            if (op.aux >> 16) t.extra += uint32_t(chip.setmaxnreg_cycles);
            break;
    }
    return true;
}

void Timing::after(Warp& w, const Op&, const OpCost& cost, Flow flow) {
    if (flow == Flow::blocked) return;
    WarpTime& t = *w.timed;
    switch (cost.kind) {
        case OpKind::mbarrier_wait:
            t.extra += uint32_t(chip.mbarrier_test_cycles);
            break;
        case OpKind::barrier:
            t.extra +=
                uint32_t(chip.barrier_cycles + chip.barrier_cycles_per_warp * w.grid->num_warps);
            break;
        case OpKind::branch:
            if (flow == Flow::jumped) t.extra += uint32_t(chip.branch_cycles);
            break;
        case OpKind::cluster_wait:
            t.extra += uint32_t(chip.cluster_barrier_cycles);
            break;
        default:
            break;
    }
}

// ---- memory

// When a memory barrier that begins now ends. One of the GPU leaves when all writes of the warp are
// known to have arrived. One of the system takes its time while it waits for them.
Picoseconds Timing::fenced(Warp& w, double system_ns) {
    flush(w);
    const WarpTime& t = *w.timed;
    if (system_ns) return std::max(t.time + ns(system_ns), t.drained);
    return std::max(t.time, t.drained) + cycles(*w.cta->gpu, chip.memory_barrier_cycles);
}

DevicePlace Timing::home_of(const Warp& w, uint64_t address) {
    const Region* region = w.grid->rank->memory.find(address);
    if (!region) return {*w.cta->gpu, address, false};
    const auto there = [address](const Region& r) {
        return r.device_address + (address - r.address);
    };
    if (region->mirror) {
        const Mirror& mirror = *region->mirror;
        const Region* own = w.grid->rank->memory.find(mirror.onto);
        const uint64_t offset = mirror.offset(address - region->address);
        return {*w.cta->gpu, (own ? own : region)->device_address + offset, true};
    }
    if (region->home < 0) return {*w.cta->gpu, there(*region), false};
    const auto home = uint32_t(region->home);
    const Region* own = rank_of_(home).memory.find(address);
    return {gpu_of(home), there(own ? *own : *region), home != w.cta->gpu->index};
}

double Timing::l2_latency(const Warp& w, uint64_t address) const {
    const uint64_t half = (address >> 12) * 0x9E3779B97F4A7C15ull >> 63;
    return half == (w.cta->index & 1) ? chip.l2_near_latency_cycles : chip.l2_far_latency_cycles;
}

// When L2 has had these bytes; reads of what it has not go through memory.
Picoseconds Timing::l2(GpuTime& gpu, uint64_t address, uint64_t bytes, Picoseconds at,
                       bool writes) {
    Picoseconds end = gpu.l2.take(at, transfer(double(bytes), chip.l2_gb_per_s));
    gpu.l2_bytes += double(bytes);
    static thread_local std::vector<CacheTags::Line*> missed;
    missed.clear();
    uint64_t missed_bytes = 0, written_bytes = 0;
    const uint64_t first = address / line_bytes, behind = (address + bytes - 1) / line_bytes + 1;
    for (uint64_t line = first; line < behind; ++line) {
        bool evicts_dirty;
        CacheTags::Line& place = gpu.tags.find(line, evicts_dirty);
        if (evicts_dirty) written_bytes += line_bytes;
        const uint64_t begin = std::max(address, line * line_bytes) % line_bytes / sector_bytes,
                       stop = (std::min(address + bytes, (line + 1) * line_bytes) - 1) %
                              line_bytes / sector_bytes;
        const uint32_t asked = (2u << stop) - (1u << begin), lacking = asked & ~place.sectors;
        place.sectors |= uint8_t(asked);
        if (writes) {
            place.dirty = true;
            continue;
        }
        end = std::max(end, place.ready);
        if (!lacking) continue;
        missed_bytes += uint64_t(__builtin_popcount(lacking)) * sector_bytes;
        missed.push_back(&place);
    }
    if (missed_bytes || written_bytes) {
        const double moved = double(missed_bytes + written_bytes);
        gpu.hbm_bytes += moved;
        const Picoseconds done =
            gpu.hbm.take(at, transfer(moved, chip.hbm_gb_per_s)) + ns(chip.hbm_latency_ns);
        if (missed_bytes) {
            for (CacheTags::Line* place : missed) place->ready = done;
            end = std::max(end, done);
        }
    }
    return end;
}

// When `bytes` from memory have come to the SM's door, without the latency of L2 on the way.
Picoseconds Timing::from_memory(GpuTime& gpu, SmTime& sm, const DevicePlace& place, uint64_t bytes,
                                Picoseconds at) {
    GpuTime& home = place.gpu;
    const uint64_t address = place.address;
    Picoseconds end = sm.ingress.take(at, cycles(gpu, double(bytes) / chip.sm_bytes_per_cycle));
    if (!place.is_remote) return std::max(end, l2(gpu, address, bytes, at, false));
    const Picoseconds there = at + ns(chip.link_latency_ns);
    const Picoseconds taken = transfer(double(bytes), chip.link_gb_per_s);
    end = std::max({end, l2(home, address, bytes, there, false), home.link_out.take(there, taken),
                    gpu.link_in.take(there, taken)});
    gpu.link_bytes += double(bytes);
    return end + ns(chip.link_latency_ns);
}

// When a run of stored bytes is known to have arrived.
Picoseconds Timing::to_memory(Warp& w, const DevicePlace& place, uint64_t bytes, Picoseconds at) {
    GpuTime &gpu = *w.cta->gpu, &home = place.gpu;
    const uint64_t address = place.address;
    if (!place.is_remote)
        return l2(gpu, address, bytes, at, true) + cycles(gpu, l2_latency(w, address));
    const double wire = double(bytes) + chip.link_run_overhead_bytes;
    const Picoseconds taken = transfer(wire, chip.link_gb_per_s);
    gpu.link_bytes += double(bytes);
    const Picoseconds sent = gpu.link_out.take(at, taken);
    const Picoseconds come =
        std::max(sent, home.link_in.take(at + ns(chip.link_latency_ns), taken));
    return l2(home, address, bytes, come, true) + ns(chip.link_latency_ns);
}

bool Timing::access(Warp& w, const Op& op, const OpCost& cost) {
    const Operand& address = op.operands[cost.address];
    if (!w.exec) return true;
    auto space = Space(cost.space);
    uint64_t at[warp_size];
    int count = 0;
    w.for_each_lane([&](int lane) { at[count++] = w.address(address, lane); });
    if (space == Space::generic) {
        const uint64_t window = at[0] & window_mask;
        if (window == shared_window) space = Space::shared_cluster;
        if (window == local_window) space = Space::local;
    }
    GpuTime& gpu = *w.cta->gpu;
    SmTime& sm = *w.cta->sm;
    WarpTime& t = *w.timed;
    const bool is_uniform = address.base == Base::constants;
    if (is_uniform) count = 1;
    if (space == Space::local) {
        if (cost.num_results)
            add_pending(w, op, cost, time_of(w) + cycles(gpu, local_latency_cycles), Spent::memory);
        return true;
    }
    if (space == Space::shared || space == Space::shared_cluster) {
        // Wavefronts: 32 banks of 4 bytes; wide accesses go in parts of the warp.
        const uint32_t words = std::max<uint32_t>(1, cost.size / 4);
        const int lanes_at_once = std::max<int>(1, 32 / int(words));
        uint32_t wavefronts = 0;
        for (int begin = 0; begin < count; begin += lanes_at_once) {
            uint32_t load[32] = {}, most = 0;
            uint64_t seen[32];
            int num_seen = 0;
            for (int i = begin; i < std::min(count, begin + lanes_at_once); ++i) {
                bool known = false;
                for (int k = num_seen - 1; k >= std::max(0, num_seen - 4) && !known; --k)
                    known = seen[k] == at[i] / 4;
                if (known) continue;
                seen[num_seen++] = at[i] / 4;
                for (uint32_t word = 0; word < words; ++word)
                    most = std::max(most, ++load[(at[i] / 4 + word) % 32]);
            }
            wavefronts += most;
        }
        const bool is_remote = (uint32_t(at[0]) >> shared_rank_shift) != w.cta->cluster_rank;
        const Picoseconds now_here = time_of(w);
        const Picoseconds served = sm.shared_port.take(
            now_here, cycles(gpu, wavefronts * 128.0 / chip.shared_bytes_per_cycle));
        const double latency = is_remote           ? chip.cluster_shared_latency_cycles
                               : cost.is_scheduled ? 0
                                                   : chip.shared_latency_cycles;
        if (cost.num_results)
            add_pending(w, op, cost, served + cycles(gpu, latency), Spent::memory);
        else if (is_remote)
            t.drained = std::max(t.drained, served + cycles(gpu, latency));
        return true;
    }
    flush(w);
    // Lines of memory, and runs of neighbouring bytes.
    std::sort(at, at + count);
    const bool reads = cost.kind == OpKind::load;
    if (reads && is_uniform && w.grid->rank->memory.find(at[0]) == nullptr) return true;
    // Parameters and constants come from a cache of the SM.
    const auto parameters = reinterpret_cast<uint64_t>(w.grid->parameters);
    if (reads && at[0] - parameters < w.grid->parameter_storage.size()) return true;
    // What lies in one region goes one way; in an order that does not hang on the host's addresses.
    const RegionTable& regions = w.grid->rank->memory;
    const Region* region = regions.find(at[0]);
    if (region && at[count - 1] - region->address >= region->size) {
        const auto device_address = [&](uint64_t address) {
            const Region* r = regions.find(address);
            return r ? r->device_address + (address - r->address) : address;
        };
        std::sort(at, at + count,
                  [&](uint64_t a, uint64_t b) { return device_address(a) < device_address(b); });
    }
    // Whatever this rank does behind its own ordered write to the same place finds it done.
    const bool is_late = cost.is_ordered && !cost.num_results;
    if (!is_late && !late_writes_.empty()) {
        Picoseconds arrival = 0;
        for (int i = 0; i < count; ++i)
            arrival = std::max(arrival, arrival_of(w, at[i], cost.size));
        if (!wait_and_resume(w, arrival, Spent::memory, WarpTime::Resumes::behind_fence))
            return false;
    }
    const Picoseconds start = t.time;
    Picoseconds ready = start, arrival = start;
    for (int begin = 0; begin < count;) {
        region = regions.find(at[begin]);
        int stop = begin + 1;
        while (stop < count && (!region || at[stop] - region->address < region->size)) ++stop;
        access_region(w, cost, {at + begin, size_t(stop - begin)}, start, ready, arrival);
        begin = stop;
    }
    if (cost.num_results)
        add_pending(w, op, cost, ready, Spent::memory);
    else
        t.drained = std::max(t.drained, ready);
    if (!is_late)
        return wait_and_resume(w, arrival, Spent::memory, WarpTime::Resumes::behind_access);
    if (arrival > start) t.arrival = arrival;
    return true;
}

// ready: when the warp has the results, or its stores are known to have arrived. arrival: when what
// others may look at has come to the other end of a link. A write goes there by itself. An update
// with a result is done there, so its warp waits until then.
void Timing::access_region(Warp& w, const OpCost& cost, std::span<uint64_t> at, Picoseconds start,
                           Picoseconds& ready, Picoseconds& arrival) {
    GpuTime& gpu = *w.cta->gpu;
    const DevicePlace first = home_of(w, at[0]);
    GpuTime& home = first.gpu;
    const uint64_t shift = first.address - at[0], size = cost.size;
    for (uint64_t& address : at) address += shift;
    const double latency = l2_latency(w, at[0]);
    if (cost.kind == OpKind::atomic || cost.kind == OpKind::reduction) {
        const Picoseconds way =
            (first.is_remote ? ns(chip.link_latency_ns) : 0) + cycles(gpu, latency / 2);
        Picoseconds done = start + way;
        for (uint64_t address : at)
            done =
                std::max(done, home.atomics[(address >> 2) * 0x9E3779B1u % num_atomic_queues].take(
                                   start + way, cycles(gpu, chip.atomic_cycles)));
        ready = std::max(ready, done + way);
        if (first.is_remote) arrival = std::max(arrival, done);
        return;
    }
    const bool reads = cost.kind == OpKind::load;
    Picoseconds end = start;
    for (size_t i = 0; i < at.size();) {
        const uint64_t begin = at[i];
        uint64_t stop = at[i] + size;
        for (++i; i < at.size() && at[i] <= stop && at[i] - begin < line_bytes; ++i)
            stop = std::max(stop, at[i] + size);
        const DevicePlace place = {home, begin, first.is_remote};
        end = std::max(end, reads ? from_memory(gpu, *w.cta->sm, place, stop - begin, start)
                                  : to_memory(w, place, stop - begin, start));
    }
    ready = std::max(ready, reads ? end + cycles(gpu, latency) : end);
    if (!reads && cost.is_ordered && first.is_remote)
        arrival = std::max(arrival, start + ns(chip.link_latency_ns));
}

bool Timing::is_late(Warp& w, uint64_t address) {
    return w.timed->arrival && home_of(w, address).is_remote;
}

void Timing::write_later(Warp& w, uint64_t address, std::function<bool()> write) {
    const auto key = std::pair(w.grid->rank->index, address / late_bytes);
    WarpTime& t = *w.timed;
    Picoseconds& arrival = late_writes_[key];
    arrival = std::max(arrival, t.arrival);
    t.last_arrival = std::max(t.last_arrival, arrival);
    const auto arrive = [this, key, write = std::move(write), machine = w.machine] {
        if (write()) machine->note_progress();
        const auto found = late_writes_.find(key);
        if (found != late_writes_.end() && found->second <= now) late_writes_.erase(found);
    };
    enqueue({"remote write", where_of(w), arrive, true}, 0, arrival);
}

// When the ordered writes of `w`'s rank to these bytes have arrived; 0: they have.
Picoseconds Timing::arrival_of(const Warp& w, uint64_t address, uint64_t bytes) const {
    Picoseconds arrival = 0;
    const uint32_t rank = w.grid->rank->index;
    const std::pair last(rank, (address + bytes - 1) / late_bytes);
    for (auto write = late_writes_.lower_bound({rank, address / late_bytes});
         write != late_writes_.end() && write->first <= last; ++write)
        arrival = std::max(arrival, write->second);
    return arrival;
}

// ---- asynchronous operations

Picoseconds Timing::soon(Warp& w, double count) {
    return here(w) + cycles(*w.cta->gpu, count);
}

void Timing::load(Warp& w, const std::vector<std::pair<uint64_t, uint32_t>>& rows, uint64_t bytes,
                  AsyncOperation operation) {
    GpuTime& gpu = *w.cta->gpu;
    SmTime& sm = *w.cta->sm;
    const Picoseconds at = sm.tma.take(here(w), cycles(gpu, chip.tma_issue_cycles));
    PendingCopy copy{{}, bytes, at, std::make_shared<AsyncOperation>(std::move(operation))};
    for (size_t i = 0; i < rows.size();) {
        const uint64_t begin = rows[i].first;
        uint64_t stop = begin + rows[i].second;
        for (++i; i < rows.size() && rows[i].first == stop; ++i) stop += rows[i].second;
        if (stop == begin) continue;
        const DevicePlace place = home_of(w, begin);
        copy.ready = std::max(copy.ready, arrival_of(w, begin, stop - begin));
        copy.runs.push_back({&place.gpu, place.address, stop - begin, place.is_remote});
    }
    sm.copies.push_back(std::move(copy));
    start_copies(gpu, sm, at);
}

// An SM asks for its copies in their order, for so many bytes at once.
void Timing::start_copies(GpuTime& gpu, SmTime& sm, Picoseconds at) {
    const auto most = uint64_t(chip.tma_in_flight_kib * 1024);
    while (!sm.copies.empty() &&
           (!sm.bytes_in_flight || sm.bytes_in_flight + sm.copies.front().bytes <= most)) {
        const PendingCopy copy = std::move(sm.copies.front());
        sm.copies.pop_front();
        const Picoseconds start = std::max(at, copy.ready);
        Picoseconds end = sm.shared_port.take(
            start, cycles(gpu, double(copy.bytes) / chip.shared_bytes_per_cycle));
        for (const PendingCopy::Run& run : copy.runs)
            end = std::max(end, from_memory(gpu, sm, {*run.home, run.address, run.is_remote},
                                            run.bytes, start));
        sm.bytes_in_flight += copy.bytes;
        const auto finish = [this, &gpu, &sm, operation = copy.operation, bytes = copy.bytes] {
            sm.bytes_in_flight -= bytes;
            start_copies(gpu, sm, now);
            operation->complete();
        };
        enqueue({copy.operation->kind, copy.operation->where, finish}, 0,
                end + cycles(gpu, chip.tma_latency_cycles));
    }
}

Picoseconds Timing::shared_copy(Warp& w, uint64_t bytes) {
    GpuTime& gpu = *w.cta->gpu;
    SmTime& sm = *w.cta->sm;
    const Picoseconds at = sm.tma.take(here(w), cycles(gpu, chip.tma_issue_cycles));
    return sm.shared_port.take(at, cycles(gpu, double(bytes) / chip.shared_bytes_per_cycle)) +
           cycles(gpu, chip.cluster_shared_latency_cycles);
}

Picoseconds Timing::bulk_store_read(Warp& w, uint64_t bytes) {
    return shared_copy(w, bytes);
}

Picoseconds Timing::bulk_store_write(Warp& w, uint64_t address, uint64_t bytes, Picoseconds read) {
    return to_memory(w, home_of(w, address), bytes, read);
}

Picoseconds Timing::thread_copies(Warp& w,
                                  const std::vector<std::pair<uint64_t, uint32_t>>& pieces) {
    GpuTime& gpu = *w.cta->gpu;
    const Picoseconds at = here(w);
    Picoseconds end = at;
    for (size_t i = 0; i < pieces.size();) {
        const uint64_t begin = pieces[i].first;
        uint64_t stop = begin + pieces[i].second;
        for (++i; i < pieces.size() && pieces[i].first == stop; ++i) stop += pieces[i].second;
        if (stop == begin) continue;
        end = std::max({end, from_memory(gpu, *w.cta->sm, home_of(w, begin), stop - begin, at),
                        arrival_of(w, begin, stop - begin)});
    }
    return end + cycles(gpu, chip.l2_near_latency_cycles);
}

// tcgen05.mma of `num_ctas` CTAs: m rows in all, n columns, 32 bytes of K.
Picoseconds Timing::tensor_mma(Warp& w, uint32_t m, uint32_t n, int num_ctas, bool a_in_shared) {
    GpuTime& gpu = *w.cta->gpu;
    const double rows = double(m) / num_ctas;
    const double rate = chip.mma_cycles_per_n * n * (num_ctas == 2 ? rows / 128 : 1);
    const double bytes = (a_in_shared ? rows * 32 : 0) + 32.0 * n / num_ctas;
    const double length = std::max(rate, bytes / chip.shared_bytes_per_cycle);
    gpu.has_multiplied = true;
    gpu.tensor_busy += cycles(gpu, rate) * 4 * num_ctas;
    const Picoseconds at = here(w);
    Picoseconds end = at;
    for (Cta* cta : w.cta->cluster->ctas) {
        if (cta != w.cta && (num_ctas == 1 || (cta->cluster_rank ^ w.cta->cluster_rank) != 1))
            continue;
        end = std::max(end, cta->sm->tensor.take(at, cycles(gpu, length)));
        cta->sm->shared_port.take(at, cycles(gpu, bytes / chip.shared_bytes_per_cycle));
    }
    return end + cycles(gpu, chip.mma_latency_cycles + chip.mma_latency_cycles_per_n * n);
}

Picoseconds Timing::tensor_copy(Warp& w) {
    return w.cta->sm->tensor_port.take(here(w), cycles(*w.cta->gpu, chip.tmem_copy_cycles));
}

}  // namespace deep_moe::emulator
