// Selects which tokens of a calibration text are used.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/calibrate/token_stream.h"

namespace kvasir::compress {

struct SampleOptions {
  int64_t tokens = 16384;
  // The number of tokens in each sequence.
  int64_t sequence_tokens = 1024;
  uint64_t seed = 42;
};

// The sampled sequences, which have equal lengths.
struct CalibrationSample {
  int64_t sequence_tokens = 0;
  std::vector<std::vector<int32_t>> sequences;
  // Names of the domains that the sequences come from. If empty, there is one
  // domain without a name.
  std::vector<std::string> domains;
  // For each sequence, the index of its domain in `domains`. If empty, all
  // sequences belong to domain 0.
  std::vector<int64_t> sequence_domains;
  // A calibration does not count the last `held_out_sequences` sequences. In
  // each sequence, it also does not count the first `sink_tokens` tokens, which
  // are attention sinks and unlike all other tokens. The model still sees the
  // sink tokens, and its predictions at later tokens are counted.
  int64_t held_out_sequences = 0;
  int64_t sink_tokens = 0;

  int64_t num_sequences() const {
    return static_cast<int64_t>(sequences.size());
  }
  int64_t num_tokens() const { return num_sequences() * sequence_tokens; }
  int64_t num_domains() const {
    return domains.empty() ? 1 : static_cast<int64_t>(domains.size());
  }
  int64_t counted_sequences() const {
    return num_sequences() - held_out_sequences;
  }
  // The number of counted tokens in one sequence (counted_tokens_each) and in
  // all counted sequences together (counted_tokens).
  int64_t counted_tokens_each() const { return sequence_tokens - sink_tokens; }
  int64_t counted_tokens() const {
    return counted_sequences() * counted_tokens_each();
  }
  int64_t DomainOf(int64_t sequence) const {
    return sequence_domains.empty()
               ? 0
               : sequence_domains[static_cast<size_t>(sequence)];
  }
};

// Divides the text, from a random start, into windows of `sequence_tokens`
// tokens, and takes `tokens / sequence_tokens` different windows. A larger
// sample with the same seed begins with the sequences of the smaller one.
// InvalidArgument for a text that is too short (with its size and the size that
// is needed), and for ids outside [0, vocab_size).
absl::StatusOr<CalibrationSample> SampleCalibration(
    const TokenStream& text, const SampleOptions& options, int64_t vocab_size);

// The text of one domain, such as books or code.
struct DomainText {
  std::string name;
  TokenStream text;
};

// Takes an equal share of the tokens from each domain. The sample takes one
// sequence of each domain in turn. The last `held_out_share` (a fraction) of
// each domain's sequences is held out and placed at the end. If the share is
// above 0 and a domain has two or more sequences, at least one is held out.
// InvalidArgument as for SampleCalibration, naming the domain, and also for no
// domain and for two domains with the same name.
absl::StatusOr<CalibrationSample> SampleDomains(
    const std::vector<DomainText>& domains, const SampleOptions& options,
    double held_out_share, int64_t vocab_size);

// The sequence and position of a token in a sample.
struct SampledRow {
  int64_t sequence = 0;
  int64_t position = 0;
};
// Chooses at most `limit` tokens that are not sinks, spread evenly over
// sequences and positions. They are returned in order.
std::vector<SampledRow> SpreadRows(const CalibrationSample& sample,
                                   int64_t limit);

}  // namespace kvasir::compress
