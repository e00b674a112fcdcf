"""Time stamps that kernels take: on one clock, and as files for viewers."""
