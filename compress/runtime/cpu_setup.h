#pragma once

namespace kvasir::compress {

// OpenBLAS chooses its kernels when it is loaded. For CPUs newer than itself it
// takes its slowest ones (a fifth of the speed). This function sets
// OPENBLAS_CORETYPE by what the CPU can do and starts the program again. It
// does nothing if the user has set the variable. Call it first in main.
void UseBestBlasKernels(char** argv);

// Sets the number of threads inside one product. Work that is parallel over
// crops or sequences should set 1.
void SetBlasThreads(int threads);

// Sets the number of threads inside one product until the object is destroyed,
// which restores the number before. Objects may be nested, but must not overlap
// otherwise: the number belongs to the process.
class ScopedBlasThreads {
 public:
  explicit ScopedBlasThreads(int threads);
  ~ScopedBlasThreads();
  ScopedBlasThreads(const ScopedBlasThreads&) = delete;
  ScopedBlasThreads& operator=(const ScopedBlasThreads&) = delete;

 private:
  const int before_;  // 0: unknown, so nothing is restored
};

// 0 if the BLAS does not report it.
int BlasThreads();

// Keeps freed memory in the process. Training frees and allocates the same
// large blocks in every step, and giving them back would cost a page fault per
// 4 KiB.
void KeepFreedMemory();

}  // namespace kvasir::compress
