// A checkpoint folder, opened: what the model is, and that all tensors it needs
// are there in the right shape before any byte of them is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/checkpoint/fingerprint.h"
#include "model/checkpoint/plan_tensors.h"
#include "model/checkpoint/safetensors.h"
#include "model/shapes/config.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// Rows of a tensor, and of each of them so many bytes.
struct TensorRange {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t first_byte = 0;
  int64_t row_bytes = 0;

  static TensorRange All(const TensorInfo& tensor);
};

// Reads one tensor, or a range of it and nothing else, from front to back in
// blocks of whole rows, hashes its tiles on the way, reads ahead, and lets go
// of the pages behind.
// Owns: nothing; checkpoint and buffer must outlive it.
// Threads: one; any number of streams may run over one checkpoint.
class TensorStream {
 public:
  struct Block {
    int64_t first_row = 0;
    int64_t num_rows = 0;  // 0: the end
    std::span<const std::byte> bytes;
  };

  // `buffer` must hold one row; RESOURCE_EXHAUSTED otherwise from Next(). A
  // range lies inside the tensor (CHECK).
  TensorStream(const TensorStore::Entry& tensor, std::span<std::byte> buffer);
  TensorStream(const TensorStore::Entry& tensor, const TensorRange& range,
               std::span<std::byte> buffer);

  const TensorInfo& info() const { return *tensor_.info; }
  absl::StatusOr<Block> Next();
  // Of the range, as if the tensor began and ended with it; valid after its end
  // was reached.
  Tiles tiles() const { return hasher_.tiles(); }
  // Asked of the file so far.
  int64_t read_bytes() const { return read_bytes_; }

 private:
  bool whole_rows() const;
  // Counted from the range's first row, both.
  int64_t RowsOfBlock(int64_t first_row) const;
  void WillNeed(int64_t first_row, int64_t num_rows) const;
  absl::Status Read(int64_t first_row, std::span<std::byte> out);

  TensorStore::Entry tensor_;
  TensorRange range_;
  std::span<std::byte> buffer_;
  int64_t next_row_ = 0;  // of the range
  int64_t read_bytes_ = 0;
  TileHasher hasher_;
};

// Owns: the open files.
// Threads: const methods from any thread.
// Errors: NOT_FOUND for a missing tensor, INVALID_ARGUMENT for a wrong shape or
// type, each with file, tensor, want and have; UNIMPLEMENTED for models not
// served.
class Checkpoint {
 public:
  // Checks all that no plan changes, and of a folder without a kv_plan.json the
  // attention tensors too. With one, whoever has read and judged the plan goes
  // on with CheckTensors.
  static absl::StatusOr<Checkpoint> Open(const std::string& folder);

  // Whether the tensors are those of this plan, which was resolved for the
  // model: every one there in its shape, and in layers whose
  // attention is not the plain one no projection beside them. RequiredTensors'
  // errors too. Without `with_ranges`, those of codes may still be missing.
  absl::Status CheckTensors(const plan::ResolvedPlan& plan,
                            bool with_ranges = true) const;

  const std::string& folder() const { return folder_; }
  // The folder's own name.
  std::string name() const;
  const DecoderSpec& spec() const { return spec_; }
  // Text of kv_plan.json, if there is one.
  const std::optional<std::string>& kv_plan_json() const {
    return kv_plan_json_;
  }

  // A tensor of a weight type by our name (family_tensors.h); NOT_FOUND, or
  // INVALID_ARGUMENT for another type.
  absl::StatusOr<TensorStore::Entry> Tensor(std::string_view name) const;
  // By our names, what no decoder reads by its own.
  const TensorStore& tensors() const { return store_; }

 private:
  Checkpoint(std::string folder, DecoderSpec spec, TensorStore store)
      : folder_(std::move(folder)),
        spec_(std::move(spec)),
        store_(std::move(store)) {}

  absl::Status CheckTensor(const RequiredTensor& want) const;
  absl::Status CheckPlainTensors(bool attention) const;
  // Of the projections of attention. `compressed`: by layer.
  absl::Status CheckNoOthers(const std::vector<RequiredTensor>& wanted,
                             const std::vector<bool>& compressed) const;

  std::string folder_;
  DecoderSpec spec_;
  TensorStore store_;
  std::optional<std::string> kv_plan_json_;
};

}  // namespace kvasir::model
