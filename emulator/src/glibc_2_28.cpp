// glibc 2.32 and newer tell the C++ library here whether the process has a single thread; it then
// counts references without atomic operations. This one says "no", which is right in any process,
// and it is found before glibc's, so that the library does not need glibc's.
extern "C" {
extern char __libc_single_threaded;
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
