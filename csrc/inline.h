// Functions that are compiled into their callers: for the caller's instruction set on a CPU, and for both
// sides in CUDA's sources.
#pragma once

#ifdef __CUDACC__
#define MESA_TUNE_INLINE __host__ __device__ __forceinline__
#else
#define MESA_TUNE_INLINE inline __attribute__((always_inline))
#endif
