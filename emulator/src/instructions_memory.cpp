// Loads, stores, atomics and reductions, prefetches, bulk zero fill.
#include <algorithm>

#include "access_order.h"
#include "float_types.h"
#include "lanes.h"
#include "race_detector.h"
#include "reductions.h"
#include "timing.h"

namespace deep_moe::emulator {

namespace {

// aux of loads and stores
constexpr uint64_t space_bits = 0xf;
constexpr uint64_t uniform_address = 1 << 5;
constexpr int count_shift = 8;

void note_poll(Warp& w, Space space, uint64_t address, uint32_t bytes) {
    const uint64_t window = space == Space::generic ? address & window_mask : 0;
    if (space == Space::local || window == local_window) return;
    if (space == Space::shared || space == Space::shared_cluster || window == shared_window) {
        const Cta& owner = *w.cta->cluster->ctas[uint32_t(address) >> shared_rank_shift];
        w.note_poll(
            {Awaited::Kind::shared_memory, &owner, uint32_t(address) & shared_offset_mask, bytes});
    } else {
        w.note_poll({Awaited::Kind::memory, w.cta, address, bytes});
    }
}

// The common cases of Warp::resolve without calls.
inline std::byte* fast_resolve(Warp& w, Space space, uint64_t address, uint32_t bytes,
                               Access access, int lane) {
    if (space == Space::generic || space == Space::global || space == Space::constant ||
        space == Space::param) {
        if (const Region* r = w.last_region()) {
            const uint64_t at = address - r->address;
            if (at < r->size && bytes <= r->size - at && (access == Access::read || r->writable) &&
                !(address & (bytes - 1)))
                return r->host(address);
        }
    } else if (space == Space::shared || space == Space::shared_cluster) {
        uint32_t offset = uint32_t(address) & shared_offset_mask;
        Cta& cta = *w.cta;
        if ((address >> shared_rank_shift) == cta.cluster_rank && offset >= shared_base &&
            offset < cta.shared_end && bytes <= cta.shared_end - offset &&
            !(offset & (bytes - 1))) {
            uint8_t* shadow = cta.shadow.data() + offset;
            bool written = true, has_barrier = false;
            for (uint32_t i = 0; i < bytes; ++i) {
                written &= shadow[i] != 0;
                has_barrier |= shadow[i] == 2;
            }
            if (access == Access::write && !has_barrier) {
                std::memset(shadow, 1, bytes);
                return cta.shared + offset;
            }
            if (access != Access::write && (written || !cta.machine->checks) && !has_barrier)
                return cta.shared + offset;
        }
    }
    return w.resolve(space, address, bytes, access, lane);
}

// Where the lanes' accesses of `bytes` each lie one behind the other.
struct Row {
    std::byte* at = nullptr;  // on the host; null: they do not, or something is to be looked at
    Space space = Space::global;
    uint64_t address = 0;
    bool is_watched = true;  // by the race detector
};

// The row of a plain access of the whole warp, whose checks that lanes share are done: a region
// that has all of it, shared memory that is written and holds no mbarrier.
Row find_row(Warp& w, const Operand& operand, Space space, uint32_t bytes, Access access) {
    if (w.exec != full_mask || bytes % 4 || space == Space::local) return {};
    const uint64_t first = w.address(operand, 0);
    if (first & (bytes - 1)) return {};
    const auto is_row = [&](const auto* addresses) {
        using A = std::remove_cvref_t<decltype(*addresses)>;
        A differences = 0;
        for (int i = 0; i < warp_size; ++i)
            differences |= addresses[i] ^ A(addresses[0] + A(i) * bytes);
        return differences == 0;
    };
    const std::byte* addresses = w.data(operand);
    const bool in_row = operand.bits == 64 ? is_row(reinterpret_cast<const uint64_t*>(addresses))
                                           : is_row(reinterpret_cast<const uint32_t*>(addresses));
    if (!in_row) return {};
    const uint32_t total = bytes * warp_size;
    uint64_t window = space == Space::generic ? first & window_mask : 0;
    if (space == Space::shared || space == Space::shared_cluster) window = shared_window;
    if (window == shared_window) {
        const uint64_t address = space == Space::generic ? first & ~window_mask : first;
        const uint32_t offset = uint32_t(address) & shared_offset_mask;
        Cta& cta = *w.cta;
        if (address >> shared_rank_shift != cta.cluster_rank || offset < w.program->shared_begin ||
            offset >= cta.shared_end || total > cta.shared_end - offset)
            return {};
        uint8_t* shadow = cta.shadow.data() + offset;
        if (access == Access::write) {
            if (std::memchr(shadow, 2, total)) return {};
            std::memset(shadow, 1, total);
        } else {
            constexpr uint64_t all_written = 0x0101010101010101ull;
            uint64_t differences = 0;
            for (uint32_t i = 0; i < total; i += 8) {
                uint64_t state;
                std::memcpy(&state, shadow + i, 8);
                differences |= state ^ all_written;
            }
            if (differences) return {};
        }
        return {cta.shared + offset, Space::shared, offset};
    }
    if (window) return {};
    const Region* r = w.find_region(first);
    if (!r || r->mirror || total > r->size - (first - r->address) ||
        (access == Access::write && !r->writable))
        return {};
    return {r->host(first), Space::global, first, r->writable};
}

template <class T>
T load_value(const std::byte* from, bool is_strong) {
    T value;
    if (is_strong && sizeof(T) <= 8) {
        __atomic_load(reinterpret_cast<const T*>(from), &value, __ATOMIC_ACQUIRE);
    } else {
        std::memcpy(&value, from, sizeof(T));
        if (is_strong) __atomic_thread_fence(__ATOMIC_ACQUIRE);
    }
    return value;
}

// operands: N destinations, address
template <class T, int N>
Flow load(Warp& w, const Op& op) {
    Space space = Space(op.aux & space_bits);
    const Operand& address = op.operands[N];
    bool is_strong = op.aux & strong_bit;
    if (is_strong) ++w.polls;
    const uint64_t polled = w.address(address, w.first_lane());  // the load may overwrite it
    if (op.aux & uniform_address) {
        int lane = w.first_lane();
        const std::byte* from =
            fast_resolve(w, space, w.address(address, lane), sizeof(T) * N, Access::read, lane);
        if (w.machine->races)
            note_access(w, op, space, w.address(address, lane), sizeof(T) * N, from, Access::read,
                        lane, is_strong);
        for (int k = 0; k < N; ++k) {
            T value = load_value<T>(from + k * sizeof(T), is_strong);
            auto d = w.out<T>(op.operands[k]);
            w.for_each_lane([&](int i) { d.set(i, value); });
        }
    } else if (const Row row = is_strong || op.aux & noncoherent
                                   ? Row{}
                                   : find_row(w, address, space, sizeof(T) * N, Access::read);
               row.at) {
        if (w.machine->races && row.is_watched)
            w.machine->races->row_access(w, row.space, row.address, sizeof(T) * N);
        for (int k = 0; k < N; ++k) {
            auto d = w.out<T>(op.operands[k]);
            const std::byte* from = row.at + k * sizeof(T);
            for (int i = 0; i < warp_size; ++i, from += sizeof(T) * N) {
                T value;
                std::memcpy(&value, from, sizeof value);
                d.set(i, value);
            }
        }
    } else {
        T values[N][warp_size];
        w.for_each_lane([&](int i) {
            const std::byte* from =
                fast_resolve(w, space, w.address(address, i), sizeof(T) * N, Access::read, i);
            if (w.machine->races)
                note_access(w, op, space, w.address(address, i), sizeof(T) * N, from, Access::read,
                            i, is_strong);
            for (int k = 0; k < N; ++k)
                values[k][i] = load_value<T>(from + k * sizeof(T), is_strong);
        });
        for (int k = 0; k < N; ++k) {
            auto d = w.out<T>(op.operands[k]);
            w.for_each_lane([&](int i) { d.set(i, values[k][i]); });
        }
    }
    if (!is_strong) return Flow::next;
    note_poll(w, space, polled, sizeof(T) * N);
    return Flow::yield;
}

// Two lanes of one plain store may write to one place only the same value: which one stays is
// nowhere said. places: where the lanes' values were written.
template <class T, int N>
void check_lanes_agree(Warp& w, const Op& op, Space space, std::byte* const* places) {
    constexpr uint32_t bytes = sizeof(T) * N;
    int lanes[warp_size], num_lanes = 0;
    bool is_ascending = true;
    w.for_each_lane([&](int i) {
        if (num_lanes) is_ascending &= places[i] >= places[lanes[num_lanes - 1]] + bytes;
        lanes[num_lanes++] = i;
    });
    if (is_ascending) return;  // as nearly all stores are
    std::sort(lanes, lanes + num_lanes,
              [&](int a, int b) { return std::pair(places[a], a) < std::pair(places[b], b); });
    for (int n = 1; n < num_lanes; ++n) {
        const int a = lanes[n - 1], b = lanes[n];
        if (places[a] != places[b]) continue;  // both are aligned, so they do not overlap
        for (int k = 0; k < N; ++k) {
            const auto values = w.in<T>(op.operands[k + 1]);
            if (values[a] == values[b]) continue;
            const uint64_t address = w.address(op.operands[0], a) + k * sizeof(T);
            return w.machine->races->lanes_differ(w, space, address, a, b);
        }
    }
}

// Whether that changed anything.
template <class T, int N>
bool write_values(std::byte* to, const std::array<T, N>& values, bool is_strong) {
    bool changed = false;
    for (int k = 0; k < N; ++k) {
        T value = values[k], old;
        std::byte* at = to + k * sizeof(T);
        std::memcpy(&old, at, sizeof(T));
        changed |= old != value;
        if (is_strong && sizeof(T) <= 8)
            __atomic_store(reinterpret_cast<T*>(at), &value, __ATOMIC_RELEASE);
        else {
            if (is_strong) __atomic_thread_fence(__ATOMIC_RELEASE);
            std::memcpy(at, &value, sizeof(T));
        }
    }
    return changed;
}

// Writes at once, or leaves it to the simulated clock. write: says whether it changed anything,
// which is what comes back.
template <class F>
bool write_in_time(Warp& w, uint64_t address, const F& write) {
    Timing* timing = w.machine->timing;
    if (!timing || !timing->is_late(w, address)) return write();
    timing->write_later(w, address, write);
    return false;
}

// operands: address, N sources
template <class T, int N>
Flow store(Warp& w, const Op& op) {
    Space space = Space(op.aux & space_bits);
    const Operand& address = op.operands[0];
    bool is_strong = op.aux & strong_bit, changed = false;
    if (const Row row =
            is_strong ? Row{} : find_row(w, address, space, sizeof(T) * N, Access::write);
        row.at) {
        T values[warp_size][N];
        for (int k = 0; k < N; ++k) {
            auto v = w.in<T>(op.operands[k + 1]);
            for (int i = 0; i < warp_size; ++i) values[i][k] = v[i];
        }
        if (w.machine->races) {
            w.machine->races->row_access(w, row.space, row.address, sizeof(T) * N, row.at,
                                         reinterpret_cast<const std::byte*>(values));
        }
        if (std::memcmp(row.at, values, sizeof values)) {
            std::memcpy(row.at, values, sizeof values);
            w.machine->note_progress();
        }
        return Flow::next;
    }
    std::byte* places[warp_size];
    w.for_each_lane([&](int i) {
        std::byte* to =
            fast_resolve(w, space, w.address(address, i), sizeof(T) * N, Access::write, i);
        places[i] = to;
        std::array<T, N> values;
        for (int k = 0; k < N; ++k) values[k] = w.in<T>(op.operands[k + 1])[i];
        if (RaceDetector* races = w.machine->races.get()) {
            if (!is_strong)
                races->begin_store(to, reinterpret_cast<const std::byte*>(values.data()),
                                   sizeof values);
            note_access(w, op, space, w.address(address, i), sizeof(T) * N, to, Access::write, i,
                        is_strong);
            races->end_store();
        }
        const auto write = [=] { return write_values<T, N>(to, values, is_strong); };
        changed |= is_strong ? write_in_time(w, w.address(address, i), write) : write();
    });
    if (changed) w.machine->note_progress();
    if (w.machine->races && !is_strong) check_lanes_agree<T, N>(w, op, space, places);
    return Flow::next;
}

// f: a generic lambda that takes the length as its template's argument and returns a body.
template <class F>
Body for_length(Decoder& d, size_t n, F f) {
    switch (n) {
        case 1:
            return f.template operator()<1>();
        case 2:
            return f.template operator()<2>();
        case 4:
            return f.template operator()<4>();
        case 8:
            return f.template operator()<8>();
    }
    d.unsupported("a vector of this length");
}
template <class T>
Body load_body(Decoder& d, size_t n) {
    return for_length(d, n, []<int N>() -> Body { return load<T, N>; });
}
template <class T>
Body store_body(Decoder& d, size_t n) {
    return for_length(d, n, []<int N>() -> Body { return store<T, N>; });
}

void ignore_cache_hints(Decoder& d) {
    d.ignore({"weak", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "unified", "L2::cache_hint"});
    std::string level;
    while (d.take_prefix("L1::", level) || d.take_prefix("L2::", level)) {
    }
}

size_t take_vector(Decoder& d) {
    std::string_view v = d.take_any({"v2", "v4", "v8"});
    return v == "v2" ? 2 : v == "v4" ? 4 : v == "v8" ? 8 : 1;
}

// 128-bit registers count as two of 64 bits.
std::vector<Operand> split_wide(const std::vector<Operand>& all) {
    std::vector<Operand> halves;
    for (Operand o : all) {
        o.bits = 64;
        halves.push_back(o);
        o.high_half = true;
        halves.push_back(o);
    }
    return halves;
}

// The address and the space it lies in: a variable's own when the instruction says .param or
// nothing.
Operand take_address(Decoder& d, size_t i, Space& space) {
    Operand address = d.address(i);
    bool symbol = address.base != Base::registers && d.symbol_space != Space::generic;
    if (symbol && (space == Space::param || space == Space::generic)) space = d.symbol_space;
    if (space == Space::constant || space == Space::param) space = Space::global;
    return address;
}

void decode_ld(Decoder& d) {
    const Strength strength = take_strength(d, Scope::sys);
    const bool is_strong = strength.is_strong;
    const uint64_t cache = d.take("nc") ? noncoherent : 0;
    Space space = d.take_space();
    ignore_cache_hints(d);
    size_t n = take_vector(d);
    Type type = d.take_type();
    d.expect_operands(2, 3);
    Operand address = take_address(d, 1, space);
    std::vector<Operand> operands = d.destinations(0, type);
    if (operands.size() != n) d.invalid("the vector's length is not that of the instruction");
    if (type == Type::b128) {
        operands = split_wide(operands);
        n *= 2;
    }
    bool uniform = address.base == Base::constants && space != Space::local;
    operands.push_back(address);
    Body body = nullptr;
    switch (type == Type::b128 ? 64 : num_bits(type)) {
        case 8:
            body = is_signed(type) ? load_body<int8_t>(d, n) : load_body<uint8_t>(d, n);
            break;
        case 16:
            body = is_signed(type) ? load_body<int16_t>(d, n) : load_body<uint16_t>(d, n);
            break;
        case 32:
            body = load_body<uint32_t>(d, n);
            break;
        case 64:
            body = load_body<uint64_t>(d, n);
            break;
        default:
            d.unsupported("this type");
    }
    d.emit(body, operands,
           uint64_t(space) | (is_strong ? strong_bit : 0) | (uniform ? uniform_address : 0) |
               strength.aux | cache);
}

void decode_ldu(Decoder& d) {
    decode_ld(d);
}

}  // namespace

void decode_st(Decoder& d) {
    const Strength strength = take_strength(d, Scope::sys);
    const bool is_strong = strength.is_strong;
    Space space = d.take_space();
    ignore_cache_hints(d);
    size_t n = take_vector(d);
    Type type = d.take_type();
    d.expect_operands(2, 3);
    std::vector<Operand> operands{take_address(d, 0, space)};
    std::vector<Operand> values = d.sources(1, type);
    if (values.size() != n) d.invalid("the vector's length is not that of the instruction");
    if (type == Type::b128) {
        values = split_wide(values);
        n *= 2;
    }
    operands.insert(operands.end(), values.begin(), values.end());
    Body body = nullptr;
    switch (type == Type::b128 ? 64 : num_bits(type)) {
        case 8:
            body = store_body<uint8_t>(d, n);
            break;
        case 16:
            body = store_body<uint16_t>(d, n);
            break;
        case 32:
            body = store_body<uint32_t>(d, n);
            break;
        case 64:
            body = store_body<uint64_t>(d, n);
            break;
        default:
            d.unsupported("this type");
    }
    d.emit(body, operands, uint64_t(space) | (is_strong ? strong_bit : 0) | strength.aux);
}

namespace {

// ---- atomics ----

template <Reduction reduction>
struct Reduced {
    template <class T>
    T operator()(T a, T b) const {
        return reduce_integer(reduction, a, b);
    }
};
// Of vectors of halves.
template <Reduction reduction>
struct Extreme {
    template <class T>
    T operator()(T a, T b) const {
        if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat>)
            return T::from(reduce_float(reduction, float(a), float(b)));
        else
            return {(*this)(a.low, b.low), (*this)(a.high, b.high)};
    }
};
// In global memory .f32 is added without subnormal numbers, and a NaN of .f64 goes on as it is.
struct AtomicAdd {
    static float flushed_sum(float a, float b) {
        return std::isnan(a + b) ? canonical_nan() : flush(a + b);
    }
    template <class T>
    T operator()(T a, T b) const {
        if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat>)
            return T::from(float(a) + float(b));
        else if constexpr (std::is_same_v<T, float>)
            return flushed_sum(flush(a), flush(b));
        else if constexpr (std::is_same_v<T, double>)
            return std::isnan(b) ? b : std::isnan(a) ? a : a + b;
        else
            return reduce_integer(Reduction::add, a, b);
    }
};
// In shared memory a loop of the program adds, as add does.
struct AtomicAddShared {
    float operator()(float a, float b) const { return std::isnan(a + b) ? canonical_nan() : a + b; }
    double operator()(double a, double b) const {
        const double sum = a + b;
        return std::isnan(sum) ? propagated_nan(a, b) : sum;
    }
};
template <class T>
struct Two {  // packed halves
    T low, high;
};
struct AtomicAddTwo {
    template <class P>
    P operator()(P a, P b) const {
        return {AtomicAdd{}(a.low, b.low), AtomicAdd{}(a.high, b.high)};
    }
};
template <class T, class F>
T atomic_apply(std::byte* at, F f) {
    using U = std::conditional_t<sizeof(T) == 2, uint16_t,
                                 std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    auto* word = reinterpret_cast<U*>(at);
    U seen = __atomic_load_n(word, __ATOMIC_RELAXED);
    for (;;) {
        T old;
        std::memcpy(&old, &seen, sizeof(T));
        T value = f(old);
        U next;
        std::memcpy(&next, &value, sizeof(T));
        if (__atomic_compare_exchange_n(word, &seen, next, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_RELAXED))
            return old;
    }
}

// aux: space, count of elements, bit 6: has destinations. operands: N destinations (atom), address,
// N values
template <class T, class F>
Flow atomic(Warp& w, const Op& op) {
    Space space = Space(op.aux & space_bits);
    uint32_t n = uint32_t(op.aux >> count_shift) & 0xff;
    bool returns = op.aux & 64;
    uint32_t first = returns ? n : 0;
    const Operand& address = op.operands[first];
    bool changed = false;
    ++w.polls;
    w.for_each_lane([&](int i) {
        // Every element is an atomic access of its own; the address is checked for all of them
        // together.
        std::byte* at =
            w.resolve(space, w.address(address, i), uint32_t(sizeof(T)) * n, Access::read_write, i);
        if (w.machine->races)
            note_access(w, op, space, w.address(address, i), uint32_t(sizeof(T)) * n, at,
                        Access::read_write, i, true);
        const auto update = [at](uint32_t k, T b, T& old) {
            T written{};
            old = atomic_apply<T>(at + k * sizeof(T), [&](T a) { return written = F{}(a, b); });
            return std::memcmp(&old, &written, sizeof(T)) != 0;
        };
        for (uint32_t k = 0; k < n; ++k) {
            const T b = w.in<T>(op.operands[first + 1 + k])[i];
            T old;
            if (returns) {
                changed |= update(k, b, old);
                w.out<T>(op.operands[k]).set(i, old);
            } else {
                changed |= write_in_time(w, w.address(address, i) + k * sizeof(T), [=] {
                    T unused;
                    return update(k, b, unused);
                });
            }
        }
    });
    if (changed) w.machine->note_progress();
    return Flow::next;
}

// operands: destination, address, compare, value
template <class T>
Flow compare_and_swap(Warp& w, const Op& op) {
    Space space = Space(op.aux & space_bits);
    bool changed = false;
    ++w.polls;
    const uint64_t polled = w.address(op.operands[1], w.first_lane());
    w.for_each_lane([&](int i) {
        auto* at = reinterpret_cast<T*>(
            w.resolve(space, w.address(op.operands[1], i), sizeof(T), Access::read_write, i));
        if (w.machine->races)
            note_access(w, op, space, w.address(op.operands[1], i), sizeof(T),
                        reinterpret_cast<std::byte*>(at), Access::read_write, i, true);
        T expected = w.in<T>(op.operands[2])[i], value = w.in<T>(op.operands[3])[i];
        T seen = expected;
        if (__atomic_compare_exchange_n(at, &seen, value, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
            changed |= value != expected;
        w.out<T>(op.operands[0]).set(i, seen);
    });
    if (changed) w.machine->note_progress();
    note_poll(w, space, polled, sizeof(T));
    return Flow::yield;
}

// A register of 128 bits: two rows of 64.
struct Wide {
    uint64_t low, high;
    static Wide of(const Warp& w, const Operand& o, int lane) {
        return {In<uint64_t>{w.data(o)}[lane], In<uint64_t>{w.data(o) + 256}[lane]};
    }
};

// operands: destination, address, {compare,} value. Other processes may see one half of the value
// without the other: ranks that share memory across processes have no such atomics.
template <bool compares>
Flow exchange_wide(Warp& w, const Op& op) {
    const Space space = Space(op.aux & space_bits);
    bool changed = false;
    ++w.polls;
    const uint64_t polled = w.address(op.operands[1], w.first_lane());
    w.for_each_lane([&](int i) {
        const uint64_t address = w.address(op.operands[1], i);
        std::byte* at = w.resolve(space, address, sizeof(Wide), Access::read_write, i);
        if (w.machine->races)
            note_access(w, op, space, address, sizeof(Wide), at, Access::read_write, i, true);
        Wide old;
        std::memcpy(&old, at, sizeof old);
        const Wide value = Wide::of(w, op.operands[compares ? 3 : 2], i);
        bool writes = true;
        if constexpr (compares) {
            const Wide expected = Wide::of(w, op.operands[2], i);
            writes = old.low == expected.low && old.high == expected.high;
        }
        if (writes) {
            changed |= old.low != value.low || old.high != value.high;
            std::memcpy(at, &value, sizeof value);
        }
        if (op.operands[0].sink) return;
        Out<uint64_t>{w.bases[0] + op.operands[0].offset}.set(i, old.low);
        Out<uint64_t>{w.bases[0] + op.operands[0].offset + 256}.set(i, old.high);
    });
    if (changed) w.machine->note_progress();
    if (!compares) return Flow::next;
    note_poll(w, space, polled, sizeof(Wide));
    return Flow::yield;
}

template <class F>
Body atomic_integer(Decoder& d, Type type) {
    switch (type) {
        case Type::u32:
        case Type::b32:
            return atomic<uint32_t, F>;
        case Type::s32:
            return atomic<int32_t, F>;
        case Type::u64:
        case Type::b64:
            return atomic<uint64_t, F>;
        case Type::s64:
            return atomic<int64_t, F>;
        default:
            d.unsupported(std::string("type .") + name_of(type) + " is not supported here");
    }
}

Body atomic_add(Decoder& d, Type type, bool in_shared) {
    switch (type) {
        case Type::f32:
            return in_shared ? atomic<float, AtomicAddShared> : atomic<float, AtomicAdd>;
        case Type::f64:
            return in_shared ? atomic<double, AtomicAddShared> : atomic<double, AtomicAdd>;
        case Type::f16:
            return atomic<Half, AtomicAdd>;
        case Type::bf16:
            return atomic<BFloat, AtomicAdd>;
        case Type::f16x2:
            return atomic<Two<Half>, AtomicAddTwo>;
        case Type::bf16x2:
            return atomic<Two<BFloat>, AtomicAddTwo>;
        default:
            return atomic_integer<AtomicAdd>(d, type);
    }
}

template <Reduction reduction>
Body atomic_extreme(Decoder& d, Type type, size_t num_elements) {
    if (num_elements > 1) {
        switch (type) {
            case Type::f16:
                return atomic<Half, Extreme<reduction>>;
            case Type::bf16:
                return atomic<BFloat, Extreme<reduction>>;
            case Type::f16x2:
                return atomic<Two<Half>, Extreme<reduction>>;
            case Type::bf16x2:
                return atomic<Two<BFloat>, Extreme<reduction>>;
            default:
                break;
        }
    }
    return atomic_integer<Reduced<reduction>>(d, type);
}

void decode_atomic(Decoder& d, bool returns) {
    const Strength strength = take_strength(d, Scope::gpu);
    Space space = d.take_space();
    d.ignore({"noftz"});
    ignore_cache_hints(d);
    size_t n = take_vector(d);
    std::string_view name =
        d.take_any({"and", "or", "xor", "exch", "cas", "add", "inc", "dec", "min", "max"});
    Type type = d.take_type();
    size_t at = returns ? 1 : 0;
    if (type == Type::b128) {
        const bool compares = name == "cas";
        if (!returns || (!compares && name != "exch"))
            d.invalid("of 128 bits there are atom.exch and atom.cas");
        d.expect_operands(compares ? 4 : 3, compares ? 5 : 4);
        const Operand address = take_address(d, 1, space);
        std::vector<Operand> operands{d.destination(0, type), address, d.source(2, type)};
        if (compares) operands.push_back(d.source(3, type));
        d.emit(compares ? exchange_wide<true> : exchange_wide<false>, std::move(operands),
               uint64_t(space) | strength.aux);
        return;
    }
    if (name == "cas") {
        d.expect_operands(4, 5);
        Operand address = take_address(d, 1, space);
        std::vector<Operand> operands{d.destination(0, type), address, d.source(2, type),
                                      d.source(3, type)};
        d.emit(for_bits(d, type, [](auto t) -> Body { return compare_and_swap<decltype(t)>; }),
               operands, uint64_t(space) | strength.aux);
        return;
    }
    Body body = nullptr;
    if (name == "and")
        body = atomic_integer<Reduced<Reduction::bit_and>>(d, type);
    else if (name == "or")
        body = atomic_integer<Reduced<Reduction::bit_or>>(d, type);
    else if (name == "xor")
        body = atomic_integer<Reduced<Reduction::bit_xor>>(d, type);
    else if (name == "exch")
        body = atomic_integer<Reduced<Reduction::none>>(d, type);
    else if (name == "inc")
        body = atomic_integer<Reduced<Reduction::inc>>(d, type);
    else if (name == "dec")
        body = atomic_integer<Reduced<Reduction::dec>>(d, type);
    else if (name == "min")
        body = atomic_extreme<Reduction::min>(d, type, n);
    else if (name == "max")
        body = atomic_extreme<Reduction::max>(d, type, n);
    else if (name == "add")
        body = atomic_add(d, type, space == Space::shared || space == Space::shared_cluster);
    else
        d.invalid("the instruction has no operation");
    d.expect_operands(at + 2, at + 3);
    std::vector<Operand> operands;
    bool has_result = returns && d.parsed(0).kind != ParsedOperand::Kind::sink;
    if (has_result) operands = d.destinations(0, type);
    operands.push_back(take_address(d, at, space));
    std::vector<Operand> values = d.sources(at + 1, type);
    if (values.size() != n) d.invalid("the vector's length is not that of the instruction");
    operands.insert(operands.end(), values.begin(), values.end());
    d.emit(body, operands,
           uint64_t(space) | uint64_t(n) << count_shift | (has_result ? 64 : 0) | strength.aux);
}

void decode_atom(Decoder& d) {
    decode_atomic(d, true);
}
}  // namespace

void decode_red(Decoder& d) {
    decode_atomic(d, false);
}

namespace {

// ---- the rest ----

Flow nothing(Warp&, const Op&) {
    return Flow::next;
}

void decode_nothing(Decoder& d) {
    d.modifiers.clear();
    d.emit(nothing, {});
}

// operands: address, size
Flow bulk_zero(Warp& w, const Op& op) {
    Space space = Space(op.aux & space_bits);
    w.for_each_lane([&](int i) {
        uint64_t address = w.address(op.operands[0], i);
        uint64_t bytes = w.in<uint64_t>(op.operands[1])[i];
        if (bytes % 8 || address % 8)
            throw Fault(FaultKind::misaligned,
                        "st.bulk needs an address and a size that are multiples of 8", i);
        for (uint64_t at = 0; at < bytes; at += 8) {
            std::byte* to = w.resolve(space, address + at, 8, Access::write, i);
            if (w.machine->races)
                note_access(w, op, space, address + at, 8, to, Access::write, i, false);
            std::memset(to, 0, 8);
        }
    });
    w.machine->note_progress();
    return Flow::next;
}

void decode_st_bulk(Decoder& d) {
    d.ignore({"weak"});
    Space space = d.take_space();
    d.expect_operands(3);
    if (d.immediate(2) != 0) d.unsupported("only the value 0 can be stored");
    d.emit(bulk_zero, {take_address(d, 0, space), d.source(1, Type::u64)}, uint64_t(space));
}

}  // namespace

InstructionTable memory_instructions() {
    return {
        {"ld", decode_ld, "load; every space, vector, cache hint and ordering"},
        {"ldu", decode_ldu, "load of read-only data"},
        {"st", decode_st, "store; every space, vector, cache hint and ordering"},
        {"st.bulk", decode_st_bulk, "zero fill of shared memory"},
        {"atom", decode_atom,
         "atomic update that returns the old value; exch and cas also of 128 bits"},
        {"red", decode_red, "atomic update"},
        {"prefetch", decode_nothing, "prefetch (no effect)"},
        {"prefetchu", decode_nothing, "prefetch (no effect)"},
        {"discard", decode_nothing, "cache line may be dropped (no effect)"},
        {"applypriority", decode_nothing, "cache priority (no effect)"},
    };
}

}  // namespace deep_moe::emulator
