// Which tokens of a calibration text are looked at.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/calibrate/token_stream.h"

namespace kvasir::compress {

struct SampleOptions {
  int64_t tokens = 16384;
  // Of one sequence; all are of this length.
  int64_t sequence_tokens = 1024;
  uint64_t seed = 42;
};

// Sequences of equal length.
struct CalibrationSample {
  int64_t sequence_tokens = 0;
  std::vector<std::vector<int32_t>> sequences;
  // Names of what the sequences are taken from; empty: one, without a name.
  std::vector<std::string> domains;
  // Index in `domains` of each sequence; empty: all 0.
  std::vector<int64_t> sequence_domains;
  // What sums do not count: so many sequences at the end, and so many tokens at
  // the begin of each sequence (attention sinks, unlike all others). A model
  // sees them, and predictions behind sinks count.
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
  // Of one sequence, and of all.
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

// `tokens / sequence_tokens` different windows of the text, which lie on a grid
// with a random start. A larger sample under the same seed begins with the
// smaller one. InvalidArgument with what the text has and what is wanted, and
// for ids outside [0, vocab_size).
absl::StatusOr<CalibrationSample> SampleCalibration(
    const TokenStream& text, const SampleOptions& options, int64_t vocab_size);

// A text of one kind.
struct DomainText {
  std::string name;
  TokenStream text;
};

// An equal share of the tokens from each domain, sequences in turn; the last
// `held_out_share` of a domain's sequences, at least one of two or more, stand
// held out at the end. InvalidArgument as above, naming the domain; for no
// domain, and for two of one name.
absl::StatusOr<CalibrationSample> SampleDomains(
    const std::vector<DomainText>& domains, const SampleOptions& options,
    double held_out_share, int64_t vocab_size);

// A token of a sample.
struct SampledRow {
  int64_t sequence = 0;
  int64_t position = 0;
};
// At most `limit` tokens behind the sinks, spread evenly over sequences and
// positions, in order.
std::vector<SampledRow> SpreadRows(const CalibrationSample& sample,
                                   int64_t limit);

}  // namespace kvasir::compress
