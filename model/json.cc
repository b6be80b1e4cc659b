#include "model/json.h"

#include <cmath>
#include <limits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

// Watches the parser's events; what it refuses is dropped from the tree, so a
// hostile text cannot build a deep one.
class Guard {
 public:
  explicit Guard(int max_depth) : max_depth_(max_depth) {}

  bool operator()(int depth, json::parse_event_t event, const json& parsed) {
    if (event == json::parse_event_t::object_start ||
        event == json::parse_event_t::array_start) {
      if (depth >= max_depth_) {
        if (error_.empty()) {
          error_ = absl::StrFormat("nests deeper than %d", max_depth_);
        }
        return false;
      }
      if (keys_.size() <= static_cast<size_t>(depth)) {
        keys_.resize(static_cast<size_t>(depth) + 1);
      }
      keys_[static_cast<size_t>(depth)].clear();
    } else if (event == json::parse_event_t::key) {
      // Keys of an object that was refused for its depth come here too.
      if (depth > max_depth_) return false;
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_[static_cast<size_t>(depth) - 1].insert(key).second &&
          error_.empty()) {
        error_ = absl::StrFormat("key \"%s\" is there twice", key);
      }
    }
    return true;
  }

  const std::string& error() const { return error_; }

 private:
  int max_depth_;
  std::vector<std::unordered_set<std::string>> keys_;  // per depth
  std::string error_;
};

}  // namespace

absl::StatusOr<json> ParseJson(std::string_view text, std::string_view where,
                               const JsonLimits& limits) {
  Guard guard(limits.max_depth);
  try {
    json value = json::parse(
        text.begin(), text.end(),
        [&guard](int depth, json::parse_event_t event, json& parsed) {
          return guard(depth, event, parsed);
        });
    if (!guard.error().empty()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: %s", where, guard.error()));
    }
    return value;
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: not JSON: %s", where, error.what()));
  }
}

std::string JsonExcerpt(const json& value) {
  constexpr size_t kMaxLength = 80;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true,
                                json::error_handler_t::replace);
  if (text.size() > kMaxLength) {
    text.resize(kMaxLength);
    text += "...";
  }
  return text;
}

absl::Status JsonFields::Error(std::string_view name,
                               std::string_view what) const {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: %s: %s", where_, name, what));
}

absl::Status JsonFields::TypeError(std::string_view name, std::string_view want,
                                   const json& have) const {
  return Error(name,
               absl::StrFormat("want %s, have %s", want, JsonExcerpt(have)));
}

const json* JsonFields::Find(std::string_view name) const {
  if (!object_.is_object()) return nullptr;
  const auto found = object_.find(std::string(name));
  if (found == object_.end() || found->is_null()) return nullptr;
  return &*found;
}

bool JsonFields::IsNull(std::string_view name) const {
  if (!object_.is_object()) return false;
  const auto found = object_.find(std::string(name));
  return found != object_.end() && found->is_null();
}

absl::StatusOr<std::optional<int64_t>> JsonFields::Int(
    std::string_view name) const {
  const json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (value->is_number_unsigned() &&
      value->get<uint64_t>() >
          static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return TypeError(name, "an integer of 63 bits", *value);
  }
  if (!value->is_number_integer()) return TypeError(name, "an integer", *value);
  return value->get<int64_t>();
}

absl::StatusOr<std::optional<double>> JsonFields::Number(
    std::string_view name) const {
  const json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) return TypeError(name, "a number", *value);
  const double number = value->get<double>();
  if (!std::isfinite(number)) return TypeError(name, "a finite number", *value);
  return number;
}

absl::StatusOr<std::optional<bool>> JsonFields::Bool(
    std::string_view name) const {
  const json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) return TypeError(name, "true or false", *value);
  return value->get<bool>();
}

absl::StatusOr<std::optional<std::string>> JsonFields::String(
    std::string_view name) const {
  const json* value = Find(name);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) return TypeError(name, "a string", *value);
  return value->get<std::string>();
}

absl::StatusOr<int64_t> JsonFields::IntIn(
    std::string_view name, int64_t low, int64_t high,
    std::optional<int64_t> fallback) const {
  KVASIR_ASSIGN_OR_RETURN(std::optional<int64_t> value, Int(name));
  if (!value.has_value()) value = fallback;
  if (!value.has_value()) {
    return Error(name, absl::StrFormat("is missing, want %d to %d", low, high));
  }
  if (*value < low || *value > high) {
    return Error(name,
                 absl::StrFormat("want %d to %d, have %d", low, high, *value));
  }
  return *value;
}

absl::StatusOr<double> JsonFields::NumberIn(
    std::string_view name, double low, double high,
    std::optional<double> fallback) const {
  KVASIR_ASSIGN_OR_RETURN(std::optional<double> value, Number(name));
  if (!value.has_value()) value = fallback;
  if (!value.has_value()) {
    return Error(name, absl::StrFormat("is missing, want %g to %g", low, high));
  }
  if (!(*value >= low && *value <= high)) {
    return Error(name,
                 absl::StrFormat("want %g to %g, have %g", low, high, *value));
  }
  return *value;
}

absl::StatusOr<bool> JsonFields::BoolOr(std::string_view name,
                                        bool fallback) const {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<bool> value, Bool(name));
  return value.value_or(fallback);
}

}  // namespace kvasir::model
