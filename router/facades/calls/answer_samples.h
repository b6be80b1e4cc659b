// Code for the answers of all protocols: the order of the samples' responses,
// the samples' text, and the tokens that may end a sample.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "proto/kvasir/v1/sampling.pb.h"
#include "router/facades/text/text_codec.h"
#include "router/facades/text/text_stream.h"

namespace kvasir::router {

// The samples of an answer. Each response belongs to one sample, and this class
// decides which sample comes next. `Sample` must have `bool ended() const` and
// `bool has_output() const`.
// Threads: only one thread at a time may use it.
template <typename Sample>
class AnswerSamples {
 public:
  // If `streaming`, a sample has a response as soon as it has new output.
  // Otherwise each sample has a single response, after all samples have ended.
  AnswerSamples(uint32_t n, bool streaming)
      : streaming_(streaming),
        samples_(std::max<uint32_t>(1, n)),
        completed_(samples_.size()) {}

  Sample& operator[](size_t index) { return samples_[index]; }
  size_t size() const { return samples_.size(); }
  auto begin() { return samples_.begin(); }
  auto end() { return samples_.end(); }
  auto begin() const { return samples_.begin(); }
  auto end() const { return samples_.end(); }

  bool ended() const {
    return std::all_of(begin(), end(),
                       [](const Sample& sample) { return sample.ended(); });
  }
  bool HasResponse() const {
    if (!streaming_ && !ended()) return false;
    for (size_t i = 0; i < size(); ++i) {
      if (HasResponse(i)) return true;
    }
    return false;
  }
  // Returns the index of the sample that gives the next response. Samples take
  // turns. Precondition: HasResponse().
  uint32_t Next() {
    do {
      last_ = (last_ + 1) % static_cast<uint32_t>(size());
    } while (!HasResponse(last_));
    return last_;
  }
  // Call when the sample's last response has been taken.
  void Complete(size_t index) { completed_[index] = true; }
  bool complete() const {
    return std::all_of(completed_.begin(), completed_.end(),
                       [](bool completed) { return completed; });
  }

 private:
  bool HasResponse(size_t index) const {
    return !completed_[index] &&
           (samples_[index].has_output() || samples_[index].ended());
  }

  const bool streaming_;
  std::vector<Sample> samples_;
  std::vector<bool> completed_;
  uint32_t last_ = 0;
};

// Returns a text stream for a sample, whose text continues the text of the
// prompt. `Request` must have the members stop_strings, skip_special_tokens
// and sampling.
template <typename Request>
std::unique_ptr<TextStream> NewTextStream(const TextCodec& codec,
                                          std::span<const int32_t> prompt_ids,
                                          const Request& request,
                                          bool include_stop_string) {
  TextStreamOptions options;
  options.stop_strings = request.stop_strings;
  options.include_stop_string = include_stop_string;
  options.min_tokens = request.sampling.min_tokens();
  return std::make_unique<TextStream>(
      codec.NewDetokenizer(prompt_ids, request.skip_special_tokens),
      std::move(options));
}

// The set of tokens that may end a sample: the request's stop ids and, unless
// ignore_eos is set, the model's end-of-sequence ids.
class EndingIds {
 public:
  EndingIds(const kvasir::v1::SamplingParams& sampling,
            const std::vector<int32_t>& eos_ids)
      : ids_(sampling.stop_token_ids().begin(),
             sampling.stop_token_ids().end()) {
    if (sampling.ignore_eos()) return;
    ids_.insert(ids_.end(), eos_ids.begin(), eos_ids.end());
  }
  bool Contain(int32_t id) const {
    return std::find(ids_.begin(), ids_.end(), id) != ids_.end();
  }

 private:
  std::vector<int32_t> ids_;
};

// Returns true if `id` is one of the request's stop ids.
inline bool IsStopId(const kvasir::v1::SamplingParams& sampling, int32_t id) {
  const auto& ids = sampling.stop_token_ids();
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace kvasir::router
