// The requests of a simulation of the router (simulation.h): synthetic ones,
// or those of a file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvasir::bench {

struct TraceRequest {
  double arrival_s = 0.0;
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens = 0;
  // The prompt's first pages, which other requests may share: they are named
  // by `shared` and their number. The pages after them, and those of the
  // output, are named by `own`. In a trace from a file, all are in
  // Trace::hashes.
  uint64_t shared = 0;
  uint32_t shared_pages = 0;
  uint64_t own = 0;
  // Requests of one conversation have the same session; 0: none.
  uint64_t session = 0;
};

struct Trace {
  std::string name;
  uint32_t page_tokens = 0;
  std::vector<TraceRequest> requests;  // by arrival
  // The pages of request i are hashes[first_hash[i] .. first_hash[i + 1]).
  // Empty for synthetic traces.
  std::vector<uint64_t> hashes;
  std::vector<size_t> first_hash;

  // Replaces `pages` by the keys of the request's full pages: those of the
  // prompt, and with `output` also those of the output after it. The pages of
  // an output in a file are not known.
  void PagesOf(size_t request, bool output, std::vector<uint64_t>* pages) const;
};

struct TraceOptions {
  uint32_t page_tokens = 64;
  uint64_t requests = 100000;
  // The prompt tokens that arrive in a second, on average.
  double prompt_tokens_per_s = 1000.0;
  // The time of an output token and of a user who reads and writes.
  double token_s = 0.025;
  double think_s = 30.0;
  uint64_t seed = 1;
};

// chat: conversations of 1 to 20 turns (5 on average) with one of 16 system
//   prompts of 1,024 tokens. A turn is the conversation so far, a message of
//   about 100 tokens and an answer of about 200.
// few_shot: 64 tokens after one of 32 common prompts of 2,048; 32 tokens of
//   output.
// independent: prompts of about 1,024 tokens that share nothing.
// hot: half of the requests are those of `independent`. The others, of one
//   tenant, are one prompt of 8,192 tokens with 64 of their own.
// Returns INVALID_ARGUMENT for another name.
absl::StatusOr<Trace> MakeTrace(absl::string_view name,
                                const TraceOptions& options);
inline constexpr const char* kTraceNames[] = {"chat", "few_shot", "independent",
                                              "hot"};

// Reads a trace from a file of JSON objects, one on a line (the format of the
// public traces of Mooncake):
//   {"timestamp": 27482, "input_length": 6955, "output_length": 52,
//    "hash_ids": [46, 47, 2353]}
// timestamp: the arrival in milliseconds. hash_ids: a number for each page of
// the prompt; equal numbers mean equal pages after equal pages. Instead of
// input_length and hash_ids, an object may have "token_ids". "session_id", a
// text, is optional. Returns INVALID_ARGUMENT with the line's number if a line
// is wrong or a request arrives before the one above it.
absl::StatusOr<Trace> ReadTrace(const std::string& path, uint32_t page_tokens);

}  // namespace kvasir::bench
