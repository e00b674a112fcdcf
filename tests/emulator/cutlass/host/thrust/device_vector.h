// As much of thrust::device_vector as the examples use.
#pragma once

#include <cuda_runtime_api.h>
#include <thrust/host_vector.h>

#include <algorithm>

namespace thrust {

template <class T>
class device_vector {
 public:
    struct pointer {
        T* address;
        T* get() const { return address; }
    };

    explicit device_vector(size_t size) : size_(size) {
        cudaMalloc(reinterpret_cast<void**>(&values_), size * sizeof(T));
    }
    device_vector(const host_vector<T>& other) : device_vector(other.size()) { *this = other; }
    device_vector(const device_vector&) = delete;
    ~device_vector() { cudaFree(values_); }

    device_vector& operator=(const host_vector<T>& other) {
        std::copy_n(other.data(), size_, values_);
        return *this;
    }

    pointer data() const { return {values_}; }
    size_t size() const { return size_; }

 private:
    T* values_;
    size_t size_;
};

template <class T>
host_vector<T>::host_vector(const device_vector<T>& other)
    : values_(other.data().get(), other.data().get() + other.size()) {}

}  // namespace thrust
