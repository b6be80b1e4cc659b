#pragma once

namespace kvasir::compress {

// OpenBLAS chooses its kernels when it is loaded. For a CPU that is newer than
// the library it chooses its slowest kernels (a fifth of the speed). This
// function sets OPENBLAS_CORETYPE to a type whose instructions the CPU
// supports, and executes the program again from the start. It does nothing if
// the user has set the variable. Must be the first call in main.
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
// library does not tell.
int BlasThreads();

// Makes the allocator keep freed memory. Training frees and allocates the same
// large blocks in every step; returning them to the system would cost a page
// fault for every 4 KiB.
void KeepFreedMemory();

}  // namespace kvasir::compress
