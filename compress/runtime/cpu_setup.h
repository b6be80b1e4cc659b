#pragma once

namespace kvasir::compress {

// OpenBLAS picks its kernels when it is loaded and takes its slowest ones (a
// fifth of the speed) for CPUs newer than itself. Names the right ones by
// OPENBLAS_CORETYPE, from what the CPU can do, and starts the program again.
// Does nothing when the user has set the variable. Call first in main.
void UseBestBlasKernels(char** argv);

// Threads inside one product. Work that is parallel over crops or sequences
// wants 1.
void SetBlasThreads(int threads);

// The same until this goes, which gives back what was set before. One at a time
// or nested: the number is the process's.
class ScopedBlasThreads {
 public:
  explicit ScopedBlasThreads(int threads);
  ~ScopedBlasThreads();
  ScopedBlasThreads(const ScopedBlasThreads&) = delete;
  ScopedBlasThreads& operator=(const ScopedBlasThreads&) = delete;

 private:
  const int before_;  // 0: not known, left alone
};

// 0 where the BLAS does not tell.
int BlasThreads();

// Keeps freed memory in the process: training frees and takes the same large
// blocks in every step, and giving them back costs a page fault per 4 KiB.
void KeepFreedMemory();

}  // namespace kvasir::compress
