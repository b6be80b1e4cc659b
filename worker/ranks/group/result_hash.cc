#include "worker/ranks/group/result_hash.h"

namespace kvasir::worker {
namespace {

// Adds a value to the hash (FNV-1a). A stronger hash is not needed, because
// nobody tries to cause collisions.
uint64_t Add(uint64_t hash, uint64_t value) {
  for (int i = 0; i < 8; ++i) {
    hash = (hash ^ ((value >> (8 * i)) & 0xff)) * 0x100000001b3u;
  }
  return hash;
}

}  // namespace

uint64_t ResultHash(const kvasir::v1::StepResult& result) {
  uint64_t hash = Add(0xcbf29ce484222325u, result.step_id());
  for (const kvasir::v1::SequenceResult& sequence : result.sequences()) {
    hash = Add(hash, sequence.sequence_id());
    hash = Add(hash, static_cast<uint32_t>(sequence.token_id()));
    hash = Add(hash, static_cast<uint32_t>(sequence.fault()));
  }
  return hash;
}

}  // namespace kvasir::worker
