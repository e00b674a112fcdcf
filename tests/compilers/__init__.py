"""Programs in languages that make their kernels while they run, under warpcheck. Their packages are
no dependency of the other tests: `make test-compilers` fetches them."""
