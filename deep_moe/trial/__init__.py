"""What tests the kernels: reference, bounds of right results, random layers, fuzzing, timing,
traces.
"""
