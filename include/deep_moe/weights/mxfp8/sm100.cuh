// MXFP8 weights on SM100.
#pragma once

#include "deep_moe/weights/fp8/sm100.cuh"
