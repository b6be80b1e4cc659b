// Marks functions that nvcc compiles for both host and device. C++17.
#pragma once

#ifdef __CUDACC__
#define KVASIR_HOST_DEVICE __host__ __device__
#else
#define KVASIR_HOST_DEVICE
#endif
