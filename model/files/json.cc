#include "model/files/json.h"

#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace kvasir::model {
namespace {

using nlohmann::json;

// Finds a key that an object has twice. This takes a separate pass, because
// json::parse with a callback would take time quadratic in the number of an
// object's members.
class DuplicateKeys final : public nlohmann::json_sax<json> {
 public:
  // The duplicate key, shortened for error messages; nullopt if there is none.
  const std::optional<std::string>& found() const { return found_; }

  bool start_object(size_t) override {
    keys_.emplace_back();
    return true;
  }
  bool end_object() override {
    keys_.pop_back();
    return true;
  }
  bool key(std::string& key) override {
    if (!keys_.back().insert(key).second) found_ = key.substr(0, 80);
    return !found_.has_value();
  }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(int64_t) override { return true; }
  bool number_unsigned(uint64_t) override { return true; }
  bool number_float(double, const std::string&) override { return true; }
  bool string(std::string&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool parse_error(size_t, const std::string&,
                   const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  // the keys so far of each object that is not yet closed
  std::vector<std::unordered_set<std::string>> keys_;
  std::optional<std::string> found_;
};

}  // namespace

absl::Status CheckJsonShape(std::string_view text, std::string_view where,
                            const JsonLimits& limits) {
  int depth = 0;
  int64_t values = 1;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
      continue;
    }
    if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      ++values;
      if (++depth > limits.max_depth) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "%s: JSON is nested deeper than %d levels (the limit) at byte %d",
            where, limits.max_depth, i));
      }
    } else if (c == '}' || c == ']') {
      --depth;
    } else if (c == ',') {
      ++values;
    }
    if (values > limits.max_values) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: JSON has more than %d values (the limit)", where,
                          limits.max_values));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<json> ParseJson(std::string_view text, std::string_view where,
                               const JsonLimits& limits) {
  KVASIR_RETURN_IF_ERROR(CheckJsonShape(text, where, limits));
  try {
    json value = json::parse(text.begin(), text.end());
    DuplicateKeys keys;
    json::sax_parse(text.begin(), text.end(), &keys);
    if (keys.found().has_value()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: key \"%s\" occurs twice in the same object",
                          where, *keys.found()));
    }
    return value;
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is not valid JSON: %s", where,
                        std::string_view(error.what()).substr(0, 300)));
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

absl::Status JsonFields::Unserved(std::string_view name,
                                  std::string_view what) const {
  return absl::UnimplementedError(
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
    return TypeError(name, "an integer below 2^63", *value);
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
    return Error(name,
                 absl::StrFormat("is missing; it must be %d to %d", low, high));
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
    return Error(name,
                 absl::StrFormat("is missing; it must be %g to %g", low, high));
  }
  if (!(*value >= low && *value <= high)) {
    return Error(name,
                 absl::StrFormat("want %g to %g, have %g", low, high, *value));
  }
  return *value;
}

absl::StatusOr<std::optional<int64_t>> JsonFields::IntWithin(
    std::string_view name, int64_t low, int64_t high) const {
  if (Find(name) == nullptr) return std::nullopt;
  return IntIn(name, low, high);
}

absl::StatusOr<std::optional<double>> JsonFields::NumberWithin(
    std::string_view name, double low, double high) const {
  if (Find(name) == nullptr) return std::nullopt;
  return NumberIn(name, low, high);
}

absl::StatusOr<bool> JsonFields::BoolOr(std::string_view name,
                                        bool fallback) const {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<bool> value, Bool(name));
  return value.value_or(fallback);
}

}  // namespace kvasir::model
