// Functions that nvcc compiles for both sides. C++17.
#pragma once

#ifdef __CUDACC__
#define KVASIR_HOST_DEVICE __host__ __device__
#else
#define KVASIR_HOST_DEVICE
#endif
