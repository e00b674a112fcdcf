"""The structs that a launch hands to the driver, against those of cuda.bindings."""

import ctypes

from deep_moe.jit.launch import LaunchAttribute, LaunchConfig


def test_launch_structs_are_those_of_cuda_h() -> None:
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    config = driver.CUlaunchConfig()
    values = {
        "gridDimX": 132,
        "gridDimY": 2,
        "gridDimZ": 3,
        "blockDimX": 384,
        "blockDimY": 5,
        "blockDimZ": 6,
        "sharedMemBytes": 200_000,
        "hStream": 0x123456789A,
        "numAttrs": 2,
    }
    for name, value in values.items():
        setattr(config, name, value)
    config.attrs = [attribute, attribute]

    seen = LaunchConfig.from_address(config.getPtr())
    assert {name: getattr(seen, name) for name in values} == values
    for i in range(2):
        address = seen.attrs + i * ctypes.sizeof(LaunchAttribute)
        seen_attribute = LaunchAttribute.from_address(address)
        assert (seen_attribute.id, seen_attribute.value) == (2, 1)
