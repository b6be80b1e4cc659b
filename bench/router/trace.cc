#include "bench/router/trace.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "nlohmann/json.hpp"
#include "router/policy/policy.h"
#include "router/policy/prefix_map.h"

namespace kvasir::bench {
namespace {

using router::MixBits;

class Generator {
 public:
  explicit Generator(const TraceOptions& options)
      : options_(options), random_(options.seed) {}

  double Exponential(double mean) { return -mean * std::log(1.0 - Uniform()); }
  uint32_t Tokens(double mean) {
    return 1 + static_cast<uint32_t>(Exponential(mean));
  }
  uint64_t Below(uint64_t end) { return random_() % end; }
  uint64_t NewName() { return MixBits(options_.seed, ++names_); }

 private:
  double Uniform() { return static_cast<double>(random_() >> 11) * 0x1.0p-53; }

  const TraceOptions& options_;
  std::mt19937_64 random_;
  uint64_t names_ = 0;
};

void AddChat(double start, Generator* random, const TraceOptions& options,
             std::vector<TraceRequest>* out) {
  constexpr uint32_t kSystemTokens = 1024;
  TraceRequest turn;
  turn.shared = MixBits(11, random->Below(16));
  turn.shared_pages = kSystemTokens / options.page_tokens;
  turn.own = turn.session = random->NewName();
  turn.arrival_s = start;
  uint32_t tokens = kSystemTokens;
  for (int i = 0; i < 20; ++i) {
    tokens += random->Tokens(100);
    turn.prompt_tokens = tokens;
    turn.output_tokens = random->Tokens(200);
    tokens += turn.output_tokens;
    out->push_back(turn);
    if (random->Below(5) == 0) break;
    turn.arrival_s += turn.output_tokens * options.token_s +
                      random->Exponential(options.think_s);
  }
}

void AddFewShot(double start, Generator* random, const TraceOptions& options,
                std::vector<TraceRequest>* out) {
  TraceRequest request;
  request.arrival_s = start;
  request.shared = MixBits(12, random->Below(32));
  request.shared_pages = 2048 / options.page_tokens;
  request.own = random->NewName();
  request.prompt_tokens = 2048 + 64;
  request.output_tokens = 32;
  out->push_back(request);
}

void AddIndependent(double start, Generator* random, const TraceOptions&,
                    std::vector<TraceRequest>* out) {
  TraceRequest request;
  request.arrival_s = start;
  request.own = random->NewName();
  request.prompt_tokens = random->Tokens(1024);
  request.output_tokens = random->Tokens(200);
  out->push_back(request);
}

void AddHot(double start, Generator* random, const TraceOptions& options,
            std::vector<TraceRequest>* out) {
  AddIndependent(start, random, options, out);
  if (random->Below(2) == 0) return;
  TraceRequest& request = out->back();
  request.shared = 13;
  request.shared_pages = 8192 / options.page_tokens;
  request.prompt_tokens = 8192 + 64;
}

struct Kind {
  absl::string_view name;
  void (*add)(double, Generator*, const TraceOptions&,
              std::vector<TraceRequest>*);
};
constexpr Kind kKinds[] = {{"chat", &AddChat},
                           {"few_shot", &AddFewShot},
                           {"independent", &AddIndependent},
                           {"hot", &AddHot}};

}  // namespace

void Trace::PagesOf(size_t request, bool output,
                    std::vector<uint64_t>* pages) const {
  pages->clear();
  if (!first_hash.empty()) {
    pages->assign(
        hashes.begin() + static_cast<ptrdiff_t>(first_hash[request]),
        hashes.begin() + static_cast<ptrdiff_t>(first_hash[request + 1]));
    return;
  }
  const TraceRequest& from = requests[request];
  const uint32_t tokens =
      from.prompt_tokens + (output ? from.output_tokens : 0);
  for (uint32_t i = 0; i < tokens / page_tokens; ++i) {
    pages->push_back(
        MixBits(i < from.shared_pages ? from.shared : from.own, i));
  }
}

absl::StatusOr<Trace> MakeTrace(absl::string_view name,
                                const TraceOptions& options) {
  const auto* const kind =
      std::find_if(std::begin(kKinds), std::end(kKinds),
                   [&](const Kind& each) { return each.name == name; });
  if (kind == std::end(kKinds)) {
    return absl::InvalidArgumentError(
        absl::StrCat("trace '", name, "' is unknown; use one of ",
                     absl::StrJoin(kTraceNames, ", ")));
  }
  // Measure how many tokens a conversation has, for the rate of conversations.
  std::vector<TraceRequest> sample;
  Generator sampler(options);
  constexpr int kSample = 20000;
  for (int i = 0; i < kSample; ++i) kind->add(0, &sampler, options, &sample);
  double tokens = 0;
  for (const TraceRequest& request : sample) tokens += request.prompt_tokens;
  const double conversations_per_s =
      options.prompt_tokens_per_s / (tokens / kSample);
  const double requests_per_s =
      conversations_per_s * static_cast<double>(sample.size()) / kSample;

  Trace trace;
  trace.name = std::string(name);
  trace.page_tokens = options.page_tokens;
  Generator random(options);
  const double end = static_cast<double>(options.requests) / requests_per_s;
  // The first conversations begin so early that the trace begins with turns of
  // all numbers.
  const double begin = -10 * (options.think_s + 200 * options.token_s);
  for (double start = begin; start < end;
       start += random.Exponential(1 / conversations_per_s)) {
    kind->add(start, &random, options, &trace.requests);
  }
  std::erase_if(trace.requests, [&](const TraceRequest& request) {
    return request.arrival_s < 0 || request.arrival_s >= end;
  });
  std::stable_sort(trace.requests.begin(), trace.requests.end(),
                   [](const TraceRequest& a, const TraceRequest& b) {
                     return a.arrival_s < b.arrival_s;
                   });
  return trace;
}

absl::StatusOr<Trace> ReadTrace(const std::string& path, uint32_t page_tokens) {
  std::ifstream file(path);
  if (!file) {
    return absl::NotFoundError(
        absl::StrCat("cannot open the trace '", path, "'"));
  }
  Trace trace;
  trace.name = path;
  trace.page_tokens = page_tokens;
  trace.first_hash.push_back(0);
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    if (line.empty()) continue;
    const auto wrong = [&](absl::string_view what) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ", line ", number, ": ", what));
    };
    TraceRequest request;
    try {
      const auto json = nlohmann::json::parse(line);
      request.arrival_s = json.at("timestamp").get<double>() / 1000;
      request.output_tokens = json.at("output_length").get<uint32_t>();
      if (json.contains("token_ids")) {
        const auto ids = json.at("token_ids").get<std::vector<uint32_t>>();
        request.prompt_tokens = static_cast<uint32_t>(ids.size());
        uint64_t key = 0;
        for (size_t i = 0; i < ids.size(); ++i) {
          key = MixBits(key, ids[i]);
          if ((i + 1) % page_tokens == 0) trace.hashes.push_back(key);
        }
      } else {
        request.prompt_tokens = json.at("input_length").get<uint32_t>();
        const auto ids = json.at("hash_ids").get<std::vector<uint64_t>>();
        const size_t pages = request.prompt_tokens / page_tokens;
        if (ids.size() < pages) {
          return wrong(absl::StrCat(request.prompt_tokens, " tokens have ",
                                    pages, " full pages of ", page_tokens,
                                    " (--page-tokens), but there are only ",
                                    ids.size(), " hash_ids"));
        }
        for (size_t i = 0; i < pages; ++i) {
          trace.hashes.push_back(MixBits(17, ids[i]));
        }
      }
      if (json.contains("session_id")) {
        request.session = std::max<uint64_t>(
            1, router::StableHash(json.at("session_id").get<std::string>()));
      }
    } catch (const nlohmann::json::exception& error) {
      return wrong(error.what());
    }
    if (request.prompt_tokens == 0) return wrong("the prompt is empty");
    if (!trace.requests.empty() &&
        request.arrival_s < trace.requests.back().arrival_s) {
      return wrong("the request arrives before the one above it");
    }
    trace.requests.push_back(request);
    trace.first_hash.push_back(trace.hashes.size());
  }
  if (trace.requests.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the trace '", path, "' has no requests"));
  }
  return trace;
}

}  // namespace kvasir::bench
