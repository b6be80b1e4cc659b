#include "compress/evaluate/baselines.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "compress/evaluate/cache_transforms.h"
#include "compress/evaluate/oscar.h"
#include "compress/evaluate/row_codes.h"
#include "compress/runtime/torch_status.h"

namespace kvasir::compress {
namespace {

constexpr double kNumberBytes = 2.0;  // bytes of a bf16 number
// bytes of a float16 minimum and scale
constexpr double kParamsBytes = 2.0 + 2.0;
constexpr double kNormBytes = 2.0;  // bytes of a float16 norm
constexpr double kFewestKeep = 1.0 / 1024.0;
constexpr int64_t kMostExactRows = 1 << 20;

// Returns the bytes per token of one head with `channels` numbers that are
// coded in `bits` bits, including the minimum and scale of each group of
// `group` numbers. With `group` 0 all numbers are one group.
double RowBytes(int64_t channels, int64_t bits, int64_t group = 0) {
  const auto count = static_cast<double>(channels);
  if (bits == kExactBits) return count * kNumberBytes;
  const double runs = group == 0 ? 1.0 : count / static_cast<double>(group);
  return std::ceil(count * static_cast<double>(bits) / 8.0) +
         runs * kParamsBytes;
}

// A baseline's name, split at commas. For example,
// "kivi:2,group=32,residual=128" has the method "kivi", the word "2" and two
// settings.
struct Name {
  std::string text;
  const char* kind = "baseline";
  std::string method;
  std::vector<std::string> words;               // the parts without "="
  std::map<std::string, std::string> settings;  // the parts with "="
  bool repeats = false;  // true if a setting occurs twice

  absl::Status Refuse(absl::string_view want) const {
    return absl::InvalidArgumentError(
        absl::StrCat(kind, " \"", text, "\": want ", want));
  }
};

Name ParseName(const std::string& text) {
  Name name;
  name.text = text;
  const std::pair<std::string, std::string> halves =
      absl::StrSplit(text, absl::MaxSplits(':', 1));
  name.method = halves.first;
  for (absl::string_view word : absl::StrSplit(halves.second, ',')) {
    const size_t equals = word.find('=');
    if (equals == absl::string_view::npos) {
      name.words.emplace_back(word);
    } else {
      const bool added =
          name.settings.emplace(word.substr(0, equals), word.substr(equals + 1))
              .second;
      name.repeats = name.repeats || !added;
    }
  }
  return name;
}

std::optional<int64_t> ParseBits(absl::string_view text, bool may_be_exact) {
  int64_t bits = 0;
  if (!absl::SimpleAtoi(text, &bits)) return std::nullopt;
  const bool known = (bits >= 1 && bits <= 4) || bits == 8;
  if (known || (may_be_exact && bits == kExactBits)) return bits;
  return std::nullopt;
}

// Reads the bit widths of keys ("k") and values ("v") from words such as "k4",
// starting at word `first`. A letter of `sides` that no word begins with gets
// kExactBits. Returns nullopt if a word is invalid or repeated.
std::optional<std::map<char, int64_t>> SideBits(const Name& name, size_t first,
                                                absl::string_view sides) {
  std::map<char, int64_t> bits;
  for (size_t i = first; i < name.words.size(); ++i) {
    const absl::string_view word = name.words[i];
    if (word.empty() || !absl::StrContains(sides, word[0])) return std::nullopt;
    const std::optional<int64_t> parsed = ParseBits(word.substr(1), true);
    if (!parsed.has_value() || !bits.emplace(word[0], *parsed).second) {
      return std::nullopt;
    }
  }
  for (const char side : sides) bits.emplace(side, kExactBits);
  return bits;
}

// The cost of a baseline's cache, for reports.
struct Cost {
  double keep = 1.0;
  double key_bytes = 0.0;    // per layer and token
  double value_bytes = 0.0;  // per layer and token
  double fixed_bytes = 0.0;  // per layer and sequence
};

struct Maker {
  const Name& name;
  const BaselineRequest& request;
  const model::DecoderSpec& spec;
  const ExactRows& exact;

  double heads() const { return static_cast<double>(spec.num_kv_heads); }
  double width() const {
    return static_cast<double>(spec.num_kv_heads * spec.head_dim);
  }
  double SideBytes(int64_t bits, int64_t group = 0) const {
    return heads() * RowBytes(spec.head_dim, bits, group);
  }
  // Returns FailedPrecondition if there is no calibration text, from which the
  // baseline takes `what`.
  absl::Status CheckText(absl::string_view what) const {
    if (request.calibration_ids.defined()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("baseline \"", name.text, "\" takes its ", what,
                     " from a calibration text, but none was given"));
  }
  // Makes the baseline and computes its bytes. An exact row replaces its codes,
  // so it adds only the bytes by which it is larger.
  Baseline Finish(std::unique_ptr<CacheTransform> transform,
                  const Cost& cost) const {
    const double exact_bytes = 2.0 * width() * kNumberBytes;
    const double coded_bytes = cost.key_bytes + cost.value_bytes;
    const auto skipped = static_cast<double>(2 * exact.skip);
    const double coded = static_cast<double>(spec.num_layers()) - skipped;
    const auto exact_tokens = static_cast<double>(exact.sinks + exact.window);
    Baseline baseline;
    baseline.transform =
        WithExactRows(std::move(transform), exact, spec.num_layers());
    Candidate& candidate = baseline.candidate;
    candidate.model = name.text;
    candidate.method = name.method;
    candidate.decoder = request.decoder;
    candidate.transform = baseline.transform.get();
    candidate.keep = (coded * cost.keep + skipped) / (coded + skipped);
    candidate.exact_sinks = exact.sinks;
    candidate.exact_window = exact.window;
    candidate.kv_payload_bytes_per_token =
        coded * coded_bytes + skipped * exact_bytes;
    candidate.kv_bytes_per_token = candidate.kv_payload_bytes_per_token;
    candidate.fixed_bytes_per_sequence = static_cast<int64_t>(
        std::ceil(coded * (cost.fixed_bytes +
                           exact_tokens * (exact_bytes - coded_bytes))));
    return baseline;
  }
};

// Makes a baseline that codes each row of keys and values separately. Words
// such as k4 and v4 in the baseline's name give the bits.
using MakeRowCode = RowCode (*)(int64_t bits);
absl::StatusOr<Baseline> MakeByBits(const Maker& m, absl::string_view want,
                                    MakeRowCode code, double params_bytes) {
  const auto bits = SideBits(m.name, 0, "kv");
  if (!bits.has_value() || m.name.words.empty() || !m.name.settings.empty()) {
    return m.name.Refuse(want);
  }
  const auto bytes = [&](int64_t side) {
    const double exact_extra = side == kExactBits ? 0.0 : params_bytes;
    return m.heads() *
           (std::ceil(static_cast<double>(m.spec.head_dim * side) / 8.0) +
            exact_extra);
  };
  const int64_t key = bits->at('k');
  const int64_t value = bits->at('v');
  return m.Finish(MakeCodedRows(code(key), code(value)),
                  {.key_bytes = bytes(key), .value_bytes = bytes(value)});
}

absl::StatusOr<Baseline> MakePerToken(const Maker& m) {
  return MakeByBits(
      m, "per-token:k4,v4 with 1, 2, 3, 4, 8 or 16 bits",
      [](int64_t bits) -> RowCode {
        return [bits](const at::Tensor& rows) { return CodeRange(rows, bits); };
      },
      kParamsBytes);
}

absl::StatusOr<Baseline> MakeRotated(const Maker& m) {
  return MakeByBits(
      m, "rotated:k4,v4 with 1, 2, 3, 4, 8 or 16 bits",
      [](int64_t bits) -> RowCode {
        return [bits](const at::Tensor& rows) -> absl::StatusOr<at::Tensor> {
          if (bits == kExactBits) return rows;
          return CodeRotated(rows, bits);
        };
      },
      kNormBytes);
}

absl::StatusOr<Baseline> MakeGgml(const Maker& m) {
  const std::string want = absl::StrCat(
      "ggml:kq8_0,vq4_0 with f16, q8_0 or q4_0, optionally with ,rotation=off, "
      "and a head_dim that is a multiple of ",
      kGgmlBlock);
  bool rotate = true;
  for (const auto& [key, value] : m.name.settings) {
    if (key != "rotation" || (value != "on" && value != "off")) {
      return m.name.Refuse(want);
    }
    rotate = value == "on";
  }
  if (m.name.words.empty() || m.spec.head_dim % kGgmlBlock != 0) {
    return m.name.Refuse(want);
  }
  std::map<char, std::string> types;
  for (const std::string& word : m.name.words) {
    const std::string type = word.empty() ? "" : word.substr(1);
    if ((type != "f16" && type != "q8_0" && type != "q4_0") ||
        (word[0] != 'k' && word[0] != 'v') ||
        !types.emplace(word[0], type).second) {
      return m.name.Refuse(want);
    }
  }
  const auto code = [&](char side) -> RowCode {
    const std::string type = types.count(side) > 0 ? types.at(side) : "f16";
    return [type,
            rotate](const at::Tensor& rows) -> absl::StatusOr<at::Tensor> {
      if (type == "f16") return rows;
      return CodeGgml(rows, type == "q8_0" ? Ggml::kQ8_0 : Ggml::kQ4_0, rotate);
    };
  };
  const auto bytes = [&](char side) {
    const std::string type = types.count(side) > 0 ? types.at(side) : "f16";
    if (type == "f16") return m.width() * kNumberBytes;
    const double block_bytes = type == "q8_0" ? 34.0 : 18.0;
    return m.width() / static_cast<double>(kGgmlBlock) * block_bytes;
  };
  return m.Finish(MakeCodedRows(code('k'), code('v')),
                  {.key_bytes = bytes('k'), .value_bytes = bytes('v')});
}

absl::StatusOr<Baseline> MakeFloat8(const Maker& m) {
  if (m.name.words.size() != 1 || !m.name.settings.empty() ||
      (m.name.words[0] != "e4m3" && m.name.words[0] != "e5m2")) {
    return m.name.Refuse("fp8:e4m3 or fp8:e5m2");
  }
  const Float8 type = m.name.words[0] == "e4m3" ? Float8::kE4M3 : Float8::kE5M2;
  const RowCode code = [type](const at::Tensor& rows) {
    return RoundToFloat8(rows, type);
  };
  return m.Finish(MakeCodedRows(code, code),
                  {.key_bytes = m.width(), .value_bytes = m.width()});
}

absl::StatusOr<Baseline> MakeKivi(const Maker& m) {
  constexpr char kWant[] =
      "kivi:BITS,group=32,residual=128: 1, 2, 3, 4 or 8 bits, a group that "
      "divides head_dim, and a residual of 0 or at least a group; give "
      "residual= instead of window=";
  int64_t group = 32;
  int64_t residual = 128;
  for (const auto& [key, value] : m.name.settings) {
    int64_t* const setting = key == "group"      ? &group
                             : key == "residual" ? &residual
                                                 : nullptr;
    if (setting == nullptr || !absl::SimpleAtoi(value, setting)) {
      return m.name.Refuse(kWant);
    }
  }
  const std::optional<int64_t> bits = m.name.words.size() == 1
                                          ? ParseBits(m.name.words[0], false)
                                          : std::nullopt;
  if (!bits.has_value() || group < 1 || m.spec.head_dim % group != 0 ||
      (residual != 0 && residual < group) || m.exact.window != 0) {
    return m.name.Refuse(kWant);
  }
  // A token's key takes its codes and a share of its block's parameters. The
  // value has its own parameters.
  const double key_bytes =
      m.width() * (static_cast<double>(*bits) / 8.0 +
                   kParamsBytes / static_cast<double>(group));
  const double value_bytes = m.SideBytes(*bits, group);
  // The residual tokens are stored exactly and without codes.
  const double exact_bytes = 2.0 * m.width() * kNumberBytes;
  Baseline baseline =
      m.Finish(MakeKiviBlocks(*bits, group, residual),
               {.key_bytes = key_bytes,
                .value_bytes = value_bytes,
                .fixed_bytes = static_cast<double>(residual) *
                               (exact_bytes - key_bytes - value_bytes)});
  baseline.candidate.exact_window = residual;
  return baseline;
}

absl::StatusOr<Baseline> MakePerChannel(const Maker& m) {
  constexpr char kWant[] =
      "per-channel:k3.pre or k3.post, with 1, 2, 3, 4 or 8 bits, optionally "
      "with ,v4";
  const std::string word = m.name.words.empty() ? "" : m.name.words[0];
  absl::string_view bits_text = word;
  const bool before = absl::ConsumeSuffix(&bits_text, ".pre");
  // If keys are coded before their rotation, a window of exact keys is not
  // possible.
  if (before && m.exact.window != 0) {
    return m.name.Refuse(
        "no window=, because keys are coded before their rotation");
  }
  if ((!before && !absl::ConsumeSuffix(&bits_text, ".post")) ||
      !absl::ConsumePrefix(&bits_text, "k") || m.name.words.size() > 2 ||
      !m.name.settings.empty()) {
    return m.name.Refuse(kWant);
  }
  const std::optional<int64_t> bits = ParseBits(bits_text, false);
  const auto sides = SideBits(m.name, 1, "v");
  if (!bits.has_value() || !sides.has_value()) return m.name.Refuse(kWant);
  const int64_t value_bits = sides->at('v');
  KVASIR_RETURN_IF_ERROR(m.CheckText("ranges"));
  KVASIR_ASSIGN_OR_RETURN(
      std::unique_ptr<CacheTransform> transform,
      MakeCalibratedKeys(*m.request.decoder, m.request.calibration_ids, before,
                         *bits, value_bits));
  return m.Finish(std::move(transform),
                  {.key_bytes = m.width() * static_cast<double>(*bits) / 8.0,
                   .value_bytes = m.SideBytes(value_bits)});
}

absl::StatusOr<Baseline> MakeThink(const Maker& m) {
  constexpr char kWant[] =
      "think:0.5,4: the share of key channels to keep, from 1/1024 to 1, then "
      "their bits, optionally with ,v4";
  double share = 0.0;
  if (m.name.words.size() < 2 || m.name.words.size() > 3 ||
      !m.name.settings.empty() || !absl::SimpleAtod(m.name.words[0], &share) ||
      !(share >= kFewestKeep) || share > 1.0) {
    return m.name.Refuse(kWant);
  }
  const std::optional<int64_t> bits = ParseBits(m.name.words[1], true);
  const auto sides = SideBits(m.name, 2, "v");
  if (!bits.has_value() || !sides.has_value()) return m.name.Refuse(kWant);
  const int64_t value_bits = sides->at('v');
  const auto dim = static_cast<double>(m.spec.head_dim);
  const auto kept =
      std::max<int64_t>(1, static_cast<int64_t>(std::lround(share * dim)));
  return m.Finish(MakeQueryDrivenChannels(kept, *bits, value_bits),
                  {.keep = 0.5 * (1.0 + static_cast<double>(kept) / dim),
                   .key_bytes = m.heads() * RowBytes(kept, *bits),
                   .value_bytes = m.SideBytes(value_bits),
                   // one bit per channel says whether it is kept
                   .fixed_bytes = m.width() / 8.0});
}

absl::StatusOr<Baseline> MakeLowRank(const Maker& m) {
  constexpr char kWant[] =
      "low-rank:RANK/WIDTH, such as 160/1024, with RANK from 1 to WIDTH";
  std::vector<std::string> numbers;
  if (m.name.words.size() == 1) numbers = absl::StrSplit(m.name.words[0], '/');
  int64_t rank = 0;
  int64_t of = 0;
  if (numbers.size() != 2 || !absl::SimpleAtoi(numbers[0], &rank) ||
      !absl::SimpleAtoi(numbers[1], &of) || rank < 1 || rank > of ||
      !m.name.settings.empty()) {
    return m.name.Refuse(kWant);
  }
  if (m.exact.window != 0) {
    return m.name.Refuse(
        "no window=, because keys are reduced before their rotation");
  }
  const double share = static_cast<double>(rank) / static_cast<double>(of);
  const auto own = std::max<int64_t>(
      1, static_cast<int64_t>(std::lround(share * m.width())));
  const auto kept = static_cast<double>(own);
  return m.Finish(MakeLowRankKeys(own),
                  {.keep = 0.5 * (1.0 + kept / m.width()),
                   .key_bytes = kept * kNumberBytes,
                   .value_bytes = m.width() * kNumberBytes,
                   .fixed_bytes = kept * m.width() * kNumberBytes});
}

absl::StatusOr<Baseline> MakeOscarBaseline(const Maker& m) {
  constexpr char kWant[] =
      "oscar:BITS,group=128,key-clip=0.96,value-clip=0.92: 1, 2, 3, 4, 8 or 16 "
      "bits, a group that divides head_dim, and shares above 0 and at most 1";
  OscarCode code;
  code.group = std::min(code.group, m.spec.head_dim);
  for (const auto& [key, value] : m.name.settings) {
    const bool valid =
        key == "group" ? absl::SimpleAtoi(value, &code.group)
        : key == "key-clip"
            ? absl::SimpleAtod(value, &code.key_clip)
            : key == "value-clip" && absl::SimpleAtod(value, &code.value_clip);
    if (!valid) return m.name.Refuse(kWant);
  }
  const auto is_share = [](double x) { return x > 0.0 && x <= 1.0; };
  const std::optional<int64_t> bits = m.name.words.size() == 1
                                          ? ParseBits(m.name.words[0], true)
                                          : std::nullopt;
  if (!bits.has_value() || code.group < 1 ||
      m.spec.head_dim % code.group != 0 || !is_share(code.key_clip) ||
      !is_share(code.value_clip)) {
    return m.name.Refuse(kWant);
  }
  code.bits = *bits;
  if (!std::has_single_bit(static_cast<uint64_t>(m.spec.head_dim))) {
    return m.name.Refuse(
        absl::StrCat("a model whose head_dim is a power of two, but it is ",
                     m.spec.head_dim));
  }
  KVASIR_RETURN_IF_ERROR(m.CheckText("rotations"));
  std::vector<OscarSums> own;
  std::vector<OscarSums>& sums =
      m.request.oscar_sums != nullptr ? *m.request.oscar_sums : own;
  if (sums.empty()) {
    KVASIR_ASSIGN_OR_RETURN(
        sums, MeasureOscarSums(*m.request.decoder, m.request.calibration_ids,
                               m.request.threads));
  }
  std::vector<OscarRotations> rotations;
  for (const OscarSums& layer : sums) {
    rotations.push_back(
        {OscarRotation(layer.query), OscarRotation(layer.output)});
  }
  const double side_bytes = m.SideBytes(code.bits, code.group);
  return m.Finish(MakeOscar(std::move(rotations), code),
                  {.key_bytes = side_bytes, .value_bytes = side_bytes});
}

struct Method {
  absl::StatusOr<Baseline> (*make)(const Maker&);
  ExactRows exact;  // what stays exact if the name does not say it
};

const std::map<std::string, Method>& Methods() {
  static const auto* const methods = new std::map<std::string, Method>{
      {"fp8", {&MakeFloat8, {}}},
      {"ggml", {&MakeGgml, {}}},
      {"kivi", {&MakeKivi, {}}},
      {"low-rank", {&MakeLowRank, {}}},
      {"oscar", {&MakeOscarBaseline, {.sinks = 64, .window = 256}}},
      {"per-channel", {&MakePerChannel, {}}},
      {"per-token", {&MakePerToken, {}}},
      {"rotated", {&MakeRotated, {}}},
      {"think", {&MakeThink, {}}}};
  return *methods;
}

// Removes the setting `key` from `name` and returns its number, or nullopt if
// there is no such setting.
absl::StatusOr<std::optional<int64_t>> TakeNumber(Name& name, const char* key) {
  const auto found = name.settings.find(key);
  if (found == name.settings.end()) return std::nullopt;
  int64_t number = 0;
  if (!absl::SimpleAtoi(found->second, &number) || number < 0 ||
      number > kMostExactRows) {
    return name.Refuse(
        absl::StrCat(key, "= with a number from 0 to ", kMostExactRows));
  }
  name.settings.erase(found);
  return number;
}

// Removes the settings that every baseline may have from `name`, and returns
// them. Settings that the name does not have are taken from `exact`.
absl::StatusOr<ExactRows> TakeExactRows(Name& name, ExactRows exact,
                                        int64_t num_layers) {
  for (const auto& [key, setting] :
       {std::pair<const char*, int64_t*>{"sinks", &exact.sinks},
        {"window", &exact.window},
        {"skip", &exact.skip}}) {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> number,
                            TakeNumber(name, key));
    *setting = number.value_or(*setting);
  }
  if (2 * exact.skip > num_layers) {
    return name.Refuse(absl::StrCat("skip= of at most half of the model's ",
                                    num_layers, " layers"));
  }
  return exact;
}

}  // namespace

bool IsBaselineName(const std::string& name) {
  const size_t colon = name.find(':');
  return colon != std::string::npos &&
         Methods().count(name.substr(0, colon)) > 0;
}

std::string BaselineMethods() {
  std::string text;
  for (const auto& [name, method] : Methods()) {
    const bool last = name == Methods().rbegin()->first;
    absl::StrAppend(&text, text.empty() ? "" : last ? ": or " : ":, ", name);
  }
  return absl::StrCat(text, ":");
}

absl::StatusOr<PlannedName> ParsePlannedName(const std::string& text) {
  PlannedName planned;
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos ||
      text.find('=', colon) == std::string::npos) {
    planned.folder = text;
    return planned;
  }
  planned.folder = text.substr(0, colon);
  planned.settings = text.substr(colon + 1);
  Name name = ParseName(text.substr(colon));
  name.text = text;
  name.kind = "model";
  for (const auto& [key, tokens] :
       {std::pair{"sinks", &planned.exact.sinks},
        std::pair{"window", &planned.exact.window}}) {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> number,
                            TakeNumber(name, key));
    if (number.has_value()) *tokens = static_cast<uint32_t>(*number);
  }
  if (!name.words.empty() || !name.settings.empty() || name.repeats) {
    return name.Refuse(
        "only sinks= and window= after the folder, each at most once");
  }
  return planned;
}

absl::StatusOr<Baseline> MakeBaseline(const BaselineRequest& request) {
  Name name = ParseName(request.name);
  const auto method = Methods().find(name.method);
  if (method == Methods().end()) {
    return name.Refuse(
        absl::StrCat("a name that begins with ", BaselineMethods()));
  }
  if (name.repeats) return name.Refuse("each setting once");
  if (request.decoder->plan().has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "baseline \"", name.text,
        "\" needs an uncompressed model, but this one is compressed"));
  }
  const model::DecoderSpec& spec = request.decoder->spec();
  KVASIR_ASSIGN_OR_RETURN(
      const ExactRows exact,
      TakeExactRows(name, method->second.exact, spec.num_layers()));
  return CatchTorch([&] {
    return method->second.make({name, request, spec, exact});
  });
}

}  // namespace kvasir::compress
