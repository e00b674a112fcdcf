// As much of thrust::host_vector as the examples use.
#pragma once

#include <cstddef>
#include <vector>

namespace thrust {

template <class T>
class device_vector;

template <class T>
class host_vector {
 public:
    explicit host_vector(size_t size) : values_(size) {}
    host_vector(const device_vector<T>& other);

    T* data() { return values_.data(); }
    const T* data() const { return values_.data(); }
    size_t size() const { return values_.size(); }
    T& operator[](size_t i) { return values_[i]; }

 private:
    std::vector<T> values_;
};

}  // namespace thrust
