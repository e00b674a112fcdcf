// How busy a queue, or several of one kind, were over time: in steps of equal length, which get
// twice as long whenever there would be too many of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace deep_moe::emulator {

class UsageSeries {
 public:
    // Picoseconds from the beginning of the run, start < end.
    void add(int64_t start, int64_t end, int num_units) {
        while (end > int64_t(max_steps) * step_) merge_neighbours();
        const auto first = size_t(start / step_), last = size_t((end - 1) / step_);
        if (busy_.size() <= last) busy_.resize(last + 1);
        for (size_t i = first; i <= last; ++i) {
            const int64_t begin = int64_t(i) * step_;
            busy_[i] += double(std::min(end, begin + step_) - std::max(start, begin)) * num_units;
        }
    }
    int64_t step() const { return step_; }
    const std::vector<double>& busy() const { return busy_; }  // picoseconds in each step

 private:
    static constexpr size_t max_steps = 4096;
    int64_t step_ = 64'000;
    std::vector<double> busy_;

    void merge_neighbours() {
        step_ *= 2;
        for (size_t i = 0; i < busy_.size(); i += 2)
            busy_[i / 2] = busy_[i] + (i + 1 < busy_.size() ? busy_[i + 1] : 0);
        busy_.resize((busy_.size() + 1) / 2);
    }
};

}  // namespace deep_moe::emulator
