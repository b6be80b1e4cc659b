// The input tensors of one ModelInferRequest, checked and typed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/inference/grpc_service.pb.h"
#include "proto/token_bytes.h"

namespace kvasir::router {

// The most inputs (and outputs, and parameters) that one request may name: more
// than all schemas have together. Checked before any of them is read, so that
// no request costs more than its bytes.
inline constexpr int kMaxKserveNames = 64;

// Reads tensors by name and remembers which have been read, so that unknown
// ones can be refused instead of ignored.
//
// Both wire forms are accepted: raw_input_contents (all inputs) and typed
// contents. Clients disagree on the shape of a scalar, so [], [1] and [1, 1]
// are the same, and a vector may have a leading batch dimension of 1.
//
// Threads: one at a time. Views the request, which must outlive it.
// Errors: INVALID_ARGUMENT names the tensor, the wanted and the given value;
//   UNIMPLEMENTED for shared memory and unknown tensor parameters.
class KserveTensors {
 public:
  static absl::StatusOr<KserveTensors> Create(
      const inference::ModelInferRequest& request);

  bool Has(const std::string& name) const { return Find(name) != nullptr; }

  // One value; nullopt if the tensor is absent. Integers may come in any
  // integer datatype that holds the value, floats in FP32, FP64 and integers.
  absl::StatusOr<std::optional<bool>> Bool(const std::string& name);
  absl::StatusOr<std::optional<int64_t>> Int(const std::string& name);
  absl::StatusOr<std::optional<double>> Float(const std::string& name);
  absl::StatusOr<std::optional<std::string>> String(const std::string& name);

  // Any number of values, in order; empty if the tensor is absent.
  absl::StatusOr<std::vector<std::string>> Strings(const std::string& name);
  // The first `count` elements (or fewer, if there are fewer), ids of 0 or
  // more, copied once from the request's bytes.
  absl::StatusOr<proto::TokenBytes> TokenIds(const std::string& name,
                                             int64_t count);
  // 0 if the tensor is absent.
  int64_t NumElements(const std::string& name) const;
  // A [2, n] tensor (a leading 1 is dropped), row by row; empty if absent.
  absl::StatusOr<std::vector<std::vector<int64_t>>> TwoRows(
      const std::string& name);

  // Names that have not been read, in the request's order.
  std::vector<std::string> Unread() const;

 private:
  struct Tensor {
    const inference::ModelInferRequest::InferInputTensor* input = nullptr;
    // Null when the data is in input->contents().
    const std::string* raw = nullptr;
    int64_t num_elements = 0;
    bool read = false;
  };

  KserveTensors() = default;
  const Tensor* Find(const std::string& name) const;
  Tensor* Read(const std::string& name);

  static absl::StatusOr<std::vector<int64_t>> DecodeInts(const Tensor& tensor);
  static absl::StatusOr<std::vector<double>> DecodeFloats(const Tensor& tensor);
  static absl::StatusOr<std::vector<std::string>> DecodeStrings(
      const Tensor& tensor);
  static absl::Status CheckScalar(const Tensor& tensor);
  static absl::Status CheckVector(const Tensor& tensor);

  std::vector<Tensor> tensors_;
  absl::flat_hash_map<absl::string_view, size_t> index_by_name_;
};

// "[1, 4]".
std::string ShapeText(
    const inference::ModelInferRequest::InferInputTensor& input);

}  // namespace kvasir::router
