#include "compress/calibrate/calibration_sample.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/philox.h"

namespace kvasir::compress {
namespace {

// Returns the random number with this index for the seed, in [0, limit). The
// multiply-and-shift method has a bias below 2^-20 for any text of fewer than
// 2^43 tokens.
int64_t Draw(uint64_t seed, int64_t index, int64_t limit) {
  const base::PhiloxCounter bits =
      base::Philox4x32(base::PhiloxKeyFromSeed(seed),
                       base::PhiloxCounterOf(static_cast<uint64_t>(index), 0));
  const uint64_t wide = (uint64_t{bits[1]} << 32) | bits[0];
  return static_cast<int64_t>(static_cast<uint64_t>(
      (static_cast<unsigned __int128>(wide) * static_cast<uint64_t>(limit)) >>
      64));
}

}  // namespace

absl::StatusOr<CalibrationSample> SampleCalibration(
    const TokenStream& text, const SampleOptions& options, int64_t vocab_size) {
  const int64_t length = options.sequence_tokens;
  // The next-token loss needs at least two tokens.
  if (length < 2) {
    return absl::InvalidArgumentError(absl::StrCat(
        "calibration sequences must have at least 2 tokens, have ", length));
  }
  const int64_t count = options.tokens / length;
  if (count < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        options.tokens, " calibration tokens are too few for a sequence of ",
        length, " tokens"));
  }
  const auto have = static_cast<int64_t>(text.ids.size());
  const int64_t windows = have / length;
  if (windows < count) {
    return absl::InvalidArgumentError(
        absl::StrCat("the calibration text is too short: it has ", have,
                     " tokens, but ", count * length, " are needed (", count,
                     " sequences of ", length, " tokens)"));
  }
  for (int64_t i = 0; i < have; ++i) {
    const int32_t id = text.ids[static_cast<size_t>(i)];
    if (id < 0 || id >= vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("calibration token ", i, " has the id ", id,
                       ", but the model's vocabulary has ", vocab_size,
                       " tokens; does the tokenizer belong to another model?"));
    }
  }

  const int64_t phase = Draw(options.seed, 0, have - windows * length + 1);
  std::vector<int64_t> order(static_cast<size_t>(windows));
  std::iota(order.begin(), order.end(), 0);
  CalibrationSample sample;
  sample.sequence_tokens = length;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t other = i + Draw(options.seed, i + 1, windows - i);
    std::swap(order[static_cast<size_t>(i)], order[static_cast<size_t>(other)]);
    const auto begin =
        text.ids.begin() + phase + order[static_cast<size_t>(i)] * length;
    sample.sequences.emplace_back(begin, begin + length);
  }
  return sample;
}

absl::StatusOr<CalibrationSample> SampleDomains(
    const std::vector<DomainText>& domains, const SampleOptions& options,
    double held_out_share, int64_t vocab_size) {
  if (domains.empty()) {
    return absl::InvalidArgumentError("no calibration text was given");
  }
  const auto count = static_cast<int64_t>(domains.size());
  SampleOptions share = options;
  share.tokens = options.tokens / count;
  CalibrationSample result;
  result.sequence_tokens = options.sequence_tokens;
  std::vector<CalibrationSample> samples;
  std::set<std::string> names;
  for (const DomainText& domain : domains) {
    if (!names.insert(domain.name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "two calibration domains have the same name ", domain.name));
    }
    absl::StatusOr<CalibrationSample> sample =
        SampleCalibration(domain.text, share, vocab_size);
    if (!sample.ok()) {
      return absl::Status(
          sample.status().code(),
          absl::StrCat("domain ", domain.name,
                       count > 1
                           ? absl::StrCat(" (a share of 1/", count, " of ",
                                          options.tokens, " tokens)")
                           : "",
                       ": ", sample.status().message()));
    }
    samples.push_back(*std::move(sample));
    result.domains.push_back(domain.name);
  }
  const int64_t each = samples[0].num_sequences();
  int64_t held_out = 0;
  if (held_out_share > 0.0 && each > 1) {
    held_out = std::max<int64_t>(
        1, static_cast<int64_t>(held_out_share * static_cast<double>(each)));
  }
  for (int64_t i = 0; i < each; ++i) {
    for (int64_t d = 0; d < count; ++d) {
      result.sequences.push_back(std::move(
          samples[static_cast<size_t>(d)].sequences[static_cast<size_t>(i)]));
      result.sequence_domains.push_back(d);
    }
  }
  result.held_out_sequences = held_out * count;
  return result;
}

std::vector<SampledRow> SpreadRows(const CalibrationSample& sample,
                                   int64_t limit) {
  const int64_t each = sample.counted_tokens_each();
  const int64_t all = sample.num_sequences() * each;
  const int64_t count = std::min(limit, all);
  std::vector<SampledRow> rows;
  for (int64_t i = 0; i < count; ++i) {
    // Row i is the middle of the i-th of `count` equally long pieces. The
    // product stays below 2^63 for up to 2^31 rows and 2^31 tokens.
    const int64_t token = (2 * i + 1) * all / (2 * count);
    rows.push_back({token / each, sample.sink_tokens + token % each});
  }
  return rows;
}

}  // namespace kvasir::compress
