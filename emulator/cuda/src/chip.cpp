#include "chip.h"

namespace deep_moe::cuda {

int device_attribute(const ChipFacts& chip, int num_sms, int device, int attribute) {
    switch (attribute) {
        case 1:
            return max_block_threads;
        case 2:
        case 3:
            return 1024;  // block x, y
        case 4:
            return 64;  // block z
        case 5:
            return 0x7fffffff;  // grid x
        case 6:
        case 7:
            return 65535;
        case 8:
            return default_shared_bytes;
        case 9:
            return 64 << 10;  // constant memory
        case 10:
            return warp_threads;
        case 11:
            return 0x7fffffff;  // pitch
        case 12:
            return registers_per_sm;
        case 13:
            return chip.clock_khz;
        case 14:
            return 512;  // texture alignment
        case 15:
            return 1;  // copies while kernels run
        case 16:
            return num_sms;
        case 19:
            return 1;  // host memory can be mapped
        case 31:
            return 1;  // concurrent kernels
        case 32:
            return 1;  // ECC
        case 33:
            return device + 1;  // PCI bus
        case 36:
            return chip.memory_clock_khz;
        case 37:
            return chip.bus_bits;
        case 38:
            return int(chip.l2_bytes);
        case 39:
            return max_sm_threads;
        case 40:
            return 3;  // copy engines
        case 41:
            return 1;  // unified addressing
        case 51:
            return 32;  // texture pitch alignment
        case 75:
            return chip.major;
        case 76:
            return chip.minor;
        case 78:
        case 79:
        case 80:
            return 1;  // stream priorities, caches
        case 81:
            return sm_shared_bytes;
        case 82:
            return registers_per_sm;
        case 83:
            return 1;  // managed memory
        case 87:
            return 2;  // single to double precision
        case 89:
            return 1;  // concurrent managed access
        case 90:
        case 91:
            return 1;
        case 92:
        case 93:
        case 94:
            return 1;  // stream memory operations
        case 95:
            return 1;  // cooperative launch
        case 97:
            return max_shared_bytes;
        case 99:
            return 1;  // host registration
        case 106:
            return max_sm_ctas;
        case 111:
            return reserved_shared_bytes;
        case 115:
            return 1;  // memory pools
        case 120:
            return 1;  // clusters
        case 122:
        case 123:
            return 1;
        case 126:
            return 4;  // memory synchronization domains
        case 127:
            return 1;  // tensor maps
        case 129:
            return 1;  // unified function pointers
        case 131:
        case 134:
            return -1;  // NUMA nodes
        default:
            return 0;
    }
}

}  // namespace deep_moe::cuda
