// An opened checkpoint: a Hugging Face folder or a GGUF file. It describes the
// model. It checks that all needed tensors exist and have the right shapes
// before any of their data is read.
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

// A rectangle of a tensor: consecutive rows, and the same range of bytes in
// each of these rows.
struct TensorRange {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t first_byte = 0;
  int64_t row_bytes = 0;

  static TensorRange All(const TensorInfo& tensor);
};

// Reads one tensor, or only a range of it, from front to back in blocks of
// rows. It hashes the tiles that it reads (fingerprint.h) and asks the kernel
// to read ahead. If the range has whole rows, it asks the kernel to remove each
// block that was read from its page cache.
// Owns: nothing. Checkpoint and buffer must outlive it.
// Threads: a stream is used by one thread. Any number of streams may read from
// one checkpoint at the same time.
class TensorStream {
 public:
  struct Block {
    int64_t first_row = 0;
    int64_t num_rows = 0;  // 0: the end of the range
    std::span<const std::byte> bytes;
  };

  // If `buffer` is smaller than one row, Next() returns RESOURCE_EXHAUSTED.
  // CHECKs that the range lies inside the tensor.
  TensorStream(const TensorStore::Entry& tensor, std::span<std::byte> buffer);
  TensorStream(const TensorStore::Entry& tensor, const TensorRange& range,
               std::span<std::byte> buffer);

  const TensorInfo& info() const { return *tensor_.info; }
  absl::StatusOr<Block> Next();
  // The tiles of the range, indexed from the start of the range. They are
  // complete after Next() has returned the end of the range.
  Tiles tiles() const { return hasher_.tiles(); }
  // Bytes requested from the file so far.
  int64_t read_bytes() const { return read_bytes_; }

 private:
  bool whole_rows() const;
  // For the next three functions, row 0 is the range's first row.
  int64_t RowsOfBlock(int64_t first_row) const;
  void WillNeed(int64_t first_row, int64_t num_rows) const;
  absl::Status Read(int64_t first_row, std::span<std::byte> out);

  TensorStore::Entry tensor_;
  TensorRange range_;
  std::span<std::byte> buffer_;
  int64_t next_row_ = 0;  // counted from the range's first row
  int64_t read_bytes_ = 0;
  TileHasher hasher_;
};

// Owns: the open files.
// Threads: const methods may be called from any thread.
// Errors: NOT_FOUND for a missing tensor, INVALID_ARGUMENT for a wrong shape
//   or type, UNIMPLEMENTED for models that are not served. The error names the
//   file, the tensor, the values allowed and the value found.
class Checkpoint {
 public:
  // Opens a folder, which may have a compression plan (kv_plan.json), or a GGUF
  // file, which has none. Checks the tensors that do not depend on a plan, and,
  // if there is no plan, those of attention. If there is a plan, the caller
  // must validate it and then call CheckTensors.
  static absl::StatusOr<Checkpoint> Open(const std::string& folder);

  // Checks that the checkpoint has the tensors that `plan` needs, in the right
  // shapes. A layer with compressed attention must have no attention projection
  // that the plan does not use. If `with_ranges` is false, the tensors of
  // static ranges may be missing. Also returns the errors of RequiredTensors.
  //
  // `plan` must be resolved for this model.
  absl::Status CheckTensors(const plan::ResolvedPlan& plan,
                            bool with_ranges = true) const;

  // The folder, or the path of the GGUF file.
  const std::string& folder() const { return folder_; }
  bool is_gguf() const { return is_gguf_; }
  // The last part of folder()'s path. For a GGUF file, ".gguf" and the number
  // of a split file are removed.
  std::string name() const;
  const DecoderSpec& spec() const { return spec_; }
  // The text of kv_plan.json, if there is one.
  const std::optional<std::string>& kv_plan_json() const {
    return kv_plan_json_;
  }

  // Finds a tensor by its canonical name (family_tensors.h). NOT_FOUND if there
  // is none, INVALID_ARGUMENT if its type is no weight type.
  absl::StatusOr<TensorStore::Entry> Tensor(std::string_view name) const;
  // All tensors by their canonical names. Tensors that no decoder reads keep
  // their own names.
  const TensorStore& tensors() const { return store_; }

 private:
  Checkpoint(std::string folder, DecoderSpec spec, TensorStore store)
      : folder_(std::move(folder)),
        spec_(std::move(spec)),
        store_(std::move(store)) {}

  static absl::StatusOr<Checkpoint> OpenGguf(const std::string& path);
  absl::Status CheckTensor(const RequiredTensor& want) const;
  absl::Status CheckPlainTensors(bool attention) const;
  // Checks that compressed layers have no attention projections except those in
  // `wanted`. `compressed` is indexed by layer.
  absl::Status CheckNoOthers(const std::vector<RequiredTensor>& wanted,
                             const std::vector<bool>& compressed) const;

  std::string folder_;
  bool is_gguf_ = false;
  DecoderSpec spec_;
  TensorStore store_;
  std::optional<std::string> kv_plan_json_;
};

}  // namespace kvasir::model
