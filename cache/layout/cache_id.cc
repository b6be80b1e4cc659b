#include "cache/layout/cache_id.h"

#include <openssl/evp.h>

#include <bit>
#include <memory>

#include "absl/strings/escaping.h"
#include "base/check.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"

namespace kvasir::cache {
namespace {

// The first hashed field of a cache id. Increase it when the list of hashed
// fields changes.
constexpr int64_t kCacheIdVersion = 1;
constexpr size_t kCacheIdBytes = 16;
// The first hashed field of a page format id. Increase it when the arrangement
// of a page's bytes changes.
constexpr int64_t kPageFormatVersion = 2;

// Hashes a list of fields. Numbers have 8 bytes and texts begin with their
// length, so the end of one field is never taken for the start of the next.
class FieldHasher {
 public:
  FieldHasher() : context_(EVP_MD_CTX_new()) {
    KVASIR_CHECK(context_ != nullptr);
    KVASIR_CHECK(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }

  void Add(int64_t value) { AddBits(static_cast<uint64_t>(value)); }
  void Add(bool value) { AddBits(value ? 1 : 0); }
  void Add(double value) { AddBits(std::bit_cast<uint64_t>(value)); }
  void Add(absl::string_view text) {
    AddBits(text.size());
    Update(text.data(), text.size());
  }

  std::string Finish() {
    uint8_t digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    KVASIR_CHECK(EVP_DigestFinal_ex(context_.get(), digest, &size) == 1);
    KVASIR_CHECK(size >= kCacheIdBytes);
    return absl::BytesToHexString(absl::string_view(
        reinterpret_cast<const char*>(digest), kCacheIdBytes));
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };

  void AddBits(uint64_t bits) {
    uint8_t bytes[8];  // little-endian on every machine
    for (int i = 0; i < 8; ++i) {
      bytes[i] = static_cast<uint8_t>(bits >> (8 * i));
    }
    Update(bytes, sizeof(bytes));
  }
  void Update(const void* data, size_t size) {
    KVASIR_CHECK(EVP_DigestUpdate(context_.get(), data, size) == 1);
  }

  std::unique_ptr<EVP_MD_CTX, Free> context_;
};

std::string Serialized(const google::protobuf::Message& message) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    KVASIR_CHECK(message.SerializeToCodedStream(&coded));
  }
  return bytes;
}

void AddRegion(const Region& region, FieldHasher* hasher) {
  hasher->Add(region.offset_bytes);
  hasher->Add(region.slot_bytes);
  hasher->Add(region.stored_bytes);
  hasher->Add(region.num_slots);
}

void AddSide(const SideLayout& side, FieldHasher* hasher) {
  hasher->Add(static_cast<int64_t>(side.parts.size()));
  for (const PartLayout& part : side.parts) {
    hasher->Add(static_cast<int64_t>(part.groups.size()));
    for (const GroupLayout& group : part.groups) {
      AddRegion(group.codes, hasher);
      AddRegion(group.params, hasher);
      hasher->Add(group.exact_offset_bytes);
    }
  }
  hasher->Add(side.exact.sink_tokens);
  hasher->Add(side.exact.window_tokens);
  hasher->Add(side.exact.row_bytes);
  hasher->Add(static_cast<int64_t>(side.exact.segments.size()));
  for (const ExactSegment& segment : side.exact.segments) {
    hasher->Add(segment.layer);
    hasher->Add(segment.first_row);
    hasher->Add(segment.num_rows);
    hasher->Add(segment.first_page);
    hasher->Add(segment.offset_bytes);
    hasher->Add(segment.rows_per_page);
  }
}

}  // namespace

std::string PageFormatId(const PageLayout& layout) {
  FieldHasher hasher;
  hasher.Add(kPageFormatVersion);
  hasher.Add(layout.page_tokens());
  hasher.Add(layout.tile_slots());
  hasher.Add(layout.granule_bytes());
  hasher.Add(layout.shard().rank);
  hasher.Add(layout.shard().size);
  hasher.Add(static_cast<int64_t>(layout.layers().size()));
  for (const LayerLayout& layer : layout.layers()) {
    hasher.Add(int64_t{layer.page_group.value()});
    hasher.Add(layer.tile_bytes);
    hasher.Add(layer.page_bytes);
    AddSide(layer.key, &hasher);
    AddSide(layer.value, &hasher);
    AddRegion(layer.landmarks, &hasher);
    const SlotMetadataLayout& slots = layer.slot_metadata;
    AddRegion(slots.scores, &hasher);
    if (slots.num_units == 0) continue;
    hasher.Add(slots.num_units);
    AddRegion(slots.positions, &hasher);
    AddRegion(slots.key_errors, &hasher);
    AddRegion(slots.value_errors, &hasher);
  }
  return hasher.Finish();
}

std::string CacheId(const kvasir::v1::KvPlan& plan,
                    const CacheIdentity& identity) {
  FieldHasher hasher;
  hasher.Add(kCacheIdVersion);
  hasher.Add(int64_t{plan.layers_size()});
  for (const kvasir::v1::LayerPlan& layer : plan.layers()) {
    hasher.Add(Serialized(layer.key()));
    hasher.Add(Serialized(layer.value()));
    if (layer.joint().empty() && layer.exact_sinks() == 0) continue;
    kvasir::v1::LayerPlan both;
    *both.mutable_joint() = layer.joint();
    both.set_exact_sinks(layer.exact_sinks());
    hasher.Add(Serialized(both));
  }
  const plan::AttentionShape& shape = identity.shape;
  hasher.Add(shape.num_kv_heads);
  hasher.Add(shape.head_dim);
  hasher.Add(shape.rotary_dim);
  hasher.Add(shape.qk_norm);
  hasher.Add(shape.num_layers());
  for (const plan::LayerShape& layer : shape.layers) {
    hasher.Add(layer.sliding_window);
    hasher.Add(layer.rope);
  }
  hasher.Add(identity.page_tokens);
  hasher.Add(identity.rope.interleaved);
  hasher.Add(static_cast<int64_t>(identity.rope.frequencies.size()));
  for (double frequency : identity.rope.frequencies) hasher.Add(frequency);
  hasher.Add(identity.rope.attention_factor);
  hasher.Add(identity.tensor_fingerprint);
  if (identity.key_bias_left_out) hasher.Add(true);
  if (!identity.key_means.empty()) hasher.Add(identity.key_means);
  return hasher.Finish();
}

}  // namespace kvasir::cache
