// Macros for functions that must be inlined. On a CPU, an inlined function is compiled for the instruction
// set of its caller (cpu/paths.h); a lambda without MESA_TUNE_FLATTEN may be compiled for the default set
// only. In CUDA sources, these functions are compiled for host and device.
#pragma once

#define MESA_TUNE_FLATTEN __attribute__((always_inline))

#ifdef __CUDACC__
#define MESA_TUNE_INLINE __host__ __device__ __forceinline__
#else
#define MESA_TUNE_INLINE inline MESA_TUNE_FLATTEN
#endif
