#include "model/gguf/gguf_model.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace kvasir::model {
namespace {

constexpr std::string_view kCountKey = "split.count";
constexpr std::string_view kNumberKey = "split.no";
constexpr std::string_view kTensorsKey = "split.tensors.count";
// The names of split files contain the number of files with five digits.
constexpr int64_t kMaxFiles = 99'999;

// Returns how the name of file `number` ends; `number` counts from 0.
std::string Ending(int64_t number, int64_t count) {
  return absl::StrFormat("-%05d-of-%05d.gguf", number + 1, count);
}

// Checks a file's number and the number of files. Files after the first one
// need no other keys.
absl::Status CheckNumber(const GgufHeader& header, int64_t number,
                         int64_t count) {
  for (const auto& [key, want] :
       {std::pair(kNumberKey, number), std::pair(kCountKey, count)}) {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> have, header.Int(key));
    if (have == want) continue;
    return header.Error(
        key, absl::StrFormat(
                 "want %d, have %s", want,
                 have.has_value() ? absl::StrCat(*have) : "no such key"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GgufModel> OpenGgufModel(const std::string& path) {
  KVASIR_ASSIGN_OR_RETURN(RandomAccessFile first, RandomAccessFile::Open(path));
  KVASIR_ASSIGN_OR_RETURN(GgufHeader header, GgufHeader::Read(first));
  GgufModel model{std::move(header), {}};
  model.files.push_back(std::move(first));
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> stated,
                          model.header.Int(kCountKey));
  const int64_t count = stated.value_or(1);
  if (count < 0 || count > kMaxFiles) {
    return model.header.Error(
        kCountKey, absl::StrFormat("want 0 to %d, have %d", kMaxFiles, count));
  }
  if (count <= 1) return model;
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> number,
                          model.header.Int(kNumberKey));
  const std::string ending = Ending(number.value_or(0), count);
  if (number.value_or(0) < 0 || number.value_or(0) >= count ||
      !path.ends_with(ending)) {
    return model.header.Error(
        kCountKey, absl::StrFormat(
                       "the model is in %d files, so split.no must be 0 to %d, "
                       "and the name of its first file must end with %s",
                       count, count - 1, Ending(0, count)));
  }
  const std::string stem = path.substr(0, path.size() - ending.size());
  if (number.value_or(0) != 0) {
    return model.header.Error(
        kNumberKey, absl::StrFormat("this is file %d of the %d files of a "
                                    "model; give the first, %s",
                                    *number + 1, count,
                                    absl::StrCat(stem, Ending(0, count))));
  }
  for (int64_t i = 1; i < count; ++i) {
    absl::StatusOr<RandomAccessFile> file =
        RandomAccessFile::Open(absl::StrCat(stem, Ending(i, count)));
    if (!file.ok()) {
      return absl::Status(
          file.status().code(),
          absl::StrFormat("%s; it is file %d of the %d files of the model %s",
                          file.status().message(), i + 1, count, path));
    }
    KVASIR_ASSIGN_OR_RETURN(const GgufHeader next, GgufHeader::Read(*file));
    KVASIR_RETURN_IF_ERROR(CheckNumber(next, i, count));
    KVASIR_RETURN_IF_ERROR(model.header.Append(next));
    model.files.push_back(*std::move(file));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> tensors,
                          model.header.Int(kTensorsKey));
  const auto have = static_cast<int64_t>(model.header.tensors().size());
  if (tensors.value_or(have) != have) {
    return model.header.Error(
        kTensorsKey,
        absl::StrFormat("want the number of tensors in all files, %d, have %d",
                        have, *tensors));
  }
  return model;
}

std::string_view WithoutSplitNumber(std::string_view stem) {
  constexpr std::string_view kForm = "-00000-of-00000";
  if (stem.size() <= kForm.size()) return stem;
  const std::string_view end = stem.substr(stem.size() - kForm.size());
  const bool is_number =
      std::equal(end.begin(), end.end(), kForm.begin(), [](char c, char form) {
        return form == '0' ? absl::ascii_isdigit(static_cast<unsigned char>(c))
                           : c == form;
      });
  return is_number ? stem.substr(0, stem.size() - kForm.size()) : stem;
}

}  // namespace kvasir::model
