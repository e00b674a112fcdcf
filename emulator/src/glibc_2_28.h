// Lets a library that is built beside a newer glibc run on glibc 2.28. Every unit begins with this
// header (library.py).
//
// glibc 2.29 gave these functions a second version, which no longer sets errno for wrong arguments.
// The linker takes the newest version, so the older one, with the same results, is named here.
// Where a name is not used, its line has no effect.
#pragma once

#include <features.h>

#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver exp2, exp2@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver log2, log2@GLIBC_2.2.5");
__asm__(".symver pow, pow@GLIBC_2.2.5");
#endif
