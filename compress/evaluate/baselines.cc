#include "compress/evaluate/baselines.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "compress/oracle/fake_quant.h"
#include "compress/runtime/torch_status.h"

namespace kvasir::compress {
namespace {

constexpr int64_t kExactBits = 16;
constexpr double kNumberBytes = 2.0;        // bf16
constexpr double kParamsBytes = 2.0 + 2.0;  // float16 minimum and scale
constexpr double kFewestKeep = 1.0 / 1024.0;

using Seen = CacheTransform::Seen;

kvasir::v1::Codec BitsCodec(int64_t bits) {
  kvasir::v1::Codec codec;
  codec.mutable_bits()->add_schedule(static_cast<uint32_t>(bits));
  codec.set_param_dtype(kvasir::v1::F16);
  return codec;
}

// Every row of `rows` [..., W] by its own range, in runs of `group` (0: W).
absl::StatusOr<at::Tensor> CodeRows(const at::Tensor& rows, int64_t bits,
                                    int64_t group = 0) {
  if (bits == kExactBits) return rows;
  kvasir::v1::Codec plan = BitsCodec(bits);
  plan.mutable_per_token()->set_group(static_cast<uint32_t>(group));
  KVASIR_ASSIGN_OR_RETURN(const LatentCodec codec,
                          MakeLatentCodec(plan, rows.size(-1)));
  KVASIR_ASSIGN_OR_RETURN(CodedLatent coded, CodeLatent(codec, rows));
  return std::move(coded.values);
}

// Bytes of one head's `channels` at `bits` per token.
double RowBytes(int64_t channels, int64_t bits, int64_t group = 0) {
  const auto count = static_cast<double>(channels);
  if (bits == kExactBits) return count * kNumberBytes;
  const double runs = group == 0 ? 1.0 : count / static_cast<double>(group);
  return std::ceil(count * static_cast<double>(bits) / 8.0) +
         runs * kParamsBytes;
}

// A name's parts: "kivi" of "2", "group=32", "residual=128".
struct Name {
  std::string text;
  std::string method;
  std::vector<std::string> words;               // without "="
  std::map<std::string, std::string> settings;  // with "="
  bool repeats = false;                         // a setting stands twice

  absl::Status Refuse(absl::string_view want) const {
    return absl::InvalidArgumentError(
        absl::StrCat("baseline \"", text, "\": want ", want));
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

// Bits of each of `sides`, letters that the words from `first` on begin with;
// exact where a side has no word. Nothing for any other word, or a second one.
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

// ------------------------------------------------------------------ per token

class PerToken : public CacheTransform {
 public:
  PerToken(int64_t key_bits, int64_t value_bits)
      : key_bits_(key_bits), value_bits_(value_bits) {}
  absl::StatusOr<Seen> RotatedKey(int64_t, const at::Tensor& key,
                                  const at::Tensor&) const override {
    KVASIR_ASSIGN_OR_RETURN(at::Tensor coded, CodeRows(key, key_bits_));
    return Seen{std::move(coded), 0};
  }
  absl::StatusOr<Seen> Value(int64_t, const at::Tensor& value) const override {
    KVASIR_ASSIGN_OR_RETURN(at::Tensor coded, CodeRows(value, value_bits_));
    return Seen{std::move(coded), 0};
  }

 private:
  int64_t key_bits_;
  int64_t value_bits_;
};

// ----------------------------------------------------------------------- KIVI

// `residual` >= `group`, so that the block of a token that has left the exact
// window is complete, whatever the query.
class Kivi : public CacheTransform {
 public:
  Kivi(int64_t bits, int64_t group, int64_t residual)
      : bits_(bits), group_(group), residual_(residual) {}

  absl::StatusOr<Seen> RotatedKey(int64_t, const at::Tensor& key,
                                  const at::Tensor&) const override {
    const int64_t whole = key.size(1) / group_ * group_;
    if (whole == 0) return Seen{key, residual_};
    // [B, blocks, H, D, group]: a channel's numbers in a block are a row.
    const at::Tensor blocks = key.slice(1, 0, whole)
                                  .reshape({key.size(0), whole / group_, group_,
                                            key.size(2), key.size(3)})
                                  .permute({0, 1, 3, 4, 2});
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor coded, CodeRows(blocks, bits_));
    const at::Tensor old =
        coded.permute({0, 1, 4, 2, 3})
            .reshape({key.size(0), whole, key.size(2), key.size(3)});
    return Seen{at::cat({old, key.slice(1, whole)}, 1), residual_};
  }
  absl::StatusOr<Seen> Value(int64_t, const at::Tensor& value) const override {
    KVASIR_ASSIGN_OR_RETURN(at::Tensor coded, CodeRows(value, bits_, group_));
    return Seen{std::move(coded), residual_};
  }

 private:
  int64_t bits_;
  int64_t group_;
  int64_t residual_;
};

// ---------------------------------------------------------------- per channel

// Least and greatest number of each key channel over the calibration text.
class KeyRanges : public LayerObserver {
 public:
  KeyRanges(int64_t num_layers, bool before_rotation)
      : before_(before_rotation),
        low_(static_cast<size_t>(num_layers)),
        high_(static_cast<size_t>(num_layers)) {}

  void OnKey(int64_t layer, const at::Tensor& key) override {
    if (before_) Add(layer, key);
  }
  void OnRotatedKey(int64_t layer, const at::Tensor& key) override {
    if (!before_) Add(layer, key);
  }
  StaticRange Range(int64_t layer, int64_t bits) const {
    const auto at = static_cast<size_t>(layer);
    const double levels = static_cast<double>((1 << bits) - 1);
    return {low_[at], (high_[at] - low_[at]) / levels};
  }

 private:
  void Add(int64_t layer, const at::Tensor& key) {
    const auto at = static_cast<size_t>(layer);
    const at::Tensor rows = key.reshape({-1, key.size(2) * key.size(3)});
    const at::Tensor low = rows.amin(0).cpu();
    const at::Tensor high = rows.amax(0).cpu();
    low_[at] = low_[at].defined() ? at::minimum(low_[at], low) : low;
    high_[at] = high_[at].defined() ? at::maximum(high_[at], high) : high;
  }

  bool before_;
  std::vector<at::Tensor> low_;  // [Hkv * D]
  std::vector<at::Tensor> high_;
};

class PerChannel : public CacheTransform {
 public:
  PerChannel(bool before_rotation, LatentCodec codec,
             std::vector<StaticRange> ranges, int64_t value_bits)
      : before_(before_rotation),
        codec_(std::move(codec)),
        ranges_(std::move(ranges)),
        value_bits_(value_bits) {}

  absl::StatusOr<Seen> Key(int64_t layer,
                           const at::Tensor& key) const override {
    if (!before_) return Seen{key, 0};
    return Code(layer, key);
  }
  absl::StatusOr<Seen> RotatedKey(int64_t layer, const at::Tensor& key,
                                  const at::Tensor&) const override {
    if (before_) return Seen{key, 0};
    return Code(layer, key);
  }
  absl::StatusOr<Seen> Value(int64_t, const at::Tensor& value) const override {
    KVASIR_ASSIGN_OR_RETURN(at::Tensor coded, CodeRows(value, value_bits_));
    return Seen{std::move(coded), 0};
  }

 private:
  absl::StatusOr<Seen> Code(int64_t layer, const at::Tensor& key) const {
    const at::Tensor rows = key.reshape({key.size(0), key.size(1), -1});
    KVASIR_ASSIGN_OR_RETURN(
        const CodedLatent coded,
        CodeLatent(codec_, rows,
                   {.range = &ranges_[static_cast<size_t>(layer)]}));
    return Seen{.values = coded.values.view_as(key),
                .codes = rows.numel(),
                .clamped = coded.num_clamped};
  }

  bool before_;
  LatentCodec codec_;
  std::vector<StaticRange> ranges_;
  int64_t value_bits_;
};

// ---------------------------------------------------------------------- ThinK

class Think : public CacheTransform {
 public:
  Think(int64_t kept_channels, int64_t key_bits, int64_t value_bits)
      : kept_(kept_channels), key_bits_(key_bits), value_bits_(value_bits) {}

  absl::StatusOr<Seen> RotatedKey(int64_t, const at::Tensor& key,
                                  const at::Tensor& query) const override {
    // |q_c k_cT| = |q_c| |k_c|, summed over the query heads of a KV head.
    const int64_t share = query.size(2) / key.size(2);
    const at::Tensor query_norm =
        query.norm(2, {1})
            .view({key.size(0), key.size(2), share, key.size(3)})
            .sum(2);
    const at::Tensor score = query_norm * key.norm(2, {1});  // [B, Hkv, D]
    const at::Tensor kept = std::get<0>(
        std::get<1>(score.topk(kept_, -1)).sort(-1));  // ascending channels
    const at::Tensor index = kept.unsqueeze(1).expand(
        {key.size(0), key.size(1), key.size(2), kept_});
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor coded,
                            CodeRows(key.gather(-1, index), key_bits_));
    return Seen{at::zeros_like(key).scatter(-1, index, coded), 0};
  }
  absl::StatusOr<Seen> Value(int64_t, const at::Tensor& value) const override {
    KVASIR_ASSIGN_OR_RETURN(at::Tensor coded, CodeRows(value, value_bits_));
    return Seen{std::move(coded), 0};
  }

 private:
  int64_t kept_;
  int64_t key_bits_;
  int64_t value_bits_;
};

// ------------------------------------------------------------------- low rank

class LowRankKeys : public CacheTransform {
 public:
  explicit LowRankKeys(int64_t rank) : rank_(rank) {}

  // The best approximation of each sequence's keys [T, Hkv * D]: onto the
  // leading eigenvectors of their Gram matrix.
  absl::StatusOr<Seen> Key(int64_t, const at::Tensor& key) const override {
    const at::Tensor rows =
        key.reshape({key.size(0), key.size(1), -1}).to(at::kDouble);
    const at::Tensor vectors =
        std::get<1>(at::linalg_eigh(at::matmul(rows.transpose(1, 2), rows)));
    const at::Tensor basis = vectors.slice(2, vectors.size(2) - rank_);
    return Seen{at::matmul(at::matmul(rows, basis), basis.transpose(1, 2))
                    .to(key.scalar_type())
                    .view_as(key),
                0};
  }

 private:
  int64_t rank_;
};

// ------------------------------------------------------------------ by name

// What a baseline's bytes are counted from.
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

  double heads() const { return static_cast<double>(spec.num_kv_heads); }
  double width() const {
    return static_cast<double>(spec.num_kv_heads * spec.head_dim);
  }
  double SideBytes(int64_t bits, int64_t group = 0) const {
    return heads() * RowBytes(spec.head_dim, bits, group);
  }
  Baseline Finish(std::unique_ptr<CacheTransform> transform,
                  const Cost& cost) const {
    const auto layers = static_cast<double>(spec.num_layers());
    Baseline baseline;
    baseline.transform = std::move(transform);
    Candidate& candidate = baseline.candidate;
    candidate.model = name.text;
    candidate.method = name.method;
    candidate.decoder = request.decoder;
    candidate.transform = baseline.transform.get();
    candidate.keep = cost.keep;
    candidate.kv_payload_bytes_per_token =
        layers * (cost.key_bytes + cost.value_bytes);
    candidate.kv_bytes_per_token = candidate.kv_payload_bytes_per_token;
    candidate.fixed_bytes_per_sequence =
        static_cast<int64_t>(std::ceil(layers * cost.fixed_bytes));
    return baseline;
  }
};

absl::StatusOr<Baseline> MakePerToken(const Maker& m) {
  const auto bits = SideBits(m.name, 0, "kv");
  if (!bits.has_value() || !m.name.settings.empty()) {
    return m.name.Refuse("per-token:k4,v4 with 1, 2, 3, 4, 8 or 16 bits");
  }
  const int64_t key = bits->at('k');
  const int64_t value = bits->at('v');
  return m.Finish(
      std::make_unique<PerToken>(key, value),
      {.key_bytes = m.SideBytes(key), .value_bytes = m.SideBytes(value)});
}

absl::StatusOr<Baseline> MakeKivi(const Maker& m) {
  constexpr char kWant[] =
      "kivi:BITS,group=32,residual=128: 1, 2, 3, 4 or 8 bits, a group that "
      "divides head_dim, and a residual of at least a group";
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
      residual < group) {
    return m.name.Refuse(kWant);
  }
  // A key's share of its blocks' parameters; values have their own.
  const double key_bytes =
      m.width() * (static_cast<double>(*bits) / 8.0 +
                   kParamsBytes / static_cast<double>(group));
  const double value_bytes = m.SideBytes(*bits, group);
  // Exact tokens have no codes.
  const double exact_bytes = 2.0 * m.width() * kNumberBytes;
  return m.Finish(std::make_unique<Kivi>(*bits, group, residual),
                  {.key_bytes = key_bytes,
                   .value_bytes = value_bytes,
                   .fixed_bytes = static_cast<double>(residual) *
                                  (exact_bytes - key_bytes - value_bytes)});
}

absl::StatusOr<Baseline> MakePerChannel(const Maker& m) {
  constexpr char kWant[] =
      "per-channel:k3.pre or k3.post, with 1, 2, 3, 4 or 8 bits, and perhaps "
      ",v4";
  const std::string word = m.name.words.empty() ? "" : m.name.words[0];
  absl::string_view bits_text = word;
  const bool before = absl::ConsumeSuffix(&bits_text, ".pre");
  if ((!before && !absl::ConsumeSuffix(&bits_text, ".post")) ||
      !absl::ConsumePrefix(&bits_text, "k") || m.name.words.size() > 2 ||
      !m.name.settings.empty()) {
    return m.name.Refuse(kWant);
  }
  const std::optional<int64_t> bits = ParseBits(bits_text, false);
  const auto sides = SideBits(m.name, 1, "v");
  if (!bits.has_value() || !sides.has_value()) return m.name.Refuse(kWant);
  const int64_t value_bits = sides->at('v');
  if (!m.request.calibration_ids.defined()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "baseline \"", m.name.text,
        "\": its ranges come from a calibration text, and there is none"));
  }
  KeyRanges ranges(m.spec.num_layers(), before);
  const at::NoGradGuard no_grad;
  for (int64_t i = 0; i < m.request.calibration_ids.size(0); ++i) {
    KVASIR_RETURN_IF_ERROR(
        m.request.decoder
            ->LastHidden(m.request.calibration_ids.slice(0, i, i + 1),
                         {.observer = &ranges})
            .status());
  }
  kvasir::v1::Codec plan = BitsCodec(*bits);
  plan.mutable_channel_static();
  KVASIR_ASSIGN_OR_RETURN(
      LatentCodec codec,
      MakeLatentCodec(plan, m.spec.num_kv_heads * m.spec.head_dim));
  std::vector<StaticRange> by_layer;
  for (int64_t layer = 0; layer < m.spec.num_layers(); ++layer) {
    by_layer.push_back(ranges.Range(layer, *bits));
  }
  return m.Finish(std::make_unique<PerChannel>(before, std::move(codec),
                                               std::move(by_layer), value_bits),
                  {.key_bytes = m.width() * static_cast<double>(*bits) / 8.0,
                   .value_bytes = m.SideBytes(value_bits)});
}

absl::StatusOr<Baseline> MakeThink(const Maker& m) {
  constexpr char kWant[] =
      "think:0.5,4: a share of the channels in (0, 1], the bits of the rest, "
      "and perhaps ,v4";
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
  return m.Finish(std::make_unique<Think>(kept, *bits, value_bits),
                  {.keep = 0.5 * (1.0 + static_cast<double>(kept) / dim),
                   .key_bytes = m.heads() * RowBytes(kept, *bits),
                   .value_bytes = m.SideBytes(value_bits),
                   .fixed_bytes = m.width() / 8.0});  // which channels
}

absl::StatusOr<Baseline> MakeLowRank(const Maker& m) {
  constexpr char kWant[] = "low-rank:RANK/WIDTH, as 160/1024";
  std::vector<std::string> numbers;
  if (m.name.words.size() == 1) numbers = absl::StrSplit(m.name.words[0], '/');
  int64_t rank = 0;
  int64_t of = 0;
  if (numbers.size() != 2 || !absl::SimpleAtoi(numbers[0], &rank) ||
      !absl::SimpleAtoi(numbers[1], &of) || rank < 1 || rank > of ||
      !m.name.settings.empty()) {
    return m.name.Refuse(kWant);
  }
  const double share = static_cast<double>(rank) / static_cast<double>(of);
  const auto own = std::max<int64_t>(
      1, static_cast<int64_t>(std::lround(share * m.width())));
  const auto kept = static_cast<double>(own);
  return m.Finish(std::make_unique<LowRankKeys>(own),
                  {.keep = 0.5 * (1.0 + kept / m.width()),
                   .key_bytes = kept * kNumberBytes,
                   .value_bytes = m.width() * kNumberBytes,
                   .fixed_bytes = kept * m.width() * kNumberBytes});
}

using MakeFunction = absl::StatusOr<Baseline> (*)(const Maker&);

const std::map<std::string, MakeFunction>& Methods() {
  static const auto* const methods =
      new std::map<std::string, MakeFunction>{{"kivi", &MakeKivi},
                                              {"low-rank", &MakeLowRank},
                                              {"per-channel", &MakePerChannel},
                                              {"per-token", &MakePerToken},
                                              {"think", &MakeThink}};
  return *methods;
}

}  // namespace

bool IsBaselineName(const std::string& name) {
  const size_t colon = name.find(':');
  return colon != std::string::npos &&
         Methods().count(name.substr(0, colon)) > 0;
}

absl::StatusOr<Baseline> MakeBaseline(const BaselineRequest& request) {
  const Name name = ParseName(request.name);
  const auto method = Methods().find(name.method);
  if (method == Methods().end()) {
    return name.Refuse(
        "kivi:, low-rank:, per-channel:, per-token: or think: before its "
        "numbers");
  }
  if (name.repeats) return name.Refuse("each setting once");
  if (request.decoder->plan().has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "baseline \"", name.text, "\" stands on an uncompressed model only"));
  }
  return CatchTorch([&] {
    return method->second({name, request, request.decoder->spec()});
  });
}

}  // namespace kvasir::compress
