#include "model/shapes/rope_config.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numbers>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace kvasir::model {
namespace {

// The smallest rope_theta. It is above 1, because YaRN divides by log(theta).
constexpr double kMinTheta = 1.0001;
constexpr double kMaxTheta = 1e15;
constexpr double kMaxFactor = 1e6;

// Returns theta^(-2f / dim) for each pair f: the angle in radians by which the
// pair rotates per position.
std::vector<double> DefaultFrequencies(double theta, int64_t dim) {
  std::vector<double> frequencies;
  for (int64_t f = 0; f < dim / 2; ++f) {
    frequencies.push_back(std::pow(
        theta, -2.0 * static_cast<double>(f) / static_cast<double>(dim)));
  }
  return frequencies;
}

// transformers 4 ignores original_max_position_embeddings outside the RoPE
// object, and transformers 5 prefers it to the one inside. So a value outside
// must equal `used`, the one inside.
absl::Status CheckRootContext(const JsonFields& root, int64_t used) {
  constexpr std::string_view kName = "original_max_position_embeddings";
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> given, root.Int(kName));
  if (given.value_or(used) == used) return absl::OkStatus();
  return root.Error(
      kName, absl::StrFormat("%d disagrees with the RoPE parameters, which "
                             "scale a context of %d",
                             *given, used));
}

// Llama 3.1's scaling: long wavelengths are stretched by `factor` and short
// ones are kept. Between the two, the frequency is interpolated linearly in
// (original context length / wavelength).
absl::Status ApplyLlama3(const JsonFields& root, const JsonFields& fields,
                         const RopeContext& context, RopeConfig* config) {
  KVASIR_ASSIGN_OR_RETURN(const double factor,
                          fields.NumberIn("factor", 1.0, kMaxFactor));
  KVASIR_ASSIGN_OR_RETURN(const double low,
                          fields.NumberIn("low_freq_factor", 1e-6, kMaxFactor));
  KVASIR_ASSIGN_OR_RETURN(
      const double high, fields.NumberIn("high_freq_factor", 1e-6, kMaxFactor));
  KVASIR_ASSIGN_OR_RETURN(
      const int64_t old_context,
      fields.IntIn("original_max_position_embeddings", 1, kMaxPositions,
                   context.max_position_embeddings));
  KVASIR_RETURN_IF_ERROR(CheckRootContext(root, old_context));
  if (high <= low) {
    return fields.Error("high_freq_factor",
                        absl::StrFormat("want more than low_freq_factor %g, "
                                        "have %g",
                                        low, high));
  }
  for (double& frequency : config->rope.frequencies) {
    const double wavelength = 2 * std::numbers::pi / frequency;
    const double turns = static_cast<double>(old_context) / wavelength;
    if (turns < low) {
      frequency /= factor;
    } else if (turns <= high) {
      const double keep = (turns - low) / (high - low);
      frequency = (1 - keep) * frequency / factor + keep * frequency;
    }
  }
  return absl::OkStatus();
}

double YarnMscale(double scale, double weight) {
  return scale <= 1 ? 1.0 : 0.1 * weight * std::log(scale) + 1.0;
}

struct YarnRange {
  // Pairs with smaller indices than this keep their frequencies.
  double low = 0;
  // The frequencies of pairs from this index on are divided by `factor`.
  double high = 0;
};

// low: the index of the pair that makes beta_fast full turns within the
// original context. high: the index of the pair that makes beta_slow
// full turns.
absl::StatusOr<YarnRange> CorrectionRange(const JsonFields& fields,
                                          double theta, int64_t dim,
                                          double old_context) {
  KVASIR_ASSIGN_OR_RETURN(double fast,
                          fields.NumberIn("beta_fast", 0, kMaxFactor, 32.0));
  KVASIR_ASSIGN_OR_RETURN(double slow,
                          fields.NumberIn("beta_slow", 0, kMaxFactor, 1.0));
  KVASIR_ASSIGN_OR_RETURN(const bool truncate, fields.BoolOr("truncate", true));
  // Zero means the default, as in other implementations that read these fields.
  if (fast == 0) fast = 32;
  if (slow == 0) slow = 1;
  const auto pair_of = [&](double turns) {
    return static_cast<double>(dim) *
           std::log(old_context / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(theta));
  };
  YarnRange range{pair_of(fast), pair_of(slow)};
  if (truncate) {
    range.low = std::floor(range.low);
    range.high = std::ceil(range.high);
  }
  range.low = std::max(range.low, 0.0);
  range.high = std::min(range.high, static_cast<double>(dim - 1));
  return range;
}

absl::StatusOr<double> YarnAttentionFactor(const JsonFields& fields,
                                           double factor) {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<double> given,
                          fields.Number("attention_factor"));
  if (given.has_value()) {
    if (*given <= 0 || *given > kMaxFactor) {
      return fields.Error(
          "attention_factor",
          absl::StrFormat("want above 0 and at most %g, have %g", kMaxFactor,
                          *given));
    }
    return *given;
  }
  KVASIR_ASSIGN_OR_RETURN(const double mscale,
                          fields.NumberIn("mscale", 0, kMaxFactor, 0.0));
  KVASIR_ASSIGN_OR_RETURN(
      const double mscale_all_dim,
      fields.NumberIn("mscale_all_dim", 0, kMaxFactor, 0.0));
  if (mscale != 0 && mscale_all_dim != 0) {
    return YarnMscale(factor, mscale) / YarnMscale(factor, mscale_all_dim);
  }
  return YarnMscale(factor, 1.0);
}

absl::Status ApplyYarn(const JsonFields& root, const JsonFields& fields,
                       double theta, const RopeContext& context,
                       RopeConfig* config) {
  KVASIR_ASSIGN_OR_RETURN(
      int64_t old_context,
      fields.IntIn("original_max_position_embeddings", 0, kMaxPositions, 0));
  std::optional<double> fallback;
  if (old_context != 0) {
    fallback = static_cast<double>(context.max_position_embeddings) /
               static_cast<double>(old_context);
  } else {
    old_context = context.max_position_embeddings;
  }
  KVASIR_RETURN_IF_ERROR(CheckRootContext(root, old_context));
  KVASIR_ASSIGN_OR_RETURN(const double factor,
                          fields.NumberIn("factor", 1.0, kMaxFactor, fallback));
  const double scaled = factor * static_cast<double>(old_context);
  config->max_positions =
      std::max(context.max_position_embeddings,
               static_cast<int64_t>(
                   std::min(scaled, static_cast<double>(kMaxPositions))));
  KVASIR_ASSIGN_OR_RETURN(config->rope.attention_factor,
                          YarnAttentionFactor(fields, factor));
  KVASIR_ASSIGN_OR_RETURN(
      const YarnRange range,
      CorrectionRange(fields, theta, config->rope.rotary_dim,
                      static_cast<double>(old_context)));
  // Avoids a division by zero.
  const double width = range.high == range.low ? 0.001 : range.high - range.low;
  for (size_t f = 0; f < config->rope.frequencies.size(); ++f) {
    const double stretched =
        std::clamp((static_cast<double>(f) - range.low) / width, 0.0, 1.0);
    double& frequency = config->rope.frequencies[f];
    frequency = frequency / factor * stretched + frequency * (1 - stretched);
  }
  return absl::OkStatus();
}

absl::Status RefusePartialRotary(const JsonFields& fields) {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<double> part,
                          fields.Number("partial_rotary_factor"));
  if (part.has_value() && *part != 1.0) {
    return fields.Unserved(
        "partial_rotary_factor",
        absl::StrFormat("this family rotates whole heads: want 1, have %g",
                        *part));
  }
  return absl::OkStatus();
}

// A place where a config may state a number.
struct Place {
  const JsonFields& fields;
  std::string_view name;
  // False if the reference implementation never reads the number there.
  bool is_read = true;
};

// Returns the number that the places with `is_read` give, or `fallback` if
// none of them gives one. Refuses a config in which two places give
// different numbers, because versions of the reference implementation prefer
// different places.
absl::StatusOr<double> OneOf(std::initializer_list<Place> places, double low,
                             double high, double fallback) {
  std::optional<double> found;
  std::string first = "the default";
  for (const bool is_read : {true, false}) {
    if (!is_read && !found.has_value()) found = fallback;
    for (const Place& place : places) {
      if (place.is_read != is_read) continue;
      KVASIR_ASSIGN_OR_RETURN(const std::optional<double> value,
                              place.fields.NumberWithin(place.name, low, high));
      if (!value.has_value()) continue;
      if (!found.has_value()) {
        found = value;
        first = absl::StrFormat("%s: %s", place.fields.where(), place.name);
      } else if (*found != *value) {
        return place.fields.Error(
            place.name, absl::StrFormat("%.10g disagrees with %s %.10g", *value,
                                        first, *found));
      }
    }
  }
  return *found;
}

// The number of dimensions of a GPT-NeoX head that RoPE rotates.
absl::StatusOr<int64_t> NeoxRotaryDim(const JsonFields& root,
                                      const JsonFields& rope,
                                      int64_t head_dim) {
  constexpr double kDefaultPart = 0.25;
  KVASIR_ASSIGN_OR_RETURN(
      const double part,
      OneOf({{root, "rotary_pct"},
             {rope, "partial_rotary_factor"},
             {root, "partial_rotary_factor", /*is_read=*/false}},
            0, 1, kDefaultPart));
  const auto dim = static_cast<int64_t>(static_cast<double>(head_dim) * part);
  if (dim < 2 || dim % 2 != 0) {
    return root.Unserved(
        "rotary_pct",
        absl::StrFormat("want a part of head_dim %d that is an even number of "
                        "dims, at least 2, have %g: %d dims",
                        head_dim, part, dim));
  }
  return dim;
}

absl::StatusOr<int64_t> Phi3RotaryDim(const JsonFields& root,
                                      const JsonFields& rope,
                                      int64_t head_dim) {
  KVASIR_ASSIGN_OR_RETURN(
      const double part,
      OneOf({{root, "partial_rotary_factor"}, {rope, "partial_rotary_factor"}},
            0, 1, 1.0));
  const auto dim = static_cast<int64_t>(static_cast<double>(head_dim) * part);
  if (dim < 2 || dim % 2 != 0) {
    return root.Unserved(
        "partial_rotary_factor",
        absl::StrFormat("want a part of head_dim %d that is an even number of "
                        "dims, at least 2, have %g: %d dims",
                        head_dim, part, dim));
  }
  return dim;
}

// Returns `frequencies`, each divided by its own factor in the list `name`.
absl::StatusOr<std::vector<double>> DividedByFactors(
    const JsonFields& fields, std::string_view name,
    std::vector<double> frequencies) {
  const nlohmann::json* list = fields.Find(name);
  if (list == nullptr || !list->is_array() ||
      list->size() != frequencies.size()) {
    return fields.Error(
        name, absl::StrFormat("want a list of %d factors, have %s",
                              frequencies.size(),
                              list == nullptr ? "none" : JsonExcerpt(*list)));
  }
  for (size_t f = 0; f < frequencies.size(); ++f) {
    const nlohmann::json& factor = (*list)[f];
    if (!factor.is_number() || !(factor.get<double>() >= 1 / kMaxFactor) ||
        factor.get<double>() > kMaxFactor) {
      return fields.Error(
          name,
          absl::StrFormat("want factors from %g to %g, have %s", 1 / kMaxFactor,
                          kMaxFactor, JsonExcerpt(factor)));
    }
    frequencies[f] /= factor.get<double>();
  }
  return frequencies;
}

// LongRoPE as Phi-3 has it (arXiv:2402.13753): each pair has one factor for
// sequences within the original context, and one for longer sequences.
absl::Status ApplyLongRope(const JsonFields& root, const JsonFields& fields,
                           const RopeContext& context, RopeConfig* config) {
  constexpr std::string_view kOriginal = "original_max_position_embeddings";
  constexpr int64_t kDefaultOriginal = 4096;
  KVASIR_ASSIGN_OR_RETURN(
      const double original,
      OneOf({{root, kOriginal}, {fields, kOriginal}}, 2,
            static_cast<double>(kMaxPositions), kDefaultOriginal));
  RopeSpec& rope = config->rope;
  rope.short_positions = static_cast<int64_t>(original);
  KVASIR_ASSIGN_OR_RETURN(
      rope.long_frequencies,
      DividedByFactors(fields, "long_factor", rope.frequencies));
  KVASIR_ASSIGN_OR_RETURN(
      rope.frequencies,
      DividedByFactors(fields, "short_factor", rope.frequencies));
  const double factor =
      static_cast<double>(context.max_position_embeddings) / original;
  const double usual =
      factor <= 1 ? 1.0 : std::sqrt(1 + std::log(factor) / std::log(original));
  KVASIR_ASSIGN_OR_RETURN(
      rope.attention_factor,
      fields.NumberIn("attention_factor", 1 / kMaxFactor, kMaxFactor, usual));
  return absl::OkStatus();
}

absl::StatusOr<double> ThetaOf(const JsonFields& root, const JsonFields& rope,
                               const RopeContext& context) {
  if (context.neox) {
    return OneOf({{root, "rotary_emb_base"},
                  {rope, "rope_theta"},
                  {root, "rope_theta", /*is_read=*/false}},
                 kMinTheta, kMaxTheta, context.default_theta);
  }
  return OneOf({{root, "rope_theta"}, {rope, "rope_theta"}}, kMinTheta,
               kMaxTheta, context.default_theta);
}

// Returns the type of the scaling: the field rope_type, or type in older files.
absl::StatusOr<std::string> ScalingType(const JsonFields& fields) {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<std::string> type,
                          fields.String("type"));
  KVASIR_ASSIGN_OR_RETURN(const std::optional<std::string> rope_type,
                          fields.String("rope_type"));
  if (type.has_value() && rope_type.has_value() && *type != *rope_type) {
    return fields.Error(
        "rope_type",
        absl::StrFormat("\"%s\" and type \"%s\" disagree", *rope_type, *type));
  }
  return rope_type.value_or(type.value_or("default"));
}

absl::Status ApplyScaling(const JsonFields& root, const JsonFields& fields,
                          double theta, const RopeContext& context,
                          RopeConfig* config) {
  KVASIR_ASSIGN_OR_RETURN(const std::string type, ScalingType(fields));
  if (type == "default") return absl::OkStatus();
  if (type == "linear") {
    KVASIR_ASSIGN_OR_RETURN(const double factor,
                            fields.NumberIn("factor", 1.0, kMaxFactor));
    for (double& frequency : config->rope.frequencies) frequency /= factor;
    return absl::OkStatus();
  }
  // Older files of Phi-3 call LongRoPE "su" or "yarn".
  if (context.phi3 && (type == "longrope" || type == "su" || type == "yarn")) {
    return ApplyLongRope(root, fields, context, config);
  }
  if (type == "llama3") return ApplyLlama3(root, fields, context, config);
  if (type == "yarn") return ApplyYarn(root, fields, theta, context, config);
  if (type == "dynamic" || type == "longrope" || type == "su") {
    return fields.Unserved(
        "rope_type",
        absl::StrFormat("\"%s\" changes frequencies with the length seen, so "
                        "cached keys would go stale; served are default, "
                        "linear, llama3, yarn",
                        type));
  }
  return fields.Unserved(
      "rope_type",
      absl::StrFormat("\"%s\" is unknown; served are default, linear, llama3, "
                      "yarn",
                      type));
}

// Reads the RoPE object `name`, which may be empty, and the older fields
// outside it, such as rope_theta.
absl::StatusOr<RopeConfig> ParseRopeObject(const JsonFields& root,
                                           std::string_view name,
                                           const nlohmann::json& object,
                                           const RopeContext& context) {
  if (!context.layer_type.empty()) {
    const JsonFields types(object,
                           absl::StrFormat("%s: %s", root.where(), name));
    if (const nlohmann::json* own = types.Find(context.layer_type);
        own != nullptr && own->is_object()) {
      RopeContext of_type = context;
      of_type.layer_type = {};
      const nlohmann::json empty = nlohmann::json::object();
      return ParseRopeObject(JsonFields(empty, root.where()),
                             absl::StrFormat("%s.%s", name, context.layer_type),
                             *own, of_type);
    }
    if (context.layer_type == "sliding_attention") {
      KVASIR_ASSIGN_OR_RETURN(const double theta,
                              root.NumberIn("rope_local_base_freq", kMinTheta,
                                            kMaxTheta, context.default_theta));
      RopeConfig config;
      config.max_positions = context.max_position_embeddings;
      config.rope.rotary_dim = context.head_dim;
      config.rope.frequencies = DefaultFrequencies(theta, context.head_dim);
      return config;
    }
  }
  for (const auto& [key, value] : object.items()) {
    if (value.is_object()) {
      return root.Unserved(absl::StrFormat("%s.%s", name, key),
                           "parameters per layer type are not served");
    }
  }
  const JsonFields fields(object,
                          absl::StrFormat("%s: %s", root.where(), name));
  KVASIR_ASSIGN_OR_RETURN(const double theta, ThetaOf(root, fields, context));
  RopeConfig config;
  config.max_positions = context.max_position_embeddings;
  config.rope.rotary_dim = context.head_dim;
  if (context.neox) {
    KVASIR_ASSIGN_OR_RETURN(config.rope.rotary_dim,
                            NeoxRotaryDim(root, fields, context.head_dim));
  } else if (context.phi3) {
    KVASIR_ASSIGN_OR_RETURN(config.rope.rotary_dim,
                            Phi3RotaryDim(root, fields, context.head_dim));
  } else {
    KVASIR_RETURN_IF_ERROR(RefusePartialRotary(root));
    KVASIR_RETURN_IF_ERROR(RefusePartialRotary(fields));
  }
  config.rope.pairing = RopePairing::kHalfSplit;
  config.rope.frequencies = DefaultFrequencies(theta, config.rope.rotary_dim);
  KVASIR_RETURN_IF_ERROR(ApplyScaling(root, fields, theta, context, &config));
  return config;
}

}  // namespace

absl::StatusOr<RopeConfig> ParseRope(const JsonFields& root,
                                     const RopeContext& context) {
  std::optional<RopeConfig> found;
  for (const std::string_view name : {"rope_scaling", "rope_parameters"}) {
    const nlohmann::json* object = root.Find(name);
    if (object == nullptr) continue;
    if (!object->is_object()) {
      return root.Error(name, absl::StrFormat("want an object, have %s",
                                              JsonExcerpt(*object)));
    }
    if (object->empty()) continue;
    KVASIR_ASSIGN_OR_RETURN(RopeConfig config,
                            ParseRopeObject(root, name, *object, context));
    // The two objects may be written differently, but must mean the same.
    if (found.has_value() && *found != config) {
      return root.Error(
          name, absl::StrFormat("%s disagrees with rope_scaling %s: both must "
                                "mean the same; keep one of the two",
                                JsonExcerpt(*object),
                                JsonExcerpt(*root.Find("rope_scaling"))));
    }
    found = std::move(config);
  }
  if (found.has_value()) return *std::move(found);
  return ParseRopeObject(root, "rope_parameters", nlohmann::json::object(),
                         context);
}

}  // namespace kvasir::model
