// Declares the functions with which kernels/simt implements its primitives on
// the host. kernels/simt documents what each primitive does. C++17.
//
// Threads: only kernel code that an emulated launch runs may call these.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/device/dtype.h"

namespace kvasir::kernels::emulation {

// The file and line of source code that calls a primitive.
struct Site {
  const char* file;
  int line;
  // As a default argument of a primitive, Here() gives the file and line of the
  // primitive's caller.
  static constexpr Site Here(const char* file = __builtin_FILE(),
                             int line = __builtin_LINE()) {
    return {file, line};
  }
};

struct Place {
  uint32_t thread, threads;
  uint32_t cta_x, cta_y;
  uint32_t ctas_x, ctas_y;
  char* shared;
};
// Declares thread-local variables with the initial-exec model: each access is
// one instruction, not a call, even in a module that is loaded at run time.
#define KVASIR_EMULATION_TLS __thread __attribute__((tls_model("initial-exec")))
// The indices of the running CUDA thread in its CTA and grid.
extern KVASIR_EMULATION_TLS const Place* current_place;
inline const Place& Here() { return *current_place; }
inline char* SharedMemory() { return current_place->shared; }

// Synchronization. Each site can be left out (Emulator::LeaveOut).
void SyncCta(Site site);
void Barrier(uint32_t id, uint32_t threads, bool waits, Site site);
void SyncWarp(uint32_t mask, Site site);
void Fence(bool gpu, Site site);
void CommitCopies(Site site);
void WaitCopies(int pending, Site site);
void WaitPhase(void* barrier, uint32_t phase, Site site);

void CopyAsync(void* shared, const void* global, uint32_t bytes, Site site);
void InitCopyBarrier(void* barrier, uint32_t count, Site site);
void ArriveExpecting(void* barrier, uint32_t bytes, Site site);
void CopyBulk(void* shared, const void* global, uint32_t bytes, void* barrier,
              Site site);

enum class ShuffleKind : uint8_t { kXor, kFrom, kUp, kDown };
uint32_t Shuffle(ShuffleKind kind, uint32_t mask, uint32_t value,
                 uint32_t operand, Site site);
uint32_t Ballot(bool yes, uint32_t mask, Site site);

enum class MmaKind : uint8_t { kBf16, kF16 };
void Mma(MmaKind kind, float (&d)[4], const uint32_t (&a)[4],
         const uint32_t (&b)[2], Site site);
void MmaBytes(bool signed_a, int32_t (&d)[4], const uint32_t (&a)[4],
              const uint32_t (&b)[2], Site site);
void LoadMatrices(uint32_t* words, int count, bool transposed, const void* row,
                  Site site);

// CheckGlobal and CheckShared check bounds and alignment of an access that the
// caller is about to make, and count it.
void CheckGlobal(const void* address, size_t bytes, bool stores, Site site);
void CheckShared(const void* address, size_t bytes, bool stores, Site site);
// Like CheckGlobal, but for LoadOnce: also checks that the launch has not
// stored to these bytes.
void CheckOnce(const void* address, size_t bytes, Site site);

// Atomic accesses of 32 or 64 bits. An access that acquires or releases is a
// site that can be left out (Emulator::LeaveOut): it is then a relaxed access.
uint32_t LoadAtomic32(const void* from, bool acquires, Site site);
uint64_t LoadAtomic64(const void* from, bool acquires, Site site);
void StoreAtomic32(void* to, uint32_t value, bool releases, Site site);
void StoreAtomic64(void* to, uint64_t value, bool releases, Site site);
enum class AtomicKind : uint8_t { kAdd, kAddFloat, kMax, kCas };
uint32_t Atomic(AtomicKind kind, void* at, uint32_t value, uint32_t expected,
                bool gpu, Site site);
uint64_t AtomicAdd64(void* at, uint64_t value, bool gpu, Site site);

uint32_t FmaPair(DType dtype, uint32_t a, uint32_t b, uint32_t c);
uint32_t PickBytes(uint32_t a, uint32_t b, uint32_t selector);

}  // namespace kvasir::kernels::emulation
