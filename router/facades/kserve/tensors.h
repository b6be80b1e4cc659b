// Reads the input tensors of a ModelInferRequest and checks their types
// and shapes.
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

// The most inputs, outputs or parameters of a request; all schemas together
// have fewer. The limit is checked before names are compared with each other,
// because that takes quadratic time.
inline constexpr int kMaxKserveNames = 64;

// Reads tensors by name. It remembers which ones have been read, so that the
// others can be refused as unknown. A single value may have the shape [], [1]
// or [1, 1], because clients differ here. A vector may have a leading batch
// dimension of 1. The request must outlive this object.
// Threads: only one thread at a time may use it.
// Errors: INVALID_ARGUMENT names the tensor, what is allowed and what was
// given; UNIMPLEMENTED for shared memory and unknown parameters of a tensor.
class KserveTensors {
 public:
  static absl::StatusOr<KserveTensors> Create(
      const inference::ModelInferRequest& request);

  bool Has(const std::string& name) const { return Find(name) != nullptr; }

  // Each of these returns the only value of a tensor; nullopt if the tensor
  // is absent. Int accepts every integer datatype; Float accepts FP32, FP64
  // and integers.
  absl::StatusOr<std::optional<bool>> Bool(const std::string& name);
  absl::StatusOr<std::optional<int64_t>> Int(const std::string& name);
  absl::StatusOr<std::optional<double>> Float(const std::string& name);
  absl::StatusOr<std::optional<std::string>> String(const std::string& name);

  // Returns all values in order; an empty list if the tensor is absent.
  absl::StatusOr<std::vector<std::string>> Strings(const std::string& name);
  // Returns the first `count` elements as token ids, which must be 0 or more.
  // Copies them only once. `count` must be at most NumElements(name).
  absl::StatusOr<proto::TokenBytes> TokenIds(const std::string& name,
                                             int64_t count);
  // Returns 0 if the tensor is absent.
  int64_t NumElements(const std::string& name) const;
  // Returns the two rows of a tensor with shape [2, n] or [1, 2, n]; an empty
  // list if the tensor is absent.
  absl::StatusOr<std::vector<std::vector<int64_t>>> TwoRows(
      const std::string& name);

  // Returns the names of tensors that have not been read, in the
  // request's order.
  std::vector<std::string> Unread() const;

 private:
  struct Tensor {
    const inference::ModelInferRequest::InferInputTensor* input = nullptr;
    // Null if the data is in input->contents().
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

// Returns the shape as text, for example "[1, 4]".
std::string ShapeText(
    const inference::ModelInferRequest::InferInputTensor& input);

}  // namespace kvasir::router
