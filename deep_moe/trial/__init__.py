"""What tries the kernels: reference, bounds of right results, made-up layers, fuzzing, timing,
traces."""
