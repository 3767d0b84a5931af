// Functions that are compiled into their callers: for the caller's instruction set on a CPU, and for both
// sides in CUDA's sources. A lambda that is not MESA_TUNE_FLATTEN may be compiled for the default set only.
#pragma once

#define MESA_TUNE_FLATTEN __attribute__((always_inline))

#ifdef __CUDACC__
#define MESA_TUNE_INLINE __host__ __device__ __forceinline__
#else
#define MESA_TUNE_INLINE inline MESA_TUNE_FLATTEN
#endif
