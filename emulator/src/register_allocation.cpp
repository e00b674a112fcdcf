// Where each virtual register lies in a warp's register file: liveness over the control flow graph,
// then a linear scan. Lanes are written under masks and may be at different places, but each lane
// follows the graph, so its liveness is enough for all of them.
#include <algorithm>

#include "program_builder.h"

namespace deep_moe::emulator {

namespace {

// Basic blocks of the ops [begin, end).
struct FlowGraph {
    uint32_t begin, end;
    std::vector<uint32_t> firsts;    // op of each block
    std::vector<uint32_t> block_of;  // by op - begin
    std::vector<std::vector<uint32_t>> successors;

    FlowGraph(const Program& program, uint32_t begin, uint32_t end)
        : begin(begin), end(end), block_of(end - begin) {
        for (uint32_t i = begin; i < end; ++i) {
            if (program.ops[i].leader) firsts.push_back(i);
            block_of[i - begin] = uint32_t(firsts.size() - 1);
        }
        successors.resize(firsts.size());
        for (size_t b = 0; b < firsts.size(); ++b) {
            const Op& op = program.ops[last(b)];
            auto add = [&](uint32_t target) { successors[b].push_back(block_of[target - begin]); };
            if (op.is_branch) add(op.target);
            if (op.is_table_branch)
                for (uint32_t target : program.branch_tables[op.aux]) add(target);
            if ((!op.never_falls_through || op.guard != Guard::always) && last(b) + 1 < end)
                add(last(b) + 1);
        }
    }
    size_t num_blocks() const { return firsts.size(); }
    uint32_t last(size_t block) const {  // op
        return (block + 1 < firsts.size() ? firsts[block + 1] : end) - 1;
    }
};

// The registers that a function's ops touch, by dense numbers.
struct Accesses {
    std::vector<int> ids;                         // of the program, by number
    std::vector<std::vector<int>> reads, writes;  // numbers, by op - begin

    Accesses(const std::vector<RegisterTraffic>& traffic, uint32_t begin, uint32_t end)
        : reads(end - begin), writes(end - begin) {
        std::map<int, int> numbers;
        auto number = [&](int id) {
            auto [found, is_new] = numbers.try_emplace(id, int(ids.size()));
            if (is_new) ids.push_back(id);
            return found->second;
        };
        for (uint32_t i = begin; i < end; ++i) {
            const RegisterTraffic& t = traffic[i];
            for (int id : t.reads)
                if (id >= 0) reads[i - begin].push_back(number(id));
            if (t.guard >= 0) reads[i - begin].push_back(number(t.guard));
            for (int id : t.writes)
                if (id >= 0) writes[i - begin].push_back(number(id));
        }
    }
};

class Bits {
 public:
    explicit Bits(size_t num_words = 0) : words(num_words) {}
    bool get(int i) const { return words[size_t(i) / 64] >> (i % 64) & 1; }
    void set(int i) { words[size_t(i) / 64] |= 1ull << (i % 64); }
    template <class F>
    void for_each(F f) const {
        for (size_t w = 0; w < words.size(); ++w)
            for (uint64_t m = words[w]; m; m &= m - 1) f(int(w * 64) + __builtin_ctzll(m));
    }
    std::vector<uint64_t> words;
};

// Registers that are live at the start and at the end of each block.
struct Liveness {
    std::vector<Bits> in, out;

    Liveness(const Program& program, const FlowGraph& graph, const Accesses& accesses) {
        const size_t num_blocks = graph.num_blocks(), num_words = (accesses.ids.size() + 63) / 64;
        std::vector<Bits> use(num_blocks, Bits(num_words)), kill = use;
        in = out = use;
        for (uint32_t i = graph.begin; i < graph.end; ++i) {
            const uint32_t at = i - graph.begin, b = graph.block_of[at];
            for (int n : accesses.reads[at])
                if (!kill[b].get(n)) use[b].set(n);
            if (program.ops[i].guard == Guard::always)
                for (int n : accesses.writes[at]) kill[b].set(n);
        }
        for (bool changed = true; changed;) {
            changed = false;
            for (size_t b = num_blocks; b-- > 0;) {
                for (size_t w = 0; w < num_words; ++w) {
                    uint64_t live_out = 0;
                    for (uint32_t s : graph.successors[b]) live_out |= in[s].words[w];
                    const uint64_t live_in = use[b].words[w] | (live_out & ~kill[b].words[w]);
                    if (live_out != out[b].words[w] || live_in != in[b].words[w]) changed = true;
                    out[b].words[w] = live_out;
                    in[b].words[w] = live_in;
                }
            }
        }
    }
};

// From the first op at which a register matters to the last one.
struct Interval {
    uint32_t first = UINT32_MAX, last = 0;
    void extend(uint32_t at) {
        first = std::min(first, at);
        last = std::max(last, at);
    }
};

std::vector<Interval> intervals_of(const FlowGraph& graph, const Accesses& accesses,
                                   const Liveness& live) {
    std::vector<Interval> intervals(accesses.ids.size());
    for (size_t b = 0; b < graph.num_blocks(); ++b) {
        live.in[b].for_each([&](int n) { intervals[size_t(n)].extend(graph.firsts[b]); });
        live.out[b].for_each([&](int n) { intervals[size_t(n)].extend(graph.last(b)); });
    }
    for (uint32_t i = graph.begin; i < graph.end; ++i) {
        for (int n : accesses.reads[i - graph.begin]) intervals[size_t(n)].extend(i);
        for (int n : accesses.writes[i - graph.begin]) intervals[size_t(n)].extend(i);
    }
    return intervals;
}

}  // namespace

// Registers of different functions never share.
void ProgramBuilder::allocate_registers(const FunctionRange& range) {
    const FlowGraph graph(*program_, range.begin, range.end);
    const Accesses accesses(traffic_, range.begin, range.end);
    const Liveness live(*program_, graph, accesses);
    const std::vector<Interval> intervals = intervals_of(graph, accesses, live);
    if (graph.num_blocks())
        live.in[0].for_each([&](int n) { live_at_entry_.push_back(accesses.ids[size_t(n)]); });

    std::vector<size_t> order;
    for (size_t n = 0; n < intervals.size(); ++n)
        if (intervals[n].first != UINT32_MAX) order.push_back(n);
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return intervals[a].first < intervals[b].first; });
    const auto virtual_register = [&](size_t n) -> VirtualRegister& {
        return registers_[size_t(accesses.ids[n])];
    };
    std::map<int, std::vector<uint32_t>> free;  // offsets by bits
    std::multimap<uint32_t, size_t> active;     // by last op
    std::map<uint32_t, uint8_t> places;
    for (size_t n : order) {
        while (!active.empty() && active.begin()->first < intervals[n].first) {
            const VirtualRegister& dead = virtual_register(active.begin()->second);
            free[dead.bits].push_back(dead.offset);
            active.erase(active.begin());
        }
        VirtualRegister& r = virtual_register(n);
        auto& pool = free[r.bits];
        if (pool.empty() && r.bits == 1) {  // one cache line of predicates at a time
            for (int k = 15; k >= 0; --k) pool.push_back(high_water_ + uint32_t(k) * 4);
            high_water_ += 64;
        } else if (pool.empty()) {
            pool.push_back(high_water_);
            high_water_ += storage_bytes(r.bits);
        }
        r.offset = pool.back();
        pool.pop_back();
        active.emplace(intervals[n].last, n);
        places[r.offset] = r.bits;
    }
    auto& kept = program_->callables[callables_.at(range.function->name)].registers;
    for (auto [offset, bits] : places) kept.push_back({offset, bits});
}

}  // namespace deep_moe::emulator
