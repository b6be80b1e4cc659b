#pragma once

namespace kvasir::compress {

// Makes OpenBLAS use fast kernels on a CPU that is newer than the library. By
// default OpenBLAS would use its slowest kernels there. Sets OPENBLAS_CORETYPE,
// unless the user has set it, and executes the program again from the start.
// Must be the first call in main.
void UseBestBlasKernels(char** argv);

// Sets the number of threads that compute one matrix product. Code that already
// runs in parallel over sequences should set 1.
void SetBlasThreads(int threads);

// Sets the number of threads that compute one matrix product. The destructor
// restores the old number. Objects may be nested, but must not overlap
// otherwise, because the number holds for the whole process.
class ScopedBlasThreads {
 public:
  explicit ScopedBlasThreads(int threads);
  ~ScopedBlasThreads();
  ScopedBlasThreads(const ScopedBlasThreads&) = delete;
  ScopedBlasThreads& operator=(const ScopedBlasThreads&) = delete;

 private:
  const int before_;  // 0 if unknown; then nothing is restored
};

// Returns the number of threads that compute one matrix product; 0 if the BLAS
// library does not report it.
int BlasThreads();

// Makes the allocator keep freed memory. Training frees and allocates the same
// large blocks in every step; returning them to the system would cost a page
// fault for every 4 KiB.
void KeepFreedMemory();

}  // namespace kvasir::compress
